//! Saves: moments of machines at rest. A save is a manifest in the ledger; the contents that it names
//! are blobs; its directory, for the engine, consists of links to them.
//!
//! ```text
//!  stage ─▶ the engine writes ─▶ hash + fsync ─▶ blobs/HASH, fsync ─▶ saves/ID ─▶ manifest in the ledger
//! ```
//!
//! - A save is there while something pins it: a row of the ledger that names it (a sandbox, a snapshot, a pool, a step of a
//!   build), or a reader with a [`LocalSave`]. A release that comes meanwhile is done when the last reader is gone.
//! - A blob is there while a manifest names it.
//! - A save is read whole and compared with its manifest before its first use by this daemon;
//!   afterwards a few `stat`s tell that its files are the same ones still.

mod blobs;
mod content;
mod diff;
mod layer;
mod manifest;
mod pins;
pub(crate) mod snapshot_file;
mod spot;
mod tree;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::io::AsyncRead;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use torpor_lifecycle::engine::Changes;
use torpor_lifecycle::fault;
use torpor_lifecycle::store::{
    self, LAYER_FILE, LocalSave, Manifest, MemorySave, PinOwner, SaveAbout, Staged, StoreError,
};
use torpor_protocol::SaveId;
use torpor_protocol::snapshot::{SnapshotKind, Verified};

use crate::images::blocking;
use crate::layout::{Layout, Stage};
use crate::ledger::Ledger;
use blobs::Blobs;
use content::{Digest, Hashes};
use manifest::{Known, Reading, Sealed};
use pins::Slot;

pub use layer::LayerChanges;
pub use snapshot_file::Imported;
pub use spot::TreeError;
pub use tree::{SavedTree, Walked, WalkedKind};

/// Gives way to everybody.
const NICEST: i32 = 19;

/// All saves of a data directory. Cloning gives another handle.
#[derive(Debug, Clone)]
pub struct Saves {
    shared: Arc<Shared>,
}

struct Shared {
    layout: Arc<Layout>,
    ledger: Ledger,
    /// One for every save that was used; it goes with its save.
    slots: Mutex<HashMap<SaveId, Arc<Slot>>>,
    blobs: Blobs,
    /// Saves share files: what one machine begins from, others begin from too.
    hashes: Hashes,
    /// For work that a dropped pin leaves.
    runtime: Handle,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Saves").field("root", &self.layout.root()).finish_non_exhaustive()
    }
}

/// A directory for a save in the making.
struct StagedSave {
    stage: Option<Stage>,
}

impl Staged for StagedSave {
    fn path(&self) -> &Path {
        self.stage.as_ref().expect("it is only taken out of a value that ends").path()
    }

    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any> {
        self
    }
}

impl Drop for StagedSave {
    fn drop(&mut self) {
        if let Some(stage) = self.stage.take() {
            // An engine that was told to stop may still write.
            stage.abandon();
        }
    }
}

impl Saves {
    /// Opens the saves of a data directory and removes those that nothing names. To be called on a
    /// runtime that outlives every [`LocalSave`].
    pub async fn open(layout: Arc<Layout>, ledger: Ledger) -> Result<Self, StoreError> {
        let blobs = Blobs::new(Arc::clone(&layout));
        let (slots, hashes) = (Mutex::default(), Hashes::default());
        let runtime = Handle::current();
        let shared = Arc::new(Shared { layout, ledger, slots, blobs, hashes, runtime });
        let saves = Self { shared };
        saves.sweep().await?;
        Ok(saves)
    }

    /// Reads every byte of a save from disk and compares it with what was committed.
    pub async fn verify(&self, id: &SaveId) -> Result<Verified, StoreError> {
        let shared = self.shared.clone();
        let fresh = |id, dir: PathBuf, manifest| {
            blocking(move || shared.check(&id, &dir, manifest, Reading::Fresh))
        };
        let manifest = self.shared.read(id, fresh).await?;
        let bytes = manifest.files.iter().map(|file| file.bytes).sum();
        Ok(Verified { files: manifest.files.len(), bytes })
    }

    /// Bytes of all saves on disk; what several have counts once.
    pub async fn bytes(&self) -> Result<u64, StoreError> {
        self.shared.ledger.save_bytes().await
    }

    /// Reads every save that this daemon has not read yet, one after the other and only when nobody
    /// else wants the processor, so that later wakes need not. What is corrupt is logged.
    pub async fn warm_up(&self) {
        let ids = match self.shared.ledger.save_ids().await {
            Ok(ids) => ids,
            Err(error) => return tracing::warn!(%error, "saves are not read ahead"),
        };
        for id in ids {
            if self.shared.is_known(&id) {
                continue;
            }
            match self
                .shared
                .read(&id, |id, dir, manifest| self.shared.read_at_low_priority(id, dir, manifest))
                .await
            {
                Ok(_) | Err(StoreError::NoSuchSave(_)) => {}
                Err(error) => tracing::warn!(save = %id, %error, "a save can't be used"),
            }
        }
    }

    /// Commits in a task of its own: if the caller goes away, the save goes too.
    async fn commit_stage(
        &self,
        stage: Stage,
        about: SaveAbout,
    ) -> Result<Arc<LocalSave>, StoreError> {
        let (sender, receiver) = oneshot::channel();
        let shared = self.shared.clone();
        tokio::spawn(async move {
            let result = shared.place(stage, about).await;
            if let Err(Ok(save)) = sender.send(result) {
                let id = save.id.clone();
                drop(save);
                shared.remove(&id).await;
            }
        });
        receiver.await.map_err(StoreError::failed("commit a save"))?
    }

    /// Removes what a crash left: manifests that nothing pins, directories without a manifest, and
    /// blobs that no manifest names.
    async fn sweep(&self) -> Result<(), StoreError> {
        let shared = self.shared.clone();
        shared.ledger.drop_unpinned_saves().await?;
        let ids = shared.ledger.save_ids().await?;
        let named = shared.ledger.blobs().await?;
        let keep: HashSet<_> = ids.iter().map(|id| shared.layout.save(id)).collect();
        blocking(move || {
            let found = std::fs::read_dir(shared.layout.saves())
                .map_err(crate::files::failed("list the saves"))?;
            let mut removed = Vec::new();
            for entry in found.flatten().filter(|entry| !keep.contains(&entry.path())) {
                let path = entry.path();
                tracing::info!(path = %path.display(), "removing a save nothing names");
                match shared.layout.unplace(&path) {
                    Ok(stage) => removed.push(stage),
                    Err(error) => {
                        tracing::warn!(path = %path.display(), %error, "a save stays");
                    }
                }
            }
            // Nobody waits for their bytes to be given back.
            std::thread::spawn(move || drop(removed));
            shared.blobs.sweep(&named)
        })
        .await
    }
}

#[async_trait]
impl store::Saves for Saves {
    async fn stage(&self) -> Result<Box<dyn Staged>, StoreError> {
        let shared = self.shared.clone();
        let stage = blocking(move || shared.layout.stage()).await?;
        Ok(Box::new(StagedSave { stage: Some(stage) }))
    }

    async fn commit(
        &self,
        staged: Box<dyn Staged>,
        about: SaveAbout,
    ) -> Result<Arc<LocalSave>, StoreError> {
        let stage = staged_here(staged)?;
        self.commit_stage(stage, about).await
    }

    async fn materialize(&self, id: &SaveId) -> Result<Arc<LocalSave>, StoreError> {
        self.shared.materialize(id).await
    }

    async fn manifest(&self, id: &SaveId) -> Result<Manifest, StoreError> {
        self.shared.manifest(id).await
    }

    async fn memory_saves(&self) -> Result<Vec<MemorySave>, StoreError> {
        self.shared.ledger.memory_saves().await
    }

    async fn layer(
        &self,
        save: &LocalSave,
    ) -> Result<Box<dyn AsyncRead + Send + Unpin>, StoreError> {
        let path = save.dir.join(LAYER_FILE);
        let file = blocking(move || {
            content::open(&path).map_err(crate::files::failed("open the files of a save"))
        });
        Ok(Box::new(tokio::fs::File::from_std(file.await?)))
    }

    async fn pins(&self, id: &SaveId) -> Result<Vec<PinOwner>, StoreError> {
        let mut pins = self.shared.ledger.save_pins(id).await?;
        let slot = self.shared.slots.lock().get(id).cloned();
        if slot.is_some_and(|slot| slot.readers() > 0) {
            pins.push(PinOwner::Reader);
        }
        Ok(pins)
    }

    async fn release(&self, id: &SaveId) {
        self.shared.remove(id).await;
    }

    async fn files_of(
        &self,
        save: &LocalSave,
        changes: Box<dyn Changes>,
    ) -> Result<Arc<LocalSave>, StoreError> {
        let about = SaveAbout {
            kind: SnapshotKind::Filesystem,
            // It boots, from whatever file its image has then.
            root: None,
            processes: Vec::new(),
            held: Vec::new(),
            ..save.manifest.about.clone()
        };
        let (shared, room) = (self.shared.clone(), about.spec.resources.disk_bytes());
        let stage = blocking(move || {
            let stage = shared.layout.stage()?;
            layer::write_file(&stage.path().join(LAYER_FILE), &*changes, room)?;
            Ok(stage)
        })
        .await?;
        self.commit_stage(stage, about).await
    }
}

fn staged_here(staged: Box<dyn Staged>) -> Result<Stage, StoreError> {
    let foreign = || StoreError::Invalid("the directory was not staged by this store".to_owned());
    let mut staged = staged.into_any().downcast::<StagedSave>().map_err(|_| foreign())?;
    staged.stage.take().ok_or_else(foreign)
}

impl Shared {
    /// Makes blobs of a stage, and records the manifest that names them, in this order: a crash in
    /// between leaves what start-up removes.
    async fn place(
        self: &Arc<Self>,
        stage: Stage,
        about: SaveAbout,
    ) -> Result<Arc<LocalSave>, StoreError> {
        let shared = self.clone();
        let sealed = blocking(move || manifest::seal(stage, about, &shared.hashes)).await?;
        let hashes = sealed.manifest.files.iter().map(|file| file.hash.clone()).collect();
        let id = SaveId::random();
        match self.add(&id, sealed).await {
            Ok(known) => {
                let slot = self.slot(&id);
                let mut slot_known = slot.known.lock().await;
                let save = self.pinned(&id, &slot, known.manifest.clone());
                *slot_known = Some(Arc::new(known));
                Ok(save)
            }
            Err(error) => {
                self.discard(&id, hashes).await;
                Err(error)
            }
        }
    }

    async fn add(self: &Arc<Self>, id: &SaveId, sealed: Sealed) -> Result<Known, StoreError> {
        let _adding = self.blobs.adding().await;
        let (shared, dir) = (self.clone(), self.layout.save(id));
        let (known, stored) = blocking(move || {
            let known = sealed.place(&dir, &shared.blobs, &shared.hashes)?;
            Ok((known, sealed.stored))
        })
        .await?;
        fault::point("commit.placed");
        self.ledger.commit_save(id, &known.manifest, &stored).await?;
        Ok(known)
    }

    fn check(
        &self,
        id: &SaveId,
        dir: &Path,
        manifest: Manifest,
        reading: Reading,
    ) -> Result<Known, StoreError> {
        manifest::check(id, dir, manifest, reading, (&self.blobs, &self.hashes))
    }

    async fn materialize(self: &Arc<Self>, id: &SaveId) -> Result<Arc<LocalSave>, StoreError> {
        let slot = self.slot_of(id).await?;
        let mut known = slot.known.lock().await;
        // It may have been removed while this waited.
        let manifest = match known.as_ref() {
            Some(known) => known.manifest.clone(),
            None => self.manifest(id).await?,
        };
        let (before, dir, owned) = (known.clone(), self.layout.save(id), id.clone());
        let shared = self.clone();
        let found =
            blocking(move || match before.filter(|known| known.holds(&dir, &shared.blobs)) {
                Some(known) => Ok(known),
                None => shared.check(&owned, &dir, manifest, Reading::Cached).map(Arc::new),
            });
        let found = match found.await {
            Ok(found) => found,
            Err(error) => {
                *known = None;
                return Err(error);
            }
        };
        let save = self.pinned(id, &slot, found.manifest.clone());
        *known = Some(found);
        Ok(save)
    }

    /// Reads all of a save, with its slot locked only before and after: whoever wants to use it
    /// meanwhile need not wait for somebody who is in no hurry.
    async fn read<F: Future<Output = Result<Known, StoreError>>>(
        self: &Arc<Self>,
        id: &SaveId,
        read: impl FnOnce(SaveId, PathBuf, Manifest) -> F,
    ) -> Result<Manifest, StoreError> {
        let slot = self.slot_of(id).await?;
        let (_pin, manifest) = {
            let _turn = slot.known.lock().await;
            let manifest = self.manifest(id).await?;
            (pins::pin(self, id, &slot), manifest)
        };
        let found = read(id.clone(), self.layout.save(id), manifest.clone()).await;
        let mut known = slot.known.lock().await;
        match found {
            Ok(found) => *known = Some(Arc::new(found)),
            Err(error) => {
                *known = None;
                return Err(error);
            }
        }
        Ok(manifest)
    }

    /// Reads a save on a thread that gives way to all others.
    async fn read_at_low_priority(
        self: &Arc<Self>,
        id: SaveId,
        dir: PathBuf,
        manifest: Manifest,
    ) -> Result<Known, StoreError> {
        let (sender, receiver) = oneshot::channel();
        let shared = self.clone();
        std::thread::spawn(move || {
            // For this thread and those it starts, which is why it is not one of the runtime's.
            let _ = rustix::process::nice(NICEST);
            drop(sender.send(shared.check(&id, &dir, manifest, Reading::Cached)));
        });
        receiver.await.map_err(StoreError::failed("read a save ahead"))?
    }

    /// Removes a save unless something pins it.
    async fn remove(self: &Arc<Self>, id: &SaveId) {
        let slot = self.slot(id);
        let mut known = slot.known.lock().await;
        if slot.is_read() {
            return;
        }
        let hashes = match self.ledger.drop_save(id).await {
            Ok(Some(hashes)) => hashes,
            Ok(None) => return,
            Err(error) => {
                // Nothing pins it, so it goes at the next start.
                return tracing::warn!(save = %id, %error, "save not removed before a restart");
            }
        };
        fault::point("remove.dropped");
        *known = None;
        self.slots.lock().remove(id);
        self.discard(id, hashes).await;
    }

    /// The directory of a save without a manifest, and its blobs that no other has; what is not there
    /// is fine. Giving back its bytes takes a while, and nobody need wait for that.
    async fn discard(self: &Arc<Self>, id: &SaveId, hashes: Vec<String>) {
        let (layout, dir) = (self.layout.clone(), self.layout.save(id));
        let unplaced = blocking(move || match dir.symlink_metadata() {
            Ok(_) => layout.unplace(&dir).map(Some),
            Err(_) => Ok(None),
        });
        let unplaced = unplaced.await;
        let collected = self.collect(hashes).await;
        match unplaced {
            Ok(stage) => drop(tokio::task::spawn_blocking(move || drop(stage))),
            Err(error) => tracing::warn!(save = %id, %error, "files of a removed save stay"),
        }
        if let Err(error) = collected {
            tracing::warn!(save = %id, %error, "blobs of a removed save stay");
        }
    }

    /// Removes those blobs that no manifest names.
    async fn collect(self: &Arc<Self>, hashes: Vec<String>) -> Result<(), StoreError> {
        let _removing = self.blobs.removing().await;
        let mut unnamed: Vec<Digest> = Vec::new();
        for hash in hashes {
            if !self.ledger.names_blob(&hash).await? {
                unnamed.extend(hash.parse::<Digest>().ok());
            }
        }
        let shared = self.clone();
        blocking(move || {
            shared.blobs.remove(&unnamed);
            Ok(())
        })
        .await
    }

    async fn manifest(&self, id: &SaveId) -> Result<Manifest, StoreError> {
        let text = self.ledger.save(id).await?;
        let text = text.ok_or_else(|| StoreError::NoSuchSave(id.to_string()))?;
        manifest::parse(&format!("save {id}"), text.as_bytes())
    }

    fn slot(&self, id: &SaveId) -> Arc<Slot> {
        self.slots.lock().entry(id.clone()).or_default().clone()
    }

    /// Only saves that exist get a slot, so asking for others costs no memory.
    async fn slot_of(&self, id: &SaveId) -> Result<Arc<Slot>, StoreError> {
        let slot = self.slots.lock().get(id).cloned();
        if let Some(slot) = slot {
            return Ok(slot);
        }
        self.manifest(id).await?;
        Ok(self.slot(id))
    }

    /// Whether it was read already.
    fn is_known(&self, id: &SaveId) -> bool {
        let slot = self.slots.lock().get(id).cloned();
        slot.is_some_and(|slot| slot.known.try_lock().is_ok_and(|known| known.is_some()))
    }

    fn pinned(
        self: &Arc<Self>,
        id: &SaveId,
        slot: &Arc<Slot>,
        manifest: Manifest,
    ) -> Arc<LocalSave> {
        let pin = pins::pin(self, id, slot);
        Arc::new(LocalSave { id: id.clone(), dir: self.layout.save(id), manifest, pin })
    }
}

//! Images: read-only root filesystems, one EROFS file each, shared by all sandboxes.
//!
//! ```text
//!  tar ────┐   staged tree        id          root file        images/ID/  ledger row
//!  layers ─┼─▶ (limits, no   ──▶ (describe) ─▶ (agent added, ──▶ fsync,  ─▶ = committed
//!  EROFS ──┘    devices)                        mkfs.erofs)      rename
//! ```
//!
//! - The id is a hash of tree and configuration, without the agent: importing the same thing twice
//!   gives one image, and a new agent gives the same image another root file (`root` sees to it).
//! - A root file is read whole and compared with its hash before its first use by this daemon, and
//!   glanced at before every further use.

mod base;
pub(crate) mod blobs;
mod config;
mod describe;
mod erofs;
mod export;
mod held;
pub(crate) mod import;
mod layer;
mod layered;
mod layers;
pub(crate) mod limits;
mod name;
pub(crate) mod path;
mod progress;
mod prune;
mod pulled;
pub(crate) mod reader;
pub(crate) mod sparse;
mod stream;
pub(crate) mod tarball;
pub(crate) mod tree;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;
use torpor_lifecycle::ledger::{PAGE, Place, everything};
use torpor_lifecycle::store::{self, RootImage, StoreError};
use torpor_protocol::ImageId;

use crate::files;
use crate::layout::{Layout, Stage};
use crate::ledger::{ImageRow, LayerFacts, Ledger, Removed, Unused};
use erofs::Expected;

pub use base::BASE_NAME;
pub use config::ImageConfig;
pub use export::Exported;
pub use held::HeldImage;
pub use import::{Built, Layered};
pub use layers::{Layers, PinnedLayer};
pub use limits::Limits;
pub use name::ImageName;
pub use progress::{OnProgress, Progress, Step};
pub use prune::Pruned;
pub use pulled::{Pulled, PulledLayer};

/// Archives taken apart within limits, for builds.
pub mod archive {
    pub use super::stream::plain;
    pub use super::tarball::{Body, Entry, EntryKind, Tarball};
    pub use super::tree::Meta;
}

/// Shortest beginning of an id that may stand for it.
const PREFIX_MIN: usize = 12;

/// Raised when what we add to a tree, other than the agent, or the way it is packed changes: then all
/// root files are made anew, as for a new agent.
const PACKING: &[u8] = b"packing 2\n";

/// An image as people see it.
#[derive(Debug, Clone, PartialEq)]
pub struct Image {
    pub id: ImageId,
    /// Sorted; an image whose names all moved on has none.
    pub names: Vec<String>,
    pub config: ImageConfig,
    /// Of the root file.
    pub size_bytes: u64,
    /// What it was pulled as.
    pub layers: LayerFacts,
    pub created_at_ms: u64,
}

/// All images of a data directory. Cloning gives another handle.
#[derive(Clone)]
pub struct Images {
    shared: Arc<Shared>,
}

struct Shared {
    layout: Arc<Layout>,
    ledger: Ledger,
    agent: &'static [u8],
    agent_hash: String,
    limits: Limits,
    /// Root files that this daemon has verified; each behind a lock, so that one caller verifies
    /// (or gives it the present agent) while the others wait.
    verified: Mutex<HashMap<ImageId, Arc<Verified>>>,
    /// Held while files and ledger are brought to agree.
    commit: tokio::sync::Mutex<()>,
    /// Held while the default image is built.
    base: tokio::sync::Mutex<()>,
    layers: Layers,
    /// Images that somebody works with, and how many do.
    held: Mutex<HashMap<ImageId, usize>>,
}

type Verified = tokio::sync::Mutex<Option<ImageRow>>;

impl Images {
    /// Opens the images of a data directory and removes what no committed image refers to.
    pub async fn open(
        layout: Arc<Layout>,
        ledger: Ledger,
        agent: &'static [u8],
    ) -> Result<Self, StoreError> {
        Self::open_with(layout, ledger, agent, Limits::default()).await
    }

    /// [`Images::open`] with other limits for imports.
    pub async fn open_with(
        layout: Arc<Layout>,
        ledger: Ledger,
        agent: &'static [u8],
        limits: Limits,
    ) -> Result<Self, StoreError> {
        let shared = Shared {
            layers: Layers::new(layout.layers()),
            layout,
            ledger,
            agent,
            agent_hash: blake3::hash(&[PACKING, agent].concat()).to_hex().to_string(),
            limits,
            verified: Mutex::default(),
            commit: tokio::sync::Mutex::default(),
            base: tokio::sync::Mutex::default(),
            held: Mutex::default(),
        };
        let images = Self { shared: Arc::new(shared) };
        images.sweep().await?;
        Ok(images)
    }

    /// Layers of registries, for whoever fetches them.
    pub fn layers(&self) -> &Layers {
        &self.shared.layers
    }

    /// A directory for work in progress, beside where images are made.
    pub fn stage(&self) -> Result<Stage, StoreError> {
        self.shared.layout.stage()
    }

    /// Where cache mounts of builds are kept; it may not be there yet.
    pub fn build_mounts(&self) -> PathBuf {
        self.shared.layout.build_mounts()
    }

    /// At most `limit` images after this place, oldest first.
    pub async fn list(
        &self,
        after: Option<&Place<ImageId>>,
        limit: usize,
    ) -> Result<Vec<Image>, StoreError> {
        let rows = self.shared.ledger.images(after, limit).await?;
        Ok(rows.into_iter().map(Image::from).collect())
    }

    /// All images, read by pages; oldest first.
    pub async fn all(&self) -> Result<Vec<Image>, StoreError> {
        let page =
            |after: Option<Place<ImageId>>| async move { self.list(after.as_ref(), PAGE).await };
        everything(page, |image| (image.created_at_ms, image.id.clone())).await
    }

    /// One image, by name, id or the beginning of its id.
    pub async fn inspect(&self, reference: &str) -> Result<Image, StoreError> {
        let id = self.resolve(reference).await?;
        let row = self.shared.ledger.image(&id).await?;
        row.map(Image::from).ok_or_else(|| StoreError::NoSuchImage(reference.to_owned()))
    }

    /// The image that a text means: a name, an id, or at least 12 digits an id begins with.
    pub async fn resolve(&self, reference: &str) -> Result<ImageId, StoreError> {
        Ok(self.find(reference).await?.0)
    }

    /// Gives an image one more name; another image may lose it.
    pub async fn tag(&self, reference: &str, name: &ImageName) -> Result<(), StoreError> {
        let id = self.resolve(reference).await?;
        self.shared.ledger.name_image(name.as_str(), &id).await
    }

    /// Removes an image, or only the name if it has others. Refused while a sandbox needs it.
    pub async fn remove(&self, reference: &str) -> Result<(), StoreError> {
        let (id, name) = self.find(reference).await?;
        let _turn = self.shared.commit.lock().await;
        let name = name.as_ref().map(ImageName::as_str);
        match self.shared.ledger.remove_image(&id, name).await? {
            Removed::Name => return Ok(()),
            Removed::Image => {}
        }
        self.discard_files(&id).await;
        Ok(())
    }

    /// The files of an image that the ledger does not know any more.
    async fn discard_files(&self, id: &ImageId) {
        self.shared.verified.lock().remove(id);
        let dir = self.shared.layout.image(id);
        let removed = blocking(move || {
            files::remove_tree(&dir).map_err(files::failed("remove the files of an image"))
        });
        if let Err(error) = removed.await {
            // It is gone for everybody; the files go at the next start.
            tracing::warn!(image = %id, %error, "files of a removed image stay for now");
        }
    }

    /// Reads the whole root file and compares it with what was committed.
    pub async fn verify(&self, reference: &str) -> Result<(), StoreError> {
        let id = self.resolve(reference).await?;
        let row = self.row(&id).await?;
        self.check(&row, Expected::verify).await
    }

    /// The image, and the name if it was found by one.
    async fn find(&self, reference: &str) -> Result<(ImageId, Option<ImageName>), StoreError> {
        let missing = || StoreError::NoSuchImage(reference.chars().take(200).collect());
        if let Ok(name) = reference.parse::<ImageName>() {
            if let Some(id) = self.shared.ledger.image_by_name(name.as_str()).await? {
                return Ok((id, Some(name)));
            }
            if let Some(id) = self.shared.ledger.image_by_digest(name.as_str()).await? {
                return Ok((id, None));
            }
        }
        let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if !(PREFIX_MIN..=64).contains(&reference.len()) || !reference.bytes().all(hex) {
            return Err(missing());
        }
        match self.shared.ledger.images_by_prefix(reference).await?.as_slice() {
            [] => Err(missing()),
            [id] => Ok((id.clone(), None)),
            [..] => Err(StoreError::Invalid(format!(
                "several images have an id that starts with {reference}: give more digits"
            ))),
        }
    }

    async fn row(&self, id: &ImageId) -> Result<ImageRow, StoreError> {
        let row = self.shared.ledger.image(id).await?;
        row.ok_or_else(|| StoreError::NoSuchImage(id.to_string()))
    }

    fn expected(&self, row: &ImageRow) -> Expected {
        Expected { path: self.path_of(row), bytes: row.file_bytes, hash: row.file_hash.clone() }
    }

    fn path_of(&self, row: &ImageRow) -> PathBuf {
        self.shared.layout.image(&row.id).join(&row.file)
    }

    async fn check(
        &self,
        row: &ImageRow,
        how: impl FnOnce(&Expected) -> Result<(), String> + Send + 'static,
    ) -> Result<(), StoreError> {
        let expected = self.expected(row);
        let id = row.id.to_string();
        blocking(move || how(&expected).map_err(|detail| StoreError::CorruptImage { id, detail }))
            .await
    }

    /// A root file that was verified by this daemon and has the present agent.
    async fn usable(&self, id: &ImageId) -> Result<ImageRow, StoreError> {
        let slot = self.shared.verified.lock().get(id).cloned();
        let slot = match slot {
            Some(slot) => slot,
            None => {
                // Only ids that exist get an entry, so asking for others costs no memory.
                self.row(id).await?;
                self.shared.verified.lock().entry(id.clone()).or_default().clone()
            }
        };
        let mut verified = slot.lock().await;
        if let Some(row) = verified.as_ref() {
            if let Err(error) = self.check(row, Expected::glance).await {
                *verified = None;
                return Err(error);
            }
            return Ok(row.clone());
        }
        let mut row = self.row(id).await?;
        self.check(&row, Expected::verify).await?;
        if row.agent_hash != self.shared.agent_hash {
            row = self.renew(row).await?;
        }
        *verified = Some(row.clone());
        Ok(row)
    }

    /// Which agent is in the root file that machines of an image get.
    pub(crate) async fn agent_hash(&self, id: &ImageId) -> Result<String, StoreError> {
        Ok(self.usable(id).await?.agent_hash)
    }

    /// Removes directories without a row, and files that neither their row nor a saved machine names.
    async fn sweep(&self) -> Result<(), StoreError> {
        let rows = self.all().await?;
        let known: HashSet<_> = rows.iter().map(|row| self.shared.layout.image(&row.id)).collect();
        let images = self.shared.layout.images();
        blocking(move || discard_others(&images, &known)).await?;
        for row in rows {
            self.sweep_files(&row.id).await?;
        }
        self.sweep_layers().await
    }

    async fn sweep_files(&self, id: &ImageId) -> Result<(), StoreError> {
        let dir = self.shared.layout.image(id);
        let files = self.shared.ledger.roots_in_use(id).await?;
        let mut keep: HashSet<_> = files.iter().map(|file| dir.join(file)).collect();
        keep.insert(self.path_of(&self.row(id).await?));
        blocking(move || discard_others(&dir, &keep)).await
    }
}

#[async_trait]
impl store::Images for Images {
    async fn root(&self, id: &ImageId) -> Result<RootImage, StoreError> {
        let row = self.usable(id).await?;
        Ok(self.root_of(row))
    }

    async fn root_file(&self, id: &ImageId, file: &str) -> Result<RootImage, StoreError> {
        let row = self.row(id).await?;
        if row.file == file {
            return store::Images::root(self, id).await;
        }
        let old = ImageRow { file: file.to_owned(), ..row };
        let path = self.path_of(&old);
        let there = path.parent() == Some(&*self.shared.layout.image(id)) && path.is_file();
        if !there {
            let detail = format!("a saved machine needs its file {file}, which is gone");
            return Err(StoreError::CorruptImage { id: id.to_string(), detail });
        }
        Ok(self.root_of(old))
    }
}

impl Images {
    fn root_of(&self, row: ImageRow) -> RootImage {
        RootImage {
            path: self.path_of(&row),
            file: row.file,
            env: row.config.env,
            user: row.config.user,
            workdir: row.config.workdir,
        }
    }
}

impl From<ImageRow> for Image {
    fn from(row: ImageRow) -> Self {
        let ImageRow { id, names, config, file_bytes, created_at_ms, layers, .. } = row;
        Self { id, names, config, size_bytes: file_bytes, created_at_ms, layers }
    }
}

/// Removes what is in a directory, but for these paths. One that is not there is fine.
fn discard_others(dir: &Path, keep: &HashSet<PathBuf>) -> Result<(), StoreError> {
    let found = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        found => found.map_err(files::failed("list the images"))?,
    };
    for path in found.flatten().map(|entry| entry.path()).filter(|path| !keep.contains(path)) {
        discard(&path);
    }
    Ok(())
}

fn discard(path: &Path) {
    tracing::info!(path = %path.display(), "removing an uncommitted image");
    if let Err(error) = files::remove_tree(path) {
        tracing::warn!(path = %path.display(), %error, "an uncommitted image was not removed");
    }
}

/// Work that blocks, away from the threads that must not.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(StoreError::failed("finish work in the store")(error)),
    }
}

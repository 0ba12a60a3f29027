//! Volumes and drives on this host: an image each, mounted while somebody has it.
//!
//! ```text
//!  DIR/ID/image.ext4      one volume; its row in the ledger is written last, and erased first
//!  DIR/ID/key             of handles that guests have
//!  DIR/stage-XXXX/        work in progress; removed at start
//!  RUNTIME/ID/            where it is mounted
//! ```
//!
//! Invariants
//! - After `kill -9` at any line, each volume that was acknowledged is there, whole, and whatever no row names is swept
//!   away at the next start.
//! - One turn per volume: mounting, copying, growing and removing never overlap.
//! - A volume is unmounted only when nobody here holds it; what a machine has mounted of it by itself stays, and
//!   the same filesystem is found again.

mod moments;
mod mounts;
mod serve;
mod stage;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use async_trait::async_trait;
use parking_lot::Mutex;
use rustix::fs::FileType;
use rustix::io::Errno;
use torpor_disk::{VolumeImage, directory};
use torpor_files::Volume as Files;
use torpor_lifecycle::fault;
use torpor_lifecycle::guest::FileServer;
use torpor_lifecycle::ledger::{FleetLedger, everything};
use torpor_lifecycle::store::{OpenVolume, StoreError, VolumeRecord, Volumes};
use torpor_protocol::guest::HeldPath;
use torpor_protocol::guest::files::Owner;
use torpor_protocol::volume::{Attachment, VOLUME_MIN_MIB};
use torpor_protocol::{GuestPath, SandboxId, VolumeId, VolumeRef};

use mounts::Use;
use stage::Stage;

/// The name of the filesystem in a volume's directory.
const IMAGE: &str = "image.ext4";
/// Volumes of the ledger that are read at once.
const PAGE: usize = 500;
/// Largest size: that of ext4's largest file. More is a mistake in units.
pub const VOLUME_MAX_MIB: u64 = 16 << 20;

/// Where volumes are.
#[derive(Debug, Clone)]
pub struct Dirs {
    /// In the data directory.
    pub images: PathBuf,
    /// Where they are mounted: gone with the host's start.
    pub mounts: PathBuf,
}

impl Dirs {
    /// As the kernel names them, which follows links.
    fn made(self) -> io::Result<Self> {
        directory::private(&self.images)?;
        directory::private(&self.mounts)?;
        Ok(Self { images: self.images.canonicalize()?, mounts: self.mounts.canonicalize()? })
    }
}

/// All volumes and drives of an installation. Cloning gives another handle.
#[derive(Clone)]
pub struct VolumeStore {
    inner: Arc<Inner>,
}

struct Inner {
    dirs: Dirs,
    ledger: Arc<dyn FleetLedger>,
    /// Of volumes that somebody asked for since the start.
    uses: Mutex<HashMap<VolumeId, Arc<Use>>>,
    /// From then on volumes stay as they are.
    closed: AtomicBool,
}

/// What there is to know of a volume's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    pub used_bytes: Option<u64>,
    pub stored_bytes: u64,
}

impl VolumeStore {
    /// Takes over what an earlier daemon left, and sweeps away what no row names. Nothing that a machine uses is
    /// touched: it has mounts of its own.
    pub async fn open(dirs: Dirs, ledger: Arc<dyn FleetLedger>) -> Result<Self, StoreError> {
        let dirs = blocking("make the directories of volumes", move || dirs.made()).await?;
        let store = Self {
            inner: Arc::new(Inner {
                dirs,
                ledger,
                uses: Mutex::default(),
                closed: AtomicBool::new(false),
            }),
        };
        let ledger = &store.inner.ledger;
        let place = |record: &VolumeRecord| (record.created_at_ms, record.id.clone());
        let page = async |after: Option<_>| ledger.volumes(None, after.as_ref(), PAGE).await;
        let mut known = everything(page, place).await?;
        for copy in known.extract_if(.., |record| record.made_for.is_some()).collect::<Vec<_>>() {
            if !store.forgotten(&copy).await? {
                known.push(copy);
            }
        }
        let swept = Self::clone(&store);
        blocking("sweep the volumes", move || swept.sweep(&known)).await?;
        Ok(store)
    }

    /// Whether a copy was made for a sandbox that is not there, and is gone now.
    async fn forgotten(&self, copy: &VolumeRecord) -> Result<bool, StoreError> {
        let ledger = &self.inner.ledger;
        if copy.elsewhere.is_some() {
            // Its node knows.
            return Ok(false);
        }
        if let Some(sandbox) = &copy.made_for
            && ledger.find_sandbox(sandbox).await?.is_some()
        {
            return Ok(false);
        }
        match ledger.erase_volume(&copy.id).await {
            Ok(_) => Ok(true),
            Err(StoreError::InUse { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn sweep(&self, known: &[VolumeRecord]) -> io::Result<()> {
        let Dirs { images, mounts } = &self.inner.dirs;
        // Also what is still known: it is mounted again, and thawed, when somebody asks for it.
        for mount in torpor_disk::mountinfo::read()?.into_iter().rev() {
            let Ok(name) = mount.point.strip_prefix(mounts) else { continue };
            let image = VolumeImage::at(&images.join(name).join(IMAGE), &mount.point);
            if let Err(error) = image.thaw().and_then(|()| image.unmount()) {
                tracing::warn!(volume = %name.display(), %error, "a volume stays mounted");
            }
        }
        for entry in std::fs::read_dir(images)? {
            let entry = entry?;
            let name = entry.file_name();
            if !known.iter().any(|record| name == record.id.as_str()) {
                tracing::info!(name = %name.display(), "what no volume needs is removed");
                std::fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    }

    /// All that is kept of it.
    fn directory(&self, id: &VolumeId) -> PathBuf {
        self.inner.dirs.images.join(id.as_str())
    }

    fn image(&self, id: &VolumeId) -> VolumeImage {
        let mountpoint = self.inner.dirs.mounts.join(id.as_str());
        VolumeImage::at(&self.directory(id).join(IMAGE), &mountpoint)
    }

    /// One whose files are here.
    pub async fn find(&self, of: &VolumeRef) -> Result<VolumeRecord, StoreError> {
        let found = self.inner.ledger.find_volume(of).await?;
        let found = found.ok_or_else(|| StoreError::NoSuchVolume(of.to_string()))?;
        match found.elsewhere {
            Some(node) => Err(StoreError::VolumeElsewhere { volume: found.name, node }),
            None => Ok(found),
        }
    }

    pub async fn attachments(&self, id: &VolumeId) -> Result<Vec<Attachment>, StoreError> {
        self.inner.ledger.attachments(id).await
    }

    pub async fn sizes(&self, id: &VolumeId) -> Result<Sizes, StoreError> {
        let image = self.image(id);
        blocking("look at a volume", move || {
            let used_bytes = image.usage().ok().map(|usage| usage.used_bytes);
            Ok(Sizes { used_bytes, stored_bytes: image.stored_bytes()? })
        })
        .await
    }

    /// Makes an empty volume. When this returns it is in the ledger and durable.
    pub async fn create(&self, record: &VolumeRecord) -> Result<(), StoreError> {
        self.check_new(record).await?;
        let (stage, size_mib) = (Stage::new(&self.inner.dirs.images)?, record.size_mib);
        let image = stage.path().join(IMAGE);
        blocking("make a volume", move || VolumeImage::format(&image, size_mib)).await?;
        self.place(stage, record).await
    }

    /// What can be said before any work.
    async fn check_new(&self, record: &VolumeRecord) -> Result<(), StoreError> {
        self.check_size(record.size_mib, 0)?;
        match self.inner.ledger.find_volume(&VolumeRef::Name(record.name.clone())).await? {
            Some(_) => Err(StoreError::NameTaken(record.name.clone())),
            None => Ok(()),
        }
    }

    /// Of one that has so much already.
    fn check_size(&self, size_mib: u64, has_mib: u64) -> Result<(), StoreError> {
        if !(VOLUME_MIN_MIB..=VOLUME_MAX_MIB).contains(&size_mib) {
            return Err(StoreError::Invalid(format!(
                "a volume has from {VOLUME_MIN_MIB} to {VOLUME_MAX_MIB} MiB, not {size_mib}"
            )));
        }
        // Sparse, but a promise: its users get a clean error when it is full, and none before.
        let host = rustix::fs::statvfs(&self.inner.dirs.images);
        let host = host.map_err(failed("look at the host's disk"))?;
        let free_mib = host.f_bavail.saturating_mul(host.f_frsize) >> 20;
        check_room(more_mib(size_mib, has_mib), free_mib)
    }

    /// What was made becomes a volume.
    async fn place(&self, stage: Stage, record: &VolumeRecord) -> Result<(), StoreError> {
        fault::point("volume.made");
        let dir = self.inner.dirs.images.join(record.id.as_str());
        stage.place(&dir)?;
        fault::point("volume.placed");
        let recorded = self.inner.ledger.create_volume(record).await;
        if recorded.is_err()
            && let Err(error) = std::fs::remove_dir_all(&dir)
        {
            tracing::warn!(volume = %record.id, %error, "a volume without a row stays for now");
        }
        fault::point("volume.recorded");
        recorded
    }

    /// Removes it. Refused while a sandbox has it.
    pub async fn remove(&self, id: &VolumeId) -> Result<(), StoreError> {
        let used = self.used(id);
        let _turn = used.turn.lock().await;
        let VolumeRecord { kind, name, .. } = self.find(&VolumeRef::Id(id.clone())).await?;
        let erased = match self.inner.ledger.erase_volume(id).await {
            Err(StoreError::InUse { by, .. }) => {
                return Err(StoreError::InUse { what: format!("{kind} {name}"), by });
            }
            erased => erased?,
        };
        if !erased {
            return Err(StoreError::NoSuchVolume(id.to_string()));
        }
        fault::point("volume.erased");
        self.inner.uses.lock().remove(id);
        let (image, dir) = (self.image(id), self.inner.dirs.images.join(id.as_str()));
        let removed = blocking("remove a volume's files", move || {
            image.thaw()?;
            image.unmount_lazily()?;
            directory::absent(std::fs::remove_dir_all(dir))
        });
        // It is gone for everybody; what is left of it goes at the next start.
        if let Err(error) = removed.await {
            tracing::warn!(volume = %id, %error, "files of a removed volume stay for now");
        }
        Ok(())
    }
}

#[async_trait]
impl Volumes for VolumeStore {
    async fn open(&self, id: &VolumeId) -> Result<Arc<OpenVolume>, StoreError> {
        self.mounted(id).await
    }

    async fn copy_for(
        &self,
        id: &VolumeId,
        sandbox: &SandboxId,
    ) -> Result<VolumeRecord, StoreError> {
        let of = self.find(&VolumeRef::Id(id.clone())).await?;
        let record = VolumeRecord {
            id: VolumeId::random(),
            name: moments::name_for(&of.name, sandbox),
            made_for: Some(sandbox.clone()),
            elsewhere: None,
            copy_of: Some(id.clone()),
            created_at_ms: moments::now_ms(),
            ..of
        };
        self.copy(id, &record).await?;
        Ok(record)
    }

    async fn server(
        &self,
        volume: &Arc<OpenVolume>,
        below: &GuestPath,
        read_only: bool,
    ) -> Result<Arc<dyn FileServer>, StoreError> {
        self.attached(volume, below, read_only).await
    }

    async fn sync(&self, volume: &OpenVolume) -> Result<(), StoreError> {
        let dir = volume.dir.clone();
        blocking("write a volume to the disk", move || {
            Ok(rustix::fs::syncfs(std::fs::File::open(dir)?)?)
        })
        .await
    }

    async fn put_back(
        &self,
        volume: &OpenVolume,
        below: &GuestPath,
        held: Vec<HeldPath>,
    ) -> Result<Vec<String>, StoreError> {
        let (id, dir, below) = (volume.id.clone(), volume.dir.clone(), below.clone());
        let action = "put back what a sandbox holds";
        let put = move || {
            let files = Files::open(&dir).map_err(failed(action))?;
            let paths = held.into_iter().filter_map(|held| {
                let path = Path::new(below.relative()).join(held.path.trim_start_matches('/'));
                let made = placeholder(&files, &path, held.directory);
                let told = made.map_err(|error| match Errno::from_io_error(&error) {
                    Some(Errno::LOOP | Errno::NOTDIR | Errno::EXIST) => in_the_way(&id, &path),
                    None if error.kind() == io::ErrorKind::NotADirectory => in_the_way(&id, &path),
                    Some(_) | None => failed(action)(error),
                });
                told.transpose()
            });
            paths.collect()
        };
        tokio::task::spawn_blocking(put).await.map_err(StoreError::failed(action))?
    }

    async fn discard_copies(&self, sandbox: &SandboxId) {
        let copies = match self.inner.ledger.volumes_made_for(sandbox).await {
            Ok(copies) => copies,
            Err(error) => {
                tracing::warn!(%sandbox, %error, "copies of volumes stay");
                return;
            }
        };
        for id in copies {
            match self.remove(&id).await {
                Ok(()) | Err(StoreError::NoSuchVolume(_)) => {}
                Err(error) => tracing::warn!(%sandbox, volume = %id, %error, "a copy stays"),
            }
        }
    }
}

/// What a volume of one size needs to have another.
fn more_mib(size_mib: u64, has_mib: u64) -> u64 {
    size_mib.saturating_sub(has_mib)
}

fn check_room(more_mib: u64, free_mib: u64) -> Result<(), StoreError> {
    if more_mib > free_mib {
        let words = format!("{more_mib} MiB for a volume are too many: {free_mib} MiB are free");
        return Err(StoreError::DiskFull(words));
    }
    Ok(())
}

/// Makes an empty file or directory where there is none; its path then.
fn placeholder(files: &Arc<Files>, path: &Path, directory: bool) -> io::Result<Option<String>> {
    const DIRECTORY: u32 = 0o755;
    let root = Owner { user: 0, group: 0 };
    match files.stat(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
        Ok(has) => {
            let kind = FileType::from_raw_mode(has.mode);
            let other = kind == FileType::Symlink || (kind == FileType::Directory) != directory;
            return if other { Err(io::ErrorKind::NotADirectory.into()) } else { Ok(None) };
        }
    }
    if directory {
        files.make_dirs(path, DIRECTORY, root)?;
    } else {
        if let Some(parent) = path.parent() {
            files.make_dirs(parent, DIRECTORY, root)?;
        }
        files.write(path, torpor_files::WriteOptions::default())?.finish()?;
    }
    Ok(Some(path.display().to_string()))
}

/// Others have put something else where a process has a file or directory open.
fn in_the_way(volume: &VolumeId, path: &Path) -> StoreError {
    StoreError::Invalid(format!(
        "/{} of {volume} is in the way of what a process of the sandbox has open there: \
         move it away from outside, then wake the sandbox again",
        path.display()
    ))
}

/// Unmounts the volumes of an installation without a daemon. Who is in one is left with what it has open.
pub async fn unmount_all(dirs: Dirs) -> Result<(), StoreError> {
    blocking("unmount the volumes", move || {
        unmount_now(&dirs.mounts);
        Ok(())
    })
    .await
}

/// The same of what is mounted below a directory, for who is ending. Blocks.
pub fn unmount_now(mounts: &Path) {
    // The kernel knows no links; what is not there has no mounts.
    let Ok(mounts) = mounts.canonicalize() else { return };
    for mount in torpor_disk::mountinfo::read().into_iter().flatten().rev() {
        if mount.point.starts_with(&mounts) {
            let image = VolumeImage::at(&mount.source, &mount.point);
            if let Err(error) = image.unmount_lazily() {
                tracing::warn!(path = %mount.point.display(), %error, "a volume stays mounted");
            }
        }
    }
}

/// Work that waits for the disk, with a full one told as what it is.
async fn blocking<T: Send + 'static>(
    action: &'static str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, StoreError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(StoreError::failed(action))?.map_err(failed(action))
}

fn failed<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> StoreError {
    move |error| {
        let error = error.into();
        if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            return StoreError::DiskFull(format!("could not {action}"));
        }
        StoreError::failed(action)(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_volume_grows_by_has_to_fit() {
        assert!(check_room(100, 100).is_ok());
        assert!(matches!(check_room(101, 100), Err(StoreError::DiskFull(_))));
        assert_eq!(more_mib(100, 1000), 0);
        assert_eq!(more_mib(1100, 1000), 100);
    }
}

//! A directory tree of the host, as all attachments to it share it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use tokio::sync::Semaphore;

use crate::cache::{Cache, Use};
use crate::handle::FileId;
use crate::service::{Access, FileService};

/// Where files are kept that were removed while somebody had them open, and uploads that are not complete. In the root, and
/// never shown by us. A guest that the host bound the volume into sees it: it may put anything there, and finds its own files
/// only.
pub(crate) const HIDDEN: &str = ".torpor-removed";

/// Calls of all attachments that should be answered at once: while a volume is frozen for a copy, each that writes keeps
/// a thread.
const AT_ONCE: usize = 64;

/// Whose user and group are nobody's business but the host's.
const HIDDEN_MODE: Mode = Mode::RWXU;
/// How often it is made anew while a guest puts something else there.
const HIDDEN_TRIES: u32 = 8;

/// An open tree. Dropping it, and its attachments, closes all descriptors in it.
pub struct Volume {
    pub(crate) root: OwnedFd,
    pub(crate) root_id: FileId,
    device: u64,
    cache: Mutex<Cache>,
    turns: Arc<Semaphore>,
}

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Volume {
    /// The tree below a directory, which should be the root of a file system mounted without devices and setuid.
    pub fn open(directory: &Path) -> io::Result<Arc<Self>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self::new(rustix::fs::open(directory, flags, Mode::empty())?)
    }

    /// The tree below an open directory.
    pub fn new(root: OwnedFd) -> io::Result<Arc<Self>> {
        let stat = rustix::fs::fstat(&root)?;
        let root_id = FileId::of(&root)?;
        let (device, cache) = (stat.st_dev, Mutex::default());
        let turns = Arc::new(Semaphore::new(AT_ONCE));
        Ok(Arc::new(Self { root, root_id, device, cache, turns }))
    }

    /// One attachment to the tree, or to the directory `subpath` in it.
    pub fn attach(self: &Arc<Self>, subpath: &Path, access: Access) -> io::Result<FileService> {
        let directory = self.beneath(subpath, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let root = FileId::of(&directory)?;
        let key = *blake3::keyed_hash(&access.key, &plain(subpath)).as_bytes();
        Ok(FileService::new(Arc::clone(self), root, Access { key, ..access }))
    }

    /// Whoever answers calls from guests takes a turn for each, so that one volume does not take all threads.
    pub fn turns(&self) -> &Arc<Semaphore> {
        &self.turns
    }

    /// Everything that was written is on the disk.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(&self.root)?)
    }

    /// Closes descriptors that are held for speed only.
    pub fn let_go(&self) {
        self.cache.lock().clear();
    }

    /// Removes what was kept for those who had it open; when nobody is attached.
    pub fn empty_removed(&self) -> io::Result<()> {
        self.let_go();
        match crate::paths::empty(&self.root, HIDDEN.as_ref()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Opens a path below the root. No link is followed on the way, and none out.
    pub(crate) fn beneath(&self, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        let path = path.strip_prefix("/").unwrap_or(path);
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        if path.components().any(|part| part == Component::ParentDir) {
            return Err(Errno::INVAL);
        }
        if is_hidden(path) {
            return Err(Errno::NOENT);
        }
        let resolve = ResolveFlags::BENEATH
            | ResolveFlags::NO_SYMLINKS
            | ResolveFlags::NO_MAGICLINKS
            | ResolveFlags::NO_XDEV;
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve)
    }

    /// A descriptor of a file that is still there, and what it is.
    pub(crate) fn descriptor(&self, id: FileId, how: Use) -> Result<(Arc<OwnedFd>, Stat), Errno> {
        let cached = self.cache.lock().get(id, how);
        let descriptor = match cached {
            Some(descriptor) => descriptor,
            None => {
                let descriptor = Arc::new(self.open_anew(id, how)?);
                self.cache.lock().insert(id, how, &descriptor);
                descriptor
            }
        };
        let stat = rustix::fs::fstat(&descriptor)?;
        if stat.st_nlink == 0 {
            // Somebody removed it, and only we hold it.
            self.cache.lock().forget(id);
            return Err(Errno::STALE);
        }
        Ok((descriptor, stat))
    }

    /// An open file of its own.
    pub(crate) fn open_anew(&self, id: FileId, how: Use) -> Result<OwnedFd, Errno> {
        let flags = match how {
            Use::Path => return id.open(&self.root, OFlags::PATH),
            Use::Read => OFlags::RDONLY,
            Use::Write => OFlags::RDWR,
        };
        // Opening anything else could wait, or do something.
        let (_, stat) = self.descriptor(id, Use::Path)?;
        match (FileType::from_raw_mode(stat.st_mode), how) {
            (FileType::RegularFile, _) | (FileType::Directory, Use::Read) => {}
            (FileType::Directory, _) => return Err(Errno::ISDIR),
            (_, _) => return Err(Errno::INVAL),
        }
        id.open(&self.root, flags | OFlags::NONBLOCK)
    }

    pub(crate) fn forget(&self, id: FileId) {
        self.cache.lock().forget(id);
    }

    /// The entry of a directory, if it is one of ours: whatever it is, and no link is followed.
    pub(crate) fn entry(
        &self,
        directory: impl AsFd,
        name: &[u8],
    ) -> Result<(FileId, Arc<OwnedFd>, Stat), Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = Arc::new(rustix::fs::openat(directory, name, flags, Mode::empty())?);
        let stat = rustix::fs::fstat(&file)?;
        if stat.st_dev != self.device {
            // Something of the host is mounted there.
            return Err(Errno::NOENT);
        }
        let id = FileId::of(&file)?;
        Ok((id, file, stat))
    }

    pub(crate) fn keep(&self, id: FileId, descriptor: &Arc<OwnedFd>) {
        self.cache.lock().insert(id, Use::Path, descriptor);
    }

    /// The hidden directory, made if need be.
    pub(crate) fn hidden(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        for _ in 0..HIDDEN_TRIES {
            match rustix::fs::openat(&self.root, HIDDEN, flags, Mode::empty()) {
                Err(Errno::NOENT) => {}
                // A guest put something else there. The name is ours.
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    rustix::fs::unlinkat(&self.root, HIDDEN, AtFlags::empty())?;
                }
                opened => return opened,
            }
            match rustix::fs::mkdirat(&self.root, HIDDEN, HIDDEN_MODE) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::BUSY)
    }

    /// Gives a file a hidden name, so that it outlives its last other one.
    pub(crate) fn hide(&self, id: FileId, file: impl AsFd) -> Result<(), Errno> {
        let hidden = self.hidden()?;
        let link = || rustix::fs::linkat(&file, "", &hidden, id.hex(), AtFlags::EMPTY_PATH);
        match link() {
            Err(Errno::EXIST) => {}
            linked => return linked,
        }
        if self.entry(&hidden, id.hex().as_bytes()).is_ok_and(|(there, _, _)| there == id) {
            return Ok(());
        }
        // Another file, by somebody who knew the name.
        crate::paths::remove(&hidden, id.hex().as_ref())?;
        link()
    }

    /// Takes that name away.
    pub(crate) fn unhide(&self, id: FileId) -> Result<(), Errno> {
        self.forget(id);
        match rustix::fs::unlinkat(self.hidden()?, id.hex(), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno),
        }
    }
}

/// Whether a path below the root leads to what is hidden, however it is spelled.
pub(crate) fn is_hidden(path: &Path) -> bool {
    let first = path.components().find(|part| matches!(part, Component::Normal(_)));
    first.is_some_and(|part| part.as_os_str() == HIDDEN)
}

/// A path in the one form that all its spellings have.
fn plain(path: &Path) -> Vec<u8> {
    let names = path.components().filter(|part| matches!(part, Component::Normal(_)));
    names.flat_map(|name| [name.as_os_str().as_bytes(), b"/"].concat()).collect()
}

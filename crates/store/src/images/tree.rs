//! A tree in the making: the staged root filesystem of an image.
//!
//! Every operation is resolved by the kernel with the staged directory as its root
//! (`RESOLVE_IN_ROOT`): links in the tree, absolute or with `..`, lead to places in the tree, so
//! nothing is ever written elsewhere. The last part of a path is never followed: what is there is
//! replaced. Owner, mode and time are those given; extended attributes do not exist.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{self, AtFlags, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;
use torpor_lifecycle::store::StoreError;

use super::limits::Budget;
use super::path::{IN_TMP, OURS, TreePath, refused};
use super::sparse::SparseMap;
use crate::files;

/// How much of a file is copied at a time.
const COPY_BYTES: usize = 128 * 1024;
/// Longest target of a symbolic link.
const TARGET_MAX: usize = 4095;
/// What every root must have, for the engine and the agent to work in it.
const EXPECTED: [(&str, u32); 6] = [
    ("proc", 0o555),
    ("sys", 0o555),
    ("dev", 0o755),
    ("tmp", 0o1777),
    ("run", 0o755),
    ("etc", 0o755),
];

/// What is known of an entry besides its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meta {
    /// Permission bits with setuid, setgid and sticky.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Seconds since 1970.
    pub mtime: i64,
}

impl Meta {
    pub(crate) const fn root_owned(mode: u32) -> Self {
        Self { mode, uid: 0, gid: 0, mtime: 0 }
    }

    fn mode(self) -> Mode {
        Mode::from_raw_mode(self.mode & 0o7777)
    }

    fn owner(self) -> (Option<Uid>, Option<Gid>) {
        (Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))
    }

    fn times(self) -> Timestamps {
        // Outside this range filesystems disagree, and the id of an image must not depend on them.
        let at = Timespec { tv_sec: self.mtime.clamp(0, u32::MAX.into()), tv_nsec: 0 };
        Timestamps { last_access: at, last_modification: at }
    }
}

/// A staged tree, open for writing.
pub(crate) struct Tree {
    root: OwnedFd,
    pub(crate) budget: Budget,
    /// Filling a directory changes its time, so times are set at the end.
    dir_times: Vec<(TreePath, Meta)>,
    /// Whatever a layer brings from now on gets this time.
    pub(crate) time: Option<i64>,
    buffer: Vec<u8>,
}

impl Tree {
    /// Starts a tree in a new directory.
    pub(crate) fn create(dir: &Path, budget: Budget) -> Result<Self, StoreError> {
        std::fs::create_dir(dir).map_err(files::failed("create a staging directory"))?;
        let root: OwnedFd =
            File::open(dir).map_err(files::failed("open a staging directory"))?.into();
        set_meta(root.as_fd(), Meta::root_owned(0o755))
            .map_err(files::failed("set the mode of a staging directory"))?;
        Ok(Self { root, budget, dir_times: Vec::new(), time: None, buffer: vec![0; COPY_BYTES] })
    }

    /// A directory; one that is there keeps its content. The root keeps mode and owner too: those
    /// of the place where somebody packed a tree say nothing about it.
    pub(crate) fn dir(&mut self, path: &TreePath, meta: Meta) -> Result<(), StoreError> {
        self.budget.spend_entry()?;
        self.dir_times.push((path.clone(), meta));
        let Some((parent, name)) = path.split() else { return Ok(()) };
        let parent = self.parent(&parent)?;
        match fs::mkdirat(&parent, name, Mode::from_raw_mode(0o700)) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::CLOEXEC;
                if fs::openat(&parent, name, flags, Mode::empty()).is_err() {
                    files::remove_at(parent.as_fd(), name).map_err(files::failed("replace"))?;
                    fs::mkdirat(&parent, name, Mode::from_raw_mode(0o700))
                        .map_err(staging(path))?;
                }
            }
            Err(error) => return Err(staging(path)(error)),
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = fs::openat(&parent, name, flags, Mode::empty()).map_err(staging(path))?;
        set_meta(dir.as_fd(), meta).map_err(staging(path))
    }

    /// A regular file with everything that `content` gives.
    pub(crate) fn file(
        &mut self,
        path: &TreePath,
        meta: Meta,
        content: &mut dyn Read,
    ) -> Result<(), StoreError> {
        let mut file = self.new_file(path)?;
        loop {
            let count = content.read(&mut self.buffer).map_err(unreadable)?;
            if count == 0 {
                break;
            }
            self.budget.spend_bytes(count as u64)?;
            file.write_all(&self.buffer[..count])
                .map_err(files::failed(format!("write {path} of the image")))?;
        }
        finish_file(&file, path, meta)
    }

    /// A regular file of holes with what `content` gives in its runs. Its length counts, not what is
    /// in it: once it is packed, a hole is as large as anything else.
    pub(crate) fn sparse_file(
        &mut self,
        path: &TreePath,
        meta: Meta,
        map: &SparseMap,
        content: &mut dyn Read,
    ) -> Result<(), StoreError> {
        self.budget.spend_bytes(map.bytes())?;
        let file = self.new_file(path)?;
        let write = || format!("write {path} of the image");
        file.set_len(map.bytes()).map_err(files::failed(write()))?;
        for run in map.runs() {
            let mut at = run.start;
            while at < run.end {
                let most = usize::try_from(run.end - at).unwrap_or(COPY_BYTES).min(COPY_BYTES);
                let piece = &mut self.buffer[..most];
                content.read_exact(piece).map_err(unreadable)?;
                file.write_all_at(piece, at).map_err(files::failed(write()))?;
                at += most as u64;
            }
        }
        finish_file(&file, path, meta)
    }

    fn new_file(&mut self, path: &TreePath) -> Result<File, StoreError> {
        self.budget.spend_entry()?;
        let (parent, name) = self.place(path)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let flags = flags | OFlags::CLOEXEC;
        let open = || fs::openat(&parent, &*name, flags, Mode::from_raw_mode(0o600));
        Ok(File::from(replacing(&parent, &name, open).map_err(staging(path))?))
    }

    pub(crate) fn symlink(
        &mut self,
        path: &TreePath,
        target: &[u8],
        meta: Meta,
    ) -> Result<(), StoreError> {
        self.budget.spend_entry()?;
        if target.is_empty() || target.len() > TARGET_MAX || target.contains(&0) {
            return Err(refused(path.bytes(), "the target of this symbolic link is not valid"));
        }
        let (parent, name) = self.place(path)?;
        let make = || fs::symlinkat(OsStr::from_bytes(target), &parent, &*name);
        replacing(&parent, &name, make).map_err(staging(path))?;
        let (uid, gid) = meta.owner();
        fs::chownat(&parent, &*name, uid, gid, AtFlags::SYMLINK_NOFOLLOW).map_err(staging(path))?;
        fs::utimensat(&parent, &*name, &meta.times(), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(staging(path))
    }

    /// Another name for a file that is already in the tree.
    pub(crate) fn hardlink(&mut self, path: &TreePath, to: &TreePath) -> Result<(), StoreError> {
        self.budget.spend_entry()?;
        if path == to {
            return Err(refused(path.bytes(), "it is a hard link to itself"));
        }
        let missing = || refused(path.bytes(), &format!("it is a hard link to {to}, not there"));
        let (dir, target) = to.split().ok_or_else(missing)?;
        let dir = self.open_dir(&dir).map_err(|_| missing())?;
        let stat = fs::statat(&dir, target, AtFlags::SYMLINK_NOFOLLOW).map_err(|_| missing())?;
        if fs::FileType::from_raw_mode(stat.st_mode) == fs::FileType::Directory {
            return Err(refused(path.bytes(), "it is a hard link to a directory"));
        }
        let (parent, name) = self.place(path)?;
        let link = || fs::linkat(&dir, target, &parent, &*name, AtFlags::empty());
        replacing(&parent, &name, link).map_err(staging(path))
    }

    /// Takes away what is at this path, if anything.
    pub(crate) fn remove(&mut self, path: &TreePath) -> Result<(), StoreError> {
        let Some((dir, name)) = path.split() else {
            return Err(refused(path.bytes(), "the root can't be removed"));
        };
        let Ok(dir) = self.open_dir(&dir) else { return Ok(()) };
        files::remove_at(dir.as_fd(), name).map_err(files::failed(format!("remove {path}")))
    }

    /// Names in a directory of the tree; none if it is not there, or a link.
    pub(crate) fn children(&self, path: &TreePath) -> Result<Vec<TreePath>, StoreError> {
        let Ok(dir) = self.open_real_dir(path) else { return Ok(Vec::new()) };
        let names = files::entries(dir.as_fd()).map_err(files::failed(format!("list {path}")))?;
        Ok(names.iter().map(|(name, _)| path.child(name)).collect())
    }

    /// Completes the tree: the directories every root must have, and the times of all directories.
    pub(crate) fn finish(&mut self) -> Result<(), StoreError> {
        for (name, mode) in EXPECTED {
            if self.open_real_dir(&TreePath::known(name)).is_err() {
                self.dir(&TreePath::known(name), Meta::root_owned(mode))?;
            }
        }
        for (path, meta) in std::mem::take(&mut self.dir_times) {
            // It may have been replaced since.
            if let Ok(dir) = self.open_real_dir(&path) {
                fs::futimens(&dir, &meta.times()).map_err(staging(&path))?;
            }
        }
        Ok(())
    }

    /// Puts the agent where engines look for it.
    pub(crate) fn add_agent(&mut self, mut agent: &[u8]) -> Result<(), StoreError> {
        files::remove_at(self.root.as_fd(), OsStr::from_bytes(OURS))
            .map_err(files::failed("make room for the agent"))?;
        self.dir(&TreePath::known(".torpor"), Meta::root_owned(0o755))?;
        self.file(&TreePath::known(".torpor/agent"), Meta::root_owned(0o755), &mut agent)?;
        self.file(&TreePath::known(IN_TMP), Meta::root_owned(0o444), &mut std::io::empty())
    }

    fn place<'p>(
        &self,
        path: &'p TreePath,
    ) -> Result<(OwnedFd, std::borrow::Cow<'p, OsStr>), StoreError> {
        let Some((parent, name)) = path.split() else {
            return Err(refused(path.bytes(), "the root is a directory"));
        };
        Ok((self.parent(&parent)?, name.into()))
    }

    /// The directory at this path, made if it is not there.
    fn parent(&self, path: &TreePath) -> Result<OwnedFd, StoreError> {
        match self.open_dir(path) {
            Ok(dir) => return Ok(dir),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(staging(path)(error)),
        }
        let Some((above, name)) = path.split() else {
            return Err(staging(path)(Errno::NOENT));
        };
        let above = self.parent(&above)?;
        match fs::mkdirat(&above, name, Mode::from_raw_mode(0o755)) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                return Err(refused(path.bytes(), "it is a link to nowhere, not a directory"));
            }
            Err(error) => return Err(staging(path)(error)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = fs::openat(&above, name, flags, Mode::empty()).map_err(staging(path))?;
        // Whatever the umask is.
        fs::fchmod(&dir, Mode::from_raw_mode(0o755)).map_err(staging(path))?;
        Ok(dir)
    }

    /// The directory at this path; links lead to places in the tree.
    fn open_dir(&self, path: &TreePath) -> Result<OwnedFd, Errno> {
        self.resolve(path, OFlags::RDONLY | OFlags::DIRECTORY)
    }

    /// The same, if it is a directory itself and no link to one.
    fn open_real_dir(&self, path: &TreePath) -> Result<OwnedFd, Errno> {
        self.resolve(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW)
    }

    fn resolve(&self, path: &TreePath, flags: OFlags) -> Result<OwnedFd, Errno> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        files::resolve_at(self.root.as_fd(), path.as_os_str(), flags, resolve)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }
}

/// Makes an entry, in place of one that is there.
fn replacing<T>(
    parent: &OwnedFd,
    name: &OsStr,
    make: impl Fn() -> Result<T, Errno>,
) -> Result<T, Errno> {
    match make() {
        Err(Errno::EXIST) => {
            files::remove_at(parent.as_fd(), name)
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
            make()
        }
        result => result,
    }
}

fn finish_file(file: &File, path: &TreePath, meta: Meta) -> Result<(), StoreError> {
    set_meta(file.as_fd(), meta).map_err(staging(path))?;
    fs::futimens(file, &meta.times()).map_err(staging(path))
}

/// In this order: a change of owner takes setuid away.
fn set_meta(file: std::os::fd::BorrowedFd<'_>, meta: Meta) -> Result<(), Errno> {
    let (uid, gid) = meta.owner();
    fs::fchown(file, uid, gid)?;
    fs::fchmod(file, meta.mode())
}

/// What the kernel says to a path is about the archive where only the archive can have caused it.
fn staging(path: &TreePath) -> impl FnOnce(Errno) -> StoreError {
    let path = path.clone();
    move |error| match error {
        Errno::NOTDIR => refused(path.bytes(), "something on the way to it is not a directory"),
        Errno::LOOP => refused(path.bytes(), "the links on the way to it lead in a circle"),
        Errno::NAMETOOLONG => refused(path.bytes(), "its name is too long"),
        Errno::MLINK => refused(path.bytes(), "it has too many hard links"),
        error => files::failed(format!("stage {path} of the image"))(error),
    }
}

/// The source broke, not the store.
pub(crate) fn unreadable(error: std::io::Error) -> StoreError {
    StoreError::Invalid(format!("the source can't be read: {error}"))
}

/// What a tree is made in: a directory of a stage.
pub(crate) const TREE_DIR: &str = "tree";

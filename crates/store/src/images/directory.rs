//! Import from a directory of the host: walked through open directories, so a link never leads the
//! walk elsewhere, not even one that appears while it goes on.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use torpor_lifecycle::store::StoreError;

use super::path::TreePath;
use super::tree::{Meta, Tree};

/// Copies a directory into the tree; devices, FIFOs and sockets stay behind.
pub(crate) fn unpack(dir: &Path, tree: &mut Tree) -> Result<(), StoreError> {
    let root = File::open(dir).map_err(|error| {
        StoreError::Invalid(format!("the directory {} can't be opened: {error}", dir.display()))
    })?;
    let root = OwnedFd::from(root);
    let stat = fs::fstat(&root).map_err(unreadable(&TreePath::ROOT))?;
    tree.dir(&TreePath::ROOT, meta(&stat))?;
    let mut walk = Walk { tree, linked: HashMap::new() };
    walk.content_of(root.as_fd(), &TreePath::ROOT)
}

struct Walk<'a> {
    tree: &'a mut Tree,
    /// First path of each file that has several, by device and inode.
    linked: HashMap<(u64, u64), TreePath>,
}

impl Walk<'_> {
    fn content_of(&mut self, dir: BorrowedFd<'_>, path: &TreePath) -> Result<(), StoreError> {
        let names = crate::files::entries(dir).map_err(|error| {
            StoreError::Invalid(format!("{path} of the directory can't be listed: {error}"))
        })?;
        for (name, kind) in names {
            let child = TreePath::parse(path.child(&name).bytes(), &self.tree.budget.limits)?;
            if child.is_ignored() {
                continue;
            }
            match kind {
                FileType::Directory => self.dir(dir, &name, &child)?,
                FileType::RegularFile => self.file(dir, &name, &child)?,
                FileType::Symlink => self.symlink(dir, &name, &child)?,
                FileType::Fifo
                | FileType::Socket
                | FileType::CharacterDevice
                | FileType::BlockDevice
                | FileType::Unknown => {}
            }
        }
        Ok(())
    }

    fn dir(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &OsStr,
        path: &TreePath,
    ) -> Result<(), StoreError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = fs::openat(parent, name, flags, Mode::empty()).map_err(unreadable(path))?;
        let stat = fs::fstat(&dir).map_err(unreadable(path))?;
        self.tree.dir(path, meta(&stat))?;
        self.content_of(dir.as_fd(), path)
    }

    fn file(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &OsStr,
        path: &TreePath,
    ) -> Result<(), StoreError> {
        // Without NONBLOCK a FIFO that took the file's place would hold us up for ever.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = fs::openat(parent, name, flags, Mode::empty()).map_err(unreadable(path))?;
        let stat = fs::fstat(&file).map_err(unreadable(path))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(());
        }
        if let Some(first) = self.linked.get(&(stat.st_dev, stat.st_ino)) {
            return self.tree.hardlink(path, first);
        }
        self.tree.file(path, meta(&stat), &mut File::from(file))?;
        if stat.st_nlink > 1 {
            self.linked.insert((stat.st_dev, stat.st_ino), path.clone());
        }
        Ok(())
    }

    fn symlink(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &OsStr,
        path: &TreePath,
    ) -> Result<(), StoreError> {
        let stat = fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).map_err(unreadable(path))?;
        let target = fs::readlinkat(parent, name, Vec::new()).map_err(unreadable(path))?;
        self.tree.symlink(path, target.as_bytes(), meta(&stat))
    }
}

fn meta(stat: &Stat) -> Meta {
    Meta { mode: stat.st_mode & 0o7777, uid: stat.st_uid, gid: stat.st_gid, mtime: stat.st_mtime }
}

fn unreadable(path: &TreePath) -> impl FnOnce(Errno) -> StoreError {
    let path = path.clone();
    move |error| StoreError::Invalid(format!("{path} of the directory can't be read: {error}"))
}

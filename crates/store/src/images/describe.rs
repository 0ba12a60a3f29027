//! The id of an image: BLAKE3 over a description of its tree and its configuration.
//!
//! ```text
//!  "torpor image 1\n"
//!  for each entry, in byte order of names, directories before their content:
//!      kind (d f l) · path · mode · uid · gid
//!      f: mtime · size · BLAKE3 of the content      l: mtime · target
//!  "c" · configuration as JSON
//! ```
//!
//! Texts are preceded by their length; numbers are little-endian. Not in it: the agent, which
//! changes with every release of ours; times of directories, which change when they are looked at
//! the wrong way; and whether two equal files are one.
//!
//! An image that was built has "torpor image 2\n" and no times at all: two builds of the same thing
//! are the same image, whenever they were.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use blake3::{Hash, Hasher};
use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Stat};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ImageId;

use super::ImageConfig;
use super::path::{IN_TMP, OURS, TreePath};
use crate::files;

const HEADING: &[u8] = b"torpor image 1\n";
const HEADING_TIMELESS: &[u8] = b"torpor image 2\n";

/// What a tree can be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ids {
    /// With the times of files.
    pub(crate) exact: ImageId,
    /// Without.
    pub(crate) timeless: ImageId,
}

impl Ids {
    pub(crate) fn of(self, times: Times) -> ImageId {
        match times {
            Times::Matter => self.exact,
            Times::DoNot => self.timeless,
        }
    }

    /// Which of them this is.
    pub(crate) fn times_of(&self, id: &ImageId) -> Option<Times> {
        if *id == self.exact {
            return Some(Times::Matter);
        }
        (*id == self.timeless).then_some(Times::DoNot)
    }
}

/// Whether the times of files tell two images apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Times {
    Matter,
    /// Of images that were built.
    DoNot,
}

/// The ids of a finished tree.
pub(crate) fn image_ids(tree: &Path, config: &ImageConfig) -> Result<Ids, StoreError> {
    let action = "describe the tree of an image";
    let mut description =
        Description { exact: Hasher::new(), timeless: Hasher::new(), seen: HashMap::new() };
    description.exact.update(HEADING);
    description.timeless.update(HEADING_TIMELESS);
    let root: OwnedFd = File::open(tree).map_err(files::failed(action))?.into();
    let stat = fs::fstat(&root).map_err(files::failed(action))?;
    description.heading(b"d", &TreePath::ROOT, &stat);
    description.content_of(root.as_fd(), &TreePath::ROOT).map_err(files::failed(action))?;
    let config = serde_json::to_vec(config).map_err(StoreError::failed(action))?;
    description.bytes(b"c");
    description.text(&config);
    let id =
        |hasher: &Hasher| hasher.finalize().to_hex().parse().map_err(StoreError::failed(action));
    Ok(Ids { exact: id(&description.exact)?, timeless: id(&description.timeless)? })
}

struct Description {
    exact: Hasher,
    timeless: Hasher,
    /// Content of files with several names, by inode, so that each is read once.
    seen: HashMap<u64, Hash>,
}

impl Description {
    fn content_of(&mut self, dir: BorrowedFd<'_>, path: &TreePath) -> io::Result<()> {
        for (name, kind) in files::entries(dir)? {
            let path = path.child(&name);
            if path.bytes() == OURS || path.bytes() == IN_TMP.as_bytes() {
                continue;
            }
            match kind {
                FileType::Directory => self.dir(dir, &name, &path)?,
                FileType::RegularFile => self.file(dir, &name, &path)?,
                FileType::Symlink => self.symlink(dir, &name, &path)?,
                FileType::Fifo
                | FileType::Socket
                | FileType::CharacterDevice
                | FileType::BlockDevice
                | FileType::Unknown => {
                    return Err(io::Error::other(format!("{path} is a special file")));
                }
            }
        }
        Ok(())
    }

    fn dir(&mut self, parent: BorrowedFd<'_>, name: &OsStr, path: &TreePath) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = fs::openat(parent, name, flags, Mode::empty())?;
        self.heading(b"d", path, &fs::fstat(&dir)?);
        self.content_of(dir.as_fd(), path)
    }

    fn file(&mut self, parent: BorrowedFd<'_>, name: &OsStr, path: &TreePath) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(fs::openat(parent, name, flags, Mode::empty())?);
        let stat = fs::fstat(&file)?;
        self.heading(b"f", path, &stat);
        self.time(stat.st_mtime);
        self.number(stat.st_size);
        let hash = match self.seen.get(&stat.st_ino) {
            Some(hash) => *hash,
            None => Hasher::new().update_reader(file)?.finalize(),
        };
        if stat.st_nlink > 1 {
            self.seen.insert(stat.st_ino, hash);
        }
        self.bytes(hash.as_bytes());
        Ok(())
    }

    fn symlink(&mut self, parent: BorrowedFd<'_>, name: &OsStr, path: &TreePath) -> io::Result<()> {
        let stat = fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
        self.heading(b"l", path, &stat);
        self.time(stat.st_mtime);
        self.text(fs::readlinkat(parent, name, Vec::new())?.as_bytes());
        Ok(())
    }

    fn heading(&mut self, kind: &[u8], path: &TreePath, stat: &Stat) {
        self.bytes(kind);
        self.text(path.bytes());
        // The mode of a symbolic link has no meaning and differs between filesystems.
        let mode = if kind == b"l" { 0 } else { stat.st_mode & 0o7777 };
        for number in [mode, stat.st_uid, stat.st_gid] {
            self.number(number.into());
        }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.exact.update(bytes);
        self.timeless.update(bytes);
    }

    fn time(&mut self, time: i64) {
        self.exact.update(&time.to_le_bytes());
    }

    fn number(&mut self, number: i64) {
        self.bytes(&number.to_le_bytes());
    }

    fn text(&mut self, text: &[u8]) {
        self.number(i64::try_from(text.len()).unwrap_or(i64::MAX));
        self.bytes(text);
    }
}

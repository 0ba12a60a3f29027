//! Files by their paths, for callers outside of a guest. They block for as long as the disk does.
//!
//! No link is followed anywhere: neither on the way nor at its end. Paths are relative to the root of the volume; a `/` in
//! front of them means nothing.

use std::collections::BTreeSet;
use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use torpor_protocol::guest::files::{Attributes, Owner};

use crate::attributes::{attributes, chmod, chown};
use crate::volume::{HIDDEN, Volume, is_hidden};

/// Entries of a page at most.
const PAGE_MAX: usize = 1000;
/// Directories in each other that are open at once while they are removed.
const DEPTH_MAX: usize = 64;
/// Bytes of the name of an upload: nobody guesses one, and none is there twice.
const UPLOAD_NAME: usize = 16;
/// Bytes read at once.
const READ_MAX: usize = 1024 * 1024;

/// An entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub name: Vec<u8>,
    pub attributes: Attributes,
    /// Where a symbolic link points.
    pub target: Option<Vec<u8>>,
}

/// Some of the entries of a directory, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    pub entries: Vec<Listed>,
    /// There are more, after the last of these.
    pub more: bool,
}

/// What a file is to be that is written from outside. `None` keeps what is replaced, or takes the defaults.
#[derive(Debug, Clone, Copy, Default)]
pub struct WriteOptions {
    pub mode: Option<u32>,
    pub owner: Option<Owner>,
}

impl Volume {
    /// What is there; of a link the link itself.
    pub fn stat(&self, path: &Path) -> io::Result<Attributes> {
        let file = self.beneath(path, OFlags::PATH)?;
        Ok(attributes(&rustix::fs::fstat(&file)?))
    }

    /// The entries of a directory whose names come after `after`, by name.
    pub fn list(&self, path: &Path, after: Option<&[u8]>, limit: usize) -> io::Result<Page> {
        let directory = self.beneath(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let limit = limit.clamp(1, PAGE_MAX);
        let root = crate::handle::FileId::of(&directory)? == self.root_id;
        // Those that come first, and one more, however many there are.
        let mut names = BTreeSet::new();
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            let ours = matches!(name, b"." | b"..") || (root && name == HIDDEN.as_bytes());
            if ours || after.is_some_and(|after| name <= after) {
                continue;
            }
            names.insert(name.to_vec());
            if names.len() > limit + 1 {
                names.pop_last();
            }
        }
        let more = names.len() > limit;
        let entries = names.into_iter().take(limit).filter_map(|name| {
            let (_, file, stat) = self.entry(&directory, &name).ok()?;
            let link = FileType::from_raw_mode(stat.st_mode) == FileType::Symlink;
            let target = link.then(|| rustix::fs::readlinkat(&file, "", Vec::new()).ok()).flatten();
            let target = target.map(CString::into_bytes);
            Some(Listed { name, attributes: attributes(&stat), target })
        });
        Ok(Page { entries: entries.collect(), more })
    }

    /// Bytes of a regular file, from `offset` on: as many as are wanted, or fewer at its end or if they are many.
    pub fn read(&self, path: &Path, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let file = self.regular(path, OFlags::RDONLY)?;
        if length == 0 {
            return Ok(Vec::new());
        }
        let mut content = Vec::with_capacity(length.min(READ_MAX));
        rustix::io::pread(&file, rustix::buffer::spare_capacity(&mut content), offset)?;
        content.truncate(length);
        Ok(content)
    }

    fn regular(&self, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        let file = self.beneath(path, OFlags::PATH)?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
        if kind == FileType::Directory {
            return Err(Errno::ISDIR);
        }
        if kind != FileType::RegularFile {
            return Err(Errno::INVAL);
        }
        self.beneath(path, flags | OFlags::NONBLOCK)
    }

    /// Begins to write a file whose directory is there. Whatever is at `path` stays until [`Upload::finish`].
    pub fn write(self: &Arc<Self>, path: &Path, options: WriteOptions) -> io::Result<Upload> {
        let (parent, name) = self.parent(path)?;
        let before = self.entry(&parent, name.as_bytes()).ok().map(|(_, _, stat)| stat);
        if before.is_some_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory) {
            return Err(Errno::ISDIR.into());
        }
        let hidden = self.hidden()?;
        let (file, temporary) = temporary(&hidden)?;
        let upload =
            Upload { file, temporary, hidden, parent, name: name.to_owned(), finished: false };
        let owner = options
            .owner
            .or(before.map(|stat| Owner { user: stat.st_uid, group: stat.st_gid }))
            .unwrap_or(Owner { user: 0, group: 0 });
        chown(&upload.file, Some(owner.user), Some(owner.group))?;
        let mode = options.mode.or(before.map(|stat| stat.st_mode)).unwrap_or(0o644);
        chmod(&upload.file, mode)?;
        Ok(upload)
    }

    /// Makes a directory, and those above it that are not there.
    pub fn make_dirs(&self, path: &Path, mode: u32, owner: Owner) -> io::Result<()> {
        if is_hidden(path) {
            return Err(Errno::NOENT.into());
        }
        let mut made = PathBuf::new();
        for part in path.strip_prefix("/").unwrap_or(path).components() {
            let directory = self.beneath(&made, OFlags::PATH | OFlags::DIRECTORY)?;
            made.push(part);
            match rustix::fs::mkdirat(&directory, part.as_os_str(), Mode::from_raw_mode(mode)) {
                Ok(()) => {
                    let file = self.beneath(&made, OFlags::PATH)?;
                    chown(&file, Some(owner.user), Some(owner.group))?;
                    chmod(&file, mode)?;
                }
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        // What was there must be a directory too.
        self.beneath(&made, OFlags::PATH | OFlags::DIRECTORY)?;
        Ok(())
    }

    /// Removes a file, a link, or a directory with all that is in it if `recursive`, else only an empty one.
    pub fn remove(&self, path: &Path, recursive: bool) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        let (id, _, stat) = self.entry(&parent, name.as_bytes())?;
        self.forget(id);
        if recursive {
            return Ok(remove(&parent, name)?);
        }
        let directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        let flags = if directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        Ok(rustix::fs::unlinkat(&parent, name, flags)?)
    }

    /// Moves a file or directory; a file at `to` is replaced.
    pub fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let ((from, name), (to, to_name)) = (self.parent(from)?, self.parent(to)?);
        Ok(rustix::fs::renameat(&from, name, &to, to_name)?)
    }

    /// The directory that something is in, and its name there.
    fn parent<'a>(&self, path: &'a Path) -> Result<(OwnedFd, &'a OsStr), Errno> {
        let path = path.strip_prefix("/").unwrap_or(path);
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Errno::INVAL);
        };
        if is_hidden(path) {
            return Err(Errno::NOENT);
        }
        Ok((self.beneath(parent, OFlags::RDONLY | OFlags::DIRECTORY)?, name))
    }
}

/// A new file in the hidden directory.
fn temporary(hidden: &OwnedFd) -> io::Result<(OwnedFd, String)> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mut random = [0; UPLOAD_NAME];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let number: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let name = format!("upload-{number}");
    Ok((rustix::fs::openat(hidden, &name, flags, Mode::RUSR | Mode::WUSR)?, name))
}

/// A file that is being written. Dropped before it is finished, it was never there.
#[derive(Debug)]
pub struct Upload {
    file: OwnedFd,
    temporary: String,
    hidden: OwnedFd,
    parent: OwnedFd,
    name: OsString,
    finished: bool,
}

impl io::Write for Upload {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(&self.file, bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Upload {
    /// Puts it where it belongs, in place of what was there, once it is on the disk.
    pub fn finish(mut self) -> io::Result<Attributes> {
        rustix::fs::fsync(&self.file)?;
        rustix::fs::renameat(&self.hidden, &self.temporary, &self.parent, &self.name)?;
        self.finished = true;
        Ok(attributes(&rustix::fs::fstat(&self.file)?))
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !self.finished {
            let _ = rustix::fs::unlinkat(&self.hidden, &self.temporary, AtFlags::empty());
        }
    }
}

/// Removes whatever has that name, with all that is in it.
pub(crate) fn remove(parent: impl AsFd, name: &OsStr) -> Result<(), Errno> {
    match rustix::fs::unlinkat(&parent, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => {}
        removed => return removed,
    }
    empty(&parent, name)?;
    rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR)
}

/// Removes all that is in the directory `name`. Without recursion, and with few open directories: a guest may have made it
/// deeper than any path.
pub(crate) fn empty(parent: impl AsFd, name: &OsStr) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    // From the top down to where we are, each with its name in the one above.
    let mut way = vec![(top, OsString::new())];
    let mut lifted = 0_u32;
    while let Some((directory, _)) = way.last() {
        match remove_files(directory)? {
            Some(below) if way.len() < DEPTH_MAX => {
                let opened = rustix::fs::openat(directory, &below, flags, Mode::empty())?;
                way.push((opened, below));
            }
            Some(below) => {
                let (top, name) = (&way[0].0, format!(".torpor-lifted-{lifted}"));
                lifted += 1;
                match rustix::fs::renameat_with(
                    directory,
                    &below,
                    top,
                    name,
                    RenameFlags::NOREPLACE,
                ) {
                    Ok(()) => way.truncate(1),
                    Err(Errno::EXIST) => {}
                    Err(errno) => return Err(errno),
                }
            }
            None => {
                let Some((_, name)) = way.pop() else { break };
                if let Some((above, _)) = way.last() {
                    rustix::fs::unlinkat(above, name, AtFlags::REMOVEDIR)?;
                }
            }
        }
    }
    Ok(())
}

/// Removes what is no directory, up to the first one that is, and gives that.
fn remove_files(directory: &OwnedFd) -> Result<Option<OsString>, Errno> {
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR) => return Ok(Some(OsString::from_vec(name.to_bytes().to_vec()))),
            Err(errno) => return Err(errno),
        }
    }
    Ok(None)
}

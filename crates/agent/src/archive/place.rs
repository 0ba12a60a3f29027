//! A directory that archives are unpacked into, and cannot be left.
//!
//! Names are walked part by part from an open directory, and no part may be a symbolic link: neither
//! one that the archive brought along, nor one that somebody puts there meanwhile.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;
use torpor_protocol::guest::{Failure, FailureCode};

use crate::failure::{failure, refused};
use crate::files::{DIRECTORY_MODE, MODE_BITS};

pub(super) struct Place {
    root: Rc<OwnedFd>,
    /// Owns directories that are made on the way.
    owner: Option<(u32, u32)>,
    /// Where the last entry went: the next one often goes there too.
    last: (Vec<u8>, Rc<OwnedFd>),
}

/// A name in an open directory.
pub(super) struct Spot {
    pub(super) directory: Rc<OwnedFd>,
    pub(super) name: Vec<u8>,
}

/// Owner, mode and time of what is unpacked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dress {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mode: u32,
    pub(super) modified: (i64, u32),
}

impl Place {
    pub(super) fn new(root: &Path, owner: Option<(u32, u32)>) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY;
        let root = Rc::new(rustix::fs::open(root, flags, Mode::empty())?);
        Ok(Self { last: (Vec::new(), root.clone()), root, owner })
    }

    /// The spot that an entry's name means; none is the directory itself. Missing directories on the
    /// way are made.
    pub(super) fn spot(&mut self, name: &[u8]) -> Result<Option<Spot>, Failure> {
        self.reach(name, Way::Made).map_err(|error| astray(name, error))
    }

    /// The spot of something that is there, if its directory is.
    pub(super) fn find(&mut self, name: &[u8]) -> Result<Option<Spot>, Failure> {
        match self.reach(name, Way::Found) {
            Err(Astray::Kernel(Errno::NOENT)) => Ok(None),
            reached => reached.map_err(|error| astray(name, error)),
        }
    }

    /// The directory that an entry's name means, if it is there and one; the directory itself too.
    pub(super) fn open(&mut self, name: &[u8]) -> Result<Option<OwnedFd>, Failure> {
        let opened = if parts(name).is_ok_and(|parts| parts.is_empty()) {
            open_directory(self.root.as_fd(), b".")
        } else if let Some(spot) = self.find(name)? {
            open_directory(spot.directory.as_fd(), &spot.name)
        } else {
            return Ok(None);
        };
        match opened {
            Ok(opened) => Ok(Some(opened)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(error) => Err(astray(name, Astray::Kernel(error))),
        }
    }

    fn reach(&mut self, name: &[u8], way: Way) -> Result<Option<Spot>, Astray> {
        let mut parts = parts(name)?;
        let Some(last) = parts.pop() else { return Ok(None) };
        let path = parts.join(&b'/');
        if self.last.0 != path {
            let directory = self.walk(&parts, way).map_err(Astray::Kernel)?;
            self.last = (path, directory);
        }
        Ok(Some(Spot { directory: self.last.1.clone(), name: last.to_vec() }))
    }

    fn walk(&self, parts: &[&[u8]], way: Way) -> Result<Rc<OwnedFd>, Errno> {
        let mut directory = self.root.clone();
        for part in parts {
            directory = Rc::new(match open_directory(directory.as_fd(), part) {
                Err(Errno::NOENT) if way == Way::Made => {
                    rustix::fs::mkdirat(&directory, *part, Mode::from_raw_mode(DIRECTORY_MODE))?;
                    if let Some((uid, gid)) = self.owner {
                        chown(directory.as_fd(), part, uid, gid)?;
                    }
                    open_directory(directory.as_fd(), part)?
                }
                opened => opened?,
            });
        }
        Ok(directory)
    }

    /// Directories may have gone or changed.
    pub(super) fn forget_last(&mut self) {
        self.last = (Vec::new(), self.root.clone());
    }
}

/// Whether missing directories are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Made,
    Found,
}

/// Why a name leads nowhere.
enum Astray {
    Name(&'static str),
    Kernel(Errno),
}

fn astray(name: &[u8], why: Astray) -> Failure {
    let shown = String::from_utf8_lossy(name);
    let invalid = |why: &str| failure(FailureCode::Invalid, format!("{shown}: {why}"));
    match why {
        Astray::Name(why) => invalid(why),
        Astray::Kernel(Errno::NOTDIR | Errno::LOOP) => {
            invalid("the way there is not a plain directory")
        }
        Astray::Kernel(error) => refused(&shown, error),
    }
}

/// The parts of an entry's name; none for the directory itself.
fn parts(name: &[u8]) -> Result<Vec<&[u8]>, Astray> {
    if name.starts_with(b"/") {
        return Err(Astray::Name("the archive holds an absolute name"));
    }
    let parts = name.split(|byte| *byte == b'/');
    let parts: Vec<&[u8]> = parts.filter(|part| !part.is_empty() && *part != b".").collect();
    if parts.contains(&&b".."[..]) {
        return Err(Astray::Name("the archive holds a name that leads outside"));
    }
    Ok(parts)
}

/// An entry's name without what says nothing.
pub(super) fn plain(name: &[u8]) -> Result<Vec<u8>, Failure> {
    Ok(parts(name).map_err(|error| astray(name, error))?.join(&b'/'))
}

/// Opens a directory, and never what a link leads to. In two steps, because gVisor follows a link that
/// is opened as a directory, whatever it is told.
pub(super) fn open_directory(directory: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = rustix::fs::openat(directory, name, flags, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) != FileType::Directory {
        return Err(Errno::NOTDIR);
    }
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY;
    rustix::fs::openat(&found, ".", flags, Mode::empty())
}

fn chown(directory: BorrowedFd<'_>, name: &[u8], uid: u32, gid: u32) -> Result<(), Errno> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    rustix::fs::chownat(directory, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
}

/// Takes away a name of anything but a directory; one that is not there is fine.
pub(super) fn unlink(directory: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

impl Spot {
    /// Makes room: takes away what is there, unless it is a directory.
    pub(super) fn clear(&self) -> Result<(), Errno> {
        unlink(self.directory.as_fd(), &self.name)
    }

    pub(super) fn make_file(&self) -> Result<OwnedFd, Errno> {
        self.clear()?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(&*self.directory, &self.name, flags, Mode::from_raw_mode(0o600))
    }

    /// A directory that is there already is fine.
    pub(super) fn make_directory(&self) -> Result<OwnedFd, Errno> {
        let mode = Mode::from_raw_mode(DIRECTORY_MODE);
        match open_directory(self.directory.as_fd(), &self.name) {
            Ok(opened) => return Ok(opened),
            Err(Errno::NOENT) => {}
            Err(Errno::NOTDIR | Errno::LOOP) => self.clear()?,
            Err(error) => return Err(error),
        }
        rustix::fs::mkdirat(&*self.directory, &self.name, mode)?;
        open_directory(self.directory.as_fd(), &self.name)
    }

    /// A fifo or a device; opening it could wait or have effects, so it is dressed without.
    pub(super) fn make_node(
        &self,
        kind: FileType,
        device: (u32, u32),
        dress: Dress,
    ) -> Result<(), Errno> {
        self.clear()?;
        let directory = &*self.directory;
        let mode = Mode::from_raw_mode(dress.mode & MODE_BITS);
        let device = rustix::fs::makedev(device.0, device.1);
        rustix::fs::mknodat(directory, &self.name, kind, mode, device)?;
        chown(self.directory.as_fd(), &self.name, dress.uid, dress.gid)?;
        // The mode lacks what the umask forbids. Set by the number of the descriptor, because a name
        // could be a link by now.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let node = rustix::fs::openat(directory, &self.name, flags, Mode::empty())?;
        let by_number = format!("/proc/self/fd/{}", node.as_raw_fd());
        rustix::fs::chmod(by_number, mode)?;
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::utimensat(directory, &self.name, &dress.times(), flags)
    }

    pub(super) fn make_symlink(&self, target: &[u8], dress: Dress) -> Result<(), Errno> {
        self.clear()?;
        rustix::fs::symlinkat(target, &*self.directory, &self.name)?;
        chown(self.directory.as_fd(), &self.name, dress.uid, dress.gid)?;
        let times = dress.times();
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::utimensat(&*self.directory, &self.name, &times, flags)
    }

    pub(super) fn make_link(&self, to: &Spot) -> Result<(), Errno> {
        if Rc::ptr_eq(&self.directory, &to.directory) && self.name == to.name {
            return Ok(());
        }
        self.clear()?;
        let flags = AtFlags::empty();
        rustix::fs::linkat(&*to.directory, &to.name, &*self.directory, &self.name, flags)
    }
}

impl Dress {
    /// Owner first: changing it takes special bits off the mode.
    pub(super) fn put_on(&self, file: &OwnedFd) -> Result<(), Errno> {
        rustix::fs::fchown(file, Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))?;
        rustix::fs::fchmod(file, Mode::from_raw_mode(self.mode & MODE_BITS))?;
        self.put_time(file)
    }

    pub(super) fn put_time(&self, file: &OwnedFd) -> Result<(), Errno> {
        rustix::fs::futimens(file, &self.times())
    }

    fn times(&self) -> Timestamps {
        let time = Timespec { tv_sec: self.modified.0, tv_nsec: self.modified.1.into() };
        Timestamps { last_access: time, last_modification: time }
    }
}

//! What an OCI layer means beyond its entries: what it takes away, and what it must leave alone.
//!
//! `.wh.NAME` takes NAME away, `.wh..wh..opq` everything in its directory: always what was there before
//! the layer, never what the layer itself brought, in whatever order it says so. Directories are opened
//! one by one and never through a symbolic link; what is mounted somewhere below is left alone.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType};
use rustix::io::Errno;
use torpor_protocol::guest::{Failure, FailureCode};

use super::place::{Spot, open_directory, unlink};
use crate::failure::{cannot, failure};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Notes that some tools leave for themselves.
const MARK: &[u8] = b".wh..wh.";
/// The kernel's and the agent's: nothing that was saved of another machine belongs there.
const FOREIGN: [&[u8]; 5] = [b"proc", b"sys", b"dev", b".torpor", b"run/torpor"];
/// Entries of a layer that are remembered; each takes far less than the file it made.
const BROUGHT_MAX: usize = 1 << 22;
/// Levels of directories, each an open descriptor: what a path of one-letter names can have.
const DEPTH_MAX: usize = 2048;

pub(super) struct Layer {
    /// Where it is unpacked, from the root of the machine.
    base: Vec<u8>,
    /// What it brought: of each path a number that nobody outside can guess.
    brought: HashSet<u64>,
    numbers: RandomState,
}

/// What an entry says. Paths are relative to where the layer is unpacked.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// There is such a thing.
    Entry,
    /// Nothing of this layer's business.
    Foreign,
    /// There is no such path any more.
    Without(Vec<u8>),
    /// This directory holds nothing of before.
    Opaque(Vec<u8>),
}

impl Layer {
    pub(super) fn new(place: &Path) -> Result<Self, Failure> {
        let found = place.canonicalize().map_err(cannot(place.display()))?;
        let base = found.as_os_str().as_bytes();
        let base = base.strip_prefix(b"/").unwrap_or(base).to_vec();
        let layer = Self { base, brought: HashSet::new(), numbers: RandomState::new() };
        if layer.is_foreign(b"") {
            let message = format!("{}: no place for a layer", place.display());
            return Err(failure(FailureCode::Invalid, message));
        }
        Ok(layer)
    }

    /// `literal`: the name is no whiteout, whatever it begins with.
    pub(super) fn meaning(&self, path: &[u8], literal: bool) -> Result<Meaning, Failure> {
        let (directory, name) = split(path);
        if self.is_foreign(path) {
            return Ok(Meaning::Foreign);
        }
        if literal {
            return Ok(Meaning::Entry);
        }
        if name == OPAQUE {
            return Ok(Meaning::Opaque(directory.to_vec()));
        }
        if name.starts_with(MARK) {
            return Ok(Meaning::Foreign);
        }
        let Some(hidden) = name.strip_prefix(WHITEOUT) else { return Ok(Meaning::Entry) };
        if matches!(hidden, b"" | b"." | b"..") {
            let message = "the archive removes a name that is none";
            return Err(failure(FailureCode::Invalid, message));
        }
        let path = join(directory, hidden);
        Ok(if self.is_foreign(&path) { Meaning::Foreign } else { Meaning::Without(path) })
    }

    pub(super) fn is_foreign(&self, path: &[u8]) -> bool {
        let whole = join(&self.base, path);
        let within = |place: &[u8]| {
            whole.strip_prefix(place).is_some_and(|rest| matches!(rest.first(), None | Some(b'/')))
        };
        FOREIGN.iter().any(|place| within(place))
    }

    /// The layer has this path.
    pub(super) fn bring(&mut self, path: &[u8]) -> Result<(), Failure> {
        if self.brought.len() >= BROUGHT_MAX {
            let message = format!("the layer has more than {BROUGHT_MAX} entries");
            return Err(failure(FailureCode::Limit, message));
        }
        self.brought.insert(self.numbers.hash_one(path));
        Ok(())
    }

    fn has_brought(&self, path: &[u8]) -> bool {
        self.brought.contains(&self.numbers.hash_one(path))
    }

    /// Takes away what is at the spot, but for what the layer brought.
    pub(super) fn take_away(&self, spot: &Spot, path: &[u8]) -> Result<(), Errno> {
        self.remove(spot, path, |path| self.has_brought(path))
    }

    /// Takes away what is at the spot, for something else that comes there.
    pub(super) fn make_way(&self, spot: &Spot, path: &[u8]) -> Result<(), Errno> {
        self.remove(spot, path, |_| false)
    }

    fn remove(&self, spot: &Spot, path: &[u8], kept: impl Fn(&[u8]) -> bool) -> Result<(), Errno> {
        let above = spot.directory.as_fd();
        match open_directory(above, &spot.name) {
            Ok(opened) if device(opened.as_fd())? != device(above)? => Ok(()),
            Ok(opened) => {
                self.empty(opened, path, &kept)?;
                if kept(path) { Ok(()) } else { remove_emptied(above, &spot.name) }
            }
            Err(Errno::NOTDIR | Errno::LOOP) if kept(path) => Ok(()),
            Err(Errno::NOTDIR | Errno::LOOP) => spot.clear(),
            Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Takes away what is in a directory, but for what the layer brought.
    pub(super) fn hollow(&self, directory: OwnedFd, path: &[u8]) -> Result<(), Errno> {
        self.empty(directory, path, &|path| self.has_brought(path))
    }

    fn empty(
        &self,
        directory: OwnedFd,
        path: &[u8],
        kept: &impl Fn(&[u8]) -> bool,
    ) -> Result<(), Errno> {
        let device = device(directory.as_fd())?;
        let mut levels = vec![Level::new(directory, path.to_vec())?];
        loop {
            let depth = levels.len();
            let Some(level) = levels.last_mut() else { return Ok(()) };
            let Some(name) = level.next()? else {
                let left = levels.pop();
                if let (Some(left), Some(above)) = (left, levels.last())
                    && !kept(&left.path)
                {
                    remove_emptied(above.entries.fd()?, split(&left.path).1)?;
                }
                continue;
            };
            let path = join(&level.path, &name);
            if self.is_foreign(&path) {
                continue;
            }
            match level.below(&name, device)? {
                Below::Directory(directory) if depth < DEPTH_MAX => {
                    levels.push(Level::new(directory, path)?);
                }
                Below::Directory(_) => return Err(Errno::NAMETOOLONG),
                Below::Other if !kept(&path) => unlink(level.entries.fd()?, &name)?,
                Below::Other | Below::Mounted => {}
            }
        }
    }
}

/// One directory on the way down.
struct Level {
    path: Vec<u8>,
    entries: Dir,
    kind: FileType,
}

enum Below {
    Directory(OwnedFd),
    /// Of another file system.
    Mounted,
    Other,
}

impl Level {
    fn new(directory: OwnedFd, path: Vec<u8>) -> Result<Self, Errno> {
        Ok(Self { path, entries: Dir::new(directory)?, kind: FileType::Unknown })
    }

    /// The next name.
    fn next(&mut self) -> Result<Option<Vec<u8>>, Errno> {
        for entry in &mut self.entries {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                self.kind = entry.file_type();
                return Ok(Some(name.to_vec()));
            }
        }
        Ok(None)
    }

    /// What has the name that came last.
    fn below(&self, name: &[u8], own: u64) -> Result<Below, Errno> {
        if !matches!(self.kind, FileType::Directory | FileType::Unknown) {
            return Ok(Below::Other);
        }
        match open_directory(self.entries.fd()?, name) {
            Ok(opened) if device(opened.as_fd())? == own => Ok(Below::Directory(opened)),
            Ok(_) => Ok(Below::Mounted),
            Err(Errno::NOTDIR | Errno::LOOP | Errno::NOENT) => Ok(Below::Other),
            Err(error) => Err(error),
        }
    }
}

/// Removes a directory, unless something was kept in it.
fn remove_emptied(above: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    match rustix::fs::unlinkat(above, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST | Errno::BUSY) => Ok(()),
        Err(error) => Err(error),
    }
}

fn device(directory: BorrowedFd<'_>) -> Result<u64, Errno> {
    Ok(rustix::fs::fstat(directory)?.st_dev)
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"", path),
    }
}

fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    match (directory, name) {
        (b"", only) | (only, b"") => only.to_vec(),
        (directory, name) => [directory, b"/", name].concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meaning(path: &str) -> Meaning {
        Layer::new(Path::new("/")).unwrap().meaning(path.as_bytes(), false).unwrap()
    }

    #[test]
    fn whiteouts_name_what_goes() {
        assert_eq!(meaning("a/.wh.b"), Meaning::Without(b"a/b".to_vec()));
        assert_eq!(meaning(".wh.b"), Meaning::Without(b"b".to_vec()));
        assert_eq!(meaning("a/b/.wh..wh..opq"), Meaning::Opaque(b"a/b".to_vec()));
        assert_eq!(meaning(".wh..wh..opq"), Meaning::Opaque(Vec::new()));
        assert_eq!(meaning(".wh..wh.plnk"), Meaning::Foreign);
        assert_eq!(meaning("a/.whatever"), Meaning::Entry);
        let layer = Layer::new(Path::new("/")).unwrap();
        assert_eq!(layer.meaning(b"a/.wh.b", true).unwrap(), Meaning::Entry);
        assert_eq!(layer.meaning(b"proc/.wh.b", true).unwrap(), Meaning::Foreign);
        for wrong in ["a/.wh.", "a/.wh..", "a/.wh..."] {
            assert_eq!(
                layer.meaning(wrong.as_bytes(), false).unwrap_err().code,
                FailureCode::Invalid
            );
        }
    }

    #[test]
    fn the_kernels_and_the_agents_places_are_foreign() {
        for path in ["proc", "proc/1/x", "sys/a", "dev", ".torpor/agent", "run/torpor/sudo"] {
            assert_eq!(meaning(path), Meaning::Foreign, "{path}");
        }
        for path in ["dev/.wh.null", ".wh.proc", ".wh..torpor", "run/.wh.torpor"] {
            assert_eq!(meaning(path), Meaning::Foreign, "{path}");
        }
        for path in ["process", "home/dev", "run", "run/torpors", "", ".torpor-1"] {
            assert_eq!(meaning(path), Meaning::Entry, "{path}");
        }
        let elsewhere = Layer::new(Path::new("/usr")).unwrap();
        assert_eq!(elsewhere.meaning(b"proc/1", false).unwrap(), Meaning::Entry);
        assert!(Layer::new(Path::new("/proc/self/..")).is_err());
    }
}

//! A directory into which files of a stranger are put.
//!
//! Invariants
//! - every path is walked name by name from the directory's descriptor, following no symbolic link,
//!   so nothing is made outside, whatever links exist or are made meanwhile;
//! - a file appears under its name when it is whole: a transfer that breaks off leaves what was;
//! - no set-uid, set-gid or sticky bits.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, fchmod, futimens, linkat, mkdirat,
    openat, renameat, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;

/// Names in one path; deeper trees are nobody's files.
const DEPTH_MAX: usize = 512;
/// Tries to find a free name for a file under way.
const NAME_TRIES: u32 = 1000;
/// Bytes that are read and written at once.
const PIECE: usize = 64 * 1024;
/// What a hole consists of, on the usual filesystems.
const BLOCK: usize = 4096;

/// An open directory of ours.
#[derive(Debug)]
pub(crate) struct Directory {
    root: OwnedFd,
}

impl Directory {
    /// Opens it; the path is the user's own and may go through links.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { root: File::open(path)?.into() })
    }

    /// Makes the directory and those above it, if they are missing.
    pub(crate) fn make(&self, path: &Path, mode: u32) -> io::Result<()> {
        let names = names(path)?;
        let Some((last, above)) = names.split_last() else { return Ok(()) };
        let parent = self.walk(above)?;
        // Ours to write in, or what comes next could not be put into it.
        let mode = Mode::from_raw_mode((mode & 0o777) | 0o700);
        match mkdirat(&parent, *last, mode) {
            Ok(()) => fchmod(enter(&parent, last)?, mode).map_err(Into::into),
            Err(Errno::EXIST) => enter(&parent, last).map(drop),
            Err(error) => Err(error.into()),
        }
    }

    /// Puts a file there, of exactly `size` bytes if that is known.
    pub(crate) fn file(
        &self,
        path: &Path,
        mode: u32,
        modified: Option<i64>,
        size: Option<u64>,
        content: &mut dyn Read,
    ) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        let draft = Draft::new(parent, name)?;
        let copied = copy_around_zeros(content, &draft.file)?;
        if size.is_some_and(|size| size != copied) {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it broke off"));
        }
        draft.finish(name, mode, modified)
    }

    /// Puts a file of holes there, with `content` in its runs: exactly that much.
    pub(crate) fn sparse_file(
        &self,
        path: &Path,
        mode: u32,
        modified: Option<i64>,
        size: u64,
        runs: &[Range<u64>],
        content: &mut dyn Read,
    ) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        let draft = Draft::new(parent, name)?;
        draft.file.set_len(size)?;
        let mut buffer = vec![0; PIECE];
        for run in runs {
            let mut at = run.start;
            while at < run.end {
                let most = usize::try_from(run.end - at).unwrap_or(PIECE).min(PIECE);
                content.read_exact(&mut buffer[..most])?;
                write_around_zeros(&draft.file, at, &buffer[..most])?;
                at += most as u64;
            }
        }
        if content.read(&mut buffer)? > 0 {
            let why = "it has more than its map says";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        draft.finish(name, mode, modified)
    }

    /// Makes a symbolic link. Where it points is not looked at: we never follow it.
    pub(crate) fn symlink(&self, path: &Path, target: &OsStr) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        replace(&parent, name, || symlinkat(target, &parent, name))
    }

    /// Makes another name for a file of this directory.
    pub(crate) fn hard_link(&self, path: &Path, target: &Path) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        let (target_parent, target_name) = self.parent(target)?;
        let link = || linkat(&target_parent, target_name, &parent, name, AtFlags::empty());
        replace(&parent, name, link)
    }

    fn parent<'a>(&self, path: &'a Path) -> io::Result<(OwnedFd, &'a OsStr)> {
        let names = names(path)?;
        let (last, above) = names
            .split_last()
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path is empty"))?;
        Ok((self.walk(above)?, last))
    }

    /// Goes down, making what is missing.
    fn walk(&self, names: &[&OsStr]) -> io::Result<OwnedFd> {
        let mut here = self.root.try_clone()?;
        for name in names {
            match mkdirat(&here, *name, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => here = enter(&here, name)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(here)
    }
}

/// The names of a relative path that stays below where it starts.
fn names(path: &Path) -> io::Result<Vec<&OsStr>> {
    let bad = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidData, why.to_owned()));
    let mut names = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => names.push(name),
            Component::CurDir => (),
            Component::ParentDir => return bad("the path has '..' in it"),
            Component::RootDir | Component::Prefix(_) => return bad("the path is absolute"),
        }
    }
    if names.len() > DEPTH_MAX { bad("the path is too deep") } else { Ok(names) }
}

fn enter(here: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(here, name, flags, Mode::empty()).map_err(|error| match error {
        Errno::LOOP | Errno::NOTDIR => io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{} is no directory, and links are not followed", name.display()),
        ),
        other => other.into(),
    })
}

/// Makes something under a name, in place of a file or link that is there.
fn replace(parent: &OwnedFd, name: &OsStr, make: impl Fn() -> Result<(), Errno>) -> io::Result<()> {
    match make() {
        Err(Errno::EXIST) => {
            unlinkat(parent, name, AtFlags::empty())?;
            make().map_err(Into::into)
        }
        other => other.map_err(Into::into),
    }
}

/// As `io::copy`, in pieces that are worth a system call.
fn copy(from: &mut dyn Read, to: &mut File) -> io::Result<u64> {
    let mut buffer = vec![0; PIECE];
    let mut copied = 0;
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(copied),
            Ok(read) => {
                to.write_all(&buffer[..read])?;
                copied += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
            Err(error) => return Err(error),
        }
    }
}

/// The same into an empty file; blocks of zeros become holes.
fn copy_around_zeros(from: &mut dyn Read, to: &File) -> io::Result<u64> {
    let mut piece = Vec::with_capacity(PIECE);
    let mut copied = 0;
    loop {
        piece.clear();
        (&mut *from).take(PIECE as u64).read_to_end(&mut piece)?;
        if piece.is_empty() {
            to.set_len(copied)?;
            return Ok(copied);
        }
        write_around_zeros(to, copied, &piece)?;
        copied += piece.len() as u64;
    }
}

/// Writes what is not zeros; there are zeros already.
fn write_around_zeros(to: &File, mut at: u64, mut piece: &[u8]) -> io::Result<()> {
    let is_hole = |block: &&[u8]| block.iter().all(|byte| *byte == 0);
    let blocks: Vec<&[u8]> = piece.chunks(BLOCK).collect();
    for run in blocks.chunk_by(|a, b| is_hole(a) == is_hole(b)) {
        let (bytes, rest) = piece.split_at(run.iter().map(|block| block.len()).sum());
        if !run.first().is_some_and(is_hole) {
            to.write_all_at(bytes, at)?;
        }
        (at, piece) = (at + bytes.len() as u64, rest);
    }
    Ok(())
}

fn set_modified(file: &File, seconds: i64) -> io::Result<()> {
    let times = Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec { tv_sec: seconds, tv_nsec: 0 },
    };
    futimens(file, &times).map_err(Into::into)
}

/// A file under way, under a name of its own; dropped before it is published, it goes.
struct Draft {
    parent: OwnedFd,
    name: OsString,
    file: File,
    published: bool,
}

impl Draft {
    fn new(parent: OwnedFd, for_name: &OsStr) -> io::Result<Self> {
        // A directory under that name would be found only after the last byte.
        if let Ok(found) = statat(&parent, for_name, AtFlags::SYMLINK_NOFOLLOW)
            && rustix::fs::FileType::from_raw_mode(found.st_mode).is_dir()
        {
            return Err(Errno::ISDIR.into());
        }
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        for attempt in 0..NAME_TRIES {
            let name = OsString::from(format!(".torpor-{}-{attempt}.part", std::process::id()));
            match openat(&parent, &name, flags, Mode::from_raw_mode(0o600)) {
                Ok(file) => return Ok(Self { parent, name, file: file.into(), published: false }),
                Err(Errno::EXIST) => (),
                Err(error) => return Err(error.into()),
            }
        }
        Err(Errno::EXIST.into())
    }

    /// Gives it its mode and time, and its name.
    fn finish(self, name: &OsStr, mode: u32, modified: Option<i64>) -> io::Result<()> {
        fchmod(&self.file, Mode::from_raw_mode(mode & 0o777))?;
        if let Some(seconds) = modified {
            set_modified(&self.file, seconds)?;
        }
        self.publish(name)
    }

    fn publish(mut self, name: &OsStr) -> io::Result<()> {
        renameat(&self.parent, &self.name, &self.parent, name)?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.published {
            let _ = unlinkat(&self.parent, &self.name, AtFlags::empty());
        }
    }
}

/// Puts one file where the user said: replaced as a whole if it is a file (or a link to one),
/// written to if it is a device or a pipe.
pub(crate) fn put_file(
    path: &Path,
    mode: u32,
    size: Option<u64>,
    content: &mut dyn Read,
) -> io::Result<()> {
    let path = match fs::metadata(path) {
        Ok(found) if found.is_file() => fs::canonicalize(path)?,
        Ok(found) if found.is_dir() => return Err(Errno::ISDIR.into()),
        Ok(_) => {
            let mut file = fs::OpenOptions::new().write(true).open(path)?;
            return copy(content, &mut file).map(drop);
        }
        Err(_) => path.to_owned(),
    };
    let above = match path.parent() {
        Some(above) if !above.as_os_str().is_empty() => above.to_owned(),
        Some(_) | None => PathBuf::from("."),
    };
    let name = path.file_name().ok_or(Errno::INVAL)?;
    Directory::open(&above)?.file(Path::new(name), mode, None, size, content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    struct Broken;

    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("the line is dead"))
        }
    }

    #[test]
    fn a_transfer_that_breaks_off_leaves_what_was() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("notes");
        fs::write(&path, "old").unwrap();
        assert!(put_file(&path, 0o644, None, &mut Broken).is_err());
        assert!(put_file(&path, 0o644, Some(9), &mut &b"short"[..]).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1, "a draft was left behind");
    }

    #[test]
    fn a_file_replaces_the_target_of_the_users_own_link() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("real"), "old").unwrap();
        symlink("real", root.path().join("link")).unwrap();
        put_file(&root.path().join("link"), 0o640, None, &mut &b"new"[..]).unwrap();
        assert_eq!(fs::read_to_string(root.path().join("real")).unwrap(), "new");
        assert!(root.path().join("link").is_symlink());
    }

    #[test]
    fn special_bits_are_dropped() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("tool");
        put_file(&path, 0o6755, None, &mut &b"x"[..]).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o755);
    }

    #[test]
    fn a_device_is_written_to_and_not_replaced() {
        put_file(Path::new("/dev/null"), 0o644, None, &mut &b"x"[..]).unwrap();
        assert_eq!(fs::metadata("/dev/null").unwrap().mode() & 0o170_000, 0o020_000);
    }
}

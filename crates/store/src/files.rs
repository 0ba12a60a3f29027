//! Small promises about files that the rest of the store is built on: writes that survive a crash,
//! removal that never leaves its tree, and errors that know a full disk.

use std::ffi::{CStr, OsStr};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use torpor_lifecycle::store::StoreError;

/// How often `openat2` is asked again when a rename elsewhere on the host disturbed it.
const RESOLVE_TRIES: usize = 128;

/// `failed("write the image")(error)`, for `map_err`: a full disk becomes what it is.
pub(crate) fn failed<E: Into<io::Error>>(
    action: impl Into<String>,
) -> impl FnOnce(E) -> StoreError {
    let action = action.into();
    move |error| {
        let error = error.into();
        if is_full(&error) {
            return StoreError::DiskFull(format!("could not {action}"));
        }
        StoreError::Failed { action, source: error.into() }
    }
}

pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOSPC | Errno::DQUOT))
}

/// Makes the names in a directory durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Replaces a small file as a whole, durably.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_with_mode(path, bytes, 0o644)
}

/// [`write_whole`] for a file that nobody else may read, at no instant.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_with_mode(path, bytes, 0o600)
}

fn write_with_mode(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let dir = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let draft = path.with_extension("draft");
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(mode).open(&draft)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&draft, path)?;
    sync_dir(dir)
}

/// Removes a tree. Symbolic links are removed, not followed, and what is mounted somewhere in the
/// tree is left alone (the removal then fails). What is not there is fine.
pub(crate) fn remove_tree(path: &Path) -> io::Result<()> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    match File::open(dir) {
        Ok(dir) => remove_at(dir.as_fd(), name),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// [`remove_tree`] for an entry of an open directory.
pub(crate) fn remove_at(dir: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    empty_dir(&open_dir_here(dir, name)?)?;
    match fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Removes everything in an open directory.
pub(crate) fn empty_dir(dir: &OwnedFd) -> io::Result<()> {
    for (name, _) in entries(dir.as_fd())? {
        remove_at(dir.as_fd(), &name)?;
    }
    Ok(())
}

/// Names and types in a directory, sorted, without `.` and `..`.
pub(crate) fn entries(dir: BorrowedFd<'_>) -> io::Result<Vec<(std::ffi::OsString, FileType)>> {
    use std::os::unix::ffi::OsStrExt;
    let mut found = Vec::new();
    for entry in fs::Dir::read_from(dir)? {
        let entry = entry?;
        let name: &CStr = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let name = OsStr::from_bytes(name.to_bytes());
        let mut kind = entry.file_type();
        if kind == FileType::Unknown {
            let stat = fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
            kind = FileType::from_raw_mode(stat.st_mode);
        }
        found.push((name.to_owned(), kind));
    }
    found.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

/// Opens an entry of a directory that is itself a directory: no link, no mount.
fn open_dir_here(dir: BorrowedFd<'_>, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    resolve_at(dir, name, flags, resolve)
}

/// `openat2`, asked again when the kernel could not be sure.
pub(crate) fn resolve_at(
    dir: BorrowedFd<'_>,
    path: &OsStr,
    flags: OFlags,
    resolve: ResolveFlags,
) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC;
    for _ in 1..RESOLVE_TRIES {
        match fs::openat2(dir, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) => {}
            result => return Ok(result?),
        }
    }
    Ok(fs::openat2(dir, path, flags, Mode::empty(), resolve)?)
}

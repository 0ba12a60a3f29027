//! Files of the machine, as root sees them.
//!
//! Paths are absolute and resolved by the kernel: the machine is the boundary, not a directory in
//! it. Each call is short, so it is made on the agent's only thread; what can be long goes chunk by
//! chunk, or to a thread.

mod list;
mod upload;
mod watch;

use std::ffi::OsStr;
use std::fs::{self, Metadata, OpenOptions, Permissions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, lchown};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;
use torpor_protocol::guest::{Failure, FailureCode, FileKind, FileStat, Reply};

pub(crate) use list::list;
pub(crate) use upload::write;
pub(crate) use watch::watch;

use crate::failure::{cannot, failure, refused};
use crate::process::user;
use crate::stream::Stream;

/// The bits of a mode that can be set.
pub(crate) const MODE_BITS: u32 = 0o7777;
/// Directories that nobody gave a mode.
pub(crate) const DIRECTORY_MODE: u32 = 0o755;

/// The path, if the kernel can understand it.
pub(crate) fn absolute(path: &str) -> Result<&Path, Failure> {
    if path.contains('\0') {
        return Err(failure(FailureCode::Invalid, "the path holds a NUL byte"));
    }
    if !path.starts_with('/') {
        return Err(failure(FailureCode::Invalid, format!("{path}: the path is not absolute")));
    }
    Ok(Path::new(path))
}

/// Uid and gid of the user who shall own what is made.
pub(crate) fn owner_ids(owner: Option<&str>) -> Result<Option<(u32, u32)>, Failure> {
    let Some(owner) = owner else { return Ok(None) };
    let account =
        user::find(owner).map_err(|error| failure(FailureCode::Invalid, error.to_string()))?;
    Ok(Some((account.uid, account.gid)))
}

/// The metadata as the daemon sees it. `path` is shown, `target` only asked for if it is a link.
pub(crate) fn describe(
    path: &OsStr,
    found: &Metadata,
    target: impl FnOnce() -> io::Result<PathBuf>,
) -> FileStat {
    let kind = match found.file_type() {
        kind if kind.is_file() => FileKind::File,
        kind if kind.is_dir() => FileKind::Directory,
        kind if kind.is_symlink() => FileKind::Symlink,
        _ => FileKind::Other,
    };
    let target = (kind == FileKind::Symlink).then(|| target().ok()).flatten();
    FileStat {
        path: path.to_string_lossy().into_owned(),
        kind,
        size: found.size(),
        mode: found.mode() & MODE_BITS,
        uid: found.uid(),
        gid: found.gid(),
        modified_at_ms: found
            .mtime()
            .saturating_mul(1000)
            .saturating_add(found.mtime_nsec() / 1_000_000),
        target: target.map(|target| target.to_string_lossy().into_owned()),
    }
}

/// Does not follow a last symbolic link.
pub(crate) fn stat(path: &str) -> Result<FileStat, Failure> {
    let place = absolute(path)?;
    let found = fs::symlink_metadata(place).map_err(cannot(path))?;
    Ok(describe(place.as_os_str(), &found, || fs::read_link(place)))
}

pub(crate) async fn read(
    stream: &Stream,
    path: &str,
    offset: u64,
    length: Option<u64>,
) -> Result<(), Failure> {
    let place = absolute(path)?;
    // Never waits: neither for a writer of a fifo, nor for a special file's next byte.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(place)
        .map_err(cannot(path))?;
    let found = file.metadata().map_err(cannot(path))?;
    regular(path, &found)?;
    file.seek(SeekFrom::Start(offset)).map_err(cannot(path))?;
    stream.reply(&Reply::Stat(describe(place.as_os_str(), &found, || fs::read_link(place)))).await;
    stream.send_all(&mut file.take(length.unwrap_or(u64::MAX))).await.map_err(cannot(path))
}

/// Only files can be read and written: anything else could wait for ever or have effects.
fn regular(path: &str, found: &Metadata) -> Result<(), Failure> {
    if found.is_dir() {
        return Err(refused(path, Errno::ISDIR));
    }
    if !found.is_file() {
        return Err(failure(FailureCode::Invalid, format!("{path}: not a regular file")));
    }
    Ok(())
}

/// Makes a directory and its parents; the mode is for the last one, if it is made.
pub(crate) fn make_dir(
    path: &str,
    mode: Option<u32>,
    owner: Option<&str>,
) -> Result<FileStat, Failure> {
    let place = absolute(path)?;
    make_dirs(place, mode.unwrap_or(DIRECTORY_MODE), owner_ids(owner)?)?;
    stat(path)
}

/// Makes what is missing of the directories down to `place`.
pub(crate) fn make_dirs(place: &Path, mode: u32, owner: Option<(u32, u32)>) -> Result<(), Failure> {
    let named = |place: &Path| place.display().to_string();
    // Without dots at the end, which name a directory that has to be there already.
    let place: &Path = &place.components().collect::<PathBuf>();
    match fs::metadata(place) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => return Err(refused(named(place), Errno::EXIST)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(refused(named(place), error)),
    }
    let mut parents: Vec<&Path> = place.ancestors().skip(1).collect();
    parents.reverse();
    for directory in parents {
        make_one(directory, DIRECTORY_MODE, owner).map_err(cannot(named(directory)))?;
    }
    make_one(place, mode, owner).map_err(cannot(named(place)))
}

fn make_one(directory: &Path, mode: u32, owner: Option<(u32, u32)>) -> io::Result<()> {
    match fs::create_dir(directory) {
        Ok(()) => {
            if let Some((uid, gid)) = owner {
                lchown(directory, Some(uid), Some(gid))?;
            }
            fs::set_permissions(directory, Permissions::from_mode(mode & MODE_BITS))
        }
        // `/a/..` and the like exist without being made.
        Err(_) if fs::metadata(directory).is_ok_and(|found| found.is_dir()) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Moves a file or directory; between file systems, files and links only.
pub(crate) async fn rename(from: &str, to: &str) -> Result<FileStat, Failure> {
    let (from_place, to_place) = (absolute(from)?, absolute(to)?);
    match fs::rename(from_place, to_place) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
            let (source, target) = (from_place.to_owned(), to_place.to_owned());
            let carried = tokio::task::spawn_blocking(move || upload::carry(&source, &target));
            let carried = carried.await.unwrap_or_else(|error| Err(io::Error::other(error)));
            carried.map_err(cannot(format!("cannot move {from} to {to}")))?;
        }
        Err(error) => {
            let missing = error.kind() == io::ErrorKind::NotFound;
            let which = if missing && fs::symlink_metadata(from_place).is_ok() { to } else { from };
            return Err(refused(format!("cannot move {which}"), error));
        }
    }
    stat(to)
}

pub(crate) async fn remove(path: &str, recursive: bool) -> Result<(), Failure> {
    let place = absolute(path)?;
    let found = fs::symlink_metadata(place).map_err(cannot(path))?;
    if !found.is_dir() {
        return fs::remove_file(place).map_err(cannot(path));
    }
    if !recursive {
        return fs::remove_dir(place).map_err(cannot(path));
    }
    let place = place.to_owned();
    let removed = tokio::task::spawn_blocking(move || fs::remove_dir_all(place)).await;
    removed.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(cannot(path))
}

pub(crate) fn chmod(path: &str, mode: u32) -> Result<FileStat, Failure> {
    let place = absolute(path)?;
    fs::set_permissions(place, Permissions::from_mode(mode & MODE_BITS)).map_err(cannot(path))?;
    stat(path)
}

/// The last part of a path, if it names something in a directory.
fn last_part(place: &Path) -> Option<&OsStr> {
    let name = place.file_name()?;
    // `file_name` looks past a trailing `/.`; such a path names a directory.
    place.as_os_str().as_bytes().ends_with(name.as_bytes()).then_some(name)
}

//! Writing a file as a whole: readers see the old one or the new one, never a part.

use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::OFlags;
use rustix::io::Errno;
use torpor_protocol::guest::{Failure, FailureCode, FileStat};

use super::{DIRECTORY_MODE, MODE_BITS, absolute, describe, last_part, make_dirs, owner_ids};
use super::{regular, stat};
use crate::failure::{cannot, failure, refused};
use crate::stream::Stream;

/// Files that nobody gave a mode.
const FILE_MODE: u32 = 0o644;
/// Links that are followed to find the file meant, as the kernel does.
const LINKS_MAX: u32 = 40;

/// Writes what arrives on the stream.
pub(crate) async fn write(
    stream: &Stream,
    path: &str,
    mode: Option<u32>,
    append: bool,
    owner: Option<&str>,
) -> Result<FileStat, Failure> {
    let place = follow(path)?;
    let owner = owner_ids(owner)?;
    let before = existing(path, &place)?;
    if before.is_none() {
        let parent = place.parent().unwrap_or(Path::new("/"));
        make_dirs(parent, DIRECTORY_MODE, owner)?;
    }
    if append {
        let mut file = open_append(&place).map_err(cannot(path))?;
        regular(path, &file.metadata().map_err(cannot(path))?)?;
        dress(&file, before.as_ref(), mode, owner).map_err(cannot(path))?;
        while let Some(bytes) = stream.receive().await {
            file.write_all(&bytes).map_err(cannot(path))?;
        }
        return stat(path);
    }
    let mut draft = Draft::new(&place).map_err(cannot(path))?;
    while let Some(bytes) = stream.receive().await {
        draft.file.write_all(&bytes).map_err(cannot(path))?;
    }
    dress(&draft.file, before.as_ref(), mode, owner).map_err(cannot(path))?;
    let written = draft.file.metadata().map_err(cannot(path))?;
    draft.publish(&place).map_err(cannot(path))?;
    Ok(describe(path.as_ref(), &written, || fs::read_link(&place)))
}

/// The place that is written when `path` is: links stay and what they point to is replaced.
fn follow(path: &str) -> Result<PathBuf, Failure> {
    let mut place = absolute(path)?.to_owned();
    for _ in 0..LINKS_MAX {
        if last_part(&place).is_none() || path.ends_with('/') {
            return Err(failure(FailureCode::Invalid, format!("{path}: not the name of a file")));
        }
        match fs::read_link(&place) {
            Ok(target) => {
                place.pop();
                place.push(target);
            }
            Err(_) => return Ok(place),
        }
    }
    Err(refused(path, Errno::LOOP))
}

fn existing(path: &str, place: &Path) -> Result<Option<Metadata>, Failure> {
    match fs::metadata(place) {
        Ok(found) => regular(path, &found).map(|()| Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(refused(path, error)),
    }
}

fn open_append(place: &Path) -> io::Result<File> {
    // Should it have become a fifo since it was looked at, this does not wait for a reader.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    OpenOptions::new()
        .append(true)
        .create(true)
        .custom_flags(flags.bits().cast_signed())
        .open(place)
}

/// Gives the file the owner and mode asked for, or those of the file before it.
fn dress(
    file: &File,
    before: Option<&Metadata>,
    mode: Option<u32>,
    owner: Option<(u32, u32)>,
) -> io::Result<()> {
    if let Some((uid, gid)) = owner.or(before.map(|before| (before.uid(), before.gid()))) {
        let now = file.metadata()?;
        if (now.uid(), now.gid()) != (uid, gid) {
            fchown(file, Some(uid), Some(gid))?;
        }
    }
    let mode = mode.or(before.map(MetadataExt::mode)).unwrap_or(FILE_MODE);
    file.set_permissions(Permissions::from_mode(mode & MODE_BITS))
}

/// A file that is not there yet; vanishes unless it is published.
struct Draft {
    file: File,
    place: PathBuf,
    published: bool,
}

impl Draft {
    /// In the same directory as `place`, so that it can take its place in one step.
    fn new(place: &Path) -> io::Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let directory = place.parent().unwrap_or(Path::new("/"));
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let draft = directory.join(format!(".torpor-{}-{count}", std::process::id()));
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft) {
                Ok(file) => return Ok(Self { file, place: draft, published: false }),
                // Left by a machine that this one was forked from.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn publish(mut self, place: &Path) -> io::Result<()> {
        fs::rename(&self.place, place)?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.published {
            // Nothing can be done about a directory that was taken away.
            let _ = fs::remove_file(&self.place);
        }
    }
}

/// Moves a file or link to another file system: there as a whole, then not here.
pub(super) fn carry(from: &Path, to: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(from)?;
    if found.is_symlink() {
        let target = fs::read_link(from)?;
        match fs::remove_file(to) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => symlink(target, to)?,
        }
        lchown(to, Some(found.uid()), Some(found.gid()))?;
    } else if found.is_file() {
        let mut draft = Draft::new(to)?;
        io::copy(&mut File::open(from)?, &mut draft.file)?;
        dress(&draft.file, Some(&found), None, None)?;
        draft.file.set_modified(found.modified()?)?;
        draft.publish(to)?;
    } else {
        return Err(Errno::XDEV.into());
    }
    fs::remove_file(from)
}

//! Files of volumes and drives from outside, attached or not: looked at, read, written, moved, removed. No link is
//! followed, and nothing but the volume is reached.

use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use rustix::io::Errno;
use torpor_files::{Listed, Volume as Files, WriteOptions};
use torpor_lifecycle::store::{OpenVolume, StoreError, Volumes as _};
use torpor_protocol::api::FileEntry;
use torpor_protocol::guest::files::{Attributes, Owner};
use torpor_protocol::{ErrorCode, VolumeKind, VolumeRef};

use super::volumes;
use crate::Service;
use crate::builds::pipe::{inward, outward, poured};
use crate::error::{Error, Result};
use crate::files::Content;
use crate::upload::{Pieces, Upload};

/// Entries that are read at once.
const PAGE: usize = 1000;
/// Entries in one listing: some 50 MB of JSON.
const ENTRIES_MAX: usize = 200_000;
/// Bytes that are read at once.
const CHUNK: u64 = 256 * 1024;
/// Permission bits of a directory whose maker does not say.
const DIRECTORY: u32 = 0o755;
/// Of who does not say.
pub(super) const ROOT: Owner = Owner { user: 0, group: 0 };

/// Which volume is meant.
#[derive(Debug, Clone)]
pub struct Target {
    pub kind: VolumeKind,
    pub volume: VolumeRef,
}

/// The files of a volume, mounted while this lives.
pub(super) struct Held {
    pub(super) files: Arc<Files>,
    /// The directory that all is in.
    pub(super) root: std::fs::File,
    _open: Arc<OpenVolume>,
}

pub(super) async fn hold(app: &Service, target: &Target) -> Result<Held> {
    let record = volumes::find(app, target.kind, &target.volume).await?;
    let open = app.volumes.open(&record.id).await?;
    let files = Files::open(&open.dir).map_err(StoreError::failed("open a volume"))?;
    let root = std::fs::File::open(&open.dir).map_err(StoreError::failed("open a volume"))?;
    Ok(Held { files, root, _open: open })
}

/// Work that waits for the disk, on the files of a volume.
async fn on<T: Send + 'static>(
    app: &Service,
    target: &Target,
    path: &str,
    work: impl FnOnce(&Held, &Path) -> io::Result<T> + Send + 'static,
) -> Result<T> {
    let (held, path) = (hold(app, target).await?, path.to_owned());
    let done = tokio::task::spawn_blocking(move || {
        let done = work(&held, Path::new(&path));
        done.map_err(|error| refused(&path, error))
    });
    done.await.map_err(StoreError::failed("use the files of a volume"))?
}

/// What the kernel says of somebody's path.
pub(super) fn refused(path: &str, error: io::Error) -> Error {
    const NO_LINKS: &str = "no link is followed in a volume from outside";
    const GROW: &str = "remove files of it, or grow it: `torpor volume resize`";
    let message = format!("{path}: {error}");
    match Errno::from_io_error(&error) {
        Some(Errno::NOENT) => Error::new(ErrorCode::FileNotFound, message),
        Some(Errno::EXIST) => Error::new(ErrorCode::AlreadyExists, message),
        Some(Errno::NOSPC | Errno::DQUOT) => {
            Error::with_hint(ErrorCode::LimitReached, message, GROW)
        }
        Some(Errno::LOOP | Errno::NOTDIR) => {
            Error::with_hint(ErrorCode::FileRefused, message, NO_LINKS)
        }
        Some(_) => Error::new(ErrorCode::FileRefused, message),
        // What was sent is wrong, or broke off.
        None if error.kind() == io::ErrorKind::InvalidData => Error::invalid(message),
        None => Error::invalid(format!("{path}: can't be taken: {error}")),
    }
}

pub(super) fn entry(path: String, has: &Attributes, target: Option<Vec<u8>>) -> FileEntry {
    const KIND: u32 = 0o170_000;
    let kind = match has.mode & KIND {
        0o100_000 => "file",
        0o040_000 => "directory",
        0o120_000 => "symlink",
        _ => "other",
    };
    FileEntry {
        path,
        kind: kind.to_owned(),
        size: has.size,
        mode: has.mode & 0o7777,
        uid: has.owner.user,
        gid: has.owner.group,
        modified_at_ms: has
            .modified
            .seconds
            .saturating_mul(1000)
            .saturating_add(i64::from(has.modified.nanoseconds / 1_000_000)),
        target: target.map(|target| String::from_utf8_lossy(&target).into_owned()),
    }
}

/// The entries of a directory, sorted, so many levels deep; paths are relative to it.
pub async fn list(
    app: &Service,
    target: &Target,
    path: &str,
    depth: u32,
) -> Result<Vec<FileEntry>> {
    let listed = on(app, target, path, move |held, path| {
        let mut all = Vec::new();
        walk(&held.files, path, depth, |below, found| {
            all.push(entry(below.to_owned(), &found.attributes, found.target.clone()));
            Ok(all.len() <= ENTRIES_MAX)
        })?;
        Ok(all)
    });
    let mut all = listed.await?;
    if all.len() > ENTRIES_MAX {
        return Err(Error::with_hint(
            ErrorCode::TooLarge,
            format!("there are more than {ENTRIES_MAX} entries"),
            "list a directory below, or with a smaller depth",
        ));
    }
    all.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(all)
}

/// Calls `each` for everything below a directory, directories before what is in them, until it has enough.
pub(super) fn walk(
    files: &Files,
    top: &Path,
    depth: u32,
    mut each: impl FnMut(&str, &Listed) -> io::Result<bool>,
) -> io::Result<()> {
    let mut open = vec![(String::new(), 1)];
    while let Some((below, level)) = open.pop() {
        let mut after: Option<Vec<u8>> = None;
        loop {
            let page = files.list(&top.join(&below), after.as_deref(), PAGE)?;
            after = page.entries.last().map(|last| last.name.clone());
            for found in &page.entries {
                // A name that is no text can't be asked for in one either.
                let Ok(name) = std::str::from_utf8(&found.name) else { continue };
                let path =
                    if below.is_empty() { name.to_owned() } else { format!("{below}/{name}") };
                if !each(&path, found)? {
                    return Ok(());
                }
                if level < depth && found.attributes.mode & 0o170_000 == 0o040_000 {
                    open.push((path, level + 1));
                }
            }
            if !page.more || after.is_none() {
                break;
            }
        }
    }
    Ok(())
}

pub async fn stat(app: &Service, target: &Target, path: &str) -> Result<FileEntry> {
    let shown = path.to_owned();
    on(app, target, path, move |held, path| Ok(entry(shown, &held.files.stat(path)?, None))).await
}

/// Reads a file, or a part of it.
pub async fn read(
    app: &Service,
    target: &Target,
    path: &str,
    offset: u64,
    length: Option<u64>,
) -> Result<Content> {
    let held = hold(app, target).await?;
    let (path, shown) = (Path::new(path).to_owned(), path.to_owned());
    let opened = tokio::task::spawn_blocking(move || {
        // Also what is no file is told before the first byte.
        let has = held.files.stat(&path)?;
        held.files.read(&path, 0, 1)?;
        Ok((held, path, has))
    });
    let opened: io::Result<_> =
        opened.await.map_err(StoreError::failed("use the files of a volume"))?;
    let (held, path, has) = opened.map_err(|error| refused(&shown, error))?;
    let announced = has.size.saturating_sub(offset).min(length.unwrap_or(u64::MAX));
    let (mut spout, pieces) = outward();
    tokio::task::spawn_blocking(move || {
        let mut copy = || -> io::Result<()> {
            let mut done = 0;
            while done < announced {
                let wanted = usize::try_from(CHUNK.min(announced - done)).unwrap_or(0);
                let bytes = held.files.read(&path, offset.saturating_add(done), wanted)?;
                if bytes.is_empty() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                done += bytes.len() as u64;
                io::Write::write_all(&mut spout, &bytes)?;
            }
            Ok(())
        };
        let copied = copy();
        spout.close(copied);
    });
    let pieces = poured(None, pieces);
    Ok(Content { mode: has.mode & 0o7777, length: Some(announced), pieces })
}

/// Writes a file; those directories above it that are missing are made. It is replaced when the last byte is there.
pub async fn write(
    app: &Service,
    target: &Target,
    path: &str,
    mode: Option<u32>,
    pieces: Pieces,
) -> Result<FileEntry> {
    let shown = path.to_owned();
    received(app, target, path, pieces, move |held, path, content| {
        if let Some(parent) = path.parent() {
            held.files.make_dirs(parent, DIRECTORY, ROOT)?;
        }
        let mut upload = held.files.write(path, WriteOptions { mode, owner: None })?;
        io::copy(content, &mut upload)?;
        Ok(entry(shown, &upload.finish()?, None))
    })
    .await
}

/// What a client sends, to work that blocks.
pub(super) async fn received<T: Send + 'static>(
    app: &Service,
    target: &Target,
    path: &str,
    pieces: Pieces,
    work: impl FnOnce(&Held, &Path, &mut dyn io::Read) -> io::Result<T> + Send + 'static,
) -> Result<T> {
    let (inlet, mut outlet) = inward();
    let working = on(app, target, path, move |held, path| work(held, path, &mut outlet));
    // The volume bounds what is kept.
    let sending = Upload::new(pieces, u64::MAX).pour(inlet);
    let (done, sent) = tokio::join!(working, sending);
    let done = done?;
    sent?;
    Ok(done)
}

pub async fn make_dir(
    app: &Service,
    target: &Target,
    path: &str,
    mode: Option<u32>,
) -> Result<FileEntry> {
    let shown = path.to_owned();
    on(app, target, path, move |held, path| {
        held.files.make_dirs(path, mode.unwrap_or(DIRECTORY) & 0o7777, ROOT)?;
        Ok(entry(shown, &held.files.stat(path)?, None))
    })
    .await
}

/// Renames a file or directory; a file at `to` is replaced.
pub async fn rename(app: &Service, target: &Target, from: &str, to: String) -> Result<FileEntry> {
    on(app, target, from, move |held, from| {
        held.files.rename(from, Path::new(&to))?;
        let has = held.files.stat(Path::new(&to))?;
        Ok(entry(to, &has, None))
    })
    .await
}

/// Removes a file or directory. `recursive`: with everything below.
pub async fn remove(app: &Service, target: &Target, path: &str, recursive: bool) -> Result<()> {
    on(app, target, path, move |held, path| held.files.remove(path, recursive)).await
}

/// Bytes of an archive on their way out.
pub(super) fn stream(
    work: impl FnOnce(&mut dyn io::Write) -> io::Result<()> + Send + 'static,
) -> Pieces {
    let (mut spout, pieces) = outward();
    tokio::task::spawn_blocking(move || {
        let done = work(&mut spout);
        spout.close(done);
    });
    poured(None::<Bytes>, pieces)
}

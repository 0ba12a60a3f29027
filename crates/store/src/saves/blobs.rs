//! The contents that saves consist of: a file each, under its hash, stored once whatever saves have
//! it.
//!
//! - A blob is a file that was hashed and synced before it got this name, and is never changed.
//! - It stays while a manifest names it. Whoever adds one keeps [`Blobs::adding`] until its manifest
//!   is in the ledger; whoever removes some has [`Blobs::removing`], and asks the ledger again.
//! - A save's directory consists of links to blobs, or of copies where there can be no link.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::ioctl_ficlone;
use rustix::io::Errno;
use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use torpor_lifecycle::store::StoreError;

use super::content::{self, Digest, Hashes, Identity};
use crate::files;
use crate::layout::Layout;

#[derive(Debug)]
pub(crate) struct Blobs {
    layout: Arc<Layout>,
    turn: RwLock<()>,
}

impl Blobs {
    pub(crate) fn new(layout: Arc<Layout>) -> Self {
        Self { layout, turn: RwLock::default() }
    }

    pub(crate) fn path(&self, digest: Digest) -> PathBuf {
        self.layout.blob(&digest.to_string())
    }

    /// Meanwhile no blob goes.
    pub(crate) async fn adding(&self) -> RwLockReadGuard<'_, ()> {
        self.turn.read().await
    }

    /// Meanwhile no blob gets a manifest that names it.
    pub(crate) async fn removing(&self) -> RwLockWriteGuard<'_, ()> {
        self.turn.write().await
    }

    /// Makes a file that was hashed and synced a blob; if there is one with this content already,
    /// the file becomes a link to it. A large one that this daemon never read is not trusted, and
    /// replaced. Durable after [`Blobs::sync`].
    pub(crate) fn add(&self, file: &Path, digest: Digest, hashes: &Hashes) -> io::Result<()> {
        let blob = self.path(digest);
        match std::fs::hard_link(file, &blob) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) if is_no_link(&error) => return self.put(file, &blob).map(drop),
            added => return added,
        }
        if Identity::at(file)? == Identity::at(&blob)? {
            return Ok(());
        }
        let trusted = content::open(&blob).is_ok_and(|blob| hashes.vouches(&blob, digest));
        let (from, to) = if trusted { (&*blob, file) } else { (file, &*blob) };
        self.put(from, to).map(drop)
    }

    /// Makes the names of blobs durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        files::sync_dir(&self.layout.blobs())
    }

    /// Has the content of a blob, which is this file, at a path.
    pub(crate) fn link(&self, digest: Digest, blob: &Identity, at: &Path) -> io::Result<Identity> {
        match Identity::at(at) {
            Ok(found) if found == *blob => Ok(found),
            Ok(_) | Err(_) => self.put(&self.path(digest), at),
        }
    }

    /// The same file, or one with the same content, in place of whatever is at `to`.
    fn put(&self, from: &Path, to: &Path) -> io::Result<Identity> {
        let draft = self.layout.draft().map_err(io::Error::other)?;
        let put = match std::fs::hard_link(from, &draft) {
            Err(error) if is_no_link(&error) => copy(from, &draft),
            linked => linked,
        };
        let put = put.and_then(|()| {
            let identity = Identity::at(&draft)?;
            std::fs::rename(&draft, to)?;
            Ok(identity)
        });
        if put.is_err() {
            let _ = std::fs::remove_file(&draft);
        }
        put
    }

    /// Removes blobs that no manifest names, while [`Blobs::removing`]. What fails goes at the next
    /// start.
    pub(crate) fn remove(&self, unnamed: &[Digest]) {
        for digest in unnamed {
            match std::fs::remove_file(self.path(*digest)) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => tracing::warn!(%digest, %error, "blob not removed before a restart"),
            }
        }
    }

    /// Removes all but these. Before anybody uses a save.
    pub(crate) fn sweep(&self, named: &HashSet<String>) -> Result<(), StoreError> {
        let keep: HashSet<PathBuf> = named.iter().map(|hash| self.layout.blob(hash)).collect();
        let found = std::fs::read_dir(self.layout.blobs());
        for entry in found.map_err(files::failed("list the blobs"))?.flatten() {
            let path = entry.path();
            if keep.contains(&path) {
                continue;
            }
            tracing::info!(path = %path.display(), "removing a blob that no save names");
            if let Err(error) = files::remove_tree(&path) {
                tracing::warn!(path = %path.display(), %error, "blob not removed");
            }
        }
        Ok(())
    }
}

/// Whether it can't be a link: too many, another filesystem, or one without them.
fn is_no_link(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::MLINK | Errno::XDEV | Errno::PERM | Errno::OPNOTSUPP)
    )
}

/// Copies a file with its holes, durably; where the filesystem can, the bytes stay shared.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let from = content::open(from)?;
    let about = from.metadata()?;
    let copy = File::create_new(to)?;
    copy.set_permissions(about.permissions())?;
    if ioctl_ficlone(&copy, &from).is_err() {
        copy.set_len(about.len())?;
        let mut written = Ok(());
        content::visit_written(&from, 0, about.len(), |at, run| {
            if written.is_ok() {
                written = content::write_around_zeros(&copy, at, run);
            }
        })?;
        written?;
    }
    copy.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_copy_has_the_content_the_mode_and_the_holes() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let file = File::create(&from).unwrap();
        file.set_len(64 << 20).unwrap();
        content::write_around_zeros(&file, 5 << 20, b"written").unwrap();
        rustix::fs::chmod(&from, rustix::fs::Mode::from_raw_mode(0o640)).unwrap();
        copy(&from, &to).unwrap();
        assert!(std::fs::read(&from).unwrap() == std::fs::read(&to).unwrap());
        let about = to.metadata().unwrap();
        assert_eq!(about.mode() & 0o777, 0o640);
        assert!(about.blocks() * 512 < 1 << 20, "{} blocks", about.blocks());
    }
}

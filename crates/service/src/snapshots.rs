//! Snapshots as things to look into and to carry: their files, listed, read and compared without a machine,
//! and all of one as a single archive.

mod archive;

use std::io;
use std::sync::Arc;

use torpor_lifecycle::store::{Images, StoreError};
use torpor_protocol::api::FileEntry;
use torpor_protocol::snapshot::FileDifference;
use torpor_protocol::{ErrorCode, SnapshotKind, SnapshotRef};
use torpor_store::{LayerChanges, SavedTree};

use crate::Service;
use crate::builds::pipe;
use crate::error::{Error, Result};
use crate::pinned_save::PinnedSave;
use crate::upload::Pieces;
pub use archive::{export, import};

/// The files of a snapshot, and what keeps them where they are.
pub struct Files {
    tree: SavedTree,
    _point: PinnedSave,
}

impl Files {
    pub async fn open(service: &Arc<Service>, of: &SnapshotRef) -> Result<Self> {
        let point = PinnedSave::of(service, of).await?;
        let root = service.images.root(&point.about().spec.image_id).await?;
        let service = Arc::clone(service);
        blocking(move || {
            let changes = match point.about().kind {
                SnapshotKind::Memory => service.fleet.changes(&point.save)?,
                SnapshotKind::Filesystem => Box::new(LayerChanges::open(&point.save.dir)?),
            };
            Ok(Self { tree: SavedTree::new(&root.path, changes)?, _point: point })
        })
        .await
    }

    /// The entries of a directory, sorted, so many levels deep.
    pub async fn list(self, path: String, depth: u32) -> Result<Vec<FileEntry>> {
        blocking(move || Ok(self.tree.list(&path, depth)?)).await
    }

    /// What is known of a file; a last symbolic link is not followed.
    pub async fn stat(self, path: String) -> Result<FileEntry> {
        blocking(move || Ok(self.tree.stat(&path)?)).await
    }

    /// A file: how many bytes it has, and they.
    pub async fn read(self, path: String) -> Result<(u64, Pieces)> {
        let (files, path, entry) = blocking(move || {
            let entry = self.tree.stat(&path)?;
            Ok((self, path, entry))
        })
        .await?;
        check_file(&entry)?;
        let (mut spout, pieces) = pipe::outward();
        tokio::task::spawn_blocking(move || {
            let copied = files.tree.copy(&path, &mut spout);
            spout.close(copied.map(drop).map_err(io::Error::other));
        });
        Ok((entry.size, pipe::poured(None, pieces)))
    }

    /// What is different in another snapshot, or without one, what this has on top of its image.
    pub async fn diff(self, to: Option<Self>) -> Result<Vec<FileDifference>> {
        blocking(move || match to {
            Some(other) => Ok(self.tree.diff(&other.tree)?),
            None => Ok(self.tree.diff_image()?),
        })
        .await
    }
}

/// For what reads files and can't wait.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    // A panic is a bug of ours.
    let panicked = |error| Error::from(StoreError::failed("read a snapshot")(error));
    tokio::task::spawn_blocking(work).await.map_err(panicked)?
}

fn check_file(entry: &FileEntry) -> Result<()> {
    if entry.kind == "file" {
        return Ok(());
    }
    let target = entry.target.as_deref();
    let target = target.map(|target| format!(" to {target}")).unwrap_or_default();
    let message = format!("{} is not a file but a {}{target}", entry.path, entry.kind);
    Err(Error::new(ErrorCode::FileRefused, message))
}

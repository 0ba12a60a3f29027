//! What is in a snapshot: its files, listed, read and compared without a machine.

use std::io;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::HeaderValue;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use serde::Deserialize;
use torpor_lifecycle::store::{Images, StoreError};
use torpor_protocol::api::{FileEntry, FileList};
use torpor_protocol::snapshot::FileDiff;
use torpor_protocol::{SnapshotKind, SnapshotRef};
use torpor_service::Service;
use torpor_service::builds::pipe;
use torpor_service::pinned_save::{PinnedSave, parse};
use torpor_store::{LayerChanges, SavedTree};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::parcel::poured;
use crate::api::Answer;
use crate::api::error::{ApiError, Result};
use crate::api::extract::{Json, Query, SnapshotPath};
use crate::api::files::{PathText, levels};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(stat))
        .routes(routes!(content))
        .routes(routes!(diff))
}

/// The files of a snapshot, and what keeps them where they are.
struct Files {
    tree: SavedTree,
    _point: PinnedSave,
}

impl Files {
    async fn open(app: &Arc<Service>, of: &SnapshotRef) -> Result<Self> {
        let point = PinnedSave::of(app, of).await?;
        let root = app.images.root(&point.about().spec.image_id).await?;
        let app = Arc::clone(app);
        blocking(move || {
            let changes = match point.about().kind {
                SnapshotKind::Memory => app.fleet.changes(&point.save)?,
                SnapshotKind::Filesystem => Box::new(LayerChanges::open(&point.save.dir)?),
            };
            Ok(Self { tree: SavedTree::new(&root.path, changes)?, _point: point })
        })
        .await
    }
}

/// For what reads files and can't wait.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    // A panic is a bug of ours.
    let panicked = |error| ApiError::from(StoreError::failed("read a snapshot")(error));
    tokio::task::spawn_blocking(work).await.map_err(panicked)?
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FilesQuery {
    /// A directory. Default: `/`.
    #[param(value_type = Option<String>)]
    path: Option<PathText>,
    /// Levels of directories; 1 (default): the entries of `path` only.
    depth: Option<u32>,
    /// All levels, instead of `depth`.
    #[serde(default)]
    recursive: bool,
}

/// List a directory of a snapshot.
#[utoipa::path(
    get, path = "/v1/snapshots/{snapshot}/files/list",
    params(("snapshot" = String, Path, description = "Id or name"), FilesQuery),
    responses((status = 200, body = FileList,
        description = "Sorted; paths are relative to the directory."))
)]
async fn list(
    State(app): State<Arc<Service>>,
    SnapshotPath(of): SnapshotPath,
    Query(FilesQuery { path, depth, recursive }): Query<FilesQuery>,
) -> Answer<FileList> {
    let depth = levels(depth, recursive)?;
    let files = Files::open(&app, &of).await?;
    let path = path.map_or_else(|| "/".to_owned(), |path| path.0);
    let entries = blocking(move || Ok(files.tree.list(&path, depth)?)).await?;
    Ok(Json(FileList { entries }))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FileQuery {
    #[param(value_type = String)]
    path: PathText,
}

/// Look at a file of a snapshot; a last symbolic link is not followed.
#[utoipa::path(
    get, path = "/v1/snapshots/{snapshot}/files/stat",
    params(("snapshot" = String, Path, description = "Id or name"), FileQuery),
    responses((status = 200, description = "The file.", body = FileEntry))
)]
async fn stat(
    State(app): State<Arc<Service>>,
    SnapshotPath(of): SnapshotPath,
    Query(FileQuery { path }): Query<FileQuery>,
) -> Answer<FileEntry> {
    let files = Files::open(&app, &of).await?;
    Ok(Json(blocking(move || Ok(files.tree.stat(&path.0)?)).await?))
}

/// Download a file of a snapshot.
#[utoipa::path(
    get, path = "/v1/snapshots/{snapshot}/files/content",
    params(("snapshot" = String, Path, description = "Id or name"), FileQuery),
    responses((
        status = 200, body = String, content_type = "application/octet-stream",
        description = "The bytes.",
    ))
)]
async fn content(
    State(app): State<Arc<Service>>,
    SnapshotPath(of): SnapshotPath,
    Query(FileQuery { path }): Query<FileQuery>,
) -> Result<Response> {
    let files = Files::open(&app, &of).await?;
    let path = path.0;
    let (files, path, entry) = blocking(move || {
        let entry = files.tree.stat(&path)?;
        Ok((files, path, entry))
    })
    .await?;
    check_file(&entry)?;
    let (mut spout, pieces) = pipe::outward();
    tokio::task::spawn_blocking(move || {
        let copied = files.tree.copy(&path, &mut spout);
        spout.close(copied.map(drop).map_err(io::Error::other));
    });
    let mut response = poured(None, pieces).into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(CONTENT_LENGTH, entry.size.into());
    Ok(response)
}

fn check_file(entry: &FileEntry) -> Result<()> {
    if entry.kind == "file" {
        return Ok(());
    }
    let target = entry.target.as_deref();
    let target = target.map(|target| format!(" to {target}")).unwrap_or_default();
    let message = format!("{} is not a file but a {}{target}", entry.path, entry.kind);
    Err(ApiError::new(torpor_protocol::ErrorCode::FileRefused, message))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DiffQuery {
    /// Another snapshot: what changed from this one to that. Default: what this one has on top of
    /// its image.
    to: Option<String>,
}

/// Compare the files of a snapshot with its image or with another snapshot.
#[utoipa::path(
    get, path = "/v1/snapshots/{snapshot}/diff",
    params(("snapshot" = String, Path, description = "Id or name"), DiffQuery),
    responses((status = 200, description = "Sorted by path; times do not count.", body = FileDiff))
)]
async fn diff(
    State(app): State<Arc<Service>>,
    SnapshotPath(of): SnapshotPath,
    Query(DiffQuery { to }): Query<DiffQuery>,
) -> Answer<FileDiff> {
    let to = to.map(|to| parse(&to)).transpose()?;
    let files = Files::open(&app, &of).await?;
    let other = match &to {
        Some(to) => Some(Files::open(&app, to).await?),
        None => None,
    };
    let changes = blocking(move || match other {
        Some(other) => Ok(files.tree.diff(&other.tree)?),
        None => Ok(files.tree.diff_image()?),
    });
    Ok(Json(FileDiff { changes: changes.await? }))
}

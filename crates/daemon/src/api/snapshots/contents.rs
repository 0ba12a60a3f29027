//! What is in a snapshot: its files, listed, read and compared without a machine.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::header::CONTENT_LENGTH;
use serde::Deserialize;
use torpor_protocol::api::{FileEntry, FileList};
use torpor_protocol::snapshot::FileDiff;
use torpor_service::Service;
use torpor_service::files::PathText;
use torpor_service::pinned_save::parse;
use torpor_service::snapshots::Files;
use torpor_web::error::Result;
use torpor_web::extract::{Json, Query, SnapshotPath};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::files::{PathQuery, levels};
use crate::api::{Answer, streamed};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(stat))
        .routes(routes!(content))
        .routes(routes!(diff))
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
    State(service): State<Arc<Service>>,
    SnapshotPath(of): SnapshotPath,
    Query(FilesQuery { path, depth, recursive }): Query<FilesQuery>,
) -> Answer<FileList> {
    let depth = levels(depth, recursive)?;
    let files = Files::open(&service, &of).await?;
    let path = path.map_or_else(|| "/".to_owned(), |path| path.0);
    Ok(Json(FileList { entries: files.list(path, depth).await? }))
}

/// Look at a file of a snapshot; a last symbolic link is not followed.
#[utoipa::path(
    get, path = "/v1/snapshots/{snapshot}/files/stat",
    params(("snapshot" = String, Path, description = "Id or name"), PathQuery),
    responses((status = 200, description = "The file.", body = FileEntry))
)]
async fn stat(
    State(service): State<Arc<Service>>,
    SnapshotPath(of): SnapshotPath,
    Query(PathQuery { path }): Query<PathQuery>,
) -> Answer<FileEntry> {
    Ok(Json(Files::open(&service, &of).await?.stat(path.0).await?))
}

/// Download a file of a snapshot.
#[utoipa::path(
    get, path = "/v1/snapshots/{snapshot}/files/content",
    params(("snapshot" = String, Path, description = "Id or name"), PathQuery),
    responses((
        status = 200, body = String, content_type = "application/octet-stream",
        description = "The bytes.",
    ))
)]
async fn content(
    State(service): State<Arc<Service>>,
    SnapshotPath(of): SnapshotPath,
    Query(PathQuery { path }): Query<PathQuery>,
) -> Result<Response> {
    let (size, pieces) = Files::open(&service, &of).await?.read(path.0).await?;
    let mut response = streamed("application/octet-stream", pieces);
    response.headers_mut().insert(CONTENT_LENGTH, size.into());
    Ok(response)
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
    State(service): State<Arc<Service>>,
    SnapshotPath(of): SnapshotPath,
    Query(DiffQuery { to }): Query<DiffQuery>,
) -> Answer<FileDiff> {
    let to = to.map(|to| parse(&to)).transpose()?;
    let files = Files::open(&service, &of).await?;
    let other = match &to {
        Some(to) => Some(Files::open(&service, to).await?),
        None => None,
    };
    Ok(Json(FileDiff { changes: files.diff(other).await? }))
}

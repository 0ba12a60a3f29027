//! Files in a sandbox: list, look, make, move, remove, watch. Their content: [`super::transfer`].

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use torpor_protocol::api::{ChangeMode, FileEntry, FileList, MakeDirectory, MoveFile, WatchEvent};
use torpor_service::Service;
use torpor_service::files::{self, PathText};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Awake, Json, Query};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::ndjson::ndjson;
use super::{Answer, no_content};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(remove))
        .routes(routes!(list))
        .routes(routes!(stat))
        .routes(routes!(mkdir))
        .routes(routes!(rename))
        .routes(routes!(chmod))
        .routes(routes!(watch))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct PathQuery {
    #[param(value_type = String)]
    pub(super) path: PathText,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct TreeQuery {
    #[param(value_type = String)]
    pub(super) path: PathText,
    /// With everything below.
    #[serde(default)]
    pub(super) recursive: bool,
}

/// Remove a file or directory.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{sandbox}/files",
    params(("sandbox" = String, Path, description = "Id or name"), TreeQuery),
    responses((status = 204, description = "It is gone."))
)]
async fn remove(
    Query(TreeQuery { path, recursive }): Query<TreeQuery>,
    Awake(awake): Awake,
) -> Result<Response> {
    files::remove(&awake, path.0, recursive).await?;
    Ok(no_content())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ListQuery {
    #[param(value_type = String)]
    pub(super) path: PathText,
    /// Levels of directories; 1 (default): the entries of `path` only.
    pub(super) depth: Option<u32>,
    /// All levels, instead of `depth`.
    #[serde(default)]
    pub(super) recursive: bool,
}

/// How many levels of directories are listed.
pub(super) fn levels(depth: Option<u32>, recursive: bool) -> Result<u32> {
    match (depth, recursive) {
        (None, false) => Ok(1),
        (None, true) => Ok(u32::MAX),
        (Some(depth), false) if depth > 0 => Ok(depth),
        (Some(_), _) => Err(ApiError::invalid("depth is at least 1; recursive=true is all levels")),
    }
}

/// List a directory.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/files/list",
    params(("sandbox" = String, Path, description = "Id or name"), ListQuery),
    responses((status = 200, body = FileList,
        description = "Sorted; paths are relative to the directory."))
)]
async fn list(
    Query(ListQuery { path, depth, recursive }): Query<ListQuery>,
    Awake(awake): Awake,
) -> Answer<FileList> {
    let depth = levels(depth, recursive)?;
    Ok(Json(FileList { entries: files::list(&awake, path.0, depth).await? }))
}

/// Look at a file; a last symbolic link is not followed.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/files/stat",
    params(("sandbox" = String, Path, description = "Id or name"), PathQuery),
    responses((status = 200, description = "The file.", body = FileEntry))
)]
async fn stat(
    Query(PathQuery { path }): Query<PathQuery>,
    Awake(awake): Awake,
) -> Answer<FileEntry> {
    Ok(Json(files::stat(&awake, path.0).await?))
}

/// Make a directory and its parents; one that exists is fine.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/files/mkdir",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = MakeDirectory,
    responses((status = 200, description = "The directory.", body = FileEntry))
)]
async fn mkdir(
    Awake(awake): Awake,
    Json(MakeDirectory { path, mode, owner }): Json<MakeDirectory>,
) -> Answer<FileEntry> {
    Ok(Json(files::make_dir(&awake, path, mode, owner).await?))
}

/// Rename a file or directory; a file at `to` is replaced.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/files/move",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = MoveFile,
    responses((status = 200, description = "It, at its new place.", body = FileEntry))
)]
async fn rename(
    Awake(awake): Awake,
    Json(MoveFile { from, to }): Json<MoveFile>,
) -> Answer<FileEntry> {
    Ok(Json(files::rename(&awake, from, to).await?))
}

/// Change permission bits.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/files/chmod",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = ChangeMode,
    responses((status = 200, description = "The file as it is now.", body = FileEntry))
)]
async fn chmod(
    Awake(awake): Awake,
    Json(ChangeMode { path, mode }): Json<ChangeMode>,
) -> Answer<FileEntry> {
    Ok(Json(files::change_mode(&awake, path, mode).await?))
}

/// Watch a file or directory.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/files/watch",
    params(("sandbox" = String, Path, description = "Id or name"), TreeQuery),
    responses((
        status = 200, body = WatchEvent, content_type = "application/x-ndjson",
        description = "A change a line, from now on, until the client goes away.",
    ))
)]
async fn watch(
    State(service): State<Arc<Service>>,
    Query(TreeQuery { path, recursive }): Query<TreeQuery>,
    Awake(awake): Awake,
) -> Result<Response> {
    let changes = files::watch(awake, path.0, recursive, service.stopping.clone()).await?;
    Ok(ndjson(changes))
}

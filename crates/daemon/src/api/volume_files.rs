//! Files of volumes and drives from outside, whoever has them. Beside their paths and bodies, the same as for sandboxes.

use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use serde::Deserialize;
use torpor_protocol::api::{FileEntry, FileList, MakeDirectory, MoveFile};
use torpor_service::Service;
use torpor_service::calls::volume_archive;
use torpor_service::calls::volume_files as files;
use torpor_service::files::{Mode, PathText};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Json, Query, pieces};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::files::{ListQuery, PathQuery, TreeQuery, levels};
use super::transfer::{ReadQuery, content};
use super::volumes::Of;
use super::{Answer, no_content, streamed};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(remove))
        .routes(routes!(list))
        .routes(routes!(stat))
        .routes(routes!(mkdir))
        .routes(routes!(rename))
        .routes(routes!(read, write))
        .routes(routes!(pack, unpack))
}

fn checked(path: String) -> Result<String> {
    PathText::new(path).map(|path| path.0).map_err(ApiError::invalid)
}

/// Remove a file or directory.
#[utoipa::path(
    delete, path = "/{volume}/files",
    params(("volume" = String, Path, description = "Id or name"), TreeQuery),
    responses((status = 204, description = "It is gone."))
)]
async fn remove(
    Of(service, target): Of,
    Query(TreeQuery { path, recursive }): Query<TreeQuery>,
) -> Result<Response> {
    files::remove(&service, &target, &path.0, recursive).await?;
    Ok(no_content())
}

/// List a directory.
#[utoipa::path(
    get, path = "/{volume}/files/list",
    params(("volume" = String, Path, description = "Id or name"), ListQuery),
    responses((status = 200, body = FileList,
        description = "Sorted; paths are relative to the directory."))
)]
async fn list(
    Of(service, target): Of,
    Query(ListQuery { path, depth, recursive }): Query<ListQuery>,
) -> Answer<FileList> {
    let depth = levels(depth, recursive)?;
    Ok(Json(FileList { entries: files::list(&service, &target, &path.0, depth).await? }))
}

/// Look at a file; no symbolic link is followed.
#[utoipa::path(
    get, path = "/{volume}/files/stat",
    params(("volume" = String, Path, description = "Id or name"), PathQuery),
    responses((status = 200, description = "The file.", body = FileEntry))
)]
async fn stat(
    Of(service, target): Of,
    Query(PathQuery { path }): Query<PathQuery>,
) -> Answer<FileEntry> {
    Ok(Json(files::stat(&service, &target, &path.0).await?))
}

/// Make a directory and its parents; one that exists is fine. It is root's.
#[utoipa::path(
    post, path = "/{volume}/files/mkdir",
    params(("volume" = String, Path, description = "Id or name")),
    request_body = MakeDirectory,
    responses((status = 200, description = "The directory.", body = FileEntry))
)]
async fn mkdir(
    Of(service, target): Of,
    Json(MakeDirectory { path, mode, owner }): Json<MakeDirectory>,
) -> Answer<FileEntry> {
    if owner.is_some() {
        return Err(ApiError::invalid("owner: a volume knows no users; what is made is root's"));
    }
    Ok(Json(files::make_dir(&service, &target, &checked(path)?, mode).await?))
}

/// Rename a file or directory; a file at `to` is replaced.
#[utoipa::path(
    post, path = "/{volume}/files/move",
    params(("volume" = String, Path, description = "Id or name")),
    request_body = MoveFile,
    responses((status = 200, description = "It, at its new place.", body = FileEntry))
)]
async fn rename(
    Of(service, target): Of,
    Json(MoveFile { from, to }): Json<MoveFile>,
) -> Answer<FileEntry> {
    Ok(Json(files::rename(&service, &target, &checked(from)?, checked(to)?).await?))
}

/// Download a file.
#[utoipa::path(
    get, path = "/{volume}/files/content",
    params(("volume" = String, Path, description = "Id or name"), ReadQuery),
    responses((
        status = 200, body = String, content_type = "application/octet-stream",
        description = "The bytes. The header x-torpor-mode has its permission bits in octal.",
    ))
)]
async fn read(
    Of(service, target): Of,
    Query(ReadQuery { path, offset, length }): Query<ReadQuery>,
) -> Result<Response> {
    Ok(content(files::read(&service, &target, &path.0, offset, length).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WriteQuery {
    #[param(value_type = String)]
    path: PathText,
    /// Permission bits, in octal.
    #[param(value_type = Option<String>)]
    mode: Option<Mode>,
}

/// Upload a file. It is replaced when the last byte is there, or stays as it was.
#[utoipa::path(
    put, path = "/{volume}/files/content",
    params(("volume" = String, Path, description = "Id or name"), WriteQuery),
    request_body(content = String, content_type = "application/octet-stream"),
    responses((status = 200, description = "The file as it is now.", body = FileEntry))
)]
async fn write(
    Of(service, target): Of,
    Query(WriteQuery { path, mode }): Query<WriteQuery>,
    body: Body,
) -> Answer<FileEntry> {
    let mode = mode.map(|mode| mode.0);
    Ok(Json(files::write(&service, &target, &path.0, mode, pieces(body)).await?))
}

/// Download a file or directory as a tar archive.
#[utoipa::path(
    get, path = "/{volume}/files/archive",
    params(("volume" = String, Path, description = "Id or name"), PathQuery),
    responses((
        status = 200, body = String, content_type = "application/x-tar",
        description = "Names in it are relative to the parent of `path`.",
    ))
)]
async fn pack(
    Of(service, target): Of,
    Query(PathQuery { path }): Query<PathQuery>,
) -> Result<Response> {
    Ok(streamed("application/x-tar", volume_archive::pack(&service, &target, &path.0).await?))
}

/// Unpack a tar archive below a directory.
#[utoipa::path(
    put, path = "/{volume}/files/archive",
    params(("volume" = String, Path, description = "Id or name"), PathQuery),
    request_body(content = String, content_type = "application/x-tar"),
    responses((status = 204, description = "All of it is there."))
)]
async fn unpack(
    Of(service, target): Of,
    Query(PathQuery { path }): Query<PathQuery>,
    body: Body,
) -> Result<Response> {
    volume_archive::unpack(&service, &target, &path.0, pieces(body)).await?;
    Ok(no_content())
}

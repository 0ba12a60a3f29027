//! Bytes in and out of a sandbox, of any size: files and archives.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::HeaderValue;
use http::header::CONTENT_LENGTH;
use serde::Deserialize;
use torpor_protocol::api::FileEntry;
use torpor_service::Service;
use torpor_service::files::{self, Content, Mode, PathText, Write};
use torpor_web::error::Result;
use torpor_web::extract::{Awake, Json, Query, pieces};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::files::PathQuery;
use super::{Answer, no_content, streamed};

/// Permission bits of a downloaded file, in octal.
const MODE_HEADER: &str = "x-torpor-mode";

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(read, write)).routes(routes!(pack, unpack))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ReadQuery {
    #[param(value_type = String)]
    pub(super) path: PathText,
    /// Begin here.
    #[serde(default)]
    pub(super) offset: u64,
    /// At most so many bytes.
    pub(super) length: Option<u64>,
}

/// Download a file.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/files/content",
    params(("sandbox" = String, Path, description = "Id or name"), ReadQuery),
    responses((
        status = 200, body = String, content_type = "application/octet-stream",
        description = "The bytes. The header x-torpor-mode has its permission bits in octal.",
    ))
)]
async fn read(
    State(service): State<Arc<Service>>,
    Query(query): Query<ReadQuery>,
    Awake(awake): Awake,
) -> Result<Response> {
    let ReadQuery { path, offset, length } = query;
    Ok(content(files::read(&service, awake, path.0, offset, length).await?))
}

/// A file as an answer.
pub(super) fn content(Content { mode, length, pieces }: Content) -> Response {
    let mut response = streamed("application/octet-stream", pieces);
    let headers = response.headers_mut();
    let mode = HeaderValue::from_str(&format!("{mode:04o}"));
    headers.insert(MODE_HEADER, mode.expect("digits are a header value"));
    if let Some(length) = length {
        headers.insert(CONTENT_LENGTH, length.into());
    }
    response
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WriteQuery {
    #[param(value_type = String)]
    path: PathText,
    /// Add to the end instead of replacing it.
    #[serde(default)]
    append: bool,
    /// Permission bits, in octal.
    #[param(value_type = Option<String>)]
    mode: Option<Mode>,
    /// `user`, `user:group` or numbers.
    owner: Option<String>,
}

/// Upload a file. It is replaced when the last byte is there, or stays as it was.
#[utoipa::path(
    put, path = "/v1/sandboxes/{sandbox}/files/content",
    params(("sandbox" = String, Path, description = "Id or name"), WriteQuery),
    request_body(content = String, content_type = "application/octet-stream"),
    responses((status = 200, description = "The file as it is now.", body = FileEntry))
)]
async fn write(
    State(service): State<Arc<Service>>,
    Query(query): Query<WriteQuery>,
    Awake(awake): Awake,
    body: Body,
) -> Answer<FileEntry> {
    let WriteQuery { path, append, mode, owner } = query;
    let write = Write { path: path.0, append, mode: mode.map(|mode| mode.0), owner };
    Ok(Json(files::write(&service, &awake, write, pieces(body)).await?))
}

/// Download a file or directory as a tar archive.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/files/archive",
    params(("sandbox" = String, Path, description = "Id or name"), PathQuery),
    responses((
        status = 200, body = String, content_type = "application/x-tar",
        description = "Names in it are relative to the parent of `path`.",
    ))
)]
async fn pack(
    State(service): State<Arc<Service>>,
    Query(PathQuery { path }): Query<PathQuery>,
    Awake(awake): Awake,
) -> Result<Response> {
    Ok(streamed("application/x-tar", files::pack(&service, awake, path.0).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct UnpackQuery {
    #[param(value_type = String)]
    path: PathText,
    /// Who owns what is unpacked, instead of what the archive says.
    owner: Option<String>,
}

/// Unpack a tar archive below a directory.
#[utoipa::path(
    put, path = "/v1/sandboxes/{sandbox}/files/archive",
    params(("sandbox" = String, Path, description = "Id or name"), UnpackQuery),
    request_body(content = String, content_type = "application/x-tar"),
    responses((status = 204, description = "All of it is there."))
)]
async fn unpack(
    State(service): State<Arc<Service>>,
    Query(UnpackQuery { path, owner }): Query<UnpackQuery>,
    Awake(awake): Awake,
    body: Body,
) -> Result<Response> {
    files::unpack(&service, &awake, path.0, owner, pieces(body)).await?;
    Ok(no_content())
}

//! Files of a drive: looked at and read. Content comes as it is, in one piece; what identifies it is its size and the
//! time of its last change, so that the client sees if it changes while it is read.

use std::sync::Arc;

use axum::extract::{FromRequestParts, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use axum::{Json, Router};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderName, HeaderValue};
use serde::Deserialize;
use serde_json::{Value, json};
use torpor_protocol::ErrorCode;
use torpor_protocol::api::FileEntry;
use torpor_service::Service;
use torpor_service::calls::volume_files::{self, Target};
use torpor_service::calls::volumes;
use torpor_service::files::PathText;
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Query, segment};

use super::{Drive, Version, no_versions, uploads};

const CONTENT_ID: HeaderName = HeaderName::from_static("x-tensorlake-content-id");
const ALGORITHM: HeaderName = HeaderName::from_static("x-tensorlake-content-hash-algorithm");
/// Whoever is told this takes the identity of a whole file as it is.
const UNHASHED: &str = "native-merkle-v1";
/// A part has to name an algorithm; it is used by who fetches parts, and ours have no address.
const NOT_USED: &str = "sha256";

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/head", get(head))
        .route("/entries", get(list))
        .route("/read-plan/{*path}", get(plan))
        .route("/files/{*path}", get(read))
        .route("/snapshots", get(no_snapshots).post(refuse_snapshots))
        .route("/snapshots/{*rest}", any(refuse_snapshots))
}

/// A path in a drive, as clients write it: from its root, without a slash before it.
pub(super) fn absolute(path: &str) -> Result<String> {
    if path.split('/').any(|part| part == "..") {
        return Err(ApiError::invalid("path: it must not contain \"..\""));
    }
    PathText::new(format!("/{path}")).map(|path| path.0).map_err(ApiError::invalid)
}

/// Nobody counts what sandboxes write, so the version has no name.
async fn head(State(service): State<Arc<Service>>, Drive(of): Drive) -> Result<Json<Value>> {
    volumes::find(&service, of.kind, &of.volume).await?;
    Ok(Json(json!({"snapshot_id": null, "generation": 0})))
}

async fn no_snapshots(
    State(service): State<Arc<Service>>,
    Drive(of): Drive,
) -> Result<Json<Value>> {
    volumes::find(&service, of.kind, &of.volume).await?;
    Ok(Json(json!({"snapshots": [], "next_after": null})))
}

async fn refuse_snapshots() -> ApiError {
    no_versions()
}

#[derive(Debug, Deserialize)]
struct ListQuery {
    #[serde(default)]
    path: String,
    #[serde(flatten)]
    version: Version,
}

async fn list(
    State(service): State<Arc<Service>>,
    Drive(of): Drive,
    Query(ListQuery { path, version }): Query<ListQuery>,
) -> Result<Json<Value>> {
    version.check()?;
    let found = volume_files::list(&service, &of, &absolute(&path)?, 1).await?;
    let entries: Vec<_> = found.iter().filter_map(shown).collect();
    Ok(Json(json!({"entries": entries, "truncated": false, "next_after": null})))
}

/// Sockets and their like have no word there, and what is being uploaded is not there yet.
fn shown(entry: &FileEntry) -> Option<Value> {
    let mode = match entry.kind.as_str() {
        "directory" => 0o040_000,
        "symlink" => 0o120_000,
        "file" if entry.mode & 0o111 != 0 => 0o100_755,
        "file" => 0o100_644,
        _ => return None,
    };
    let size = (entry.kind == "file").then_some(entry.size);
    let entry = (!uploads::is_staging(&entry.path)).then_some(entry)?;
    Some(json!({"name": entry.path, "oid": identity(entry), "mode": mode, "size": size}))
}

fn identity(entry: &FileEntry) -> String {
    format!("{}-{}", entry.size, entry.modified_at_ms)
}

/// A file of a drive as the path names it, as it is now.
struct File {
    drive: Target,
    path: String,
}

impl FromRequestParts<Arc<Service>> for File {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, service: &Arc<Service>) -> Result<Self> {
        let Drive(drive) = Drive::from_request_parts(parts, service).await?;
        Query::<Version>::from_request_parts(parts, service).await?.0.check()?;
        let path: String = segment(parts, "path").await?;
        Ok(Self { drive, path: absolute(&path)? })
    }
}

impl File {
    async fn entry(&self, service: &Service) -> Result<FileEntry> {
        let entry = volume_files::stat(service, &self.drive, &self.path).await?;
        match entry.kind.as_str() {
            "file" => Ok(entry),
            kind => Err(ApiError::new(
                ErrorCode::FileRefused,
                format!("{} is a {kind}: only files can be read", self.path),
            )),
        }
    }
}

/// Where the content of a file is: all of it with us.
async fn plan(State(service): State<Arc<Service>>, file: File) -> Result<Json<Value>> {
    let entry = file.entry(&service).await?;
    let (size, id) = (entry.size, identity(&entry));
    let whole = json!({
        "offset": 0,
        "stored_len": size,
        "logical_len": size,
        "compression": "raw",
        "content_id": id,
        "hash_algorithm": NOT_USED,
    });
    let parts = if size == 0 { Vec::new() } else { vec![whole] };
    Ok(Json(json!({
        "parts": parts,
        "logical_len": size,
        "content_id": id,
        "hash_algorithm": UNHASHED,
    })))
}

async fn read(State(service): State<Arc<Service>>, file: File) -> Result<Response> {
    let id = identity(&file.entry(&service).await?);
    let content = volume_files::read(&service, &file.drive, &file.path, 0, None).await?;
    let mut response = axum::body::Body::from_stream(content.pieces).into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(ALGORITHM, HeaderValue::from_static(UNHASHED));
    if let Ok(id) = HeaderValue::try_from(id) {
        headers.insert(CONTENT_ID, id);
    }
    if let Some(length) = content.length {
        headers.insert(CONTENT_LENGTH, length.into());
    }
    Ok(response)
}

//! Files: read, write, remove, list. A path that is not absolute is taken from `/`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderValue, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use torpor_protocol::api::FileEntry;
use torpor_service::Service;
use torpor_service::files::{self, PathText, Write};
use torpor_web::extract::{Query, pieces};

use super::{Refused, Result};
use crate::tensorlake::gate::Inside;

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/files", get(read).put(write).delete(remove))
        .route("/files/list", get(list))
}

#[derive(Debug, Deserialize)]
struct PathQuery {
    path: String,
}

impl PathQuery {
    /// A path that climbs is refused as Tensorlake does; inside a sandbox it would do no harm.
    fn absolute(self) -> Result<PathText> {
        if self.path.split('/').any(|part| part == "..") {
            let text = "path: it must not contain \"..\"".to_owned();
            return Err(Refused::Here(StatusCode::FORBIDDEN, "PATH_TRAVERSAL", text));
        }
        let path = match self.path {
            path if path.is_empty() || path.starts_with('/') => path,
            path => format!("/{path}"),
        };
        PathText::new(path).map_err(Refused::invalid)
    }
}

async fn read(
    State(service): State<Arc<Service>>,
    Query(query): Query<PathQuery>,
    Inside(awake): Inside,
) -> Result<Response> {
    let content = files::read(&service, awake, query.absolute()?.0, 0, None).await?;
    let mut response = Body::from_stream(content.pieces).into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    if let Some(length) = content.length {
        headers.insert(CONTENT_LENGTH, length.into());
    }
    Ok(response)
}

/// The directories above it are made; it is replaced when the last byte is there.
async fn write(
    State(service): State<Arc<Service>>,
    Query(query): Query<PathQuery>,
    Inside(awake): Inside,
    body: Body,
) -> Result<StatusCode> {
    let write = Write { path: query.absolute()?.0, ..Write::default() };
    files::write(&service, &awake, write, pieces(body)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn remove(Query(query): Query<PathQuery>, Inside(awake): Inside) -> Result<StatusCode> {
    let path = query.absolute()?.0;
    if files::stat(&awake, path.clone()).await?.kind == "directory" {
        let text = format!("{path}: is a directory");
        return Err(Refused::Here(StatusCode::BAD_REQUEST, "IS_DIRECTORY", text));
    }
    files::remove(&awake, path, false).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn list(Query(query): Query<PathQuery>, Inside(awake): Inside) -> Result<Json<Value>> {
    let path = query.absolute()?.0;
    let entries = files::list(&awake, path.clone(), 1).await?;
    let entries: Vec<_> = entries.into_iter().map(shown).collect();
    Ok(Json(json!({"path": path, "entries": entries})))
}

fn shown(entry: FileEntry) -> Value {
    let is_dir = entry.kind == "directory";
    json!({
        "name": entry.path,
        "is_dir": is_dir,
        "size": (!is_dir).then_some(entry.size),
        // Clients take no time before 1970.
        "modified_at": u64::try_from(entry.modified_at_ms).ok(),
    })
}

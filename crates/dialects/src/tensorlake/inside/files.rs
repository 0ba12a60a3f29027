//! Files: read, write, remove, list. A path that is not absolute is taken from `/`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::get;
use axum::{Json, Router};
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout;
use torpor_daemon::api::extract::Query;
use torpor_daemon::api::files::{self, LIST_DEADLINE, PathText};
use torpor_daemon::api::transfer::{self, ReadQuery};
use torpor_lifecycle::guest::{GuestError, unexpected};
use torpor_protocol::api::FileEntry;
use torpor_protocol::guest::{FileKind, Reply, Request};
use torpor_service::Service;

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
    State(app): State<Arc<Service>>,
    Query(query): Query<PathQuery>,
    Inside(awake): Inside,
) -> Result<Response> {
    let path = query.absolute()?;
    let whole = Query(ReadQuery { path, offset: 0, length: None });
    Ok(transfer::read(State(app), whole, awake).await?)
}

/// The directories above it are made; it is replaced when the last byte is there.
async fn write(
    State(app): State<Arc<Service>>,
    Query(query): Query<PathQuery>,
    Inside(awake): Inside,
    body: Body,
) -> Result<StatusCode> {
    let path = query.absolute()?.0;
    let request = Request::WriteFile { path, mode: None, append: false, owner: None };
    let Reply::Stat(_) = transfer::upload(&app, &awake, &request, body).await? else {
        return Err(unexpected(&request).into());
    };
    Ok(StatusCode::NO_CONTENT)
}

async fn remove(Query(query): Query<PathQuery>, Inside(awake): Inside) -> Result<StatusCode> {
    let path = query.absolute()?.0;
    let guest = awake.lease.guest();
    let found = guest.stat(&Request::Stat { path: path.clone() }).await?;
    if found.kind == FileKind::Directory {
        let text = format!("{path}: is a directory");
        return Err(Refused::Here(StatusCode::BAD_REQUEST, "IS_DIRECTORY", text));
    }
    guest.done(&Request::Remove { path, recursive: false }).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn list(Query(query): Query<PathQuery>, Inside(awake): Inside) -> Result<Json<Value>> {
    let path = query.absolute()?.0;
    let request = Request::List { path: path.clone(), depth: 1 };
    let listing = timeout(LIST_DEADLINE, files::entries(awake.lease.guest(), &request)).await;
    let entries = listing.map_err(|_| GuestError::Timeout(LIST_DEADLINE))??;
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

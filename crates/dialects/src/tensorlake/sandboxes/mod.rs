//! Sandboxes: create, get, list, change, suspend and resume, copy, end.
//!
//! ```text
//!  create.rs   from nothing to running, with all the ways that can go
//!  update.rs   name, ports, network, resources
//!  standby.rs  suspend and resume
//!  copy.rs     live copies
//! ```
//!
//! Nothing here wakes a sandbox but resuming it.

mod copy;
mod create;
mod standby;
mod update;

use std::sync::Arc;

use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use torpor_protocol::{SandboxId, SandboxRef, State as SandboxState};
use torpor_service::error::Refusal;
use torpor_service::{Sandbox, Service, calls};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::Query;

use super::extract::{Address, Place};
use super::file_systems;
use super::gate::{find, missing};
use super::info::{SandboxInfo, TERMINATED};
pub(super) use create::{Begun, settled};

/// Sandboxes in one page, unless the client asks for another number up to this.
const PAGE_MAX: usize = 1000;

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/sandboxes", get(list).post(create::create))
        .route("/sandboxes/{sandbox}", get(one).patch(update::update).delete(delete))
        .route("/sandboxes/{sandbox}/suspend", post(standby::suspend))
        .route("/sandboxes/{sandbox}/resume", post(standby::resume))
        .route("/sandboxes/{sandbox}/copy", post(copy::copy))
        .route(
            "/sandboxes/{sandbox}/file_systems",
            post(file_systems::attach).delete(file_systems::detach),
        )
}

/// How many a page has.
pub(super) fn page_size(limit: Option<usize>) -> Result<usize> {
    match limit {
        Some(0) => Err(ApiError::invalid("limit must be at least 1")),
        limit => Ok(limit.unwrap_or(PAGE_MAX).min(PAGE_MAX)),
    }
}

/// It has to run, or to sleep at least, for what is asked.
pub(super) fn refuse_unborn(sandbox: &Sandbox, verb: &str) -> Result<()> {
    let state = sandbox.watch().borrow().state;
    let why = match state {
        SandboxState::Running | SandboxState::Asleep => return Ok(()),
        SandboxState::Creating => "is pending",
        SandboxState::Failed | SandboxState::Terminated => "is terminated",
    };
    Err(ApiError::invalid(format!("sandbox {} {why}: it can't be {verb}", sandbox.id())))
}

async fn one(
    State(service): State<Arc<Service>>,
    Place(text): Place,
    address: Address,
) -> Result<Json<SandboxInfo>> {
    let sandbox = find(&service, &text)?;
    let status = sandbox.status();
    // Whoever is terminated has no name any more: clients take it for another one.
    let by_name = text.parse().is_ok_and(|of| matches!(of, SandboxRef::Name(_)));
    if by_name && status.state == SandboxState::Failed {
        return Err(Refusal::NoSuchSandbox(SandboxRef::Id(status.id)).into());
    }
    Ok(Json(SandboxInfo::of(status, &address)))
}

#[derive(Debug, Deserialize)]
struct ListQuery {
    cursor: Option<String>,
    limit: Option<usize>,
}

#[derive(Debug, Serialize)]
struct List {
    sandboxes: Vec<SandboxInfo>,
    /// The last id of this page, if there is another.
    cursor: Option<String>,
}

async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<ListQuery>,
    address: Address,
) -> Result<Json<List>> {
    let limit = page_size(query.limit)?;
    let after = query.cursor.filter(|cursor| !cursor.is_empty());
    let after: Option<SandboxId> = after
        .map(|cursor| cursor.parse())
        .transpose()
        .map_err(|error| ApiError::invalid(format!("cursor: {error}")))?;
    let (page, more) = service.fleet.page(after.as_ref(), limit, |_| true);
    let cursor = page.last().filter(|_| more).map(|last| last.id.to_string());
    let sandboxes = page.into_iter().map(|status| SandboxInfo::of(status, &address)).collect();
    Ok(Json(List { sandboxes, cursor }))
}

/// Whoever is terminated already may be terminated again.
async fn delete(State(service): State<Arc<Service>>, Place(text): Place) -> Result<Json<Value>> {
    let of: SandboxRef = text.parse().map_err(|_| missing(&text))?;
    let id = calls::delete(&service, &of).await?;
    Ok(Json(json!({"sandbox_id": id, "status": TERMINATED})))
}

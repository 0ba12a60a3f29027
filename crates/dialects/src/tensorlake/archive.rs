//! Sandboxes that are gone, last ended first.

use std::sync::Arc;

use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use torpor_daemon::api::error::{ApiError, Result};
use torpor_daemon::api::extract::Query;
use torpor_protocol::api::ArchivedSandbox;
use torpor_protocol::{SandboxId, SandboxRef};
use torpor_service::Service;

use super::extract::Place;
use super::gate::missing;
use super::info::SandboxInfo;
use super::sandboxes::page_size;

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/archived-sandboxes", get(list))
        .route("/archived-sandboxes/{sandbox}", get(one))
}

#[derive(Debug, Deserialize)]
struct ListQuery {
    cursor: Option<String>,
    limit: Option<usize>,
    #[serde(default)]
    direction: Direction,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Direction {
    /// To those that ended earlier.
    #[default]
    Forward,
    Backward,
}

#[derive(Debug, Serialize)]
struct List {
    sandboxes: Vec<SandboxInfo>,
    prev_cursor: Option<String>,
    next_cursor: Option<String>,
}

/// A part of the archive, and whether there is more around it.
struct Page {
    part: Vec<ArchivedSandbox>,
    later: bool,
    earlier: bool,
}

async fn list(
    State(app): State<Arc<Service>>,
    Query(query): Query<ListQuery>,
) -> Result<Json<List>> {
    let limit = page_size(query.limit)?;
    let cursor = query.cursor.filter(|cursor| !cursor.is_empty());
    let cursor: Option<SandboxId> = cursor
        .map(|cursor| cursor.parse())
        .transpose()
        .map_err(|error| ApiError::invalid(format!("cursor: {error}")))?;
    let Page { part, later, earlier } = match query.direction {
        Direction::Forward => before(&app, cursor.as_ref(), limit).await?,
        Direction::Backward => after(&app, cursor.as_ref(), limit).await?,
    };
    let id = |ended: &ArchivedSandbox| ended.id.to_string();
    let prev_cursor = part.first().filter(|_| later).map(id);
    let next_cursor = part.last().filter(|_| earlier).map(id);
    let engine = app.fleet.about().kind;
    let sandboxes = part.into_iter().map(|ended| SandboxInfo::archived(ended, engine)).collect();
    Ok(Json(List { sandboxes, prev_cursor, next_cursor }))
}

/// Those that ended before this one, or the last of all.
async fn before(app: &Service, cursor: Option<&SandboxId>, limit: usize) -> Result<Page> {
    let mut part = app.ledger.archived(cursor, limit + 1).await?;
    let earlier = part.len() > limit;
    part.truncate(limit);
    Ok(Page { part, later: cursor.is_some(), earlier })
}

/// Those that ended after this one and nearest to it, or the first of all.
async fn after(app: &Service, cursor: Option<&SandboxId>, limit: usize) -> Result<Page> {
    let mut part = app.ledger.archived_after(cursor, limit + 1).await?;
    let later = part.len() > limit;
    part.drain(..part.len().saturating_sub(limit));
    Ok(Page { part, later, earlier: cursor.is_some() })
}

/// By its id; or by its name, which the last who had it is found by.
async fn one(State(app): State<Arc<Service>>, Place(text): Place) -> Result<Json<SandboxInfo>> {
    let found = match text.parse::<SandboxRef>().map_err(|_| missing(&text))? {
        SandboxRef::Id(id) => app.ledger.find_archived(&id).await?,
        SandboxRef::Name(name) => app.ledger.find_archived_by_name(&name).await?,
    };
    let ended = found.ok_or_else(|| missing(&text))?;
    Ok(Json(SandboxInfo::archived(ended, app.fleet.about().kind)))
}

//! Sandboxes that are gone, last ended first.

use std::sync::Arc;

use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use torpor_protocol::api::ArchivedSandbox;
use torpor_protocol::{SandboxId, SandboxRef};
use torpor_service::Service;
use torpor_service::calls::archive::{self, Page};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::Query;

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

async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<ListQuery>,
) -> Result<Json<List>> {
    let limit = page_size(query.limit)?;
    let cursor = query.cursor.filter(|cursor| !cursor.is_empty());
    let cursor: Option<SandboxId> = cursor
        .map(|cursor| cursor.parse())
        .transpose()
        .map_err(|error| ApiError::invalid(format!("cursor: {error}")))?;
    let beyond = cursor.is_some();
    let (part, later, earlier) = match query.direction {
        Direction::Forward => {
            let Page { part, more } = archive::before(&service, cursor.as_ref(), limit).await?;
            (part, beyond, more)
        }
        Direction::Backward => {
            let Page { part, more } = archive::after(&service, cursor.as_ref(), limit).await?;
            (part, more, beyond)
        }
    };
    let id = |ended: &ArchivedSandbox| ended.id.to_string();
    let prev_cursor = part.first().filter(|_| later).map(id);
    let next_cursor = part.last().filter(|_| earlier).map(id);
    let sandboxes = part.into_iter().map(SandboxInfo::archived).collect();
    Ok(Json(List { sandboxes, prev_cursor, next_cursor }))
}

/// By its id; or by its name, which the last who had it is found by.
async fn one(State(service): State<Arc<Service>>, Place(text): Place) -> Result<Json<SandboxInfo>> {
    let of: SandboxRef = text.parse().map_err(|_| missing(&text))?;
    let ended = archive::find(&service, &of).await?.ok_or_else(|| missing(&text))?;
    Ok(Json(SandboxInfo::archived(ended)))
}

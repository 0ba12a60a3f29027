//! Sandboxes that are gone, last ended first.

use std::sync::Arc;

use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use torpor_daemon::api::error::{ApiError, Result};
use torpor_daemon::api::extract::Query;
use torpor_lifecycle::store::Ledger as _;
use torpor_protocol::api::ArchivedSandbox;
use torpor_protocol::{SandboxId, SandboxRef};
use torpor_service::Service;

use super::extract::Place;
use super::gate::missing;
use super::info::SandboxInfo;
use super::sandboxes::page_size;

/// As many as the archive has.
const ALL: usize = 10_000;

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
        Direction::Backward => after(app.ledger.archived(None, ALL).await?, cursor, limit)?,
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
fn after(all: Vec<ArchivedSandbox>, cursor: Option<SandboxId>, limit: usize) -> Result<Page> {
    let end = match &cursor {
        Some(cursor) => all.iter().position(|ended| ended.id == *cursor).ok_or_else(|| {
            ApiError::invalid(format!("cursor: {cursor} is not or no longer in the archive"))
        })?,
        None => all.len(),
    };
    let begin = end.saturating_sub(limit);
    let part = all.into_iter().skip(begin).take(end - begin).collect();
    Ok(Page { part, later: begin > 0, earlier: cursor.is_some() })
}

/// By its id; or by its name, which the last who had it is found by.
async fn one(State(app): State<Arc<Service>>, Place(text): Place) -> Result<Json<SandboxInfo>> {
    let found = match text.parse::<SandboxRef>().map_err(|_| missing(&text))? {
        SandboxRef::Id(id) => app.ledger.find_archived(&id).await?,
        SandboxRef::Name(name) => {
            let all = app.ledger.archived(None, ALL).await?;
            all.into_iter().find(|ended| ended.spec.name.as_ref() == Some(&name))
        }
    };
    let ended = found.ok_or_else(|| missing(&text))?;
    Ok(Json(SandboxInfo::archived(ended, app.fleet.about().kind)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn ended(number: u8) -> ArchivedSandbox {
        let ended = json!({
            "id": number.to_string().repeat(21), "created_at_ms": 0, "ended_at_ms": number,
            "reason": null, "name": null, "image": "x", "image_id": "0".repeat(64), "resources": {},
        });
        serde_json::from_value(ended).unwrap()
    }

    fn seen(cursor: Option<u8>, limit: usize) -> (Vec<u64>, bool, bool) {
        let all = (1..=5).rev().map(ended).collect();
        let cursor = cursor.map(|number| number.to_string().repeat(21).parse().unwrap());
        let Page { part, later, earlier } = after(all, cursor, limit).unwrap();
        (part.iter().map(|ended| ended.ended_at_ms).collect(), later, earlier)
    }

    #[test]
    fn a_page_back_is_the_one_before() {
        assert_eq!(seen(Some(1), 2), (vec![3, 2], true, true));
        assert_eq!(seen(Some(4), 2), (vec![5], false, true));
        assert_eq!(seen(Some(5), 2), (vec![], false, true));
        assert_eq!(seen(None, 2), (vec![2, 1], true, false));
        assert_eq!(seen(None, 9), (vec![5, 4, 3, 2, 1], false, false));
    }

    #[test]
    fn a_cursor_that_is_not_in_the_archive_is_refused() {
        let nobody = Some(SandboxId::random());
        assert!(after(vec![ended(1)], nobody, 2).is_err());
    }
}

//! Sandboxes that are gone, as they last were.

use std::sync::Arc;

use axum::extract::State;
use serde::Deserialize;
use torpor_lifecycle::ledger::ArchiveLedger as _;
use torpor_lifecycle::{Error, Refusal};
use torpor_protocol::api::{ArchiveList, ArchivedSandbox};
use torpor_protocol::{SandboxId, SandboxRef};
use torpor_service::Service;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use super::extract::{Json, Path, Query};

/// Sandboxes in one page, unless the client asks for another number up to this.
const PAGE_MAX: usize = 1000;

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(get))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// Only those that ended before this one: `next` of the page before.
    #[param(value_type = Option<String>)]
    before: Option<SandboxId>,
    /// Default and maximum: 1000.
    limit: Option<usize>,
}

/// List sandboxes that are gone.
#[utoipa::path(
    get, path = "/v1/archive", params(ListQuery),
    responses((status = 200, description = "Last ended first.", body = ArchiveList))
)]
async fn list(
    State(app): State<Arc<Service>>,
    Query(query): Query<ListQuery>,
) -> Answer<ArchiveList> {
    let limit = query.limit.unwrap_or(PAGE_MAX).clamp(1, PAGE_MAX);
    let mut sandboxes = app.ledger.archived(query.before.as_ref(), limit + 1).await?;
    let more = sandboxes.len() > limit;
    sandboxes.truncate(limit);
    let next = sandboxes.last().filter(|_| more).map(|last| last.id.to_string());
    Ok(Json(ArchiveList { sandboxes, next }))
}

#[derive(Debug, Deserialize)]
struct ArchivePath {
    sandbox: SandboxId,
}

/// Get a sandbox that is gone.
#[utoipa::path(
    get, path = "/v1/archive/{sandbox}",
    params(("sandbox" = String, Path, description = "Id")),
    responses((status = 200, description = "As it last was.", body = ArchivedSandbox))
)]
async fn get(
    State(app): State<Arc<Service>>,
    Path(ArchivePath { sandbox }): Path<ArchivePath>,
) -> Answer<ArchivedSandbox> {
    let found = app.ledger.find_archived(&sandbox).await?;
    let missing = || Error::from(Refusal::NoSuchSandbox(SandboxRef::Id(sandbox)));
    Ok(Json(found.ok_or_else(missing)?))
}

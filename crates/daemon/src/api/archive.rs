//! Sandboxes that are gone, as they last were.

use std::sync::Arc;

use axum::extract::State;
use serde::Deserialize;
use torpor_lifecycle::Refusal;
use torpor_protocol::api::{ArchiveList, ArchivedSandbox};
use torpor_protocol::{SandboxId, SandboxRef};
use torpor_service::Service;
use torpor_web::extract::{Json, Path, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use super::page::{Cut, PageQuery};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(get))
}

/// List sandboxes that are gone.
#[utoipa::path(
    get, path = "/v1/archive", params(PageQuery),
    responses((status = 200, description = "Last ended first.", body = ArchiveList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<ArchiveList> {
    let cut = Cut::try_from(query)?;
    let before: Option<SandboxId> = cut.parsed()?;
    let mut sandboxes = service.ledger.archived(before.as_ref(), cut.limit + 1).await?;
    let more = sandboxes.len() > cut.limit;
    sandboxes.truncate(cut.limit);
    let next_cursor = sandboxes.last().filter(|_| more).map(|last| last.id.to_string());
    Ok(Json(ArchiveList { sandboxes, next_cursor }))
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
    State(service): State<Arc<Service>>,
    Path(ArchivePath { sandbox }): Path<ArchivePath>,
) -> Answer<ArchivedSandbox> {
    let found = service.ledger.find_archived(&sandbox).await?;
    let missing = || Refusal::NoSuchSandbox(SandboxRef::Id(sandbox));
    Ok(Json(found.ok_or_else(missing)?))
}

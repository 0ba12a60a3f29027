//! Snapshots: take, list, get, verify, delete. What is in them: [`contents`]; from and to elsewhere:
//! [`file`]. None of it wakes a sandbox or revives anything.

mod contents;
mod file;

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_lifecycle::Refusal;
use torpor_lifecycle::ledger::SnapshotFilter;
use torpor_lifecycle::store::{PinOwner, Saves, SnapshotRecord};
use torpor_protocol::snapshot::{SnapshotDetails, SnapshotList, TakeSnapshot, Verified};
use torpor_protocol::{SandboxRef, SaveId, Snapshot, SnapshotRef, SnapshotState};
use torpor_service::{Service, calls};
use torpor_web::error::Result;
use torpor_web::extract::{Json, Named, Query, SnapshotPath};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::idempotency::RepeatKey;
use super::page::{Cut, dated};
use super::sandboxes::WaitQuery;
use super::{Answer, no_content, with_status};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(take_snapshot))
        .routes(routes!(list))
        .routes(routes!(get, delete))
        .routes(routes!(verify))
        .merge(contents::routes())
        .merge(file::routes())
}

/// Take a snapshot of a sandbox. If it sleeps, it sleeps on.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/snapshots",
    params(("sandbox" = String, Path, description = "Id or name"), WaitQuery),
    request_body = TakeSnapshot,
    responses(
        (status = 201, description = "It is complete.", body = Snapshot),
        (status = 202, description = "It is in progress (`wait=false`).", body = Snapshot),
    )
)]
async fn take_snapshot(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Query(WaitQuery { wait }): Query<WaitQuery>,
    RepeatKey(by): RepeatKey,
    request: Option<Json<TakeSnapshot>>,
) -> Result<Response> {
    let TakeSnapshot { name, kind } = request.map(|Json(request)| request).unwrap_or_default();
    let taken = calls::snapshot(&service, &sandbox, name, kind, by.as_deref()).await?;
    if !wait {
        return Ok(with_status(StatusCode::ACCEPTED, taken.begun_as));
    }
    Ok(with_status(StatusCode::CREATED, taken.done().await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// Only those of this sandbox: id or name, also of one that is gone.
    #[param(value_type = Option<String>)]
    sandbox: Option<SandboxRef>,
    /// 1 to 1000; default 1000.
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

impl ListQuery {
    fn filter(&self, service: &Service) -> SnapshotFilter {
        match &self.sandbox {
            None => SnapshotFilter::default(),
            Some(SandboxRef::Id(id)) => {
                SnapshotFilter { sandbox: Some(id.clone()), sandbox_name: None }
            }
            Some(of @ SandboxRef::Name(name)) => SnapshotFilter {
                sandbox: service.fleet.find(of).ok().map(|sandbox| sandbox.id().clone()),
                sandbox_name: Some(name.clone()),
            },
        }
    }
}

/// List snapshots.
#[utoipa::path(
    get, path = "/v1/snapshots", params(ListQuery),
    responses((status = 200, description = "Oldest first.", body = SnapshotList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<ListQuery>,
) -> Answer<SnapshotList> {
    let cut = Cut::new(query.limit, query.cursor.clone())?;
    let after = cut.parsed_date()?;
    let page = service.fleet.snapshots(&query.filter(&service), after.as_ref(), cut.rows()).await?;
    let snapshots = page.into_iter().map(|record| record.snapshot).collect();
    Ok(Json(cut.page(snapshots, |last: &Snapshot| dated(last.created_at_ms, &last.id))))
}

/// Get a snapshot, with what ran in it and what needs it.
#[utoipa::path(
    get, path = "/v1/snapshots/{snapshot}",
    params(("snapshot" = String, Path, description = "Id or name")),
    responses((status = 200, description = "The snapshot.", body = SnapshotDetails))
)]
async fn get(
    State(service): State<Arc<Service>>,
    SnapshotPath(of): SnapshotPath,
) -> Answer<SnapshotDetails> {
    let SnapshotRecord { snapshot, save } = service.fleet.find_snapshot(&of).await?;
    let ancestors = service.fleet.ancestors(&snapshot.id).await?;
    let Some(save) = save else {
        let (files, processes, needed_by) = (Vec::new(), Vec::new(), Vec::new());
        return Ok(Json(SnapshotDetails { snapshot, files, ancestors, processes, needed_by }));
    };
    let manifest = service.saves.manifest(&save).await?;
    let needing = service.saves.pins(&save).await?.into_iter().filter_map(|owner| match owner {
        PinOwner::Sandbox(id) => Some(id),
        PinOwner::Snapshot(_) | PinOwner::Pool(_) | PinOwner::Build(_) | PinOwner::Reader => None,
    });
    Ok(Json(SnapshotDetails {
        snapshot,
        files: manifest.files,
        ancestors,
        processes: manifest.about.processes,
        needed_by: needing.collect(),
    }))
}

/// Read all of a snapshot from disk and compare it with its checksums.
#[utoipa::path(
    post, path = "/v1/snapshots/{snapshot}/verify",
    params(("snapshot" = String, Path, description = "Id or name")),
    responses((status = 200, description = "Every byte is what it was.", body = Verified))
)]
async fn verify(
    State(service): State<Arc<Service>>,
    SnapshotPath(of): SnapshotPath,
) -> Answer<Verified> {
    let (_, save) = complete(&service, &of).await?;
    Ok(Json(service.saves.verify(&save).await?))
}

/// Delete a snapshot. What began from it goes on.
#[utoipa::path(
    delete, path = "/v1/snapshots/{snapshot}",
    params(("snapshot" = String, Path, description = "Id or name")),
    responses((status = 204, description = "It is gone; its bytes are, too, unless something needs them."))
)]
async fn delete(
    State(service): State<Arc<Service>>,
    SnapshotPath(of): SnapshotPath,
) -> Result<Response> {
    service.fleet.erase_snapshot(&of).await?;
    Ok(no_content())
}

/// A snapshot that is complete, and its save.
async fn complete(service: &Service, of: &SnapshotRef) -> Result<(Snapshot, SaveId)> {
    let SnapshotRecord { snapshot, save } = service.fleet.find_snapshot(of).await?;
    match (snapshot.state, save) {
        (SnapshotState::Completed, Some(save)) => Ok((snapshot, save)),
        (SnapshotState::InProgress | SnapshotState::Completed | SnapshotState::Failed, _) => {
            let id = snapshot.id.to_string();
            let why = snapshot.message.unwrap_or_else(|| "it is being taken".to_owned());
            Err(Refusal::SnapshotNotReady { id, why }.into())
        }
    }
}

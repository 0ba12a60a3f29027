//! Snapshots: take, list, get, delete. Nobody is woken for one, and nobody waits: whoever wants to know
//! asks again.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use torpor_protocol::{
    ErrorCode, SandboxId, SandboxRef, Snapshot, SnapshotId, SnapshotKind, SnapshotRef,
};
use torpor_service::{Service, SnapshotFilter, calls};
use torpor_web::error::{ApiError, Result};

use super::NAMESPACE;
use super::extract::{Body, Place};
use super::gate::{Named, find};
use super::request::shown_image;
use super::sandboxes::refuse_unborn;

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/sandboxes/{sandbox}/snapshot", post(take))
        .route("/sandboxes/{sandbox}/snapshots", get(list_of_sandbox))
        .route("/snapshots", get(list))
        .route("/snapshots/{snapshot}", get(one).delete(delete))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SnapshotRequest {
    snapshot_type: Option<SnapshotKind>,
}

#[derive(Debug, Serialize)]
struct SnapshotInfo {
    id: SnapshotId,
    namespace: &'static str,
    sandbox_id: SandboxId,
    status: &'static str,
    snapshot_type: &'static str,
    base_image: String,
    error: Option<String>,
    snapshot_uri: Option<String>,
    snapshot_format_version: Option<String>,
    size_bytes: u64,
    rootfs_disk_bytes: u64,
    created_at: u64,
}

impl From<Snapshot> for SnapshotInfo {
    fn from(snapshot: Snapshot) -> Self {
        Self {
            id: snapshot.id,
            namespace: NAMESPACE,
            sandbox_id: snapshot.sandbox,
            status: snapshot.state.as_str(),
            snapshot_type: snapshot.kind.as_str(),
            base_image: shown_image(&snapshot.image),
            error: snapshot.message,
            snapshot_uri: None,
            snapshot_format_version: None,
            size_bytes: snapshot.size_bytes,
            rootfs_disk_bytes: snapshot.resources.disk_mib.saturating_mul(1024 * 1024),
            created_at: snapshot.created_at_ms,
        }
    }
}

#[derive(Debug, Serialize)]
struct List {
    snapshots: Vec<SnapshotInfo>,
    /// All are in one page.
    cursor: Option<String>,
}

async fn take(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Body(asked): Body<SnapshotRequest>,
) -> Result<Response> {
    refuse_unborn(&sandbox, "saved")?;
    let kind = asked.snapshot_type.unwrap_or(SnapshotKind::Filesystem);
    let begun = calls::snapshot(&service, &sandbox, None, kind, None).await?.begun_as;
    let body = json!({"snapshot_id": begun.id, "status": begun.state.as_str()});
    Ok((StatusCode::ACCEPTED, Json(body)).into_response())
}

async fn list(State(service): State<Arc<Service>>) -> Result<Json<List>> {
    listed(&service, SnapshotFilter::default()).await
}

async fn listed(service: &Service, filter: SnapshotFilter) -> Result<Json<List>> {
    let all = service.fleet.every_snapshot(&filter).await?;
    let snapshots = all.into_iter().map(|record| record.snapshot.into()).collect();
    Ok(Json(List { snapshots, cursor: None }))
}

/// Also of a sandbox that is gone.
async fn list_of_sandbox(
    State(service): State<Arc<Service>>,
    Place(text): Place,
) -> Result<Json<List>> {
    let id = match find(&service, &text) {
        Ok(sandbox) => sandbox.id().clone(),
        Err(missing) => gone(&service, &text).await?.ok_or(missing)?,
    };
    listed(&service, of_sandbox(id)).await
}

fn of_sandbox(id: SandboxId) -> SnapshotFilter {
    SnapshotFilter { sandbox: Some(id), sandbox_name: None }
}

/// A sandbox that is remembered, by the archive or by a snapshot.
async fn gone(service: &Service, text: &str) -> Result<Option<SandboxId>> {
    let Ok(SandboxRef::Id(id)) = text.parse() else { return Ok(None) };
    if calls::archive::find(service, &SandboxRef::Id(id.clone())).await?.is_some() {
        return Ok(Some(id));
    }
    let snapshots = service.fleet.snapshots(&of_sandbox(id.clone()), None, 1).await?;
    Ok((!snapshots.is_empty()).then_some(id))
}

async fn one(
    State(service): State<Arc<Service>>,
    Place(text): Place,
) -> Result<Json<SnapshotInfo>> {
    let record = service.fleet.find_snapshot(&reference(&text)?).await?;
    Ok(Json(record.snapshot.into()))
}

async fn delete(State(service): State<Arc<Service>>, Place(text): Place) -> Result<Json<Value>> {
    service.fleet.erase_snapshot(&reference(&text)?).await?;
    Ok(Json(json!({"snapshot_id": text})))
}

/// What can't be one names no snapshot.
pub(super) fn reference(text: &str) -> Result<SnapshotRef> {
    text.parse().map_err(|error| {
        ApiError::new(ErrorCode::SnapshotNotFound, format!("there is none: {error}"))
    })
}

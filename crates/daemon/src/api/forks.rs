//! Forks: many sandboxes that begin at one restore point, all at once. One that fails takes no other.

use std::sync::Arc;

use axum::extract::State;
use torpor_lifecycle::Sandbox;
use torpor_protocol::snapshot::{Fork, ForkList, ForkOutcome};
use torpor_service::Service;
use torpor_service::calls;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use super::extract::{Json, Named, RequestId, SnapshotPath};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(fork_snapshot)).routes(routes!(fork_sandbox))
}

/// Fork a snapshot.
#[utoipa::path(
    post, path = "/v1/snapshots/{snapshot}/fork", operation_id = "fork",
    params(("snapshot" = String, Path, description = "Id or name")),
    request_body = Fork,
    responses((
        status = 200, body = ForkList,
        description = "What became of each fork, in order: a sandbox that runs, or an error.",
    ))
)]
async fn fork_snapshot(
    State(app): State<Arc<Service>>,
    SnapshotPath(snapshot): SnapshotPath,
    id: RequestId,
    request: Option<Json<Fork>>,
) -> Answer<ForkList> {
    let fork = request.map(|Json(request)| request).unwrap_or_default();
    Ok(to_list(calls::fork(&app, &snapshot, &fork).await?, &id))
}

/// Fork a sandbox as it is now. It goes on; if it sleeps, it is not woken.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/fork", operation_id = "fork",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = Fork,
    responses((
        status = 200, body = ForkList,
        description = "What became of each fork, in order: a sandbox that runs, or an error.",
    ))
)]
async fn fork_sandbox(
    State(app): State<Arc<Service>>,
    Named(sandbox): Named,
    id: RequestId,
    request: Option<Json<Fork>>,
) -> Answer<ForkList> {
    let fork = request.map(|Json(request)| request).unwrap_or_default();
    Ok(to_list(calls::copy(&app, &sandbox, &fork).await?, &id))
}

/// A fork that failed is told like a request that failed.
fn to_list(
    forks: Vec<torpor_service::Result<Sandbox>>,
    RequestId(id): &RequestId,
) -> Json<ForkList> {
    let forks = forks.into_iter().map(|fork| match fork {
        Ok(sandbox) => ForkOutcome { sandbox: Some(Box::new(sandbox.status())), error: None },
        Err(error) => {
            if let Some(error) = error.internal() {
                tracing::error!(error, "a fork failed");
            }
            ForkOutcome { sandbox: None, error: Some(error.to_body(id)) }
        }
    });
    Json(ForkList { forks: forks.collect() })
}

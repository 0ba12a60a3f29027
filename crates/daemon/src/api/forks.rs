//! Forks: many sandboxes that begin at one restore point, all at once. One that fails takes no other.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use torpor_lifecycle::Sandbox;
use torpor_protocol::snapshot::{Fork, ForkList, ForkOutcome};
use torpor_service::Service;
use torpor_service::calls;
use torpor_web::error::{Result, status_of};
use torpor_web::extract::{Json, Named, RequestId, SnapshotPath};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::idempotency::RepeatKey;
use super::with_status;

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(fork_snapshot)).routes(routes!(fork_sandbox))
}

/// Fork a snapshot.
#[utoipa::path(
    post, path = "/v1/snapshots/{snapshot}/fork", operation_id = "fork",
    params(("snapshot" = String, Path, description = "Id or name")),
    request_body = Fork,
    responses(
        (status = 201, description = "All of them run, in order.", body = ForkList),
        (status = 207, body = ForkList,
            description = "What became of each, in order; `status` says which have an error instead."),
    )
)]
async fn fork_snapshot(
    State(service): State<Arc<Service>>,
    SnapshotPath(snapshot): SnapshotPath,
    id: RequestId,
    RepeatKey(by): RepeatKey,
    request: Option<Json<Fork>>,
) -> Result<Response> {
    let fork = request.map(|Json(request)| request).unwrap_or_default();
    Ok(to_response(calls::fork(&service, &snapshot, &fork, by.as_deref()).await?, &id))
}

/// Fork a sandbox as it is now. It goes on; if it sleeps, it is not woken.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/fork", operation_id = "fork",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = Fork,
    responses(
        (status = 201, description = "All of them run, in order.", body = ForkList),
        (status = 207, body = ForkList,
            description = "What became of each, in order; `status` says which have an error instead."),
    )
)]
async fn fork_sandbox(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    id: RequestId,
    RepeatKey(by): RepeatKey,
    request: Option<Json<Fork>>,
) -> Result<Response> {
    let fork = request.map(|Json(request)| request).unwrap_or_default();
    Ok(to_response(calls::copy(&service, &sandbox, &fork, by.as_deref()).await?, &id))
}

/// A fork that failed is told like a request that failed.
fn to_response(forks: Vec<torpor_service::Result<Sandbox>>, RequestId(id): &RequestId) -> Response {
    let whole = forks.iter().all(std::result::Result::is_ok);
    let forks = forks.into_iter().map(|fork| match fork {
        Ok(sandbox) => ForkOutcome {
            status: StatusCode::CREATED.as_u16(),
            sandbox: Some(Box::new(sandbox.status())),
            error: None,
        },
        Err(error) => {
            if let Some(error) = error.internal() {
                tracing::error!(error, "a fork failed");
            }
            let status = status_of(error.code()).as_u16();
            ForkOutcome { status, sandbox: None, error: Some(error.to_body(id)) }
        }
    });
    let status = if whole { StatusCode::CREATED } else { StatusCode::MULTI_STATUS };
    with_status(status, ForkList { forks: forks.collect() })
}

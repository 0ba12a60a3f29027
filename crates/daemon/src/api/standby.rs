//! Sleep, wake, and back to a restore point. Everything else that is asked of a sandbox wakes it by
//! itself (see [`torpor_web::extract::Awake`]); what only looks at it ([`torpor_web::extract::Named`]) does not.

use std::sync::Arc;

use axum::extract::State;
use torpor_protocol::Status;
use torpor_protocol::snapshot::{RestoreSandbox, Sleep};
use torpor_service::{Service, calls};
use torpor_web::extract::{Json, Named};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(sleep)).routes(routes!(wake)).routes(routes!(restore))
}

/// Put a sandbox to sleep.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/sleep",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = Sleep,
    responses((status = 200, description = "It sleeps and all of it is on disk.", body = Status))
)]
async fn sleep(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    request: Option<Json<Sleep>>,
) -> Answer<Status> {
    let Sleep { cold } = request.map(|Json(request)| request).unwrap_or_default();
    calls::sleep(&service, &sandbox, cold).await?;
    Ok(Json(sandbox.status()))
}

/// Wake a sandbox, also one that requests do not wake.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/wake",
    params(("sandbox" = String, Path, description = "Id or name")),
    responses((status = 200, description = "It runs.", body = Status))
)]
async fn wake(State(service): State<Arc<Service>>, Named(sandbox): Named) -> Answer<Status> {
    calls::wake(&service, &sandbox).await?;
    Ok(Json(sandbox.status()))
}

/// Take a sandbox back to a snapshot, with memory and processes if they are in it.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/restore",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = RestoreSandbox,
    responses((status = 200, description = "It runs as it was then.", body = Status))
)]
async fn restore(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Json(RestoreSandbox { snapshot }): Json<RestoreSandbox>,
) -> Answer<Status> {
    let sandbox = calls::restore(&service, &sandbox, &snapshot).await?;
    Ok(Json(sandbox.status()))
}

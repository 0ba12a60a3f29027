//! The daemon itself: what it is, and its metrics.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::CONTENT_TYPE;
use torpor_protocol::ErrorCode;
use torpor_protocol::api::Info;
use torpor_service::Service;
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::Json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(info))
}

/// What runs here.
#[utoipa::path(
    get, path = "/v1/info",
    responses((status = 200, description = "Versions and numbers.", body = Info))
)]
async fn info(State(service): State<Arc<Service>>) -> Json<Info> {
    let about = service.fleet.about();
    Json(Info {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        installation: service.installation.clone(),
        engine: about.kind.to_owned(),
        engine_version: about.version.clone(),
        sandboxes: service.fleet.count(),
        uptime_ms: u64::try_from(service.started.elapsed().as_millis()).unwrap_or(u64::MAX),
    })
}

pub(super) async fn metrics(State(service): State<Arc<Service>>) -> Result<Response> {
    let saved_bytes = service.saves.bytes().await?;
    service.metrics.set_egress(&service.egress.audit().counts());
    let queue = service.ledger.queue_length().await?;
    service.metrics.set_queue(queue.queued, queue.running);
    service.metrics.set_outbox(service.ledger.outbox_length().await?);
    let text = service.metrics.render(&service.fleet, saved_bytes);
    let text = text.map_err(|_| ApiError::new(ErrorCode::Internal, "metrics can't be written"))?;
    Ok(([(CONTENT_TYPE, OPEN_METRICS)], text).into_response())
}

//! The native HTTP API, `/v1`: routes, their description, and the way from errors to answers.
//!
//! Handlers translate: parse, one call into the service or through a lease, answer. What may be is decided
//! in `torpor_service`; what goes wrong becomes a status code in [`error`].

#![expect(unused_qualifications, reason = "utoipa's macros write them into our code")]

mod archive;
mod builds;
mod description;
mod domains;
mod egress;
mod engine;
pub mod error;
mod events;
pub mod exec;
pub mod extract;
mod files;
mod forks;
mod gateways;
pub mod idempotency;
mod images;
mod keys;
mod logs;
mod ndjson;
mod operations;
mod page;
mod pools;
mod previews;
mod processes;
pub mod retry;
mod run;
mod sandboxes;
mod secrets;
mod snapshots;
pub mod socket;
mod standby;
mod system;
mod transfer;
pub mod tunnel;

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{HeaderValue, StatusCode};
use torpor_edge::auth;
use torpor_protocol::ErrorCode;
use torpor_service::Service;
use utoipa_axum::router::OpenApiRouter;

use crate::parts::Dialect;
use error::{ApiError, Result};

/// Everything under one router, with authentication, request ids and metrics.
pub fn router(app: &Arc<Service>, dialects: &[Dialect]) -> Router {
    let (guarded, _) = routes().split_for_parts();
    let dialects = dialects.iter().fold(Router::new(), |all, dialect| all.merge(dialect(app)));
    guarded
        .layer(from_fn_with_state((Arc::clone(app), Arc::default()), idempotency::once))
        .layer(from_fn(retry::retry_after_suspend))
        .route("/metrics", get(system::metrics))
        .route_layer(from_fn_with_state(Arc::clone(app), authenticate))
        .merge(dialects)
        .route("/healthz", get(async || "ok"))
        .route("/openapi.json", get(async || axum::Json(openapi())))
        .fallback(async || ApiError::new(ErrorCode::NotFound, "there is no such route"))
        .method_not_allowed_fallback(async || {
            ApiError::new(ErrorCode::MethodNotAllowed, "this route has no such method")
        })
        .layer(DefaultBodyLimit::max(extract::JSON_MAX))
        .layer(map_response(forbid_guessing))
        .layer(from_fn_with_state(Arc::clone(app), crate::telemetry::observe))
        .with_state(Arc::clone(app))
}

/// Lets nobody through who may not ask.
async fn authenticate(
    State(app): State<Arc<Service>>,
    mut request: Request,
    next: Next,
) -> Result<Response> {
    let caller = auth::admit(&app.keys, request.uri(), request.headers()).await?;
    request.extensions_mut().insert(caller);
    Ok(next.run(request).await)
}

fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::with_openapi(description::begin())
        .merge(sandboxes::routes())
        .merge(events::routes())
        .merge(standby::routes())
        .merge(snapshots::routes())
        .merge(forks::routes())
        .merge(pools::routes())
        .merge(previews::routes())
        .merge(run::routes())
        .merge(exec::routes())
        .merge(processes::routes())
        .merge(files::routes())
        .merge(transfer::routes())
        .merge(tunnel::routes())
        .merge(images::routes())
        .merge(builds::routes())
        .merge(system::routes())
        .merge(keys::routes())
        .merge(secrets::routes())
        .merge(domains::routes())
        .merge(archive::routes())
        .merge(logs::routes())
        .merge(egress::routes())
        .merge(gateways::routes())
        .merge(engine::routes())
}

/// The description of the API.
pub fn openapi() -> serde_json::Value {
    let (_, openapi) = routes().split_for_parts();
    description::complete(&openapi)
}

/// Browsers must not guess what bytes out of a sandbox are.
async fn forbid_guessing(mut response: Response) -> Response {
    let value = HeaderValue::from_static("nosniff");
    response.headers_mut().insert(http::header::X_CONTENT_TYPE_OPTIONS, value);
    response
}

/// Nothing to say but that it is done.
fn no_content() -> Response {
    StatusCode::NO_CONTENT.into_response()
}

/// `created(201, body)` and the like.
fn with_status<T: serde::Serialize>(status: StatusCode, body: T) -> Response {
    (status, axum::Json(body)).into_response()
}

/// For answers of handlers that only translate.
type Answer<T> = Result<extract::Json<T>>;

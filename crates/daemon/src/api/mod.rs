//! The native HTTP API, `/v1`: routes, their description, and the way from errors to answers.
//!
//! Handlers translate: parse, one call into the service or through a lease, answer. What may be is decided
//! in `torpor_service`; what goes wrong becomes a status code in [`torpor_web::error`].

#![expect(unused_qualifications, reason = "utoipa's macros write them into our code")]

mod archive;
mod builds;
mod description;
mod domains;
mod egress;
mod engine;
mod event_log;
mod events;
mod exec;
mod executions;
mod files;
mod forks;
mod gateways;
mod idempotency;
mod images;
mod jobs;
mod keys;
mod logs;
mod mcp_endpoint;
mod mcp_gateway;
mod ndjson;
mod operations;
mod page;
mod pools;
mod previews;
mod processes;
mod registries;
mod run;
mod sandboxes;
mod schedules;
mod secrets;
mod services;
mod snapshots;
mod standby;
mod system;
mod transfer;
mod tunnel;
mod volume_files;
mod volumes;
mod webhooks;

use std::sync::Arc;

use async_trait::async_trait;
use axum::body::Body;
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, StatusCode, Uri};
use torpor_gateway::Gateway;
use torpor_service::upload::Pieces;
use torpor_service::{Error, Service};
use torpor_web::auth;
use torpor_web::dialect::{Asked, Dialect, Routes};
use torpor_web::error::{ApiError, Result, status_of};
use torpor_web::extract::Json;
use utoipa_axum::router::OpenApiRouter;

pub(crate) use mcp_endpoint::McpEndpoint;

/// Our own API, for whatever nobody else claims.
pub(crate) struct Native {
    pub(crate) gateway: Arc<Gateway>,
}

#[async_trait]
impl Dialect for Native {
    fn name(&self) -> &'static str {
        "torpor"
    }

    fn classify(&self, asked: &Asked<'_>) -> bool {
        asked.port.is_none()
    }

    fn target(&self, uri: &Uri, _: &HeaderMap) -> Option<String> {
        let rest = uri.path().strip_prefix("/v1/sandboxes/")?;
        rest.split('/').next().map(str::to_owned)
    }

    async fn authenticate(
        &self,
        service: &Service,
        head: &mut Parts,
    ) -> std::result::Result<(), Response> {
        let admitted = auth::admit(&service.keys, &head.uri, &head.headers).await;
        let caller = admitted.map_err(|error| ApiError(error).into_response())?;
        head.extensions.insert(caller);
        Ok(())
    }

    fn word_error(&self, error: &Error, request_id: &str) -> Response {
        (status_of(error.code()), axum::Json(error.to_body(request_id))).into_response()
    }

    fn routes(&self, service: &Arc<Service>) -> Routes {
        let (described, _) = routes().split_for_parts();
        let once = from_fn_with_state((Arc::clone(service), Arc::default()), idempotency::once);
        let open = Router::new()
            .route("/healthz", get(async || "ok"))
            .route("/openapi.json", get(async || axum::Json(openapi())));
        let guarded = described
            .layer(once)
            .route("/metrics", get(system::metrics))
            .layer(Extension(Arc::clone(&self.gateway)));
        Routes { guarded, open }
    }
}

fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::with_openapi(description::begin())
        .merge(sandboxes::routes())
        .merge(events::routes())
        .merge(event_log::routes())
        .merge(webhooks::routes())
        .merge(schedules::routes())
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
        .merge(registries::routes())
        .merge(system::routes())
        .merge(keys::routes())
        .merge(secrets::routes())
        .merge(services::routes())
        .merge(domains::routes())
        .merge(archive::routes())
        .merge(logs::routes())
        .merge(egress::routes())
        .merge(gateways::routes())
        .merge(mcp_gateway::routes())
        .merge(engine::routes())
        .merge(volumes::routes())
        .merge(jobs::routes())
        .merge(executions::routes())
}

/// The description of the API.
pub fn openapi() -> serde_json::Value {
    let (_, openapi) = routes().split_for_parts();
    description::complete(&openapi)
}

/// Nothing to say but that it is done.
fn no_content() -> Response {
    StatusCode::NO_CONTENT.into_response()
}

/// `created(201, body)` and the like.
fn with_status<T: serde::Serialize>(status: StatusCode, body: T) -> Response {
    (status, axum::Json(body)).into_response()
}

/// Bytes as they come.
fn streamed(kind: &'static str, pieces: Pieces) -> Response {
    ([(CONTENT_TYPE, kind)], Body::from_stream(pieces)).into_response()
}

/// For answers of handlers that only translate.
type Answer<T> = Result<Json<T>>;

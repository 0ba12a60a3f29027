//! The native HTTP API, `/v1`: routes, their description, and the way from errors to answers.
//!
//! Handlers translate: parse, one call into the fleet or through a lease, answer. What they may
//! decide lives in [`crate::admission`]; what goes wrong becomes a status code in [`error`].

#![expect(unused_qualifications, reason = "utoipa's macros write them into our code")]

pub mod auth;
mod command;
pub mod error;
mod events;
mod exec;
pub mod extract;
mod files;
mod images;
mod keys;
mod output;
mod processes;
mod run;
mod sandboxes;
mod socket;
mod system;
mod transfer;
mod tunnel;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware::{from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{HeaderValue, StatusCode};
use torpor_protocol::{ErrorBody, ErrorCode};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{ContentBuilder, OpenApi, Ref, RefOr, Response as ApiResponse};
use utoipa::openapi::{InfoBuilder, OpenApiBuilder, PathItem};
use utoipa_axum::router::OpenApiRouter;

use crate::app::App;
use error::{ApiError, Result};
pub(crate) use sandboxes::admit;

/// Everything under one router, with authentication, request ids and metrics.
pub fn router(app: &Arc<App>) -> Router {
    let (guarded, _) = routes().split_for_parts();
    guarded
        .route("/metrics", get(system::metrics))
        .route_layer(from_fn_with_state(Arc::clone(app), auth::authenticate))
        .route("/healthz", get(async || "ok"))
        .route("/openapi.json", get(async || axum::Json(openapi())))
        .fallback(async || ApiError::new(ErrorCode::NotFound, "there is no such route"))
        .method_not_allowed_fallback(async || {
            ApiError::new(ErrorCode::MethodNotAllowed, "this route has no such method")
        })
        .layer(DefaultBodyLimit::max(extract::JSON_MAX))
        .layer(map_response(plain_text_only))
        .layer(from_fn_with_state(Arc::clone(app), crate::telemetry::observe))
        .with_state(Arc::clone(app))
}

fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::with_openapi(described())
        .merge(sandboxes::routes())
        .merge(events::routes())
        .merge(run::routes())
        .merge(exec::routes())
        .merge(processes::routes())
        .merge(files::routes())
        .merge(transfer::routes())
        .merge(tunnel::routes())
        .merge(images::routes())
        .merge(system::routes())
        .merge(keys::routes())
}

/// The description of the API.
pub fn openapi() -> OpenApi {
    let (_, mut openapi) = routes().split_for_parts();
    for item in openapi.paths.paths.values_mut() {
        describe_errors(item);
    }
    openapi
}

fn described() -> OpenApi {
    let info = InfoBuilder::new()
        .title("Torpor")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(
            "Sandboxes for agents. {sandbox} is an id or a name everywhere. Every answer has the \
             header x-request-id; every error has the body ErrorBody.",
        ))
        .build();
    let mut openapi = OpenApiBuilder::new().info(info).build();
    let scheme = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
    let components = openapi.components.get_or_insert_default();
    components.add_security_scheme("key", scheme);
    let mut schemas = Vec::new();
    <ErrorBody as utoipa::ToSchema>::schemas(&mut schemas);
    schemas.push(("ErrorBody".to_owned(), <ErrorBody as utoipa::PartialSchema>::schema()));
    components.schemas.extend(schemas);
    // On loopback without keys none is needed.
    openapi.security =
        Some(vec![SecurityRequirement::default(), SecurityRequirement::new("key", [""; 0])]);
    openapi
}

/// Every operation fails in the same form.
fn describe_errors(item: &mut PathItem) {
    let operations = [
        &mut item.get,
        &mut item.put,
        &mut item.post,
        &mut item.delete,
        &mut item.patch,
        &mut item.head,
    ];
    for operation in operations.into_iter().flatten() {
        let content =
            ContentBuilder::new().schema(Some(Ref::from_schema_name("ErrorBody"))).build();
        let mut response = ApiResponse::new("It was not done; `code` says why.");
        response.content.insert("application/json".to_owned(), RefOr::T(content));
        operation.responses.responses.insert("default".to_owned(), RefOr::T(response));
    }
}

/// Browsers must not guess what bytes out of a sandbox are.
async fn plain_text_only(mut response: Response) -> Response {
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

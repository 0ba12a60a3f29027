//! Who is asking, and for which sandbox.
//!
//! - One `Host` only: of two nobody knows which one was meant.
//! - The lifecycle API is guarded like our own. Inside a sandbox clients on this host say `Host:
//!   <sandbox>.local`, which no browser has a reason to: all that looks like one is refused. Who names
//!   the sandbox in the header says the true `Host`, as for our own.

use std::sync::Arc;

use axum::extract::{FromRequestParts, RawPathParams, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::header::HOST;
use http::request::Parts;
use http::{HeaderMap, StatusCode};
use torpor_daemon::api::error::ApiError;
use torpor_edge::auth;
use torpor_lifecycle::{Error, Refusal, Sandbox};
use torpor_protocol::{ErrorCode, SandboxRef};
use torpor_service::Service;
use torpor_service::processes::Awake;

use super::NAMESPACE;
use super::error::refuse;

/// Names the sandbox, instead of the `Host`.
const SANDBOX_HEADER: &str = "x-tensorlake-sandbox-id";
/// What a host ends with that names a sandbox.
const LOCAL: &str = ".local";

pub(super) async fn api(State(app): State<Arc<Service>>, request: Request, next: Next) -> Response {
    if has_two_hosts(request.headers()) {
        return refuse_two_hosts();
    }
    if let Err(error) = auth::admit(&app.keys, request.uri(), request.headers()).await {
        return next_error(error);
    }
    let (mut parts, body) = request.into_parts();
    if let Ok(params) = RawPathParams::from_request_parts(&mut parts, &()).await
        && let Some((_, namespace)) = params.iter().find(|(key, _)| *key == "namespace")
        && namespace != NAMESPACE
    {
        let text = format!("this key may use the namespace {NAMESPACE:?} only");
        return refuse(StatusCode::FORBIDDEN, "FORBIDDEN", text);
    }
    next.run(Request::from_parts(parts, body)).await
}

pub(super) async fn inside(
    State(app): State<Arc<Service>>,
    request: Request,
    next: Next,
) -> Response {
    if has_two_hosts(request.headers()) {
        return refuse_two_hosts();
    }
    let headers = request.headers();
    let named = label(headers).is_some() && !headers.contains_key(SANDBOX_HEADER);
    let admitted = if named {
        auth::admit_local(&app.keys, headers).await
    } else {
        auth::admit(&app.keys, request.uri(), headers).await.map(drop)
    };
    match admitted {
        Ok(()) => next.run(request).await,
        Err(error) => next_error(error),
    }
}

fn next_error(error: impl Into<ApiError>) -> Response {
    axum::response::IntoResponse::into_response(error.into())
}

fn has_two_hosts(headers: &HeaderMap) -> bool {
    headers.get_all(HOST).iter().count() > 1
}

fn refuse_two_hosts() -> Response {
    let text = "the request has more than one Host header";
    refuse(StatusCode::BAD_REQUEST, "INVALID_REQUEST", text)
}

/// The sandbox that the `Host` names.
fn label(headers: &HeaderMap) -> Option<&str> {
    let host = headers.get(HOST)?.to_str().ok()?;
    let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
    host.strip_suffix(LOCAL).filter(|label| !label.is_empty() && !label.contains('.'))
}

pub(super) fn missing(text: &str) -> ApiError {
    match text.parse::<SandboxRef>() {
        Ok(reference) => Error::from(Refusal::NoSuchSandbox(reference)).into(),
        Err(error) => ApiError::new(ErrorCode::SandboxNotFound, format!("there is none: {error}")),
    }
}

/// Id or name, as a client wrote it. What can't be one names no sandbox.
pub(super) fn find(app: &Service, text: &str) -> Result<Sandbox, ApiError> {
    let reference: SandboxRef = text.parse().map_err(|_| missing(text))?;
    let sandbox = app.fleet.find(&reference)?;
    tracing::Span::current().record("sandbox", sandbox.id().as_str());
    Ok(sandbox)
}

/// The sandbox that the path names, whatever its state; it is not woken.
pub(super) struct Named(pub(super) Sandbox);

impl FromRequestParts<Arc<Service>> for Named {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, app: &Arc<Service>) -> Result<Self, ApiError> {
        Ok(Self(find(app, &segment(parts, "sandbox").await?)?))
    }
}

/// A segment of the path, whatever else is in it.
pub(super) async fn segment(parts: &mut Parts, name: &str) -> Result<String, ApiError> {
    let params = RawPathParams::from_request_parts(parts, &()).await;
    let params = params.map_err(|error| ApiError::invalid(error.body_text()))?;
    let found = params.iter().find(|(key, _)| *key == name);
    Ok(found.map(|(_, text)| text.to_owned()).unwrap_or_default())
}

/// The sandbox that a request to its inside is for, running: it is woken if need be.
pub(super) struct Inside(pub(super) Awake);

impl FromRequestParts<Arc<Service>> for Inside {
    type Rejection = Response;
    async fn from_request_parts(parts: &mut Parts, app: &Arc<Service>) -> Result<Self, Response> {
        let header = parts.headers.get(SANDBOX_HEADER).and_then(|value| value.to_str().ok());
        let Some(text) = header.or_else(|| label(&parts.headers)) else {
            let text = "the request does not say which sandbox it is for: send \
                        X-Tensorlake-Sandbox-Id, or Host: <id-or-name>.local";
            return Err(refuse(StatusCode::BAD_REQUEST, "MISSING_SANDBOX_ID", text));
        };
        let sandbox = find(app, text).map_err(next_error)?;
        Awake::new(app, sandbox).await.map(Self).map_err(next_error)
    }
}

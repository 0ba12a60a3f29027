//! Who is asking, and for which sandbox.
//!
//! - One `Host` only: of two nobody knows which one was meant.
//! - The lifecycle API is guarded like our own. Inside a sandbox clients on this host say `Host:
//!   <sandbox>.local`, which no browser has a reason to: all that looks like one is refused. Who names
//!   the sandbox in the header says the true `Host`, as for our own.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::response::{IntoResponse, Response};
use http::header::HOST;
use http::request::Parts;
use http::{HeaderMap, StatusCode, Uri};
use torpor_protocol::{ErrorCode, SandboxRef};
use torpor_service::error::Refusal;
use torpor_service::processes::Awake;
use torpor_service::{Sandbox, Service};
use torpor_web::dialect::Target;
use torpor_web::error::ApiError;
use torpor_web::extract::segment;

use super::error::refuse;
use super::{NAMESPACE, NAMESPACES};

/// Names the sandbox, instead of the `Host`.
pub(super) const SANDBOX_HEADER: &str = "x-tensorlake-sandbox-id";
/// What a host ends with that names a sandbox.
const LOCAL: &str = ".local";

#[expect(clippy::result_large_err, reason = "it is the answer, and made once a request")]
pub(super) fn refuse_two_hosts(headers: &HeaderMap) -> Result<(), Response> {
    if headers.get_all(HOST).iter().count() <= 1 {
        return Ok(());
    }
    let text = "the request has more than one Host header";
    Err(refuse(StatusCode::BAD_REQUEST, "INVALID_REQUEST", text))
}

#[expect(clippy::result_large_err, reason = "it is the answer, and made once a request")]
pub(super) fn refuse_other_namespaces(uri: &Uri) -> Result<(), Response> {
    let named = uri.path().strip_prefix(NAMESPACES).and_then(|rest| rest.split('/').next());
    if named.is_none_or(|named| named == NAMESPACE) {
        return Ok(());
    }
    let text = format!("this key may use the namespace {NAMESPACE:?} only");
    Err(refuse(StatusCode::FORBIDDEN, "FORBIDDEN", text))
}

pub(super) fn named_by_header(headers: &HeaderMap) -> Option<&str> {
    headers.get(SANDBOX_HEADER).and_then(|value| value.to_str().ok())
}

pub(super) fn named_by_host(headers: &HeaderMap) -> Option<&str> {
    let host = headers.get(HOST)?.to_str().ok()?;
    let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
    host.strip_suffix(LOCAL).filter(|label| !label.is_empty() && !label.contains('.'))
}

pub(super) fn missing(text: &str) -> ApiError {
    match text.parse::<SandboxRef>() {
        Ok(reference) => Refusal::NoSuchSandbox(reference).into(),
        Err(error) => ApiError::new(ErrorCode::SandboxNotFound, format!("there is none: {error}")),
    }
}

/// Id or name, as a client wrote it. What can't be one names no sandbox.
pub(super) fn find(service: &Service, text: &str) -> Result<Sandbox, ApiError> {
    let reference: SandboxRef = text.parse().map_err(|_| missing(text))?;
    let sandbox = service.fleet.find(&reference)?;
    tracing::Span::current().record("sandbox", sandbox.id().as_str());
    Ok(sandbox)
}

/// The sandbox that the path names, whatever its state; it is not woken.
pub(super) struct Named(pub(super) Sandbox);

impl FromRequestParts<Arc<Service>> for Named {
    type Rejection = ApiError;
    async fn from_request_parts(
        parts: &mut Parts,
        service: &Arc<Service>,
    ) -> Result<Self, ApiError> {
        let text: String = segment(parts, "sandbox").await?;
        Ok(Self(find(service, &text)?))
    }
}

/// The sandbox that a request to its inside is for, running: it is woken if need be.
pub(super) struct Inside(pub(super) Awake);

impl FromRequestParts<Arc<Service>> for Inside {
    type Rejection = Response;
    async fn from_request_parts(
        parts: &mut Parts,
        service: &Arc<Service>,
    ) -> Result<Self, Response> {
        let Some(Target(text)) = parts.extensions.get() else {
            let text = "the request does not say which sandbox it is for: send \
                        X-Tensorlake-Sandbox-Id, or Host: <id-or-name>.local";
            return Err(refuse(StatusCode::BAD_REQUEST, "MISSING_SANDBOX_ID", text));
        };
        let sandbox = find(service, text).map_err(IntoResponse::into_response)?;
        let awake = Awake::new(service, sandbox).await;
        awake.map(Self).map_err(|error| ApiError(error).into_response())
    }
}

//! What handlers take: like axum's extractors, but what they refuse becomes an [`ApiError`].

use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::{FromRequest, FromRequestParts, OptionalFromRequest, RawPathParams, Request};
use axum::response::IntoResponse;
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderMap, StatusCode};
use serde::de::DeserializeOwned;
use torpor_protocol::{ErrorCode, SandboxRef, SnapshotRef};
use torpor_service::processes;
use torpor_service::upload::Pieces;
use torpor_service::{Sandbox, Service};

use crate::error::{ApiError, Result};

/// Largest JSON body: a command with its standard input fits, and fits into the window of a stream.
pub const JSON_MAX: usize = 1024 * 1024;

/// How long a JSON body may take to arrive.
const JSON_DEADLINE: Duration = Duration::from_secs(60);

/// A JSON object of at most [`JSON_MAX`] bytes; as an answer, any JSON.
pub struct Json<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = ApiError;
    async fn from_request(request: Request, state: &S) -> Result<Self> {
        let typed = is_json(request.headers());
        parse_json(&whole_body(request, state).await?, typed)
    }
}

/// A body that may be left out.
impl<S: Send + Sync, T: DeserializeOwned> OptionalFromRequest<S> for Json<T> {
    type Rejection = ApiError;
    async fn from_request(request: Request, state: &S) -> Result<Option<Self>> {
        let typed = is_json(request.headers());
        let body = whole_body(request, state).await?;
        if body.is_empty() { Ok(None) } else { parse_json(&body, typed).map(Some) }
    }
}

/// The bytes of a JSON body. One that is announced as too large is not waited for.
pub async fn whole_body<S: Send + Sync>(request: Request, state: &S) -> Result<Bytes> {
    let announced = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    let announced = announced.and_then(|length| length.parse::<u64>().ok());
    if announced.is_some_and(|bytes| bytes > JSON_MAX as u64) {
        return Err(too_large());
    }
    let body = tokio::time::timeout(JSON_DEADLINE, Bytes::from_request(request, state)).await;
    let late = |_| ApiError::new(ErrorCode::Timeout, "the body did not arrive in time");
    body.map_err(late)?.map_err(|error| {
        if error.status() == StatusCode::PAYLOAD_TOO_LARGE {
            return too_large();
        }
        ApiError::invalid(error.body_text())
    })
}

fn too_large() -> ApiError {
    ApiError::with_hint(
        ErrorCode::TooLarge,
        format!("a JSON body has at most {JSON_MAX} bytes"),
        "send large input as a file (PUT …/files) or to a process (PUT …/stdin)",
    )
}

/// The bytes of a body as they come.
pub fn pieces(body: Body) -> Pieces {
    body.into_data_stream().map_err(io::Error::other).boxed()
}

/// Whether a body is said to be JSON.
pub fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let kind = kind.and_then(|kind| kind.split(';').next()).unwrap_or_default();
    kind.trim().eq_ignore_ascii_case("application/json")
}

/// A body is not said to be JSON.
pub fn not_json() -> ApiError {
    ApiError::invalid("the body needs the header `content-type: application/json`")
}

/// The type is demanded so that no web page can send it unasked; see [`crate::auth`].
fn parse_json<T: DeserializeOwned>(body: &[u8], typed: bool) -> Result<Json<T>> {
    if !typed {
        return Err(not_json());
    }
    // Serde would take a list for an object without names.
    if body.trim_ascii_start().first() == Some(&b'[') {
        return Err(ApiError::invalid("the body must be a JSON object, not a list"));
    }
    let parsed = axum::Json::from_bytes(body);
    parsed
        .map(|axum::Json(value)| Json(value))
        .map_err(|error| ApiError::invalid(error.body_text()))
}

impl<T: serde::Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> axum::response::Response {
        // Not axum's, which takes three times as long for a long list.
        match serde_json::to_vec(&self.0) {
            Ok(json) => ([(CONTENT_TYPE, "application/json")], json).into_response(),
            Err(error) => ApiError::new(ErrorCode::Internal, error.to_string()).into_response(),
        }
    }
}

/// The query string; parameters that are not known are refused by the types themselves.
pub struct Query<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let parsed = axum::extract::Query::<T>::from_request_parts(parts, state).await;
        let refuse = |error: QueryRejection| ApiError::invalid(error.body_text());
        parsed.map(|axum::extract::Query(value)| Self(value)).map_err(refuse)
    }
}

/// Segments of the path.
pub struct Path<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Path<T> {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let parsed = axum::extract::Path::<T>::from_request_parts(parts, state).await;
        let refuse = |error: PathRejection| ApiError::invalid(error.body_text());
        parsed.map(|axum::extract::Path(value)| Self(value)).map_err(refuse)
    }
}

/// The sandbox that the path names, whatever its state.
pub struct Named(pub Sandbox);

impl FromRequestParts<Arc<Service>> for Named {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, service: &Arc<Service>) -> Result<Self> {
        let reference: SandboxRef = segment(parts, "sandbox").await?;
        let sandbox = service.fleet.find(&reference)?;
        tracing::Span::current().record("sandbox", sandbox.id().as_str());
        Ok(Self(sandbox))
    }
}

/// How the path names a snapshot.
pub struct SnapshotPath(pub SnapshotRef);

impl<S: Send + Sync> FromRequestParts<S> for SnapshotPath {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self> {
        segment(parts, "snapshot").await.map(Self)
    }
}

/// A segment of the path, understood.
pub async fn segment<T>(parts: &mut Parts, name: &str) -> Result<T>
where
    T: FromStr<Err: std::fmt::Display>,
{
    let params = RawPathParams::from_request_parts(parts, &()).await;
    let params = params.map_err(|error| ApiError::invalid(error.body_text()))?;
    let text = params.iter().find(|(key, _)| *key == name).map(|(_, text)| text);
    text.unwrap_or_default().parse().map_err(|error| ApiError::invalid(format!("{error}")))
}

/// The sandbox that the path names, running. Whoever answers with a stream moves it in there.
pub struct Awake(pub processes::Awake);

impl FromRequestParts<Arc<Service>> for Awake {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, service: &Arc<Service>) -> Result<Self> {
        let Named(sandbox) = Named::from_request_parts(parts, service).await?;
        Ok(Self(processes::Awake::new(service, sandbox).await?))
    }
}

/// A request to speak WebSocket.
pub struct Upgrade(pub WebSocketUpgrade);

impl<S: Send + Sync> FromRequestParts<S> for Upgrade {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let upgrade = WebSocketUpgrade::from_request_parts(parts, state).await;
        let refuse = |error: WebSocketUpgradeRejection| {
            ApiError::with_hint(
                ErrorCode::InvalidRequest,
                error.body_text(),
                "this route is a WebSocket",
            )
        };
        upgrade.map(Self).map_err(refuse)
    }
}

/// Finds the request in the log.
#[derive(Debug, Clone)]
pub struct RequestId(pub Arc<str>);

impl<S: Send + Sync> FromRequestParts<S> for RequestId {
    type Rejection = std::convert::Infallible;
    async fn from_request_parts(
        parts: &mut Parts,
        _: &S,
    ) -> std::result::Result<Self, Self::Rejection> {
        Ok(parts.extensions.get().cloned().unwrap_or_else(|| Self("unknown".into())))
    }
}

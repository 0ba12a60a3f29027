//! What handlers take: like axum's extractors, but what they refuse becomes an [`ApiError`].

use std::sync::Arc;

use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, OptionalFromRequest, RawPathParams, Request};
use axum::response::IntoResponse;
use http::StatusCode;
use http::request::Parts;
use serde::de::DeserializeOwned;
use torpor_lifecycle::{Lease, Sandbox};
use torpor_protocol::{ErrorCode, SandboxRef};

use super::error::ApiError;
use crate::app::App;

/// Largest JSON body: a command with its standard input fits, and fits into the window of a stream.
pub const JSON_MAX: usize = 1024 * 1024;

/// A JSON body of at most [`JSON_MAX`] bytes; as an answer, a JSON body.
pub struct Json<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = ApiError;
    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let parsed = <axum::Json<T> as FromRequest<S>>::from_request(request, state).await;
        parsed.map(|axum::Json(value)| Self(value)).map_err(|error| refuse_json(&error))
    }
}

/// A body that may be left out.
impl<S: Send + Sync, T: DeserializeOwned> OptionalFromRequest<S> for Json<T> {
    type Rejection = ApiError;
    async fn from_request(request: Request, state: &S) -> Result<Option<Self>, ApiError> {
        let parsed = <axum::Json<T> as OptionalFromRequest<S>>::from_request(request, state).await;
        let parsed = parsed.map_err(|error| refuse_json(&error))?;
        Ok(parsed.map(|axum::Json(value)| Self(value)))
    }
}

impl<T: serde::Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> axum::response::Response {
        axum::Json(self.0).into_response()
    }
}

fn refuse_json(error: &JsonRejection) -> ApiError {
    if error.status() == StatusCode::PAYLOAD_TOO_LARGE {
        let message = format!("a JSON body has at most {JSON_MAX} bytes");
        return ApiError::with_hint(
            ErrorCode::TooLarge,
            message,
            "send large input as a file (PUT …/files) or to a process (PUT …/stdin)",
        );
    }
    ApiError::invalid(error.body_text())
}

/// The query string; parameters that are not known are refused by the types themselves.
pub struct Query<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let parsed = axum::extract::Query::<T>::from_request_parts(parts, state).await;
        let refuse = |error: QueryRejection| ApiError::invalid(error.body_text());
        parsed.map(|axum::extract::Query(value)| Self(value)).map_err(refuse)
    }
}

/// Segments of the path.
pub struct Path<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Path<T> {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let parsed = axum::extract::Path::<T>::from_request_parts(parts, state).await;
        let refuse = |error: PathRejection| ApiError::invalid(error.body_text());
        parsed.map(|axum::extract::Path(value)| Self(value)).map_err(refuse)
    }
}

/// The sandbox that the path names, whatever its state.
pub struct Named(pub Sandbox);

impl FromRequestParts<Arc<App>> for Named {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        let params = RawPathParams::from_request_parts(parts, app).await;
        let params = params.map_err(|error| ApiError::invalid(error.body_text()))?;
        let text = params.iter().find(|(name, _)| *name == "sandbox").map(|(_, text)| text);
        let reference: SandboxRef =
            text.unwrap_or_default().parse().map_err(|error| ApiError::invalid(format!("{error}")))?;
        let sandbox = app.fleet.find(&reference)?;
        tracing::Span::current().record("sandbox", sandbox.id().as_str());
        Ok(Self(sandbox))
    }
}

/// The sandbox that the path names, running. Whoever answers with a stream moves it in there.
pub struct Awake {
    pub sandbox: Sandbox,
    pub lease: Lease,
}

impl FromRequestParts<Arc<App>> for Awake {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        let Named(sandbox) = Named::from_request_parts(parts, app).await?;
        let lease = sandbox.awake().await?;
        Ok(Self { sandbox, lease })
    }
}

/// Finds the request in the log.
#[derive(Debug, Clone)]
pub struct RequestId(pub Arc<str>);

impl<S: Send + Sync> FromRequestParts<S> for RequestId {
    type Rejection = std::convert::Infallible;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        Ok(parts.extensions.get().cloned().unwrap_or_else(|| Self("unknown".into())))
    }
}

//! The one place where an error becomes an answer.
//!
//! A handler does not know its request id: [`crate::observe`] puts it into the body on the way out, and
//! writes the log line.

use std::sync::Arc;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::header::RETRY_AFTER;
use http::{HeaderValue, StatusCode};
use torpor_protocol::ErrorCode;
use torpor_service::Error;

/// When there may be room, or another daemon: what sleeps in memory leaves it within this time.
const ROOM: Duration = Duration::from_secs(5);

pub type Result<T> = std::result::Result<T, ApiError>;

/// Why a request was not fulfilled: what the service says, on its way to an answer.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct ApiError(pub Error);

impl<E: Into<Error>> From<E> for ApiError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl ApiError {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self(Error::new(code, message))
    }

    pub fn with_hint(code: ErrorCode, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self(Error::with_hint(code, message, hint))
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self(Error::invalid(message))
    }
}

impl IntoResponse for ApiError {
    /// Without a body: [`crate::observe::observe`] writes it.
    fn into_response(self) -> Response {
        let Self(error) = self;
        let mut response = status_of(error.code()).into_response();
        if let Some(wait) = retry_after(&error) {
            // Whole seconds only can be said there.
            let secs = wait.as_secs_f64().ceil().max(1.0) as u64;
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(secs));
        }
        response.extensions_mut().insert(Arc::new(error));
        response
    }
}

/// When to ask again, if that may help.
fn retry_after(error: &Error) -> Option<Duration> {
    match error {
        Error::RateLimited(wait) => Some(*wait),
        Error::Lifecycle(_) | Error::Store(_) | Error::Guest(_) | Error::Refused { .. } => {
            let later = [
                ErrorCode::CapacityReached,
                ErrorCode::ShuttingDown,
                ErrorCode::IdempotencyInProgress,
            ];
            later.contains(&error.code()).then_some(ROOM)
        }
    }
}

/// The status code of every error code.
pub fn status_of(code: ErrorCode) -> StatusCode {
    StatusCode::from_u16(code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_an_error_status() {
        for &code in ErrorCode::ALL {
            let status = status_of(code);
            assert!(status.is_client_error() || status.is_server_error(), "{code:?}");
        }
    }
}

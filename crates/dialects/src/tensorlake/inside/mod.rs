//! Inside a sandbox: what Tensorlake's daemon on port 9501 answers, `/api/v1/…`.
//!
//! - The sandbox is the one that the `Host` or a header names; it is woken. Whoever answers with a
//!   stream moves the lease in there.
//! - Nothing is kept here: processes and terminals are the agent's, and a terminal's token is made
//!   anew from its id whenever it is asked for.
//! - After something was done, the answer is never one that clients take for "not delivered".

mod command;
mod files;
mod health;
mod lines;
mod output;
mod processes;
mod pty;
mod run;
mod tail;
mod terminal;
mod tunnel;

use std::sync::Arc;

use axum::Router;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use torpor_service::Service;
use torpor_web::error::ApiError;

use super::error::refuse;

pub(super) fn routes() -> Router<Arc<Service>> {
    let inside = Router::new()
        .merge(health::routes())
        .merge(run::routes())
        .merge(processes::routes())
        .merge(output::routes())
        .merge(files::routes())
        .merge(pty::routes())
        .merge(tunnel::routes());
    Router::new().nest("/api/v1", inside)
}

/// Why something is not done inside.
enum Refused {
    Api(ApiError),
    /// A refusal that our own API does not know.
    Here(StatusCode, &'static str, String),
}

type Result<T> = std::result::Result<T, Refused>;

impl Refused {
    fn invalid(text: impl Into<String>) -> Self {
        Self::Api(ApiError::invalid(text))
    }
}

impl<E: Into<ApiError>> From<E> for Refused {
    fn from(error: E) -> Self {
        Self::Api(error.into())
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        match self {
            Self::Api(error) => error.into_response(),
            Self::Here(status, code, text) => refuse(status, code, text),
        }
    }
}

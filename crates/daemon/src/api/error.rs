//! The one place where an error becomes a status code.
//!
//! - What the client can act on is told as it is; what is our fault is told by its code and request
//!   id only, and its causes go to the log.
//! - A handler does not know its request id: [`crate::telemetry`] puts it into the body on the way
//!   out, and writes the log line.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::header::RETRY_AFTER;
use http::{HeaderValue, StatusCode};
use torpor_lifecycle::engine::EngineError;
use torpor_lifecycle::guest::GuestError;
use torpor_lifecycle::store::StoreError;
use torpor_lifecycle::{Error, Refusal, chain};
use torpor_protocol::guest::FailureCode;
use torpor_protocol::{ErrorBody, ErrorCode};
use torpor_store::TreeError;

use crate::admission::Inadmissible;

pub type Result<T> = std::result::Result<T, ApiError>;

/// Why a request was not fulfilled.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    #[error(transparent)]
    Lifecycle(#[from] Error),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// It may ask again after so long.
    #[error("too many requests")]
    TooOften(Duration),
    /// The API itself says no.
    #[error("{message}")]
    Refused { code: ErrorCode, message: String, hint: Option<String> },
}

impl ApiError {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self::Refused { code, message: message.into(), hint: None }
    }

    pub fn with_hint(code: ErrorCode, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Refused { code, message: message.into(), hint: Some(hint.into()) }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidRequest, message)
    }

    /// What the client is told.
    pub fn told(&self, request_id: &str) -> ErrorBody {
        let Told { code, message, hint } = self.tell();
        let request_id = request_id.to_owned();
        if !is_ours(code) {
            return ErrorBody { code, message, hint, request_id };
        }
        let message = "something went wrong in the daemon".to_owned();
        let hint = Some(format!("the daemon's log has the details under {request_id}"));
        ErrorBody { code, message, hint, request_id }
    }

    /// What the log is told, if the error is ours.
    pub fn blame(&self) -> Option<String> {
        is_ours(self.tell().code).then(|| chain(self))
    }

    /// Whether the way to the agent broke, as opposed to the agent saying no.
    pub fn lost_agent(&self) -> bool {
        let guest = match self {
            Self::Guest(guest) | Self::Lifecycle(Error::Guest(guest)) => guest,
            Self::Lifecycle(Error::Refused(_) | Error::Engine(_) | Error::Store(_))
            | Self::Store(_)
            | Self::TooOften(_)
            | Self::Refused { .. } => return false,
        };
        match guest {
            GuestError::Gone | GuestError::Protocol(_) | GuestError::Timeout(_) => true,
            GuestError::Refused { .. } | GuestError::Asleep => false,
        }
    }

    /// Whether somebody put the sandbox to sleep before it could answer.
    pub fn cut_by_sleep(&self) -> bool {
        matches!(
            self,
            Self::Guest(GuestError::Asleep) | Self::Lifecycle(Error::Guest(GuestError::Asleep))
        )
    }

    pub fn status(&self) -> StatusCode {
        status_of(self.tell().code)
    }

    fn tell(&self) -> Told {
        match self {
            Self::Lifecycle(Error::Refused(refusal)) => refused(refusal),
            Self::Lifecycle(Error::Engine(error)) => engine(error),
            Self::Lifecycle(Error::Store(error)) | Self::Store(error) => store(error),
            Self::Lifecycle(Error::Guest(error)) | Self::Guest(error) => guest(error),
            Self::TooOften(wait) => Told::new(ErrorCode::RateLimited, self).hint(&format!(
                "wait {} ms; limits.requests_per_sec of the daemon says how many there may be",
                wait.as_millis().max(1)
            )),
            Self::Refused { code, message, hint } => {
                Told { code: *code, message: message.clone(), hint: hint.clone() }
            }
        }
    }
}

impl From<TreeError> for ApiError {
    fn from(error: TreeError) -> Self {
        let code = match error {
            TreeError::NoSuchPath(_) => ErrorCode::FileNotFound,
            TreeError::NotADirectory(_) | TreeError::NotAFile(_) => ErrorCode::FileRefused,
            TreeError::BadPath { .. } => ErrorCode::InvalidRequest,
            TreeError::TooMany(_) => ErrorCode::TooLarge,
            TreeError::Output(_) | TreeError::Broken(_) => {
                return StoreError::failed("read the files of a snapshot")(error).into();
            }
        };
        Self::new(code, error.to_string())
    }
}

impl From<Inadmissible> for ApiError {
    fn from(error: Inadmissible) -> Self {
        let hint = match error {
            Inadmissible::Invalid { .. } => return Self::invalid(error.to_string()),
            Inadmissible::Memory { .. } => "ask for less memory_mib, or use a larger host",
            Inadmissible::NoMemory { .. } => {
                "put sandboxes to sleep (`torpor sleep --cold`), delete some, or use a larger host"
            }
            Inadmissible::Full(_) => {
                "put sandboxes to sleep (`torpor sleep --cold`), delete some, or raise \
                 limits.sandboxes in the configuration"
            }
        };
        Self::with_hint(ErrorCode::CapacityReached, error.to_string(), hint)
    }
}

struct Told {
    code: ErrorCode,
    message: String,
    hint: Option<String>,
}

impl Told {
    fn new(code: ErrorCode, error: &dyn std::error::Error) -> Self {
        Self { code, message: error.to_string(), hint: None }
    }

    fn hint(self, hint: &str) -> Self {
        Self { hint: Some(hint.to_owned()), ..self }
    }
}

fn refused(refusal: &Refusal) -> Told {
    let told = Told::new(refusal.code(), refusal);
    match refusal {
        Refusal::NameTaken(_) => {
            told.hint("choose another name, or use or delete the sandbox of that name")
        }
        Refusal::Failed { .. } => told.hint("delete it and create it anew"),
        Refusal::Asleep(_) => told
            .hint("POST …/wake (`torpor wake`) wakes it; PATCH standby.auto_wake to let requests"),
        Refusal::CantWake { .. } => {
            told.hint("what was saved of it is kept: try again, or restore it to a snapshot")
        }
        Refusal::SnapshotNameTaken(_) => {
            told.hint("choose another name, or delete the snapshot of that name")
        }
        Refusal::Locked(_) => told.hint("a filesystem snapshot begins with any resources"),
        Refusal::Incompatible { .. } => {
            told.hint("bring it back where it was taken and take a filesystem snapshot of it")
        }
        Refusal::PoolNameTaken(_) => {
            told.hint("choose another name, or delete the pool of that name")
        }
        Refusal::PoolFull { .. } => told.hint("delete sandboxes of it, or raise its max"),
        Refusal::ResizeAsleep(_) => told.hint("POST …/wake (`torpor wake`) wakes it"),
        Refusal::Stopping => {
            told.hint("try again when the daemon is back; nothing is lost meanwhile")
        }
        Refusal::NoSuchSandbox(_)
        | Refusal::NoSuchSnapshot(_)
        | Refusal::SnapshotNotReady { .. }
        | Refusal::NoSuchPool(_)
        | Refusal::Terminated(_) => told,
    }
}

fn engine(error: &EngineError) -> Told {
    match error {
        EngineError::Capacity { .. } => Told::new(ErrorCode::CapacityReached, error)
            .hint("delete sandboxes, ask for less, or use a larger host"),
        EngineError::DiskFull(_) => Told::new(ErrorCode::CapacityReached, error)
            .hint("free some space in the daemon's data directory; the sandbox goes on"),
        EngineError::Image(_) => {
            Told::new(ErrorCode::ImageCorrupt, error).hint("build or import the image again")
        }
        EngineError::GuestFiles(_) => Told::new(ErrorCode::InvalidRequest, error)
            .hint("remove or shorten what it names, or take a memory snapshot"),
        EngineError::Unsupported { .. } => Told::new(ErrorCode::Unsupported, error),
        EngineError::Failed { .. } => Told::new(ErrorCode::Internal, error),
    }
}

fn store(error: &StoreError) -> Told {
    match error {
        StoreError::NoSuchImage(_) => Told::new(ErrorCode::ImageNotFound, error).hint(
            "`torpor image ls` shows those of this host, `torpor image base` makes torpor/base",
        ),
        StoreError::CorruptImage { .. } => Told::new(ErrorCode::ImageCorrupt, error)
            .hint("delete the image and build or import it again"),
        StoreError::NoSuchSave(_) => {
            Told::new(ErrorCode::SnapshotNotFound, error).hint("it was deleted meanwhile")
        }
        StoreError::CorruptSave { .. } => Told::new(ErrorCode::SnapshotCorrupt, error)
            .hint("begin from another snapshot, or bring this one back from a backup"),
        StoreError::NoSuchSecret(_) => {
            Told::new(ErrorCode::NotFound, error).hint("`torpor secret set NAME` makes one")
        }
        StoreError::InUse { .. } => Told::new(ErrorCode::InUse, error),
        StoreError::NameTaken(_) => Told::new(ErrorCode::AlreadyExists, error),
        StoreError::NotOwner(_) => Told::new(ErrorCode::ShuttingDown, error)
            .hint("ask again: the daemon that took over answers"),
        StoreError::Invalid(_) => Told::new(ErrorCode::InvalidRequest, error),
        StoreError::DiskFull(_) => Told::new(ErrorCode::CapacityReached, error)
            .hint("free some space in the daemon's data directory"),
        StoreError::Failed { .. } => Told::new(ErrorCode::Internal, error),
    }
}

fn guest(error: &GuestError) -> Told {
    match error {
        GuestError::Refused { code, .. } => Told::new(failure(*code), error),
        GuestError::Gone => {
            Told::new(ErrorCode::SandboxFailed, error).hint("the status of the sandbox says why")
        }
        GuestError::Asleep => {
            Told::new(ErrorCode::SandboxAsleep, error).hint("ask again: the next request wakes it")
        }
        // The guest is not trusted: what it broke is its sandbox's trouble, not ours.
        GuestError::Protocol(_) => Told::new(ErrorCode::SandboxFailed, error),
        GuestError::Timeout(_) => Told::new(ErrorCode::Timeout, error),
    }
}

fn failure(code: FailureCode) -> ErrorCode {
    match code {
        FailureCode::Invalid => ErrorCode::InvalidRequest,
        FailureCode::NoSuchProcess => ErrorCode::ProcessNotFound,
        FailureCode::NoSuchFile => ErrorCode::FileNotFound,
        FailureCode::NotADirectory
        | FailureCode::IsADirectory
        | FailureCode::NotEmpty
        | FailureCode::Denied
        | FailureCode::Io => ErrorCode::FileRefused,
        FailureCode::Exists => ErrorCode::AlreadyExists,
        FailureCode::DiskFull | FailureCode::Limit => ErrorCode::CapacityReached,
        FailureCode::CannotStart => ErrorCode::CommandFailed,
        FailureCode::NotListening => ErrorCode::PortNotListening,
    }
}

/// The status code of every error code.
pub fn status_of(code: ErrorCode) -> StatusCode {
    match code {
        ErrorCode::InvalidRequest => StatusCode::BAD_REQUEST,
        ErrorCode::Unauthenticated => StatusCode::UNAUTHORIZED,
        ErrorCode::SandboxNotFound
        | ErrorCode::ImageNotFound
        | ErrorCode::SnapshotNotFound
        | ErrorCode::ProcessNotFound
        | ErrorCode::FileNotFound
        | ErrorCode::NotFound => StatusCode::NOT_FOUND,
        ErrorCode::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
        ErrorCode::AlreadyExists
        | ErrorCode::InUse
        | ErrorCode::SandboxFailed
        | ErrorCode::SandboxAsleep
        | ErrorCode::SnapshotIncompatible
        | ErrorCode::SnapshotNotReady => StatusCode::CONFLICT,
        ErrorCode::SandboxTerminated => StatusCode::GONE,
        ErrorCode::CommandFailed | ErrorCode::FileRefused => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorCode::PortNotListening => StatusCode::BAD_GATEWAY,
        ErrorCode::PortNotExposed => StatusCode::FORBIDDEN,
        ErrorCode::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        ErrorCode::CapacityReached => StatusCode::INSUFFICIENT_STORAGE,
        ErrorCode::RateLimited => StatusCode::TOO_MANY_REQUESTS,
        ErrorCode::Timeout => StatusCode::GATEWAY_TIMEOUT,
        ErrorCode::Unsupported => StatusCode::NOT_IMPLEMENTED,
        ErrorCode::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
        ErrorCode::ImageCorrupt | ErrorCode::SnapshotCorrupt | ErrorCode::Internal => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    }
}

/// Whether the details are nobody's business but the operator's.
fn is_ours(code: ErrorCode) -> bool {
    code == ErrorCode::Internal
}

impl IntoResponse for ApiError {
    /// Without a body: [`crate::telemetry::observe`] writes it.
    fn into_response(self) -> Response {
        let mut response = self.status().into_response();
        if let Self::TooOften(wait) = &self {
            // Whole seconds only can be said there.
            let secs = wait.as_secs_f64().ceil().max(1.0) as u64;
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(secs));
        }
        response.extensions_mut().insert(std::sync::Arc::new(self));
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_of_our_own_failures_stay_in_the_log() {
        let error = ApiError::from(StoreError::failed("write /secret/path")("disk on fire"));
        let body = error.told("r1");
        assert_eq!(body.code, ErrorCode::Internal);
        assert!(!format!("{body:?}").contains("secret"), "{body:?}");
        assert!(body.hint.unwrap().contains("r1"));
        assert_eq!(error.blame().unwrap(), "could not write /secret/path: disk on fire");
    }

    #[test]
    fn a_refusal_is_told_and_not_logged() {
        let error = ApiError::from(Error::from(Refusal::NameTaken("web".parse().unwrap())));
        assert_eq!(error.status(), StatusCode::CONFLICT);
        assert_eq!(error.told("r1").message, "the name web is taken");
        assert_eq!(error.blame(), None);
    }

    #[test]
    fn every_code_has_an_error_status() {
        for code in ErrorCode::ALL {
            let status = status_of(code);
            assert!(status.is_client_error() || status.is_server_error(), "{code:?}");
        }
    }
}

//! Errors as Tensorlake's clients understand them: `{"error": text, "code": WORD}`.
//!
//! The status decides which exception is raised and whether the client asks again: 502, 503 and 504
//! are asked again, so they are never the answer after something was done.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::json;
use torpor_daemon::api::error::status_of;
use torpor_lifecycle::guest::GuestError;
use torpor_protocol::guest::FailureCode;
use torpor_protocol::{ErrorBody, ErrorCode};
use torpor_service::Error;

/// Errors of the lifecycle API.
pub(super) fn of_the_api(error: &Error, id: &str) -> Response {
    let told = error.to_body(id);
    say(&told, api_status(told.code))
}

/// Errors of the API inside a sandbox.
pub(super) fn of_the_inside(error: &Error, id: &str) -> Response {
    let told = error.to_body(id);
    say(&told, agents_status(error).unwrap_or_else(|| inside_status(told.code)))
}

fn say(told: &ErrorBody, (status, code): (StatusCode, &str)) -> Response {
    let text = match &told.hint {
        Some(hint) => format!("{} ({hint})", told.message),
        None => told.message.clone(),
    };
    refuse(status, code, text)
}

fn api_status(code: ErrorCode) -> (StatusCode, &'static str) {
    match code {
        // Whoever is gone is not found: `get_or_create` takes the name then.
        ErrorCode::SandboxTerminated => (StatusCode::NOT_FOUND, "NOT_FOUND"),
        ErrorCode::SandboxNotFound => (StatusCode::NOT_FOUND, "SANDBOX_NOT_FOUND"),
        ErrorCode::CapacityReached => (StatusCode::TOO_MANY_REQUESTS, "CAPACITY_REACHED"),
        ErrorCode::RateLimited => (StatusCode::TOO_MANY_REQUESTS, "RATE_LIMITED"),
        ErrorCode::SnapshotNotReady => (StatusCode::BAD_REQUEST, "SNAPSHOT_NOT_READY"),
        // 501 would be asked again by some.
        ErrorCode::Unsupported => (StatusCode::BAD_REQUEST, "UNSUPPORTED"),
        // Their clients know no other word for more than there can be.
        ErrorCode::LimitReached => (StatusCode::BAD_REQUEST, "INVALID_REQUEST"),
        ErrorCode::InvalidRequest
        | ErrorCode::Unauthenticated
        | ErrorCode::ImageNotFound
        | ErrorCode::SnapshotNotFound
        | ErrorCode::ProcessNotFound
        | ErrorCode::FileNotFound
        | ErrorCode::NotFound
        | ErrorCode::MethodNotAllowed
        | ErrorCode::AlreadyExists
        | ErrorCode::InUse
        | ErrorCode::SandboxFailed
        | ErrorCode::SandboxAsleep
        | ErrorCode::CommandFailed
        | ErrorCode::FileRefused
        | ErrorCode::PortNotListening
        | ErrorCode::PortNotExposed
        | ErrorCode::TooLarge
        | ErrorCode::IdempotencyKeyReused
        | ErrorCode::IdempotencyInProgress
        | ErrorCode::IdempotencyOutcomeUnknown
        | ErrorCode::ImageCorrupt
        | ErrorCode::SnapshotCorrupt
        | ErrorCode::SnapshotIncompatible
        | ErrorCode::Timeout
        | ErrorCode::ShuttingDown
        | ErrorCode::Internal => (status_of(code), name_of(code)),
    }
}

fn inside_status(code: ErrorCode) -> (StatusCode, &'static str) {
    match code {
        ErrorCode::SandboxTerminated => (StatusCode::NOT_FOUND, "SANDBOX_NOT_FOUND"),
        ErrorCode::SandboxFailed | ErrorCode::SandboxAsleep => {
            (StatusCode::CONFLICT, "SANDBOX_NOT_RUNNING")
        }
        ErrorCode::ProcessNotFound | ErrorCode::FileNotFound => {
            (StatusCode::NOT_FOUND, "NOT_FOUND")
        }
        ErrorCode::PortNotListening => (StatusCode::BAD_GATEWAY, "CONNECTION_REFUSED"),
        ErrorCode::FileRefused | ErrorCode::CommandFailed => {
            (StatusCode::BAD_REQUEST, name_of(code))
        }
        ErrorCode::Timeout => (StatusCode::INTERNAL_SERVER_ERROR, "READ_TIMEOUT"),
        ErrorCode::InvalidRequest
        | ErrorCode::Unauthenticated
        | ErrorCode::SandboxNotFound
        | ErrorCode::ImageNotFound
        | ErrorCode::SnapshotNotFound
        | ErrorCode::NotFound
        | ErrorCode::MethodNotAllowed
        | ErrorCode::AlreadyExists
        | ErrorCode::InUse
        | ErrorCode::PortNotExposed
        | ErrorCode::TooLarge
        | ErrorCode::CapacityReached
        | ErrorCode::RateLimited
        | ErrorCode::LimitReached
        | ErrorCode::IdempotencyKeyReused
        | ErrorCode::IdempotencyInProgress
        | ErrorCode::IdempotencyOutcomeUnknown
        | ErrorCode::ImageCorrupt
        | ErrorCode::SnapshotCorrupt
        | ErrorCode::SnapshotIncompatible
        | ErrorCode::SnapshotNotReady
        | ErrorCode::Unsupported
        | ErrorCode::ShuttingDown
        | ErrorCode::Internal => api_status(code),
    }
}

/// What the agent says is told apart more finely here than in our own API.
fn agents_status(error: &Error) -> Option<(StatusCode, &'static str)> {
    let Error::Guest(GuestError::Refused { code, .. }) = error else { return None };
    Some(match code {
        FailureCode::IsADirectory => (StatusCode::BAD_REQUEST, "IS_DIRECTORY"),
        FailureCode::NotADirectory => (StatusCode::BAD_REQUEST, "NOT_A_DIRECTORY"),
        FailureCode::Denied => (StatusCode::FORBIDDEN, "PERMISSION_DENIED"),
        // Nobody asks again: it would not help.
        FailureCode::DiskFull => (StatusCode::INSUFFICIENT_STORAGE, "DISK_FULL"),
        FailureCode::Invalid
        | FailureCode::NoSuchProcess
        | FailureCode::NoSuchFile
        | FailureCode::Exists
        | FailureCode::NotEmpty
        | FailureCode::CannotStart
        | FailureCode::NoSuchUser
        | FailureCode::NotListening
        | FailureCode::Limit
        | FailureCode::Io => return None,
    })
}

/// Codes that have no word of their own in Tensorlake's protocol keep ours, in its letters.
fn name_of(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::InvalidRequest => "INVALID_REQUEST",
        ErrorCode::Unauthenticated => "UNAUTHENTICATED",
        ErrorCode::SandboxNotFound => "SANDBOX_NOT_FOUND",
        ErrorCode::ImageNotFound => "IMAGE_NOT_FOUND",
        ErrorCode::SnapshotNotFound => "SNAPSHOT_NOT_FOUND",
        ErrorCode::ProcessNotFound | ErrorCode::FileNotFound | ErrorCode::NotFound => "NOT_FOUND",
        ErrorCode::MethodNotAllowed => "METHOD_NOT_ALLOWED",
        ErrorCode::AlreadyExists => "ALREADY_EXISTS",
        ErrorCode::InUse => "IN_USE",
        ErrorCode::SandboxFailed => "SANDBOX_FAILED",
        ErrorCode::SandboxAsleep => "SANDBOX_SUSPENDED",
        ErrorCode::SandboxTerminated => "SANDBOX_TERMINATED",
        ErrorCode::CommandFailed => "COMMAND_FAILED",
        ErrorCode::FileRefused => "FILE_REFUSED",
        ErrorCode::PortNotListening => "CONNECTION_REFUSED",
        ErrorCode::PortNotExposed => "PORT_NOT_EXPOSED",
        ErrorCode::TooLarge => "TOO_LARGE",
        ErrorCode::CapacityReached => "CAPACITY_REACHED",
        ErrorCode::RateLimited => "RATE_LIMITED",
        ErrorCode::LimitReached => "LIMIT_REACHED",
        ErrorCode::IdempotencyKeyReused => "IDEMPOTENCY_KEY_REUSED",
        ErrorCode::IdempotencyInProgress => "IDEMPOTENCY_IN_PROGRESS",
        ErrorCode::IdempotencyOutcomeUnknown => "IDEMPOTENCY_OUTCOME_UNKNOWN",
        ErrorCode::ImageCorrupt => "IMAGE_CORRUPT",
        ErrorCode::SnapshotCorrupt => "SNAPSHOT_CORRUPT",
        ErrorCode::SnapshotIncompatible => "SNAPSHOT_INCOMPATIBLE",
        ErrorCode::SnapshotNotReady => "SNAPSHOT_NOT_READY",
        ErrorCode::Timeout => "TIMEOUT",
        ErrorCode::Unsupported => "UNSUPPORTED",
        ErrorCode::ShuttingDown => "SHUTTING_DOWN",
        ErrorCode::Internal => "INTERNAL",
    }
}

/// An answer that is an error of this dialect alone.
pub(super) fn refuse(status: StatusCode, code: &str, error: impl Into<String>) -> Response {
    (status, Json(json!({"error": error.into(), "code": code}))).into_response()
}

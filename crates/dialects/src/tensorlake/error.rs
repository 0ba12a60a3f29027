//! Errors as Tensorlake's clients understand them: `{"error": text, "code": WORD}`.
//!
//! The status decides which exception is raised and whether the client asks again: 502, 503 and 504
//! are asked again, so they are never the answer after something was done.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::json;
use torpor_protocol::guest::FailureCode;
use torpor_protocol::{ErrorBody, ErrorCode};
use torpor_service::error::{Error, GuestError};
use torpor_web::error::status_of;

/// What a code is here.
type Word = (ErrorCode, StatusCode, &'static str);

/// Where the lifecycle API differs from our own. Codes that have no word in Tensorlake's protocol keep
/// ours, in its letters.
const API: [Word; 9] = [
    // Whoever is gone is not found: `get_or_create` takes the name then.
    (ErrorCode::SandboxTerminated, StatusCode::NOT_FOUND, "NOT_FOUND"),
    (ErrorCode::SandboxAsleep, StatusCode::CONFLICT, "SANDBOX_SUSPENDED"),
    (ErrorCode::ProcessNotFound, StatusCode::NOT_FOUND, "NOT_FOUND"),
    (ErrorCode::FileNotFound, StatusCode::NOT_FOUND, "NOT_FOUND"),
    (ErrorCode::PortNotListening, StatusCode::BAD_GATEWAY, "CONNECTION_REFUSED"),
    (ErrorCode::CapacityReached, StatusCode::TOO_MANY_REQUESTS, "CAPACITY_REACHED"),
    (ErrorCode::SnapshotNotReady, StatusCode::BAD_REQUEST, "SNAPSHOT_NOT_READY"),
    // 501 would be asked again by some.
    (ErrorCode::Unsupported, StatusCode::BAD_REQUEST, "UNSUPPORTED"),
    // Their clients know no other word for more than there can be.
    (ErrorCode::LimitReached, StatusCode::BAD_REQUEST, "INVALID_REQUEST"),
];

/// Where the API inside a sandbox differs from that.
const INSIDE: [Word; 6] = [
    (ErrorCode::SandboxTerminated, StatusCode::NOT_FOUND, "SANDBOX_NOT_FOUND"),
    (ErrorCode::SandboxFailed, StatusCode::CONFLICT, "SANDBOX_NOT_RUNNING"),
    (ErrorCode::SandboxAsleep, StatusCode::CONFLICT, "SANDBOX_NOT_RUNNING"),
    (ErrorCode::FileRefused, StatusCode::BAD_REQUEST, "FILE_REFUSED"),
    (ErrorCode::CommandFailed, StatusCode::BAD_REQUEST, "COMMAND_FAILED"),
    (ErrorCode::Timeout, StatusCode::INTERNAL_SERVER_ERROR, "READ_TIMEOUT"),
];

/// Errors of the lifecycle API.
pub(super) fn of_the_api(error: &Error, id: &str) -> Response {
    let body = error.to_body(id);
    respond(&body, find(&API, body.code))
}

/// Errors of the API inside a sandbox.
pub(super) fn of_the_inside(error: &Error, id: &str) -> Response {
    let body = error.to_body(id);
    let found = agents_status(error).or_else(|| find(&INSIDE, body.code));
    respond(&body, found.or_else(|| find(&API, body.code)))
}

fn find(words: &[Word], code: ErrorCode) -> Option<(StatusCode, &'static str)> {
    words.iter().find(|word| word.0 == code).map(|word| (word.1, word.2))
}

fn respond(body: &ErrorBody, found: Option<(StatusCode, &'static str)>) -> Response {
    let text = match &body.hint {
        Some(hint) => format!("{} ({hint})", body.message),
        None => body.message.clone(),
    };
    match found {
        Some((status, code)) => refuse(status, code, text),
        None => {
            let ours = json!(body.code);
            let code = ours.as_str().unwrap_or_default().to_ascii_uppercase();
            refuse(status_of(body.code), &code, text)
        }
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
        | FailureCode::Busy
        | FailureCode::Io => return None,
    })
}

/// An answer that is an error of this dialect alone.
pub(super) fn refuse(status: StatusCode, code: &str, error: impl Into<String>) -> Response {
    (status, Json(json!({"error": error.into(), "code": code}))).into_response()
}

//! The closed list of what can go wrong for a client, and the body that says so.
//!
//! SDKs raise one exception class per code; a new code is an addition to the public API.

use serde::{Deserialize, Serialize};

/// What went wrong, for programs. The message is for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request itself is wrong: a field, a name, a path.
    InvalidRequest,
    /// No API key, or one that is not known.
    Unauthenticated,
    /// There is no sandbox of this id or name.
    SandboxNotFound,
    /// There is no image of this id or name.
    ImageNotFound,
    /// There is no snapshot of this id or name.
    SnapshotNotFound,
    /// There is no such process in the sandbox.
    ProcessNotFound,
    /// There is no such file or directory in the sandbox.
    FileNotFound,
    /// There is no such route, key or other thing.
    NotFound,
    /// The path or the way of using it does not exist here (405).
    MethodNotAllowed,
    /// The name is taken.
    AlreadyExists,
    /// Something still needs it.
    InUse,
    /// The sandbox can't run: its machine failed to start or died.
    SandboxFailed,
    /// The sandbox sleeps and does not wake by itself (`auto_wake` is off).
    SandboxAsleep,
    /// The sandbox is being deleted or is gone.
    SandboxTerminated,
    /// The command can't be started: not found, not executable, no such directory or user.
    CommandFailed,
    /// The operation on a file was refused inside the sandbox.
    FileRefused,
    /// Nothing listens on that port inside the sandbox.
    PortNotListening,
    /// That port of the sandbox may not be reached from outside.
    PortNotExposed,
    /// The body is larger than allowed.
    TooLarge,
    /// The host has not got what was asked for now: memory, disk, addresses. `Retry-After` says when to ask
    /// again.
    CapacityReached,
    /// More than there may ever be: the sandbox's own disk is full, the host is smaller than what was asked
    /// for, there are too many of a kind.
    LimitReached,
    /// Whoever asks has asked too often; `Retry-After` says when it may again.
    RateLimited,
    /// The `Idempotency-Key` was sent with another request before.
    IdempotencyKeyReused,
    /// The request with this `Idempotency-Key` is still under way; `Retry-After` says when to ask again.
    IdempotencyInProgress,
    /// The request with this `Idempotency-Key` was begun, and how it ended is not known: the daemon ended
    /// before it did, or its answer was too large to be kept.
    IdempotencyOutcomeUnknown,
    /// The image's bytes are not what its manifest says.
    ImageCorrupt,
    /// The snapshot's bytes are not what its manifest says.
    SnapshotCorrupt,
    /// The snapshot was taken by an engine, or a version of it, that is not here.
    SnapshotIncompatible,
    /// The snapshot is not complete: it is being taken, or taking it failed.
    SnapshotNotReady,
    /// It took longer than allowed.
    Timeout,
    /// This engine or version can't do that.
    Unsupported,
    /// The daemon is stopping.
    ShuttingDown,
    /// Our fault; the log has the details under the request id.
    Internal,
}

impl ErrorCode {
    /// All codes, for documentation and tests.
    pub const ALL: [Self; 33] = [
        Self::InvalidRequest,
        Self::Unauthenticated,
        Self::SandboxNotFound,
        Self::ImageNotFound,
        Self::SnapshotNotFound,
        Self::ProcessNotFound,
        Self::FileNotFound,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::AlreadyExists,
        Self::InUse,
        Self::SandboxFailed,
        Self::SandboxAsleep,
        Self::SandboxTerminated,
        Self::CommandFailed,
        Self::FileRefused,
        Self::PortNotListening,
        Self::PortNotExposed,
        Self::TooLarge,
        Self::CapacityReached,
        Self::LimitReached,
        Self::RateLimited,
        Self::IdempotencyKeyReused,
        Self::IdempotencyInProgress,
        Self::IdempotencyOutcomeUnknown,
        Self::ImageCorrupt,
        Self::SnapshotCorrupt,
        Self::SnapshotIncompatible,
        Self::SnapshotNotReady,
        Self::Timeout,
        Self::Unsupported,
        Self::ShuttingDown,
        Self::Internal,
    ];
}

/// The body of every answer that is not a success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ErrorBody {
    pub code: ErrorCode,
    /// What happened and why.
    pub message: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Finds the request in the daemon's log.
    pub request_id: String,
}

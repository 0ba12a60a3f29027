//! The closed list of what can go wrong for a client, and the body that says so.
//!
//! SDKs raise one exception class per code; a new code is an addition to the public API.

use serde::{Deserialize, Serialize};

macro_rules! codes {
    ($($(#[$doc:meta])* $code:ident = $status:literal,)*) => {
        /// What went wrong, for programs. The message is for people.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        #[serde(rename_all = "snake_case")]
        pub enum ErrorCode {
            $($(#[$doc])* $code,)*
        }

        impl ErrorCode {
            /// All codes, for documentation and tests.
            pub const ALL: &[Self] = &[$(Self::$code,)*];

            /// The HTTP status of every answer with this code.
            pub fn status(self) -> u16 {
                match self {
                    $(Self::$code => $status,)*
                }
            }
        }
    };
}

// Each with the HTTP status of answers that have it.
codes! {
    /// The request itself is wrong: a field, a name, a path.
    InvalidRequest = 400,
    /// No API key, or one that is not known.
    Unauthenticated = 401,
    /// There is no sandbox of this id or name.
    SandboxNotFound = 404,
    /// There is no image of this id or name.
    ImageNotFound = 404,
    /// There is no snapshot of this id or name.
    SnapshotNotFound = 404,
    /// There is no volume or drive of this id or name.
    VolumeNotFound = 404,
    /// There is no such process in the sandbox.
    ProcessNotFound = 404,
    /// There is no such file or directory in the sandbox.
    FileNotFound = 404,
    /// There is no such route, key or other thing.
    NotFound = 404,
    /// The path or the way of using it does not exist here (405).
    MethodNotAllowed = 405,
    /// The name is taken.
    AlreadyExists = 409,
    /// Something still needs it.
    InUse = 409,
    /// The sandbox can't run: its machine failed to start or died.
    SandboxFailed = 409,
    /// The sandbox sleeps and does not wake by itself (`auto_wake` is off).
    SandboxAsleep = 409,
    /// The sandbox is being deleted or is gone.
    SandboxTerminated = 410,
    /// The events after that one are not remembered any more.
    EventsForgotten = 410,
    /// The command can't be started: not found, not executable, no such directory or user.
    CommandFailed = 422,
    /// The operation on a file was refused inside the sandbox.
    FileRefused = 422,
    /// Nothing listens on that port inside the sandbox.
    PortNotListening = 502,
    /// That port of the sandbox may not be reached from outside.
    PortNotExposed = 403,
    /// The drive's permissions do not let the sandbox have it so.
    NotPermitted = 403,
    /// The body is larger than allowed.
    TooLarge = 413,
    /// The host has not got what was asked for now: memory, disk, addresses. `Retry-After` says when to ask
    /// again.
    CapacityReached = 503,
    /// More than there may ever be: the sandbox's own disk is full, the host is smaller than what was asked
    /// for, there are too many of a kind.
    LimitReached = 422,
    /// Whoever asks has asked too often; `Retry-After` says when it may again.
    RateLimited = 429,
    /// The `Idempotency-Key` was sent with another request before.
    IdempotencyKeyReused = 422,
    /// The request with this `Idempotency-Key` is still under way; `Retry-After` says when to ask again.
    IdempotencyInProgress = 409,
    /// The request with this `Idempotency-Key` was begun, and how it ended is not known: the daemon ended
    /// before it did, or its answer was too large to be kept.
    IdempotencyOutcomeUnknown = 409,
    /// The image's bytes are not what its manifest says.
    ImageCorrupt = 500,
    /// The snapshot's bytes are not what its manifest says.
    SnapshotCorrupt = 500,
    /// The snapshot was taken by an engine, or a version of it, that is not here.
    SnapshotIncompatible = 409,
    /// The snapshot is not complete: it is being taken, or taking it failed.
    SnapshotNotReady = 409,
    /// A registry of images can't be reached, or answers as none does.
    RegistryUnavailable = 424,
    /// A registry of images does not let us: no login, a wrong one, or none that may.
    RegistryDenied = 403,
    /// It took longer than allowed.
    Timeout = 504,
    /// This engine or version can't do that.
    Unsupported = 501,
    /// The daemon is stopping.
    ShuttingDown = 503,
    /// Our fault; the log has the details under the request id.
    Internal = 500,
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

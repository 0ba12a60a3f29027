//! Why a call was not fulfilled: one closed list, in words that people can act on.
//!
//! - What the client can act on is described as it is; what is our fault is described by its code and
//!   request id only, and its causes go to the log.

use std::time::Duration;

pub use torpor_lifecycle::Refusal;
use torpor_lifecycle::engine::EngineError;
pub use torpor_lifecycle::guest::GuestError;
pub use torpor_lifecycle::store::StoreError;
use torpor_lifecycle::{self as lifecycle, chain};
use torpor_protocol::guest::FailureCode;
use torpor_protocol::{ErrorBody, ErrorCode};
use torpor_store::TreeError;

use crate::admission::Inadmissible;

pub type Result<T> = std::result::Result<T, Error>;

/// Why a call was not fulfilled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Lifecycle(#[from] lifecycle::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// It may ask again after so long.
    #[error("too many requests")]
    RateLimited(Duration),
    /// The API itself says no.
    #[error("{message}")]
    Refused { code: ErrorCode, message: String, hint: Option<String> },
}

impl Error {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self::Refused { code, message: message.into(), hint: None }
    }

    pub fn with_hint(code: ErrorCode, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Refused { code, message: message.into(), hint: Some(hint.into()) }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidRequest, message)
    }

    /// What the agent says, or what became of the way to it, if the error is about that.
    pub(crate) fn guest(&self) -> Option<&GuestError> {
        match self {
            Self::Guest(guest) | Self::Lifecycle(lifecycle::Error::Guest(guest)) => Some(guest),
            Self::Lifecycle(
                lifecycle::Error::Refused(_)
                | lifecycle::Error::Engine(_)
                | lifecycle::Error::Store(_),
            )
            | Self::Store(_)
            | Self::RateLimited(_)
            | Self::Refused { .. } => None,
        }
    }

    /// What the client is told.
    pub fn to_body(&self, request_id: &str) -> ErrorBody {
        let Description { code, message, hint } = self.describe();
        let request_id = request_id.to_owned();
        if !is_ours(code) {
            return ErrorBody { code, message, hint, request_id };
        }
        let message = "something went wrong in the daemon".to_owned();
        let hint = Some(format!("the daemon's log has the details under {request_id}"));
        ErrorBody { code, message, hint, request_id }
    }

    /// Causes for the log, if the fault is ours.
    pub fn internal(&self) -> Option<String> {
        is_ours(self.code()).then(|| chain(self))
    }

    /// Whether the way to the agent broke, as opposed to the agent saying no.
    pub fn lost_agent(&self) -> bool {
        match self.guest() {
            Some(GuestError::Gone | GuestError::Protocol(_) | GuestError::Timeout(_)) => true,
            Some(GuestError::Refused { .. } | GuestError::Asleep) | None => false,
        }
    }

    /// Whether somebody put the sandbox to sleep before it could answer.
    pub fn cut_by_sleep(&self) -> bool {
        matches!(
            self,
            Self::Guest(GuestError::Asleep)
                | Self::Lifecycle(lifecycle::Error::Guest(GuestError::Asleep))
        )
    }

    /// Why the fleet says no, if it does.
    pub fn refusal(&self) -> Option<&Refusal> {
        let Self::Lifecycle(lifecycle::Error::Refused(refusal)) = self else { return None };
        Some(refusal)
    }

    pub fn code(&self) -> ErrorCode {
        self.describe().code
    }

    /// In words for people, whosever fault it is.
    pub fn describe(&self) -> Description {
        match self {
            Self::Lifecycle(lifecycle::Error::Refused(refusal)) => refused(refusal),
            Self::Lifecycle(lifecycle::Error::Engine(error)) => engine(error),
            Self::Lifecycle(lifecycle::Error::Store(error)) | Self::Store(error) => store(error),
            Self::Lifecycle(lifecycle::Error::Guest(error)) | Self::Guest(error) => guest(error),
            Self::RateLimited(wait) => {
                Description::new(ErrorCode::RateLimited, self).hint(&format!(
                    "wait {} ms; limits.requests_per_sec of the daemon says how many there may be",
                    wait.as_millis().max(1)
                ))
            }
            Self::Refused { code, message, hint } => {
                Description { code: *code, message: message.clone(), hint: hint.clone() }
            }
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::Lifecycle(refusal.into())
    }
}

impl From<TreeError> for Error {
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

impl From<Inadmissible> for Error {
    fn from(error: Inadmissible) -> Self {
        match error {
            Inadmissible::Invalid { .. } => Self::invalid(error.to_string()),
            Inadmissible::Memory { .. } => {
                let hint = "ask for less memory_mib, or use a larger host";
                Self::with_hint(ErrorCode::LimitReached, error.to_string(), hint)
            }
        }
    }
}

/// What went wrong, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    pub code: ErrorCode,
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl Description {
    fn new(code: ErrorCode, error: &dyn std::error::Error) -> Self {
        Self { code, message: error.to_string(), hint: None }
    }

    fn hint(self, hint: &str) -> Self {
        Self { hint: Some(hint.to_owned()), ..self }
    }
}

fn refused(refusal: &Refusal) -> Description {
    let told = Description::new(refusal.code(), refusal);
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
        Refusal::NoSuchEngine { .. } => told
            .hint("`torpor engine ls` shows those that are here, `torpor doctor` what others need"),
        Refusal::PoolNameTaken(_) => {
            told.hint("choose another name, or delete the pool of that name")
        }
        Refusal::HostFull(_) => told.hint(
            "put sandboxes to sleep (`torpor sleep --cold`), delete some, or raise \
             limits.sandboxes in the configuration",
        ),
        Refusal::NoMemory { .. } => told.hint(
            "put sandboxes to sleep (`torpor sleep --cold`), delete some, or use a larger host",
        ),
        Refusal::StillWaking(_) => told.hint("try again: who comes later waits for the same wake"),
        Refusal::PoolFull { .. } => told.hint("delete sandboxes of it, or raise its max"),
        Refusal::ResizeAsleep(_) => told.hint("POST …/wake (`torpor wake`) wakes it"),
        Refusal::NotMountable(_) => told.hint("create it anew, and copy its files"),
        Refusal::NoSlot(_) => told.hint("detach one that it does not need"),
        Refusal::WritesToVolume(_) => told.hint(
            "say what forks get (`volumes`, `torpor fork --volumes`): `copy`, or `share-ro` to read it",
        ),
        Refusal::NotMounted(_) => told.hint("`torpor inspect` shows what it has, and where"),
        Refusal::PathTaken(_) => told.hint("choose another directory, or detach that one first"),
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

fn engine(error: &EngineError) -> Description {
    match error {
        EngineError::Capacity { .. } => Description::new(ErrorCode::CapacityReached, error)
            .hint("delete sandboxes, ask for less, or use a larger host"),
        EngineError::DiskFull(_) => Description::new(ErrorCode::CapacityReached, error)
            .hint("free some space in the daemon's data directory; the sandbox goes on"),
        EngineError::Image(_) => {
            Description::new(ErrorCode::ImageCorrupt, error).hint("build or import the image again")
        }
        EngineError::GuestFiles(_) => Description::new(ErrorCode::InvalidRequest, error)
            .hint("remove or shorten what it names, or take a memory snapshot"),
        EngineError::Unsupported { .. } => Description::new(ErrorCode::Unsupported, error),
        EngineError::Failed { .. } => Description::new(ErrorCode::Internal, error),
    }
}

fn store(error: &StoreError) -> Description {
    match error {
        StoreError::NoSuchImage(_) => Description::new(ErrorCode::ImageNotFound, error).hint(
            "`torpor image ls` shows those of this host, `torpor image base` makes torpor/base",
        ),
        StoreError::CorruptImage { .. } => Description::new(ErrorCode::ImageCorrupt, error)
            .hint("delete the image and build or import it again"),
        StoreError::NoSuchSave(_) => {
            Description::new(ErrorCode::SnapshotNotFound, error).hint("it was deleted meanwhile")
        }
        StoreError::CorruptSave { .. } => Description::new(ErrorCode::SnapshotCorrupt, error)
            .hint("begin from another snapshot, or bring this one back from a backup"),
        StoreError::NoSuchSecret(_) => {
            Description::new(ErrorCode::NotFound, error).hint("`torpor secret set NAME` makes one")
        }
        StoreError::NoSuchVolume(_) => Description::new(ErrorCode::VolumeNotFound, error).hint(
            "`torpor volume ls` and `torpor drive ls` show those of this host, \
             `torpor volume create` and `torpor drive create` make one",
        ),
        StoreError::VolumeElsewhere { .. } => Description::new(ErrorCode::Unsupported, error)
            .hint("use it on that host: only there its files are mounted"),
        StoreError::InUse { .. } => Description::new(ErrorCode::InUse, error),
        StoreError::NameTaken(_) => Description::new(ErrorCode::AlreadyExists, error),
        StoreError::NotOwner(_) => Description::new(ErrorCode::ShuttingDown, error)
            .hint("ask again: the daemon that took over answers"),
        StoreError::Invalid(_) => Description::new(ErrorCode::InvalidRequest, error),
        StoreError::DiskFull(_) => Description::new(ErrorCode::CapacityReached, error)
            .hint("free some space in the daemon's data directory"),
        StoreError::Failed { .. } => Description::new(ErrorCode::Internal, error),
    }
}

fn guest(error: &GuestError) -> Description {
    match error {
        GuestError::Refused { code, .. } => Description::new(failure(*code), error),
        GuestError::Gone => Description::new(ErrorCode::SandboxFailed, error)
            .hint("the status of the sandbox says why"),
        GuestError::Asleep => Description::new(ErrorCode::SandboxAsleep, error)
            .hint("ask again: the next request wakes it"),
        // The guest is not trusted: what it broke is its sandbox's trouble, not ours.
        GuestError::Protocol(_) => Description::new(ErrorCode::SandboxFailed, error),
        GuestError::Timeout(_) => Description::new(ErrorCode::Timeout, error),
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
        FailureCode::Busy => ErrorCode::InUse,
        FailureCode::DiskFull | FailureCode::Limit => ErrorCode::LimitReached,
        FailureCode::CannotStart | FailureCode::NoSuchUser => ErrorCode::CommandFailed,
        FailureCode::NotListening => ErrorCode::PortNotListening,
    }
}

/// Whether the details are nobody's business but the operator's.
fn is_ours(code: ErrorCode) -> bool {
    code == ErrorCode::Internal
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_of_our_own_failures_stay_in_the_log() {
        let error = Error::from(StoreError::failed("write /secret/path")("disk on fire"));
        let body = error.to_body("r1");
        assert_eq!(body.code, ErrorCode::Internal);
        assert!(!format!("{body:?}").contains("secret"), "{body:?}");
        assert!(body.hint.unwrap().contains("r1"));
        assert_eq!(error.internal().unwrap(), "could not write /secret/path: disk on fire");
    }

    #[test]
    fn a_refusal_is_told_and_not_logged() {
        let error = Error::from(lifecycle::Error::from(Refusal::NameTaken("web".parse().unwrap())));
        assert_eq!(error.code(), ErrorCode::AlreadyExists);
        assert_eq!(error.to_body("r1").message, "the name web is taken");
        assert_eq!(error.internal(), None);
    }
}

//! Refusal or failure: the request does not fit the sandbox now, or we tried and it broke.

use torpor_protocol::{
    ErrorCode, FailureReason, GuestPath, Name, SandboxRef, SnapshotRef, WorkFailure,
};

use crate::engine::EngineError;
use crate::guest::GuestError;
use crate::store::StoreError;

/// The request does not fit; nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("there is no sandbox {0}")]
    NoSuchSandbox(SandboxRef),
    #[error("the name {0} is taken")]
    NameTaken(Name),
    #[error("sandbox {id} can't run: {reason}")]
    Failed { id: String, reason: FailureReason },
    #[error("sandbox {0} sleeps, and requests do not wake it")]
    Asleep(String),
    #[error("sandbox {id} could not be woken: {cause}")]
    CantWake { id: String, cause: String },
    #[error("sandbox {0} is not awake yet; it goes on waking")]
    StillWaking(String),
    #[error("this host has its {0} sandboxes that run or are kept in memory")]
    HostFull(usize),
    #[error("{asked_mib} MiB of memory are needed, this host has {free_mib} left")]
    NoMemory { asked_mib: u64, free_mib: u64 },
    #[error("there is no snapshot {0}")]
    NoSuchSnapshot(SnapshotRef),
    #[error("another snapshot is called {0}")]
    SnapshotNameTaken(Name),
    #[error("snapshot {id} is not complete: {why}")]
    SnapshotNotReady { id: String, why: String },
    #[error("a memory snapshot keeps its resources: {0}")]
    Locked(String),
    #[error("snapshot {snapshot} can't be revived here: {reason}")]
    Incompatible { snapshot: String, reason: String },
    #[error("this host has no engine {engine}, but {here}")]
    NoSuchEngine { engine: String, here: String },
    #[error("there is no pool {0}")]
    NoSuchPool(Name),
    #[error("another pool is called {0}")]
    PoolNameTaken(Name),
    #[error("pool {pool} has its {max} sandboxes")]
    PoolFull { pool: Name, max: usize },
    #[error("sandbox {0} sleeps: its resources can be changed while it is awake")]
    ResizeAsleep(String),
    #[error("{0} was made before there were volumes, and can't have any")]
    NotMountable(String),
    #[error("a sandbox has at most {0} volumes and drives")]
    NoSlot(u16),
    #[error("the sandbox writes to volume {0}, which has one writer")]
    WritesToVolume(Name),
    #[error("nothing is mounted at {0}")]
    NotMounted(GuestPath),
    #[error("{0} is mounted there, or above or below it")]
    PathTaken(GuestPath),
    #[error("sandbox {0} is terminated")]
    Terminated(String),
    #[error("the daemon is stopping")]
    Stopping,
}

impl Refusal {
    /// What it is for a client.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::NoSuchSandbox(_) => ErrorCode::SandboxNotFound,
            Self::NameTaken(_) | Self::SnapshotNameTaken(_) | Self::PoolNameTaken(_) => {
                ErrorCode::AlreadyExists
            }
            Self::Failed { .. } | Self::CantWake { .. } => ErrorCode::SandboxFailed,
            Self::Asleep(_) | Self::ResizeAsleep(_) => ErrorCode::SandboxAsleep,
            Self::PoolFull { .. } | Self::HostFull(_) | Self::NoMemory { .. } => {
                ErrorCode::CapacityReached
            }
            Self::StillWaking(_) => ErrorCode::Timeout,
            Self::NoSuchSnapshot(_) => ErrorCode::SnapshotNotFound,
            Self::SnapshotNotReady { .. } => ErrorCode::SnapshotNotReady,
            Self::Incompatible { .. } => ErrorCode::SnapshotIncompatible,
            Self::Locked(_) | Self::NoSuchEngine { .. } => ErrorCode::InvalidRequest,
            Self::NotMountable(_) => ErrorCode::Unsupported,
            Self::NoSlot(_) => ErrorCode::LimitReached,
            Self::PathTaken(_) | Self::WritesToVolume(_) => ErrorCode::InUse,
            Self::NoSuchPool(_) | Self::NotMounted(_) => ErrorCode::NotFound,
            Self::Terminated(_) => ErrorCode::SandboxTerminated,
            Self::Stopping => ErrorCode::ShuttingDown,
        }
    }
}

impl Error {
    /// What it is for whoever asks later how some work went.
    pub(crate) fn as_failure(&self) -> WorkFailure {
        let full = matches!(
            self,
            Self::Refused(Refusal::HostFull(_) | Refusal::NoMemory { .. })
                | Self::Engine(EngineError::Capacity { .. } | EngineError::DiskFull(_))
                | Self::Store(StoreError::DiskFull(_))
        );
        if full { WorkFailure::NoCapacity } else { WorkFailure::Failed }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the isolation engine failed")]
    Engine(#[from] EngineError),
    #[error("the store failed")]
    Store(#[from] StoreError),
    #[error("the agent did not answer")]
    Guest(#[from] GuestError),
}

/// An error and its causes in one line: for the log, and for reasons that people read.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

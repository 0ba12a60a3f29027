//! What must be remembered: traits that the store implements.

use std::path::PathBuf;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use torpor_protocol::{ImageId, SandboxId, SandboxSpec};

/// What the ledger knows of a sandbox.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    pub id: SandboxId,
    pub spec: SandboxSpec,
    pub rest: Rest,
    pub created_at_ms: u64,
    pub last_used_at_ms: u64,
}

/// What a sandbox can be brought back from after the daemon is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "rest", rename_all = "snake_case")]
pub enum Rest {
    /// Recorded, and never known to have run: starting over loses nothing.
    Created,
    /// It ran: the engine may still have its machine.
    Running,
    /// It failed for this reason, and has nothing to come back from.
    Failed { reason: String },
}

/// The truth after a restart. A write is durable when it returns.
#[async_trait]
pub trait Ledger: Send + Sync + 'static {
    /// Inserts or replaces.
    async fn record(&self, record: &Record) -> Result<(), StoreError>;
    /// Forgets; forgetting what is not there is fine.
    async fn erase(&self, id: &SandboxId) -> Result<(), StoreError>;
    async fn all(&self) -> Result<Vec<Record>, StoreError>;
}

/// Where roots come from.
#[async_trait]
pub trait Images: Send + Sync + 'static {
    /// The EROFS file of an image, ready to boot.
    async fn root(&self, id: &ImageId) -> Result<RootImage, StoreError>;
}

/// An image as a machine needs it.
#[derive(Debug, Clone, Default)]
pub struct RootImage {
    pub path: PathBuf,
    /// Environment, user and directory for processes that say nothing else.
    pub env: Vec<(String, String)>,
    pub user: Option<String>,
    pub workdir: Option<String>,
}

/// The store tried and it broke.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("there is no image {0}")]
    NoSuchImage(String),
    #[error("image {id} is corrupt: {detail}")]
    CorruptImage { id: String, detail: String },
    #[error("{what} is needed by {by}")]
    InUse { what: String, by: String },
    /// What was asked for can't be done, and why.
    #[error("{0}")]
    Invalid(String),
    #[error("the disk is full: {0}")]
    DiskFull(String),
    #[error("could not {action}")]
    Failed {
        action: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl StoreError {
    /// `StoreError::failed("open the ledger")(error)`, for `map_err`.
    pub fn failed<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        action: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let action = action.into();
        move |source| Self::Failed { action, source: source.into() }
    }
}

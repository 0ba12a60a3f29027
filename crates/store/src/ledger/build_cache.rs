//! Steps of image builds that need not be done again.

use async_trait::async_trait;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::{ImageId, SaveId};

/// What a step came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The filesystem after it. The row pins it.
    Save(SaveId),
    /// All of a build. The row goes with the image.
    Image(ImageId),
}

/// A step that was done, by all that went into it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedStep {
    pub key: String,
    pub outcome: Outcome,
    /// As it was written, for people.
    pub step: String,
    /// Of the save; an image has its own.
    pub bytes: u64,
    pub created_at_ms: u64,
    pub used_at_ms: u64,
}

#[async_trait]
pub trait BuildCacheLedger: Send + Sync + 'static {
    /// Records a step whose save or image is durable; gives the save that the same key had before.
    async fn record_cached_step(&self, step: &CachedStep) -> Result<Option<SaveId>, StoreError>;
    /// A step, which is noted as used now.
    async fn use_cached_step(
        &self,
        key: &str,
        now_ms: u64,
    ) -> Result<Option<CachedStep>, StoreError>;
    /// All of them, those that were used last first.
    async fn cached_steps(&self) -> Result<Vec<CachedStep>, StoreError>;
    async fn forget_cached_step(&self, key: &str) -> Result<(), StoreError>;
}

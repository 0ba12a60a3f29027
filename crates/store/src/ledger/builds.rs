//! Builds of images: their last word, for whoever asks later.

use async_trait::async_trait;
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::BuildId;
use torpor_protocol::api::Build;

/// The newest builds; the oldest are forgotten.
#[async_trait]
pub trait BuildLedger: Send + Sync + 'static {
    /// Inserts or replaces a build of this node. The key stays with the build that was first recorded
    /// with it, also when that is recorded again without; [`StoreError::Invalid`] if another build has it.
    async fn record_build(
        &self,
        build: &Build,
        idempotency: Option<&str>,
    ) -> Result<(), StoreError>;
    async fn find_build(&self, id: &BuildId) -> Result<Option<Build>, StoreError>;
    /// The build that was recorded with this key.
    async fn find_build_by_key(&self, idempotency: &str) -> Result<Option<Build>, StoreError>;
    /// At most `limit` before this place, newest first.
    async fn builds(
        &self,
        before: Option<&Place<BuildId>>,
        limit: usize,
    ) -> Result<Vec<Build>, StoreError>;
    /// Those of this node that have not ended.
    async fn unfinished_builds(&self) -> Result<Vec<Build>, StoreError>;
}

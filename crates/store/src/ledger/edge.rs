//! What leads from outside to a port of a sandbox: previews, the tokens that open them, and domains.

use async_trait::async_trait;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::domain::DomainState;
use torpor_protocol::preview::Preview;
use torpor_protocol::{DomainName, PreviewId, TokenId};

/// A token that opens a preview; not its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRow {
    pub id: TokenId,
    pub preview: PreviewId,
    /// SHA-256.
    pub hash: [u8; 32],
    pub expires_at_ms: Option<u64>,
    pub created_at_ms: u64,
}

/// Previews and their tokens. Both go with their sandbox, in the same instant.
#[async_trait]
pub trait PreviewLedger: Send + Sync + 'static {
    /// Inserts or replaces; its URLs are not kept. [`StoreError::Invalid`] if its sandbox is gone, or
    /// another one has its name or label.
    async fn record_preview(&self, preview: &Preview) -> Result<(), StoreError>;
    /// Whether there was one; its tokens go with it.
    async fn erase_preview(&self, id: &PreviewId) -> Result<bool, StoreError>;
    /// At most `limit` after this id, by id.
    async fn previews(
        &self,
        after: Option<&PreviewId>,
        limit: usize,
    ) -> Result<Vec<Preview>, StoreError>;

    /// [`StoreError::Invalid`] if its preview is gone.
    async fn record_preview_token(&self, token: &TokenRow) -> Result<(), StoreError>;
    /// Whether there was one.
    async fn erase_preview_token(&self, id: &TokenId) -> Result<bool, StoreError>;
    /// At most `limit` of all previews after this id, by id.
    async fn preview_tokens(
        &self,
        after: Option<&TokenId>,
        limit: usize,
    ) -> Result<Vec<TokenRow>, StoreError>;
}

/// A host name that leads to a preview.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainRow {
    pub name: DomainName,
    pub preview: PreviewId,
    pub state: DomainState,
    /// What the record that proves it must say.
    pub secret: String,
    /// What the last look found, unless it was the proof.
    pub problem: Option<String>,
    pub checked_at_ms: Option<u64>,
    pub proven_at_ms: Option<u64>,
    pub created_at_ms: u64,
}

#[async_trait]
pub trait DomainLedger: Send + Sync + 'static {
    /// Whether the name was free; if not, nothing changed.
    async fn add_domain(&self, row: &DomainRow) -> Result<bool, StoreError>;
    /// Records what a look at a domain found. One that is gone, or is another one of the same name
    /// by now, is left alone; says whether it was there.
    async fn judge_domain(&self, row: &DomainRow) -> Result<bool, StoreError>;
    /// At most `limit` after this name, by name.
    async fn domains(
        &self,
        after: Option<&DomainName>,
        limit: usize,
    ) -> Result<Vec<DomainRow>, StoreError>;
    /// Whether there was one.
    async fn drop_domain(&self, name: &DomainName) -> Result<bool, StoreError>;
}

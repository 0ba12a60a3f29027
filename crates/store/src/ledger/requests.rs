//! Requests that a client may repeat, by their `Idempotency-Key`, and how they were answered. Answers are
//! sealed: there may be a new key or token in one.

use async_trait::async_trait;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::SandboxId;

use super::Sealed;

/// What is known of a request that is begun now.
#[derive(Debug)]
pub enum Begun {
    /// Nothing, until now.
    New,
    /// It was begun before, and nobody noted how it ended.
    Unanswered,
    Answered(Sealed),
    /// The key belongs to another request.
    Other,
}

#[async_trait]
pub trait RequestLedger: Send + Sync + 'static {
    /// Notes that a request begins, unless it is known.
    async fn begin_request(
        &self,
        id: &str,
        fingerprint: &str,
        now_ms: u64,
    ) -> Result<Begun, StoreError>;
    async fn answer_request(&self, id: &str, answer: &Sealed) -> Result<(), StoreError>;
    /// It was not done: it may begin as if it had never been sent.
    async fn forget_request(&self, id: &str) -> Result<(), StoreError>;
    /// The sandbox that a request made, if it is still there.
    async fn made_by(&self, request: &str) -> Result<Option<SandboxId>, StoreError>;
}

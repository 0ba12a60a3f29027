//! Invocations of services: a queue, and its results for a while.

use async_trait::async_trait;
use torpor_lifecycle::ledger::{Owner, Place};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::invocation::{Invocation, Invoke};
use torpor_protocol::{InvocationId, ServiceId};

/// An invocation that somebody works on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimedInvocation {
    pub service: ServiceId,
    /// Grows with each claim: whoever has an older one writes nothing.
    pub attempt: u64,
    pub invocation: Invocation,
    pub request: Invoke,
}

#[async_trait]
pub trait InvocationLedger: Send + Sync + 'static {
    /// Queues one. Whether there was room: a service has at most `most` that are not settled.
    async fn queue_invocation(
        &self,
        service: &ServiceId,
        invocation: &Invocation,
        request: &Invoke,
        most: usize,
    ) -> Result<bool, StoreError>;
    /// Takes the one that has been due for longest, of the services of this owner.
    async fn claim_invocation(
        &self,
        owner: &Owner,
        now_ms: u64,
    ) -> Result<Option<ClaimedInvocation>, StoreError>;
    /// Records what came of an attempt: it is over, or due again at that time. Whether it was still the claimer's.
    async fn settle_invocation(
        &self,
        claimed: &ClaimedInvocation,
        again_at_ms: Option<u64>,
    ) -> Result<bool, StoreError>;
    /// Those that an earlier daemon of this owner's node worked on are due again.
    async fn release_invocations(&self, owner: &Owner) -> Result<(), StoreError>;
    async fn find_invocation(
        &self,
        service: &ServiceId,
        id: &InvocationId,
    ) -> Result<Option<Invocation>, StoreError>;
    /// At most `limit` before this place, newest first.
    async fn invocations(
        &self,
        service: &ServiceId,
        before: Option<&Place<InvocationId>>,
        limit: usize,
    ) -> Result<Vec<Invocation>, StoreError>;
    /// Forgets those that were settled and are older than this.
    async fn prune_invocations(&self, before_ms: u64) -> Result<(), StoreError>;
}

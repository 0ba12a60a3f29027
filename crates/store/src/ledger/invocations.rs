//! Invocations of services: a queue, and its results for a while.

use async_trait::async_trait;
use torpor_lifecycle::ledger::{Owner, Place};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::invocation::{Invocation, Invoke};
use torpor_protocol::{DeliveryId, InvocationId, ServiceId};

use super::{NewDelivery, Sealed};

/// An invocation that somebody works on.
#[derive(Debug)]
pub struct ClaimedInvocation {
    pub service: ServiceId,
    /// Grows with each claim: whoever has an older one writes nothing.
    pub attempt: u64,
    pub invocation: Invocation,
    pub request: Invoke,
    pub callback: Option<SealedCallback>,
}

/// Who is told when an invocation is over; the secret is sealed for the delivery that it will be.
#[derive(Debug)]
pub struct SealedCallback {
    pub delivery: DeliveryId,
    pub url: String,
    pub secret: Sealed,
}

/// How much of one service there may be.
#[derive(Debug, Clone, Copy)]
pub struct InvocationBounds {
    pub rows: usize,
    /// Of requests of those that are not settled, of answers of those that are.
    pub bytes: u64,
}

#[async_trait]
pub trait InvocationLedger: Send + Sync + 'static {
    /// Queues one. Whether there was room: of a service there are at most `most` that are not settled. The secret of
    /// the request's callback is not recorded but as `callback` has it.
    async fn queue_invocation(
        &self,
        service: &ServiceId,
        invocation: &Invocation,
        request: &Invoke,
        callback: Option<&SealedCallback>,
        most: InvocationBounds,
    ) -> Result<bool, StoreError>;
    /// Takes one that is due, of a service of this owner of which fewer than `each` run: of those of which fewest run
    /// the one that has been due for longest.
    async fn claim_invocation(
        &self,
        owner: &Owner,
        now_ms: u64,
        each: usize,
    ) -> Result<Option<ClaimedInvocation>, StoreError>;
    /// Records what came of an attempt: it is over, or due again at that time. Whether it was still the claimer's;
    /// then its callback is to be delivered from the same instant. The request of one that is over is forgotten, and
    /// the oldest of its service are if there are more bytes than `remembered`.
    async fn settle_invocation(
        &self,
        claimed: &ClaimedInvocation,
        again_at_ms: Option<u64>,
        callback: Option<&NewDelivery>,
        remembered: InvocationBounds,
    ) -> Result<bool, StoreError>;
    /// Those that an earlier daemon of this owner's node worked on are due again; and none later than `latest_ms`, which
    /// a clock that was ahead may have said.
    async fn release_invocations(&self, owner: &Owner, latest_ms: u64) -> Result<(), StoreError>;
    async fn find_invocation(
        &self,
        service: &ServiceId,
        id: &InvocationId,
    ) -> Result<Option<Invocation>, StoreError>;
    /// At most `limit` before this place, newest first, without their answers.
    async fn invocations(
        &self,
        service: &ServiceId,
        before: Option<&Place<InvocationId>>,
        limit: usize,
    ) -> Result<Vec<Invocation>, StoreError>;
    /// Forgets those that were settled before this, and of each service all but the newest `remembered`.
    async fn prune_invocations(
        &self,
        before_ms: u64,
        remembered: InvocationBounds,
    ) -> Result<(), StoreError>;
}

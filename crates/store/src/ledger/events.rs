//! Events: what happened, in order. They are written by the database itself, in the transaction that changes the row
//! that they are about: no caller can forget one, and none is there without its change.

use async_trait::async_trait;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::event::{Event, EventKind};

/// Which events; all without any of these.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EventFilter {
    pub kind: Option<EventKind>,
    /// What it happened to, by id.
    pub subject: Option<String>,
}

/// The first and last event that is remembered; both 0 if there never was one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EventRange {
    pub first: u64,
    pub last: u64,
}

#[async_trait]
pub trait EventLedger: Send + Sync + 'static {
    /// At most `limit` after this one, oldest first.
    async fn events(
        &self,
        filter: &EventFilter,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Event>, StoreError>;
    async fn event_range(&self) -> Result<EventRange, StoreError>;
    /// Forgets events that are older than this, but never the last one: its number is the present.
    async fn forget_events(&self, before_ms: u64) -> Result<(), StoreError>;
}

//! What must be remembered, by aggregate: traits that a database implements.
//!
//! - **The ledger is the truth.** A write is durable when it returns.
//! - **Keys and pages.** What a request asks for is found by a key (`find_…`) or read by pages; only a
//!   daemon that starts, and an API of others that has no pages, reads everything, page by page.
//! - **Owners.** A sandbox belongs to one node. Every write of one carries the [`Owner`] who writes, and is
//!   refused with [`NotOwner`] if the sandbox, or the node, is somebody else's by now: a daemon
//!   that was replaced without noticing changes nothing.
//! - **Caches.** What is in memory beside the ledger is one of these, and its doc comment says which:
//!   - *owned*: rows that only this node may write, under its epoch (sandboxes and their names, running
//!     builds). It can't be stale: a write that would show it is refused.
//!   - *versioned*: rows that every node may write (pools, previews, domains, keys). Own changes go
//!     through it at once; it is read again within [`REFRESH`] of a change by another node, which
//!     [`Changes`] tells.
//!
//! [`NotOwner`]: crate::store::StoreError::NotOwner

mod changes;
#[cfg(feature = "contract")]
#[expect(clippy::unwrap_used, reason = "tests, which other crates run too")]
pub mod contract;
mod fleet;

use std::time::Duration;

use torpor_protocol::NodeId;

pub use changes::{Aggregate, CacheVersion, Changes};
pub use fleet::{
    ArchiveLedger, FleetLedger, PoolLedger, SandboxLedger, SnapshotFilter, SnapshotLedger,
    VolumeLedger,
};

/// How far behind another node a versioned cache may be.
pub const REFRESH: Duration = Duration::from_secs(1);

/// Where a page of a list by time ended: when its last row was made, and its id. It stays a place when
/// the row is gone.
pub type Place<I> = (u64, I);

/// Rows read at once by whoever reads everything.
pub const PAGE: usize = 500;

/// Everything, page by page: `read` gives what comes after a key, and `key` is that of a row. For who
/// starts, and for an API of others that has no pages.
pub async fn everything<T, K, E, F>(
    read: impl Fn(Option<K>) -> F,
    key: impl Fn(&T) -> K,
) -> Result<Vec<T>, E>
where
    F: Future<Output = Result<Vec<T>, E>>,
{
    let mut all = Vec::new();
    loop {
        let page = read(all.last().map(&key)).await?;
        if page.is_empty() {
            return Ok(all);
        }
        all.extend(page);
    }
}

/// A node since one of its starts. Each start of its daemon makes another one, and ends the one before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    pub node: NodeId,
    /// Grows with each start.
    pub epoch: u64,
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (epoch {})", self.node, self.epoch)
    }
}

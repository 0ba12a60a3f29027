//! How a cache learns that another node changed what it has.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use tokio::sync::{Mutex, MutexGuard};

use crate::store::StoreError;

/// What every node may write and keeps in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aggregate {
    Pools,
    /// With their tokens.
    Previews,
    Domains,
    Keys,
    /// Upstream servers and clients.
    McpGateway,
}

impl Aggregate {
    pub const ALL: [Self; 5] =
        [Self::Pools, Self::Previews, Self::Domains, Self::Keys, Self::McpGateway];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pools => "pools",
            Self::Previews => "previews",
            Self::Domains => "domains",
            Self::Keys => "keys",
            Self::McpGateway => "mcp_gateway",
        }
    }
}

#[async_trait]
pub trait Changes: Send + Sync + 'static {
    /// Grows in the same instant with every change that another node makes. Own changes do not show.
    async fn changed_elsewhere(&self, what: Aggregate) -> Result<u64, StoreError>;
}

/// How much a versioned cache has seen of what other nodes changed.
pub struct CacheVersion {
    changes: Arc<dyn Changes>,
    what: Aggregate,
    version: AtomicU64,
    writing: Mutex<()>,
}

impl CacheVersion {
    /// Nothing yet: the cache is filled after this.
    pub async fn now(changes: Arc<dyn Changes>, what: Aggregate) -> Result<Self, StoreError> {
        let version = AtomicU64::new(changes.changed_elsewhere(what).await?);
        Ok(Self { changes, what, version, writing: Mutex::default() })
    }

    /// Held by who writes, from the look at what is there until the cache has it: nothing is read again
    /// meanwhile.
    pub async fn writing(&self) -> MutexGuard<'_, ()> {
        self.writing.lock().await
    }

    /// Fills the cache again with `read` if another node has changed something; if that fails, the next
    /// call tries it again.
    pub async fn refresh<E: From<StoreError>>(
        &self,
        read: impl Future<Output = Result<(), E>>,
    ) -> Result<(), E> {
        let version = self.changes.changed_elsewhere(self.what).await?;
        if version == self.version.load(Ordering::Relaxed) {
            return Ok(());
        }
        let _writing = self.writing().await;
        read.await?;
        self.version.store(version, Ordering::Relaxed);
        Ok(())
    }
}

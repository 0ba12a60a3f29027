//! Services and their revisions. A service belongs to the node that has its instances: its rows are owned, and
//! whoever is not the [`Owner`] any more is refused with [`StoreError::NotOwner`].

use std::collections::BTreeSet;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use torpor_lifecycle::ledger::Owner;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::hosting::{Revision, Scale, Share, Sticky};
use torpor_protocol::{Name, PreviewLabel, SandboxId, ServiceId};

/// A service without its revisions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceRow {
    pub id: ServiceId,
    pub name: Name,
    /// The first part of its host names.
    pub label: PreviewLabel,
    pub public: bool,
    pub scale: Scale,
    pub sticky: Option<Sticky>,
    /// The newest revision first; without URLs.
    pub traffic: Vec<Share>,
    /// The number that the last revision got.
    pub last_revision: u32,
    /// Revisions that are ready and had no part of the traffic yet.
    #[serde(default)]
    pub never_served: BTreeSet<u32>,
    pub created_at_ms: u64,
    pub updated_at_ms: u64,
}

#[async_trait]
pub trait HostingLedger: Send + Sync + 'static {
    /// Inserts a service of this node. [`StoreError::NameTaken`] if another one has its name.
    async fn create_service(&self, owner: &Owner, row: &ServiceRow) -> Result<(), StoreError>;
    /// Replaces a service, and inserts or replaces a revision of it in the same instant.
    async fn record_service(
        &self,
        owner: &Owner,
        row: &ServiceRow,
        revision: Option<&Revision>,
    ) -> Result<(), StoreError>;
    /// Forgets a revision.
    async fn erase_revision(
        &self,
        owner: &Owner,
        service: &ServiceId,
        number: u32,
    ) -> Result<(), StoreError>;
    /// Forgets a service with its revisions, previews and invocations.
    async fn erase_service(&self, owner: &Owner, id: &ServiceId) -> Result<(), StoreError>;
    /// Those of this owner; at most `limit` after this id, by id.
    async fn services(
        &self,
        owner: &Owner,
        after: Option<&ServiceId>,
        limit: usize,
    ) -> Result<Vec<ServiceRow>, StoreError>;
    /// By number.
    async fn revisions(&self, of: &ServiceId) -> Result<Vec<Revision>, StoreError>;
    /// Sandboxes that were instances of it, or of one revision of it, and are gone, with their revisions; at most
    /// `limit`, the last ended first.
    async fn ended_instances(
        &self,
        of: &ServiceId,
        revision: Option<u32>,
        limit: usize,
    ) -> Result<Vec<(SandboxId, u32)>, StoreError>;
}

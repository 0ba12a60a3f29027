//! What a fleet remembers: sandboxes, those that are gone, snapshots and pools.

use std::collections::HashSet;

use async_trait::async_trait;
use torpor_protocol::api::ArchivedSandbox;
use torpor_protocol::volume::{Attachment, UpdateVolume};
use torpor_protocol::{Name, SandboxId, SnapshotId, SnapshotRef, VolumeId, VolumeKind, VolumeRef};

use super::{Changes, Owner, Place};
use crate::store::{PoolRecord, Record, SnapshotRecord, StoreError, VolumeRecord};

/// Sandboxes, each with the node that owns it.
#[async_trait]
pub trait SandboxLedger: Send + Sync + 'static {
    /// The daemon of this node starts: its epoch grows, and in the same instant it becomes the owner of
    /// what it owned before and of what nobody owns. Whoever wrote under an earlier epoch is refused.
    async fn take_over(&self) -> Result<Owner, StoreError>;

    /// [`StoreError::NotOwner`] if the node has started anew, [`StoreError::NameTaken`] if another one
    /// has its name, [`StoreError::NoSuchImage`], [`StoreError::NoSuchSave`] or [`StoreError::NoSuchVolume`] if
    /// that is gone, [`StoreError::InUse`] if another sandbox writes to a volume that it is to write to.
    async fn create_sandbox(&self, owner: &Owner, record: &Record) -> Result<(), StoreError>;
    /// Replaces it. Refused like its creation, and with [`StoreError::NotOwner`] also if it is gone.
    async fn update_sandbox(&self, owner: &Owner, record: &Record) -> Result<(), StoreError>;
    /// Forgets it and remembers in the archive, in the same instant, that it was. Saying so again is fine.
    async fn archive_sandbox(
        &self,
        owner: &Owner,
        ended: &ArchivedSandbox,
    ) -> Result<(), StoreError>;

    async fn find_sandbox(&self, id: &SandboxId) -> Result<Option<Record>, StoreError>;
    /// At most `limit` of this owner's after this id, by id.
    async fn sandboxes(
        &self,
        owner: &Owner,
        after: Option<&SandboxId>,
        limit: usize,
    ) -> Result<Vec<Record>, StoreError>;
}

/// Sandboxes that are gone, for people. The oldest are forgotten.
#[async_trait]
pub trait ArchiveLedger: Send + Sync + 'static {
    async fn find_archived(&self, id: &SandboxId) -> Result<Option<ArchivedSandbox>, StoreError>;
    /// The last who had this name.
    async fn find_archived_by_name(
        &self,
        name: &Name,
    ) -> Result<Option<ArchivedSandbox>, StoreError>;
    /// At most `limit` that ended before `before` in the archive's order, last ended first. Both ways:
    /// [`StoreError::Invalid`] if that one is not or no longer in it.
    async fn archived(
        &self,
        before: Option<&SandboxId>,
        limit: usize,
    ) -> Result<Vec<ArchivedSandbox>, StoreError>;
    /// At most `limit` that ended after `after` and nearest to it, or the first of all; last ended first.
    async fn archived_after(
        &self,
        after: Option<&SandboxId>,
        limit: usize,
    ) -> Result<Vec<ArchivedSandbox>, StoreError>;
    /// Everybody in it.
    async fn archived_ids(&self) -> Result<HashSet<SandboxId>, StoreError>;
}

/// Which snapshots; of whatever sandbox without any of these.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotFilter {
    /// Those of this sandbox, and
    pub sandbox: Option<SandboxId>,
    /// those of whichever sandbox had this name when they were taken.
    pub sandbox_name: Option<Name>,
}

#[async_trait]
pub trait SnapshotLedger: Send + Sync + 'static {
    /// Inserts or replaces a snapshot. [`StoreError::NameTaken`] if another one has its name,
    /// [`StoreError::NoSuchSave`] if its save is gone.
    async fn record_snapshot(&self, record: &SnapshotRecord) -> Result<(), StoreError>;
    /// Replaces a snapshot, whose name stays; false if it was erased. [`StoreError::NoSuchSave`] if its save is gone.
    async fn update_snapshot(&self, record: &SnapshotRecord) -> Result<bool, StoreError>;
    /// Forgets a snapshot, not its save; forgetting what is not there is fine.
    async fn erase_snapshot(&self, id: &SnapshotId) -> Result<(), StoreError>;
    async fn find_snapshot(&self, of: &SnapshotRef) -> Result<Option<SnapshotRecord>, StoreError>;
    /// At most `limit` after this place, oldest first.
    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<&Place<SnapshotId>>,
        limit: usize,
    ) -> Result<Vec<SnapshotRecord>, StoreError>;
    /// The parent, its parent, and so on as far as they are known; at most `limit`. The last may be gone.
    async fn snapshot_ancestors(
        &self,
        of: &SnapshotId,
        limit: usize,
    ) -> Result<Vec<SnapshotId>, StoreError>;
}

#[async_trait]
pub trait PoolLedger: Send + Sync + 'static {
    /// [`StoreError::NameTaken`] if there is one of that name.
    async fn create_pool(&self, record: &PoolRecord) -> Result<(), StoreError>;
    /// Whether there is one of that name; it is this one now.
    async fn update_pool(&self, record: &PoolRecord) -> Result<bool, StoreError>;
    /// Whether there was one.
    async fn erase_pool(&self, name: &Name) -> Result<bool, StoreError>;
    /// At most `limit` after this name, by name.
    async fn pools(
        &self,
        after: Option<&Name>,
        limit: usize,
    ) -> Result<Vec<PoolRecord>, StoreError>;
}

/// Volumes and drives. Which sandbox has which is part of the sandboxes' specifications: what is written here
/// of it is written with them, in the same instant.
#[async_trait]
pub trait VolumeLedger: Send + Sync + 'static {
    /// [`StoreError::NameTaken`] if there is one of that name.
    async fn create_volume(&self, record: &VolumeRecord) -> Result<(), StoreError>;
    /// Replaces what is given, and leaves the rest as others wrote it; what it is then. [`StoreError::NoSuchVolume`] if it
    /// is gone.
    async fn update_volume(
        &self,
        id: &VolumeId,
        changes: &UpdateVolume,
    ) -> Result<VolumeRecord, StoreError>;
    /// Whether there was one. [`StoreError::InUse`] while a sandbox has it.
    async fn erase_volume(&self, id: &VolumeId) -> Result<bool, StoreError>;
    async fn find_volume(&self, of: &VolumeRef) -> Result<Option<VolumeRecord>, StoreError>;
    /// At most `limit` of this kind, or of both, after this place, oldest first.
    async fn volumes(
        &self,
        kind: Option<VolumeKind>,
        after: Option<&Place<VolumeId>>,
        limit: usize,
    ) -> Result<Vec<VolumeRecord>, StoreError>;
    /// The sandboxes that have it, by id.
    async fn attachments(&self, id: &VolumeId) -> Result<Vec<Attachment>, StoreError>;
    /// Those that were made for this sandbox.
    async fn volumes_made_for(&self, sandbox: &SandboxId) -> Result<Vec<VolumeId>, StoreError>;
    /// Those are nobody's from now on: they stay when the sandbox goes.
    async fn keep_volumes_of(&self, sandbox: &SandboxId) -> Result<(), StoreError>;
}

/// All that a fleet needs.
pub trait FleetLedger:
    SandboxLedger + ArchiveLedger + SnapshotLedger + PoolLedger + VolumeLedger + Changes
{
}

impl<T> FleetLedger for T where
    T: SandboxLedger + ArchiveLedger + SnapshotLedger + PoolLedger + VolumeLedger + Changes
{
}

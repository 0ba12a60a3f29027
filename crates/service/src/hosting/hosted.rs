//! One service in memory: its rows, as they are in the ledger, and who answers for it now.
//!
//! Owned (see [`torpor_lifecycle::ledger`]): only the node that has the instances writes the rows, under its epoch.
//! Which sandboxes are instances is not written anywhere but in their labels.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, RwLock};
use tokio::sync::{Mutex as AsyncMutex, Notify};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use torpor_protocol::hosting::{Revision, RevisionState, Share, Sticky};
use torpor_protocol::{ErrorCode, Name, PreviewTarget, SandboxId, ServiceId};
use torpor_store::ServiceRow;

use super::group::{Group, Role};
use crate::error::{Error, Result};

/// Requests of one service that wait for an instance: each is some kilobytes here and a connection.
const HELD_MAX: usize = 1000;

pub struct Hosted {
    pub id: ServiceId,
    known: RwLock<Known>,
    groups: Mutex<BTreeMap<u32, Group>>,
    /// Deploys that are under way, by revision.
    deploys: Mutex<HashMap<u32, Deploying>>,
    held: AtomicUsize,
    /// Rings when there may be something to start or to stop.
    pub(super) changed: Notify,
    /// Held by who writes, from the look at what is there until it is here.
    pub(super) writing: AsyncMutex<()>,
    /// The service is no more.
    pub(super) gone: CancellationToken,
}

/// A deploy that is under way.
#[derive(Clone, Default)]
pub(super) struct Deploying {
    /// Gives it up.
    pub(super) cancel: CancellationToken,
    /// It is over, and nobody works on it.
    over: CancellationToken,
}

/// As the ledger has it.
#[derive(Clone)]
pub(super) struct Known {
    pub(super) row: ServiceRow,
    pub(super) revisions: BTreeMap<u32, Revision>,
}

impl Hosted {
    pub(super) fn new(row: ServiceRow, revisions: Vec<Revision>) -> Self {
        let revisions = revisions.into_iter().map(|revision| (revision.number, revision)).collect();
        Self {
            id: row.id.clone(),
            known: RwLock::new(Known { row, revisions }),
            groups: Mutex::default(),
            deploys: Mutex::default(),
            held: AtomicUsize::new(0),
            changed: Notify::new(),
            writing: AsyncMutex::default(),
            gone: CancellationToken::new(),
        }
    }

    pub fn name(&self) -> Name {
        self.known.read().row.name.clone()
    }

    pub fn target(&self) -> PreviewTarget {
        PreviewTarget::Service(self.id.clone())
    }

    /// What of a request decides which revision answers it.
    pub fn sticky(&self) -> Option<Sticky> {
        self.known.read().row.sticky.clone()
    }

    pub(super) fn known(&self) -> Known {
        self.known.read().clone()
    }

    pub(super) fn row(&self) -> ServiceRow {
        self.known.read().row.clone()
    }

    pub(super) fn see<T>(&self, see: impl FnOnce(&Known) -> T) -> T {
        see(&self.known.read())
    }

    pub(super) fn revision(&self, number: u32) -> Result<Revision> {
        let found = self.known.read().revisions.get(&number).cloned();
        found.ok_or_else(|| {
            let message = format!("service {} has no revision {number}", self.name());
            Error::new(ErrorCode::NotFound, message)
        })
    }

    /// The ledger has it so now.
    pub(super) fn put(&self, row: ServiceRow, revision: Option<Revision>) {
        let mut known = self.known.write();
        known.row = row;
        if let Some(revision) = revision {
            known.revisions.insert(revision.number, revision);
        }
        drop(known);
        self.changed.notify_one();
        // There may be more room at once: the concurrency may have changed.
        self.with_groups(|groups| groups.values().for_each(|group| group.freed.notify_waiters()));
    }

    pub(super) fn forget(&self, revision: u32) {
        self.known.write().revisions.remove(&revision);
        self.changed.notify_one();
    }

    // === Instances ===

    pub(super) fn with_group<T>(&self, revision: u32, with: impl FnOnce(&mut Group) -> T) -> T {
        with(self.groups.lock().entry(revision).or_default())
    }

    pub(super) fn with_groups<T>(&self, with: impl FnOnce(&mut BTreeMap<u32, Group>) -> T) -> T {
        with(&mut self.groups.lock())
    }

    /// What is to become of a revision's instances; `None`: a deploy has them.
    pub(super) fn role(&self, revision: u32) -> Option<Role> {
        let known = self.known.read();
        match known.revisions.get(&revision).map(|revision| revision.state) {
            Some(RevisionState::Ready) => Some(role_in(&known.row.traffic, revision)),
            Some(RevisionState::Starting | RevisionState::Checking | RevisionState::Saving) => None,
            Some(RevisionState::Failed) | None => Some(Role::Retired),
        }
    }

    /// Whether somebody here answers for this sandbox: it is an instance, or will be.
    pub(super) fn claims(&self, id: &SandboxId, revision: u32) -> bool {
        // Who starts becomes an instance under the same lock.
        let groups = self.groups.lock();
        let group = groups.get(&revision);
        group.is_some_and(|group| group.starts() || group.has(id)) || self.role(revision).is_none()
    }

    // === Deploys ===

    pub(super) fn begin_deploy(&self, revision: u32) -> Deploying {
        self.deploys.lock().entry(revision).or_default().clone()
    }

    pub(super) fn end_deploy(&self, revision: u32) {
        if let Some(deploying) = self.deploys.lock().remove(&revision) {
            deploying.over.cancel();
        }
    }

    /// Whether one is under way; of one revision, or of any.
    pub(super) fn deploys(&self, of: Option<u32>) -> bool {
        self.deploys.lock().keys().any(|number| of.is_none_or(|of| of == *number))
    }

    /// Gives them up, and waits until they are over.
    pub(super) async fn deploys_ended(&self, of: Option<u32>) {
        let all = self.deploys.lock().clone();
        for (_, deploying) in
            all.into_iter().filter(|(number, _)| of.is_none_or(|of| of == *number))
        {
            deploying.cancel.cancel();
            deploying.over.cancelled().await;
        }
    }

    // === Requests that wait ===

    pub(super) fn hold(self: &Arc<Self>, revision: u32) -> Result<Held> {
        if self.held.fetch_add(1, Ordering::Relaxed) >= HELD_MAX {
            self.held.fetch_sub(1, Ordering::Relaxed);
            let message = format!("{HELD_MAX} requests wait for service {} already", self.name());
            return Err(Error::with_hint(
                ErrorCode::CapacityReached,
                message,
                "ask again in a moment; more instances (max) or requests at once (concurrency) let more in",
            ));
        }
        self.with_group(revision, Group::wait);
        self.changed.notify_one();
        Ok(Held { hosted: Arc::clone(self), revision })
    }
}

fn role_in(traffic: &[Share], revision: u32) -> Role {
    match traffic.iter().find(|share| share.revision == revision) {
        Some(share) if share.percent > 0 => Role::Serving,
        Some(share) if share.tag.is_some() => Role::Tagged,
        Some(_) | None => Role::Retired,
    }
}

/// A request that waits for an instance.
pub(super) struct Held {
    hosted: Arc<Hosted>,
    revision: u32,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.hosted.held.fetch_sub(1, Ordering::Relaxed);
        self.hosted.with_group(self.revision, Group::stop_waiting);
    }
}

/// The place of a request with an instance, which does not go while this is held.
pub struct Seat {
    hosted: Arc<Hosted>,
    revision: u32,
    id: SandboxId,
}

impl Seat {
    pub(super) fn new(hosted: &Arc<Hosted>, revision: u32, id: SandboxId) -> Self {
        Self { hosted: Arc::clone(hosted), revision, id }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.hosted.with_group(self.revision, |group| group.leave(&self.id, Instant::now()));
    }
}

/// A service without revisions.
#[cfg(test)]
pub(super) fn hosted() -> Arc<Hosted> {
    let row = ServiceRow {
        id: ServiceId::random(),
        name: "shop".parse().unwrap(),
        label: torpor_protocol::PreviewLabel::random(),
        public: true,
        scale: Default::default(),
        sticky: None,
        traffic: Vec::new(),
        last_revision: 1,
        never_served: Default::default(),
        created_at_ms: 0,
        updated_at_ms: 0,
    };
    Arc::new(Hosted::new(row, Vec::new()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn so_many_requests_wait_and_no_more_until_one_is_over() {
        let hosted = hosted();
        let mut held: Vec<_> = (0..HELD_MAX).map(|_| hosted.hold(1).unwrap()).collect();
        let refused = hosted.hold(1).err().unwrap();
        assert_eq!(refused.code(), ErrorCode::CapacityReached);
        held.pop();
        hosted.hold(1).unwrap();
    }
}

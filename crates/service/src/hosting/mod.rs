//! Services: long-lived programs with a stable address, hosted in sandboxes of this node.
//!
//! ```text
//!  preview ──▶ enter: revision by traffic ──▶ group: an instance with room ──▶ Fleet::awake ──▶ lease
//!                                               │ none: wait; the keeper starts one (a fork)
//!  deploy ──▶ revision recorded ──▶ first instance ──▶ healthy ──▶ memory snapshot ──▶ ready, traffic: one write
//! ```
//!
//! Invariants
//! - A revision never changes but for how its deploy stands. What is acknowledged is in the ledger; a deploy that
//!   a daemon left is gone on with by the next one, at its last step.
//! - Instances are sandboxes with labels. Nothing else says who they are, and whoever has the labels and is
//!   nobody's instance is swept away.
//! - The only way to an instance is `Fleet::awake`, as for everybody; it sleeps and wakes as every sandbox does.
//! - An instance gets requests after a check of its own passed: also a fork, which has the memory of one that
//!   had passed.

mod admit;
mod calls;
mod check;
mod deploy;
mod enter;
mod group;
mod hosted;
pub mod invocations;
mod keeper;
mod logs;
mod start;
mod traffic;

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;
use tokio::sync::Notify;
use torpor_lifecycle::ledger::{PAGE, everything};
use torpor_lifecycle::store::StoreError;
use torpor_lifecycle::{Fleet, Sandbox};
use torpor_protocol::hosting::{REVISION_LABEL, SERVICE_LABEL};
use torpor_protocol::{ErrorCode, Name, SandboxId, SandboxRef, ServiceId, Status};
use torpor_store::{Ledger, ServiceRow};

use crate::error::{Error, Result};

pub use calls::{
    deploy, deploy_service, list, remove, remove_revision, rollback, set_traffic, show, update,
};
pub use enter::{Entered, enter};
pub use hosted::{Hosted, Seat};
pub use keeper::{look_after, report_unhealthy};
pub use logs::{Lines, follow};

/// All services of this node.
pub struct Hosting {
    ledger: Ledger,
    known: RwLock<Services>,
    /// Held by who makes one, until it is known.
    creating: tokio::sync::Mutex<()>,
    /// Rings when there is an invocation to run.
    queued: Notify,
}

#[derive(Default)]
struct Services {
    by_id: HashMap<ServiceId, Arc<Hosted>>,
    by_name: HashMap<Name, ServiceId>,
}

impl Hosting {
    /// What the ledger knows of them.
    pub async fn open(ledger: Ledger, fleet: &Fleet) -> std::result::Result<Self, StoreError> {
        let owner = fleet.owner().clone();
        let page = |after: Option<ServiceId>| {
            let (ledger, owner) = (ledger.clone(), owner.clone());
            async move { ledger.services(&owner, after.as_ref(), PAGE).await }
        };
        let rows: Vec<ServiceRow> = everything(page, |row: &ServiceRow| row.id.clone()).await?;
        let hosting = Self {
            ledger,
            known: RwLock::default(),
            creating: Default::default(),
            queued: Notify::new(),
        };
        for row in rows {
            let revisions = hosting.ledger.revisions(&row.id).await?;
            hosting.put(Arc::new(Hosted::new(row, revisions)));
        }
        Ok(hosting)
    }

    fn put(&self, hosted: Arc<Hosted>) {
        let mut known = self.known.write();
        known.by_name.insert(hosted.name(), hosted.id.clone());
        known.by_id.insert(hosted.id.clone(), hosted);
    }

    fn forget(&self, hosted: &Hosted) {
        let mut known = self.known.write();
        known.by_id.remove(&hosted.id);
        // Another one may have its name by now.
        if known.by_name.get(&hosted.name()) == Some(&hosted.id) {
            known.by_name.remove(&hosted.name());
        }
    }

    pub fn by_id(&self, id: &ServiceId) -> Option<Arc<Hosted>> {
        self.known.read().by_id.get(id).cloned()
    }

    pub fn find(&self, name: &Name) -> Result<Arc<Hosted>> {
        let known = self.known.read();
        let found = known.by_name.get(name).and_then(|id| known.by_id.get(id)).cloned();
        found.ok_or_else(|| {
            let message = format!("there is no service {name}");
            Error::with_hint(
                ErrorCode::NotFound,
                message,
                "`torpor service ls` shows those of this host",
            )
        })
    }

    fn all(&self) -> Vec<Arc<Hosted>> {
        self.known.read().by_id.values().cloned().collect()
    }
}

/// Of which service and revision a sandbox is an instance.
fn instance_of(status: &Status) -> Option<(ServiceId, u32)> {
    let labels = &status.spec.labels;
    let service = labels.get(SERVICE_LABEL)?.parse().ok()?;
    Some((service, labels.get(REVISION_LABEL)?.parse().ok()?))
}

/// All sandboxes that are instances of something, the oldest first.
fn instances(fleet: &Fleet) -> Vec<(ServiceId, u32, SandboxId)> {
    let found = fleet.survey(|status| {
        let (service, revision) = instance_of(status)?;
        Some((status.created_at_ms, service, revision, status.id.clone()))
    });
    let mut found: Vec<_> = found.into_iter().flatten().collect();
    found.sort_by(|one, other| (one.0, &one.3).cmp(&(other.0, &other.3)));
    found.into_iter().map(|(_, service, revision, id)| (service, revision, id)).collect()
}

/// Those of one service with their revisions, the oldest first.
fn instances_of(fleet: &Fleet, service: &ServiceId) -> Vec<(u32, Sandbox)> {
    let mine = instances(fleet).into_iter().filter(|(of, ..)| of == service);
    let found =
        mine.map(|(_, revision, id)| Some((revision, fleet.find(&SandboxRef::Id(id)).ok()?)));
    found.flatten().collect()
}

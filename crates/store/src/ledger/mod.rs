//! The ledger: what must be remembered, in whichever database. The rules that all of it keeps are those of
//! [`torpor_lifecycle::ledger`], which also has what a fleet remembers; the rest is here, by aggregate.

mod build_cache;
mod builds;
mod edge;
mod events;
mod hosting;
mod images;
mod invocations;
mod jobs;
mod keys;
mod layers;
mod logins;
mod mcp_gateway;
mod mcp_tasks;
mod requests;
mod saves;
mod schedules;
mod secrets;
mod sqlite;
mod webhooks;

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use torpor_lifecycle::ledger::{Changes, FleetLedger};
use torpor_lifecycle::store::StoreError;

pub use build_cache::{BuildCacheLedger, CachedStep, Outcome};
pub use builds::BuildLedger;
pub use edge::{DomainLedger, DomainRow, PreviewLedger, TokenRow};
pub use events::{EventFilter, EventLedger, EventRange};
pub use hosting::{HostingLedger, ServiceRow};
pub use images::{ImageLedger, ImageRow, LayerFacts, Removed};
pub use invocations::{ClaimedInvocation, InvocationBounds, InvocationLedger, SealedCallback};
pub use jobs::{
    Admitted, AttemptEnd, ExecutionFilter, JobLedger, NewExecution, QueueBounds, QueueLength,
    Settled, Settlement, TASK_LABEL, TaskClaim, TaskLease, TaskLedger, TaskPage, TaskProcess,
};
pub use keys::{KeyHash, KeyLedger, KeyRow};
pub use layers::{LayerLedger, OriginRow, Unused};
pub use logins::LoginLedger;
pub use mcp_gateway::{McpGatewayLedger, McpServerRow};
pub use mcp_tasks::{McpTask, McpTaskLedger, McpTaskState};
pub use requests::{Begun, RequestLedger};
pub use saves::SaveLedger;
pub use schedules::{Fire, NextTime, ScheduleLedger};
pub use secrets::{Seal, Sealed, SecretLedger};
pub use sqlite::SqliteLedger;
pub use webhooks::{
    Addressee, Claiming, DeliveryClaim, DeliveryLedger, NewDelivery, Next, OutboxBounds,
    OutboxLength, Target, WebhookLedger, WebhookSecrets,
};

/// A database that remembers everything.
#[async_trait]
pub trait Database:
    FleetLedger
    + PreviewLedger
    + DomainLedger
    + KeyLedger
    + BuildLedger
    + BuildCacheLedger
    + HostingLedger
    + InvocationLedger
    + SecretLedger
    + ImageLedger
    + JobLedger
    + TaskLedger
    + LayerLedger
    + LoginLedger
    + McpTaskLedger
    + McpGatewayLedger
    + RequestLedger
    + SaveLedger
    + EventLedger
    + WebhookLedger
    + DeliveryLedger
    + ScheduleLedger
{
    /// Waits for running statements and lets go of the database.
    async fn close(&self);
}

/// The ledger of an installation. Cloning gives another handle to the same ledger.
#[derive(Clone)]
pub struct Ledger {
    database: Arc<dyn Database>,
}

impl Ledger {
    /// Opens or creates the ledger of a data directory and brings it to the present schema.
    pub async fn open(layout: &crate::Layout) -> Result<Self, StoreError> {
        Ok(Self { database: Arc::new(SqliteLedger::open(layout).await?) })
    }

    pub fn changes(&self) -> Arc<dyn Changes> {
        Arc::clone(&self.database) as _
    }

    pub fn fleet(&self) -> Arc<dyn FleetLedger> {
        Arc::clone(&self.database) as _
    }
}

impl Deref for Ledger {
    type Target = dyn Database;

    fn deref(&self) -> &Self::Target {
        &*self.database
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ledger")
    }
}

pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

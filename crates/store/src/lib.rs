//! Bytes at rest.
//!
//! ```text
//!  Layout          the data directory: one daemon at a time, every path in it
//!    ├── Ledger     what must be remembered (SQLite): sandboxes, those that are gone, snapshots,
//!    │              pools, images, builds, secrets, API keys
//!    ├── Vault      the values of secrets, sealed in the ledger under a key beside it
//!    ├── Certificates  what encrypted connections are served with: one private file each
//!    ├── Journals   what processes said: two files of lines for each sandbox
//!    ├── AuditLog   what became of what sandboxes sent out: four files of lines for all of them
//!    ├── TaskResults  files that tasks of jobs left: one archive each
//!    ├── Images     root filesystems: one read-only EROFS file each, and layers they were pulled as
//!    └── Saves      moments of machines at rest: one directory each
//! ```
//!
//! Invariants:
//! - Only [`Layout`] knows a path under the data directory.
//! - `staging/` → fsync → rename → ledger row = committed. What has no row is garbage, and start-up
//!   removes it; so a crash at any instant leaves a whole image or save, or none.
//! - A write to the ledger is durable when it returns; one to a journal is not.
//! - The value of a secret is at rest nowhere but encrypted.
//! - What comes from outside (directories, archives, Dockerfiles) is parsed within limits and never
//!   reaches beyond its staging directory.

mod audit;
mod certificates;
pub mod dockerfile;
mod files;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod images;
mod journals;
mod layout;
mod ledger;
mod results;
pub mod saves;
mod vault;

pub use audit::AuditLog;
pub use certificates::{CertificateFile, Certificates};
pub use images::{
    Exported, HeldImage, Image, ImageConfig, ImageName, Images, Layers, Limits, OnProgress,
    PinnedLayer, Progress, Pruned, Pulled, PulledLayer, Step,
};
pub use journals::Journals;
pub use layout::{Layout, Stage};
pub use ledger::{
    Addressee, Admitted, AttemptEnd, Begun, BuildCacheLedger, BuildLedger, CachedStep,
    ClaimedInvocation, Claiming, Database, DeliveryClaim, DeliveryLedger, DomainLedger, DomainRow,
    EventFilter, EventLedger, EventRange, ExecutionFilter, Fire, HostingLedger, ImageLedger,
    ImageRow, InvocationBounds, InvocationLedger, JobLedger, KeyHash, KeyLedger, KeyRow,
    LayerFacts, LayerLedger, Ledger, LoginLedger, McpGatewayLedger, McpServerRow, McpTask,
    McpTaskLedger, McpTaskState, NewDelivery, NewExecution, Next, NextTime, OriginRow,
    OutboxBounds, OutboxLength, Outcome, PreviewLedger, QueueBounds, QueueLength, Removed,
    RequestLedger, SaveLedger, ScheduleLedger, Seal, Sealed, SealedCallback, SecretLedger,
    ServiceRow, Settled, Settlement, SqliteLedger, TASK_LABEL, Target, TaskClaim, TaskLease,
    TaskLedger, TaskPage, TaskProcess, TokenRow, Unused, WebhookLedger, WebhookSecrets,
};
pub use results::{ResultsDraft, TaskResults};
pub use saves::{Imported, LayerChanges, SavedTree, Saves, TreeError, Walked, WalkedKind};
pub use vault::{KeptAnswer, Repeated, RequestKey, Vault};

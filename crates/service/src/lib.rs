//! What can be asked of Torpor, whoever asks: our own API, foreign clients' dialects, jobs, another node.
//!
//! ```text
//!  api ───────┐
//!  dialects ──┼──▶ Service: calls ─ admission ─ builds ──▶ fleet, images, saves, vault, egress
//!  edge ──────┘
//! ```
//!
//! Invariants
//! - Plain values in, plain values out: nothing here knows HTTP, nor which words its callers use.
//! - What goes wrong is one closed [`Error`]; whoever asks translates it to their own words.
//! - Callers decide nothing: what may be is decided here, what happens to a sandbox in `lifecycle`.

pub mod admission;
pub mod audit;
pub mod builds;
pub mod caches;
pub mod calls;
pub mod domains;
pub mod error;
pub mod events;
pub mod files;
pub mod headers;
pub mod hooks;
pub mod hosting;
#[cfg(any(test, fuzzing))]
#[path = "../../../fuzz/input.rs"]
mod input;
pub mod jobs;
pub mod journals;
pub mod keys;
pub mod metrics;
pub mod pinned_save;
pub mod previews;
pub mod processes;
pub mod pulls;
pub mod pushes;
pub mod schedules;
pub mod snapshots;
pub mod tally;
pub mod throttle;
pub mod tunnel;
pub mod upload;

use std::sync::Arc;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use torpor_egress::Egress;
use torpor_lifecycle::Fleet;
use torpor_protocol::Resources;
use torpor_store::{AuditLog, Images, Journals, Ledger, Saves, Vault};
use torpor_volumes::VolumeStore;

// What calls take and give of the crates below: who asks needs no other.
pub use torpor_lifecycle::guest::{Guest, Sender, Stream};
pub use torpor_lifecycle::ledger::SnapshotFilter;
pub use torpor_lifecycle::store::Search;
pub use torpor_lifecycle::{Sandbox, wake_deadline};
pub use torpor_store::{Image, ImageName, McpTask, McpTaskState};

use admission::{Host, Terms};
use builds::jobs::Jobs;
use domains::Domains;
pub use error::{Error, Result};
use events::Events;
use hosting::Hosting;
use keys::Keyring;
use metrics::Metrics;
use previews::Previews;
pub use pulls::Registries;
use schedules::Schedules;

/// What the operator says about sandboxes.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Of sandboxes that do not say.
    pub defaults: Resources,
    /// After so long a sandbox that does not say falls asleep.
    pub idle_after_ms: u64,
    /// What steps of image builds may take on disk, and so much again what their cache mounts hold.
    pub build_cache_bytes: u64,
}

/// What all calls share. One value per daemon, in an `Arc`; nothing in it is configured twice.
pub struct Service {
    /// Tells this data directory from others on the same host.
    pub installation: String,
    pub settings: Settings,
    pub fleet: Fleet,
    pub ledger: Ledger,
    pub images: Images,
    pub saves: Saves,
    pub vault: Vault,
    pub volumes: VolumeStore,
    /// The way out of proxied sandboxes.
    pub egress: Egress,
    /// What sandboxes sent out, on disk.
    pub audit: AuditLog,
    /// What the processes of sandboxes said.
    pub journals: Journals,
    /// Where images are pulled from and pushed to.
    pub registries: Registries,
    /// Images in the making that nobody need wait for.
    pub builds: Jobs,
    /// Commands that are run for many inputs, each in a sandbox of its own.
    pub jobs: jobs::Jobs,
    pub keys: Keyring,
    pub previews: Previews,
    /// Programs with a stable address, and the sandboxes that answer for them.
    pub hosting: Hosting,
    /// Host names of their owners that lead to previews.
    pub domains: Arc<Domains>,
    pub metrics: Arc<Metrics>,
    pub events: Events,
    pub schedules: Schedules,
    pub host: Host,
    pub started: Instant,
    /// The daemon stops: streams that would go on for ever end.
    pub stopping: CancellationToken,
    /// Conversations that outlive their request; shutdown waits for them.
    pub tasks: TaskTracker,
}

impl Service {
    /// What decides about a new sandbox besides its request.
    pub fn terms(&self) -> Terms<'_> {
        Terms {
            defaults: &self.settings.defaults,
            idle_after_ms: self.settings.idle_after_ms,
            host: self.host,
            now_ms: self.fleet.clock().now_ms(),
        }
    }
}

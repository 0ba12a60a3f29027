//! What all handlers share. One value per daemon, in an `Arc`; nothing in it is configured twice.

use std::sync::Arc;

use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use torpor_egress::Egress;
use torpor_lifecycle::Fleet;
use torpor_store::{AuditLog, Images, Journals, Ledger, Saves, Vault};

use crate::admission::{Host, Terms};
use crate::api::auth::Keyring;
use crate::builds::jobs::Jobs;
use crate::config::Config;
use crate::domains::Domains;
use crate::metrics::Metrics;
use crate::pressure::Gauge;
use crate::previews::Previews;

pub struct App {
    /// Tells this data directory from others on the same host.
    pub installation: String,
    pub fleet: Fleet,
    pub ledger: Ledger,
    pub images: Images,
    pub saves: Saves,
    pub vault: Vault,
    /// The way out of proxied sandboxes.
    pub egress: Egress,
    /// What sandboxes sent out, on disk.
    pub audit: AuditLog,
    /// Images in the making that nobody need wait for.
    pub builds: Jobs,
    pub keys: Keyring,
    pub previews: Previews,
    /// Host names of their owners that lead to previews.
    pub domains: Arc<Domains>,
    pub config: Config,
    pub metrics: Metrics,
    pub host: Host,
    pub gauge: Gauge,
    pub dialects: Vec<Dialect>,
    /// Held by who makes room for a machine.
    pub making_room: Mutex<()>,
    pub started: Instant,
    /// The daemon stops: streams that would go on for ever end.
    pub stopping: CancellationToken,
    /// Conversations that outlive their HTTP request (WebSockets); shutdown waits for them.
    pub tasks: TaskTracker,
}

impl App {
    /// What decides about a new sandbox besides its request.
    pub fn terms(&self) -> Terms<'_> {
        Terms {
            defaults: &self.config.defaults,
            idle_after_ms: self.config.standby.idle_after_ms,
            host: self.host,
            now_ms: self.fleet.clock().now_ms(),
        }
    }
}

/// What [`crate::serve_with`] needs and tests may replace.
pub struct Parts {
    pub installation: String,
    pub engine: Arc<dyn torpor_lifecycle::engine::Engine>,
    pub ledger: Ledger,
    pub images: Images,
    pub saves: Saves,
    pub journals: Journals,
    pub vault: Vault,
    pub egress: Egress,
    pub audit: AuditLog,
    pub gauge: Gauge,
    pub dialects: Vec<Dialect>,
}

/// The routes of a foreign client's API; they go beside our own.
pub type Dialect = fn(&Arc<App>) -> axum::Router<Arc<App>>;

//! What all handlers share. One value per daemon, in an `Arc`; nothing in it is configured twice.

use std::sync::Arc;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use torpor_lifecycle::Fleet;
use torpor_store::{Images, Ledger};

use crate::admission::Host;
use crate::api::auth::Keyring;
use crate::config::Config;
use crate::metrics::Metrics;

pub struct App {
    /// Tells this data directory from others on the same host.
    pub installation: String,
    pub fleet: Fleet,
    pub images: Images,
    pub keys: Keyring,
    pub config: Config,
    pub metrics: Metrics,
    pub host: Host,
    pub started: Instant,
    /// The daemon stops: streams that would go on for ever end.
    pub stopping: CancellationToken,
    /// Conversations that outlive their HTTP request (WebSockets); shutdown waits for them.
    pub tasks: TaskTracker,
}

/// What [`crate::serve_with`] needs and tests may replace.
pub struct Parts {
    pub installation: String,
    pub engine: Arc<dyn torpor_lifecycle::engine::Engine>,
    pub ledger: Ledger,
    pub images: Images,
}

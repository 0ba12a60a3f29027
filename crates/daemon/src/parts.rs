//! What the daemon is put together from.

use std::sync::Arc;

use axum::Router;
use torpor_egress::Egress;
use torpor_lifecycle::engine::Engine;
use torpor_service::Service;
use torpor_service::pressure::Gauge;
use torpor_store::{AuditLog, Images, Journals, Ledger, Saves, Vault};

/// What [`crate::serve_with`] needs and tests may replace.
pub struct Parts {
    pub installation: String,
    pub engine: Arc<dyn Engine>,
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
pub type Dialect = fn(&Arc<Service>) -> Router<Arc<Service>>;

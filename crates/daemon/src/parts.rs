//! What the daemon is put together from.

use std::sync::Arc;

use torpor_egress::Egress;
use torpor_lifecycle::{Engines, MemoryGauge};
use torpor_store::{AuditLog, Images, Journals, Ledger, Saves, TaskResults, Vault};
use torpor_volumes::VolumeStore;
use torpor_web::dialect::Dialect;

/// What [`crate::serve_with`] needs and tests may replace.
pub struct Parts {
    pub installation: String,
    pub engines: Engines,
    pub ledger: Ledger,
    pub images: Images,
    pub saves: Saves,
    pub journals: Journals,
    pub results: TaskResults,
    pub vault: Vault,
    pub volumes: VolumeStore,
    pub egress: Egress,
    pub audit: AuditLog,
    pub gauge: Arc<dyn MemoryGauge>,
    /// In the order in which they are asked whose a request is.
    pub dialects: Vec<Arc<dyn Dialect>>,
}

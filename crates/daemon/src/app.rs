//! What all handlers share. One value per daemon, in an `Arc`.

use std::ops::Deref;
use std::sync::Arc;

use torpor_egress::Egress;
use torpor_service::Service;
use torpor_service::pressure::Gauge;
use torpor_store::{AuditLog, Images, Journals, Ledger, Saves, Vault};

use crate::api::auth::Keyring;
use crate::config::Config;
use crate::domains::Domains;
use crate::previews::Previews;

pub struct App {
    pub service: Arc<Service>,
    pub keys: Keyring,
    pub previews: Previews,
    /// Host names of their owners that lead to previews.
    pub domains: Arc<Domains>,
    pub config: Config,
    pub dialects: Vec<Dialect>,
}

impl Deref for App {
    type Target = Arc<Service>;
    fn deref(&self) -> &Arc<Service> {
        &self.service
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

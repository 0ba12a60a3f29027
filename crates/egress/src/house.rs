//! What everybody in this crate shares.

use std::sync::Arc;

use torpor_lifecycle::Clock;
use torpor_lifecycle::store::Vault;
use torpor_protocol::AddressRange;

use crate::audit::Audit;
use crate::bindings::Bindings;
use crate::names::Resolver;
use crate::read::{Authority, Reader};
use crate::roster::Roster;
use crate::ways::Ways;
use crate::{EgressError, Settings};

pub(crate) struct House {
    pub(crate) roster: Roster,
    pub(crate) audit: Audit,
    pub(crate) ways: Ways,
    pub(crate) bindings: Bindings,
    pub(crate) reader: Reader,
    pub(crate) clock: Clock,
    pub(crate) authority: Arc<Authority>,
    /// What policies may open.
    pub(crate) private: Vec<AddressRange>,
    pub(crate) near: Vec<AddressRange>,
}

impl House {
    pub(crate) fn new(
        settings: Settings,
        authority: Arc<Authority>,
        vault: Arc<dyn Vault>,
    ) -> Result<Self, EgressError> {
        let resolver = Resolver::new(settings.resolver);
        Ok(Self {
            roster: Roster::default(),
            audit: Audit::default(),
            ways: Ways::new(settings.gateways, resolver),
            bindings: Bindings::new(Arc::clone(&vault)),
            reader: Reader::new(Arc::clone(&authority), vault, settings.roots.as_deref())?,
            clock: Clock::start(),
            authority,
            private: settings.private,
            near: settings.near,
        })
    }
}

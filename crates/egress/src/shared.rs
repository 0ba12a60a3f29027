//! What all connections share.

use std::sync::Arc;

use torpor_lifecycle::Clock;
use torpor_lifecycle::store::Vault;
use torpor_protocol::AddressRange;
use torpor_protocol::egress::{EgressEvent, EgressKind, Verdict};

use crate::audit::Audit;
use crate::bindings::Bindings;
use crate::dialer::Dialer;
use crate::intercept::{InterceptionCa, Interceptor};
use crate::names::Resolver;
use crate::outgoing::Open;
use crate::registry::{Guest, Registry};
use crate::{EgressError, Settings};

pub(crate) struct Shared {
    pub(crate) registry: Registry,
    pub(crate) audit: Audit,
    pub(crate) dialer: Dialer,
    pub(crate) bindings: Bindings,
    pub(crate) interceptor: Interceptor,
    pub(crate) clock: Clock,
    pub(crate) ca: Arc<InterceptionCa>,
    /// What policies may open.
    pub(crate) private: Vec<AddressRange>,
    pub(crate) near: Vec<AddressRange>,
    /// Where requests of the daemon itself may go.
    pub(crate) open: Open,
}

impl Shared {
    pub(crate) fn new(
        settings: Settings,
        ca: Arc<InterceptionCa>,
        vault: Arc<dyn Vault>,
    ) -> Result<Self, EgressError> {
        let resolver = Resolver::new(settings.resolver);
        Ok(Self {
            registry: Registry::default(),
            audit: Audit::default(),
            dialer: Dialer::new(settings.gateways, resolver),
            bindings: Bindings::new(Arc::clone(&vault)),
            interceptor: Interceptor::new(
                Arc::clone(&ca),
                vault,
                settings.roots.as_deref(),
                &settings.extra_ca,
            )?,
            clock: Clock::start(),
            ca,
            open: Open { opened: settings.outgoing, near: settings.near.clone() },
            private: settings.private,
            near: settings.near,
        })
    }

    /// That something of a guest happens now; nothing else is known of it.
    pub(crate) fn event(
        &self,
        guest: &Guest,
        what: EgressKind,
        verdict: Verdict,
        rule: impl Into<String>,
    ) -> EgressEvent {
        EgressEvent {
            at_ms: self.clock.now_ms(),
            sandbox: guest.id.clone(),
            what,
            verdict,
            rule: rule.into(),
            host: None,
            address: None,
            port: None,
            method: None,
            path: None,
            secrets: Vec::new(),
            gateway: None,
        }
    }
}

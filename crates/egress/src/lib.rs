//! What sandboxes send out: decided, intercepted where a policy says so, given secrets, and audited.
//!
//! ```text
//!  guest ─▶ slot ─▶ listener ─▶ sniff: first bytes ─▶ policy ─┬─▶ relay, unchanged ─▶ dialer ─▶ world
//!             │                                                └─▶ intercept: TLS ends here, secrets go in ─▶ …
//!             └──▶ names: our own name server, which remembers what it answered to whom
//! ```
//!
//! Invariants
//! - Nothing is dialed but what was resolved here for the host that the policy decided about.
//! - Deny wins. What can't be attributed to a host is refused where hosts are what matters, unless an
//!   explicit range of addresses allows it.
//! - A secret goes to the hosts it is bound to and nowhere else; its value is in no event, log or error.
//! - Without this crate running, proxied sandboxes reach nothing: nobody listens at the egress proxy.

mod audit;
mod bindings;
mod connection;
mod dialer;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod handle;
mod intercept;
mod listener;
mod names;
pub mod outgoing;
mod policy;
mod registry;
mod rewind;
mod shared;
mod sniff;

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use torpor_lifecycle::engine::{EgressProxy, GuestRegistry, LoggedPacket};
use torpor_lifecycle::store::Vault;
use torpor_protocol::egress::{EgressEvent, EgressKind, Gateway, Verdict};
use torpor_protocol::{AddressRange, Destination, Name, Network, SandboxId};

pub use audit::{Audit, Counts, EVENTS_MAX, Verdicts};
pub use dialer::{BadGateway, Upstream};
pub use error::EgressError;
pub use intercept::{CaError, InterceptionCa};
pub use listener::{Listener, OriginalDestination};

use policy::{Policy, closed_range, word};
use shared::Shared;

/// What the operator says.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Gateways that policies can choose.
    pub gateways: BTreeMap<Name, Upstream>,
    /// Private addresses that the policy of a sandbox may open by naming them.
    pub private: Vec<AddressRange>,
    /// Private addresses, and near ones, that [`outgoing`] requests may go to.
    pub outgoing: Vec<AddressRange>,
    /// Public networks that this host is part of, and its own addresses: closed like private ones.
    pub near: Vec<AddressRange>,
    /// A file of CA certificates (PEM) that are trusted besides those of the host.
    pub roots: Option<PathBuf>,
    /// CA certificates (PEM) that are trusted, too: guests trust them.
    pub extra_ca: Vec<String>,
    /// Who is asked for names; none: whom the host asks.
    pub resolver: Option<SocketAddr>,
}

/// The way out of proxied sandboxes. Clones are the same one.
#[derive(Clone)]
pub struct Egress {
    shared: Arc<Shared>,
    outgoing: outgoing::Client,
}

impl Egress {
    pub fn new(
        settings: Settings,
        ca: Arc<InterceptionCa>,
        vault: Arc<dyn Vault>,
    ) -> Result<Self, EgressError> {
        let shared = Arc::new(Shared::new(settings, ca, vault)?);
        Ok(Self { outgoing: outgoing::Client::new(Arc::clone(&shared)), shared })
    }

    /// Lets guests in where the engine leads them, until what is returned is dropped.
    pub fn listen(&self, proxy: EgressProxy) -> io::Result<Listener> {
        self.listen_with(proxy, listener::original_destination())
    }

    /// The same, where somebody else than the kernel says where a connection wanted to go: for tests.
    #[doc(hidden)]
    pub fn listen_with(
        &self,
        proxy: EgressProxy,
        original_destination: OriginalDestination,
    ) -> io::Result<Listener> {
        Listener::open(&self.shared, proxy, original_destination)
    }

    /// The certificate (PEM) that guests must trust where their requests are intercepted.
    pub fn certificate(&self) -> &str {
        self.shared.ca.certificate()
    }

    /// Requests of the daemon itself, which obey the rules about addresses, too.
    pub fn outgoing(&self) -> &outgoing::Client {
        &self.outgoing
    }

    pub fn audit(&self) -> &Audit {
        &self.shared.audit
    }

    /// Whether this policy can be kept here; what the operator can do about it if not.
    pub fn check(&self, network: &Network) -> Result<(), String> {
        if let Some(name) = &network.gateway
            && !self.shared.dialer.knows(name)
        {
            return Err(format!(
                "there is no gateway {name}; the operator names gateways in `egress.gateways`"
            ));
        }
        let opened =
            |range: &AddressRange| self.shared.private.iter().any(|open| open.covers(range));
        let ranges = network.allow.iter().filter_map(Destination::range);
        let near = |range: &AddressRange| self.shared.near.iter().any(|near| near.covers(range));
        let closed = |range: &&AddressRange| closed_range(range) || near(range);
        match ranges.filter(closed).find(|range| !opened(range)) {
            None => Ok(()),
            Some(range) => Err(format!(
                "{range} is private: no sandbox reaches it unless the operator adds it, or a range \
                 around it, to `egress.private`"
            )),
        }
    }

    /// All that policies can choose. Passwords are not told.
    pub fn gateways(&self) -> Vec<Gateway> {
        self.shared.dialer.gateways()
    }
}

impl GuestRegistry for Egress {
    fn register(&self, address: Ipv4Addr, id: &SandboxId, network: &Network) {
        self.shared.registry.register(address, id, Policy::new(network, &self.shared.private));
    }

    fn unregister(&self, address: Ipv4Addr) {
        self.shared.registry.unregister(address);
    }

    fn packet_logged(&self, address: Ipv4Addr, packet: LoggedPacket) {
        let Some(guest) = self.shared.registry.find(address) else { return };
        let what = match packet.protocol {
            1 => EgressKind::Icmp,
            6 => EgressKind::Tcp,
            17 => EgressKind::Udp,
            _ => EgressKind::Other,
        };
        let verdict = if packet.allowed { Verdict::Allowed } else { Verdict::Denied };
        self.shared.audit.record(EgressEvent {
            address: Some(packet.to),
            port: (packet.port != 0).then_some(packet.port),
            ..self.shared.event(&guest, what, verdict, word::FIREWALL)
        });
    }
}

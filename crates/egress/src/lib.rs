//! What sandboxes send out: decided, read where a policy says so, given secrets, and told.
//!
//! ```text
//!  guest ─▶ slot ─▶ turnstile ─▶ glance: first bytes ─▶ policy ─┬─▶ pass on, unread ─▶ way out ─▶ world
//!             │                                                 └─▶ read: TLS ends here, secrets go in ─▶ …
//!             └──▶ names: our own name server, which remembers what it answered to whom
//! ```
//!
//! Invariants
//! - Nothing is dialed but what was resolved here for the host that the policy decided about.
//! - Deny wins. What can't be attributed to a host is refused where hosts are what matters, unless an
//!   explicit range of addresses allows it.
//! - A secret goes to the hosts it is bound to and nowhere else; its value is in no event, log or error.
//! - Without this crate running, guided sandboxes reach nothing: the turnstile is then closed.

mod attend;
mod audit;
mod bindings;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod glance;
mod house;
mod names;
mod policy;
mod read;
mod rewound;
mod roster;
mod turnstile;
mod visit;
mod ways;

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use torpor_lifecycle::engine::{Guard, Passed, Turnstile};
use torpor_lifecycle::store::Vault;
use torpor_protocol::egress::{EgressEvent, EgressKind, Gateway, Verdict};
use torpor_protocol::{AddressRange, Destination, Name, Network, SandboxId};

pub use audit::{Audit, Counts, EVENTS_MAX, Verdicts};
pub use error::EgressError;
pub use read::{Authority, AuthorityError};
pub use turnstile::{Listening, Original};
pub use ways::{BadGateway, Through};

use house::House;
use policy::{Policy, closed_range, word};

/// What the operator says.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Ways out that policies can choose.
    pub gateways: BTreeMap<Name, Through>,
    /// Private addresses that the policy of a sandbox may open by naming them.
    pub private: Vec<AddressRange>,
    /// Public networks that this host is part of, and its own addresses: closed like private ones.
    pub near: Vec<AddressRange>,
    /// A file of certificates (PEM) that are believed besides those of the host.
    pub roots: Option<PathBuf>,
    /// Who is asked for names; none: whom the host asks.
    pub resolver: Option<SocketAddr>,
}

/// The way out of guided sandboxes. Clones are the same one.
#[derive(Clone)]
pub struct Egress {
    house: Arc<House>,
}

impl Egress {
    pub fn new(
        settings: Settings,
        authority: Arc<Authority>,
        vault: Arc<dyn Vault>,
    ) -> Result<Self, EgressError> {
        Ok(Self { house: Arc::new(House::new(settings, authority, vault)?) })
    }

    /// Lets guests in where the engine leads them, until what is returned is dropped.
    pub fn listen(&self, turnstile: Turnstile) -> io::Result<Listening> {
        self.listen_with(turnstile, turnstile::original())
    }

    /// The same, where somebody else than the kernel says where a connection wanted to go: for tests.
    #[doc(hidden)]
    pub fn listen_with(&self, turnstile: Turnstile, original: Original) -> io::Result<Listening> {
        Listening::open(&self.house, turnstile, original)
    }

    /// The certificate (PEM) that guests must trust where their requests are read.
    pub fn certificate(&self) -> &str {
        self.house.authority.certificate()
    }

    pub fn audit(&self) -> &Audit {
        &self.house.audit
    }

    /// Whether this policy can be kept here; what the operator can do about it if not.
    pub fn check(&self, network: &Network) -> Result<(), String> {
        if let Some(name) = &network.gateway
            && !self.house.ways.knows(name)
        {
            return Err(format!(
                "there is no gateway {name}; the operator names gateways in `egress.gateways`"
            ));
        }
        let opened =
            |range: &AddressRange| self.house.private.iter().any(|open| open.covers(range));
        let ranges = network.allow.iter().filter_map(Destination::range);
        let near = |range: &AddressRange| self.house.near.iter().any(|near| near.covers(range));
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
        self.house.ways.gateways()
    }
}

impl Guard for Egress {
    fn admit(&self, guest: Ipv4Addr, id: &SandboxId, network: &Network) {
        self.house.roster.admit(guest, id, Policy::new(network, &self.house.private));
    }

    fn dismiss(&self, guest: Ipv4Addr) {
        self.house.roster.dismiss(guest);
    }

    fn passed(&self, guest: Ipv4Addr, packet: Passed) {
        let Some(member) = self.house.roster.find(guest) else { return };
        self.house.audit.record(EgressEvent {
            at_ms: self.house.clock.now_ms(),
            sandbox: member.id.clone(),
            what: match packet.protocol {
                1 => EgressKind::Icmp,
                6 => EgressKind::Tcp,
                17 => EgressKind::Udp,
                _ => EgressKind::Other,
            },
            verdict: if packet.allowed { Verdict::Allowed } else { Verdict::Denied },
            rule: word::FIREWALL.to_owned(),
            host: None,
            address: Some(packet.to),
            port: (packet.port != 0).then_some(packet.port),
            method: None,
            path: None,
            secrets: Vec::new(),
            gateway: None,
        });
    }
}

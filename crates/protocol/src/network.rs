//! What a sandbox may reach, and what is put into what it sends on the way out.
//!
//! A policy is data: `torpor-engines` makes a firewall of the part that needs addresses only, and
//! `torpor-egress` stands in the way of a sandbox whose policy needs names, paths or secrets.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::id::{Name, SecretName};
use crate::spec::Pairs;

mod text;

pub use text::{NoBinding, NoDestination, NoRange};

/// What the sandbox may reach. Host, neighbours and private ranges it never reaches, unless the
/// operator lets policies name them (`egress.private`) and its own names them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Network {
    /// Whether it reaches public addresses.
    pub internet: bool,
    /// If not empty, it reaches these and nothing else, whatever `internet` says.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<Destination>,
    /// What it does not reach in any case.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<Destination>,
    /// What is put into its requests on the way out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    /// Secrets whose placeholders, `{{SECRET:name}}`, are replaced in its requests to the hosts that
    /// each is bound to.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<SecretName>,
    /// The gateway that its connections leave through; absent: this host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<Name>,
    #[serde(skip_serializing_if = "NetworkLimits::is_none")]
    pub limits: NetworkLimits,
}

impl Default for Network {
    fn default() -> Self {
        Self::OPEN
    }
}

impl Network {
    /// Every public address.
    pub const OPEN: Self = Self::of(true);
    /// No public address at all.
    pub const CLOSED: Self = Self::of(false);
    /// Entries of one list; more would make every packet slow.
    pub const ENTRIES_MAX: usize = 256;
    /// Routes of one sandbox, and entries of each list of a route.
    pub const ROUTES_MAX: usize = 64;

    const fn of(internet: bool) -> Self {
        Self {
            internet,
            allow: Vec::new(),
            deny: Vec::new(),
            routes: Vec::new(),
            secrets: Vec::new(),
            gateway: None,
            limits: NetworkLimits {
                bytes_per_sec: None,
                connections_per_sec: None,
                connections: None,
            },
        }
    }

    /// Whether its connections go through the egress proxy, which sees names, paths and requests; otherwise
    /// a firewall says all of it.
    pub fn is_proxied(&self) -> bool {
        let by_name = |list: &[Destination]| list.iter().any(|entry| entry.web().is_some());
        by_name(&self.allow)
            || by_name(&self.deny)
            || self.is_intercepted()
            || self.gateway.is_some()
    }

    /// Whether requests to some hosts are intercepted, also encrypted ones.
    pub fn is_intercepted(&self) -> bool {
        let narrow = |list: &[Destination]| {
            list.iter().filter_map(Destination::web).any(WebRule::needs_the_request)
        };
        !self.routes.is_empty()
            || !self.secrets.is_empty()
            || narrow(&self.allow)
            || narrow(&self.deny)
    }
}

/// How much a sandbox may do in the network; absent: as much as it can.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct NetworkLimits {
    /// In each direction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_sec: Option<u64>,
    /// Connections it may open in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections_per_sec: Option<u32>,
    /// Connections it may have open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<u32>,
}

impl NetworkLimits {
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// An entry of a list: addresses (`192.0.2.0/24`), or what is asked of hosts:
/// `[METHOD,METHOD ]host[/path]`, such as `api.example.com`, `*.example.com` and
/// `GET,HEAD api.example.com/v1/`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Destination {
    Range(AddressRange),
    Web(WebRule),
}

impl Destination {
    pub fn range(&self) -> Option<&AddressRange> {
        match self {
            Self::Range(range) => Some(range),
            Self::Web(_) => None,
        }
    }

    pub fn web(&self) -> Option<&WebRule> {
        match self {
            Self::Range(_) => None,
            Self::Web(rule) => Some(rule),
        }
    }
}

/// What is asked of hosts.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WebRule {
    /// Upper case, sorted; empty: all.
    methods: Vec<String>,
    host: HostPattern,
    /// What the path begins with, from its slash on; none: any.
    path: Option<String>,
}

impl WebRule {
    pub fn methods(&self) -> &[String] {
        &self.methods
    }

    pub fn host(&self) -> &HostPattern {
        &self.host
    }

    pub fn path(&self) -> Option<&str> {
        self.path.as_deref()
    }

    /// Whether the host alone does not decide it.
    pub fn needs_the_request(&self) -> bool {
        !self.methods.is_empty() || self.path.is_some()
    }
}

/// One host, `api.example.com`, or all below one: `*.example.com`, which is not `example.com` itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPattern {
    /// Lower case, without a dot at the end.
    name: String,
    below: bool,
}

impl HostPattern {
    /// Whether this host, in lower case and without a dot at the end, is one of them.
    pub fn matches(&self, host: &str) -> bool {
        if !self.below {
            return host == self.name;
        }
        host.strip_suffix(&self.name).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
    }

    /// The host, if it is one.
    pub fn exact(&self) -> Option<&str> {
        (!self.below).then_some(self.name.as_str())
    }
}

/// Where a secret may be sent: `api.example.com` by TLS on port 443, `api.example.com:8443` by TLS on
/// that port, `http://internal.example:8080` without TLS. The host may be `*.example.com`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostBinding {
    host: HostPattern,
    port: u16,
    tls: bool,
}

impl HostBinding {
    pub fn host(&self) -> &HostPattern {
        &self.host
    }

    /// Whether a secret may be sent to this host on this port, with TLS or without.
    pub fn permits(&self, host: &str, port: u16, tls: bool) -> bool {
        self.host.matches(host) && self.port == port && self.tls == tls
    }
}

/// What is put into requests to some hosts on their way out, where the sandbox does not see it. In all
/// values `{{SECRET:name}}` stands for a secret.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Route {
    pub hosts: Vec<HostPattern>,
    /// Empty: all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<String>,
    /// What the path begins with; empty: any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
    /// Replace those of the same name that the sandbox sends.
    #[serde(skip_serializing_if = "Pairs::is_empty")]
    pub headers: Pairs,
    /// Fields of a body that is a JSON object or a form.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub body: Pairs,
    /// Parameters behind the question mark.
    #[serde(skip_serializing_if = "Pairs::is_empty")]
    pub query: Pairs,
}

/// IPv4 addresses that begin alike: `192.0.2.0/24`, or one: `192.0.2.7`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AddressRange {
    first: Ipv4Addr,
    prefix: u8,
}

impl AddressRange {
    /// What no sandbox reaches unless operator and policy open it: unspecified, private, shared, loopback,
    /// the metadata service of one cloud that looks public, link-local (with the metadata services of
    /// clouds), private, special purpose, private, benchmarks, multicast and reserved with broadcast.
    pub const CLOSED: [Self; 11] = [
        Self::of([0, 0, 0, 0], 8),
        Self::of([10, 0, 0, 0], 8),
        Self::of([100, 64, 0, 0], 10),
        Self::of([127, 0, 0, 0], 8),
        Self::of([168, 63, 129, 16], 32),
        Self::of([169, 254, 0, 0], 16),
        Self::of([172, 16, 0, 0], 12),
        Self::of([192, 0, 0, 0], 24),
        Self::of([192, 168, 0, 0], 16),
        Self::of([198, 18, 0, 0], 15),
        Self::of([224, 0, 0, 0], 3),
    ];

    const fn of([a, b, c, d]: [u8; 4], prefix: u8) -> Self {
        Self { first: Ipv4Addr::new(a, b, c, d), prefix }
    }

    /// The lowest address of it.
    pub fn first(&self) -> Ipv4Addr {
        self.first
    }

    /// Whether this address is one of them.
    pub fn contains(&self, address: Ipv4Addr) -> bool {
        let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0);
        address.to_bits() & mask == self.first.to_bits()
    }

    /// Whether every address of `other` is one of them.
    pub fn covers(&self, other: &Self) -> bool {
        self.prefix <= other.prefix && self.contains(other.first)
    }

    /// How many leading bits all of them share.
    pub fn prefix(&self) -> u8 {
        self.prefix
    }
}

//! What a policy says about a name, a connection, an address and a request. Pure: nothing is asked,
//! resolved or told here.
//!
//! Invariants
//! - Deny wins over allow.
//! - A list of what is allowed that is not empty is all that is allowed, whatever `internet` says.
//! - A closed address ([`closed`]) is reached only through an allowed range that lies in a closed range
//!   itself and that the operator opened: `0.0.0.0/0` does not open what is private.
//! - A path that could mean different things to us and to the server is decided against.

mod closed;
mod host;
mod path;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::net::Ipv4Addr;

use torpor_protocol::{AddressRange, Destination, HostPattern, Network, WebRule};

pub(crate) use closed::{closed, closed_range};
pub(crate) use host::host_of;
pub(crate) use path::{begins, canonical};

/// Rules that are no entries of a list, as events name them.
pub(crate) mod word {
    /// `internet` alone decided.
    pub(crate) const INTERNET: &str = "internet";
    /// No entry of the list of what is allowed is about it.
    pub(crate) const NOT_ALLOWED: &str = "allow";
    /// A private, local or otherwise closed address.
    pub(crate) const PRIVATE: &str = "private";
    /// Hosts are what matters, and nothing says which host this is.
    pub(crate) const NO_HOST: &str = "no host";
    /// The path could be read in more than one way.
    pub(crate) const PATH: &str = "ambiguous path";
    /// The host that a request names is none.
    pub(crate) const BAD_HOST: &str = "bad host";
    /// Neither HTTP nor TLS, on a port that is for them.
    pub(crate) const PROTOCOL: &str = "protocol";
    /// The guest has as many connections as one may have.
    pub(crate) const CONNECTIONS: &str = "connections";
    /// It was open, and a new policy does not allow it.
    pub(crate) const CHANGED: &str = "policy changed";
    /// The firewall decided.
    pub(crate) const FIREWALL: &str = "firewall";
}

/// An answer, and what it is because of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) allowed: bool,
    /// An entry of a list as it was written, or one of [`word`].
    pub(crate) rule: String,
    /// Of a request: the path as it was decided about, if it mattered; send this one on.
    pub(crate) path: Option<String>,
}

impl Decision {
    fn allow(rule: impl Into<String>) -> Self {
        Self { allowed: true, rule: rule.into(), path: None }
    }

    fn deny(rule: impl Into<String>) -> Self {
        Self { allowed: false, rule: rule.into(), path: None }
    }
}

/// What is to be done with a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ConnectionDecision {
    /// It may be relayed unchanged, to where this says.
    Pass {
        rule: String,
        to: Goal,
    },
    /// Each of its requests must be decided about; if they can't be, it is refused.
    Intercept {
        rule: String,
    },
    Deny {
        rule: String,
    },
}

/// What a connection that is passed on is connected with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// What its host resolves to.
    Host,
    /// The very address that the guest wanted: an explicit range allows it, or hosts don't matter.
    Address,
}

/// How an address may be dialed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    Public,
    /// An explicit range opens this closed address.
    Private,
}

/// One entry about hosts.
#[derive(Debug)]
struct Entry {
    rule: WebRule,
    text: String,
}

/// Entries about hosts of one list, found by the host without a look at all of them.
#[derive(Debug, Default)]
struct Entries {
    all: Vec<Entry>,
    /// Those of one host each.
    exact: HashMap<String, Vec<usize>>,
    /// Those of everything below a host, by that host.
    below: HashMap<String, Vec<usize>>,
}

impl Entries {
    fn of(list: &[Destination]) -> Self {
        let mut entries = Self::default();
        for rule in list.iter().filter_map(Destination::web) {
            let index = entries.all.len();
            let shown = rule.host().to_string();
            match shown.strip_prefix("*.") {
                Some(name) => entries.below.entry(name.to_owned()).or_default().push(index),
                None => entries.exact.entry(shown).or_default().push(index),
            }
            entries.all.push(Entry { rule: rule.clone(), text: rule.to_string() });
        }
        entries
    }

    /// All that are about this host, the exact ones first.
    fn about<'a>(&'a self, host: &'a str) -> impl Iterator<Item = &'a Entry> {
        let parents = host.match_indices('.').map(|(at, _)| &host[at + 1..]);
        let exact = self.exact.get(host).into_iter().flatten();
        let below = parents.filter_map(|parent| self.below.get(parent)).flatten();
        exact.chain(below).filter_map(|index| self.all.get(*index))
    }

    fn plain<'a>(&'a self, host: &'a str) -> Option<&'a Entry> {
        self.about(host).find(|entry| !entry.rule.needs_the_request())
    }

    fn narrow<'a>(&'a self, host: &'a str) -> Option<&'a Entry> {
        self.about(host).find(|entry| entry.rule.needs_the_request())
    }
}

/// A policy, ready for quick answers.
#[derive(Debug)]
pub(crate) struct Policy {
    network: Network,
    /// Whether the list of what is allowed has entries: then it is all that is.
    listed: bool,
    allow: Entries,
    deny: Entries,
    allow_ranges: Vec<AddressRange>,
    deny_ranges: Vec<AddressRange>,
    /// Allowed ranges of closed addresses that the operator opened.
    opened: Vec<AddressRange>,
}

impl Policy {
    /// `private` is what the operator lets policies open.
    pub(crate) fn new(network: &Network, private: &[AddressRange]) -> Self {
        let ranges = |list: &[Destination]| -> Vec<AddressRange> {
            list.iter().filter_map(Destination::range).copied().collect()
        };
        let (near, far): (Vec<_>, Vec<_>) =
            ranges(&network.allow).into_iter().partition(closed_range);
        let operator_opens = |range: &AddressRange| private.iter().any(|open| open.covers(range));
        Self {
            network: network.clone(),
            listed: !network.allow.is_empty(),
            allow: Entries::of(&network.allow),
            deny: Entries::of(&network.deny),
            allow_ranges: far,
            deny_ranges: ranges(&network.deny),
            opened: near.into_iter().filter(operator_opens).collect(),
        }
    }

    pub(crate) fn network(&self) -> &Network {
        &self.network
    }

    /// Whether lists name hosts, so that it matters which host something is for.
    pub(crate) fn by_name(&self) -> bool {
        !self.allow.all.is_empty() || !self.deny.all.is_empty()
    }

    /// Whether the name server may ask for this name at all. What can never be reached is not even
    /// asked for: a question is a message, too.
    pub(crate) fn question(&self, name: &str) -> Decision {
        if let Some(entry) = self.deny.plain(name) {
            return Decision::deny(&entry.text);
        }
        if !self.listed {
            return self.internet();
        }
        if let Some(entry) = self.allow.about(name).next() {
            return Decision::allow(&entry.text);
        }
        match self.allow_ranges.iter().find(|range| range.prefix() == 0) {
            Some(everything) => Decision::allow(everything.to_string()),
            None => Decision::deny(word::NOT_ALLOWED),
        }
    }

    /// About a connection to this address that says which host it is for.
    pub(crate) fn connection(&self, host: &str, address: Ipv4Addr) -> ConnectionDecision {
        if let Some(rule) = self.address_denied(address) {
            return ConnectionDecision::Deny { rule };
        }
        if let Some(entry) = self.deny.plain(host) {
            return ConnectionDecision::Deny { rule: entry.text.clone() };
        }
        let decision = self.undenied_connection(host, address);
        match (self.deny.narrow(host), decision) {
            (_, ConnectionDecision::Deny { rule }) => ConnectionDecision::Deny { rule },
            (Some(entry), _) => ConnectionDecision::Intercept { rule: entry.text.clone() },
            (None, decision) => decision,
        }
    }

    /// About a connection that nothing denies as a whole.
    fn undenied_connection(&self, host: &str, address: Ipv4Addr) -> ConnectionDecision {
        if !self.listed {
            return match self.internet() {
                Decision { allowed: true, rule, .. } => {
                    ConnectionDecision::Pass { rule, to: Goal::Host }
                }
                Decision { rule, .. } => ConnectionDecision::Deny { rule },
            };
        }
        if let Some(entry) = self.allow.plain(host) {
            return ConnectionDecision::Pass { rule: entry.text.clone(), to: Goal::Host };
        }
        if let Some(rule) = self.range_allows(address) {
            return ConnectionDecision::Pass { rule, to: Goal::Address };
        }
        match self.allow.narrow(host) {
            Some(entry) => ConnectionDecision::Intercept { rule: entry.text.clone() },
            None => ConnectionDecision::Deny { rule: word::NOT_ALLOWED.to_owned() },
        }
    }

    /// About a connection that does not say which host it is for. `names` are those that the guest was
    /// answered this address for; the one that decided comes with the answer.
    pub(crate) fn nameless(
        &self,
        names: &[String],
        address: Ipv4Addr,
    ) -> (ConnectionDecision, Option<String>) {
        if let Some(rule) = self.address_denied(address) {
            return (ConnectionDecision::Deny { rule }, None);
        }
        // One of them is denied: it may be this one.
        let denied = |name: &&String| self.deny.about(name).next().is_some();
        if let Some(name) = names.iter().find(denied) {
            return (self.connection(name, address), Some(name.clone()));
        }
        if let Some(rule) = self.range_allows(address) {
            return (ConnectionDecision::Pass { rule, to: Goal::Address }, None);
        }
        if !self.by_name() {
            return match self.address(None, address) {
                Ok(_) => (
                    ConnectionDecision::Pass { rule: self.internet().rule, to: Goal::Address },
                    None,
                ),
                Err(rule) => (ConnectionDecision::Deny { rule }, None),
            };
        }
        let decisions = names.iter().map(|name| (self.connection(name, address), name));
        let best = decisions.min_by_key(|(decision, _)| match decision {
            ConnectionDecision::Pass { .. } => 0,
            ConnectionDecision::Intercept { .. } => 1,
            ConnectionDecision::Deny { .. } => 2,
        });
        match best {
            Some((decision, name)) => (decision, Some(name.clone())),
            None if !self.listed && !self.network.internet => {
                (ConnectionDecision::Deny { rule: word::INTERNET.to_owned() }, None)
            }
            None => (ConnectionDecision::Deny { rule: word::NO_HOST.to_owned() }, None),
        }
    }

    /// About a request to this host, as it was sent with or without a port, on a connection to this
    /// address. `path` is without the query.
    pub(crate) fn request(
        &self,
        method: &str,
        host: &str,
        path: &str,
        address: Ipv4Addr,
    ) -> Decision {
        let Some(host) = host_of(host) else { return Decision::deny(word::BAD_HOST) };
        let host = host.as_str();
        if let Some(rule) = self.address_denied(address) {
            return Decision::deny(rule);
        }
        let method = method.to_ascii_uppercase();
        let matters = self.paths_matter(host);
        let path = if matters { canonical(path) } else { None };
        let fits = |entry: &&Entry| {
            let methods = entry.rule.methods();
            let method_fits = methods.is_empty() || methods.contains(&method);
            let path_fits = match (entry.rule.path(), &path) {
                (None, _) => true,
                (Some(prefix), Some(path)) => begins(path, prefix),
                (Some(_), None) => false,
            };
            method_fits && path_fits
        };
        if matters && path.is_none() {
            return Decision::deny(word::PATH);
        }
        let mut decision = match self.deny.about(host).find(fits) {
            Some(entry) => Decision::deny(&entry.text),
            None => self.undenied(self.allow.about(host).find(fits), address),
        };
        decision.path = path;
        decision
    }

    /// About a request that nothing denies, of which this entry says that it is allowed.
    fn undenied(&self, entry: Option<&Entry>, address: Ipv4Addr) -> Decision {
        if !self.listed {
            return self.internet();
        }
        if let Some(entry) = entry {
            return Decision::allow(&entry.text);
        }
        match self.range_allows(address) {
            Some(rule) => Decision::allow(rule),
            None => Decision::deny(word::NOT_ALLOWED),
        }
    }

    /// Whether an entry about this host has a path.
    fn paths_matter(&self, host: &str) -> bool {
        let with_path = |entry: &Entry| entry.rule.path().is_some();
        self.deny.about(host).any(with_path) || self.allow.about(host).any(with_path)
    }

    /// Whether this address, which the host resolved to if there is one, may be dialed, and as what.
    /// The rule that is against it otherwise. The host was decided about before.
    pub(crate) fn address(&self, host: Option<&str>, address: Ipv4Addr) -> Result<Reach, String> {
        if let Some(rule) = self.address_denied(address) {
            return Err(rule);
        }
        let reach = if closed(address) { Reach::Private } else { Reach::Public };
        let named = host.is_some_and(|host| self.allow.about(host).next().is_some());
        if named || self.range_allows(address).is_some() {
            return Ok(reach);
        }
        match (self.listed, self.network.internet) {
            (true, _) => Err(word::NOT_ALLOWED.to_owned()),
            (false, true) => Ok(reach),
            (false, false) => Err(word::INTERNET.to_owned()),
        }
    }

    /// Whether the address alone is reason enough to refuse.
    fn address_denied(&self, address: Ipv4Addr) -> Option<String> {
        if let Some(range) = self.deny_ranges.iter().find(|range| range.contains(address)) {
            return Some(range.to_string());
        }
        (closed(address) && !self.opens(address)).then(|| word::PRIVATE.to_owned())
    }

    /// Whether the policy and the operator both name this address.
    fn opens(&self, address: Ipv4Addr) -> bool {
        self.opened.iter().any(|range| range.contains(address))
    }

    /// The range that explicitly allows this address, which is not denied.
    fn range_allows(&self, address: Ipv4Addr) -> Option<String> {
        let list = if closed(address) { &self.opened } else { &self.allow_ranges };
        list.iter().find(|range| range.contains(address)).map(ToString::to_string)
    }

    /// Whether an answer to a name question may tell this address: never a closed one that the policy
    /// does not open.
    pub(crate) fn may_tell(&self, address: Ipv4Addr) -> bool {
        !closed(address) || self.opens(address)
    }

    /// Whether a route says that requests to this host are to be changed.
    pub(crate) fn routed(&self, host: &str) -> bool {
        let among = |patterns: &[HostPattern]| patterns.iter().any(|one| one.matches(host));
        self.network.routes.iter().any(|route| among(&route.hosts))
    }

    fn internet(&self) -> Decision {
        Decision { allowed: self.network.internet, rule: word::INTERNET.to_owned(), path: None }
    }
}

//! What the guest of a slot reaches, as the firewall needs it.

use std::net::Ipv4Addr;

use torpor_protocol::{AddressRange, Destination, Network as Policy, NetworkLimits};

use super::closed::Closed;
use super::conntrack::Flow;
use super::names::GATEWAY;

/// Ports of UDP that a proxied guest never reaches: names, and what is encrypted from its first packet
/// on (QUIC, names over TLS and QUIC). Whoever reads names could not see them.
pub(super) const HIDDEN_PORTS: [u16; 3] = [53, 443, 853];
/// More bytes in a second than any host has; beyond some 18 GB the kernel can't calculate with it.
const RATE_MAX: u64 = 10_000_000_000;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// A policy without anything that makes no difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reach {
    /// Whether somebody else decides about its TCP and its questions for names: both are led to the
    /// egress proxy, and the rest of this is about all other protocols.
    pub(super) proxied: bool,
    /// Whether names can be asked for, of the host's name server.
    pub(super) names: bool,
    pub(super) allow: Allow,
    /// What is closed to others; no range lies in another.
    pub(super) private: Vec<AddressRange>,
    /// What is not reached although it is allowed; no range lies in another.
    pub(super) deny: Vec<AddressRange>,
    pub(super) limits: NetworkLimits,
}

/// Public addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Allow {
    All,
    /// No range lies in another.
    Only(Vec<AddressRange>),
}

impl Reach {
    pub(super) const OPEN: Self = Self::whole(true, Allow::All);
    pub(super) const SHUT: Self = Self::whole(false, Allow::Only(Vec::new()));

    const fn whole(names: bool, allow: Allow) -> Self {
        let limits =
            NetworkLimits { bytes_per_sec: None, connections_per_sec: None, connections: None };
        Self { proxied: false, names, allow, private: Vec::new(), deny: Vec::new(), limits }
    }

    /// Names are a service of the gateway and not of an address in the world: `internet` alone decides
    /// about them, unless every address there is is denied.
    pub(super) fn of(policy: &Policy, closed: &Closed) -> Self {
        let everything = |ranges: &[AddressRange]| ranges.iter().any(|range| range.prefix() == 0);
        let ranges =
            |list: &[Destination]| list.iter().filter_map(Destination::range).copied().collect();
        let (allowed, denied): (Vec<_>, Vec<_>) = (ranges(&policy.allow), ranges(&policy.deny));
        let proxied = policy.is_proxied();
        let nothing = !policy.internet && policy.allow.is_empty();
        if !proxied && (nothing || everything(&denied)) {
            return Self::SHUT;
        }
        // What a proxied guest reaches past the egress proxy is named by an address, or not at all.
        let all = everything(&allowed) || (policy.allow.is_empty() && !proxied);
        let (private, public): (Vec<_>, Vec<_>) =
            allowed.into_iter().partition(|range| closed.covers(range));
        Self {
            proxied,
            names: policy.internet && !proxied,
            allow: if all { Allow::All } else { Allow::Only(outermost(public)) },
            private: outermost(private),
            deny: outermost(denied),
            limits: NetworkLimits {
                bytes_per_sec: policy.limits.bytes_per_sec.filter(|rate| *rate <= RATE_MAX),
                ..policy.limits
            },
        }
    }

    /// Whether it takes more than a group to say it.
    pub(super) fn is_list(&self) -> bool {
        *self != Self::OPEN && *self != Self::SHUT
    }

    /// Whether a connection that the guest has goes on.
    pub(super) fn keeps(&self, flow: &Flow, proxy: Ipv4Addr, closed: &Closed) -> bool {
        let opened = |to| !closed.contains(to) || among(&self.private, to);
        if flow.answers == proxy {
            return self.proxied && (flow.to == GATEWAY || opened(flow.to));
        }
        if flow.to == GATEWAY {
            return self.names;
        }
        let led = flow.protocol == TCP;
        let hidden = flow.protocol == UDP && HIDDEN_PORTS.contains(&flow.port);
        if self.proxied && (led || hidden) {
            return false;
        }
        opened(flow.to) && self.covers(flow.to)
    }

    fn covers(&self, address: Ipv4Addr) -> bool {
        let allowed = match &self.allow {
            Allow::All => true,
            Allow::Only(ranges) => among(ranges, address) || among(&self.private, address),
        };
        allowed && !among(&self.deny, address)
    }
}

fn among(ranges: &[AddressRange], address: Ipv4Addr) -> bool {
    ranges.iter().any(|range| range.contains(address))
}

/// The same addresses in ranges of which none lies in another: two ranges can't overlap otherwise.
fn outermost(mut ranges: Vec<AddressRange>) -> Vec<AddressRange> {
    // Of those that begin alike the widest comes first.
    ranges.sort_unstable();
    let mut kept: Vec<AddressRange> = Vec::with_capacity(ranges.len());
    for range in ranges {
        if kept.last().is_none_or(|last| !last.covers(&range)) {
            kept.push(range);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    const EGRESS_PROXY: Ipv4Addr = Ipv4Addr::new(10, 213, 3, 255);

    fn ranges(texts: &[&str]) -> Vec<AddressRange> {
        texts.iter().map(|text| text.parse().expect("a range")).collect()
    }

    fn reach(internet: bool, allow: &[&str], deny: &[&str]) -> Reach {
        let list = |texts: &[&str]| -> Vec<Destination> {
            texts.iter().map(|text| text.parse().expect("an entry")).collect()
        };
        let policy = Policy { internet, allow: list(allow), deny: list(deny), ..Policy::default() };
        Reach::of(&policy, &Closed::new(&[]))
    }

    fn direct(protocol: u8, to: &str, port: u16) -> Flow {
        let to = to.parse().expect("an address");
        Flow { protocol, to, port, answers: to }
    }

    fn keeps(reach: &Reach, flow: Flow) -> bool {
        reach.keeps(&flow, EGRESS_PROXY, &Closed::new(&[]))
    }

    #[test]
    fn what_makes_no_difference_is_left_out() {
        let closed = Closed::new(&[]);
        assert_eq!(Reach::of(&Policy::default(), &closed), Reach::OPEN);
        assert_eq!(Reach::of(&Policy::CLOSED, &closed), Reach::SHUT);
        assert_eq!(reach(true, &["0.0.0.0/0", "192.0.2.1"], &[]), Reach::OPEN);
        assert_eq!(reach(false, &[], &["192.0.2.1"]), Reach::SHUT);
        assert_eq!(reach(true, &["192.0.2.1"], &["0.0.0.0/0"]), Reach::SHUT);
        let inside = ["192.0.2.7", "192.0.2.0/24", "192.0.2.128/25", "192.0.2.0", "192.0.3.0/24"];
        let allow = Allow::Only(ranges(&["192.0.2.0/24", "192.0.3.0/24"]));
        assert_eq!(reach(false, &inside, &[]), Reach { allow, ..Reach::SHUT });
        let limits = NetworkLimits { bytes_per_sec: Some(u64::MAX), ..NetworkLimits::default() };
        assert_eq!(Reach::of(&Policy { limits, ..Policy::OPEN }, &closed), Reach::OPEN);
    }

    #[test]
    fn a_list_of_what_is_allowed_is_all_that_is_reached() {
        for internet in [true, false] {
            let reach = reach(internet, &["192.0.2.0/24"], &["192.0.2.9"]);
            assert_eq!(reach.names, internet, "names are another matter");
            assert_eq!(keeps(&reach, direct(UDP, "10.0.0.1", 53)), internet);
            for (address, kept) in [("192.0.2.8", true), ("192.0.2.9", false), ("8.8.8.8", false)] {
                assert_eq!(keeps(&reach, direct(TCP, address, 443)), kept, "{address}");
            }
        }
    }

    #[test]
    fn names_are_asked_for_although_their_servers_network_is_denied() {
        let reach = reach(true, &[], &["10.0.0.0/8", "8.8.8.8"]);
        assert!(keeps(&reach, direct(UDP, "10.0.0.1", 53)));
        assert!(keeps(&reach, direct(UDP, "8.8.4.4", 53)));
        assert!(!keeps(&reach, direct(UDP, "8.8.8.8", 53)));
    }

    #[test]
    fn a_private_range_is_open_only_to_whom_it_is_named() {
        let named = reach(true, &["0.0.0.0/0", "192.168.7.0/24"], &["192.168.7.1"]);
        assert_eq!((&named.allow, &named.private), (&Allow::All, &ranges(&["192.168.7.0/24"])));
        for (address, kept) in [
            ("192.168.7.7", true),
            ("192.168.7.1", false),
            ("192.168.8.8", false),
            ("1.1.1.1", true),
        ] {
            assert_eq!(keeps(&named, direct(TCP, address, 80)), kept, "{address}");
            assert_eq!(keeps(&Reach::OPEN, direct(TCP, address, 80)), address == "1.1.1.1");
        }
        let only = reach(false, &["192.168.7.0/24"], &[]);
        assert_eq!(only.allow, Allow::Only(vec![]));
        assert!(keeps(&only, direct(TCP, "192.168.7.7", 80)));
    }

    #[test]
    fn a_proxied_guest_keeps_what_goes_through_the_egress_proxy_and_little_else() {
        let proxied = reach(true, &["api.example.com", "192.0.2.0/24"], &[]);
        assert!(proxied.proxied && !proxied.names);
        let turned = |to: &str| Flow { answers: EGRESS_PROXY, ..direct(TCP, to, 443) };
        for (flow, kept) in [
            (turned("8.8.8.8"), true),
            (turned("10.0.0.1"), true),
            (turned("192.168.1.1"), false),
            (direct(TCP, "192.0.2.1", 443), false),
            (direct(UDP, "192.0.2.1", 443), false),
            (direct(UDP, "192.0.2.1", 123), true),
            (direct(UDP, "192.0.3.1", 123), false),
            (direct(UDP, "10.0.0.1", 53), false),
        ] {
            assert_eq!(keeps(&proxied, flow), kept, "{flow:?}");
        }
        assert!(!keeps(&Reach::OPEN, turned("8.8.8.8")), "who is not proxied has nothing there");
        let open = reach(true, &[], &["example.com"]);
        assert_eq!(open.allow, Allow::Only(vec![]), "addresses are named, or not reached");
        let all = reach(true, &["0.0.0.0/0", "example.com"], &[]);
        assert_eq!(all.allow, Allow::All);
    }
}

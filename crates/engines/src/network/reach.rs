//! What the guest of a slot reaches, as the firewall needs it.

use std::net::Ipv4Addr;

use torpor_protocol::{AddressRange, Destination, Network as Policy};

use super::names::GATEWAY;

/// A policy without anything that makes no difference. What is private, near or ours is reached by
/// nobody, whatever stands here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reach {
    /// Whether names can be asked for.
    pub(super) names: bool,
    pub(super) allow: Allow,
    /// What is not reached although it is allowed; no range lies in another.
    pub(super) deny: Vec<AddressRange>,
}

/// Public addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Allow {
    All,
    /// No range lies in another.
    Only(Vec<AddressRange>),
}

impl Reach {
    pub(super) const OPEN: Self = Self { names: true, allow: Allow::All, deny: Vec::new() };
    pub(super) const SHUT: Self =
        Self { names: false, allow: Allow::Only(Vec::new()), deny: Vec::new() };

    /// Names are a service of the gateway and not of an address in the world: `internet` alone decides
    /// about them, unless every address there is is denied.
    pub(super) fn of(policy: &Policy) -> Self {
        let everything = |ranges: &[AddressRange]| ranges.iter().any(|range| range.prefix() == 0);
        let ranges =
            |list: &[Destination]| list.iter().filter_map(Destination::range).copied().collect();
        let (allowed, denied): (Vec<_>, Vec<_>) = (ranges(&policy.allow), ranges(&policy.deny));
        let nothing = !policy.internet && policy.allow.is_empty();
        if nothing || everything(&denied) {
            return Self::SHUT;
        }
        let all = policy.allow.is_empty() || everything(&allowed);
        let allow = if all { Allow::All } else { Allow::Only(outermost(&allowed)) };
        Self { names: policy.internet, allow, deny: outermost(&denied) }
    }

    /// Whether it takes more than a group to say it.
    pub(super) fn is_list(&self) -> bool {
        *self != Self::OPEN && *self != Self::SHUT
    }

    /// Whether what the guest sends there gets through, if the address is a public one.
    pub(super) fn covers(&self, address: Ipv4Addr) -> bool {
        if address == GATEWAY {
            return self.names;
        }
        let among = |ranges: &[AddressRange]| ranges.iter().any(|range| range.contains(address));
        let allowed = match &self.allow {
            Allow::All => true,
            Allow::Only(ranges) => among(ranges),
        };
        allowed && !among(&self.deny)
    }
}

/// The same addresses in ranges of which none lies in another: two ranges can't overlap otherwise.
fn outermost(ranges: &[AddressRange]) -> Vec<AddressRange> {
    let mut sorted = ranges.to_vec();
    // Of those that begin alike the widest comes first.
    sorted.sort_unstable();
    let mut kept: Vec<AddressRange> = Vec::with_capacity(sorted.len());
    for range in sorted {
        if kept.last().is_none_or(|last| !last.covers(&range)) {
            kept.push(range);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(texts: &[&str]) -> Vec<AddressRange> {
        texts.iter().map(|text| text.parse().expect("a range")).collect()
    }

    fn reach(internet: bool, allow: &[&str], deny: &[&str]) -> Reach {
        let list = |texts| ranges(texts).into_iter().map(Destination::Range).collect();
        Reach::of(&Policy { internet, allow: list(allow), deny: list(deny), ..Policy::default() })
    }

    #[test]
    fn what_makes_no_difference_is_left_out() {
        assert_eq!(Reach::of(&Policy::default()), Reach::OPEN);
        assert_eq!(Reach::of(&Policy::CLOSED), Reach::SHUT);
        assert_eq!(reach(true, &["0.0.0.0/0", "192.0.2.1"], &[]), Reach::OPEN);
        assert_eq!(reach(false, &[], &["192.0.2.1"]), Reach::SHUT);
        assert_eq!(reach(true, &["192.0.2.1"], &["0.0.0.0/0"]), Reach::SHUT);
        let inside = ["192.0.2.7", "192.0.2.0/24", "192.0.2.128/25", "192.0.2.0", "192.0.3.0/24"];
        let allow = Allow::Only(ranges(&["192.0.2.0/24", "192.0.3.0/24"]));
        assert_eq!(reach(false, &inside, &[]), Reach { names: false, allow, deny: vec![] });
    }

    #[test]
    fn a_list_of_what_is_allowed_is_all_that_is_reached() {
        for internet in [true, false] {
            let reach = reach(internet, &["192.0.2.0/24"], &["192.0.2.9"]);
            assert_eq!(reach.names, internet, "names are another matter");
            assert_eq!(reach.covers(GATEWAY), internet);
            for (address, covered) in
                [("192.0.2.8", true), ("192.0.2.9", false), ("8.8.8.8", false)]
            {
                assert_eq!(
                    reach.covers(address.parse().expect("an address")),
                    covered,
                    "{address}"
                );
            }
        }
    }

    #[test]
    fn names_are_asked_for_although_their_servers_network_is_denied() {
        let reach = reach(true, &[], &["10.0.0.0/8", "8.8.8.8"]);
        assert!(reach.covers(GATEWAY));
        assert!(reach.covers(Ipv4Addr::new(8, 8, 4, 4)));
        assert!(!reach.covers(Ipv4Addr::new(8, 8, 8, 8)));
    }
}

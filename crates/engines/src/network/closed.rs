//! The addresses that nobody reaches unless a policy names them.

use std::net::Ipv4Addr;

use torpor_protocol::AddressRange;

use super::NetworkError;
use super::links::Links;

/// What stays closed whatever a policy names: the loopback of the host, and the guests of all
/// installations with their egress proxies.
pub(super) const NEVER: [&str; 2] = ["127.0.0.0/8", "10.213.0.0/16"];
/// The same for the guests themselves: the network in which every one of them is, with its gateway.
pub(super) const INSIDE: &str = "10.0.0.0/30";

/// These, and the networks and addresses of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Closed(Vec<AddressRange>);

impl Closed {
    /// `near`: the networks that the host is itself part of, and its own addresses.
    pub(super) fn new(near: &[AddressRange]) -> Self {
        Self(AddressRange::CLOSED.iter().chain(near).copied().collect())
    }

    pub(super) fn contains(&self, address: Ipv4Addr) -> bool {
        self.0.iter().any(|range| range.contains(address))
    }

    /// Whether all of it is closed: naming it opens it.
    pub(super) fn covers(&self, range: &AddressRange) -> bool {
        self.0.iter().any(|closed| closed.covers(range))
    }

    pub(super) fn ranges(&self) -> &[AddressRange] {
        &self.0
    }
}

/// The addresses that a policy opens if it names them, or a part of them: whoever takes policies from
/// people decides beforehand which of them may be named. All others are public.
pub async fn closed_ranges() -> Result<Vec<AddressRange>, NetworkError> {
    let near = Links::open()?.surroundings().await?.near;
    Ok(Closed::new(&near).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_closed_only_if_all_of_it_is() {
        let closed = Closed::new(&["203.0.113.0/24".parse().expect("a range")]);
        for (text, covered) in [
            ("10.0.0.0/8", true),
            ("10.7.7.7", true),
            ("203.0.113.9", true),
            ("203.0.112.0/23", false),
            ("0.0.0.0/0", false),
            ("198.51.100.7", false),
        ] {
            assert_eq!(closed.covers(&text.parse().expect("a range")), covered, "{text}");
        }
        assert!(closed.contains(Ipv4Addr::new(169, 254, 169, 254)));
        assert!(!closed.contains(Ipv4Addr::new(8, 8, 8, 8)));
    }
}

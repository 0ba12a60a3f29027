//! Addresses that no guest talks to unless its policy opens them and the operator lets it: the same
//! that the firewall refuses.

use std::net::Ipv4Addr;

use torpor_protocol::AddressRange;

/// Whether no guest talks to this address by itself.
pub(crate) fn closed(address: Ipv4Addr) -> bool {
    AddressRange::CLOSED.iter().any(|range| range.contains(address))
}

/// Whether all of this range lies in one closed range: then it stands for closed addresses, and not for
/// some that happen to be in it.
pub(crate) fn closed_range(range: &AddressRange) -> bool {
    AddressRange::CLOSED.iter().any(|closed| closed.covers(range))
}

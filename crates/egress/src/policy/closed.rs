//! Addresses that no guest talks to unless its policy opens them and the operator lets it: the same
//! that the firewall refuses.

use std::net::Ipv4Addr;

use torpor_protocol::AddressRange;

/// First address and length of the prefix: unspecified, private, shared, loopback, the metadata service
/// of one cloud that looks public, link-local (with the metadata services of clouds), private, special
/// purpose, private, benchmarks, multicast and reserved with broadcast.
const CLOSED: [([u8; 4], u8); 11] = [
    ([0, 0, 0, 0], 8),
    ([10, 0, 0, 0], 8),
    ([100, 64, 0, 0], 10),
    ([127, 0, 0, 0], 8),
    ([168, 63, 129, 16], 32),
    ([169, 254, 0, 0], 16),
    ([172, 16, 0, 0], 12),
    ([192, 0, 0, 0], 24),
    ([192, 168, 0, 0], 16),
    ([198, 18, 0, 0], 15),
    ([224, 0, 0, 0], 3),
];

/// Whether no guest talks to this address by itself.
pub(crate) fn closed(address: Ipv4Addr) -> bool {
    CLOSED.iter().any(|(first, prefix)| alike(address, Ipv4Addr::from(*first), *prefix))
}

/// Whether all of this range lies in one closed range: then it stands for closed addresses, and not for
/// some that happen to be in it.
pub(crate) fn closed_range(range: &AddressRange) -> bool {
    CLOSED.iter().any(|(first, prefix)| {
        *prefix <= range.prefix() && alike(range.first(), Ipv4Addr::from(*first), *prefix)
    })
}

fn alike(one: Ipv4Addr, other: Ipv4Addr, prefix: u8) -> bool {
    let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
    one.to_bits() & mask == other.to_bits() & mask
}

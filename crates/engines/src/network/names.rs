//! Names, addresses and hardware addresses: everything that is chosen once and for all.
//!
//! Every slot looks the same from inside, so that a machine can go to sleep on one and wake up on
//! another. Outside each slot has an address of its own.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use torpor_lifecycle::engine::EgressProxy;

use super::NetworkError;

/// The guest's own address.
pub(super) const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
/// Where the guest sends everything, and where it asks for names. No interface carries it.
pub(super) const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
/// Of the network of these two.
pub(super) const PREFIX: u8 = 30;
/// Locally administered addresses, the same in every slot: a pair has no other neighbours.
pub(super) const GUEST_MAC: [u8; 6] = [0x02, 0x74, 0x70, 0, 0, 2];
pub(super) const GATEWAY_MAC: [u8; 6] = [0x02, 0x74, 0x70, 0, 0, 1];
/// The parked end itself is nobody: frames for the guest are read by its packet socket, and the
/// kernel of the parking namespace ignores them as meant for somebody else.
pub(super) const FAR_MAC: [u8; 6] = [0x02, 0x74, 0x70, 0, 0, 3];

/// How many installations one host can carry.
pub(super) const BLOCKS: u8 = 64;
/// How many slots one installation can have: a block is a /22.
pub(super) const SLOTS: u16 = 1022;
/// Prefix length of a block.
const BLOCK_PREFIX: u8 = 22;

/// Where connections of proxied guests arrive: the last address of the block, which no slot has.
const EGRESS_PROXY: u16 = SLOTS + 1;
/// Below 1024, so that nobody but root can sit there first, and usual for nothing: a server of the
/// host that listens everywhere is not in the way.
const CONNECTIONS_PORT: u16 = 213;
const NAMES_PORT: u16 = 214;
/// Marks of what is sent for guests; the block's number and a digit follow.
const MARKS: u32 = 0x7470_0000;
/// The first of the groups that tell what the firewall decided, one for each block.
const LOG_GROUPS: u16 = 21_300;

/// Numbers of far ends begin far above those of a host's links, which count from one.
const FAR_INDICES: u32 = 1_000_000_000;

/// Numbers of cards: in the names of their devices, which are in one place for all namespaces of a
/// host, so each installation has its own.
const CARD_INDICES: u32 = 1_100_000_000;

/// Where named network namespaces are, by convention of all tools.
const NAMESPACES: &str = "/run/netns";

/// The names of one installation on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Names {
    tag: String,
}

impl Names {
    /// Tags become parts of names and of firewall scripts: nothing but eight letters and digits.
    pub(super) fn new(tag: &str) -> Result<Self, NetworkError> {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        if tag.len() != 8 || !tag.bytes().all(plain) {
            return Err(NetworkError::Tag(tag.to_owned()));
        }
        Ok(Self { tag: tag.to_owned() })
    }

    pub(super) fn tag(&self) -> &str {
        &self.tag
    }

    pub(super) fn namespace(&self) -> PathBuf {
        Path::new(NAMESPACES).join(format!("torpor-{}", self.tag))
    }

    pub(super) fn table(&self) -> String {
        format!("torpor_{}", self.tag)
    }

    /// Of all host ends. The kernel allows 15 bytes with the number.
    pub(super) fn link_prefix(&self) -> String {
        format!("tp{}-", &self.tag[..6])
    }

    pub(super) fn link(&self, slot: u16) -> String {
        format!("{}{slot}", self.link_prefix())
    }

    /// Of the egress proxy's address on the loopback link.
    pub(super) fn label(&self) -> String {
        format!("lo:{}", self.tag)
    }

    /// The slot that a link belongs to, if it is one of ours.
    pub(super) fn slot_of(&self, link: &str) -> Option<u16> {
        let number = link.strip_prefix(&self.link_prefix())?.parse().ok()?;
        (1..=SLOTS).contains(&number).then_some(number)
    }
}

/// The parked end of a slot, in the parking namespace.
pub(super) fn far_link(slot: u16) -> String {
    format!("far{slot}")
}

/// The kernel's number for it: one that no host end has. For two ends with equal numbers the kernel
/// takes up to a second until it lets packets pass.
pub(super) fn far_index(slot: u16) -> u32 {
    FAR_INDICES + u32::from(slot)
}

/// The network card on it, if it has one.
pub(super) fn card_link(slot: u16) -> String {
    format!("card{slot}")
}

/// The addresses of one installation: a part of 10.213.0.0/16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Block(pub(super) u8);

impl Block {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..BLOCKS).map(Self)
    }

    fn base(self) -> u32 {
        u32::from(Ipv4Addr::new(10, 213, 0, 0)) + (u32::from(self.0) << (32 - BLOCK_PREFIX))
    }

    /// What the slot's guest is called outside of it.
    pub(super) fn address(self, slot: u16) -> Ipv4Addr {
        Ipv4Addr::from(self.base() + u32::from(slot))
    }

    /// Whether a guest of this block can have this address.
    pub(super) fn has_guest(self, address: Ipv4Addr) -> bool {
        let slot = u32::from(address).wrapping_sub(self.base());
        (1..=u32::from(SLOTS)).contains(&slot)
    }

    pub(super) fn egress_proxy(self) -> EgressProxy {
        let mark = MARKS | u32::from(self.0) << 4;
        EgressProxy {
            address: self.address(EGRESS_PROXY),
            connections: CONNECTIONS_PORT,
            names: NAMES_PORT,
            public_mark: mark | 1,
            private_mark: mark | 2,
        }
    }

    /// A number that no slot of another installation has.
    pub(super) fn place(self, slot: u16) -> u16 {
        (u16::from(self.0) << (32 - BLOCK_PREFIX)) + slot
    }

    /// The kernel's number for the slot's network card.
    pub(super) fn card_index(self, slot: u16) -> u32 {
        CARD_INDICES + u32::from(self.place(slot))
    }

    /// Where the kernel tells what the firewall decided.
    pub(super) fn log_group(self) -> u16 {
        LOG_GROUPS + u16::from(self.0)
    }

    /// As text, for the firewall.
    pub(super) fn network(self) -> String {
        format!("{}/{BLOCK_PREFIX}", Ipv4Addr::from(self.base()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_the_kernel_and_lead_back_to_the_slot() {
        let names = Names::new("0a1b2c3d").expect("a tag");
        assert!(names.link(SLOTS).len() <= 15 && names.label().len() <= 15);
        assert_eq!(names.slot_of(&names.link(17)), Some(17));
        for stranger in ["tp0a1b2c-0", "tp0a1b2c-1023", "tp0a1b2c-x", "tpffffff-1", "eth0"] {
            assert_eq!(names.slot_of(stranger), None, "{stranger}");
        }
    }

    #[test]
    fn a_tag_that_could_mean_something_to_the_firewall_is_refused() {
        for tag in ["", "short", "toolonganame", "0a1b2c3\n", "0a1b;c3d", "0A1B2C3D", "../../.."] {
            assert!(Names::new(tag).is_err(), "{tag:?}");
        }
    }

    #[test]
    fn blocks_do_not_overlap_and_stay_in_their_range() {
        let first = Block(0);
        assert_eq!(first.network(), "10.213.0.0/22");
        assert_eq!(first.address(1), Ipv4Addr::new(10, 213, 0, 1));
        assert_eq!(first.address(SLOTS), Ipv4Addr::new(10, 213, 3, 254));
        assert_eq!(Block(1).address(1), Ipv4Addr::new(10, 213, 4, 1));
        assert_eq!(Block(BLOCKS - 1).address(SLOTS), Ipv4Addr::new(10, 213, 255, 254));
        assert_eq!(first.egress_proxy().address, Ipv4Addr::new(10, 213, 3, 255));
        assert_ne!(first.egress_proxy().public_mark, Block(1).egress_proxy().public_mark);
        assert_ne!(first.card_index(SLOTS), Block(1).card_index(1));
        assert_eq!(Block(BLOCKS - 1).place(SLOTS), u16::MAX - 1);
        assert!(i32::try_from(Block(BLOCKS - 1).card_index(SLOTS)).is_ok(), "as the kernel has it");
        for (address, has) in [
            (first.address(1), true),
            (first.address(SLOTS), true),
            (first.egress_proxy().address, false),
            (first.address(0), false),
            (Block(1).address(1), false),
        ] {
            assert_eq!(first.has_guest(address), has, "{address}");
        }
    }
}

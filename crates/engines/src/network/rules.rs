//! The firewall of one installation, as text for `nft`.
//!
//! ```text
//!  guest ─▶ prerouting: source must be 10.0.0.2, becomes the slot's own address   (before tracking)
//!           names:      10.0.0.1 port 53 becomes the host's name server
//!           forward:    outbound ─ refuse what is private, near or ours; let the rest out
//!           hide:       behind the host's address
//!  guest ◀─ postrouting: the slot's own address becomes 10.0.0.2                  (after tracking)
//!           forward:    inbound ─ answers only
//! ```
//!
//! The table is written once, for all slots an installation can ever have, in one transaction; a
//! new slot needs no change of it. Whether a slot has the internet is the *group* of its host end
//! ([`OPEN`] or not), which one message to the kernel changes at once. Whatever is in no known
//! group is closed.
//!
//! A slot that reaches some addresses and others not has a *list*: two chains of its own, which
//! stand in the table's maps under the name of its host end and are asked before the group. What
//! the guest sends is judged by where it goes, what comes by where the guest had sent to: every
//! packet, so that a connection which is open already is no exception. A list is put in place,
//! changed and removed in one transaction each.
//!
//! Only numbers, addresses and names of our own making are put into the text.

use std::fmt::Write as _;
use std::net::Ipv4Addr;

use torpor_protocol::AddressRange;

use super::names::{Block, GATEWAY, GUEST, Names, SLOTS};
use super::reach::{Allow, Reach};

/// The table, with names in percent signs for what differs between installations.
const TABLE: &str = include_str!("table.nft");

/// Group of the links that have the internet.
pub(super) const OPEN: u32 = 0x746f_7270;
/// Group of those that have not.
pub(super) const SHUT: u32 = 0x746f_7271;

/// Nothing a guest may talk to, wherever it is: unspecified, private, shared, loopback, link-local
/// (with the metadata services of clouds), the metadata service of one cloud that looks public,
/// special purpose, private, benchmarks, multicast and reserved with broadcast.
const CLOSED: [&str; 11] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "168.63.129.16/32",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/3",
];

/// A network the host is itself part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Near {
    pub(super) network: Ipv4Addr,
    pub(super) prefix: u8,
}

/// The whole table, replacing the one that is there, if any, without a moment in between.
pub(super) fn table(
    names: &Names,
    block: Block,
    resolver: Option<Ipv4Addr>,
    near: &[Near],
) -> String {
    let ours = format!("\"{}*\"", names.link_prefix());
    let names_rule = resolver.map_or(String::new(), |resolver| {
        format!(
            "iifname {ours} ip daddr {GATEWAY} meta l4proto {{ tcp, udp }} th dport 53 \
             dnat ip to {resolver}"
        )
    });
    let values = [
        ("%table%", names.table()),
        ("%outside%", elements(names, |slot| block.address(slot).to_string())),
        ("%balance%", elements(names, |slot| balance(block.address(slot)).to_string())),
        ("%closed%", closed(near)),
        ("%ours%", ours),
        ("%guest%", GUEST.to_string()),
        ("%guest_number%", u32::from(GUEST).to_string()),
        ("%gateway%", GATEWAY.to_string()),
        ("%block%", block.network()),
        ("%names%", names_rule),
        ("%open%", OPEN.to_string()),
    ];
    let fill = |text: String, (name, value): &(&str, String)| text.replace(name, value);
    values.iter().fold(TABLE.to_owned(), fill)
}

/// Removes the table if there is one.
pub(super) fn no_table(names: &Names) -> String {
    let table = names.table();
    format!("table inet {table}\ndelete table inet {table}\n")
}

/// The list of a slot, replacing the one that is there, if any.
pub(super) fn list(names: &Names, slot: u16, reach: &Reach) -> String {
    let table = names.table();
    let mut text = made(names, slot);
    // Where a packet is bound for and what becomes of it, for each direction.
    let ways = [
        (format!("to_{slot}"), "ip daddr", "goto refuse", ("accept", "goto world")),
        (format!("from_{slot}"), "ct original ip daddr", "drop", ("goto answers", "goto answers")),
    ];
    for (chain, address, refused, (asked, reached)) in ways {
        let asked = if reach.names { asked } else { refused };
        let mut rule = |rule: String| {
            let _ = writeln!(text, "add rule inet {table} {chain} {rule}");
        };
        // First, so that it is all that the host's own name server hears of a list.
        rule(format!("ct status dnat ct original ip daddr {GATEWAY} {asked}"));
        if !reach.deny.is_empty() {
            rule(format!("{address} {} {refused}", set(&reach.deny)));
        }
        match &reach.allow {
            Allow::All => rule(reached.to_owned()),
            Allow::Only(ranges) if ranges.is_empty() => rule(refused.to_owned()),
            Allow::Only(ranges) => {
                rule(format!("{address} {} {reached}", set(ranges)));
                rule(refused.to_owned());
            }
        }
    }
    text
}

/// Removes the list of a slot if there is one.
pub(super) fn no_list(names: &Names, slot: u16) -> String {
    let (table, link) = (names.table(), names.link(slot));
    let mut text = made(names, slot);
    for way in ["to", "from"] {
        let _ = writeln!(text, "delete element inet {table} lists_{way} {{ \"{link}\" }}");
        let _ = writeln!(text, "delete chain inet {table} {way}_{slot}");
    }
    text
}

/// The chains of a slot, in their places and empty, whether they were there or not.
fn made(names: &Names, slot: u16) -> String {
    let (table, link) = (names.table(), names.link(slot));
    let mut text = String::new();
    for way in ["to", "from"] {
        let _ = writeln!(text, "add chain inet {table} {way}_{slot}");
        let _ = writeln!(text, "flush chain inet {table} {way}_{slot}");
        let place = format!("{{ \"{link}\" : jump {way}_{slot} }}");
        let _ = writeln!(text, "add element inet {table} lists_{way} {place}");
    }
    text
}

fn set(ranges: &[AddressRange]) -> String {
    let texts: Vec<String> = ranges.iter().map(AddressRange::to_string).collect();
    format!("{{ {} }}", texts.join(", "))
}

fn elements(names: &Names, value: impl Fn(u16) -> String) -> String {
    let mut text = String::new();
    for slot in 1..=SLOTS {
        let comma = if slot == 1 { "" } else { ", " };
        let _ = write!(text, "{comma}\"{}\" : {}", names.link(slot), value(slot));
    }
    text
}

fn closed(near: &[Near]) -> String {
    let near = near.iter().map(|near| format!("{}/{}", near.network, near.prefix));
    CLOSED.into_iter().map(str::to_owned).chain(near).collect::<Vec<_>>().join(", ")
}

/// An ICMP error quotes the packet it is about, with the slot's own address as its source; the
/// guest would not know it. Rewriting the quote spoils the checksum by a known amount, which goes
/// into the unused field of the error and makes it right again.
fn balance(outside: Ipv4Addr) -> u16 {
    let words = |address: Ipv4Addr| (u32::from(address) >> 16) + (u32::from(address) & 0xffff);
    let excess = (words(outside) + 2 * 0xffff - words(GUEST)) % 0xffff;
    u16::try_from(excess).expect("a remainder of 0xffff")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folded(words: &[u32]) -> u32 {
        let mut sum: u32 = words.iter().sum();
        while sum > 0xffff {
            sum = (sum >> 16) + (sum & 0xffff);
        }
        sum
    }

    #[test]
    fn the_balance_keeps_the_checksum_of_every_slot() {
        for block in Block::all() {
            for slot in 1..=SLOTS {
                let outside = u32::from(block.address(slot));
                let inside = u32::from(GUEST);
                let before = folded(&[outside >> 16, outside & 0xffff]);
                let unused = u32::from(balance(block.address(slot)));
                assert_eq!(before, folded(&[inside >> 16, inside & 0xffff, unused]));
            }
        }
    }

    #[test]
    fn without_a_resolver_no_name_rule_is_made() {
        let names = Names::new("0a1b2c3d").expect("a tag");
        let near = [Near { network: Ipv4Addr::new(192, 0, 2, 0), prefix: 24 }];
        let text = table(&names, Block(0), None, &near);
        assert!(!text.contains("dnat ip to"));
        assert!(text.contains("192.0.2.0/24"));
        let rules = text.lines().filter(|line| !line.starts_with('#'));
        assert_eq!(rules.filter(|line| line.contains('%')).count(), 0, "every name is filled in");
        let resolver = Some(Ipv4Addr::new(10, 255, 255, 53));
        assert!(table(&names, Block(0), resolver, &near).contains("dnat ip to 10.255.255.53"));
    }
}

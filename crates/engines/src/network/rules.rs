//! The firewall of one installation, as text for `nft`.
//!
//! ```text
//!  guest ─▶ from_guest: source must be 10.0.0.2, becomes the slot's own address   (before tracking)
//!           lead:       10.0.0.1 port 53 becomes the host's name server; of proxied guests it and all
//!                       TCP becomes the egress proxy
//!           forward:    outbound ─ refuse what is private, near or ours; let the rest out
//!           input:      nothing but answers, the egress proxy and what was explicitly named
//!           hide:       behind the host's address
//!  guest ◀─ to_guest:   the slot's own address becomes 10.0.0.2                   (after tracking)
//!           forward:    inbound ─ answers only
//!  host  ─▶ on_behalf:  what carries a mark of the egress proxy reaches no more than a guest
//! ```
//!
//! The table is written once, for all slots an installation can ever have, in one transaction; a
//! new slot needs no change of it. Whether a slot has the internet is the *group* of its host end
//! ([`OPEN`] or not), which one message to the kernel changes at once. Whatever is in no known
//! group is closed. What takes more to say is in the slot's own chains (`list`).
//!
//! Every first packet that passes and every one that is refused is told to the installation's group
//! of the kernel's packet log (`packet_log`), as many of each slot as its reader can take.
//!
//! Only numbers, addresses and names of our own making are put into the text.

use std::fmt::Write as _;
use std::net::Ipv4Addr;

use torpor_protocol::AddressRange;

use super::closed::{Closed, INSIDE, NEVER};
use super::names::{Block, GATEWAY, GUEST, Names, SLOTS};
use super::packet_log::Verdict;

/// The table, with names in percent signs for what differs between installations.
const TABLE: &str = include_str!("table.nft");

/// Group of the links that have the internet.
pub(super) const OPEN: u32 = 0x746f_7270;
/// Group of those that have not.
pub(super) const SHUT: u32 = 0x746f_7271;

/// What a table depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Makeup<'a> {
    pub(super) names: &'a Names,
    pub(super) block: Block,
    pub(super) resolver: Option<Ipv4Addr>,
    pub(super) closed: &'a Closed,
    /// Whether the kernel can tell what it decides.
    pub(super) logs: bool,
}

/// The whole table, replacing the one that is there, if any, without a moment in between.
pub(super) fn table(makeup: &Makeup<'_>) -> String {
    let Makeup { names, block, resolver, closed, logs } = *makeup;
    let ours = format!("\"{}*\"", names.link_prefix());
    let names_rule = resolver.map_or(String::new(), |resolver| {
        format!("ip daddr {GATEWAY} meta l4proto {{ tcp, udp }} th dport 53 dnat ip to {resolver}")
    });
    let log = |verdict: Verdict| {
        if logs { verdict.rule(&ours, block.log_group()) } else { String::new() }
    };
    let proxy = block.egress_proxy();
    let closed: Vec<String> = closed.ranges().iter().map(AddressRange::to_string).collect();
    let values = [
        ("%table%", names.table()),
        ("%outside%", elements(names, |slot| block.address(slot).to_string())),
        ("%balance%", elements(names, |slot| balance(block.address(slot)).to_string())),
        ("%closed%", closed.join(", ")),
        ("%never%", NEVER.join(", ")),
        ("%inside%", INSIDE.to_owned()),
        ("%log_allowed%", log(Verdict::Allowed)),
        ("%log_asked%", log(Verdict::Asked)),
        ("%log_refused%", log(Verdict::Refused)),
        ("%ours%", ours.clone()),
        ("%guest%", GUEST.to_string()),
        ("%guest_number%", u32::from(GUEST).to_string()),
        ("%gateway%", GATEWAY.to_string()),
        ("%block%", block.network()),
        ("%names%", names_rule),
        ("%proxy%", proxy.address.to_string()),
        ("%connections_port%", proxy.connections.to_string()),
        ("%names_port%", proxy.names.to_string()),
        ("%public_mark%", proxy.public_mark.to_string()),
        ("%private_mark%", proxy.private_mark.to_string()),
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

fn elements(names: &Names, value: impl Fn(u16) -> String) -> String {
    let mut text = String::new();
    for slot in 1..=SLOTS {
        let comma = if slot == 1 { "" } else { ", " };
        let _ = write!(text, "{comma}\"{}\" : {}", names.link(slot), value(slot));
    }
    text
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
    fn only_what_there_is_is_made_a_rule_of() {
        let names = Names::new("0a1b2c3d").expect("a tag");
        let closed = Closed::new(&["192.0.2.0/24".parse().expect("a range")]);
        let mut makeup =
            Makeup { names: &names, block: Block(0), resolver: None, closed: &closed, logs: false };
        let text = table(&makeup);
        assert!(!text.contains("dnat ip to") && !text.contains("log prefix"));
        assert!(text.contains("192.0.2.0/24"));
        makeup.resolver = Some(Ipv4Addr::new(10, 255, 255, 53));
        makeup.logs = true;
        let text = table(&makeup);
        assert!(text.contains("dnat ip to 10.255.255.53"));
        assert_eq!(text.matches("log prefix").count(), 3);
        let rules = text.lines().filter(|line| !line.starts_with('#'));
        assert_eq!(rules.filter(|line| line.contains('%')).count(), 0, "every name is filled in");
    }
}

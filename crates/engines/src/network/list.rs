//! The part of the firewall that belongs to one slot, as text for `nft`.
//!
//! A slot that reaches some addresses and others not, is led to the egress proxy, or has caps, has a
//! *list*: chains of its own, which stand in the table's maps under the name of its host end and are
//! asked before the group.
//!
//! | chain  | asked                                  | decides |
//! |--------|----------------------------------------|---------|
//! | `up`   | of every packet of the guest           | bytes per second |
//! | `down` | of every packet for the guest          | bytes per second |
//! | `lead` | of first packets                       | what is led to the egress proxy |
//! | `to`   | of what the guest sends to others      | where it may go |
//! | `here` | of what the guest sends to the host    | the egress proxy, addresses that were named |
//! | `from` | of what others send to the guest       | what it may be an answer to |
//! | `back` | of what the egress proxy sends back    | whether the guest is proxied |
//! | `caps` | by `to` and `here`, of first packets   | connections |
//!
//! What the guest sends is judged by where it goes, what comes by where the guest had sent to: every
//! packet, so that a connection which is open already is no exception. A list is put in place, changed
//! and removed in one transaction each. Questions for names don't count as connections.

use std::fmt::Write as _;

use torpor_lifecycle::engine::EgressProxy;
use torpor_protocol::{AddressRange, NetworkLimits};

use super::names::{Block, GATEWAY, Names};
use super::reach::{Allow, HIDDEN_PORTS, Reach};

/// With the places they have in maps of the table, `lists_…`.
const PLACES: [&str; 7] = ["up", "down", "lead", "to", "from", "here", "back"];
/// Without a place.
const CAPS: &str = "caps";

/// What is at once let through beyond a second's worth, which the kernel adds: some of the largest
/// packets that there are (64 KiB, of links that leave cutting to the other side), also at a tiny rate.
const BURST_BYTES: u64 = 256 << 10;

/// The list of a slot, replacing the one that is there, if any.
pub(super) fn list(names: &Names, block: Block, slot: u16, reach: &Reach) -> String {
    let mut list = List { table: names.table(), slot, text: made(names, slot) };
    let proxy = block.egress_proxy();
    list.bytes(reach.limits.bytes_per_sec);
    list.caps(&reach.limits);
    list.lead(reach, &proxy);
    list.to(reach);
    list.here(reach, &proxy);
    list.from(reach);
    list.text
}

/// Removes the list of a slot if there is one.
pub(super) fn no_list(names: &Names, slot: u16) -> String {
    let (table, link) = (names.table(), names.link(slot));
    let mut text = made(names, slot);
    for place in PLACES {
        let _ = writeln!(text, "delete element inet {table} lists_{place} {{ \"{link}\" }}");
    }
    for chain in PLACES.into_iter().chain([CAPS]) {
        let _ = writeln!(text, "delete chain inet {table} {chain}_{slot}");
    }
    text
}

/// The chains of a slot, in their places and empty, whether they were there or not.
fn made(names: &Names, slot: u16) -> String {
    let (table, link) = (names.table(), names.link(slot));
    let mut text = String::new();
    for chain in PLACES.into_iter().chain([CAPS]) {
        let _ = writeln!(text, "add chain inet {table} {chain}_{slot}");
        let _ = writeln!(text, "flush chain inet {table} {chain}_{slot}");
    }
    for place in PLACES {
        let element = format!("{{ \"{link}\" : jump {place}_{slot} }}");
        let _ = writeln!(text, "add element inet {table} lists_{place} {element}");
    }
    text
}

/// A list that is being written.
struct List {
    table: String,
    slot: u16,
    text: String,
}

impl List {
    fn rule(&mut self, chain: &str, rule: &str) {
        let Self { table, slot, text } = self;
        let _ = writeln!(text, "add rule inet {table} {chain}_{slot} {rule}");
    }

    fn bytes(&mut self, rate: Option<u64>) {
        let rule = match rate {
            Some(0) => "drop".to_owned(),
            Some(rate) => {
                format!("limit rate over {rate} bytes/second burst {BURST_BYTES} bytes drop")
            }
            None => return,
        };
        self.rule("up", &rule);
        self.rule("down", &rule);
    }

    fn caps(&mut self, limits: &NetworkLimits) {
        match limits.connections_per_sec {
            Some(0) => self.rule(CAPS, "goto refuse"),
            // A second's worth at once.
            Some(rate) => {
                let over =
                    format!("limit rate over {rate}/second burst {rate} packets goto refuse");
                self.rule(CAPS, &over);
            }
            None => {}
        }
        if let Some(count) = limits.connections {
            self.rule(CAPS, &format!("ct count over {count} goto refuse"));
        }
    }

    /// What is closed is not led there: it is refused here, whatever happens there.
    fn lead(&mut self, reach: &Reach, proxy: &EgressProxy) {
        if !reach.proxied {
            return;
        }
        let EgressProxy { address, connections, names, .. } = proxy;
        let led = format!("meta l4proto tcp dnat ip to {address}:{connections}");
        self.rule(
            "lead",
            &format!(
                "ip daddr {GATEWAY} meta l4proto {{ tcp, udp }} th dport 53 \
                 dnat ip to {address}:{names}"
            ),
        );
        self.rule("lead", "ip daddr @never accept");
        if !reach.private.is_empty() {
            self.rule("lead", &format!("ip daddr {} {led}", set(&reach.private)));
        }
        self.rule("lead", "ip daddr @closed accept");
        self.rule("lead", &led);
        // Also what else would be done with questions for names.
        self.rule("lead", "accept");
        self.rule("back", "accept");
    }

    fn to(&mut self, reach: &Reach) {
        // First, so that it is all that the host's own name server hears of a list.
        let asked = if reach.names { "goto asks" } else { "goto refuse" };
        self.rule("to", &format!("ct status dnat ct original ip daddr {GATEWAY} {asked}"));
        self.rule("to", &format!("ct state new jump {CAPS}_{}", self.slot));
        if reach.proxied {
            self.hidden("to", "th dport", "goto refuse");
        }
        self.denied("to", "ip daddr", reach, "goto refuse");
        self.named("to", "ip daddr", reach, "goto passes");
        match &reach.allow {
            Allow::All => self.rule("to", "goto world"),
            Allow::Only(ranges) if ranges.is_empty() => {}
            Allow::Only(ranges) => self.rule("to", &format!("ip daddr {} goto world", set(ranges))),
        }
        self.rule("to", "goto refuse");
    }

    /// The egress proxy is judged by where the guest wanted to go, not by where it was led.
    fn here(&mut self, reach: &Reach, proxy: &EgressProxy) {
        let turned = format!("ip daddr {} ct original ip daddr", proxy.address);
        if reach.proxied {
            self.rule("here", &format!("{turned} {GATEWAY} goto turned"));
        }
        self.rule("here", &format!("ct state new jump {CAPS}_{}", self.slot));
        if reach.proxied {
            self.rule("here", &format!("{turned} @never goto refuse"));
            self.named("here", &turned, reach, "goto turned");
            self.rule("here", &format!("{turned} @closed goto refuse"));
            self.rule("here", &format!("ip daddr {} goto turned", proxy.address));
            self.hidden("here", "th dport", "goto refuse");
        }
        self.rule("here", "ip daddr @never goto refuse");
        self.denied("here", "ip daddr", reach, "goto refuse");
        self.named("here", "ip daddr", reach, "goto passes");
        self.rule("here", "goto refuse");
    }

    fn from(&mut self, reach: &Reach) {
        const SENT_TO: &str = "ct original ip daddr";
        let asked = if reach.names { "goto answers" } else { "drop" };
        self.rule("from", &format!("ct status dnat {SENT_TO} {GATEWAY} {asked}"));
        if reach.proxied {
            self.hidden("from", "th sport", "drop");
        }
        self.denied("from", SENT_TO, reach, "drop");
        self.named("from", SENT_TO, reach, "goto answers");
        match &reach.allow {
            // What was closed in the meantime is no answer.
            Allow::All => {
                self.rule("from", &format!("{SENT_TO} @closed drop"));
                self.rule("from", "goto answers");
            }
            Allow::Only(ranges) if ranges.is_empty() => {}
            Allow::Only(ranges) => {
                self.rule("from", &format!("{SENT_TO} {} goto answers", set(ranges)));
            }
        }
        self.rule("from", "drop");
    }

    /// What a proxied guest does not do past the egress proxy, wherever to.
    fn hidden(&mut self, chain: &str, port: &str, verdict: &str) {
        let ports = HIDDEN_PORTS.map(|port| port.to_string()).join(", ");
        self.rule(chain, &format!("meta l4proto tcp {verdict}"));
        let rule = format!("meta l4proto {{ udp, udplite }} {port} {{ {ports} }} {verdict}");
        self.rule(chain, &rule);
    }

    fn denied(&mut self, chain: &str, address: &str, reach: &Reach, verdict: &str) {
        if !reach.deny.is_empty() {
            self.rule(chain, &format!("{address} {} {verdict}", set(&reach.deny)));
        }
    }

    /// What is closed to others.
    fn named(&mut self, chain: &str, address: &str, reach: &Reach, verdict: &str) {
        if !reach.private.is_empty() {
            self.rule(chain, &format!("{address} {} {verdict}", set(&reach.private)));
        }
    }
}

fn set(ranges: &[AddressRange]) -> String {
    let texts: Vec<String> = ranges.iter().map(AddressRange::to_string).collect();
    format!("{{ {} }}", texts.join(", "))
}

//! How networks and slots come and go.

use std::collections::HashSet;
use std::net::UdpSocket;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use torpor_protocol::Network as Policy;

use super::super::links::Links;
use super::super::names::{GUEST, Names};
use super::super::{NetworkError, remove_traces};
use super::world::{
    DATAGRAM_PORT, PUBLIC, close, datagram, eventually, fresh_tag, greeting, ip, on_a_host, read,
};

const ON: Policy = Policy::OPEN;

/// Everything on the host that carries the tag.
async fn traces(tag: &str) -> Vec<String> {
    let names = Names::new(tag).expect("a tag");
    let links = Links::open().expect("netlink").list().await.expect("links");
    let links = links.into_iter().map(|(name, _)| name);
    let mut traces: Vec<String> = links.filter(|name| names.slot_of(name).is_some()).collect();
    traces.extend(names.namespace().exists().then(|| "namespace".to_owned()));
    let mut nft = Command::new("nft");
    let tables = nft.env("PATH", crate::program::search_path()).args(["list", "tables"]).output();
    let tables = String::from_utf8(tables.expect("nft runs").stdout).expect("text");
    traces.extend(tables.contains(&names.table()).then(|| "table".to_owned()));
    let lo = ip("addr show dev lo");
    traces.extend(lo.contains(&names.label()).then(|| "address".to_owned()));
    let claims = std::fs::read_dir("/run/torpor/net").expect("claims").flatten();
    let ours = |path: &Path| std::fs::read_to_string(path).is_ok_and(|owner| owner == tag);
    traces.extend(claims.filter(|file| ours(&file.path())).map(|_| "claim".to_owned()));
    traces
}

#[test]
fn a_closed_network_leaves_nothing() {
    on_a_host(async |world| {
        let tag = fresh_tag();
        let network = world.network(&tag).await;
        let slot = network.take(&ON).await.expect("a slot");
        drop(slot);
        assert!(traces(&tag).await.len() >= 5, "link, namespace, table, address, claim");
        close(network).await.expect("closed");
        assert_eq!(traces(&tag).await, Vec::<String>::new());
        remove_traces(&tag).await.expect("nothing to do");
        remove_traces("../../etc").await.expect_err("no tag");
    });
}

#[test]
fn a_network_closed_with_slots_out_leaves_nothing_either() {
    on_a_host(async |world| {
        let tag = fresh_tag();
        let network = world.network(&tag).await;
        let slot = network.take(&ON).await.expect("a slot");
        let socket = slot.packet_socket().expect("a socket");
        network.close().await.expect("closed");
        let refused = network.take(&ON).await.expect_err("it is closed");
        assert!(matches!(refused, NetworkError::Closed));
        slot.packet_socket().expect_err("the slot is dead");
        drop((slot, socket));
        remove_traces(&tag).await.expect("removed");
        assert_eq!(traces(&tag).await, Vec::<String>::new());
    });
}

#[test]
fn what_a_killed_daemon_leaves_is_taken_over() {
    on_a_host(async |world| {
        let tag = fresh_tag();
        let network = world.network(&tag).await;
        let used = network.take(&ON).await.expect("a slot");
        let (number, address) = (used.number(), used.address());
        let socket = used.packet_socket().expect("a socket");
        drop(used);
        let network = {
            network.crash();
            world.network(&tag).await
        };
        // The machine lives on: its slot is handed to nobody else.
        let mut others = Vec::new();
        for _ in 0..20 {
            others.push(network.take(&ON).await.expect("a slot"));
        }
        let numbers: HashSet<u16> = others.iter().map(super::super::Slot::number).collect();
        assert_eq!(numbers.len(), 20);
        assert!(!numbers.contains(&number));
        let adopted = network.adopt(number, &ON).await.expect("adopted");
        assert_eq!(adopted.address(), address);
        let twice = network.adopt(number, &ON).await.expect_err("it has an owner");
        assert!(matches!(twice, NetworkError::InUse(_)));
        drop((socket, adopted, others));
        close(network).await.expect("closed");
        assert_eq!(traces(&tag).await, Vec::<String>::new());
    });
}

#[test]
fn the_address_of_the_egress_proxy_is_made_again_or_taken_from_somebody_who_is_gone() {
    on_a_host(async |world| {
        let tag = fresh_tag();
        let network = world.network(&tag).await;
        let address = network.egress_proxy().address;
        network.crash();
        let shown = || ip("-o addr show dev lo").matches(&format!("inet {address}/32")).count();
        for label in [None, Some("lo:stranger"), Some("lo:gone")] {
            ip(&format!("addr del {address}/32 dev lo"));
            if let Some(label) = label {
                ip(&format!("addr add {address}/32 dev lo label {label}"));
            }
            let network = world.network(&tag).await;
            assert_eq!(network.egress_proxy().address, address);
            assert_eq!(shown(), 1, "{label:?}");
            assert!(ip("-o addr show dev lo").contains("scope host lo:"), "nobody's way out");
            network.crash();
        }
        let network = world.network(&tag).await;
        close(network).await.expect("closed");
        assert_eq!(shown(), 0);
    });
}

#[test]
fn traces_of_a_killed_daemon_can_be_removed_by_name() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        network.take(&ON).await.expect("a slot");
        let tag = network.crash();
        assert!(!traces(&tag).await.is_empty());
        remove_traces(&tag).await.expect("removed");
        assert_eq!(traces(&tag).await, Vec::<String>::new());
    });
}

#[test]
fn two_installations_live_side_by_side() {
    on_a_host(async |world| {
        let (a, b) = (fresh_tag(), fresh_tag());
        let (first, second) = (world.network(&a).await, world.network(&b).await);
        let one = first.take(&ON).await.expect("a slot");
        let two = second.take(&ON).await.expect("a slot");
        assert_ne!(one.address(), two.address());
        assert_ne!(first.egress_proxy().address, second.egress_proxy().address);
        assert_ne!(first.egress_proxy().public_mark, second.egress_proxy().public_mark);
        drop(one);
        close(first).await.expect("closed");
        assert_eq!(traces(&a).await, Vec::<String>::new());
        assert!(traces(&b).await.contains(&"address".to_owned()));
        let guest = second.guest(&two);
        greeting(&mut guest.connect(PUBLIC).expect("connected")).expect("the other works on");
    });
}

#[test]
fn a_slot_is_handed_on_only_when_its_socket_is_closed() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&Policy::CLOSED).await.expect("a slot");
        let number = slot.number();
        let socket = slot.packet_socket().expect("a socket");
        drop(slot);
        let again = |held: &[super::super::Slot]| held.iter().any(|s| s.number() == number);
        let mut held = Vec::new();
        for _ in 0..30 {
            held.push(network.take(&ON).await.expect("a slot"));
        }
        assert!(!again(&held));
        drop(socket);
        let slot = eventually("the slot comes back", async || {
            let slot = network.take(&ON).await.expect("a slot");
            (slot.number() == number).then_some(slot)
        })
        .await;
        // Its former owner had no internet; the new one has.
        let guest = network.guest(&slot);
        greeting(&mut guest.connect(PUBLIC).expect("connected")).expect("a greeting");
    });
}

#[test]
fn a_packet_socket_sees_what_comes_after_it_and_carries_its_header() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let send = |text: &str| {
            let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
            socket.send_to(text.as_bytes(), (slot.address(), 9)).expect("sent");
        };
        let former = network.card(&slot);
        send("for the former owner");
        let mut packet = read(former);
        assert!(packet.ends_with(b"for the former owner"));
        let socket = slot.packet_socket().expect("a socket");
        send("for the new owner");
        packet = read(socket);
        assert!(packet.ends_with(b"for the new owner"), "nothing of the past");
        // Ten bytes of header, then the frame: to the guest, from the gateway, to 10.0.0.2.
        let link = slot.link();
        assert_eq!(packet[10..16], link.mac);
        assert_eq!(packet[16..22], link.gateway_mac);
        assert_eq!(packet[10 + 14 + 16..10 + 14 + 20], link.address.octets());
    });
}

#[test]
fn a_guest_without_the_internet_gets_no_late_answers_either() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let server = world.beyond().listen(PUBLIC, DATAGRAM_PORT);
        let card = network.card(&slot);
        rustix::io::write(&card, &datagram(GUEST, PUBLIC, b"hi")).expect("sent");
        let (_, caller) = server.recv_from(&mut [0; 100]).expect("a datagram");
        network.set_policy(&slot, &Policy::CLOSED).await.expect("switched off");
        server.send_to(b"too late", caller).expect("sent");
        let host = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        host.send_to(b"the first packet", (slot.address(), 9)).expect("sent");
        assert!(read(card).ends_with(b"the first packet"));
    });
}

#[test]
fn the_host_has_no_ipv6_on_its_end() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let link = Names::new(&network.tag).expect("a tag").link(slot.number());
        assert!(ip("-6 addr show dev up0").contains("inet6"), "other links have it");
        assert_eq!(ip(&format!("-6 addr show dev {link}")), "");
    });
}

#[test]
fn what_the_world_still_sends_to_a_former_guest_reaches_nobody() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let number = slot.number();
        let server =
            world.beyond().inside(|| UdpSocket::bind((PUBLIC, DATAGRAM_PORT))).expect("a server");
        server.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
        let former = network.card(&slot);
        rustix::io::write(&former, &datagram(GUEST, PUBLIC, b"hi")).expect("sent");
        let (_, caller) = server.recv_from(&mut [0; 100]).expect("a datagram");
        server.send_to(b"in time", caller).expect("sent");
        assert!(read(former).ends_with(b"in time"));
        drop(slot);
        let slot = eventually("the slot comes back", async || {
            let slot = network.take(&ON).await.expect("a slot");
            (slot.number() == number).then_some(slot)
        })
        .await;
        let socket = network.card(&slot);
        server.send_to(b"too late", caller).expect("sent");
        let host = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        host.send_to(b"the first packet", (slot.address(), 9)).expect("sent");
        assert!(read(socket).ends_with(b"the first packet"));
    });
}

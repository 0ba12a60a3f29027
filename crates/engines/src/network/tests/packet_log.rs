//! What the guest registry is told.

use std::net::Ipv4Addr;

use torpor_lifecycle::engine::LoggedPacket;
use torpor_protocol::{Network as Policy, SandboxId};

use super::super::names::GATEWAY;
use super::verbs::{Doorkeeper, nft, ping, policy, proxied, reaches, says};
use super::world::{
    ELSEWHERE, FORBIDDEN, HOST, Heard, Opened, PORT, PUBLIC, eventually, fresh_tag, greeting,
    on_a_host, somebody,
};

const ON: Policy = Policy::OPEN;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;

fn logged(protocol: u8, to: Ipv4Addr, port: u16, allowed: bool) -> LoggedPacket {
    LoggedPacket { protocol, to, port, allowed }
}

/// Waits until so much was told of a guest.
async fn told(network: &Opened, guest: Ipv4Addr, count: usize) -> Vec<LoggedPacket> {
    eventually("it is told", async || {
        let passed = network.registry.packets(guest);
        (passed.len() >= count).then_some(passed)
    })
    .await
}

#[test]
fn what_passes_and_what_is_refused_is_told_once_each() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let metadata: Ipv4Addr = FORBIDDEN[3].parse().expect("an address");
        for allow in [vec![], vec!["198.51.100.0/24", "192.0.2.2"]] {
            let slot = network.take(&policy(true, &allow, &[])).await.expect("a slot");
            let guest = network.guest(&slot);
            let listed = !allow.is_empty();
            let mut stream = guest.connect(PUBLIC).expect("connected");
            greeting(&mut stream).expect("a greeting");
            says(&mut stream).expect("more of the same is not told");
            assert!(!reaches(&guest, metadata));
            assert_eq!(reaches(&guest, HOST), listed);
            guest.ask(GATEWAY, 53).expect("an answer");
            assert_eq!(ping(&guest, PUBLIC), (0, 0));
            assert_eq!(reaches(&guest, ELSEWHERE), !listed);
            let expected = [
                logged(TCP, PUBLIC, PORT, true),
                logged(TCP, metadata, PORT, false),
                logged(TCP, HOST, PORT, listed),
                logged(UDP, GATEWAY, 53, true),
                logged(ICMP, PUBLIC, 0, true),
                logged(TCP, ELSEWHERE, PORT, !listed),
            ];
            assert_eq!(told(&network, slot.address(), expected.len()).await, expected);
        }
    });
}

#[test]
fn of_a_proxied_guest_only_what_the_doorkeeper_cant_see_is_told() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let doorkeeper = Doorkeeper::new(network.egress_proxy());
        let slot = network.take(&proxied()).await.expect("a slot");
        let guest = network.guest(&slot);
        let _stream = guest.connect(PUBLIC).expect("connected");
        assert!(doorkeeper.arrived().is_some());
        guest.ask(PUBLIC, 443).expect_err("refused");
        assert!(!reaches(&guest, HOST));
        let expected = [logged(UDP, PUBLIC, 443, false), logged(TCP, HOST, PORT, false)];
        assert_eq!(told(&network, slot.address(), 2).await, expected);
    });
}

#[test]
fn a_noisy_guest_does_not_drown_the_others() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let (noisy, quiet) = (network.take(&Policy::CLOSED).await, network.take(&ON).await);
        let (noisy, quiet) = (noisy.expect("a slot"), quiet.expect("a slot"));
        let (noise, guest) = (network.guest(&noisy), network.guest(&quiet));
        let flood = noise.inside(|| {
            let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
            for port in 1..=5_000 {
                // Refusals come back as errors of later calls.
                let _ = socket.send_to(b"x", (PUBLIC, port));
            }
            Ok(())
        });
        flood.expect("sent");
        assert!(reaches(&guest, PUBLIC));
        let heard = told(&network, quiet.address(), 1).await;
        assert_eq!(heard, [logged(TCP, PUBLIC, PORT, true)]);
        let noise = network.registry.packets(noisy.address()).len();
        assert!((1..2_000).contains(&noise), "{noise} of 5000 were told");
    });
}

#[test]
fn the_guard_knows_who_it_is_before_a_policy_is_in_force_and_until_the_slot_is_cleared() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = (*network).take().await.expect("a slot");
        let (address, number) = (slot.address(), slot.number());
        assert_eq!(network.registry.heard(), [], "it is nobody's yet");
        let id = SandboxId::random();
        let only = policy(true, &["203.0.113.9"], &[]);
        (*network).set_policy(&slot, &id, &only).await.expect("set");
        let mut expected = vec![Heard::Registered(address, id.clone(), only.clone())];
        assert_eq!(network.registry.heard(), expected);
        // What can't be done is taken back there too.
        let table = super::super::names::Names::new(&network.tag).expect("a tag").table();
        nft(&format!("add chain inet {table} away"));
        nft(&format!("add rule inet {table} away jump caps_{number}"));
        nft(&format!("delete table inet {table}"));
        let other = policy(true, &[], &["198.51.100.7"]);
        (*network).set_policy(&slot, &id, &other).await.expect_err("there is no firewall");
        expected.push(Heard::Registered(address, id.clone(), other));
        expected.push(Heard::Registered(address, id, only));
        assert_eq!(network.registry.heard(), expected);
    });
}

#[test]
fn the_guard_hears_when_nobody_has_an_address_any_more() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&proxied()).await.expect("a slot");
        let address = slot.address();
        let socket = slot.packet_socket().expect("a socket");
        drop(slot);
        for _ in 0..20 {
            network.take(&ON).await.expect("a slot");
        }
        let gone = Heard::Dismissed(address);
        assert!(!network.registry.heard().contains(&gone), "the machine lives on");
        drop(socket);
        eventually("it is unregistered", async || {
            network.take(&ON).await.expect("a slot");
            network.registry.heard().contains(&gone).then_some(())
        })
        .await;
        let registered = Heard::Registered(address, somebody(), proxied());
        let about = |heard: &Heard| [&registered, &gone].contains(&heard);
        let about: Vec<Heard> = network.registry.heard().into_iter().filter(about).collect();
        assert_eq!(about, [registered.clone(), gone.clone()], "once each");
    });
}

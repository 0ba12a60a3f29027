//! Private addresses that a policy names.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};

use torpor_protocol::Network as Policy;

use super::super::names::GATEWAY;
use super::verbs::{Doorkeeper, answer, is_cut, policy, reaches, says, talk};
use super::world::{
    DATAGRAM_PORT, ELSEWHERE, FORBIDDEN, HOST, PORT, PUBLIC, ROUTER, fresh_tag, greeting, on_a_host,
};

const ON: Policy = Policy::OPEN;

fn address(text: &str) -> Ipv4Addr {
    text.parse().expect("an address")
}

#[test]
fn what_is_named_is_reached_and_nothing_beside_it() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        for (allow, public) in [
            (vec!["192.168.7.0/24", "100.64.1.1", "192.0.2.1"], false),
            (vec!["192.168.7.0/24", "100.64.1.1", "192.0.2.1", "0.0.0.0/0"], true),
        ] {
            let slot = network.take(&policy(true, &allow, &[])).await.expect("a slot");
            let guest = network.guest(&slot);
            let named = [address("192.168.7.7"), address("100.64.1.1"), ROUTER];
            for to in named {
                assert!(reaches(&guest, to), "{to}");
            }
            for to in FORBIDDEN.map(address).into_iter().chain([HOST]) {
                assert_eq!(reaches(&guest, to), named.contains(&to), "{to}");
            }
            assert_eq!(reaches(&guest, PUBLIC), public);
        }
    });
}

#[test]
fn what_is_named_no_longer_is_cut_and_closed_again() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let named = policy(true, &["0.0.0.0/0", "192.168.7.7", "192.0.2.2"], &[]);
        let slot = network.take(&named).await.expect("a slot");
        let guest = network.guest(&slot);
        for change in
            [ON, policy(true, &["0.0.0.0/0", "192.168.7.7", "192.0.2.2"], &["192.0.0.0/8"])]
        {
            let [mut far, mut here] = [address("192.168.7.7"), HOST].map(|to| {
                let mut stream = guest.connect(to).expect("connected");
                greeting(&mut stream).expect("a greeting");
                stream
            });
            network.set_policy(&slot, &change).await.expect("changed");
            for stream in [&mut far, &mut here] {
                assert_eq!(says(stream), Err(ErrorKind::ConnectionReset), "{change:?}");
            }
            assert!(!reaches(&guest, HOST) && !reaches(&guest, address("192.168.7.7")));
            network.set_policy(&slot, &named).await.expect("changed");
        }
    });
}

#[test]
fn the_host_itself_can_be_named_like_any_other() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        answer(UdpSocket::bind((HOST, DATAGRAM_PORT)).expect("a service of the host"));
        for (deny, reached) in [(vec![], true), (vec!["192.0.2.2"], false)] {
            let slot = network.take(&policy(false, &["192.0.2.2"], &deny)).await.expect("a slot");
            let guest = network.guest(&slot);
            assert_eq!(reaches(&guest, HOST), reached);
            assert_eq!(guest.ask(HOST, DATAGRAM_PORT).is_ok(), reached);
            assert!(!reaches(&guest, ROUTER) && !reaches(&guest, PUBLIC));
        }
    });
}

#[test]
fn loopback_neighbours_and_the_egress_proxy_cant_be_named() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let doorkeeper = Doorkeeper::new(network.egress_proxy());
        let neighbour = network.take(&ON).await.expect("a slot");
        network.guest(&neighbour).serve();
        let wide = ["10.0.0.0/8", "127.0.0.0/8", "10.213.0.0/16"];
        for by_name in [vec![], vec!["api.example.com"]] {
            let allow = [&wide[..], &by_name].concat();
            let slot = network.take(&policy(true, &allow, &[])).await.expect("a slot");
            let guest = network.guest(&slot);
            for to in [neighbour.address(), network.egress_proxy().address, slot.address(), GATEWAY]
            {
                let refused = guest.connect(to).expect_err("refused");
                assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{to}");
                guest.ask(to, DATAGRAM_PORT).expect_err("refused");
            }
            let proxy = network.egress_proxy();
            guest.connect_to(proxy.address, proxy.connections).expect_err("refused");
            assert!(doorkeeper.arrived().is_none());
            let _stream = guest.connect(address("10.255.255.53")).expect("the rest is open");
            assert_eq!(doorkeeper.arrived().is_some(), !by_name.is_empty());
        }
    });
}

#[test]
fn tcp_of_a_proxied_guest_to_what_is_named_is_led_to_the_egress_proxy_too() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let doorkeeper = Doorkeeper::new(network.egress_proxy());
        answer(UdpSocket::bind((HOST, DATAGRAM_PORT)).expect("a service of the host"));
        let named = policy(true, &["api.example.com", "192.168.7.0/24", "192.0.2.2"], &[]);
        let slot = network.take(&named).await.expect("a slot");
        let guest = network.guest(&slot);
        let mut pairs = Vec::new();
        for to in [address("192.168.7.7"), HOST] {
            let mut stream = guest.connect(to).expect("connected");
            let (mut there, _, wanted) = doorkeeper.arrived().expect("it arrived");
            assert_eq!((*wanted.ip(), wanted.port()), (to, PORT));
            talk(&mut stream, &mut there).expect("both ways");
            pairs.push((stream, there));
        }
        guest.ask(HOST, DATAGRAM_PORT).expect("other protocols go there themselves");
        guest.ask(HOST, 443).expect_err("but never these");
        // Named no longer, they are cut here, whatever is done about it there.
        let less = policy(true, &["api.example.com"], &[]);
        network.set_policy(&slot, &less).await.expect("changed");
        for (mut stream, mut there) in pairs {
            assert!(is_cut(&mut stream, &mut there));
        }
        guest.ask(HOST, DATAGRAM_PORT).expect_err("closed again");
        let _stream = guest.connect(ELSEWHERE).expect("connected");
        assert!(doorkeeper.arrived().is_some());
    });
}

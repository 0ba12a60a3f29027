//! A proxied guest that tries all ways around the egress proxy.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

use torpor_protocol::Network as Policy;

use super::super::names::{GATEWAY_MAC, GUEST, GUEST_MAC};
use super::verbs::{Doorkeeper, policy, proxied};
use super::world::{
    DATAGRAM_PORT, FORBIDDEN, HOST, PUBLIC, ROUTER, datagram, fresh_tag, on_a_host, read,
};

const ON: Policy = Policy::OPEN;

#[test]
fn neither_the_host_nor_neighbours_nor_private_addresses_are_reached_nor_led_on() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let doorkeeper = Doorkeeper::new(network.egress_proxy());
        let neighbour = network.take(&ON).await.expect("a slot");
        network.guest(&neighbour).serve();
        let slot = network.take(&proxied()).await.expect("a slot");
        let guest = network.guest(&slot);
        let mut closed = FORBIDDEN.map(|text| text.parse().expect("an address")).to_vec();
        closed.extend([HOST, ROUTER, neighbour.address(), slot.address()]);
        for address in closed {
            let refused = guest.connect(address).expect_err("refused");
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{address}");
            guest.ask(address, DATAGRAM_PORT).expect_err("refused");
        }
        assert!(doorkeeper.arrived().is_none());
    });
}

#[test]
fn the_egress_proxy_is_reached_by_nobody_who_was_not_led_there() {
    on_a_host(async |world| {
        let (network, other) =
            (world.network(&fresh_tag()).await, world.network(&fresh_tag()).await);
        let proxy = network.egress_proxy();
        let doorkeeper = Doorkeeper::new(proxy);
        let names = UdpSocket::bind((proxy.address, proxy.names)).expect("a name server");
        names.set_nonblocking(true).expect("it need not wait");
        let by_range = policy(true, &["10.213.0.0/16"], &[]);
        for (network, policy) in [
            (&network, proxied()),
            (&network, ON),
            (&network, Policy::CLOSED),
            (&network, by_range),
            (&other, ON),
            (&other, proxied()),
        ] {
            let slot = network.take(&policy).await.expect("a slot");
            let guest = network.guest(&slot);
            for port in [proxy.connections, proxy.names] {
                let refused = guest.connect_to(proxy.address, port).expect_err("refused");
                assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{policy:?}");
                guest.ask(proxy.address, port).expect_err("refused");
            }
        }
        world.beyond().ip(&format!("route add {} via {HOST}", proxy.address));
        let stranger = world.beyond().listen(PUBLIC, 9);
        stranger.send_to(b"hi", (proxy.address, proxy.names)).expect("sent");
        // By the time the host answers this, it had the other.
        stranger.send_to(b"hi", (HOST, 9)).expect("sent");
        let host = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        host.send_to(b"hi", (proxy.address, proxy.names)).expect_err("not even from here");
        stranger.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
        stranger.connect((HOST, 9)).expect("an address");
        stranger.send(b"hi").expect("sent");
        let _ = stranger.recv(&mut [0; 10]).expect_err("nobody listens there");
        assert_eq!(names.recv(&mut [0; 10]).expect_err("nothing").kind(), ErrorKind::WouldBlock);
        assert!(doorkeeper.arrived().is_none());
    });
}

#[test]
fn a_false_source_address_gets_nowhere() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let named = policy(true, &["api.example.com", "198.51.100.7"], &[]);
        let neighbour = network.take(&ON).await.expect("a slot");
        let slot = network.take(&named).await.expect("a slot");
        let server = world.beyond().listen(PUBLIC, DATAGRAM_PORT);
        let card = network.card(&slot);
        let neighbour = neighbour.address();
        for from in [neighbour, slot.address(), HOST, network.egress_proxy().address, PUBLIC] {
            rustix::io::write(&card, &datagram(from, PUBLIC, b"no")).expect("sent");
        }
        rustix::io::write(&card, &datagram(GUEST, PUBLIC, b"ok")).expect("sent");
        let mut text = [0; 100];
        let length = server.recv(&mut text).expect("the true one arrives");
        assert_eq!(&text[..length], b"ok", "and no other did before");
    });
}

#[test]
fn nobody_answers_who_asks_for_hardware_addresses_or_for_an_address_of_its_own() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&proxied()).await.expect("a slot");
        // Where a server for addresses would be.
        let dhcp = UdpSocket::bind("0.0.0.0:67").expect("a server");
        let card = network.card(&slot);
        for wanted in
            [HOST, ROUTER, network.egress_proxy().address, PUBLIC, Ipv4Addr::new(10, 0, 0, 3)]
        {
            rustix::io::write(&card, &arp(wanted)).expect("sent");
        }
        let from = Ipv4Addr::UNSPECIFIED;
        let mut discover = datagram(from, Ipv4Addr::BROADCAST, b"??");
        // From port 68 to port 67.
        discover[44..48].copy_from_slice(&[0, 68, 0, 67]);
        rustix::io::write(&card, &discover).expect("sent");
        let host = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        host.send_to(b"not from a guest", "127.0.0.1:67").expect("sent");
        let mut text = [0; 100];
        dhcp.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
        let length = dhcp.recv(&mut text).expect("a datagram");
        assert_eq!(&text[..length], b"not from a guest", "and nothing before");
        host.send_to(b"the first packet", (slot.address(), 9)).expect("sent");
        assert!(read(card).ends_with(b"the first packet"), "and no answer before");
    });
}

/// Who has this address?
fn arp(wanted: Ipv4Addr) -> Vec<u8> {
    let request = [0, 1, 8, 0, 6, 4, 0, 1];
    let (from, nobody) = (GUEST.octets(), [0; 6]);
    let to = wanted.octets();
    let frame = [&[0xff; 6][..], &GUEST_MAC, &[8, 6], &request, &GUEST_MAC, &from, &nobody, &to];
    [&[0; 10][..], &frame.concat()].concat()
}

#[test]
fn there_is_no_way_out_by_ipv6() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&proxied()).await.expect("a slot");
        let server = UdpSocket::bind(("::", DATAGRAM_PORT)).expect("a server of the host");
        server.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
        let card = network.card(&slot);
        // To all hosts of the link, to the host's loopback and to one of the host's addresses.
        for to in ["ff02::1", "::1", "2001:db8::1"] {
            rustix::io::write(&card, &datagram6(to.parse().expect("an address"))).expect("sent");
        }
        let host = UdpSocket::bind("[::1]:0").expect("a socket");
        host.send_to(b"from the host", ("::1", DATAGRAM_PORT)).expect("sent");
        let mut text = [0; 100];
        let length = server.recv(&mut text).expect("a datagram");
        assert_eq!(&text[..length], b"from the host", "and nothing before");
        server.set_nonblocking(true).expect("it need not wait");
        server.recv(&mut text).expect_err("and nothing after");
    });
}

fn datagram6(to: std::net::Ipv6Addr) -> Vec<u8> {
    let from = std::net::Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2);
    // Version, length of what follows, UDP, hops.
    let mut packet = vec![0x60, 0, 0, 0, 0, 10, 17, 64];
    packet.extend(from.octets());
    packet.extend(to.octets());
    let mut udp = [4000_u16.to_be_bytes(), DATAGRAM_PORT.to_be_bytes()].concat();
    udp.extend([0, 10, 0, 0, b'n', b'o']);
    let words = |bytes: &[u8]| -> u32 {
        bytes.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum()
    };
    let mut sum = words(&packet[8..]) + words(&udp) + 10 + 17;
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    udp[6..8].copy_from_slice(&(!u16::try_from(sum).expect("folded")).to_be_bytes());
    [&[0; 10][..], &GATEWAY_MAC, &GUEST_MAC, &[0x86, 0xdd], &packet, &udp].concat()
}

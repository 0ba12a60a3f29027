//! Guests whose connections somebody else decides about.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with, sockopt};
use torpor_protocol::Network as Policy;

use super::super::names::{GATEWAY, GUEST};
use super::verbs::{Doorkeeper, answer, is_cut, ping, policy, proxied, reaches, says, talk};
use super::world::{
    DATAGRAM_PORT, ELSEWHERE, HOST, Heard, PORT, PUBLIC, Place, datagram, fresh_tag, greeting,
    on_a_host, read, somebody,
};

const ON: Policy = Policy::OPEN;

#[test]
fn connections_arrive_at_the_egress_proxy_and_tell_where_they_wanted_to_go() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let doorkeeper = Doorkeeper::new(network.egress_proxy());
        let slot = network.take(&proxied()).await.expect("a slot");
        let guest = network.guest(&slot);
        for (to, port) in [(PUBLIC, 443), (ELSEWHERE, 22), (PUBLIC, 53), (PUBLIC, 213)] {
            let mut stream = guest.connect_to(to, port).expect("connected");
            let (mut there, from, wanted) = doorkeeper.arrived().expect("it arrived");
            assert_eq!((from, wanted), (slot.address(), SocketAddrV4::new(to, port)));
            assert_eq!(stream.peer_addr().expect("connected").ip(), to, "the guest sees nothing");
            talk(&mut stream, &mut there).expect("both ways");
        }
    });
}

#[test]
fn two_connections_from_one_port_are_told_apart() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let doorkeeper = Doorkeeper::new(network.egress_proxy());
        let slot = network.take(&proxied()).await.expect("a slot");
        let guest = network.guest(&slot);
        let dial = |to: Ipv4Addr| {
            guest.inside(|| {
                let kind = (AddressFamily::INET, SocketType::STREAM);
                let socket = socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, None)?;
                sockopt::set_socket_reuseaddr(&socket, true)?;
                bind(&socket, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 7777))?;
                connect(&socket, &SocketAddrV4::new(to, 443))?;
                Ok(TcpStream::from(socket))
            })
        };
        let pairs = [PUBLIC, ELSEWHERE].map(|to| {
            let stream = dial(to).expect("connected");
            let (there, from, wanted) = doorkeeper.arrived().expect("it arrived");
            assert_eq!((from, wanted), (slot.address(), SocketAddrV4::new(to, 443)));
            (stream, there)
        });
        for (mut stream, mut there) in pairs {
            talk(&mut stream, &mut there).expect("each its own");
        }
    });
}

#[test]
fn names_are_asked_of_the_egress_proxy_also_without_internet_and_on_a_host_without_names() {
    on_a_host(async |world| {
        let network = world.network_without_names(&fresh_tag()).await;
        assert!(!network.has_resolver());
        assert_eq!(network.nameserver(), GATEWAY);
        let proxy = network.egress_proxy();
        let place = (proxy.address, proxy.names);
        answer(std::net::UdpSocket::bind(place).expect("a name server"));
        let listener = TcpListener::bind(place).expect("a name server");
        for internet in [true, false] {
            let by_name = policy(internet, &["api.example.com"], &[]);
            let slot = network.take(&by_name).await.expect("a slot");
            let guest = network.guest(&slot);
            let seen = guest.ask(GATEWAY, 53).expect("an answer");
            assert_eq!(seen, slot.address().to_string(), "the server knows who asks");
            let _stream = guest.connect_to(GATEWAY, 53).expect("long answers come by TCP");
            let (_, from) = listener.accept().expect("it arrived");
            assert_eq!(from.ip(), slot.address());
            guest.ask(GATEWAY, 54).expect_err("no other service is there");
            let refused = guest.connect_to(GATEWAY, 54).expect_err("no other service is there");
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        }
        let slot = network.take(&ON).await.expect("a slot");
        network.guest(&slot).ask(GATEWAY, 53).expect_err("who is not proxied is not led there");
    });
}

#[test]
fn where_nobody_listens_everything_is_refused_and_nothing_goes_past() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&proxied()).await.expect("a slot");
        let guest = network.guest(&slot);
        assert!(!reaches(&guest, PUBLIC));
        let error = guest.ask(GATEWAY, 53).expect_err("nobody answers");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "not by silence");
    });
}

#[test]
fn all_but_tcp_goes_only_to_addresses_that_are_named_and_never_where_names_hide() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let _doorkeeper = Doorkeeper::new(network.egress_proxy());
        for port in [53, 443, 853, 123] {
            for at in [PUBLIC, ELSEWHERE] {
                answer(world.beyond().listen(at, port));
            }
        }
        let named = policy(true, &["api.example.com", "198.51.100.0/24"], &["198.51.100.9"]);
        let slot = network.take(&named).await.expect("a slot");
        let guest = network.guest(&slot);
        for (to, port, reached) in [
            (PUBLIC, 123, true),
            (PUBLIC, 53, false),
            (PUBLIC, 443, false),
            (PUBLIC, 853, false),
            (ELSEWHERE, 123, false),
            (ELSEWHERE, 53, false),
            (Ipv4Addr::new(198, 51, 100, 9), 123, false),
        ] {
            match guest.ask(to, port) {
                Ok(seen) => assert!(reached && seen == HOST.to_string(), "{to}:{port}: {seen}"),
                Err(error) => {
                    assert!(!reached, "{to}:{port}: {error}");
                    assert_eq!(error.kind(), ErrorKind::HostUnreachable, "not by silence");
                }
            }
        }
        assert_eq!(ping(&guest, PUBLIC), (0, 0), "an answer");
        assert_eq!(ping(&guest, ELSEWHERE), (3, 13), "administratively prohibited");
        network.set_policy(&slot, &proxied()).await.expect("changed");
        assert_eq!(ping(&guest, PUBLIC), (3, 13), "no address is named any more");
    });
}

fn open(guest: &Place, to: Ipv4Addr) -> TcpStream {
    let mut stream = guest.connect(to).expect("connected");
    greeting(&mut stream).expect("a greeting");
    stream
}

#[test]
fn a_guest_that_becomes_proxied_loses_what_goes_past_the_egress_proxy() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let doorkeeper = Doorkeeper::new(network.egress_proxy());
        let named = policy(true, &["api.example.com", "198.51.100.0/24"], &[]);
        for change in [proxied(), named] {
            let slot = network.take(&ON).await.expect("a slot");
            let guest = network.guest(&slot);
            let mut stream = open(&guest, PUBLIC);
            network.set_policy(&slot, &change).await.expect("changed");
            assert_eq!(says(&mut stream), Err(ErrorKind::ConnectionReset), "{change:?}");
            assert!(doorkeeper.arrived().is_none(), "what was open is not led there half-way");
            let mut stream = guest.connect(PUBLIC).expect("connected");
            let (mut there, _, wanted) = doorkeeper.arrived().expect("it arrived");
            assert_eq!(SocketAddr::V4(wanted), (PUBLIC, PORT).into());
            talk(&mut stream, &mut there).expect("both ways");
        }
    });
}

#[test]
fn late_answers_of_the_world_do_not_reach_a_guest_that_became_proxied() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let server = world.beyond().listen(PUBLIC, DATAGRAM_PORT);
        let card = network.card(&slot);
        rustix::io::write(&card, &datagram(GUEST, PUBLIC, b"hi")).expect("sent");
        let (_, caller) = server.recv_from(&mut [0; 100]).expect("a datagram");
        network.set_policy(&slot, &proxied()).await.expect("changed");
        server.send_to(b"too late", caller).expect("sent");
        let host = std::net::UdpSocket::bind("0.0.0.0:0").expect("a socket");
        host.send_to(b"the first packet", (slot.address(), 9)).expect("sent");
        assert!(read(card).ends_with(b"the first packet"));
    });
}

#[test]
fn who_stays_proxied_keeps_its_connections_and_who_is_not_any_more_loses_them() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let doorkeeper = Doorkeeper::new(network.egress_proxy());
        let slot = network.take(&proxied()).await.expect("a slot");
        let guest = network.guest(&slot);
        let mut stream = guest.connect(PUBLIC).expect("connected");
        let (mut there, ..) = doorkeeper.arrived().expect("it arrived");
        for change in [policy(false, &["*.example.com"], &[]), proxied()] {
            network.set_policy(&slot, &change).await.expect("changed");
            talk(&mut stream, &mut there).expect("whoever listens there decides");
        }
        for change in [ON, Policy::CLOSED, policy(true, &["198.51.100.7"], &[])] {
            network.set_policy(&slot, &change).await.expect("changed");
            assert!(is_cut(&mut stream, &mut there), "{change:?}");
            assert_eq!(reaches(&guest, PUBLIC), change != Policy::CLOSED);
            assert!(doorkeeper.arrived().is_none());
            network.set_policy(&slot, &proxied()).await.expect("changed");
            stream = guest.connect(PUBLIC).expect("connected");
            (there, ..) = doorkeeper.arrived().expect("it arrived");
        }
    });
}

#[test]
fn a_proxied_machine_stays_so_while_daemons_come_and_go() {
    on_a_host(async |world| {
        let tag = fresh_tag();
        let network = world.network(&tag).await;
        let doorkeeper = Doorkeeper::new(network.egress_proxy());
        let slot = network.take(&proxied()).await.expect("a slot");
        let (number, address) = (slot.number(), slot.address());
        let guest = network.guest(&slot);
        let mut stream = guest.connect(PUBLIC).expect("connected");
        let (mut there, ..) = doorkeeper.arrived().expect("it arrived");
        network.crash();
        drop(slot);
        // From here to the adoption nothing awaits, so nobody looks for users of the slot, of which
        // this guest, with a kernel of its own, is none.
        let network = world.network_with(&tag, &[(number, proxied())]).await;
        let registered = Heard::Registered(address, somebody(), proxied());
        assert_eq!(network.registry.heard(), std::slice::from_ref(&registered), "before all else");
        talk(&mut stream, &mut there).expect("also before it is adopted");
        let _stream = guest.connect(ELSEWHERE).expect("connected");
        assert!(doorkeeper.arrived().is_some());
        let slot = network.adopt(number, &proxied()).await.expect("adopted");
        assert_eq!(network.registry.heard().last(), Some(&registered));
        talk(&mut stream, &mut there).expect("both ways");
        drop(slot);
    });
}

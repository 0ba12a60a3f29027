//! What a guest reaches, and what it does not.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream, UdpSocket};

use torpor_protocol::Network as Policy;

use super::super::names::{GATEWAY, GUEST};
use super::verbs::answer;
use super::world::{
    DATAGRAM_PORT, FORBIDDEN, HOST, PORT, PUBLIC, ROUTER, datagram, fresh_tag, greeting, on_a_host,
};

const ON: Policy = Policy::OPEN;
const OFF: Policy = Policy::CLOSED;

#[test]
fn a_guest_reaches_the_internet_behind_the_hosts_address() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        assert_eq!(slot.link().mtu, 1400, "no larger than the uplink's");
        let guest = network.guest(&slot);
        let mut stream = guest.connect(PUBLIC).expect("connected");
        assert_eq!(greeting(&mut stream).expect("a greeting"), HOST.to_string());
        // Both ways, in large segments with checksums left to the hardware that is not there.
        let data: Vec<u8> = (0..5_000_000_u32).map(|n| n.to_le_bytes()[1]).collect();
        let mut sender = stream.try_clone().expect("a second handle");
        let sent = data.clone();
        let sending = std::thread::spawn(move || sender.write_all(&sent));
        let mut back = vec![0; data.len()];
        stream.read_exact(&mut back).expect("all comes back");
        sending.join().expect("no panic").expect("sent");
        assert!(back == data);
    });
}

#[test]
fn names_are_asked_at_the_gateway() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        assert_eq!(network.nameserver(), GATEWAY);
        let slot = network.take(&ON).await.expect("a slot");
        let guest = network.guest(&slot);
        assert_eq!(guest.ask(GATEWAY, 53).expect("an answer"), HOST.to_string());
        guest.ask(GATEWAY, 54).expect_err("no other service is there");
    });
}

#[test]
fn names_are_asked_although_the_name_server_is_called_like_a_neighbour_of_the_guest() {
    on_a_host(async |world| {
        let server = Ipv4Addr::new(10, 0, 0, 3);
        world.beyond().ip(&format!("addr add {server}/32 dev lo"));
        answer(world.beyond().listen(server, 53));
        let network = world.network_asking(&fresh_tag(), server).await;
        let slot = network.take(&ON).await.expect("a slot");
        let guest = network.guest(&slot);
        assert_eq!(guest.ask(GATEWAY, 53).expect("an answer"), HOST.to_string());
        guest.ask(GATEWAY, 54).expect_err("no other service is there");
    });
}

#[test]
fn private_and_special_addresses_are_refused() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let guest = network.guest(&slot);
        for address in FORBIDDEN {
            let address: Ipv4Addr = address.parse().expect("an address");
            let open = TcpStream::connect((address, PORT));
            // The kernel itself routes nothing to reserved addresses on some versions.
            assert!(
                open.is_ok() || address.octets()[0] >= 240,
                "{address}: from the host it works"
            );
            let error = guest.connect(address).expect_err("refused");
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{address}");
        }
    });
}

#[test]
fn the_host_and_its_network_are_refused() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let guest = network.guest(&slot);
        for address in [HOST, ROUTER] {
            TcpStream::connect((address, PORT)).expect("the host may");
            let error = guest.connect(address).expect_err("refused");
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{address}");
        }
        for address in [Ipv4Addr::LOCALHOST, GATEWAY, slot.address()] {
            // The guest's own loopback is its own: the host's is not behind it.
            guest.connect(address).expect_err("nothing there");
        }
    });
}

#[test]
fn guests_do_not_reach_each_other() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let (one, two) = (network.take(&ON).await, network.take(&ON).await);
        let (one, two) = (one.expect("a slot"), two.expect("a slot"));
        let (guest, other) = (network.guest(&one), network.guest(&two));
        other.serve();
        // From the host it is reached: routes and translation are right.
        let address = (two.address(), PORT);
        TcpStream::connect(address).expect("the host reaches its guest");
        guest.connect(two.address()).expect_err("another guest does not");
        // Both at the same time, with the same address inside.
        for guest in [&guest, &other] {
            let mut stream = guest.connect(PUBLIC).expect("connected");
            greeting(&mut stream).expect("a greeting");
        }
    });
}

#[test]
fn nobody_in_the_world_comes_in_unasked() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let guest = network.guest(&slot).listen(Ipv4Addr::UNSPECIFIED, 9);
        // Although it knows the way, and an answer would find its own.
        world.beyond().ip(&format!("route add 10.213.0.0/16 via {HOST}"));
        let stranger = world.beyond().listen(PUBLIC, 9);
        stranger.send_to(b"from the world", (slot.address(), 9)).expect("sent");
        let host = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        host.send_to(b"from the host", (slot.address(), 9)).expect("sent");
        let mut text = [0; 100];
        let length = guest.recv(&mut text).expect("the host is let in");
        assert_eq!(&text[..length], b"from the host");
    });
}

#[test]
fn guests_of_another_installation_are_not_reached() {
    on_a_host(async |world| {
        let (a, b) = (world.network(&fresh_tag()).await, world.network(&fresh_tag()).await);
        let (one, two) = (a.take(&ON).await.expect("a slot"), b.take(&ON).await.expect("a slot"));
        assert_ne!(one.address(), two.address());
        let (guest, other) = (a.guest(&one), b.guest(&two));
        other.serve();
        let error = guest.connect(two.address()).expect_err("the other installation is closed");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        for guest in [&guest, &other] {
            greeting(&mut guest.connect(PUBLIC).expect("connected")).expect("a greeting");
        }
    });
}

#[test]
fn a_false_source_address_gets_nowhere() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let server = world.beyond().listen(PUBLIC, DATAGRAM_PORT);
        let card = network.card(&slot);
        for address in ["10.9.9.9", "192.0.2.77", "8.8.8.8", &slot.address().to_string()] {
            let frame = datagram(address.parse().expect("an address"), PUBLIC, b"no");
            rustix::io::write(&card, &frame).expect("sent");
        }
        rustix::io::write(&card, &datagram(GUEST, PUBLIC, b"ok")).expect("sent");
        let mut text = [0; 100];
        let length = server.recv(&mut text).expect("the true one arrives");
        assert_eq!(&text[..length], b"ok", "and no other did before");
    });
}

#[test]
fn without_the_internet_everything_is_refused_at_once_names_too() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&OFF).await.expect("a slot");
        let guest = network.guest(&slot);
        let refused = guest.connect(PUBLIC).expect_err("refused");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        for (address, port) in [(GATEWAY, 53), (PUBLIC, 4000)] {
            let error = guest.ask(address, port).expect_err("refused");
            assert_eq!(error.kind(), ErrorKind::HostUnreachable, "{address}: not by silence");
        }
    });
}

#[test]
fn the_internet_can_be_switched_while_the_guest_runs() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let guest = network.guest(&slot);
        let mut stream = guest.connect(PUBLIC).expect("connected");
        greeting(&mut stream).expect("a greeting");

        network.set_policy(&slot, &OFF).await.expect("switched off");
        guest.connect(PUBLIC).expect_err("refused");
        let _ = stream.write_all(b"still there?");
        let error = stream.read(&mut [0; 10]).expect_err("the old connection is cut");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);

        network.set_policy(&slot, &ON).await.expect("switched on");
        greeting(&mut guest.connect(PUBLIC).expect("connected")).expect("a greeting");
        assert_eq!(guest.ask(GATEWAY, 53).expect("an answer"), HOST.to_string());
    });
}

#[test]
fn a_port_that_is_closed_in_the_world_is_known_to_be_closed() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let guest = network.guest(&slot);
        // The world's answer is an ICMP error about a packet that was translated twice.
        let error = guest.ask(PUBLIC, 4000).expect_err("nobody listens");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    });
}

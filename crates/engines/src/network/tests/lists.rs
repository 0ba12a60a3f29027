//! What a guest with lists of addresses reaches.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::process::Command;

use torpor_protocol::Network as Policy;

use super::super::names::{GATEWAY, GUEST, Names};
use super::verbs::{nft, policy, reaches, says};
use super::world::{
    DATAGRAM_PORT, ELSEWHERE, FORBIDDEN, HOST, Opened, PORT, PUBLIC, Place, ROUTER, datagram,
    eventually, fresh_tag, greeting, on_a_host, read,
};

const ON: Policy = Policy::OPEN;

fn asks(guest: &Place) -> bool {
    match guest.ask(GATEWAY, 53) {
        Ok(answer) => {
            assert_eq!(answer, HOST.to_string());
            true
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::HostUnreachable, "not by silence");
            false
        }
    }
}

/// The chains that the firewall has for this slot.
fn chains(network: &Opened, slot: u16) -> Vec<String> {
    let table = Names::new(&network.tag).expect("a tag").table();
    let mut nft = Command::new("nft");
    nft.env("PATH", crate::program::search_path()).args(["list", "table", "inet", &table]);
    let text = String::from_utf8(nft.output().expect("nft runs").stdout).expect("text");
    assert!(text.contains("chain outbound"), "{text}");
    let end = format!("_{slot} {{");
    let ours = |line: &&str| line.trim().starts_with("chain ") && line.ends_with(&end);
    text.lines().filter(ours).map(|line| line.trim().to_owned()).collect()
}

#[test]
fn exactly_what_is_allowed_is_reached_whether_there_is_internet_or_not() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        for internet in [true, false] {
            let only = policy(internet, &["198.51.100.0/24"], &[]);
            let slot = network.take(&only).await.expect("a slot");
            let guest = network.guest(&slot);
            assert!(reaches(&guest, PUBLIC));
            assert!(!reaches(&guest, ELSEWHERE));
            assert_eq!(asks(&guest), internet, "names are for those who have the internet");
        }
    });
}

#[test]
fn what_is_denied_is_not_reached_and_all_the_rest_is() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let but_one = policy(true, &[], &["198.51.100.7"]);
        let slot = network.take(&but_one).await.expect("a slot");
        let guest = network.guest(&slot);
        assert!(!reaches(&guest, PUBLIC));
        assert!(reaches(&guest, ELSEWHERE));
        assert!(asks(&guest));
    });
}

#[test]
fn what_is_denied_is_not_reached_although_it_is_allowed() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let both = policy(true, &["198.51.100.7", "203.0.113.0/24"], &["198.51.100.0/24"]);
        let slot = network.take(&both).await.expect("a slot");
        let guest = network.guest(&slot);
        assert!(!reaches(&guest, PUBLIC));
        assert!(reaches(&guest, ELSEWHERE));
        let nothing = policy(true, &["203.0.113.9"], &["0.0.0.0/0"]);
        network.set_policy(&slot, &nothing).await.expect("changed");
        assert!(!reaches(&guest, ELSEWHERE));
        assert!(!asks(&guest), "who is denied everything has no names either");
    });
}

#[test]
fn what_is_closed_stays_closed_to_a_range_that_goes_beyond_it() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let neighbour = network.take(&ON).await.expect("a slot");
        network.guest(&neighbour).serve();
        let mut closed = FORBIDDEN.map(|text| text.parse().expect("an address")).to_vec();
        closed.extend([neighbour.address(), HOST, ROUTER, network.egress_proxy().address]);
        let slot = network.take(&policy(true, &["0.0.0.0/1", "128.0.0.0/1"], &[])).await;
        let slot = slot.expect("a slot");
        let guest = network.guest(&slot);
        for address in closed {
            guest.connect(address).expect_err("refused");
        }
        assert!(reaches(&guest, PUBLIC));
    });
}

#[test]
fn lists_of_the_longest_length_are_taken_and_may_say_things_twice() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let many: Vec<String> =
            (1..Policy::ENTRIES_MAX).map(|n| format!("45.{}.{}.0/24", n / 200, n % 200)).collect();
        let mut allow: Vec<&str> = many.iter().map(String::as_str).collect();
        allow.push("198.51.100.7");
        let mut deny = allow.clone();
        deny[0] = "198.51.0.0/24";
        deny[1] = "45.0.0.0/8";
        deny.pop();
        let slot = network.take(&policy(false, &allow, &deny)).await.expect("a slot");
        let guest = network.guest(&slot);
        assert!(reaches(&guest, PUBLIC));
        assert!(!reaches(&guest, ELSEWHERE));
    });
}

#[test]
fn a_change_cuts_what_is_open_and_no_longer_allowed_and_nothing_else() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let guest = network.guest(&slot);
        let open = |address| {
            let mut stream = guest.connect(address).expect("connected");
            greeting(&mut stream).expect("a greeting");
            stream
        };
        let (mut cut, mut kept) = (open(PUBLIC), open(ELSEWHERE));
        for change in [
            policy(false, &["203.0.113.9"], &[]),
            policy(true, &[], &["198.51.100.7"]),
            policy(true, &["0.0.0.0/0"], &["198.51.100.0/25"]),
        ] {
            network.set_policy(&slot, &change).await.expect("changed");
            assert_eq!(says(&mut cut), Err(ErrorKind::ConnectionReset), "{change:?}");
            assert_eq!(says(&mut kept), Ok(()), "{change:?}");
            assert!(!reaches(&guest, PUBLIC));
            network.set_policy(&slot, &ON).await.expect("changed");
            cut = open(PUBLIC);
        }
        network.set_policy(&slot, &Policy::CLOSED).await.expect("changed");
        for stream in [&mut cut, &mut kept] {
            assert_eq!(says(stream), Err(ErrorKind::ConnectionReset));
        }
        assert!(!asks(&guest));
    });
}

#[test]
fn late_answers_from_what_is_no_longer_allowed_do_not_come_in() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let servers = [PUBLIC, ELSEWHERE].map(|at| world.beyond().listen(at, DATAGRAM_PORT));
        let card = network.card(&slot);
        let callers = [PUBLIC, ELSEWHERE].map(|to| {
            rustix::io::write(&card, &datagram(GUEST, to, b"hi")).expect("sent");
            let server = if to == PUBLIC { &servers[0] } else { &servers[1] };
            server.recv_from(&mut [0; 100]).expect("a datagram").1
        });
        let only = policy(false, &["203.0.113.9"], &[]);
        network.set_policy(&slot, &only).await.expect("changed");
        servers[0].send_to(b"too late", callers[0]).expect("sent");
        servers[1].send_to(b"still welcome", callers[1]).expect("sent");
        assert!(read(card).ends_with(b"still welcome"), "and nothing before");
    });
}

#[test]
fn the_other_side_of_a_cut_connection_hears_of_it() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let server = world.beyond().listen(PUBLIC, DATAGRAM_PORT);
        let card = network.card(&slot);
        rustix::io::write(&card, &datagram(GUEST, PUBLIC, b"hi")).expect("sent");
        let (_, caller) = server.recv_from(&mut [0; 100]).expect("a datagram");
        server.connect(caller).expect("an address");
        network.set_policy(&slot, &policy(true, &[], &["198.51.100.7"])).await.expect("changed");
        server.send(b"anybody there?").expect("sent");
        let error = server.recv(&mut [0; 100]).expect_err("nobody is");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "not by silence");
    });
}

#[test]
fn a_change_that_is_refused_changes_nothing() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let (listed, guest) = (network.take(&ON).await.expect("a slot"), network.guest(&slot));
        let only = policy(true, &["203.0.113.9"], &[]);
        network.set_policy(&listed, &only).await.expect("changed");
        let other = network.guest(&listed);
        // Somebody sits where the slot's chain belongs.
        let table = Names::new(&network.tag).expect("a tag").table();
        nft(&format!("add chain inet {table} away"));
        let link = Names::new(&network.tag).expect("a tag").link(slot.number());
        nft(&format!("add element inet {table} lists_to {{ \"{link}\" : jump away }}"));
        network.set_policy(&slot, &only).await.expect_err("the place is taken");
        nft(&format!("delete element inet {table} lists_to {{ \"{link}\" }}"));
        assert!(reaches(&guest, PUBLIC) && asks(&guest));
        assert!(reaches(&other, ELSEWHERE) && !reaches(&other, PUBLIC));
        network.set_policy(&slot, &only).await.expect("now there is room");
        assert!(reaches(&guest, ELSEWHERE) && !reaches(&guest, PUBLIC));
    });
}

#[test]
fn a_machine_keeps_its_lists_and_its_connections_while_daemons_come_and_go() {
    on_a_host(async |world| {
        let tag = fresh_tag();
        let network = world.network(&tag).await;
        let only = policy(false, &["203.0.113.9"], &[]);
        let slot = network.take(&only).await.expect("a slot");
        let number = slot.number();
        let guest = network.guest(&slot);
        let mut stream = guest.connect(ELSEWHERE).expect("connected");
        greeting(&mut stream).expect("a greeting");
        network.crash();
        drop(slot);
        // From here to the adoption nothing awaits, so nobody looks for users of the slot, of which
        // this guest, with a kernel of its own, is none.
        let network = world.network_with(&tag, &[(number, only.clone())]).await;
        assert!(!reaches(&guest, PUBLIC), "also before it is adopted");
        assert_eq!(says(&mut stream), Ok(()));
        let slot = network.adopt(number, &only).await.expect("adopted");
        assert!(!reaches(&guest, PUBLIC));
        assert_eq!(says(&mut stream), Ok(()));

        // The same for one that has all it wants by now.
        network.set_policy(&slot, &ON).await.expect("changed");
        network.crash();
        drop(slot);
        let network = world.network_with(&tag, &[(number, ON)]).await;
        assert_eq!(says(&mut stream), Ok(()));
        assert!(reaches(&guest, PUBLIC));
        drop(network);
    });
}

#[test]
fn a_machine_whose_lists_are_not_known_reaches_nothing_until_it_is_adopted() {
    on_a_host(async |world| {
        let tag = fresh_tag();
        let network = world.network(&tag).await;
        let only = policy(true, &["203.0.113.9"], &[]);
        let slot = network.take(&only).await.expect("a slot");
        let number = slot.number();
        let guest = network.guest(&slot);
        network.crash();
        drop(slot);
        // As above, nothing awaits until the adoption.
        let network = world.network(&tag).await;
        assert!(!reaches(&guest, ELSEWHERE) && !asks(&guest));
        let slot = network.adopt(number, &only).await.expect("adopted");
        assert!(reaches(&guest, ELSEWHERE) && !reaches(&guest, PUBLIC));
        drop(slot);
    });
}

#[test]
fn a_slot_is_handed_on_without_the_lists_of_its_former_guest() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let only = policy(false, &["203.0.113.9"], &["198.51.100.7"]);
        let slot = network.take(&only).await.expect("a slot");
        let number = slot.number();
        assert_eq!(chains(&network, number).len(), 8);
        drop(slot);
        let slot = eventually("the slot comes back", async || {
            let slot = network.take(&ON).await.expect("a slot");
            (slot.number() == number).then_some(slot)
        })
        .await;
        assert_eq!(chains(&network, number), Vec::<String>::new());
        let guest = network.guest(&slot);
        assert!(reaches(&guest, PUBLIC) && reaches(&guest, ELSEWHERE) && asks(&guest));
    });
}

#[test]
fn a_slot_without_lists_costs_the_firewall_nothing() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        for whole in [ON, Policy::CLOSED, policy(true, &["0.0.0.0/0"], &[])] {
            let slot = network.take(&whole).await.expect("a slot");
            assert_eq!(chains(&network, slot.number()), Vec::<String>::new(), "{whole:?}");
        }
    });
}

#[test]
fn names_are_asked_of_the_host_itself_where_the_name_server_is_on_it() {
    on_a_host(async |world| {
        let server = UdpSocket::bind((HOST, 53)).expect("a name server on the host");
        std::thread::spawn(move || {
            let mut question = [0; 512];
            while let Ok((_, from)) = server.recv_from(&mut question) {
                let _ = server.send_to(b"an answer", from);
            }
        });
        let network = world.network_asking(&fresh_tag(), HOST).await;
        for (internet, answer) in [(true, true), (false, false)] {
            let only = policy(internet, &["203.0.113.9", "192.0.2.0/23"], &[]);
            let slot = network.take(&only).await.expect("a slot");
            let guest = network.guest(&slot);
            assert_eq!(guest.ask(GATEWAY, 53).is_ok(), answer);
            guest.ask(HOST, 53).expect_err("the host itself is reached by nobody");
            guest.ask(HOST, PORT).expect_err("the host itself is reached by nobody");
        }
    });
}

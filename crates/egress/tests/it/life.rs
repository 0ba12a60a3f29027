//! Policies that change and guests that go while connections are open.

use std::net::Ipv4Addr;

use hickory_proto::rr::RecordType;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use torpor_lifecycle::engine::{GuestRegistry as _, LoggedPacket};
use torpor_protocol::egress::{EgressKind, Verdict};

use crate::interception::hello;
use crate::world::{DEADLINE, ELSEWHERE, SERVER, World, assert_cut, assert_reset, echo};

/// Sends a hello to this host and waits until it came back.
async fn open(world: &World, host: &'static str, port: u16) -> TcpStream {
    let mut stream = world.guest.connect(ELSEWHERE, port).await;
    say(&mut stream, &hello(host)).await;
    stream
}

async fn say(stream: &mut TcpStream, words: &[u8]) {
    stream.write_all(words).await.unwrap();
    let mut back = vec![0; words.len()];
    timeout(DEADLINE, stream.read_exact(&mut back)).await.unwrap().unwrap();
    assert_eq!(back, words);
}

#[tokio::test]
async fn a_new_policy_cuts_the_connections_that_it_refuses() {
    let mut world = World::new(r#"{"allow":["a.test","b.test","127.0.0.2"]}"#).await;
    world.host("a.test", &[SERVER]);
    world.host("b.test", &[SERVER]);
    let (port, _) = world.server(echo).await;
    let (mut a, mut b) = (open(&world, "a.test", port).await, open(&world, "b.test", port).await);
    world.set_policy(r#"{"allow":["a.test","127.0.0.2"]}"#);
    // Not as if it had come to its end.
    assert_reset(&mut b).await;
    let event = world.event(EgressKind::Tcp, Verdict::Denied).await;
    assert_eq!((event.rule.as_str(), event.host.as_deref()), ("policy changed", Some("b.test")));
    say(&mut a, b"still here").await;
    let mut again = world.guest.connect(ELSEWHERE, port).await;
    again.write_all(&hello("b.test")).await.unwrap();
    assert_cut(&mut again).await;
}

#[tokio::test]
async fn who_is_dismissed_loses_its_connections_and_names() {
    let mut world = World::new(r#"{"allow":["a.test","127.0.0.2"]}"#).await;
    world.host("a.test", &[SERVER]);
    let (port, _) = world.server(echo).await;
    let mut stream = open(&world, "a.test", port).await;
    world.egress.unregister(world.guest.address);
    assert_cut(&mut stream).await;
    assert_cut(&mut world.guest.connect(ELSEWHERE, port).await).await;
}

#[tokio::test]
async fn nothing_goes_on_when_nobody_listens_any_more() {
    let mut world = World::new(r#"{"allow":["a.test","127.0.0.2"]}"#).await;
    world.host("a.test", &[SERVER]);
    let (port, _) = world.server(echo).await;
    let mut stream = open(&world, "a.test", port).await;
    let acceptor = world.listening.take().unwrap().connections();
    assert_cut(&mut stream).await;
    // The port is free as soon as the task that had it is gone.
    let refused = async { while TcpStream::connect(acceptor).await.is_ok() {} };
    timeout(DEADLINE, refused).await.unwrap();
}

#[tokio::test]
async fn names_that_were_answered_to_one_guest_are_nothing_to_the_next() {
    let world = World::new(r#"{"allow":["a.test"]}"#).await;
    let address = Ipv4Addr::new(203, 0, 113, 7);
    world.host("a.test", &[address]);
    world.guest.ask("a.test.", RecordType::A).await;
    let next = torpor_protocol::SandboxId::random();
    let policy = crate::world::network(r#"{"allow":["a.test"]}"#);
    world.egress.register(world.guest.address, &next, &policy);
    let mut stream = world.guest.connect(address, 2222).await;
    stream.write_all(b"SSH-2.0-x\r\n").await.unwrap();
    assert_cut(&mut stream).await;
    let events = world.egress.audit().recent(&next, 10);
    assert_eq!(events.last().unwrap().rule, "no host");
}

#[tokio::test]
async fn what_the_firewall_decides_is_told_too() {
    let world = World::new("{}").await;
    let packet = LoggedPacket { protocol: 17, to: ELSEWHERE, port: 443, allowed: false };
    world.egress.packet_logged(world.guest.address, packet);
    world.egress.packet_logged(Ipv4Addr::new(127, 9, 9, 9), packet);
    let event = world.event(EgressKind::Udp, Verdict::Denied).await;
    assert_eq!((event.rule.as_str(), event.port), ("firewall", Some(443)));
    assert_eq!(world.egress.audit().counts().by_kind["udp"].denied, 1);
}

//! Connections that are relayed unchanged, or refused.

use std::net::Ipv4Addr;
use std::sync::atomic::Ordering;

use hickory_proto::rr::RecordType;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;
use torpor_protocol::egress::{EgressKind, Verdict};

use crate::interception::{hello, tls_client, tls_server};
use crate::world::{
    DEADLINE, ELSEWHERE, SERVER, World, all, assert_cut, assert_reset, echo, greet_and_echo, web,
};

const ALLOWED: &str = r#"{"allow":["a.test","127.0.0.2"]}"#;

#[tokio::test]
async fn what_is_reached_is_the_host_that_was_named_and_not_the_address() {
    let mut world = World::new(ALLOWED).await;
    world.host("a.test", &[SERVER]);
    let (port, count) = world.server(web).await;
    let request = "GET /x HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n";
    // Somebody else's address, with the name of an allowed host.
    let answer = world.guest.http(ELSEWHERE, port, request).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("GET /x"), "{answer}");
    assert_eq!(count.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_denied_plain_request_is_told_why() {
    let world = World::new(r#"{"allow":["a.test"],"deny":["bad.test"]}"#).await;
    let request = "POST /p?secret HTTP/1.1\r\nHost: bad.test\r\nContent-Length: 3\r\n\r\nabc";
    let answer = world.guest.http(ELSEWHERE, 80, request).await;
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    assert!(answer.contains("proxy-error: denied-by-policy"), "{answer}");
    let body: serde_json::Value =
        serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert_eq!(body["code"], "denied_by_policy");
    assert!(body["message"].as_str().unwrap().contains("bad.test"));
    let event = world.event(EgressKind::Http, Verdict::Denied).await;
    assert_eq!(event.rule, "bad.test");
    assert_eq!((event.method.as_deref(), event.path.as_deref()), (Some("POST"), Some("/p")));
    assert_eq!((event.address, event.port), (Some(ELSEWHERE), Some(80)));
}

#[tokio::test]
async fn tls_is_relayed_unchanged_by_its_server_name() {
    let mut world = World::new(ALLOWED).await;
    world.host("a.test", &[SERVER]);
    let (port, roots) = tls_server(&mut world, "a.test").await;
    let stream = world.guest.connect(ELSEWHERE, port).await;
    // The certificate is the server's own.
    let mut stream = tls_client(stream, "a.test", &roots).await.unwrap();
    stream.write_all(b"ping").await.unwrap();
    let mut back = [0; 4];
    timeout(DEADLINE, stream.read_exact(&mut back)).await.unwrap().unwrap();
    assert_eq!(&back, b"ping");
    let event = world.event(EgressKind::Tls, Verdict::Allowed).await;
    assert_eq!((event.rule.as_str(), event.host.as_deref()), ("a.test", Some("a.test")));
}

#[tokio::test]
async fn tls_to_another_host_is_reset_also_at_an_address_of_an_allowed_one() {
    let mut world = World::new(r#"{"allow":["a.test"]}"#).await;
    let address = Ipv4Addr::new(203, 0, 113, 7);
    world.host("a.test", &[address]);
    let (_, count) = world.server(echo).await;
    world.guest.ask("a.test.", RecordType::A).await;
    let mut stream = world.guest.connect(address, 443).await;
    stream.write_all(&hello("bad.test")).await.unwrap();
    assert_reset(&mut stream).await;
    let event = world.event(EgressKind::Tls, Verdict::Denied).await;
    assert_eq!((event.rule.as_str(), event.host.as_deref()), ("allow", Some("bad.test")));
    assert_eq!(count.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn tls_without_a_name_is_attributed_by_what_the_guest_was_answered() {
    let mut world = World::new(ALLOWED).await;
    world.host("a.test", &[SERVER]);
    let (port, _) = world.server(echo).await;
    let nameless = hello("203.0.113.7");
    let mut stream = world.guest.connect(ELSEWHERE, port).await;
    stream.write_all(&nameless).await.unwrap();
    assert_reset(&mut stream).await;
    assert_eq!(world.event(EgressKind::Tls, Verdict::Denied).await.rule, "no host");

    world.guest.ask("a.test.", RecordType::A).await;
    let mut stream = world.guest.connect(SERVER, port).await;
    stream.write_all(&nameless).await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(all(&mut stream).await.unwrap(), nameless);
}

#[tokio::test]
async fn a_server_may_speak_first() {
    // Not by a range of addresses: the host of that address is what allows it.
    let mut world = World::new(r#"{"allow":["alias.test","127.0.0.2"]}"#).await;
    let public = Ipv4Addr::new(203, 0, 113, 7);
    world.alias("alias.test", "real.test");
    world.host("real.test", &[public, SERVER]);
    let (port, _) = world.server(greet_and_echo).await;
    world.guest.ask("alias.test.", RecordType::A).await;
    // It is known by now that the first address of that host does not answer.
    world.host("real.test", &[SERVER]);
    let mut stream = world.guest.connect(SERVER, port).await;
    let mut greeting = [0; 3];
    timeout(DEADLINE, stream.read_exact(&mut greeting)).await.unwrap().unwrap();
    assert_eq!(&greeting, b"hi\n");
    stream.write_all(b"SSH-2.0-x\r\n").await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(all(&mut stream).await.unwrap(), b"SSH-2.0-x\r\n");
}

#[tokio::test]
async fn who_lets_the_server_speak_first_cant_name_a_denied_host_later() {
    let mut world = World::new(r#"{"allow":["*.test","127.0.0.2"],"deny":["bad.test"]}"#).await;
    world.host("a.test", &[SERVER]);
    let (port, _) = world.server(greet_and_echo).await;
    world.guest.ask("a.test.", RecordType::A).await;
    let late: [&[u8]; 2] = [&hello("bad.test"), b"GET / HTTP/1.1\r\nHost: bad.test\r\n\r\n"];
    for words in late {
        let mut stream = world.guest.connect(SERVER, port).await;
        let mut greeting = [0; 3];
        timeout(DEADLINE, stream.read_exact(&mut greeting)).await.unwrap().unwrap();
        stream.write_all(words).await.unwrap();
        assert_cut(&mut stream).await;
    }
    assert_eq!(world.event(EgressKind::Tls, Verdict::Denied).await.rule, "bad.test");
    assert_eq!(world.event(EgressKind::Http, Verdict::Denied).await.rule, "bad.test");
}

#[tokio::test]
async fn an_allowed_name_that_leads_to_a_private_address_leads_nowhere() {
    let world = World::new(r#"{"allow":["*.test","127.0.0.2"]}"#).await;
    world.host("a.test", &[Ipv4Addr::LOCALHOST]);
    world.host("b.test", &[Ipv4Addr::new(169, 254, 169, 254)]);
    let mut stream = world.guest.connect(ELSEWHERE, 443).await;
    stream.write_all(&hello("a.test")).await.unwrap();
    assert_reset(&mut stream).await;
    assert_eq!(world.event(EgressKind::Tls, Verdict::Denied).await.rule, "private");
    let request = "GET /latest/meta-data HTTP/1.1\r\nHost: b.test\r\nConnection: close\r\n\r\n";
    let answer = world.guest.http(ELSEWHERE, 80, request).await;
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    assert_eq!(world.event(EgressKind::Http, Verdict::Denied).await.rule, "private");
}

#[tokio::test]
async fn a_private_address_is_refused_whatever_host_is_named() {
    let world = World::new(r#"{"allow":["a.test","0.0.0.0/0"]}"#).await;
    world.host("a.test", &[ELSEWHERE]);
    let metadata = Ipv4Addr::new(169, 254, 169, 254);
    for request in ["Host: a.test", "Host: 169.254.169.254", "X: y"] {
        let request = format!("GET / HTTP/1.1\r\n{request}\r\n\r\n");
        let answer = world.guest.http(metadata, 80, &request).await;
        assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    }
    assert_eq!(world.event(EgressKind::Http, Verdict::Denied).await.rule, "private");
}

#[tokio::test]
async fn strangers_and_visitors_of_the_egress_proxy_itself_are_cut() {
    let world = World::new("{}").await;
    assert_reset(&mut world.guest.connect_directly().await).await;
    let stranger = world.guest.at(Ipv4Addr::new(127, 9, 9, 9));
    assert_reset(&mut stranger.connect(ELSEWHERE, 80).await).await;
    // At once, without a decision about where they wanted to go.
    assert!(world.egress.audit().recent(&world.guest.id, 10).is_empty());
}

#[tokio::test]
async fn on_a_port_of_the_web_only_http_and_tls_are_spoken() {
    let world = World::new(r#"{"allow":["a.test"]}"#).await;
    let address = Ipv4Addr::new(203, 0, 113, 7);
    world.host("a.test", &[address]);
    world.guest.ask("a.test.", RecordType::A).await;
    let long = format!("GET / HTTP/1.1\r\nHost: a.test\r\nX: {}", "x".repeat(40 * 1024));
    let preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    for words in ["SSH-2.0-x\r\n", &long, "\u{16}\u{3}\u{1}\0\u{4}\u{1}\0\0\0", preface] {
        let mut stream = world.guest.connect(address, 443).await;
        stream.write_all(words.as_bytes()).await.unwrap();
        assert_reset(&mut stream).await;
    }
    let events = world.egress.audit().recent(&world.guest.id, 10);
    let denied = events.iter().filter(|event| event.verdict == Verdict::Denied);
    assert!(denied.clone().all(|event| event.rule == "protocol"), "{events:?}");
    assert_eq!(denied.count(), 4);
}

#[tokio::test]
async fn a_half_closed_connection_goes_on_the_other_way() {
    let mut world = World::new(r#"{"allow":["127.0.0.2"]}"#).await;
    let (port, _) = world.server(echo).await;
    let mut stream = world.guest.connect(SERVER, port).await;
    let many = vec![7_u8; 3_000_000];
    let (mut from, mut to) = stream.split();
    let sending = async {
        to.write_all(&many).await.unwrap();
        to.shutdown().await.unwrap();
    };
    let ((), back) = tokio::join!(sending, all(&mut from));
    assert!(back.unwrap() == many);
    let event = world.event(EgressKind::Tcp, Verdict::Allowed).await;
    assert_eq!(event.rule, "127.0.0.2");
}

#[tokio::test]
async fn a_host_that_is_not_there_is_a_failure_and_no_denial() {
    let world = World::new(r#"{"allow":["a.test"]}"#).await;
    let request = "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n";
    let answer = world.guest.http(ELSEWHERE, 80, request).await;
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
    let mut stream = world.guest.connect(ELSEWHERE, 443).await;
    stream.write_all(&hello("a.test")).await.unwrap();
    assert_reset(&mut stream).await;
    assert_eq!(world.event(EgressKind::Tls, Verdict::Failed).await.rule, "a.test");
}

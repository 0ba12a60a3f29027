//! Ways out that policies choose.

use std::net::Ipv4Addr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use torpor_egress::Settings;
use torpor_protocol::egress::{EgressKind, Verdict};

use crate::interception::hello;
use crate::world::{ELSEWHERE, FakeVault, SERVER, World, all, assert_reset, echo, network};

const POLICY: &str = r#"{"allow":["a.test","127.0.0.2"],"gateway":"office"}"#;

fn through(text: &str) -> Settings {
    let gateways = [("office".parse().unwrap(), text.parse().unwrap())].into();
    Settings { gateways, ..Settings::default() }
}

/// What a proxy heard before it connected.
type Heard = Arc<Mutex<Vec<u8>>>;

/// So many bytes are heard, and then this is answered.
type Exchanges = Vec<(usize, Vec<u8>)>;

/// Where a proxy will be.
async fn place() -> (TcpListener, u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// A proxy for one connection, which connects with the server at `port` whatever it is asked for.
async fn act(listener: TcpListener, exchanges: Exchanges, heard: Heard, port: u16) {
    let (mut guest, _) = listener.accept().await.unwrap();
    for (count, answer) in exchanges {
        let mut words = vec![0; count];
        guest.read_exact(&mut words).await.unwrap();
        heard.lock().extend(words);
        guest.write_all(&answer).await.unwrap();
    }
    let mut world = TcpStream::connect((SERVER, port)).await.unwrap();
    let _ = copy_bidirectional(&mut guest, &mut world).await;
}

/// What comes back of a hello to `a.test`.
async fn roundtrip(world: &World, port: u16) -> Vec<u8> {
    let mut stream = world.guest.connect(ELSEWHERE, port).await;
    stream.write_all(&hello("a.test")).await.unwrap();
    stream.shutdown().await.unwrap();
    all(&mut stream).await.unwrap()
}

#[tokio::test]
async fn an_http_proxy_is_asked_for_the_address_with_its_password() {
    let ((listener, proxy_port), heard) = (place().await, Heard::default());
    let settings = through(&format!("http://ann:pw@127.0.0.1:{proxy_port}"));
    let mut world = World::with(POLICY, settings, FakeVault::default()).await;
    world.host("a.test", &[SERVER]);
    let (port, _) = world.server(echo).await;
    let request = format!(
        "CONNECT 127.0.0.2:{port} HTTP/1.1\r\nhost: 127.0.0.2:{port}\r\n\
         proxy-authorization: Basic YW5uOnB3\r\n\r\n"
    );
    let exchanges = vec![(request.len(), b"HTTP/1.1 200 fine\r\nx: y\r\n\r\n".to_vec())];
    world.spawn(act(listener, exchanges, Arc::clone(&heard), port));
    assert_eq!(roundtrip(&world, port).await[..2], [0x16, 3]);
    assert_eq!(String::from_utf8(heard.lock().clone()).unwrap(), request);
    let event = world.event(EgressKind::Tls, Verdict::Allowed).await;
    assert_eq!(event.gateway.as_ref().unwrap().to_string(), "office");
}

#[tokio::test]
async fn a_socks_proxy_is_asked_for_the_address_with_its_password() {
    let ((listener, proxy_port), heard) = (place().await, Heard::default());
    let settings = through(&format!("socks5://ann:pw@127.0.0.1:{proxy_port}"));
    let mut world = World::with(POLICY, settings, FakeVault::default()).await;
    world.host("a.test", &[SERVER]);
    let (port, _) = world.server(echo).await;
    let exchanges = vec![
        (4, vec![5, 2]),
        (8, vec![1, 0]),
        (10, vec![5, 0, 0, 3, 4, b'h', b'o', b's', b't', 0, 0]),
    ];
    world.spawn(act(listener, exchanges, Arc::clone(&heard), port));
    assert_eq!(roundtrip(&world, port).await[..2], [0x16, 3]);
    let mut expected = vec![5, 2, 0, 2, 1, 3];
    expected.extend(b"ann\x02pw");
    expected.extend([5, 1, 0, 1, 127, 0, 0, 2]);
    expected.extend(port.to_be_bytes());
    assert_eq!(*heard.lock(), expected);
}

#[tokio::test]
async fn a_source_address_is_where_connections_come_from() {
    let settings = through("source 127.0.0.77");
    let mut world = World::with(POLICY, settings, FakeVault::default()).await;
    world.host("a.test", &[SERVER]);
    let (port, _) = world
        .server(|mut stream| async move {
            let from = stream.peer_addr()?.ip().to_string();
            stream.write_all(from.as_bytes()).await
        })
        .await;
    let mut stream = world.guest.connect(ELSEWHERE, port).await;
    stream.write_all(&hello("a.test")).await.unwrap();
    let mut from = [0; 10];
    stream.read_exact(&mut from).await.unwrap();
    assert_eq!(&from, b"127.0.0.77");
}

#[tokio::test]
async fn without_its_gateway_a_policy_has_no_way_out() {
    let mut world = World::new(POLICY).await;
    world.host("a.test", &[SERVER]);
    let (port, count) = world.server(echo).await;
    let mut stream = world.guest.connect(ELSEWHERE, port).await;
    stream.write_all(&hello("a.test")).await.unwrap();
    assert_reset(&mut stream).await;
    world.event(EgressKind::Tls, Verdict::Failed).await;
    assert_eq!(count.load(std::sync::atomic::Ordering::Relaxed), 0);
    let error = world.egress.check(&network(POLICY)).unwrap_err();
    assert!(error.contains("office") && error.contains("egress.gateways"), "{error}");
}

#[tokio::test]
async fn a_proxy_that_refuses_is_a_failure() {
    let (listener, proxy_port) = place().await;
    let settings = through(&format!("http://127.0.0.1:{proxy_port}"));
    let mut world = World::with(POLICY, settings, FakeVault::default()).await;
    world.host("a.test", &[SERVER]);
    let exchanges = vec![(1, b"HTTP/1.1 407 no\r\n\r\n".to_vec())];
    world.spawn(act(listener, exchanges, Heard::default(), 1));
    let request = "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n";
    let answer = world.guest.http(ELSEWHERE, 8080, request).await;
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
}

#[tokio::test]
async fn gateways_are_told_without_passwords() {
    let settings = through("http://ann:pw@proxy.example:3128");
    let world = World::with("{}", settings, FakeVault::default()).await;
    let told = world.egress.gateways();
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].through, "http://proxy.example:3128");
}

#[tokio::test]
async fn a_private_range_needs_the_operator() {
    let world = World::new("{}").await;
    world.egress.check(&network(r#"{"allow":["127.0.0.2","0.0.0.0/0","8.0.0.0/5"]}"#)).unwrap();
    world.egress.check(&network(r#"{"deny":["10.0.0.0/8"]}"#)).unwrap();
    let error = world.egress.check(&network(r#"{"allow":["10.1.0.0/16"]}"#)).unwrap_err();
    assert!(error.contains("10.1.0.0/16") && error.contains("egress.private"), "{error}");
}

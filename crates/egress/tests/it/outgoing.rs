//! Requests of the daemon itself.

use std::io;
use std::net::Ipv4Addr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use torpor_egress::Settings;
use torpor_egress::outgoing::{Client, SendError, whole};

use crate::interception::web_over_tls;
use crate::world::{DEADLINE, FakeVault, SERVER, World, web};

/// A host of ours, at which loopback is open to outgoing requests.
async fn open() -> World {
    let settings =
        Settings { outgoing: vec!["127.0.0.0/8".parse().unwrap()], ..Settings::default() };
    World::with("{}", settings, FakeVault::default()).await
}

fn get(url: &str) -> Request<Bytes> {
    Request::get(url).body(Bytes::new()).unwrap()
}

async fn text(client: &Client, url: &str) -> String {
    let answer = client.send(get(url), DEADLINE).await.unwrap();
    let body = whole("it", answer.into_body(), 1000, DEADLINE).await.unwrap();
    String::from_utf8(body.to_vec()).unwrap()
}

#[tokio::test]
async fn a_request_goes_where_its_name_resolves_to_and_the_connection_is_used_again() {
    let mut world = open().await;
    let (port, connections) = world.server(web).await;
    world.host("hooks.test", &[SERVER]);
    let client = world.egress.outgoing();
    for _ in 0..3 {
        let said = text(client, &format!("http://hooks.test:{port}/a?b=c")).await;
        assert_eq!(said, format!("GET /a?b=c HTTP/1.1 | host: hooks.test:{port}"));
    }
    assert_eq!(connections.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_closed_address_is_refused_however_it_is_named() {
    let mut world = World::new("{}").await;
    let (port, connections) = world.server(web).await;
    world.host("inside.test", &[SERVER]);
    world.host("half.test", &[Ipv4Addr::new(203, 0, 113, 1), Ipv4Addr::new(169, 254, 169, 254)]);
    let client = world.egress.outgoing();
    for host in ["127.0.0.2", "inside.test", "half.test", "169.254.169.254"] {
        let url = format!("http://{host}:{port}/");
        let refused = client.send(get(&url), DEADLINE).await.unwrap_err();
        assert!(matches!(refused, SendError::Closed { .. }), "{host}: {refused}");
    }
    assert!(matches!(client.check("http://10.0.0.1/"), Err(SendError::Closed { .. })));
    assert!(client.check("https://hooks.example/path").is_ok());
    assert_eq!(connections.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn what_is_near_this_host_is_closed_too() {
    let near = vec!["203.0.113.0/24".parse().unwrap()];
    let world = World::with("{}", Settings { near, ..Settings::default() }, FakeVault::default());
    let client = world.await.egress.outgoing().clone();
    let refused = client.send(get("http://203.0.113.9/"), DEADLINE).await.unwrap_err();
    assert!(matches!(refused, SendError::Closed { .. }), "{refused}");
}

#[tokio::test]
async fn certificates_are_verified_with_the_roots_of_the_operator() {
    let mut world = open().await;
    world.host("hooks.test", &[SERVER]);
    let (port, certificate) = web_over_tls(&mut world, "hooks.test").await;
    let url = format!("https://hooks.test:{port}/");
    let refused = world.egress.outgoing().send(get(&url), DEADLINE).await.unwrap_err();
    assert!(matches!(refused, SendError::Unreachable { .. }), "{refused}");
    assert!(refused.to_string().contains("certificate"), "{refused}");

    let outgoing = vec!["127.0.0.0/8".parse().unwrap()];
    let settings = Settings { outgoing, extra_ca: vec![certificate], ..Settings::default() };
    let mut trusting = World::with("{}", settings, FakeVault::default()).await;
    trusting.host("hooks.test", &[SERVER]);
    trusting.spawn(async move {
        let _world = world;
        std::future::pending::<()>().await;
    });
    let said = text(trusting.egress.outgoing(), &url).await;
    assert_eq!(said, format!("GET / HTTP/1.1 | host: hooks.test:{port}"));
}

#[tokio::test]
async fn a_redirect_is_an_answer() {
    async fn redirect(mut stream: TcpStream) -> io::Result<()> {
        let _ = stream.read(&mut [0; 4096]).await?;
        stream
            .write_all(
                b"HTTP/1.1 307 Go\r\nlocation: http://10.0.0.1/\r\ncontent-length: 0\r\n\r\n",
            )
            .await
    }
    let mut world = open().await;
    let (port, _) = world.server(redirect).await;
    let url = format!("http://{SERVER}:{port}/");
    let answer = world.egress.outgoing().send(get(&url), DEADLINE).await.unwrap();
    assert_eq!(answer.status(), 307);
}

#[tokio::test]
async fn who_is_slow_or_says_too_much_is_cut_off() {
    async fn silent(stream: TcpStream) -> io::Result<()> {
        std::future::pending::<()>().await;
        drop(stream);
        Ok(())
    }
    async fn endless(mut stream: TcpStream) -> io::Result<()> {
        let _ = stream.read(&mut [0; 4096]).await?;
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
        loop {
            stream.write_all(&[b'x'; 4096]).await?;
        }
    }
    async fn drip(mut stream: TcpStream) -> io::Result<()> {
        let _ = stream.read(&mut [0; 4096]).await?;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx").await?;
        std::future::pending().await
    }
    let mut world = open().await;
    let soon = Duration::from_millis(50);
    let (port, _) = world.server(silent).await;
    let client = world.egress.outgoing().clone();
    let slow = client.send(get(&format!("http://{SERVER}:{port}/")), soon).await.unwrap_err();
    assert_eq!(slow, SendError::Slow { host: SERVER.to_string(), limit: soon });

    let (port, _) = world.server(endless).await;
    let answer = client.send(get(&format!("http://{SERVER}:{port}/")), DEADLINE).await.unwrap();
    let long = whole("it", answer.into_body(), 100_000, DEADLINE).await.unwrap_err();
    assert_eq!(long, SendError::TooLong { limit: 100_000 });

    let (port, _) = world.server(drip).await;
    let answer = client.send(get(&format!("http://{SERVER}:{port}/")), DEADLINE).await.unwrap();
    let slow = whole("it", answer.into_body(), 100_000, soon).await.unwrap_err();
    assert_eq!(slow, SendError::Slow { host: "it".to_owned(), limit: soon });
}

//! One address or two.

use std::net::SocketAddr;
use std::time::Duration;

use http::Method;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use torpor_daemon::config::{Limits, ListenAlso, Secret};
use torpor_daemon::{Config, ServeError, ShutdownMode, serve_with};
use torpor_lifecycle::fake::{FakeHost, Inside};
use torpor_testdaemon::parts;

use crate::client::{request, send};
use crate::world::World;

/// An address that nobody uses.
async fn free(ip: [u8; 4]) -> SocketAddr {
    TcpListener::bind(SocketAddr::from((ip, 0))).await.unwrap().local_addr().unwrap()
}

fn also(address: SocketAddr) -> Config {
    Config { listen_also: Some(ListenAlso::At(address)), ..Config::default() }
}

/// What a daemon ends with that does not even begin.
async fn refused(config: Config) -> ServeError {
    let dir = tempfile::tempdir().unwrap();
    let parts = parts(dir.path(), &FakeHost::new(Inside::Scripted), &["torpor/base"]).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (_stop, shutdown) = tokio::sync::oneshot::channel();
    serve_with(parts, config, listener, shutdown).await.unwrap_err()
}

#[tokio::test]
async fn a_second_address_gives_the_same_answers() {
    let second = free([127, 0, 0, 1]).await;
    let mut world = World::with(also(second)).await;
    world.create(serde_json::json!({"name": "web"})).await.expect(201);
    for address in [world.address, second] {
        let asked = request(Method::GET, "/v1/sandboxes/web", "");
        assert_eq!(send(address, asked).await.expect(200)["name"], "web");
    }
    world.stop(ShutdownMode::Running).await.unwrap();
    assert!(TcpListener::bind(second).await.is_ok(), "nobody listens there any more");
}

#[tokio::test]
async fn a_second_address_that_is_taken_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let error = refused(also(taken.local_addr().unwrap())).await;
    assert!(matches!(error, ServeError::PortInUse(_)), "{error:?}");
    assert!(error.hint().unwrap().contains("TORPOR_LISTEN_ALSO"), "{error}");
}

#[tokio::test]
async fn a_second_address_that_others_reach_needs_a_key() {
    let error = refused(also(free([0; 4]).await)).await;
    assert!(matches!(error, ServeError::Exposed(_)), "{error:?}");

    let key = Some(Secret("a-long-enough-key".to_owned()));
    let second = free([0; 4]).await;
    let world = World::with(Config { api_key: key, ..also(second) }).await;
    for address in [world.address, SocketAddr::from(([127, 0, 0, 1], second.port()))] {
        let asked = request(Method::GET, "/v1/sandboxes", "");
        send(address, asked).await.expect_error(401, "unauthenticated");
    }
}

#[tokio::test]
async fn a_head_that_does_not_end_is_cut_off_before_it_costs_much() {
    let world = World::new().await;
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    let begin = format!("GET /healthz HTTP/1.1\r\nhost: {}\r\nx-long: ", world.address);
    stream.write_all(begin.as_bytes()).await.unwrap();
    let mut sent = 0;
    // It is refused at once, not after the time that a head may take.
    let refused = async {
        let mut answer = [0; 64];
        loop {
            tokio::select! {
                read = stream.read(&mut answer) => {
                    let count = read.unwrap_or(0);
                    break String::from_utf8_lossy(&answer[..count]).into_owned();
                }
                () = tokio::time::sleep(Duration::from_millis(1)), if sent < 400 => sent += 1,
            }
            let _ = stream.write_all(&[b'x'; 1024]).await;
        }
    };
    let answer = tokio::time::timeout(Duration::from_secs(10), refused).await.expect("in time");
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    assert!(sent < 400, "all of it was read");
    assert_eq!(world.get("/healthz").await.text(), "ok");
}

#[tokio::test]
async fn those_who_connect_and_say_nothing_take_nobodys_place() {
    let limits = Limits { connections: 4, ..Config::default().limits };
    let world = World::with(Config { limits, ..Config::default() }).await;
    let mut silent = Vec::new();
    for _ in 0..8 {
        silent.push(TcpStream::connect(world.address).await.unwrap());
    }
    assert_eq!(world.get("/healthz").await.text(), "ok");
}

//! One address or two.

use std::net::SocketAddr;

use http::Method;
use tokio::net::TcpListener;
use torpor_daemon::config::{ListenAlso, Secret};
use torpor_daemon::{Config, Leave, ServeError, serve_with};
use torpor_lifecycle::fake::{FakeHost, Inside};

use crate::client::{request, send};
use crate::world::{World, parts};

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
    let parts = parts(dir.path(), &FakeHost::new(Inside::Scripted)).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    serve_with(parts, config, listener, std::future::pending()).await.unwrap_err()
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
    world.stop(Leave::Running).await.unwrap();
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

//! Which ports of a sandbox are reached from outside, and by whom.

use base64::Engine as _;
use http::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;
use torpor_daemon::Config;
use torpor_daemon::config::Secret;

use crate::client::{Answer, request, send};
use crate::world::World;

const KEY: &str = "a-long-enough-key";

/// A server "inside" that answers with what it was asked, as long as this lives; and its port.
async fn echo() -> (u16, AbortOnDropHandle<()>) {
    let answer = |head: &[u8]| {
        let begin = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", head.len());
        [begin.as_bytes(), head].concat()
    };
    serve(answer).await
}

/// The same with other answers to the head of a request.
async fn serve(answer: impl Fn(&[u8]) -> Vec<u8> + Send + 'static) -> (u16, AbortOnDropHandle<()>) {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let serving = tokio::spawn(async move {
        loop {
            let (mut stream, _) = server.accept().await.unwrap();
            let mut head = [0; 4096];
            let count = stream.read(&mut head).await.unwrap();
            stream.write_all(&answer(&head[..count])).await.unwrap();
        }
    });
    (port, AbortOnDropHandle::new(serving))
}

async fn visit(world: &World, port: u16, headers: &[(&'static str, &str)]) -> Answer {
    let mut asked = request(Method::GET, "/page", "");
    let host = format!("{port}-web.localhost");
    for (name, value) in [("host", host.as_str())].iter().chain(headers) {
        asked.headers_mut().insert(*name, value.parse().unwrap());
    }
    send(world.address, asked).await
}

/// A world that needs a key, with a sandbox whose ports are open like this.
async fn guarded(ports: Value) -> World {
    let key = Some(Secret(KEY.to_owned()));
    let world = World::with(Config { api_key: key, ..Config::default() }).await;
    let body = json!({"name": "web", "ports": ports}).to_string();
    let mut asked = request(Method::POST, "/v1/sandboxes", body);
    asked.headers_mut().insert("content-type", "application/json".parse().unwrap());
    asked.headers_mut().insert("x-api-key", KEY.parse().unwrap());
    send(world.address, asked).await.expect(201);
    world
}

#[tokio::test]
async fn a_port_that_is_not_exposed_is_not_reached() {
    let world = World::new().await;
    let ((open, _open), (closed, _closed)) = (echo().await, echo().await);
    world.create(json!({"name": "web", "ports": {"exposed": [open]}})).await.expect(201);
    assert_eq!(visit(&world, open, &[]).await.status, 200);
    let refused = visit(&world, closed, &[]).await;
    assert_eq!(refused.status, 403);
    assert_eq!(refused.json()["code"], "port_not_exposed");
    assert!(refused.text().contains(&closed.to_string()), "{}", refused.text());
}

#[tokio::test]
async fn a_sandbox_is_not_woken_for_a_port_that_is_not_exposed() {
    let world = World::new().await;
    world.create(json!({"name": "web", "ports": {"exposed": []}})).await.expect(201);
    world.tell("/v1/sandboxes/web/sleep").await;
    world.wait("web", "state", json!("asleep")).await;
    assert_eq!(visit(&world, 80, &[]).await.status, 403);
    assert_eq!(world.get("/v1/sandboxes/web").await.expect(200)["state"], "asleep");
}

#[tokio::test]
async fn an_exposed_port_needs_a_key_where_keys_are_needed() {
    let (port, _server) = echo().await;
    let world = guarded(json!({"exposed": [port]})).await;
    assert_eq!(visit(&world, port, &[]).await.status, 401);
    assert_eq!(visit(&world, port, &[("x-api-key", "wrong")]).await.status, 401);
    let bearer = format!("Bearer {KEY}");
    for (name, value) in [("x-api-key", KEY), ("authorization", bearer.as_str())] {
        let answer = visit(&world, port, &[(name, value)]).await;
        assert_eq!(answer.status, 200);
        assert!(!answer.text().contains(KEY), "the key reached the sandbox: {}", answer.text());
    }
}

#[tokio::test]
async fn a_public_port_is_for_everybody() {
    let (port, _server) = echo().await;
    let world = guarded(json!({"exposed": [port], "public": true})).await;
    assert_eq!(visit(&world, port, &[]).await.status, 200);
    assert_eq!(visit(&world, 1, &[]).await.status, 403);
}

#[tokio::test]
async fn without_a_word_about_ports_all_are_reached_with_a_key() {
    let (port, _server) = echo().await;
    let world = guarded(Value::Null).await;
    assert_eq!(visit(&world, port, &[]).await.status, 401);
    assert_eq!(visit(&world, port, &[("x-api-key", KEY)]).await.status, 200);
    let world = World::with_sandbox().await;
    assert_eq!(visit(&world, port, &[]).await.status, 200);
}

#[tokio::test]
async fn no_key_of_ours_reaches_a_server_inside_however_it_is_sent() {
    let (port, _server) = echo().await;
    let world = guarded(json!({"exposed": [port], "public": true})).await;
    let basic =
        format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(format!(":{KEY}")));
    for (name, value) in [
        ("authorization", format!("Bearer {KEY}")),
        ("authorization", format!("bearer  {KEY}")),
        ("authorization", KEY.to_owned()),
        ("authorization", basic.clone()),
        ("x-api-key", KEY.to_owned()),
        ("x-anything", format!("a {KEY}, b")),
        ("cookie", format!("a=1; key={KEY}")),
        ("referer", format!("http://h/?key={KEY}")),
    ] {
        let answer = visit(&world, port, &[(name, &value), ("x-own", "mine")]).await;
        assert_eq!(answer.status, 200);
        let seen = answer.text();
        assert!(!seen.contains(KEY) && !seen.contains(&basic), "{name}: {value}: {seen}");
        assert!(seen.contains("mine"), "{seen}");
    }
    let mut asked = request(Method::GET, &format!("/page?key={KEY}"), "");
    asked.headers_mut().insert("host", format!("{port}-web.localhost").parse().unwrap());
    send(world.address, asked).await.expect_error(400, "invalid_request");
}

#[tokio::test]
async fn a_server_behind_a_port_can_not_set_our_cookie() {
    let cookies = "set-cookie: torpor_preview=forged; Domain=localhost\r\nset-cookie: own=1\r\n";
    let (port, _server) = serve(move |_| {
        format!("HTTP/1.1 200 OK\r\n{cookies}content-length: 0\r\n\r\n").into_bytes()
    })
    .await;
    let world = World::with_sandbox().await;
    let answer = visit(&world, port, &[]).await;
    let set: Vec<_> = answer.headers.get_all("set-cookie").iter().collect();
    assert_eq!(set, ["own=1"]);
}

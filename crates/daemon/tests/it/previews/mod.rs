//! Previews: found by their label, opened by their tokens, with their rules.

mod access;
mod waking;

use std::time::Duration;

use http::{Method, Request};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;
use torpor_daemon::config::PreviewsConfig;
use torpor_daemon::{Config, ShutdownMode};

use crate::client::{Answer, PATIENCE, request, send};
use crate::world::World;

const PREVIEWS: &str = "/v1/sandboxes/web/previews";
const BROWSER: (&str, &str) = ("accept", "text/html,*/*");

/// A server "inside" that answers with the head it was asked with, as long as this lives; and its port.
async fn echo() -> (u16, AbortOnDropHandle<()>) {
    echo_at("127.0.0.1:0").await
}

async fn echo_at(address: &str) -> (u16, AbortOnDropHandle<()>) {
    let server = TcpListener::bind(address).await.unwrap();
    let port = server.local_addr().unwrap().port();
    let serving = tokio::spawn(async move {
        loop {
            let (mut stream, _) = server.accept().await.unwrap();
            let mut head = [0; 4096];
            let count = stream.read(&mut head).await.unwrap();
            let answer = format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {count}\r\nx-app: own\r\nx-frame-options: DENY\r\n\
                 set-cookie: torpor_preview=forged\r\nset-cookie: own=1\r\n\r\n"
            );
            stream.write_all(&[answer.as_bytes(), &head[..count]].concat()).await.unwrap();
        }
    });
    (port, AbortOnDropHandle::new(serving))
}

/// A preview of `web`.
async fn preview(world: &World, body: Value) -> Value {
    world.post(PREVIEWS, body).await.expect(201)
}

fn host_of(preview: &Value) -> String {
    format!("{}.localhost", preview["label"].as_str().unwrap())
}

fn asked(
    method: Method,
    path: &str,
    host: &str,
    headers: &[(&'static str, &str)],
) -> Request<http_body_util::Full<bytes::Bytes>> {
    let mut asked = request(method, path, "");
    asked.headers_mut().insert("host", host.parse().unwrap());
    for (name, value) in headers {
        asked.headers_mut().insert(*name, value.parse().unwrap());
    }
    asked
}

async fn visit(
    world: &World,
    preview: &Value,
    path: &str,
    headers: &[(&'static str, &str)],
) -> Answer {
    send(world.address, asked(Method::GET, path, &host_of(preview), headers)).await
}

async fn token(world: &World, preview: &Value, body: Value) -> Value {
    let path = format!("{PREVIEWS}/{}/tokens", preview["name"].as_str().unwrap());
    world.post(&path, body).await.expect(201)
}

fn text(token: &Value) -> &str {
    token["token"].as_str().unwrap()
}

/// The cookie that a browser has after it came with a token in the URL.
async fn cookie(world: &World, preview: &Value, token: &str) -> String {
    let path = format!("/page?a=1&torpor_preview_token={token}&b=2");
    let sent_on = visit(world, preview, &path, &[BROWSER]).await;
    assert_eq!(sent_on.status, 302, "{}", sent_on.text());
    assert_eq!(sent_on.header("location"), "/page?a=1&b=2");
    let cookie = sent_on.header("set-cookie").to_owned();
    assert!(cookie.contains("HttpOnly") && !cookie.contains(token), "{cookie}");
    cookie.split(';').next().unwrap().to_owned()
}

async fn sleep(world: &World) {
    world.tell("/v1/sandboxes/web/sleep").await;
    world.wait("web", "state", json!("asleep")).await;
}

async fn state(world: &World) -> Value {
    world.get("/v1/sandboxes/web").await.expect(200)["state"].clone()
}

// === Where it is found, and how long ===

#[tokio::test]
async fn a_preview_is_found_under_any_name_that_begins_with_its_label() {
    let world = World::with_sandbox().await;
    let (port, _server) = echo().await;
    let made = preview(&world, json!({"port": port, "public": true})).await;
    assert_eq!(made["name"], format!("port-{port}"));
    let (label, listens) = (made["label"].as_str().unwrap(), world.address.port());
    let urls = [
        format!("http://{label}.localhost:{listens}/"),
        format!("http://{label}.127-0-0-1.sslip.io:{listens}/"),
    ];
    assert_eq!(made["urls"], json!(urls));
    for domain in ["localhost", "127-0-0-1.sslip.io:1", "example.org"] {
        let host = format!("{label}.{domain}");
        let answer = send(world.address, asked(Method::GET, "/page", &host, &[])).await;
        assert_eq!(answer.status, 200, "{domain}");
        assert!(answer.text().contains(&format!("host: {host}")), "{}", answer.text());
    }
    let by_header = asked(Method::GET, "/page", "x", &[("x-torpor-preview", label)]);
    assert_eq!(send(world.address, by_header).await.status, 200);
    let other = asked(Method::GET, "/page", &format!("{label}.local"), &[]);
    assert_eq!(send(world.address, other).await.status, 404);
}

#[tokio::test]
async fn with_a_domain_of_its_own_only_names_below_it_lead_to_previews() {
    let previews = PreviewsConfig { domain: "p.example.org".to_owned() };
    let world = World::with(Config { previews, ..Config::default() }).await;
    world.create(json!({"name": "web"})).await.expect(201);
    let (port, _server) = echo().await;
    let made = preview(&world, json!({"port": port, "public": true, "prefix": "shop"})).await;
    assert!(made["urls"][0].as_str().unwrap().starts_with("http://shop.p.example.org:"), "{made}");
    for (host, status) in [
        ("shop.p.example.org", 200),
        ("shop.localhost", 200),
        ("shop.10-0-0-1.sslip.io", 200),
        ("shop.example.org", 404),
    ] {
        let answer = send(world.address, asked(Method::GET, "/", host, &[])).await;
        assert_eq!(answer.status, status, "{host}");
    }
}

#[tokio::test]
async fn names_are_unique_in_a_sandbox_and_prefixes_everywhere() {
    let world = World::with_sandbox().await;
    world.create(json!({"name": "other"})).await.expect(201);
    preview(&world, json!({"port": 80, "name": "a", "prefix": "shop"})).await;
    let same_name = world.post(PREVIEWS, json!({"port": 81, "name": "a"})).await;
    same_name.expect_error(409, "already_exists");
    let same_prefix = json!({"port": 81, "name": "a", "prefix": "shop"});
    let answer = world.post("/v1/sandboxes/other/previews", same_prefix).await;
    answer.expect_error(409, "already_exists");
    let other = world.post("/v1/sandboxes/other/previews", json!({"port": 81, "name": "a"})).await;
    other.expect(201);
    for body in [
        json!({"port": 0}),
        json!({"port": 80, "prefix": "www"}),
        json!({"port": 80, "prefix": "3000-web"}),
        json!({"port": 80, "cors": ["example.org"]}),
        json!({"port": 80, "request_headers": {"host": "x"}}),
        json!({"port": 80, "ttl_ms": 0}),
        json!({"port": 80, "ttl_ms": 1, "expires_at": "2999-01-01T00:00:00Z"}),
        json!({"port": 80, "expires_at": "1970-01-01T00:00:01Z"}),
        json!({"port": 80, "colour": "red"}),
    ] {
        world.post(PREVIEWS, body).await.expect_error(400, "invalid_request");
    }
    let all = world.get("/v1/previews").await.expect(200);
    assert_eq!(all["previews"].as_array().unwrap().len(), 2);
    assert_eq!(world.get(PREVIEWS).await.expect(200)["previews"][0]["label"], "shop");
}

#[tokio::test]
async fn a_preview_survives_the_daemon_and_the_name_of_its_sandbox_but_not_the_sandbox() {
    let mut world = World::with_sandbox().await;
    let (port, _server) = echo().await;
    let made = preview(&world, json!({"port": port})).await;
    let opens = token(&world, &made, json!({})).await;
    let header = [("x-torpor-preview-token", text(&opens))];
    world.restart(ShutdownMode::Running).await;
    assert_eq!(visit(&world, &made, "/", &header).await.status, 200);
    world.patch("/v1/sandboxes/web", json!({"name": "shop"})).await.expect(200);
    assert_eq!(visit(&world, &made, "/", &header).await.status, 200);
    let fork = world.post("/v1/sandboxes/shop/fork", json!({"name": "copy"})).await;
    assert!(fork.status.is_success(), "{}", fork.text());
    let forked = world.get("/v1/sandboxes/copy/previews").await.expect(200);
    assert_eq!(forked["previews"], json!([]));
    world.delete("/v1/sandboxes/shop").await.expect(204);
    visit(&world, &made, "/v1/sandboxes", &header).await.expect_error(404, "not_found");
    assert!(visit(&world, &made, "/", &[BROWSER]).await.text().contains("no such preview"));
    assert_eq!(world.get("/v1/previews").await.expect(200)["previews"], json!([]));
    world.create(json!({"name": "web"})).await.expect(201);
    world.restart(ShutdownMode::Running).await;
    assert_eq!(world.get("/v1/previews").await.expect(200)["previews"], json!([]));
}

#[tokio::test]
async fn a_preview_opens_its_port_whatever_the_sandbox_exposes() {
    let world = World::new().await;
    world.create(json!({"name": "web", "ports": {"exposed": []}})).await.expect(201);
    let (port, _server) = echo().await;
    let made = preview(&world, json!({"port": port, "public": true})).await;
    assert_eq!(visit(&world, &made, "/", &[]).await.status, 200);
    let by_port = asked(Method::GET, "/", &format!("{port}-web.localhost"), &[]);
    assert_eq!(send(world.address, by_port).await.status, 403);
}

#[tokio::test]
async fn a_server_is_reached_at_whatever_address_it_listens_on() {
    let world = World::with_sandbox().await;
    for address in ["127.0.0.1:0", "[::1]:0", "127.0.0.7:0"] {
        let (port, _server) = echo_at(address).await;
        let name = format!("port-{port}");
        let made = preview(&world, json!({"port": port, "public": true, "name": name})).await;
        assert_eq!(visit(&world, &made, "/", &[]).await.status, 200, "{address}");
    }
}

#[tokio::test]
async fn a_preview_whose_time_is_over_is_not_found_and_in_nobodys_way() {
    let world = World::with_sandbox().await;
    let (port, _server) = echo().await;
    let short = json!({"port": port, "public": true, "prefix": "shop", "ttl_ms": 1000});
    let made = preview(&world, short).await;
    assert_eq!(visit(&world, &made, "/", &[]).await.status, 200);
    let over = async {
        while visit(&world, &made, "/", &[]).await.status == 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, over).await.expect("its time is over");
    visit(&world, &made, "/", &[]).await.expect_error(404, "not_found");
    let page = visit(&world, &made, "/", &[BROWSER]).await;
    assert_eq!(
        (page.status.as_u16(), page.header("content-type")),
        (404, "text/html; charset=utf-8")
    );
    assert_eq!(world.get(PREVIEWS).await.expect(200)["previews"], json!([]));
    preview(&world, json!({"port": port, "public": true, "prefix": "shop"})).await;
    assert_eq!(visit(&world, &made, "/", &[]).await.status, 200);
}

#[tokio::test]
async fn a_preview_is_changed_in_place_and_deleted() {
    let world = World::with_sandbox().await;
    let ((one, _one), (two, _two)) = (echo().await, echo().await);
    let made = preview(&world, json!({"port": one, "name": "a", "ttl_ms": 3_600_000})).await;
    let path = format!("{PREVIEWS}/a");
    let rules = json!({"x-to": "two"});
    let update = json!({"port": two, "public": true, "request_headers": rules, "ttl_ms": null});
    let changed = world.patch(&path, update).await.expect(200);
    assert_eq!((&changed["id"], &changed["label"]), (&made["id"], &made["label"]));
    assert!(made["expires_at"].is_string() && changed["expires_at"].is_null(), "{changed}");
    assert!(visit(&world, &made, "/", &[]).await.text().contains("x-to: two"));
    assert_eq!(world.get(&path).await.expect(200), changed);
    world.patch(&path, json!({"prefix": "x"})).await.expect_error(400, "invalid_request");
    world.delete(&path).await.expect(204);
    world.delete(&path).await.expect_error(404, "not_found");
    world.get(&path).await.expect_error(404, "not_found");
    assert_eq!(visit(&world, &made, "/", &[]).await.status, 404);
}

//! Who may ask.

use http::Method;
use serde_json::{Value, json};
use torpor_daemon::config::Secret;
use torpor_daemon::{Config, ShutdownMode};

use crate::client::{Answer, request, send};
use crate::world::World;

async fn ask(world: &World, name: &'static str, value: &str) -> Answer {
    let mut request = request(Method::GET, "/v1/sandboxes", "");
    request.headers_mut().insert(name, value.parse().unwrap());
    send(world.address, request).await
}

async fn make_key(world: &World) -> Value {
    world.post("/v1/keys", json!({"label": "laptop"})).await.expect(201)
}

#[tokio::test]
async fn on_loopback_no_key_is_needed_until_there_is_one() {
    let world = World::new().await;
    world.get("/v1/sandboxes").await.expect(200);
    let key = make_key(&world).await;
    let secret = key["secret"].as_str().unwrap();
    assert!(secret.starts_with("tpk_"));
    assert!(secret.starts_with(key["prefix"].as_str().unwrap()));
    world.get("/v1/sandboxes").await.expect_error(401, "unauthenticated");
    world.get("/metrics").await.expect_error(401, "unauthenticated");
    ask(&world, "authorization", &format!("Bearer {secret}")).await.expect(200);
    ask(&world, "x-api-key", secret).await.expect(200);
    for wrong in ["Bearer tpk_0000", "Bearer ", "Basic dXNlcjpwYXNz", secret] {
        ask(&world, "authorization", wrong).await.expect_error(401, "unauthenticated");
    }
    assert_eq!(world.get("/healthz").await.text(), "ok");
    assert_eq!(world.get("/openapi.json").await.status, 200);
}

#[tokio::test]
async fn a_revoked_key_is_not_valid_any_more() {
    let world = World::new().await;
    let first = make_key(&world).await;
    let bearer = format!("Bearer {}", first["secret"].as_str().unwrap());
    let with_key = |method, path: &str, body: &'static str| {
        let mut request = request(method, path, body);
        request.headers_mut().insert("authorization", bearer.parse().unwrap());
        request.headers_mut().insert("content-type", "application/json".parse().unwrap());
        send(world.address, request)
    };
    let other = with_key(Method::POST, "/v1/keys", r#"{"label":"other"}"#).await.expect(201);
    let list = with_key(Method::GET, "/v1/keys", "").await.expect(200);
    assert_eq!(list["keys"].as_array().unwrap().len(), 2);
    assert!(!list.to_string().contains("secret"), "{list}");
    let other_bearer = format!("Bearer {}", other["secret"].as_str().unwrap());
    ask(&world, "authorization", &other_bearer).await.expect(200);
    let path = format!("/v1/keys/{}", other["id"].as_str().unwrap());
    with_key(Method::DELETE, &path, "").await.expect(204);
    with_key(Method::DELETE, &path, "").await.expect_error(404, "not_found");
    ask(&world, "authorization", &other_bearer).await.expect_error(401, "unauthenticated");
    ask(&world, "authorization", &bearer).await.expect(200);
}

/// A world whose only key was revoked.
async fn without_its_last_key(config: Config) -> World {
    let world = World::with(config).await;
    let key = make_key(&world).await;
    let path = format!("/v1/keys/{}", key["id"].as_str().unwrap());
    let mut request = request(Method::DELETE, &path, "");
    request.headers_mut().insert("x-api-key", key["secret"].as_str().unwrap().parse().unwrap());
    send(world.address, request).await.expect(204);
    world
}

#[tokio::test]
async fn revoking_the_last_key_does_not_open_the_daemon() {
    let mut world = without_its_last_key(Config::default()).await;
    world.get("/v1/sandboxes").await.expect_error(401, "unauthenticated");
    world.restart(ShutdownMode::Running).await;
    world.get("/v1/sandboxes").await.expect_error(401, "unauthenticated");
}

#[tokio::test]
async fn an_operator_may_say_that_no_key_is_needed_any_more() {
    let config = Config { require_key: Some(false), ..Config::default() };
    let world = without_its_last_key(config).await;
    world.get("/v1/sandboxes").await.expect(200);
    make_key(&world).await;
    world.get("/v1/sandboxes").await.expect_error(401, "unauthenticated");
}

#[tokio::test]
async fn a_configured_key_that_is_taken_away_leaves_the_daemon_closed() {
    let key = Some(Secret("a-key-from-the-configuration".to_owned()));
    let mut world = World::with(Config { api_key: key, ..Config::default() }).await;
    world.reconfigure(Config::default()).await;
    world.get("/v1/sandboxes").await.expect_error(401, "unauthenticated");
}

#[tokio::test]
async fn a_configured_key_is_always_valid() {
    let secret = "a-key-from-the-configuration";
    let config = Config { api_key: Some(Secret(secret.to_owned())), ..Config::default() };
    let world = World::with(config).await;
    world.get("/v1/sandboxes").await.expect_error(401, "unauthenticated");
    ask(&world, "authorization", &format!("Bearer {secret}")).await.expect(200);
}

#[tokio::test]
async fn a_web_page_can_not_ask_in_the_name_of_its_visitor() {
    let world = World::new().await;
    ask(&world, "origin", "https://evil.example").await.expect_error(401, "unauthenticated");
    ask(&world, "host", "evil.example").await.expect_error(401, "unauthenticated");
    ask(&world, "origin", &format!("http://{}", world.address)).await.expect(200);
    for site in ["cross-site", "same-site"] {
        ask(&world, "sec-fetch-site", site).await.expect_error(401, "unauthenticated");
    }
}

#[tokio::test]
async fn a_picture_in_a_page_of_others_wakes_nobody() {
    let world = World::with_sandbox().await;
    world.tell("/v1/sandboxes/web/sleep").await;
    world.wait("web", "state", json!("asleep")).await;
    let path = format!("/v1/sandboxes/web/files/content?path={}", world.query("picture"));
    for (path, host) in [(path.as_str(), "localhost"), ("/", "80-web.localhost")] {
        let mut asked = request(Method::GET, path, "");
        for (name, value) in
            [("host", host), ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")]
        {
            asked.headers_mut().insert(name, value.parse().unwrap());
        }
        assert_eq!(send(world.address, asked).await.status, 401, "{host}");
    }
    assert_eq!(world.get("/v1/sandboxes/web").await.expect(200)["state"], "asleep");
}

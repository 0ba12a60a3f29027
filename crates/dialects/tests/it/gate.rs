//! Who may ask, and how: prefixes, namespaces, hosts, keys, bodies.

use serde_json::json;

use crate::client::Ask;
use crate::world::{LIFE, World};

#[tokio::test]
async fn everything_is_there_with_and_without_the_namespace() {
    let world = World::new().await;
    let id = world.named("agent").await;
    for path in [
        "/sandboxes",
        "/sandboxes/agent",
        &format!("/sandboxes/{id}/snapshots"),
        "/archived-sandboxes",
        "/snapshots",
        "/sandbox-pools",
    ] {
        let flat = world.send(Ask::new("GET", path)).await.expect(200);
        assert_eq!(flat, world.get(path).await.expect(200), "{path}");
    }
    world.send(Ask::new("POST", "/sandboxes/agent/suspend?wait_ms=30000")).await.expect(200);
    world.send(Ask::new("POST", "/sandboxes").json(&json!({}))).await.expect(200);
}

#[tokio::test]
async fn logs_have_no_short_path() {
    let world = World::new().await;
    world.named("agent").await;
    world.get("/sandboxes/agent/logs").await.expect(200);
    assert_eq!(world.send(Ask::new("GET", "/sandboxes/agent/logs")).await.status, 404);
}

#[tokio::test]
async fn another_namespace_is_forbidden() {
    let world = World::new().await;
    for (method, path) in
        [("GET", "/sandboxes"), ("POST", "/sandboxes"), ("GET", "/sandboxes/x/logs")]
    {
        let answer = world.send(Ask::new(method, format!("/v1/namespaces/other{path}"))).await;
        answer.expect_error(403, "FORBIDDEN");
    }
    assert_eq!(world.ids().await, [""; 0]);
}

#[tokio::test]
async fn of_two_hosts_nobody_knows_which_one_was_meant() {
    let world = World::new().await;
    let ask = Ask::new("GET", "/sandboxes").host("localhost").host("127.0.0.1");
    world.send(ask).await.expect_error(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn web_pages_of_others_can_not_ask() {
    let world = World::new().await;
    for ask in [
        Ask::new("POST", "/sandboxes").header("origin", "https://evil.example"),
        Ask::new("POST", "/sandboxes").host("rebound.example"),
    ] {
        world.send(ask).await.expect_error(401, "UNAUTHENTICATED");
    }
    assert_eq!(world.ids().await, [""; 0]);
}

#[tokio::test]
async fn a_key_is_needed_when_there_is_one() {
    let world = World::new().await;
    let made = world.own("POST", "/keys", Some(json!({"label": "package"}))).await.expect(201);
    let secret = made["secret"].as_str().unwrap();
    world.get("/sandboxes").await.expect_error(401, "UNAUTHENTICATED");
    let ask = |key: &str| {
        Ask::new("GET", format!("{LIFE}/sandboxes"))
            .header("authorization", &format!("Bearer {key}"))
    };
    world.send(ask("wrong")).await.expect_error(401, "UNAUTHENTICATED");
    world.send(ask(secret)).await.expect(200);
}

#[tokio::test]
async fn a_body_is_an_object_of_limited_size() {
    let world = World::new().await;
    let ask = || Ask::new("POST", "/sandboxes").header("content-type", "application/json");
    for raw in ["not json", "[]", "\"text\"", "{", "null"] {
        world.send(ask().raw(raw)).await.expect_error(400, "INVALID_REQUEST");
    }
    let large = format!("{{\"name\": \"{}\"}}", "x".repeat(2 << 20));
    world.send(ask().raw(large)).await.expect_error(413, "TOO_LARGE");
    assert_eq!(world.ids().await, [""; 0]);
}

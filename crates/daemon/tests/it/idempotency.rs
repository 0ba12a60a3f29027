//! Requests that are repeated under the same key: done once, answered alike.

use http::{HeaderValue, Method};
use serde_json::{Value, json};
use torpor_daemon::config::Limits;
use torpor_daemon::{Config, ShutdownMode};

use crate::client::{self, Answer};
use crate::world::{World, until};

async fn send(world: &World, path: &str, key: &str, body: &Value) -> Answer {
    send_as(world, path, key, body, None).await
}

async fn send_as(
    world: &World,
    path: &str,
    key: &str,
    body: &Value,
    secret: Option<&str>,
) -> Answer {
    let mut request = client::with_json(Method::POST, path, body);
    request.headers_mut().insert("idempotency-key", HeaderValue::from_str(key).unwrap());
    if let Some(secret) = secret {
        let value = HeaderValue::from_str(&format!("Bearer {secret}")).unwrap();
        request.headers_mut().insert("authorization", value);
    }
    client::send(world.address, request).await
}

async fn count(world: &World) -> usize {
    world.get("/v1/sandboxes").await.expect(200)["sandboxes"].as_array().unwrap().len()
}

#[tokio::test]
async fn the_same_request_under_the_same_key_is_done_once_also_by_the_next_daemon() {
    let mut world = World::new().await;
    let first = send(&world, "/v1/sandboxes", "k1", &json!({})).await;
    assert_eq!(first.header("idempotency-replayed"), "");
    let first = first.expect(201);
    let again = send(&world, "/v1/sandboxes", "k1", &json!({})).await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(again.header("content-type"), "application/json");
    assert_eq!(again.expect(201), first);
    world.restart(ShutdownMode::Running).await;
    assert_eq!(send(&world, "/v1/sandboxes", "k1", &json!({})).await.expect(201), first);
    assert_eq!(count(&world).await, 1);
    send(&world, "/v1/sandboxes", "k2", &json!({})).await.expect(201);
    assert_eq!(count(&world).await, 2);
}

#[tokio::test]
async fn a_key_of_another_request_is_refused() {
    let world = World::with_sandbox().await;
    send(&world, "/v1/sandboxes", "k", &json!({})).await.expect(201);
    for (path, body) in [
        ("/v1/sandboxes", json!({"name": "other"})),
        ("/v1/sandboxes?wait=false", json!({})),
        ("/v1/sandboxes/web/run", json!({"command": ["true"]})),
    ] {
        let refused = send(&world, path, "k", &body).await;
        refused.expect_error(422, "idempotency_key_reused");
    }
    let bad = send(&world, "/v1/sandboxes", "a b", &json!({})).await;
    bad.expect_error(400, "invalid_request");
    assert_eq!(count(&world).await, 2);
}

#[tokio::test]
async fn who_asks_while_it_is_done_waits_for_it_and_who_goes_away_finds_it_done() {
    let world = World::with_sandbox().await;
    let (runs, gate) = (world.path("runs"), world.path("gate"));
    let script = format!("echo x >>{runs}; until [ -e {gate} ]; do sleep 0.02; done");
    let command = json!({"command": ["sh", "-c", script]});
    let path = "/v1/sandboxes/web/run";
    let request = || {
        let mut request = client::with_json(Method::POST, path, &command);
        request.headers_mut().insert("idempotency-key", HeaderValue::from_static("k"));
        request
    };
    // The first client goes away before there is an answer.
    let gone = tokio::spawn(client::send(world.address, request()));
    until("it runs", || std::fs::read(&runs).is_ok_and(|text| !text.is_empty())).await;
    gone.abort();
    let second = tokio::spawn(client::send(world.address, request()));
    std::fs::write(&gate, "").unwrap();
    let second = tokio::time::timeout(client::PATIENCE, second).await.unwrap().unwrap().expect(200);
    assert_eq!(second["exit_code"], 0);
    let third = client::send(world.address, request()).await.expect(200);
    assert_eq!(third, second);
    assert_eq!(std::fs::read_to_string(&runs).unwrap(), "x\n");
}

#[tokio::test]
async fn a_failure_is_repeated_too_but_not_one_that_says_later() {
    let limits = Limits { sandboxes: 1, ..Config::default().limits };
    let world = World::with(Config { limits, ..Config::default() }).await;
    let bad = json!({"image": "nothing"});
    let first =
        send(&world, "/v1/sandboxes", "bad", &bad).await.expect_error(404, "image_not_found");
    let again = send(&world, "/v1/sandboxes", "bad", &bad).await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    let again = again.expect(404);
    assert_eq!((&again["code"], &again["request_id"]), (&first["code"], &first["request_id"]));
    world.create(json!({"name": "web"})).await.expect(201);
    let full = send(&world, "/v1/sandboxes", "later", &json!({})).await;
    assert_eq!(full.header("retry-after"), "5");
    full.expect_error(503, "capacity_reached");
    world.delete("/v1/sandboxes/web").await.expect(204);
    send(&world, "/v1/sandboxes", "later", &json!({})).await.expect(201);
}

#[tokio::test]
async fn every_fork_of_a_repeated_request_is_made_once() {
    let world = World::with_sandbox().await;
    world.snapshot("base").await;
    let fork = json!({"count": 2});
    let first = send(&world, "/v1/snapshots/base/fork", "k", &fork).await.expect(201);
    assert_eq!(send(&world, "/v1/snapshots/base/fork", "k", &fork).await.expect(201), first);
    assert_eq!(count(&world).await, 3);
    let path = "/v1/sandboxes/web/snapshots";
    let taken = send(&world, path, "k3", &json!({})).await.expect(201);
    assert_eq!(send(&world, path, "k3", &json!({})).await.expect(201), taken);
}

#[tokio::test]
async fn a_stream_is_repeated_as_its_last_line() {
    let world = World::with_sandbox().await;
    let path = "/v1/sandboxes/web/run?stream=true";
    let command = json!({"command": ["sh", "-c", "echo one; exit 3"]});
    let first = send(&world, path, "k", &command).await.text();
    let lines: Vec<&str> = first.lines().collect();
    assert!(lines.len() > 1, "{first}");
    let again = send(&world, path, "k", &command).await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(again.header("content-type"), "application/x-ndjson");
    assert_eq!(again.text(), format!("{}\n", lines[lines.len() - 1]));
}

#[tokio::test]
async fn keys_of_different_callers_are_different_and_new_secrets_are_kept_sealed() {
    let world = World::new().await;
    let label = json!({"label": "one"});
    let one = send(&world, "/v1/keys", "k", &label).await.expect(201);
    let secret = one["secret"].as_str().unwrap();
    let other = send_as(&world, "/v1/keys", "k", &label, Some(secret)).await.expect(201);
    assert_ne!(other["secret"], one["secret"], "nobody and a key are two callers");
    let again = send_as(&world, "/v1/keys", "k", &label, Some(secret)).await.expect(201);
    assert_eq!(again["secret"], other["secret"]);
    let kept = other["secret"].as_str().unwrap().as_bytes();
    for file in world.data_files() {
        let bytes = std::fs::read(&file).unwrap_or_default();
        assert!(!bytes.windows(kept.len()).any(|part| part == kept), "{}", file.display());
    }
}

//! Waiting for changes.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::client::Open;
use crate::world::World;

#[tokio::test]
async fn a_long_poll_is_answered_by_the_next_change() {
    let world = World::with_sandbox().await;
    let now = world.get("/v1/sandboxes/web").await.expect(200)["generation"].as_u64().unwrap();
    let path = format!("/v1/sandboxes/web/status?after={now}");
    let (changed, _) = tokio::join!(
        world.get(&path),
        world.patch("/v1/sandboxes/web", json!({"labels": {"a": "b"}})),
    );
    let changed = changed.expect(200);
    assert!(changed["generation"].as_u64().unwrap() > now);
    assert_eq!(changed["labels"]["a"], "b");
}

#[tokio::test]
async fn a_long_poll_without_a_change_ends_in_time() {
    let world = World::with_sandbox().await;
    let asked = Instant::now();
    let same = world.get("/v1/sandboxes/web/status?after=1000000&wait_ms=50").await.expect(200);
    assert_eq!(same["state"], "running");
    assert!(asked.elapsed() >= Duration::from_millis(50));
    world.get("/v1/sandboxes/web/status").await.expect(200);
}

#[tokio::test]
async fn who_waits_for_a_sandbox_sees_its_end() {
    let world = World::with_sandbox().await;
    let now = world.get("/v1/sandboxes/web").await.expect(200)["generation"].as_u64().unwrap();
    let path = format!("/v1/sandboxes/web/status?after={now}");
    let (ended, _) = tokio::join!(world.get(&path), world.delete("/v1/sandboxes/web"));
    assert_eq!(ended.expect(200)["state"], "terminated");
}

async fn next(events: &mut Open) -> Value {
    loop {
        let line = events.line().await.expect("the stream goes on");
        if let Some(data) = line.strip_prefix("data: ") {
            return serde_json::from_str(data).unwrap();
        }
    }
}

#[tokio::test]
async fn all_changes_are_told_as_they_happen() {
    let world = World::new().await;
    let mut events = world.open("/v1/events").await;
    assert_eq!(events.headers["content-type"], "text/event-stream");
    world.create(json!({"name": "web"})).await.expect(201);
    world.delete("/v1/sandboxes/web").await.expect(204);
    let mut states = Vec::new();
    while states.last().is_none_or(|state| state != "terminated") {
        let status = next(&mut events).await;
        assert_eq!(status["name"], "web");
        states.push(status["state"].as_str().unwrap().to_owned());
    }
    assert!(states.contains(&"running".to_owned()), "{states:?}");
}

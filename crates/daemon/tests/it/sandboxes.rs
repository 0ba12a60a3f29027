//! Create, list, get, update, delete.

use serde_json::json;

use crate::client::{request, send};
use crate::world::{World, until};

#[tokio::test]
async fn a_created_sandbox_runs_and_can_be_found_by_id_and_name() {
    let world = World::new().await;
    let made = world.create(json!({"name": "web", "cpus": 0.5, "env": {"A": "b"}})).await;
    let made = made.expect(201);
    assert_eq!(made["state"], "running");
    assert_eq!(made["image"], "torpor/base");
    assert_eq!(made["resources"]["cpus"], 0.5);
    let id = made["id"].as_str().unwrap();
    let by_id = world.get(&format!("/v1/sandboxes/{id}")).await.expect(200);
    let by_name = world.get("/v1/sandboxes/web").await.expect(200);
    assert_eq!(by_id["id"], by_name["id"]);
    assert_eq!(by_name["engine"], "fake");
}

#[tokio::test]
async fn a_sandbox_needs_no_body_at_all() {
    let world = World::new().await;
    let answer = send(world.address, request(http::Method::POST, "/v1/sandboxes", "")).await;
    assert!(answer.expect(201)["name"].is_null());
}

#[tokio::test]
async fn who_does_not_wait_is_answered_at_once() {
    let world = World::new().await;
    world.host.start_takes(std::time::Duration::from_secs(3600));
    let made = world.post("/v1/sandboxes?wait=false", json!({"name": "slow"})).await.expect(202);
    assert_eq!(made["state"], "creating");
    world.delete("/v1/sandboxes/slow").await.expect(204);
}

#[tokio::test]
async fn a_deleted_sandbox_is_gone_with_its_machine_and_its_name_is_free() {
    let world = World::with_sandbox().await;
    assert_eq!(world.host.alive().len(), 1);
    world.delete("/v1/sandboxes/web").await.expect(204);
    assert_eq!(world.host.alive().len(), 0);
    world.get("/v1/sandboxes/web").await.expect_error(404, "sandbox_not_found");
    world.delete("/v1/sandboxes/web").await.expect_error(404, "sandbox_not_found");
    world.create(json!({"name": "web"})).await.expect(201);
}

#[tokio::test]
async fn a_name_is_given_once() {
    let world = World::with_sandbox().await;
    let error = world.create(json!({"name": "web"})).await.expect_error(409, "already_exists");
    assert!(error["message"].as_str().unwrap().contains("web"), "{error}");
    assert_eq!(world.host.boots(), 1);
}

#[tokio::test]
async fn what_can_not_be_is_refused_and_nothing_is_left() {
    let world = World::new().await;
    for (body, says) in [
        (json!({"name": "No"}), "name"),
        (json!({"name": "../x"}), "name"),
        (json!({"name": ""}), "name"),
        (json!({"cpus": 0}), "cpus"),
        (json!({"memory_mib": 1}), "memory_mib"),
        (json!({"memory": 512}), "memory"),
        (json!({"env": {"A=B": "x"}}), "env"),
        (json!({"labels": {"k": "v".repeat(300)}}), "labels"),
        (json!({"lifetime": {"expires_at": "1970-01-01T00:00:01Z"}}), "lifetime"),
        (json!([]), "list"),
    ] {
        let error = world.create(body).await.expect_error(400, "invalid_request");
        assert!(error["message"].as_str().unwrap().contains(says), "{error}");
    }
    let huge = world.create(json!({"memory_mib": 1u64 << 40})).await;
    huge.expect_error(422, "limit_reached");
    let list = world.get("/v1/sandboxes").await.expect(200);
    assert_eq!(list["sandboxes"].as_array().unwrap().len(), 0);
    assert_eq!(world.host.boots(), 0);
}

#[tokio::test]
async fn an_image_that_is_not_there_is_said_so() {
    let world = World::new().await;
    let error = world.create(json!({"image": "nope"})).await.expect_error(404, "image_not_found");
    assert!(error["message"].as_str().unwrap().contains("nope"), "{error}");
    assert!(error["hint"].as_str().unwrap().contains("torpor image"), "{error}");
}

#[tokio::test]
async fn a_sandbox_that_does_not_start_is_not_left_behind() {
    let world = World::new().await;
    world.host.fail_starts(1);
    let error = world.create(json!({"name": "web"})).await.expect_error(409, "sandbox_failed");
    assert!(error["message"].as_str().unwrap().contains("a fake fault"), "{error}");
    world.create(json!({"name": "web"})).await.expect(201);
}

#[tokio::test]
async fn a_failed_sandbox_says_why_and_can_be_deleted() {
    let world = World::new().await;
    world.host.fail_starts(1);
    world.post("/v1/sandboxes?wait=false", json!({"name": "web"})).await.expect(202);
    let failed = world.get("/v1/sandboxes/web/status?after=1").await.expect(200);
    assert_eq!(failed["state"], "failed", "{failed}");
    assert!(failed["message"].as_str().unwrap().contains("a fake fault"), "{failed}");
    let error = world.run(json!({"command": ["true"]})).await.expect_error(409, "sandbox_failed");
    assert!(error["message"].as_str().unwrap().contains("a fake fault"), "{error}");
    world.delete("/v1/sandboxes/web").await.expect(204);
}

#[tokio::test]
async fn a_client_that_leaves_while_it_waits_leaves_no_nameless_sandbox() {
    let world = World::new().await;
    world.host.start_takes(std::time::Duration::from_secs(3600));
    let waiting = tokio::spawn({
        let address = world.address;
        async move { send(address, request(http::Method::POST, "/v1/sandboxes", "")).await }
    });
    let present = async || {
        let list = world.get("/v1/sandboxes").await.expect(200);
        list["sandboxes"].as_array().unwrap().len()
    };
    while present().await == 0 {}
    waiting.abort();
    let gone = async { while present().await > 0 {} };
    tokio::time::timeout(crate::client::PATIENCE, gone).await.expect("it is deleted");
}

#[tokio::test]
async fn a_listing_filters_by_label_and_state_and_comes_in_pages() {
    let world = World::new().await;
    for n in 0..3 {
        let labels = json!({"n": n.to_string(), "team": "blue"});
        world.create(json!({"name": format!("s{n}"), "labels": labels})).await.expect(201);
    }
    let names = async |query: &str| {
        let list = world.get(&format!("/v1/sandboxes?{query}")).await.expect(200);
        let all = list["sandboxes"].as_array().unwrap().clone();
        let mut names: Vec<_> =
            all.iter().map(|s| s["name"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    };
    assert_eq!(names("").await, ["s0", "s1", "s2"]);
    assert_eq!(names("label=n%3D1&label=team%3Dblue").await, ["s1"]);
    assert_eq!(names("state=failed").await, [""; 0]);
    let page = world.get("/v1/sandboxes?limit=2").await.expect(200);
    assert_eq!(page["sandboxes"].as_array().unwrap().len(), 2);
    let next = page["next_cursor"].as_str().unwrap();
    assert_eq!(names(&format!("cursor={next}")).await.len(), 1);
    world.get("/v1/sandboxes?state=standby").await.expect_error(400, "invalid_request");
    world.get("/v1/sandboxes?bogus=1").await.expect_error(400, "invalid_request");
}

#[tokio::test]
async fn labels_and_lifetime_can_be_changed() {
    let world = World::with_sandbox().await;
    let body = json!({"labels": {"a": "b"}, "lifetime": {"max_age_ms": 3_600_000}});
    let changed = world.patch("/v1/sandboxes/web", body).await.expect(200);
    assert_eq!(changed["labels"], json!({"a": "b"}));
    let changed = world.patch("/v1/sandboxes/web", json!({"labels": {}})).await.expect(200);
    assert_eq!(changed["labels"], json!({}));
    assert_eq!(changed["lifetime"]["max_age_ms"], 3_600_000);
    let bad = world.patch("/v1/sandboxes/web", json!({"image": "other"})).await;
    bad.expect_error(400, "invalid_request");
}

#[tokio::test]
async fn a_sandbox_ends_at_its_age() {
    let world = World::new().await;
    world.create(json!({"name": "web", "lifetime": {"max_age_ms": 1000}})).await.expect(201);
    until("it ends", || world.host.alive().is_empty()).await;
}

#[tokio::test]
async fn a_sandbox_tells_what_it_uses() {
    let world = World::with_sandbox().await;
    let usage = world.get("/v1/sandboxes/web/usage").await.expect(200);
    assert_eq!(usage["oom_kills"], 0);
}

#[tokio::test]
async fn a_machine_that_dies_fails_its_sandbox_and_who_waits_for_it() {
    let world = World::with_sandbox().await;
    let running = world.open_post(
        "/v1/sandboxes/web/run?stream=true",
        json!({
            "command": ["sleep", "3600"],
        }),
    );
    let mut running = running.await;
    assert_eq!(running.event().await.unwrap()["event"], "started");
    let id = world.host.alive().into_iter().next().unwrap();
    world.host.crash(&id, "its kernel panicked");
    let status = world.get("/v1/sandboxes/web/status?after=2").await.expect(200);
    assert_eq!(status["state"], "failed");
    assert!(status["message"].as_str().unwrap().contains("its kernel panicked"), "{status}");
    let error = world.run(json!({"command": ["true"]})).await;
    error.expect_error(409, "sandbox_failed");
}

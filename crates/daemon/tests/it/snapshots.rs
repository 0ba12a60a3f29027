//! Snapshots: taken, looked into, gone back to, and carried elsewhere.

use std::time::Duration;

use http::Method;
use serde_json::json;

use crate::client::{self, request, send};
use crate::world::World;

const HOSTILE: [&str; 5] =
    ["../../etc/passwd", "..%2F..%2Fetc%2Fpasswd", "%00", "No_Name", "snap-short"];

#[tokio::test]
async fn a_snapshot_is_taken_of_a_running_sandbox_and_tells_its_pause() {
    let world = World::with_sandbox().await;
    let taken = world.snapshot("base").await;
    assert_eq!((&taken["state"], &taken["kind"]), (&json!("completed"), &json!("memory")));
    assert!(taken["pause_ms"].as_f64().unwrap() > 0.0, "{taken}");
    assert_eq!(taken["sandbox_name"], "web");
    assert_eq!(world.get("/v1/sandboxes/web").await.expect(200)["state"], "running");
    let id = taken["id"].as_str().unwrap();
    for name in ["base", id] {
        let details = world.get(&format!("/v1/snapshots/{name}")).await.expect(200);
        assert_eq!(details["id"], id);
        assert_eq!(details["processes"][0]["pid"], 1);
        assert_eq!(details["files"][0]["hash"].as_str().unwrap().len(), 64);
    }
    let list = world.get("/v1/snapshots").await.expect(200);
    assert_eq!(list["snapshots"].as_array().unwrap().len(), 1);
    let text = world.get("/metrics").await.text();
    assert!(text.contains("torpor_snapshot_pause_seconds_count 1"), "{text}");
}

#[tokio::test]
async fn a_snapshot_of_a_sleeping_sandbox_is_its_save() {
    let world = World::with_sandbox().await;
    world.post("/v1/sandboxes/web/sleep", json!({"cold": true})).await.expect(200);
    let saves = world.host.saves();
    let taken = world.snapshot("base").await;
    assert_eq!(taken["pause_ms"], 0.0);
    assert_eq!(world.host.saves(), saves);
    let details = world.get("/v1/snapshots/base").await.expect(200);
    assert_eq!(details["needed_by"], json!([world.id("web").await]));
}

#[tokio::test]
async fn snapshots_know_their_ancestors() {
    let world = World::with_sandbox().await;
    let first = world.snapshot("first").await;
    world.wait("web", "parent", first["id"].clone()).await;
    let second = world.snapshot("second").await;
    assert_eq!(second["parent"], first["id"]);
    world.wait("web", "parent", second["id"].clone()).await;
    world.snapshot("third").await;
    let third = world.get("/v1/snapshots/third").await.expect(200);
    assert_eq!(third["ancestors"], json!([second["id"], first["id"]]));
}

#[tokio::test]
async fn a_snapshot_that_nobody_waits_for_is_answered_at_once() {
    let world = World::with_sandbox().await;
    // Longer than a busy host needs for the questions.
    world.host.save_takes(Duration::from_secs(3));
    let body = json!({"name": "base"});
    let begun = world.post("/v1/sandboxes/web/snapshots?wait=false", body).await.expect(202);
    assert_eq!(begun["state"], "in_progress");
    let early = world.get("/v1/snapshots/base/files/list").await;
    early.expect_error(409, "snapshot_not_ready");
    world.tell("/v1/snapshots/base/verify").await.expect_error(409, "snapshot_not_ready");
    let early = world.post("/v1/snapshots/base/fork", json!({})).await;
    early.expect_error(409, "snapshot_not_ready");
    let done = async {
        while world.get("/v1/snapshots/base").await.expect(200)["state"] != "completed" {}
    };
    tokio::time::timeout(client::PATIENCE, done).await.expect("it is completed");
}

#[tokio::test]
async fn a_snapshot_that_fails_says_why_and_the_sandbox_goes_on() {
    let world = World::with_sandbox().await;
    world.host.fail_saves(1);
    let refused = world.post("/v1/sandboxes/web/snapshots", json!({"name": "base"})).await;
    refused.expect_error(503, "capacity_reached");
    let failed = world.get("/v1/snapshots/base").await.expect(200);
    assert_eq!(failed["state"], "failed");
    assert_eq!(failed["reason"], "no_capacity");
    assert!(failed["message"].as_str().unwrap().contains("disk is full"), "{failed}");
    world.post("/v1/snapshots/base/fork", json!({})).await.expect_error(409, "snapshot_not_ready");
    world.delete("/v1/snapshots/base").await.expect(204);
    world.sh("true").await;
}

#[tokio::test]
async fn a_name_is_taken_once() {
    let world = World::with_sandbox().await;
    world.snapshot("base").await;
    let again = world.post("/v1/sandboxes/web/snapshots", json!({"name": "base"})).await;
    again.expect_error(409, "already_exists");
    world.delete("/v1/snapshots/base").await.expect(204);
    world.delete("/v1/snapshots/base").await.expect_error(404, "snapshot_not_found");
    world.snapshot("base").await;
}

#[tokio::test]
async fn snapshots_outlive_their_sandbox_and_are_found_by_it() {
    let world = World::with_sandbox().await;
    let id = world.id("web").await;
    world.create(json!({"name": "other"})).await.expect(201);
    world.snapshot("base").await;
    world.tell("/v1/sandboxes/other/snapshots").await.expect(201);
    world.delete("/v1/sandboxes/web").await.expect(204);
    for of in ["web", id.as_str()] {
        let list = world.get(&format!("/v1/snapshots?sandbox={of}")).await.expect(200);
        assert_eq!(list["snapshots"].as_array().unwrap().len(), 1, "{of}");
    }
    let bad = world.get("/v1/snapshots?sandbox=../x").await;
    bad.expect_error(400, "invalid_request");
}

#[tokio::test]
async fn files_are_listed_read_and_compared_without_a_machine() {
    let world = World::with_sandbox().await;
    let id = world.id("web").await;
    world.host.set_memory(&id, "one");
    world.snapshot("first").await;
    world.host.set_memory(&id, "two");
    world.snapshot("second").await;
    world.delete("/v1/sandboxes/web").await.expect(204);
    let list = world.get("/v1/snapshots/first/files/list").await.expect(200);
    let paths: Vec<_> = list["entries"].as_array().unwrap().iter().map(|e| &e["path"]).collect();
    assert!(paths.contains(&&json!("memory")) && paths.contains(&&json!("tmp")), "{list}");
    let file = world.get("/v1/snapshots/first/files/content?path=/memory").await;
    assert_eq!((file.text().as_str(), file.header("content-length")), ("one", "3"));
    let diff = world.get("/v1/snapshots/first/diff").await.expect(200);
    assert_eq!(diff["changes"][0]["path"], "/memory");
    assert_eq!(diff["changes"][0]["change"], "added");
    let diff = world.get("/v1/snapshots/first/diff?to=second").await.expect(200);
    assert_eq!(diff["changes"][0]["change"], "modified");
    let stat = world.get("/v1/snapshots/first/files/stat?path=/memory").await.expect(200);
    assert_eq!((stat["kind"].as_str(), stat["size"].as_u64()), (Some("file"), Some(3)));
    assert!(world.host.alive().is_empty());
}

#[tokio::test]
async fn paths_that_lead_out_of_a_snapshot_lead_nowhere() {
    let world = World::with_sandbox().await;
    world.snapshot("base").await;
    for (query, status, code) in [
        ("files/content?path=../../etc/passwd", 400, "invalid_request"),
        ("files/content?path=/../../etc/passwd", 404, "file_not_found"),
        ("files/content?path=/%2e%2e/%2e%2e/etc/passwd", 404, "file_not_found"),
        ("files/content?path=/nothing", 404, "file_not_found"),
        ("files/content?path=/tmp", 422, "file_refused"),
        ("files/content?path=/a%00b", 400, "invalid_request"),
        ("files/content", 400, "invalid_request"),
        ("files/list?path=etc", 400, "invalid_request"),
        ("files/list?path=/memory", 422, "file_refused"),
        ("files/list?depth=0", 400, "invalid_request"),
        ("files/list?deep=1", 400, "invalid_request"),
        ("diff?to=nothing", 404, "snapshot_not_found"),
        ("diff?to=../x", 400, "invalid_request"),
    ] {
        let answer = world.get(&format!("/v1/snapshots/base/{query}")).await;
        assert_eq!(answer.status, status, "{query}: {}", answer.text());
        answer.expect_error(status, code);
    }
}

#[tokio::test]
async fn unknown_and_hostile_names_are_refused_on_every_route() {
    let world = World::with_sandbox().await;
    let files = ["/files/list", "/files/content?path=/x", "/files/stat?path=/x"];
    for verb in ["", "/diff", "/export"].into_iter().chain(files) {
        let answer = world.get(&format!("/v1/snapshots/nothing{verb}")).await;
        answer.expect_error(404, "snapshot_not_found");
        for name in HOSTILE {
            let answer = world.get(&format!("/v1/snapshots/{name}{verb}")).await;
            assert!(answer.status.is_client_error(), "{name}{verb}: {}", answer.text());
        }
    }
    for verb in ["/verify", "/fork"] {
        let answer = world.tell(&format!("/v1/snapshots/nothing{verb}")).await;
        answer.expect_error(404, "snapshot_not_found");
    }
    for body in [
        json!({"kind": "both"}),
        json!({"name": "No Name"}),
        json!({"name": 7}),
        json!({"in_background": true}),
        json!({"what": 1}),
    ] {
        let answer = world.post("/v1/sandboxes/web/snapshots", body).await;
        answer.expect_error(400, "invalid_request");
    }
    let answer = world.tell("/v1/sandboxes/nobody/snapshots").await;
    answer.expect_error(404, "sandbox_not_found");
}

#[tokio::test]
async fn a_sandbox_begins_from_a_snapshot_with_its_memory() {
    let world = World::with_sandbox().await;
    let id = world.id("web").await;
    world.host.set_memory(&id, "thoughts");
    let base = world.snapshot("base").await;
    let made = world.create(json!({"name": "copy", "snapshot": "base", "env": {"A": "b"}})).await;
    let made = made.expect(201);
    assert_eq!((&made["parent"], &made["env"]["A"]), (&base["id"], &json!("b")));
    let copy = made["id"].as_str().unwrap().parse().unwrap();
    assert_eq!(world.host.memory(&copy).unwrap(), "thoughts");
    world.host.set_memory(&copy, "other thoughts");
    assert_eq!(world.host.memory(&id).unwrap(), "thoughts");
}

#[tokio::test]
async fn what_does_not_fit_a_snapshot_is_refused() {
    let world = World::with_sandbox().await;
    world.snapshot("base").await;
    for (body, word) in [
        (json!({"snapshot": "base", "memory_mib": 2048}), "memory_mib"),
        (json!({"snapshot": "base", "image": "torpor/base"}), "image"),
        (json!({"snapshot": "../base"}), "snapshot"),
        (json!({"snapshot": 1}), "snapshot"),
    ] {
        let error = world.create(body).await.expect_error(400, "invalid_request");
        assert!(error["message"].as_str().unwrap().contains(word), "{error}");
    }
    world.create(json!({"snapshot": "none"})).await.expect_error(404, "snapshot_not_found");
    world.create(json!({"snapshot": "base", "memory_mib": 1024})).await.expect(201);
}

#[tokio::test]
async fn a_filesystem_snapshot_boots_with_any_resources() {
    let world = World::scripted().await;
    world.create(json!({"name": "web"})).await.expect(201);
    let body = json!({"name": "base", "kind": "filesystem"});
    let taken = world.post("/v1/sandboxes/web/snapshots", body).await.expect(201);
    assert_eq!(taken["kind"], "filesystem");
    let boots = world.host.boots();
    let made = world.create(json!({"snapshot": "base", "memory_mib": 2048})).await.expect(201);
    assert_eq!(made["resources"]["memory_mib"], 2048);
    assert_eq!((world.host.boots(), world.host.revives()), (boots + 1, 0));
    let file = world.get("/v1/snapshots/base/files/content?path=/memory").await;
    assert_eq!(file.status, 200, "{}", file.text());
}

#[tokio::test]
async fn a_sandbox_cut_off_from_the_internet_stays_so_in_its_copies() {
    let world = World::new().await;
    world.create(json!({"name": "web", "network": {"internet": false}})).await.expect(201);
    world.snapshot("base").await;
    let made = world.create(json!({"snapshot": "base"})).await.expect(201);
    assert_eq!(made["network"]["internet"], false);
    let forked = world.tell("/v1/snapshots/base/fork").await.expect(201);
    assert_eq!(forked["forks"][0]["sandbox"]["network"]["internet"], false);
}

#[tokio::test]
async fn a_sandbox_goes_back_to_a_snapshot() {
    let world = World::with_sandbox().await;
    let id = world.id("web").await;
    world.host.set_memory(&id, "then");
    let base = world.snapshot("base").await;
    world.host.set_memory(&id, "now");
    let back = world.post("/v1/sandboxes/web/restore", json!({"snapshot": "base"})).await;
    let back = back.expect(200);
    assert_eq!((&back["state"], &back["parent"]), (&json!("running"), &base["id"]));
    assert_eq!(back["id"], id.as_str());
    assert_eq!(world.host.memory(&id).unwrap(), "then");
    world.sh("true").await;
}

#[tokio::test]
async fn a_corrupt_snapshot_is_found_before_it_runs_and_names_the_file() {
    let world = World::with_sandbox().await;
    let id = world.id("web").await;
    world.host.set_memory(&id, "thoughts");
    world.snapshot("base").await;
    let verified = world.tell("/v1/snapshots/base/verify").await.expect(200);
    assert_eq!(verified["files"], 1);
    world.spoil("memory");
    let found = world.tell("/v1/snapshots/base/verify").await;
    let found = found.expect_error(500, "snapshot_corrupt");
    assert!(found["message"].as_str().unwrap().contains("memory"), "{found}");
    let refused = world.create(json!({"snapshot": "base"})).await;
    refused.expect_error(500, "snapshot_corrupt");
}

#[tokio::test]
async fn a_snapshot_is_carried_to_another_host_in_one_file() {
    let world = World::with_sandbox().await;
    let id = world.id("web").await;
    world.host.set_memory(&id, "thoughts");
    let base = world.snapshot("base").await;
    let file = world.get("/v1/snapshots/base/export").await;
    assert_eq!((file.status.as_u16(), file.header("content-type")), (200, "application/x-tar"));
    let elsewhere = World::new().await;
    let post = request(Method::POST, "/v1/snapshots/import?name=carried", file.body.clone());
    let there = send(elsewhere.address, post).await.expect(201);
    assert_eq!(there["name"], "carried");
    assert_ne!(there["id"], base["id"]);
    let made = elsewhere.create(json!({"snapshot": "carried"})).await.expect(201);
    let made = made["id"].as_str().unwrap().parse().unwrap();
    assert_eq!(elsewhere.host.memory(&made).unwrap(), "thoughts");
    let again = request(Method::POST, "/v1/snapshots/import?name=carried", file.body.clone());
    send(elsewhere.address, again).await.expect_error(409, "already_exists");
    let small = world.get("/v1/snapshots/base/export?image=false").await;
    assert!(small.body.len() < file.body.len());
}

#[tokio::test]
async fn what_is_no_snapshot_file_is_refused_and_leaves_nothing() {
    let world = World::with_sandbox().await;
    world.snapshot("base").await;
    let file = world.get("/v1/snapshots/base/export").await.body;
    let half = file.slice(..file.len() / 2);
    for body in [b"".as_slice(), b"garbage", &[0; 4096], &half] {
        let body = bytes::Bytes::copy_from_slice(body);
        let post = request(Method::POST, "/v1/snapshots/import", body.clone());
        let answer = send(world.address, post).await;
        assert!(answer.status.is_client_error(), "{}: {}", body.len(), answer.text());
    }
    let post = request(Method::POST, "/v1/snapshots/import?name=../x", file);
    send(world.address, post).await.expect_error(400, "invalid_request");
    let list = world.get("/v1/snapshots").await.expect(200);
    assert_eq!(list["snapshots"].as_array().unwrap().len(), 1);
}

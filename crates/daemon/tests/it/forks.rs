//! Forks: many at once, each on its own.

use std::time::Duration;

use serde_json::{Value, json};

use crate::world::World;

fn names(forks: &Value) -> Vec<String> {
    let forks = forks["forks"].as_array().unwrap();
    forks.iter().map(|fork| fork["sandbox"]["name"].as_str().unwrap_or("").to_owned()).collect()
}

#[tokio::test]
async fn five_forks_of_a_snapshot_run_and_have_its_memory() {
    let world = World::with_sandbox().await;
    world.host.set_memory(&world.id("web").await, "thoughts");
    world.snapshot("base").await;
    let body = json!({"count": 5, "name": "agent-{n}", "labels": {"swarm": "1"}});
    let forks = world.post("/v1/snapshots/base/fork", body).await.expect(201);
    assert_eq!(names(&forks), ["agent-1", "agent-2", "agent-3", "agent-4", "agent-5"]);
    for fork in forks["forks"].as_array().unwrap() {
        let sandbox = &fork["sandbox"];
        assert_eq!(sandbox["state"], "running");
        assert_eq!(sandbox["labels"]["swarm"], "1");
        let id = sandbox["id"].as_str().unwrap().parse().unwrap();
        assert_eq!(world.host.memory(&id).unwrap(), "thoughts");
    }
    let text = world.get("/metrics").await.text();
    assert!(text.contains("torpor_forks_total 5"), "{text}");
}

#[tokio::test]
async fn a_running_sandbox_is_forked_as_it_is_and_leaves_no_snapshot() {
    let world = World::with_sandbox().await;
    world.host.set_memory(&world.id("web").await, "thoughts");
    let forks = world.post("/v1/sandboxes/web/fork", json!({"count": 2})).await.expect(201);
    assert_eq!(names(&forks), ["", ""]);
    assert_eq!(world.host.alive().len(), 3);
    let list = world.get("/v1/snapshots").await.expect(200);
    assert_eq!(list["snapshots"], json!([]));
    world.sh("true").await;
}

#[tokio::test]
async fn a_sleeping_sandbox_is_forked_without_waking_it() {
    let world = World::with_sandbox().await;
    world.post("/v1/sandboxes/web/sleep", json!({"cold": true})).await.expect(200);
    world.tell("/v1/sandboxes/web/fork").await.expect(201);
    assert_eq!(world.get("/v1/sandboxes/web").await.expect(200)["tier"], "cold");
    assert_eq!(world.host.alive().len(), 1);
}

#[tokio::test]
async fn a_fork_that_fails_takes_no_other() {
    let world = World::with_sandbox().await;
    world.snapshot("base").await;
    world.create(json!({"name": "agent-2"})).await.expect(201);
    let body = json!({"count": 3, "name": "agent-{n}"});
    let forks = world.post("/v1/snapshots/base/fork", body).await.expect(207);
    assert_eq!(names(&forks), ["agent-1", "", "agent-3"]);
    assert_eq!([201, 409, 201], [0, 1, 2].map(|n| forks["forks"][n]["status"].as_u64().unwrap()));
    let error = &forks["forks"][1]["error"];
    assert_eq!(error["code"], "already_exists");
    assert!(!error["request_id"].as_str().unwrap().is_empty());
    world.host.fail_starts(1);
    let forks = world.post("/v1/snapshots/base/fork", json!({"count": 3})).await.expect(207);
    let forks = forks["forks"].as_array().unwrap().clone();
    assert_eq!(forks.iter().filter(|fork| fork.get("error").is_some()).count(), 1);
    // Nothing is left of the one that failed.
    let list = world.get("/v1/sandboxes").await.expect(200);
    assert_eq!(list["sandboxes"].as_array().unwrap().len(), 1 + 1 + 2 + 2);
}

#[tokio::test]
async fn a_wrong_wish_begins_nothing() {
    let world = World::with_sandbox().await;
    world.snapshot("base").await;
    for body in [
        json!({"count": 0}),
        json!({"count": 10_000}),
        json!({"count": -1}),
        json!({"count": "5"}),
        json!({"count": 2, "name": "agent"}),
        json!({"count": 2, "name": "Agent-{n}"}),
        json!({"name": "../../etc/passwd"}),
        json!({"cpus": 7.5}),
        json!({"count": 2, "memory_mib": 4096}),
        json!({"env": {"": "x"}}),
        json!({"lifetime": {"max_age_ms": 0}}),
        json!({"what": 1}),
        json!([1]),
    ] {
        for path in ["/v1/snapshots/base/fork", "/v1/sandboxes/web/fork"] {
            let answer = world.post(path, body.clone()).await;
            assert_eq!(answer.status, 400, "{path} {body}: {}", answer.text());
        }
    }
    assert_eq!(world.host.alive().len(), 1);
    world.tell("/v1/sandboxes/nobody/fork").await.expect_error(404, "sandbox_not_found");
}

#[tokio::test]
async fn a_snapshot_that_is_deleted_during_a_fork_is_still_forked() {
    let world = World::with_sandbox().await;
    world.snapshot("base").await;
    world.host.start_takes(Duration::from_millis(300));
    let forking = world.post("/v1/snapshots/base/fork", json!({"count": 3, "name": "f-{n}"}));
    let deleting = async {
        while world.host.revives() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        world.delete("/v1/snapshots/base").await.expect(204);
    };
    let (forks, ()) = tokio::join!(forking, deleting);
    assert_eq!(names(&forks.expect(201)), ["f-1", "f-2", "f-3"]);
    // They are durable on their own, also after the snapshot is gone.
    world.post("/v1/sandboxes/f-1/sleep", json!({"cold": true})).await.expect(200);
    world.tell("/v1/sandboxes/f-1/wake").await.expect(200);
}

#[tokio::test]
async fn forks_inherit_how_their_sandbox_sleeps() {
    let world = World::new().await;
    let standby = json!({"idle_after_ms": 77_000, "hooks": {"after_wake": ["true"]}});
    world.create(json!({"name": "web", "standby": standby})).await.expect(201);
    let body = json!({"standby": {"auto_wake": false}});
    let forks = world.post("/v1/sandboxes/web/fork", body).await.expect(201);
    let standby = &forks["forks"][0]["sandbox"]["standby"];
    assert_eq!(standby["idle_after_ms"], 77_000);
    assert_eq!(standby["auto_wake"], false);
    assert_eq!(standby["hooks"]["after_wake"], json!(["true"]));
}

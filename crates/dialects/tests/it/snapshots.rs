//! Checkpoints, and sandboxes that begin from one.

use serde_json::{Value, json};

use crate::world::{World, id};

impl World {
    /// Waits until a snapshot is done, however it ends.
    async fn taken(&self, snapshot: &str) -> Value {
        let path = format!("/snapshots/{snapshot}");
        self.until("the snapshot", async || {
            let info = self.get(&path).await.expect(200);
            (info["status"] != "in_progress").then_some(info)
        })
        .await
    }

    async fn checkpoint(&self, sandbox: &str, kind: &str) -> Value {
        let body = json!({"snapshot_type": kind});
        let begun = self.post(&format!("/sandboxes/{sandbox}/snapshot"), body).await.expect(202);
        self.taken(begun["snapshot_id"].as_str().unwrap()).await
    }
}

#[tokio::test]
async fn a_snapshot_begins_in_progress_and_is_told_by_its_id() {
    let world = World::new().await;
    let sandbox = world.create(json!({})).await;
    let begun = world.tell(&format!("/sandboxes/{sandbox}/snapshot")).await.expect(202);
    assert_eq!(begun["status"], "in_progress");
    let info = world.taken(begun["snapshot_id"].as_str().unwrap()).await;
    for (key, value) in [
        ("id", begun["snapshot_id"].clone()),
        ("namespace", json!("default")),
        ("sandbox_id", json!(sandbox)),
        ("status", json!("completed")),
        ("snapshot_type", json!("filesystem")),
        ("base_image", json!("tensorlake/ubuntu-minimal")),
        ("error", Value::Null),
        ("rootfs_disk_bytes", json!(10_240_u64 << 20)),
    ] {
        assert_eq!(info[key], value, "{key}");
    }
    assert!(info["size_bytes"].as_u64().unwrap() > 0);
    assert!(info["created_at"].is_u64());
}

#[tokio::test]
async fn a_sandbox_begins_from_a_snapshot_and_inherits_what_is_not_said() {
    let world = World::new().await;
    let body = json!({
        "resources": {"cpus": 2.0, "memory_mb": 512}, "exposed_ports": [80],
        "allow_unauthenticated_access": true, "network": {"deny_out": ["1.1.1.1"]},
    });
    let sandbox = world.create(body).await;
    world.host.set_memory(&id(&sandbox), "remembered");
    let snapshot = world.checkpoint(&sandbox, "memory").await;
    assert_eq!(snapshot["snapshot_type"], "memory");
    // It survives the sandbox that it is of.
    world.delete(&format!("/sandboxes/{sandbox}")).await.expect(200);
    let fork = world.create(json!({"snapshot_id": snapshot["id"]})).await;
    assert_eq!(world.host.memory(&id(&fork)).as_deref(), Some("remembered"));
    let info = world.info(&fork).await;
    assert_eq!(
        (&info["resources"]["cpus"], &info["resources"]["memory_mb"]),
        (&json!(2.0), &json!(512))
    );
    assert_eq!(
        (&info["exposed_ports"], &info["allow_unauthenticated_access"]),
        (&json!([80]), &json!(true))
    );
    assert_eq!(info["network_policy"]["deny_out"], json!(["1.1.1.1"]));
    let closed = json!({
        "snapshot_id": snapshot["id"], "exposed_ports": [], "allow_unauthenticated_access": false,
        "network": {"allow_internet_access": false},
    });
    let info = world.info(&world.create(closed).await).await;
    assert_eq!(
        (&info["exposed_ports"], &info["allow_unauthenticated_access"]),
        (&json!([]), &json!(false))
    );
    assert_eq!(info["network_policy"]["allow_internet_access"], false);
    let listed = world.get(&format!("/sandboxes/{sandbox}/snapshots")).await.expect(200);
    assert_eq!(listed["snapshots"][0]["id"], snapshot["id"], "also of one that is gone");
}

#[tokio::test]
async fn a_memory_snapshot_is_locked_and_a_filesystem_snapshot_is_not() {
    let world = World::scripted().await;
    let sandbox = world.create(json!({})).await;
    let memory = world.checkpoint(&sandbox, "memory").await["id"].clone();
    for body in [
        json!({"snapshot_id": memory, "resources": {"cpus": 2.0, "memory_mb": 4096}}),
        json!({"snapshot_id": memory, "entrypoint": ["true"]}),
        json!({"snapshot_id": memory, "image": "mine"}),
    ] {
        world.post("/sandboxes", body).await.expect_error(400, "INVALID_REQUEST");
    }
    let files = world.checkpoint(&sandbox, "filesystem").await["id"].clone();
    let larger = json!({"snapshot_id": files, "resources": {"cpus": 2.0, "memory_mb": 2048}});
    let info = world.info(&world.create(larger).await).await;
    assert_eq!(info["resources"]["memory_mb"], 2048);
}

#[tokio::test]
async fn snapshots_are_listed_and_deleted() {
    let world = World::new().await;
    let sandbox = world.named("agent").await;
    let one = world.checkpoint("agent", "memory").await;
    let other = world.create(json!({})).await;
    let two = world.checkpoint(&other, "memory").await;
    let all = world.get("/snapshots").await.expect(200);
    assert_eq!((&all["snapshots"], &all["cursor"]), (&json!([one, two]), &Value::Null));
    for name in [&*sandbox, "agent"] {
        let list = world.get(&format!("/sandboxes/{name}/snapshots")).await.expect(200);
        assert_eq!(list["snapshots"], json!([one]));
    }
    let path = format!("/snapshots/{}", one["id"].as_str().unwrap());
    world.delete(&path).await.expect(200);
    for answer in [world.delete(&path).await, world.get(&path).await] {
        answer.expect_error(404, "SNAPSHOT_NOT_FOUND");
    }
    assert_eq!(world.get("/snapshots").await.expect(200)["snapshots"], json!([two]));
}

#[tokio::test]
async fn a_suspended_sandbox_is_saved_without_waking() {
    let world = World::new().await;
    world.named("agent").await;
    world.suspend("agent").await;
    assert_eq!(world.checkpoint("agent", "memory").await["status"], "completed");
    assert_eq!(world.info("agent").await["status"], "suspended");
}

#[tokio::test]
async fn what_is_no_snapshot_is_not_begun_from() {
    let world = World::new().await;
    let sandbox = world.create(json!({})).await;
    for unknown in ["no-such-snapshot", "snap_75782e0a2e", "snap-aaaaaaaaaaaaaaaaaaaaa", "Ä"] {
        let refused = world.post("/sandboxes", json!({"snapshot_id": unknown})).await;
        refused.expect_error(404, "SNAPSHOT_NOT_FOUND");
    }
    for wrong in [json!({"snapshot_type": "everything"}), json!({"snapshot_type": 1})] {
        let refused = world.post(&format!("/sandboxes/{sandbox}/snapshot"), wrong).await;
        refused.expect_error(400, "INVALID_REQUEST");
    }
}

#[tokio::test]
async fn a_snapshot_that_failed_says_why_and_is_not_begun_from() {
    let world = World::new().await;
    let sandbox = world.create(json!({})).await;
    world.host.fail_saves(1);
    let failed = world.checkpoint(&sandbox, "memory").await;
    assert_eq!(failed["status"], "failed");
    assert!(failed["error"].as_str().unwrap().contains("disk is full"), "{failed}");
    let refused = world.post("/sandboxes", json!({"snapshot_id": failed["id"]})).await;
    refused.expect_error(400, "SNAPSHOT_NOT_READY");
}

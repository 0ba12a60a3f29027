//! Changing a sandbox while it lives.

use serde_json::{Value, json};

use crate::world::World;

#[tokio::test]
async fn a_name_makes_an_idle_end_an_idle_sleep_and_the_id_stays() {
    let world = World::new().await;
    let id = world.create(json!({"timeout_secs": 300})).await;
    let info = world.patch(&format!("/sandboxes/{id}"), json!({"name": "kept"})).await.expect(200);
    assert_eq!((&info["id"], &info["name"]), (&json!(id), &json!("kept")));
    assert_eq!(info["timeout_secs"], 300);
    let own = world.own("GET", "/sandboxes/kept", None).await.expect(200);
    assert_eq!(own["lifetime"]["expire_idle_ms"], Value::Null);
    assert_eq!(own["standby"]["idle_after_ms"], 300_000);
    world.suspend("kept").await;
    let renamed = world.patch("/sandboxes/kept", json!({"name": "other"})).await.expect(200);
    assert_eq!((&renamed["name"], &renamed["status"]), (&json!("other"), &json!("suspended")));
    world.get("/sandboxes/kept").await.expect_error(404, "SANDBOX_NOT_FOUND");
}

#[tokio::test]
async fn a_name_that_is_taken_is_refused() {
    let world = World::new().await;
    world.named("one").await;
    let two = world.named("two").await;
    let refused = world.patch("/sandboxes/two", json!({"name": "one"})).await;
    refused.expect_error(409, "ALREADY_EXISTS");
    assert_eq!(world.info("two").await["id"], json!(two));
}

#[tokio::test]
async fn ports_are_exposed_and_taken_back() {
    let world = World::new().await;
    world.named("web").await;
    let patch = async |body: Value| {
        let info = world.patch("/sandboxes/web", body).await.expect(200);
        (info["exposed_ports"].clone(), info["allow_unauthenticated_access"].clone())
    };
    let open = json!({"exposed_ports": [9000, 80], "allow_unauthenticated_access": true});
    assert_eq!(patch(open).await, (json!([80, 9000]), json!(true)));
    assert_eq!(patch(json!({"exposed_ports": [80]})).await, (json!([80]), json!(true)));
    let closed = json!({"exposed_ports": [], "allow_unauthenticated_access": false});
    assert_eq!(patch(closed).await, (json!([]), json!(false)));
    let reserved = world.patch("/sandboxes/web", json!({"exposed_ports": [9501]})).await;
    assert!(reserved.expect_error(400, "INVALID_REQUEST").contains("9501"));
}

#[tokio::test]
async fn a_network_is_kept_cleared_and_replaced() {
    let world = World::new().await;
    world.create(json!({"name": "net", "network": {"allow_internet_access": false}})).await;
    let kept = world.patch("/sandboxes/net", json!({"auto_resume": true})).await.expect(200);
    assert_eq!(kept["network_policy"]["allow_internet_access"], false);
    let policy = json!({"allow_internet_access": true, "allow_out": ["1.1.1.1:443"], "deny_out": ["10.0.0.0/8"]});
    let set = world.patch("/sandboxes/net", json!({"network": policy})).await.expect(200);
    let shown = json!({"allow_internet_access": true, "allow_out": ["1.1.1.1"], "deny_out": ["10.0.0.0/8"]});
    assert_eq!(set["network_policy"], shown);
    let cleared = world.patch("/sandboxes/net", json!({"network": null})).await.expect(200);
    let open = json!({"allow_internet_access": true, "allow_out": [], "deny_out": []});
    assert_eq!(cleared["network_policy"], open);
}

#[tokio::test]
async fn host_names_that_resolve_can_be_set_on_a_living_sandbox() {
    let world = World::new().await;
    world.create(json!({"name": "net"})).await;
    let policy = json!({"allow_out": ["localhost", "*.no-such-host.invalid"]});
    let set = world.patch("/sandboxes/net", json!({"network": policy})).await.expect(200);
    assert_eq!(set["network_policy"]["allow_out"], policy["allow_out"]);
}

#[tokio::test]
async fn auto_resume_needs_a_name() {
    let world = World::new().await;
    let unnamed = format!("/sandboxes/{}", world.create(json!({})).await);
    let off = json!({"auto_resume": false});
    world.patch(&unnamed, off.clone()).await.expect_error(400, "INVALID_REQUEST");
    world.named("kept").await;
    assert_eq!(world.patch("/sandboxes/kept", off).await.expect(200)["auto_resume"], false);
}

#[tokio::test]
async fn a_resize_is_done_when_it_is_answered_and_is_remembered_as_such() {
    let world = World::new().await;
    let id = world.create(json!({"resources": {"cpus": 1.0, "memory_mb": 1024}})).await;
    let before = world.info(&id).await;
    let path = format!("/sandboxes/{id}");
    let larger = json!({"resources": {"cpus": 2.0, "memory_mb": 2048}});
    let resized = world.patch(&path, larger).await.expect(200);
    let resources = &resized["resources"];
    assert_eq!((&resources["cpus"], &resources["memory_mb"]), (&json!(2.0), &json!(2048)));
    assert_eq!(resources["disk_mb"], before["resources"]["disk_mb"]);
    let resize = &resized["resource_resize"];
    assert_eq!((&resize["status"], &resize["error_message"]), (&json!("succeeded"), &Value::Null));
    assert_eq!(resize["requested"], *resources);
    assert!(resize["generation"].as_u64().unwrap() > 0);
    assert_ne!(resize["generation"], before["resource_resize"]["generation"]);
    let limits = world.host.limits(&crate::world::id(&id)).unwrap().1;
    assert_eq!(limits.memory_mib, 2048);
    // Whoever asks for that generation later finds it.
    world.patch(&path, json!({"name": "changed"})).await.expect(200);
    assert_eq!(world.info(&id).await["resource_resize"], *resize);
}

#[tokio::test]
async fn a_resize_that_can_not_be_is_refused_with_the_reason() {
    let world = World::new().await;
    let path = format!("/sandboxes/{}", world.create(json!({})).await);
    let before = world.get(&path).await.expect(200);
    world.host.fail_resizes(1);
    let engine = world.patch(&path, json!({"resources": {"cpus": 2.0}})).await;
    assert!(engine.expect_error(400, "UNSUPPORTED").contains("can't change that"));
    for body in [
        json!({"resources": {"cpus": 100_000}}),
        json!({"resources": {"memory_mb": 1_000_000_000_000_u64}}),
        json!({"resources": {"disk_mb": 16}}),
        json!({"resources": {"cpus": 1.0}, "name": "both"}),
        json!({"resources": {"cpus": "two"}}),
        json!({"name": 5}),
        json!({"network": "none"}),
        json!({"network": {"allow_out": ["https://example.com"]}}),
        json!({"network": {"allow_out": ["no-such-host.invalid"]}}),
        json!({"network": {"deny_out": ["no-such-host.invalid"]}}),
        json!({}),
    ] {
        let refused = world.patch(&path, body).await;
        refused.expect_error(400, "INVALID_REQUEST");
    }
    assert_eq!(world.get(&path).await.expect(200), before);
}

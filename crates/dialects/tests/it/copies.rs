//! Live copies.

use serde_json::{Value, json};

use crate::world::{World, id};

#[tokio::test]
async fn a_sandbox_is_copied_with_what_it_does() {
    let world = World::new().await;
    let body = json!({"name": "original", "timeout_secs": 300, "exposed_ports": [80]});
    let original = world.create(body).await;
    world.host.set_memory(&id(&original), "in the middle of it");
    let copied = world.tell("/sandboxes/original/copy?times=2").await.expect(200);
    assert_eq!(copied["source_sandbox_id"], json!(original));
    let copies = copied["sandboxes"].as_array().unwrap();
    assert_eq!(copies.len(), 2);
    for copy in copies {
        assert_eq!((&copy["status"], &copy["name"]), (&json!("running"), &Value::Null));
        assert_eq!(copy["sandbox_url"], json!(format!("http://{}", world.address)));
        let copy = copy["sandbox_id"].as_str().unwrap();
        assert_eq!(world.host.memory(&id(copy)).as_deref(), Some("in the middle of it"));
        let info = world.info(copy).await;
        // It has no name, so it ends when it is idle for as long; and it is no more open.
        assert_eq!((&info["timeout_secs"], &info["exposed_ports"]), (&json!(300), &json!([80])));
    }
    assert_eq!(world.info("original").await["status"], "running");
    let once = world.tell("/sandboxes/original/copy").await.expect(200);
    assert_eq!(once["sandboxes"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn none_and_ten_thousand_copies_are_refused() {
    let world = World::new().await;
    let original = world.create(json!({})).await;
    for times in ["0", "1001", "10000", "-1", "many", ""] {
        let refused = world.tell(&format!("/sandboxes/{original}/copy?times={times}")).await;
        refused.expect_error(400, "INVALID_REQUEST");
    }
    assert_eq!(world.ids().await, [original]);
}

#[tokio::test]
async fn a_copy_that_fails_takes_no_other() {
    let world = World::new().await;
    let original = world.create(json!({})).await;
    world.host.fail_starts(1);
    let copied = world.tell(&format!("/sandboxes/{original}/copy?times=3")).await.expect(200);
    let copies = copied["sandboxes"].as_array().unwrap();
    let states: Vec<_> = copies.iter().map(|copy| copy["status"].as_str().unwrap()).collect();
    assert_eq!(states.iter().filter(|state| **state == "running").count(), 2, "{copied}");
    let failed = copies.iter().find(|copy| copy["status"] == "failed").unwrap();
    assert!(!failed["reason"].as_str().unwrap().is_empty());
    assert!(failed["sandbox_id"].is_string());
    world.host.fail_starts(2);
    let none = world.tell(&format!("/sandboxes/{original}/copy?times=2")).await.expect(422);
    assert_eq!(none["source_sandbox_id"], json!(original));
    assert_eq!(world.ids().await.len(), 3);
}

#[tokio::test]
async fn a_suspended_sandbox_is_copied_and_sleeps_on() {
    let world = World::new().await;
    world.named("original").await;
    world.suspend("original").await;
    world.tell("/sandboxes/original/copy?times=1").await.expect(200);
    assert_eq!(world.info("original").await["status"], "suspended");
}

//! Suspending and resuming.

use std::time::Duration;

use serde_json::json;

use crate::world::World;

#[tokio::test]
async fn a_wait_is_honoured_and_the_status_tells_the_outcome() {
    let world = World::new().await;
    world.named("agent").await;
    for (verb, target) in [("suspend", "suspended"), ("resume", "running")] {
        let path = format!("/sandboxes/agent/{verb}");
        world.tell(&format!("{path}?wait_ms=30000")).await.expect(200);
        assert_eq!(world.info("agent").await["status"], target);
        // Already there.
        world.tell(&format!("{path}?wait_ms=30000")).await.expect(200);
        world.tell(&path).await.expect(200);
    }
}

#[tokio::test]
async fn one_that_fell_asleep_by_itself_is_on_disk_when_its_suspension_is_answered() {
    let world = World::new().await;
    world.create(json!({"name": "agent", "timeout_secs": 1})).await;
    world.wait("agent", "suspended").await;
    let durable =
        async || world.own("GET", "/sandboxes/agent", None).await.expect(200)["durable"].clone();
    assert_eq!(durable().await, false);
    world.tell("/sandboxes/agent/suspend?wait_ms=30000").await.expect(200);
    assert_eq!(durable().await, true);
}

#[tokio::test]
async fn without_a_wait_it_is_on_its_way() {
    let world = World::new().await;
    world.named("agent").await;
    world.tell("/sandboxes/agent/suspend").await.expect(202);
    world.wait("agent", "suspended").await;
    world.tell("/sandboxes/agent/resume").await.expect(202);
    world.wait("agent", "running").await;
}

#[tokio::test]
async fn a_wait_that_ran_out_is_no_end() {
    let world = World::new().await;
    world.named("agent").await;
    world.host.save_takes(Duration::from_secs(1));
    world.tell("/sandboxes/agent/suspend?wait_ms=20").await.expect(202);
    world.wait("agent", "suspended").await;
}

#[tokio::test]
async fn a_resume_right_after_a_suspend_has_the_last_word() {
    let world = World::new().await;
    world.named("agent").await;
    world.host.save_takes(Duration::from_millis(200));
    world.tell("/sandboxes/agent/suspend?wait_ms=20").await;
    world.tell("/sandboxes/agent/resume?wait_ms=30000").await.expect(200);
    let info = world.info("agent").await;
    assert_eq!(info["status"], "running");
    let own = world.own("GET", "/sandboxes/agent", None).await.expect(200);
    assert_eq!(own["wakes"], 1);
}

#[tokio::test]
async fn a_sandbox_without_a_name_can_not_be_suspended() {
    let world = World::new().await;
    let id = world.create(json!({})).await;
    let refused = world.tell(&format!("/sandboxes/{id}/suspend?wait_ms=1000")).await;
    assert!(refused.expect_error(400, "INVALID_REQUEST").contains("name"));
    assert_eq!(world.info(&id).await["status"], "running");
}

#[tokio::test]
async fn a_failed_suspend_says_why_and_the_sandbox_goes_on() {
    let world = World::new().await;
    world.named("agent").await;
    world.host.fail_saves(1);
    let failed = world.tell("/sandboxes/agent/suspend?wait_ms=30000").await;
    let text = failed.expect_error(409, "SANDBOX_NOT_CHANGED");
    assert!(text.contains("disk is full"), "{text}");
    assert_eq!(world.info("agent").await["status"], "running");
}

#[tokio::test]
async fn a_failed_resume_says_why_and_the_sandbox_sleeps_on() {
    let world = World::new().await;
    world.named("agent").await;
    world.own("POST", "/sandboxes/agent/sleep", Some(json!({"cold": true}))).await.expect(200);
    world.host.fail_starts(1);
    let failed = world.tell("/sandboxes/agent/resume?wait_ms=30000").await;
    failed.expect_error(409, "SANDBOX_NOT_CHANGED");
    assert_eq!(world.info("agent").await["status"], "suspended");
    world.tell("/sandboxes/agent/resume?wait_ms=30000").await.expect(200);
}

#[tokio::test]
async fn what_is_terminated_is_neither_suspended_nor_resumed() {
    let world = World::new().await;
    let id = world.named("agent").await;
    world.host.crash(&crate::world::id(&id), "its kernel died");
    world.wait(&id, "terminated").await;
    for verb in ["suspend", "resume", "snapshot", "copy"] {
        let refused = world.tell(&format!("/sandboxes/{id}/{verb}")).await;
        assert!(refused.expect_error(400, "INVALID_REQUEST").contains("terminated"));
    }
}

#[tokio::test]
async fn a_wait_that_is_no_number_is_refused() {
    let world = World::new().await;
    world.named("agent").await;
    let refused = world.tell("/sandboxes/agent/suspend?wait_ms=soon").await;
    refused.expect_error(400, "INVALID_REQUEST");
    world.tell("/sandboxes/agent/suspend?wait_ms=99999999").await.expect(200);
}

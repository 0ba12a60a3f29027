//! Creating a sandbox, and all the ways that can go.

use std::time::Duration;

use serde_json::{Value, json};
use torpor_daemon::ShutdownMode;

use crate::client::Ask;
use crate::world::{LIFE, World};

/// The name that clients know our default image by.
const SHOWN_DEFAULT: &str = "tensorlake/ubuntu-minimal";

fn create(body: &Value) -> Ask {
    Ask::new("POST", format!("{LIFE}/sandboxes")).json(body)
}

#[tokio::test]
async fn what_the_package_sends_becomes_a_sandbox_that_runs() {
    let world = World::new().await;
    let body = json!({
        "name": "agent-1", "image": SHOWN_DEFAULT,
        "resources": {"cpus": 2.0, "memory_mb": 2048}, "timeout_secs": 300,
        "network": {"allow_internet_access": false, "allow_out": [], "deny_out": []},
        "exposed_ports": [8080, 80], "allow_unauthenticated_access": true,
    });
    let made = world.post("/sandboxes", body).await.expect(200);
    let url = format!("http://{}", world.address);
    assert_eq!(made["status"], "running");
    assert_eq!(made["name"], "agent-1");
    assert_eq!((&made["sandbox_url"], &made["ingress_endpoint"]), (&json!(url), &json!(url)));
    assert!(made.get("state").is_none(), "the package refuses both: {made}");
    let info = world.info("agent-1").await;
    assert_eq!(info["id"], made["sandbox_id"]);
    for (key, value) in [
        ("namespace", json!("default")),
        ("status", json!("running")),
        ("image", json!(SHOWN_DEFAULT)),
        ("timeout_secs", json!(300)),
        ("entrypoint", Value::Null),
        ("exposed_ports", json!([80, 8080])),
        ("allow_unauthenticated_access", json!(true)),
        ("auto_resume", json!(true)),
        ("runtime", json!("fake")),
        ("file_systems", json!([])),
        ("terminated_at", Value::Null),
        ("pending_reason", Value::Null),
    ] {
        assert_eq!(info[key], value, "{key}");
    }
    assert_eq!(
        info["network_policy"],
        json!({"allow_internet_access": false, "allow_out": [], "deny_out": []})
    );
    let resources = &info["resources"];
    assert_eq!((&resources["cpus"], &resources["memory_mb"]), (&json!(2.0), &json!(2048)));
    assert!(resources["disk_mb"].is_u64());
    assert!(info["created_at"].is_u64());
}

#[tokio::test]
async fn nothing_at_all_is_a_sandbox_with_the_defaults() {
    let world = World::new().await;
    let made = world.tell("/sandboxes").await.expect(200);
    assert_eq!(made["name"], Value::Null);
    let info = world.info(made["sandbox_id"].as_str().unwrap()).await;
    assert_eq!((&info["image"], &info["timeout_secs"]), (&json!(SHOWN_DEFAULT), &json!(600)));
    assert_eq!((&info["exposed_ports"], &info["name"]), (&json!([]), &Value::Null));
    // An unnamed one does not fall asleep: it ends.
    let own = world.own("GET", &format!("/sandboxes/{}", info["id"].as_str().unwrap()), None).await;
    let own = own.expect(200);
    assert_eq!(own["lifetime"]["expire_idle_ms"], 600_000);
    assert_eq!(own["standby"]["idle_after_ms"], Value::Null);
    assert_eq!(own["ports"], json!({"exposed": [], "public": false}));
}

#[tokio::test]
async fn a_body_with_unknown_fields_is_read() {
    let world = World::new().await;
    let body = json!({"name": "plain", "newer": {"x": 1}});
    let ask = Ask::new("POST", "/sandboxes").json(&body);
    assert_eq!(world.send(ask).await.expect(200)["name"], "plain");
}

#[tokio::test]
async fn a_body_that_a_web_page_may_send_unasked_is_refused() {
    let world = World::new().await;
    let ask = || Ask::new("POST", "/sandboxes").raw(r#"{"name": "plain"}"#);
    for ask in [ask(), ask().header("content-type", "text/plain")] {
        world.send(ask).await.expect_error(400, "INVALID_REQUEST");
    }
    assert_eq!(world.ids().await, [""; 0]);
}

#[tokio::test]
async fn the_time_of_a_named_sandbox_is_until_it_sleeps() {
    let world = World::new().await;
    for (name, secs, idle_ms) in [("soon", 30, json!(30_000)), ("never", 0, Value::Null)] {
        world.create(json!({"name": name, "timeout_secs": secs})).await;
        assert_eq!(world.info(name).await["timeout_secs"], secs);
        let own = world.own("GET", &format!("/sandboxes/{name}"), None).await.expect(200);
        assert_eq!(own["standby"]["idle_after_ms"], idle_ms);
        assert_eq!(own["lifetime"]["expire_idle_ms"], Value::Null);
    }
}

#[tokio::test]
async fn images_of_tensorlake_are_ours_and_others_are_what_they_are_called() {
    let world = World::new().await;
    for image in
        ["tensorlake/ubuntu-minimal", "ubuntu-minimal", "tensorlake/ubuntu-vnc", "debian-minimal"]
    {
        let id = world.create(json!({"image": image})).await;
        assert_eq!(world.info(&id).await["image"], SHOWN_DEFAULT, "{image}");
    }
    let id = world.create(json!({"image": "mine"})).await;
    assert_eq!(world.info(&id).await["image"], "mine");
    let text = world.post("/sandboxes", json!({"image": "nobody"})).await;
    assert!(text.expect_error(404, "IMAGE_NOT_FOUND").contains("nobody"));
}

#[tokio::test]
async fn a_name_is_taken_once() {
    let world = World::new().await;
    world.named("agent-1").await;
    let second = world.post("/sandboxes", json!({"name": "agent-1"})).await;
    assert!(second.expect_error(409, "ALREADY_EXISTS").contains("agent-1"));
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_and_leaves_nothing() {
    let world = World::new().await;
    for body in [
        json!({"name": 5}),
        json!({"name": "Not A Name"}),
        json!({"resources": "many"}),
        json!({"resources": {"cpus": "two"}}),
        json!({"resources": {"cpus": 0}}),
        json!({"resources": {"memory_mb": 1.5}}),
        json!({"resources": {"memory_mb": -1}}),
        json!({"timeout_secs": -1}),
        json!({"entrypoint": "text"}),
        json!({"exposed_ports": [0]}),
        json!({"exposed_ports": [65_536]}),
        json!({"exposed_ports": [9501]}),
        json!({"network": {"allow_out": "1.1.1.1"}}),
        json!({"network": {"deny_out": ["1.2.3.4/99"]}}),
        json!({"network": {"allow_out": ["https://example.com"]}}),
        json!({"network": {"deny_out": ["example.com/path"]}}),
        json!({"network": {"allow_out": ["10.0.0.0/8"]}}),
        json!({"secret_names": "ONE"}),
        json!({"auto_resume": false}),
        json!({"max_pending_secs": -1}),
        json!({"wait": "no"}),
        json!([]),
    ] {
        world.post("/sandboxes", body.clone()).await.expect_error(400, "INVALID_REQUEST");
    }
    assert_eq!(world.ids().await, [""; 0]);
}

#[tokio::test]
async fn what_is_not_there_is_refused_by_name() {
    let world = World::new().await;
    for (body, word) in [
        (json!({"resources": {"gpus": [{"count": 1, "model": "A10"}]}}), "GPU"),
        (
            json!({"file_systems": [{"file_system_id": "a", "mount_path": "/m", "owner": "1:1"}]}),
            "owner",
        ),
        (json!({"cloud_init_base64": "I2Nsb3VkLWNvbmZpZw=="}), "cloud-init"),
    ] {
        let text = world.post("/sandboxes", body).await.expect_error(400, "UNSUPPORTED");
        assert!(text.contains(word), "{text}");
    }
    let secret = world.post("/sandboxes", json!({"secret_names": ["NOBODY"]})).await;
    assert!(secret.expect_error(404, "NOT_FOUND").contains("NOBODY"));
}

#[tokio::test]
async fn host_names_are_entries_of_a_policy() {
    let world = World::new().await;
    let policy =
        json!({"allow_out": ["Example.com:443", "*.example.org"], "deny_out": ["bad.example"]});
    let id = world.create(json!({"network": policy})).await;
    let shown = json!({
        "allow_internet_access": true,
        "allow_out": ["example.com", "*.example.org"],
        "deny_out": ["bad.example"],
    });
    assert_eq!(world.info(&id).await["network_policy"], shown);
}

#[tokio::test]
async fn secrets_are_asked_for_by_name() {
    let world = World::new().await;
    let value = json!({"value": "kept well"});
    world.own("PUT", "/secrets/TOKEN", Some(value)).await;
    let id = world.create(json!({"secret_names": ["TOKEN"]})).await;
    let command = json!({"command": ["sh", "-c", "printf %s \"$TOKEN\""]});
    let ran = world.own("POST", &format!("/sandboxes/{id}/run"), Some(command)).await.expect(200);
    assert_eq!(ran["stdout"], "kept well");
}

#[tokio::test]
async fn an_entrypoint_is_started() {
    let world = World::new().await;
    let file = world.dir.join("started");
    let entrypoint = json!(["touch", file]);
    let id = world.create(json!({"entrypoint": entrypoint})).await;
    assert_eq!(world.info(&id).await["entrypoint"], entrypoint);
    world.until("the entrypoint", async || file.exists().then_some(())).await;
}

#[tokio::test]
async fn what_fails_to_start_is_told_and_gone() {
    let world = World::new().await;
    world.host.fail_starts(1);
    let failed = world.post("/sandboxes", json!({"name": "unlucky"})).await.expect(422);
    assert_eq!(
        (&failed["status"], &failed["reason"]),
        (&json!("failed"), &json!("StartupFailedInternalError"))
    );
    assert!(failed["sandbox_id"].is_string());
    assert!(!failed["error_details"]["message"].as_str().unwrap().is_empty());
    let wrong = json!({"name": "unlucky", "entrypoint": ["/no/such/program"]});
    let failed = world.post("/sandboxes", wrong).await.expect(422);
    assert_eq!(failed["reason"], "ConfigurationError");
    assert!(failed["error_details"]["message"].as_str().unwrap().contains("entrypoint"));
    world.until("nothing", async || world.ids().await.is_empty().then_some(())).await;
    world.named("unlucky").await;
}

#[tokio::test]
async fn whoever_does_not_wait_is_told_at_once() {
    let world = World::new().await;
    world.host.start_takes(Duration::from_secs(3600));
    let body = json!({"name": "later", "wait": false});
    let made = world.post("/sandboxes", body).await.expect(202);
    assert_eq!((&made["state"], &made["name"]), (&json!("pending"), &json!("later")));
    assert!(made.get("status").is_none(), "the package refuses both: {made}");
    assert!(made["pending_reason"].is_string());
    let info = world.info("later").await;
    assert_eq!((&info["status"], &info["sandbox_url"]), (&json!("pending"), &Value::Null));
}

#[tokio::test]
async fn whoever_waits_is_answered_in_time_and_the_sandbox_stays() {
    let world = World::new().await;
    world.leave_free(0);
    let ask = create(&json!({}))
        .header("x-tensorlake-request-timeout-ms", "60")
        .header("x-tensorlake-request-timeout-grace-ms", "20");
    let late = world.send(ask).await.expect(504);
    assert_eq!(late["status"], "timeout");
    let id = late["sandbox_id"].as_str().unwrap();
    assert_eq!(world.info(id).await["status"], "pending");
    world.leave_free(u64::MAX);
    world.wait(id, "running").await;
}

#[tokio::test]
async fn an_unnamed_sandbox_whose_creator_went_away_ends_and_a_named_one_does_not() {
    let world = World::new().await;
    world.leave_free(0);
    let named = create(&json!({"name": "kept"})).sent(world.address).await;
    let unnamed = create(&json!({})).sent(world.address).await;
    world.until("two", async || (world.ids().await.len() == 2).then_some(())).await;
    drop((named, unnamed));
    world.until("one", async || (world.ids().await.len() == 1).then_some(())).await;
    world.leave_free(u64::MAX);
    world.wait("kept", "running").await;
    assert_eq!(world.ids().await.len(), 1);
}

#[tokio::test]
async fn lack_of_room_is_a_wait_and_no_error() {
    let world = World::new().await;
    world.leave_free(0);
    let made = world.post("/sandboxes", json!({"wait": false})).await.expect(202);
    let id = made["sandbox_id"].as_str().unwrap();
    let info = world.info(id).await;
    assert_eq!(info["status"], "pending");
    assert_eq!(info["pending_reason"], "no_resources_available");
    // It can be named while it waits, not saved or woken; and nobody waits for an answer.
    let path = format!("/sandboxes/{id}");
    world.patch(&path, json!({"name": "x"})).await.expect(200);
    for verb in ["suspend", "resume", "snapshot", "copy"] {
        let refused = world.tell(&format!("{path}/{verb}")).await;
        assert!(refused.expect_error(400, "INVALID_REQUEST").contains("pending"));
    }
    assert_eq!(world.get(&format!("{path}/logs")).await.expect(200)["logs"], json!([]));
    world.leave_free(u64::MAX);
    world.wait(id, "running").await;
}

#[tokio::test]
async fn who_waits_for_room_in_vain_is_told_why() {
    let world = World::new().await;
    world.leave_free(0);
    let ended = world.post("/sandboxes", json!({"max_pending_secs": 0})).await.expect(422);
    assert_eq!((&ended["status"], &ended["reason"]), (&json!("terminated"), &json!("no_capacity")));
    let id = ended["sandbox_id"].as_str().unwrap();
    let archived = world.get(&format!("/archived-sandboxes/{id}")).await.expect(200);
    assert_eq!(archived["termination_reason"], "no_capacity");
}

#[tokio::test]
async fn a_sandbox_that_is_deleted_while_it_waits_is_cancelled() {
    let world = World::new().await;
    world.leave_free(0);
    let waiting = create(&json!({})).sent(world.address).await;
    let ids =
        world.until("it", async || Some(world.ids().await).filter(|ids| !ids.is_empty())).await;
    world.delete(&format!("/sandboxes/{}", ids[0])).await.expect(200);
    let ended = waiting.answered().await.whole().await.expect(422);
    assert_eq!((&ended["status"], &ended["reason"]), (&json!("terminated"), &json!("cancelled")));
    let archived = world.get(&format!("/archived-sandboxes/{}", ids[0])).await.expect(200);
    assert_eq!(archived["termination_reason"], "cancelled");
}

#[tokio::test]
async fn a_sandbox_that_waits_for_room_goes_on_with_the_next_daemon() {
    let mut world = World::new().await;
    world.leave_free(0);
    let waiting = create(&json!({})).sent(world.address).await;
    let ids =
        world.until("it", async || Some(world.ids().await).filter(|ids| !ids.is_empty())).await;
    let answer = tokio::spawn(async move { waiting.answered().await.whole().await });
    world.restart(ShutdownMode::Running).await;
    let told = answer.await.unwrap().expect(504);
    assert_eq!((&told["sandbox_id"], &told["status"]), (&json!(ids[0]), &json!("timeout")));
    world.leave_free(u64::MAX);
    world.wait(&ids[0], "running").await;
}

#[tokio::test]
async fn the_name_of_a_sandbox_that_failed_is_free() {
    let world = World::new().await;
    let lost = world.named("session").await;
    world.host.crash(&crate::world::id(&lost), "its kernel died");
    let info = world.wait(&lost, "terminated").await;
    assert!(info["error_details"]["message"].as_str().unwrap().contains("its kernel died"));
    assert!(info["termination_reason"].is_string());
    world.get("/sandboxes/session").await.expect_error(404, "SANDBOX_NOT_FOUND");
    let found = world.named("session").await;
    assert_ne!(found, lost);
    assert_eq!(world.info("session").await["id"], json!(found));
}

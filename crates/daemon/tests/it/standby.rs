//! Sleep and wake, asked for and by themselves.

use std::time::Duration;

use http::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use torpor_daemon::config::StandbyConfig;
use torpor_daemon::{Config, ShutdownMode};

use crate::client::{self, request, send};
use crate::world::World;

/// A world whose sandboxes fall asleep at once and leave memory at once.
fn sleepy() -> Config {
    let standby = StandbyConfig {
        idle_after_ms: 20,
        persist_after_ms: 0,
        warm_for_secs: 0,
        ..StandbyConfig::default()
    };
    Config { standby, ..Config::default() }
}

#[tokio::test]
async fn a_sandbox_that_was_put_to_sleep_is_durable_and_the_next_request_wakes_it() {
    let world = World::with_sandbox().await;
    let asleep = world.tell("/v1/sandboxes/web/sleep").await.expect(200);
    assert_eq!((&asleep["state"], &asleep["tier"]), (&json!("asleep"), &json!("warm")));
    assert_eq!(asleep["durable"], true);
    assert_eq!(world.sh("echo hello").await["stdout"], "hello\n");
    let awake = world.get("/v1/sandboxes/web").await.expect(200);
    assert_eq!((&awake["state"], &awake["wakes"]), (&json!("running"), &json!(1)));
}

#[tokio::test]
async fn a_cold_sandbox_has_no_machine_and_wakes_with_its_memory() {
    let world = World::with_sandbox().await;
    let id = world.id("web").await;
    world.host.set_memory(&id, "what it thinks of");
    let asleep = world.post("/v1/sandboxes/web/sleep", json!({"cold": true})).await.expect(200);
    assert_eq!(asleep["tier"], "cold");
    assert!(asleep["saved_bytes"].as_u64().unwrap() > 0);
    assert!(world.host.alive().is_empty());
    let awake = world.tell("/v1/sandboxes/web/wake").await.expect(200);
    assert_eq!(awake["state"], "running");
    assert_eq!(world.host.memory(&id).unwrap(), "what it thinks of");
    // Waking what is awake is fine.
    world.tell("/v1/sandboxes/web/wake").await.expect(200);
}

#[tokio::test]
async fn what_only_looks_does_not_wake() {
    let world = World::with_sandbox().await;
    world.post("/v1/sandboxes/web/sleep", json!({"cold": true})).await.expect(200);
    for path in [
        "/v1/sandboxes",
        "/v1/sandboxes/web",
        "/v1/sandboxes/web/usage",
        "/v1/sandboxes/web/status?after=0",
        "/v1/usage",
        "/v1/snapshots?sandbox=web",
        "/v1/info",
        "/metrics",
    ] {
        assert_eq!(world.get(path).await.status, 200, "{path}");
    }
    world.patch("/v1/sandboxes/web", json!({"labels": {"a": "b"}})).await.expect(200);
    world.snapshot("base").await;
    let usage = world.get("/v1/usage").await.expect(200);
    assert_eq!(usage["sandboxes"][0]["tier"], "cold");
    assert_eq!(usage["sandboxes"][0]["memory_bytes"], 0);
    assert!(world.host.alive().is_empty());
    world.delete("/v1/sandboxes/web").await.expect(204);
}

#[tokio::test]
async fn what_needs_the_inside_wakes_it() {
    let world = World::with_sandbox().await;
    std::fs::write(world.dir.join("f"), "content").unwrap();
    let (dir, file) = (world.query(""), world.query("f"));
    for path in [
        format!("/v1/sandboxes/web/files/content?path={file}"),
        format!("/v1/sandboxes/web/files/list?path={dir}"),
        format!("/v1/sandboxes/web/files/stat?path={file}"),
        "/v1/sandboxes/web/processes".to_owned(),
    ] {
        world.post("/v1/sandboxes/web/sleep", json!({"cold": true})).await.expect(200);
        assert_eq!(world.get(&path).await.status, 200, "{path}");
    }
    assert_eq!(world.get("/v1/sandboxes/web").await.expect(200)["wakes"], 4);
}

#[tokio::test]
async fn a_preview_wakes_a_sandbox_and_sees_nothing_of_it() {
    let world = World::with_sandbox().await;
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = server.accept().await.unwrap();
            let mut head = [0; 1024];
            let _ = stream.read(&mut head).await;
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";
            stream.write_all(answer).await.unwrap();
        }
    });
    for cold in [false, true] {
        world.post("/v1/sandboxes/web/sleep", json!({"cold": cold})).await.expect(200);
        let mut asked = request(Method::GET, "/page", "");
        asked.headers_mut().insert("host", format!("{port}-web.localhost").parse().unwrap());
        assert_eq!(send(world.address, asked).await.text(), "hello");
    }
}

#[tokio::test]
async fn a_hundred_requests_wake_once() {
    let world = World::with_sandbox().await;
    world.post("/v1/sandboxes/web/sleep", json!({"cold": true})).await.expect(200);
    let asked = (0..100).map(|_| world.get("/v1/sandboxes/web/processes"));
    for answer in futures_util::future::join_all(asked).await {
        answer.expect(200);
    }
    assert_eq!(world.host.revives(), 1);
}

#[tokio::test]
async fn who_asks_while_it_is_put_to_sleep_gets_an_answer() {
    let world = World::with_sandbox().await;
    let asking = async {
        for _ in 0..100 {
            world.get("/v1/sandboxes/web/processes").await.expect(200);
        }
    };
    let sleeping = async {
        loop {
            world.tell("/v1/sandboxes/web/sleep").await.expect(200);
            // Time for an answer; otherwise it would be asked to sleep before it is awake.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        () = asking => {}
        () = sleeping => {}
    }
    assert!(world.get("/v1/sandboxes/web").await.expect(200)["wakes"].as_u64().unwrap() > 0);
}

#[tokio::test]
async fn a_sandbox_nobody_talks_to_falls_asleep_and_leaves_memory() {
    let world = World::with(sleepy()).await;
    world.create(json!({"name": "web"})).await.expect(201);
    world.create(json!({"name": "busy", "standby": {"idle_after_ms": null}})).await.expect(201);
    let asleep = world.wait("web", "tier", json!("cold")).await;
    assert_eq!(asleep["durable"], true);
    assert_eq!(world.get("/v1/sandboxes/busy").await.expect(200)["state"], "running");
    assert_eq!(world.sh("echo awake").await["stdout"], "awake\n");
}

#[tokio::test]
async fn an_open_stream_keeps_it_awake() {
    let world = World::with(sleepy()).await;
    world.create(json!({"name": "web"})).await.expect(201);
    let command = json!({"command": ["sh", "-c", "sleep 0.3; echo done"]});
    let running = world.open_post("/v1/sandboxes/web/run?stream=true", command).await;
    let events = running.events().await;
    assert_eq!(events[1]["text"], "done\n", "{events:?}");
}

#[tokio::test]
async fn a_sandbox_that_does_not_wake_by_itself_says_so() {
    let world = World::new().await;
    world.create(json!({"name": "web", "standby": {"auto_wake": false}})).await.expect(201);
    world.tell("/v1/sandboxes/web/sleep").await.expect(200);
    let refused = world.run(json!({"command": ["true"]})).await;
    let refused = refused.expect_error(409, "sandbox_asleep");
    assert!(refused["hint"].as_str().unwrap().contains("wake"), "{refused}");
    let mut preview = request(Method::GET, "/", "");
    preview.headers_mut().insert("host", "3000-web.localhost".parse().unwrap());
    assert_eq!(send(world.address, preview).await.json()["code"], "sandbox_asleep");
    world.tell("/v1/sandboxes/web/wake").await.expect(200);
    world.sh("true").await;
    world.tell("/v1/sandboxes/web/sleep").await.expect(200);
    let auto = json!({"standby": {"auto_wake": true}});
    let changed = world.patch("/v1/sandboxes/web", auto).await.expect(200);
    assert_eq!(changed["standby"]["auto_wake"], true);
    world.sh("true").await;
}

#[tokio::test]
async fn a_stream_that_sleep_cuts_says_how_to_go_on() {
    let world = World::with_sandbox().await;
    let command = json!({"command": ["sleep", "3600"]});
    let mut running = world.open_post("/v1/sandboxes/web/run?stream=true", command.clone()).await;
    let pid = running.event().await.unwrap()["pid"].clone();
    let mut socket = world.socket("/v1/sandboxes/web/exec").await;
    socket
        .send_json(json!({"do": "start", "command": ["sleep", "3600"], "detachable": true}))
        .await;
    socket.event().await;
    world.tell("/v1/sandboxes/web/sleep").await.expect(200);
    let last = running.event().await.unwrap();
    assert_eq!(last["event"], "error");
    let message = last["message"].as_str().unwrap();
    assert!(message.contains(&format!("/processes/{pid}/attach")), "{message}");
    assert_eq!(running.event().await, None);
    assert_eq!(socket.event().await["code"], "sandbox_asleep");
}

#[tokio::test]
async fn an_attached_process_goes_on_after_a_wake() {
    let world = World::with_sandbox().await;
    let command = json!({"command": ["cat"], "keep_stdin": true});
    let started = world.post("/v1/sandboxes/web/processes", command).await.expect(201);
    let path = format!("/v1/sandboxes/web/processes/{}", started["pid"]);
    world.tell("/v1/sandboxes/web/sleep").await.expect(200);
    let mut socket = world.socket(&format!("{path}/attach")).await;
    socket.event().await;
    socket.send("hello\n").await;
    socket.wait_for(1, "hello").await;
    world.delete(&path).await.expect(204);
}

#[tokio::test]
async fn bad_wishes_about_sleep_are_refused() {
    let world = World::with_sandbox().await;
    for (path, body) in [
        ("/v1/sandboxes/web/sleep", json!({"cold": "yes"})),
        ("/v1/sandboxes/web/sleep", json!({"deep": true})),
        ("/v1/sandboxes", json!({"standby": {"idle_after_ms": 0}})),
        ("/v1/sandboxes", json!({"standby": {"hooks": {"before_sleep": [""]}}})),
        ("/v1/sandboxes", json!({"standby": {"hooks": {"grace_ms": 10_000_000}}})),
        ("/v1/sandboxes/web/restore", json!({})),
        ("/v1/sandboxes/web/restore", json!({"snapshot": "../../etc/passwd"})),
    ] {
        world.post(path, body).await.expect_error(400, "invalid_request");
    }
    world.tell("/v1/sandboxes/nobody/sleep").await.expect_error(404, "sandbox_not_found");
    world.tell("/v1/sandboxes/nobody/wake").await.expect_error(404, "sandbox_not_found");
    let back = world.post("/v1/sandboxes/web/restore", json!({"snapshot": "none"})).await;
    back.expect_error(404, "snapshot_not_found");
}

#[tokio::test]
async fn a_sandbox_that_can_not_be_saved_goes_on_and_says_why() {
    let world = World::with_sandbox().await;
    world.host.fail_saves(1);
    let refused = world.tell("/v1/sandboxes/web/sleep").await;
    refused.expect_error(503, "capacity_reached");
    world.sh("true").await;
}

#[tokio::test]
async fn standby_shows_in_events_and_metrics() {
    let world = World::with_sandbox().await;
    let mut events = world.open("/v1/events").await;
    world.post("/v1/sandboxes/web/sleep", json!({"cold": true})).await.expect(200);
    world.sh("true").await;
    let mut seen = Vec::new();
    while seen.last() != Some(&json!("running")) {
        let line = events.line().await.unwrap();
        if let Some(data) = line.strip_prefix("data: ") {
            let status: serde_json::Value = serde_json::from_str(data).unwrap();
            seen.push(status["state"].clone());
        }
    }
    assert!(seen.contains(&json!("asleep")), "{seen:?}");
    // Each figure is counted on its own, so a reader may come in between.
    for line in [
        "torpor_wakes_total{tier=\"cold\"} 1",
        "torpor_wake_seconds_count{tier=\"cold\"} 1",
        "torpor_sleep_seconds_count{tier=\"cold\"} 1",
        "torpor_sleeps_total 1",
        "torpor_saves_total 1",
        "torpor_saves_on_disk_bytes ",
    ] {
        let counted = async { while !world.get("/metrics").await.text().contains(line) {} };
        let seen = tokio::time::timeout(client::PATIENCE, counted).await;
        assert!(seen.is_ok(), "{line} is not in\n{}", world.get("/metrics").await.text());
    }
}

#[tokio::test]
async fn stopping_saves_every_sandbox_and_the_next_daemon_wakes_what_did_not_sleep() {
    let mut world = World::with_sandbox().await;
    let id = world.id("web").await;
    world.create(json!({"name": "sleeper"})).await.expect(201);
    world.tell("/v1/sandboxes/sleeper/sleep").await.expect(200);
    world.host.set_memory(&id, "thoughts");
    world.stop(ShutdownMode::Durable).await.unwrap();
    assert!(world.host.alive().is_empty());
    world.host.lose_power();
    world.begin_again().await;
    world.wait("web", "state", json!("running")).await;
    assert_eq!(world.host.memory(&id).unwrap(), "thoughts");
    assert_eq!(world.get("/v1/sandboxes/sleeper").await.expect(200)["tier"], "cold");
}

#[tokio::test]
async fn handing_over_leaves_machines_to_the_next_daemon() {
    let mut world = World::with_sandbox().await;
    world.create(json!({"name": "sleeper"})).await.expect(201);
    world.tell("/v1/sandboxes/sleeper/sleep").await.expect(200);
    let boots = world.host.boots();
    world.restart(ShutdownMode::Running).await;
    world.wait("web", "state", json!("running")).await;
    world.wait("sleeper", "tier", json!("warm")).await;
    world.sh("true").await;
    assert_eq!((world.host.boots(), world.host.revives()), (boots, 0));
}

#[tokio::test]
async fn sleep_is_answered_when_it_is_durable() {
    let world = World::with_sandbox().await;
    world.host.save_takes(Duration::from_millis(100));
    let begun = tokio::time::Instant::now();
    world.tell("/v1/sandboxes/web/sleep").await.expect(200);
    assert!(begun.elapsed() >= Duration::from_millis(100), "it was durable before it was saved");
}

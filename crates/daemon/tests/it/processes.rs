//! Processes that live on their own.

use serde_json::{Value, json};

use crate::world::{World, until};

const PROCESSES: &str = "/v1/sandboxes/web/processes";

async fn start(world: &World, body: Value) -> Value {
    world.post(PROCESSES, body).await.expect(201)
}

#[tokio::test]
async fn a_process_is_started_seen_and_killed_with_its_children() {
    let world = World::with_sandbox().await;
    let child = world.path("child");
    let script = format!("sleep 3600 & echo $! > {child}; wait");
    let made = start(&world, json!({"command": ["sh", "-c", script]})).await;
    assert_eq!(made["running"], true);
    let pid = made["pid"].as_u64().unwrap();
    let list = world.get(PROCESSES).await.expect(200);
    assert_eq!(list["processes"][0]["pid"], pid);
    until("the child runs", || {
        std::fs::read_to_string(&child).is_ok_and(|text| text.ends_with('\n'))
    })
    .await;
    world.delete(&format!("{PROCESSES}/{pid}")).await.expect(204);
    let seen = world.get(&format!("{PROCESSES}/{pid}")).await.expect(200);
    assert_eq!(seen["running"], false);
    assert_eq!(seen["exit"]["signal"], 9);
    let child = std::fs::read_to_string(child).unwrap();
    until("the child is gone", || !runs(child.trim())).await;
}

/// A zombie does not run.
fn runs(pid: &str) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains("zombie"))
}

#[tokio::test]
async fn a_process_that_is_not_there_is_said_so() {
    let world = World::with_sandbox().await;
    for name in ["999999", "nope"] {
        let path = format!("{PROCESSES}/{name}");
        world.get(&path).await.expect_error(404, "process_not_found");
        world.delete(&path).await.expect_error(404, "process_not_found");
        let signal = world.post(&format!("{path}/signal"), json!({"signal": 15})).await;
        signal.expect_error(404, "process_not_found");
        world.get(&format!("{path}/output")).await.expect_error(404, "process_not_found");
    }
}

#[tokio::test]
async fn a_signal_reaches_the_process() {
    let world = World::with_sandbox().await;
    let script = "trap 'echo got; exit 5' USR1; echo ready; while :; do sleep 0.01; done";
    let made = start(&world, json!({"command": ["sh", "-c", script]})).await;
    let path = format!("{PROCESSES}/{}", made["pid"]);
    let mut output = world.open(&format!("{path}/output?follow=true")).await;
    assert_eq!(output.event().await.unwrap()["event"], "started");
    assert_eq!(output.event().await.unwrap()["text"], "ready\n");
    world.post(&format!("{path}/signal"), json!({"signal": 10})).await.expect(204);
    let rest = output.events().await;
    assert!(rest.iter().any(|event| event["text"] == "got\n"), "{rest:?}");
    assert_eq!(rest.last().unwrap()["exit_code"], 5);
    let bad = world.post(&format!("{path}/signal"), json!({"signal": 99})).await;
    assert!(bad.status.is_client_error(), "{bad:?}");
}

#[tokio::test]
async fn output_is_kept_for_who_comes_later() {
    let world = World::with_sandbox().await;
    let made = start(&world, json!({"command": ["sh", "-c", "echo one; echo two >&2"]})).await;
    let path = format!("{PROCESSES}/{}/output", made["pid"]);
    let whole = world.open(&format!("{path}?follow=true")).await.events().await;
    assert_eq!(whole.last().unwrap()["event"], "exited");
    let kept = world.open(&path).await.events().await;
    let text: String = kept.iter().filter_map(|event| event["text"].as_str()).collect();
    assert!(text.contains("one\n") && text.contains("two\n"), "{kept:?}");
}

#[tokio::test]
async fn input_can_be_written_and_closed() {
    let world = World::with_sandbox().await;
    let made = start(&world, json!({"command": ["cat"], "keep_stdin": true})).await;
    assert_eq!(made["stdin_open"], true);
    let path = format!("{PROCESSES}/{}", made["pid"]);
    world.put(&format!("{path}/stdin"), "one\n").await.expect(204);
    world.put(&format!("{path}/stdin?close=true"), "two\n").await.expect(204);
    let events = world.open(&format!("{path}/output?follow=true")).await.events().await;
    let text: String = events.iter().filter_map(|event| event["text"].as_str()).collect();
    assert_eq!(text, "one\ntwo\n");
    assert_eq!(events.last().unwrap()["exit_code"], 0);
    let late = world.put(&format!("{path}/stdin"), "three\n").await;
    assert!(late.status.is_client_error(), "{late:?}");
}

#[tokio::test]
async fn a_supervised_process_is_started_again_under_its_name() {
    let world = World::with_sandbox().await;
    let made = start(
        &world,
        json!({
            "command": ["sleep", "3600"],
            "supervise": {"name": "worker", "restart": "always", "initial_backoff_ms": 10},
        }),
    )
    .await;
    let path = format!("{PROCESSES}/worker");
    assert_eq!(world.get(&path).await.expect(200)["pid"], made["pid"]);
    world.post(&format!("{path}/signal"), json!({"signal": 9})).await.expect(204);
    let again = async {
        loop {
            let seen = world.get(&path).await.expect(200);
            if seen["running"] == true && seen["pid"] != made["pid"] {
                return seen;
            }
        }
    };
    let again = tokio::time::timeout(crate::client::PATIENCE, again).await.unwrap();
    assert_eq!(again["restarts"], 1);
    let third = world.post(&format!("{path}/restart"), json!({})).await.expect(200);
    assert_ne!(third["pid"], again["pid"]);
    world.delete(&path).await.expect(204);
}

#[tokio::test]
async fn a_process_outlives_the_client_that_started_it() {
    let world = World::with_sandbox().await;
    let made = start(&world, json!({"command": ["sleep", "3600"]})).await;
    let path = format!("{PROCESSES}/{}", made["pid"]);
    drop(world.open(&format!("{path}/output?follow=true")).await);
    world.sh("true").await;
    assert_eq!(world.get(&path).await.expect(200)["running"], true);
}

//! Long runs that a client asks about later.

use serde_json::{Value, json};
use torpor_daemon::config::Secret;
use torpor_daemon::{Config, ShutdownMode};

use crate::world::{CONTROL, World, until};

fn run(command: &str) -> Value {
    json!({"name": "run", "arguments": {"command": command, "wait": 1}})
}

/// Begins a run that becomes a task.
async fn begin(world: &World, command: &str) -> String {
    let task = world.with_tasks("tools/call", run(command)).await.result();
    assert_eq!(
        (&task["resultType"], &task["status"]),
        (&json!("task"), &json!("working")),
        "{task}"
    );
    assert!(task["ttlMs"].as_u64().unwrap() > 1000 && task["pollIntervalMs"].is_u64(), "{task}");
    task["taskId"].as_str().unwrap().to_owned()
}

async fn get(world: &World, id: &str) -> Value {
    world.with_tasks("tasks/get", json!({"taskId": id})).await.result()
}

async fn ended(world: &World, id: &str) -> Value {
    until("it ends", async || {
        let task = get(world, id).await;
        (task["status"] != "working").then_some(task)
    })
    .await
}

#[tokio::test]
async fn a_long_run_becomes_a_task_only_for_who_knows_what_that_is() {
    let world = World::with_sandbox().await;
    let go = world.path("go");
    let command =
        format!("echo out; while [ ! -e {go} ]; do sleep 0.05; done; echo err >&2; exit 4");
    let plain = world.ask(crate::world::WEB, "tools/call", run("sleep 600")).await.value();
    assert_eq!(plain["running"], true);
    let id = begin(&world, &command).await;
    assert_eq!(get(&world, &id).await["status"], "working");
    std::fs::write(&go, "").unwrap();
    let task = ended(&world, &id).await;
    assert_eq!(task["status"], "completed", "{task}");
    let value = &task["result"]["structuredContent"];
    assert_eq!((&value["exit_code"], &value["stdout"]), (&json!(4), &json!("out\n")));
    assert_eq!(value["stderr"], "err\n");
    assert!(value["duration_ms"].as_u64().unwrap() > 500);
    let short = world.with_tasks("tools/call", run("true")).await.result();
    assert_eq!(short["resultType"], "complete");
}

#[tokio::test]
async fn a_restart_of_the_daemon_and_sleep_of_the_sandbox_change_nothing() {
    let mut world = World::with_sandbox().await;
    let go = world.path("go");
    let id = begin(&world, &format!("echo out; while [ ! -e {go} ]; do sleep 0.05; done")).await;
    world.restart(ShutdownMode::Running).await;
    assert_eq!(get(&world, &id).await["status"], "working");
    std::fs::write(&go, "").unwrap();
    let task = ended(&world, &id).await;
    assert_eq!(task["result"]["structuredContent"]["stdout"], "out\n", "{task}");
    world.tool(CONTROL, "sandbox_remove", json!({"sandbox": "web"})).await.value();
    world.tool(CONTROL, "sandbox_create", json!({"name": "web"})).await.value();
    let other = world.with_tasks("tasks/get", json!({"taskId": id})).await;
    assert_eq!(other.messages[0]["error"]["code"], -32602, "it is no task of the new sandbox");
}

#[tokio::test]
async fn a_task_is_cancelled_with_its_process_and_stays_so() {
    let world = World::with_sandbox().await;
    let id = begin(&world, "sleep 600").await;
    let listed = world.web("process_list", json!({})).await.value();
    assert_eq!(listed["processes"][0]["running"], true);
    let done = world.with_tasks("tasks/cancel", json!({"taskId": id})).await.result();
    assert_eq!(done["resultType"], "complete");
    assert_eq!(get(&world, &id).await["status"], "cancelled");
    let listed = world.web("process_list", json!({})).await.value();
    assert_eq!(
        (&listed["processes"][0]["running"], &listed["processes"][0]["signal"]),
        (&json!(false), &json!(9))
    );
    world.with_tasks("tasks/cancel", json!({"taskId": id})).await.result();
    let update = json!({"taskId": id, "inputResponses": {}});
    world.with_tasks("tasks/update", update).await.result();
}

#[tokio::test]
async fn a_task_that_ended_before_it_was_cancelled_keeps_its_result_within_bounds() {
    let world = World::with_sandbox().await;
    let command = "head -c 300000 /dev/zero | tr '\\0' x; sleep 1.5; echo end >&2; exit 6";
    let mut run = run(command);
    run["arguments"]["max_bytes"] = json!(524_288);
    let task = world.with_tasks("tools/call", run).await.result();
    let id = task["taskId"].as_str().unwrap();
    until("it ends", async || {
        let listed = world.web("process_list", json!({})).await.value();
        (listed["processes"][0]["running"] == false).then_some(())
    })
    .await;
    world.with_tasks("tasks/cancel", json!({"taskId": id})).await.result();
    let task = get(&world, id).await;
    assert_eq!(task["status"], "completed", "{task}");
    let value = &task["result"]["structuredContent"];
    assert_eq!((&value["exit_code"], &value["stderr"]), (&json!(6), &json!("end\n")));
    assert_eq!((&value["stdout_bytes"], &value["truncated"]), (&json!(300_000), &json!(true)));
    assert!(value["stdout"].as_str().unwrap().len() < 66_000);
}

#[tokio::test]
async fn a_task_whose_machine_was_lost_failed_and_says_why() {
    let world = World::with_sandbox().await;
    let id = begin(&world, "sleep 600").await;
    let sandbox = world.web("status", json!({})).await.value();
    let sandbox = sandbox["sandbox"]["id"].as_str().unwrap().parse().unwrap();
    world.host.crash(&sandbox, "power failed");
    let task = ended(&world, &id).await;
    assert_eq!(task["status"], "failed", "{task}");
    assert!(task["error"]["message"].as_str().unwrap().len() > 20, "{task}");
    assert_eq!(get(&world, &id).await, task, "it stays so");
}

#[tokio::test]
async fn only_the_key_that_asked_for_it_sees_a_task() {
    let config = Config { api_key: Some(Secret("tpk_one".to_owned())), ..Config::default() };
    let mut world = World::with(config).await;
    world.key = Some("tpk_one".to_owned());
    world.tool(CONTROL, "sandbox_create", json!({"name": "web"})).await.value();
    let id = begin(&world, "sleep 600").await;
    let key = http::Request::post("/v1/keys").header("content-type", "application/json");
    let body = json!({"label": "other"}).to_string();
    let other = world.send(key.body(body.into()).unwrap()).await.messages[0]["secret"].clone();
    world.key = Some(other.as_str().unwrap().to_owned());
    for method in ["tasks/get", "tasks/cancel"] {
        let refused = world.with_tasks(method, json!({"taskId": id})).await;
        assert_eq!(refused.messages[0]["error"]["code"], -32602, "{refused:?}");
    }
    world.key = Some("tpk_one".to_owned());
    assert_eq!(get(&world, &id).await["status"], "working");
    world.with_tasks("tasks/cancel", json!({"taskId": id})).await.result();
    let undeclared = world.ask(crate::world::WEB, "tasks/get", json!({"taskId": id})).await;
    assert_eq!(undeclared.refusal(), (400, -32021));
}

//! Jobs: a restart of the daemon loses none of them, and what is lost otherwise is done again.

use std::time::Duration;

use http::{HeaderValue, Method};
use serde_json::{Value, json};
use tokio::time::Instant;
use torpor_daemon::ShutdownMode;

use crate::client::{self, Answer};
use crate::jobs::{limited, lines, over, run, so, spec, swept, task, tasks, with};
use crate::world::{World, until};

async fn begin_with_key(world: &World, key: &str, body: &Value) -> Answer {
    let mut request = client::with_json(Method::POST, "/v1/executions", body);
    request.headers_mut().insert("idempotency-key", HeaderValue::from_str(key).unwrap());
    client::send(world.address, request).await
}

#[tokio::test]
async fn an_execution_is_begun_once_under_one_key_also_by_the_next_daemon() {
    let mut world = World::new().await;
    let request = json!({"spec": spec(&world, "true"), "count": 2});
    let first = begin_with_key(&world, "k", &request).await.expect(201);
    assert_eq!(begin_with_key(&world, "k", &request).await.expect(201), first);
    world.restart(ShutdownMode::Running).await;
    assert_eq!(begin_with_key(&world, "k", &request).await.expect(201)["id"], first["id"]);
    let other = json!({"spec": spec(&world, "true"), "count": 3});
    begin_with_key(&world, "k", &other).await.expect_error(422, "idempotency_key_reused");
    let list = world.get("/v1/executions").await.expect(200);
    assert_eq!(list["executions"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_restart_costs_no_attempt_and_nothing_is_done_twice() {
    let mut world = World::with(limited(2)).await;
    let (began, gate) = (world.path("began"), world.path("gate"));
    let script = format!(
        "echo x >>{began}; until [ -e {gate} ]; do sleep 0.02; done; echo \"[$TORPOR_TASK_INDEX]\""
    );
    let id = run(&world, spec(&world, &script), 4).await;
    until("two run", || lines(&began) == 2).await;
    // They are told to the ledger, so that they are known.
    let known = |tasks: Vec<Value>| tasks.iter().filter(|one| one["sandbox"].is_string()).count();
    so("both are noted", async || known(tasks(&world, &id).await) == 2).await;
    world.restart(ShutdownMode::Running).await;
    std::fs::write(&gate, "").unwrap();
    assert_eq!(over(&world, &id).await["counts"]["succeeded"], 4);
    for (index, task) in tasks(&world, &id).await.iter().enumerate() {
        assert_eq!((&task["attempt"], &task["interruptions"]), (&json!(1), &json!(0)), "{task}");
        assert_eq!(task["output"], json!([index]), "{task}");
    }
    assert_eq!(lines(&began), 4);
    swept(&world).await;
}

#[tokio::test]
async fn what_ended_while_there_was_no_daemon_was_not_late() {
    let mut world = World::new().await;
    let (gate, done) = (world.path("gate"), world.path("done"));
    let script = format!("until [ -e {gate} ]; do sleep 0.02; done; echo '[1]'; echo x >{done}");
    let id = run(&world, with(spec(&world, &script), json!({"timeout_ms": 5000})), 1).await;
    so("it runs", async || task(&world, &id, 0).await["sandbox"].is_string()).await;
    let noted = Instant::now();
    world.stop(ShutdownMode::Running).await.unwrap();
    std::fs::write(&gate, "").unwrap();
    until("it ended", || lines(&done) == 1).await;
    until("its time is up", || noted.elapsed() > Duration::from_secs(5)).await;
    world.begin_again().await;
    assert_eq!(over(&world, &id).await["state"], "succeeded");
    let done = task(&world, &id, 0).await;
    assert_eq!((&done["output"], &done["attempt"]), (&json!([1]), &json!(1)), "{done}");
    swept(&world).await;
}

#[tokio::test]
async fn a_task_whose_sandbox_is_lost_is_run_again_and_says_so() {
    let world = World::new().await;
    let (began, gate) = (world.path("began"), world.path("gate"));
    let script = format!("echo x >>{began}; until [ -e {gate} ]; do sleep 0.02; done");
    let id = run(&world, spec(&world, &script), 1).await;
    until("it runs", || lines(&began) == 1).await;
    let list = world.get("/v1/sandboxes").await.expect(200);
    let sandbox = list["sandboxes"][0]["id"].as_str().unwrap();
    world.delete(&format!("/v1/sandboxes/{sandbox}")).await.expect(204);
    until("it runs again", || lines(&began) == 2).await;
    std::fs::write(&gate, "").unwrap();
    assert_eq!(over(&world, &id).await["state"], "succeeded");
    let done = task(&world, &id, 0).await;
    assert_eq!((&done["attempt"], &done["failures"]), (&json!(2), &json!(0)));
    assert_eq!(
        (&done["interruptions"], &done["interrupted_by"]),
        (&json!(1), &json!("sandbox_lost"))
    );
    swept(&world).await;
}

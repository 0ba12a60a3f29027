//! Jobs: tasks in sandboxes of their own, and what becomes of them.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use tokio::time::Instant;
use torpor_daemon::Config;
use torpor_daemon::config::Limits;

use crate::client::{self, PATIENCE};
use crate::world::{World, until};

/// A shell command as a specification, whose files of tasks are in the test's directory.
pub(crate) fn spec(world: &World, script: &str) -> Value {
    json!({
        "sandbox": {"image": "torpor/base"},
        "command": ["sh", "-c", script],
        "input_file": world.path("input-$"),
        "results": world.path("results"),
    })
}

pub(crate) fn with(mut spec: Value, more: Value) -> Value {
    for (key, value) in more.as_object().unwrap() {
        spec[key] = value.clone();
    }
    spec
}

pub(crate) async fn begin(world: &World, request: Value) -> String {
    let begun = world.post("/v1/executions", request).await.expect(201);
    begun["id"].as_str().unwrap().to_owned()
}

/// Runs a specification without a name.
pub(crate) async fn run(world: &World, spec: Value, count: usize) -> String {
    begin(world, json!({"spec": spec, "count": count})).await
}

pub(crate) async fn over(world: &World, id: &str) -> Value {
    let mut watch = world.open(&format!("/v1/executions/{id}/watch")).await;
    while let Some(event) = watch.event().await {
        if event["event"] == "ended" {
            assert!(watch.event().await.is_none(), "it is the last");
            return event["execution"].clone();
        }
    }
    panic!("the watch ended before {id} did");
}

pub(crate) async fn tasks(world: &World, id: &str) -> Vec<Value> {
    let list = world.get(&format!("/v1/executions/{id}/tasks")).await.expect(200);
    list["tasks"].as_array().unwrap().clone()
}

pub(crate) async fn task(world: &World, id: &str, index: usize) -> Value {
    world.get(&format!("/v1/executions/{id}/tasks/{index}")).await.expect(200)
}

async fn sandboxes(world: &World) -> usize {
    world.get("/v1/sandboxes").await.expect(200)["sandboxes"].as_array().unwrap().len()
}

/// Waits for an answer with a deadline.
pub(crate) async fn so(what: &str, holds: impl AsyncFn() -> bool) {
    let poll = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, poll).await.expect(what);
}

/// Waits until no sandbox is left.
pub(crate) async fn swept(world: &World) {
    so("every sandbox of a task is removed", async || sandboxes(world).await == 0).await;
}

pub(crate) fn limited(tasks: usize) -> Config {
    let limits = Limits { tasks, ..Config::default().limits };
    Config { limits, ..Config::default() }
}

pub(crate) fn lines(path: &str) -> usize {
    std::fs::read_to_string(path).unwrap_or_default().lines().count()
}

#[tokio::test]
async fn each_task_gets_its_input_and_leaves_its_output_log_and_files() {
    let world = World::new().await;
    let script = "mkdir -p $DIR/$TORPOR_TASK_INDEX; cat $TORPOR_TASK_INPUT_FILE >/dev/null; echo working; \
                  echo trouble >&2; echo \"$TORPOR_TASK_INPUT\" >$TORPOR_TASK_RESULTS/file; \
                  echo \"{\\\"got\\\": $TORPOR_TASK_INPUT, \\\"of\\\": $TORPOR_TASK_COUNT, \
                  \\\"job\\\": \\\"$TORPOR_JOB\\\"}\"";
    // Inside is the host of the test: one after the other, so that their files do not mix.
    let spec =
        with(spec(&world, script), json!({"parallel": 1, "env": {"DIR": world.path("seen")}}));
    world.post("/v1/jobs", json!({"name": "count", "spec": spec})).await.expect(201);
    let id = begin(&world, json!({"job": "count", "tasks": [{"n": 1}, "two", null]})).await;
    let execution = over(&world, &id).await;
    assert_eq!((&execution["state"], &execution["job"]), (&json!("succeeded"), &json!("count")));
    assert_eq!(execution["counts"]["succeeded"], 3);
    let outputs: Vec<_> =
        tasks(&world, &id).await.iter().map(|task| task["output"].clone()).collect();
    assert_eq!(outputs[0], json!({"got": {"n": 1}, "of": 3, "job": "count"}));
    assert_eq!((&outputs[1]["got"], &outputs[2]["got"]), (&json!("two"), &json!(null)));
    let first = task(&world, &id, 0).await;
    assert_eq!((&first["input"], &first["attempt"]), (&json!({"n": 1}), &json!(1)));
    assert_eq!(first["exit"]["exit_code"], 0);
    swept(&world).await;
    let log = world.get(&format!("/v1/executions/{id}/tasks/0/log")).await.expect(200);
    let said: BTreeSet<_> = log["lines"]
        .as_array()
        .unwrap()
        .iter()
        .map(|line| line["text"].as_str().unwrap())
        .collect();
    assert!(said.contains("working") && said.contains("trouble"), "{log}");
    let files = world.get(&format!("/v1/executions/{id}/tasks/1/files")).await;
    assert_eq!(files.header("content-type"), "application/x-tar");
    assert_eq!(
        files.body.len() as u64,
        task(&world, &id, 1).await["results_bytes"].as_u64().unwrap()
    );
    let mut archive = tar::Archive::new(&files.body[..]);
    let names: Vec<_> = archive
        .entries()
        .unwrap()
        .map(|entry| entry.unwrap().path().unwrap().into_owned())
        .collect();
    assert!(names.contains(&Path::new("results/file").to_owned()), "{names:?}");
    let text = world.get("/metrics").await.text();
    assert!(text.contains("torpor_task_attempts_total{outcome=\"succeeded\"} 3"), "{text}");
}

#[tokio::test]
async fn a_task_that_fails_is_tried_again_unless_its_code_is_the_last_word() {
    let world = World::new().await;
    let tries = world.path("tries");
    let script = format!("echo x >>{tries}; [ $(wc -l <{tries}) -ge 3 ]");
    let backoff = json!({"retries": 5, "backoff": {"initial_ms": 1, "max_ms": 5}});
    let id = run(&world, with(spec(&world, &script), backoff.clone()), 1).await;
    assert_eq!(over(&world, &id).await["state"], "succeeded");
    let done = task(&world, &id, 0).await;
    assert_eq!((&done["attempt"], &done["failures"]), (&json!(3), &json!(2)));
    assert_eq!((lines(&tries), done.get("reason")), (3, None));

    let last_word = with(with(spec(&world, "exit 7"), backoff), json!({"final_exit_codes": [7]}));
    let id = run(&world, last_word, 1).await;
    let execution = over(&world, &id).await;
    assert_eq!(
        (&execution["state"], &execution["counts"]["failed"]),
        (&json!("failed"), &json!(1))
    );
    let done = task(&world, &id, 0).await;
    assert_eq!((&done["attempt"], &done["exit"]["exit_code"]), (&json!(1), &json!(7)));
    assert_eq!((&done["reason"], &done["message"]), (&json!("exit"), &json!("it exited with 7")));

    let id = run(
        &world,
        with(spec(&world, "x"), json!({"command": ["/no/such/program"], "retries": 0})),
        1,
    )
    .await;
    over(&world, &id).await;
    let done = task(&world, &id, 0).await;
    assert_eq!(done["reason"], "cannot_start", "{done}");
    swept(&world).await;
}

#[tokio::test]
async fn a_task_whose_input_can_not_be_written_failed_and_was_not_lost() {
    let world = World::new().await;
    std::fs::write(world.path("file"), "").unwrap();
    let spec = with(spec(&world, "true"), json!({"input_file": world.path("file/input")}));
    let id = begin(&world, json!({"spec": spec, "tasks": [1]})).await;
    assert_eq!(over(&world, &id).await["state"], "failed");
    let done = task(&world, &id, 0).await;
    assert_eq!((&done["reason"], &done["interruptions"]), (&json!("cannot_start"), &json!(0)));
    assert!(done["message"].as_str().unwrap().starts_with("its input can't be written"), "{done}");
    swept(&world).await;
}

#[tokio::test]
async fn an_attempt_that_takes_too_long_is_ended() {
    let world = World::new().await;
    let spec = with(spec(&world, "exec sleep 1000"), json!({"timeout_ms": 50}));
    let id = run(&world, spec, 1).await;
    assert_eq!(over(&world, &id).await["state"], "failed");
    assert_eq!(task(&world, &id, 0).await["reason"], "timed_out");
    swept(&world).await;
}

#[tokio::test]
async fn no_more_tasks_run_at_any_instant_than_may() {
    for (config, parallel) in [(limited(2), json!(null)), (limited(9), json!(2))] {
        let world = World::with(config).await;
        let (now, most) = (world.path("now"), world.path("most"));
        std::fs::create_dir(&now).unwrap();
        // Each is there while it runs, and notes how many it sees.
        let script = format!(
            "mkdir {now}/$TORPOR_TASK_INDEX; ls {now} | wc -l >>{most}; sleep 0.05; rmdir {now}/$TORPOR_TASK_INDEX"
        );
        let id = run(&world, with(spec(&world, &script), json!({"parallel": parallel})), 8).await;
        assert_eq!(over(&world, &id).await["counts"]["succeeded"], 8);
        let seen = std::fs::read_to_string(&most).unwrap();
        let seen: Vec<u32> = seen.lines().map(|line| line.trim().parse().unwrap()).collect();
        assert!(seen.len() == 8 && seen.iter().all(|count| *count <= 2), "{seen:?}");
        assert!(seen.contains(&2), "they do run together: {seen:?}");
    }
}

#[tokio::test]
async fn what_is_cancelled_or_late_ends_and_nothing_of_it_begins_any_more() {
    let world = World::with(limited(2)).await;
    let began = world.path("began");
    let script = format!("echo x >>{began}; exec sleep 1000");
    let id = run(&world, spec(&world, &script), 5).await;
    until("two run", || lines(&began) == 2).await;
    let path = format!("/v1/executions/{id}");
    world.delete(&path).await.expect_error(409, "in_use");
    let told = world.tell(&format!("{path}/cancel")).await.expect(200);
    assert_eq!((&told["reason"], &told["counts"]["queued"]), (&json!("requested"), &json!(0)));
    let execution = over(&world, &id).await;
    assert_eq!(
        (&execution["state"], &execution["counts"]["cancelled"]),
        (&json!("cancelled"), &json!(5))
    );
    assert_eq!(world.tell(&format!("{path}/cancel")).await.expect(200), execution);
    swept(&world).await;

    let late = json!({"spec": spec(&world, &script), "count": 3, "timeout_ms": 300});
    let id = begin(&world, late).await;
    let execution = over(&world, &id).await;
    assert_eq!(
        (&execution["state"], &execution["reason"]),
        (&json!("cancelled"), &json!("timed_out"))
    );
    world.delete(&format!("/v1/executions/{id}")).await.expect(204);
    world.get(&format!("/v1/executions/{id}")).await.expect_error(404, "not_found");
    swept(&world).await;
}

#[tokio::test]
async fn what_is_tried_again_can_be_cancelled_too() {
    let world = World::with(limited(12)).await;
    let began = world.path("began");
    let script =
        format!("[ $TORPOR_TASK_ATTEMPT -gt 3 ] || exit 1; echo x >>{began}; exec sleep 1000");
    let again = json!({"retries": 3, "backoff": {"initial_ms": 0, "max_ms": 0}});
    let id = run(&world, with(spec(&world, &script), again), 12).await;
    until("all are at their last attempt", || lines(&began) == 12).await;
    world.tell(&format!("/v1/executions/{id}/cancel")).await.expect(200);
    let ended = tokio::time::timeout(PATIENCE, over(&world, &id)).await.expect("all are stopped");
    assert_eq!(ended["counts"]["cancelled"], 12, "{ended}");
    swept(&world).await;
}

#[tokio::test]
async fn who_finds_the_host_full_waits_or_is_refused_as_they_said() {
    let world = World::with(limited(1)).await;
    let gate = world.path("gate");
    let script = format!("until [ -e {gate} ]; do sleep 0.02; done");
    let first = run(&world, spec(&world, &script), 1).await;
    let refuse = json!({"spec": spec(&world, "true"), "count": 1, "if_full": "refuse"});
    let refused = world.post("/v1/executions", refuse.clone()).await;
    refused.expect_error(503, "capacity_reached");
    let waits = run(&world, spec(&world, "true"), 3).await;
    assert_eq!(
        world.get(&format!("/v1/executions/{waits}")).await.expect(200)["counts"]["queued"],
        3
    );
    std::fs::write(&gate, "").unwrap();
    over(&world, &first).await;
    assert_eq!(over(&world, &waits).await["counts"]["succeeded"], 3);
    world.post("/v1/executions", refuse).await.expect(201);
}

#[tokio::test]
async fn a_task_that_finds_no_room_waits_for_it_and_loses_no_attempt() {
    let limits = Limits { sandboxes: 1, tasks: 4, ..Config::default().limits };
    let world = World::with(Config { limits, ..Config::default() }).await;
    let busy = json!({"name": "busy", "standby": {"idle_after_ms": null}});
    world.create(busy).await.expect(201);
    let id = run(&world, spec(&world, "true"), 1).await;
    let path = format!("/v1/executions/{id}/tasks/0");
    let waits = async || world.get(&path).await.expect(200);
    so("it says why it waits", async || waits().await["message"].is_string()).await;
    let waits = waits().await;
    assert_eq!((&waits["state"], &waits["attempt"]), (&json!("queued"), &json!(0)));
    assert!(waits["message"].as_str().unwrap().contains("this host has its 1"), "{waits}");
    world.delete("/v1/sandboxes/busy").await.expect(204);
    assert_eq!(over(&world, &id).await["state"], "succeeded");
    let done = task(&world, &id, 0).await;
    assert_eq!((&done["attempt"], &done["failures"]), (&json!(1), &json!(0)));
}

/// How many attempts found no room.
async fn without_room(world: &World) -> usize {
    let text = world.get("/metrics").await.text();
    let mut lines = text.lines();
    let count = lines
        .find_map(|line| line.strip_prefix("torpor_task_attempts_total{outcome=\"no_room\"} "));
    count.map_or(0, |count| count.parse().unwrap())
}

#[tokio::test]
async fn a_long_queue_does_not_ask_a_full_host_over_and_over() {
    let limits = Limits { sandboxes: 1, tasks: 2, ..Config::default().limits };
    let world = World::with(Config { limits, ..Config::default() }).await;
    let busy = json!({"name": "busy", "standby": {"idle_after_ms": null}});
    world.create(busy).await.expect(201);
    let begun = Instant::now();
    let id = run(&world, spec(&world, "true"), 500).await;
    so("it is asked for room", async || without_room(&world).await >= 5).await;
    // Two at once, and a second between them and the next.
    assert!(begun.elapsed() >= Duration::from_secs(2), "after {:?}", begun.elapsed());
    world.delete("/v1/sandboxes/busy").await.expect(204);
    until_one_succeeded(&world, &id).await;
}

async fn until_one_succeeded(world: &World, id: &str) {
    let path = format!("/v1/executions/{id}");
    let done = async || world.get(&path).await.expect(200)["counts"]["succeeded"] != 0;
    so("room that comes is used", done).await;
}

#[tokio::test]
async fn a_thousand_tasks_wait_their_turn_and_are_listed_by_pages() {
    let world = World::with(limited(1)).await;
    let gate = world.path("gate");
    let script = format!("until [ -e {gate} ]; do sleep 0.02; done");
    let inputs: Vec<_> = (0..1000).map(|n| json!({"n": n})).collect();
    let id = begin(&world, json!({"spec": spec(&world, &script), "tasks": inputs})).await;
    let list =
        world.get(&format!("/v1/executions/{id}/tasks?state=queued&limit=600")).await.expect(200);
    assert_eq!(list["tasks"].as_array().unwrap().len(), 600);
    let cursor = list["next_cursor"].as_str().unwrap();
    let rest = world
        .get(&format!("/v1/executions/{id}/tasks?state=queued&cursor={cursor}"))
        .await
        .expect(200);
    assert!((399..=400).contains(&rest["tasks"].as_array().unwrap().len()));
    assert_eq!(task(&world, &id, 999).await["input"], json!({"n": 999}));
    let told = world.tell(&format!("/v1/executions/{id}/cancel")).await.expect(200);
    assert_eq!(told["counts"]["queued"], 0);
    let mut watch = world.open(&format!("/v1/executions/{id}/watch")).await;
    let mut seen = BTreeSet::new();
    while let Some(event) = watch.event().await {
        seen.extend((event["event"] == "task").then(|| event["task"]["index"].as_u64().unwrap()));
    }
    assert_eq!(seen.len(), 1000, "each is told when it is over");
}

#[tokio::test]
async fn a_wrong_job_or_execution_is_refused_at_once() {
    let world = World::scripted().await;
    let good = json!({"sandbox": {"image": "torpor/base"}, "command": ["true"]});
    for (spec, status, code) in [
        (json!({"command": ["true"]}), 400, "invalid_request"),
        (with(good.clone(), json!({"command": []})), 400, "invalid_request"),
        (with(good.clone(), json!({"retries": 1000})), 400, "invalid_request"),
        (with(good.clone(), json!({"what": 1})), 400, "invalid_request"),
        (with(good.clone(), json!({"sandbox": {"pool": "none"}})), 404, "not_found"),
        (with(good.clone(), json!({"sandbox": {"snapshot": "none"}})), 404, "snapshot_not_found"),
        (with(good.clone(), json!({"sandbox": {"image": "a", "cpus": 0}})), 400, "invalid_request"),
    ] {
        let answer = world.post("/v1/jobs", json!({"name": "j", "spec": spec})).await;
        assert_eq!(answer.status, status, "{spec}: {}", answer.text());
        answer.expect_error(status, code);
    }
    world.post("/v1/jobs", json!({"name": "j", "spec": good})).await.expect(201);
    world
        .post("/v1/jobs", json!({"name": "j", "spec": good}))
        .await
        .expect_error(409, "already_exists");
    for body in [
        json!({"job": "j"}),
        json!({"job": "j", "count": 0}),
        json!({"job": "j", "count": 10_001}),
        json!({"job": "j", "count": 1, "tasks": [1]}),
        json!({"job": "j", "spec": good, "count": 1}),
        json!({"count": 1}),
        json!({"job": "j", "count": 1, "timeout_ms": 0}),
    ] {
        let answer = world.post("/v1/executions", body.clone()).await;
        assert_eq!(answer.status, 400, "{body}: {}", answer.text());
    }
    world
        .post("/v1/executions", json!({"job": "k", "count": 1}))
        .await
        .expect_error(404, "not_found");
    let changed = with(good, json!({"retries": 3}));
    world.put("/v1/jobs/j", "").await.expect_error(400, "invalid_request");
    let put = client::with_json(Method::PUT, "/v1/jobs/j", &changed);
    let job = client::send(world.address, put).await.expect(200);
    assert_eq!((&job["spec"]["retries"], &job["name"]), (&json!(3), &json!("j")));
    assert_eq!(world.get("/v1/jobs").await.expect(200)["jobs"].as_array().unwrap().len(), 1);
    world.delete("/v1/jobs/j").await.expect(204);
    world.get("/v1/jobs/j").await.expect_error(404, "not_found");
}

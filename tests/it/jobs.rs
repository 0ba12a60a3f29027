//! Jobs on the real engine: set-up that is paid once, results that stay, and a daemon that is killed at every step.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use torpor_e2e::{PATIENCE, World, raw, wait_for};
use torpor_lifecycle::fault::TASK_POINTS;

/// A sandbox with something in its memory and a file, as the snapshot `ready`.
fn prepare(world: &World) {
    world.create_with("setup", &["--memory", "256m", "--idle-after", "never"]);
    world.sh("setup", "echo prepared >/srv/ready").ok();
    world.start_process(
        "setup",
        &["sh", "-c", "while :; do echo alive >/tmp/beat; sleep 0.1; done"],
    );
    world.torpor(&["snapshot", "setup", "--name", "ready"]).ok();
    world.torpor(&["rm", "setup"]).ok();
}

fn over(world: &World, id: &str) -> Value {
    wait_for("the execution to be over", || {
        let execution = world.get(&format!("/v1/executions/{id}")).json();
        let state = execution["state"].as_str().unwrap().to_owned();
        (state != "running" && state != "cancelling").then_some(execution)
    })
}

fn tasks(world: &World, id: &str) -> Vec<Value> {
    let list = world.get(&format!("/v1/executions/{id}/tasks")).json();
    list["tasks"].as_array().unwrap().clone()
}

/// Waits until no sandbox is left.
fn swept(world: &World) {
    wait_for("every sandbox of a task to be gone", || {
        let list = world.get("/v1/sandboxes").json();
        list["sandboxes"].as_array().unwrap().is_empty().then_some(())
    });
}

#[test]
fn tasks_begin_from_an_image_a_pool_or_a_memory_snapshot_and_their_results_stay() {
    let mut world = World::start();
    prepare(&world);
    world.torpor(&["pool", "create", "warm", "--size", "2", "--memory", "256m"]).ok();
    let script = "cat $TORPOR_TASK_INPUT_FILE >/results/input; mkdir /results/more; \
                  ln -s /etc/passwd /results/link; mkfifo /results/pipe; \
                  echo \"{\\\"index\\\": $TORPOR_TASK_INDEX, \\\"ready\\\": \\\"$(cat /srv/ready 2>/dev/null)\\\", \
                  \\\"beat\\\": \\\"$(rm -f /tmp/beat; sleep 0.5; cat /tmp/beat 2>/dev/null)\\\"}\"";
    std::fs::write(world.path("tasks.json"), "[{\"n\": 1}, {\"n\": 2}]").unwrap();
    let file = world.path("tasks.json").display().to_string();
    for (name, source) in [
        ("image", ["--image", "torpor/base"]),
        ("pool", ["--pool", "warm"]),
        ("memory", ["--snapshot", "ready"]),
    ] {
        let mut create = vec!["job", "create", name];
        create.extend(source);
        create.extend((name == "image").then_some(["--memory", "256m"]).into_iter().flatten());
        create.extend(["--", "sh", "-c", script]);
        world.torpor(&create).ok();
        let done = world.torpor(&["job", "run", name, "--tasks", &file, "--wait", "--json"]).ok();
        let execution: Value = serde_json::from_str(&done).unwrap();
        let id = execution["id"].as_str().unwrap();
        swept(&world);
        for (index, task) in tasks(&world, id).iter().enumerate() {
            assert_eq!(task["output"]["index"], index, "{task}");
            let set_up = if name == "memory" { ("prepared", "alive") } else { ("", "") };
            let seen = (&task["output"]["ready"], &task["output"]["beat"]);
            assert_eq!(seen, (&json!(set_up.0), &json!(set_up.1)), "files and processes: {task}");
            let to = world.path(&format!("{name}-{index}"));
            world.torpor(&["job", "results", id, &index.to_string(), to.to_str().unwrap()]).ok();
            let input = std::fs::read_to_string(to.join("input")).unwrap();
            assert_eq!(serde_json::from_str::<Value>(&input).unwrap(), json!({"n": index + 1}));
        }
        assert!(world.torpor(&["job", "logs", id, "0"]).ok().contains("\"index\""));
    }
    world.torpor(&["pool", "rm", "warm"]).ok();
    world.leaves_nothing();
}

const TASKS: usize = 50;

/// The execution that all of this is about, under one key.
fn fifty() -> (&'static str, String) {
    let script = "echo $TORPOR_TASK_INDEX >/results/index; echo \"[$TORPOR_TASK_INDEX]\"";
    let body = json!({
        "count": TASKS, "parallel": 4,
        "spec": {"sandbox": {"snapshot": "ready"}, "command": ["sh", "-c", script]},
    });
    ("content-type: application/json\r\nidempotency-key: fifty\r\n", body.to_string())
}

#[test]
fn fifty_tasks_are_each_done_with_the_daemon_killed_at_every_step_of_them() {
    let mut world = World::start();
    prepare(&world);
    let (recorded, steps) = TASK_POINTS.split_first().unwrap();
    world.kill_daemon();
    world.start_daemon_that_dies_at(recorded);
    let (head, body) = fifty();
    let length = body.len();
    let request = format!(
        "POST /v1/executions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n{head}\r\n{body}"
    );
    // Nobody hears that it was begun: asked again, it is the same one.
    assert_eq!(raw(world.address(), request.as_bytes(), PATIENCE), b"", "a dead daemon answered");
    world.daemon_dies();
    for place in steps {
        world.start_daemon_that_dies_at(place);
        world.daemon_dies();
    }
    world.start_daemon();
    let begun = world.request("POST", "/v1/executions", head, body.as_bytes()).json();
    let id = begun["id"].as_str().unwrap().to_owned();
    let list = world.get("/v1/executions").json();
    assert_eq!(list["executions"].as_array().unwrap().len(), 1, "it was begun once");
    let execution = over(&world, &id);
    assert_eq!(execution["state"], "succeeded", "{execution}");
    let mut seen = BTreeSet::new();
    for task in tasks(&world, &id) {
        let index = task["index"].as_u64().unwrap();
        assert_eq!((&task["output"], &task["failures"]), (&json!([index]), &json!(0)), "{task}");
        let files = world.get(&format!("/v1/executions/{id}/tasks/{index}/files"));
        assert_eq!(files.body.len() as u64, task["results_bytes"].as_u64().unwrap(), "{task}");
        seen.insert(index);
    }
    assert_eq!(seen.len(), TASKS);
    swept(&world);
    world.leaves_nothing();
}

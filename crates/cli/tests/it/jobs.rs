//! job create, update, ls, show, run, watch, tasks, logs, results, cancel, rm: against a daemon.

use serde_json::{Value, json};

use crate::world::World;

/// A job called `check` whose results are in the test's directory.
fn world() -> World {
    let world = World::new();
    let results = world.inside.join("results").display().to_string();
    let script = "echo \"task $TORPOR_TASK_INDEX\"; echo $TORPOR_TASK_INDEX >$TORPOR_TASK_RESULTS/index; \
                  [ $TORPOR_TASK_INDEX != 1 ] || exit 3; echo \"[$TORPOR_TASK_INDEX]\"";
    let args = [
        "job",
        "create",
        "check",
        "--results",
        &results,
        "--parallel",
        "1",
        "--",
        "sh",
        "-c",
        script,
    ];
    assert_eq!(world.torpor(args).ok(), "check\n");
    world
}

#[test]
fn a_job_is_made_changed_run_and_what_it_left_is_there() {
    let world = world();
    let table = world.torpor(["job", "ls"]).ok();
    assert!(
        table.starts_with(
            "NAME    FROM          RETRIES   PARALLEL   COMMAND\ncheck   torpor/base   0"
        ),
        "{table}"
    );
    assert_eq!(world.torpor(["job", "update", "check"]).code, 2);
    world.torpor(["job", "update", "check", "--retries", "1", "--backoff", "1ms"]).ok();
    assert!(world.torpor(["job", "show", "check"]).ok().contains("retries:  1\n"));
    let done = world.torpor(["job", "run", "check", "--count", "3", "--wait", "--json"]);
    assert_eq!(done.code, 1, "one failed: {done:?}");
    let ended: Value = serde_json::from_str(&done.stdout).unwrap();
    let id = ended["id"].as_str().unwrap();
    assert_eq!((&ended["counts"]["succeeded"], &ended["counts"]["failed"]), (&json!(2), &json!(1)));
    let failed = world.torpor(["job", "tasks", id, "--state", "failed"]).ok();
    let row: Vec<&str> = failed.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[..3], ["1", "failed", "2"]);
    assert!(failed.contains("it exited with 3"), "{failed}");
    assert!(world.torpor(["job", "logs", id, "2"]).ok().contains(": task 2\n"));
    let shown: Value =
        serde_json::from_str(&world.torpor(["job", "results", id, "2", "--json"]).ok()).unwrap();
    assert_eq!(shown["output"], json!([2]));
    world.torpor(["job", "results", id, "0", "out"]).ok();
    assert_eq!(std::fs::read_to_string(world.here.join("out/index")).unwrap(), "0\n");
    let watched = world.torpor(["job", "watch", id]);
    assert_eq!(watched.code, 1);
    assert!(watched.stdout.contains("0\tsucceeded\t[0]\n"), "{watched:?}");
    assert!(world.torpor(["job", "executions", "check"]).ok().contains(id));
    assert_eq!(world.torpor(["job", "executions", "--state", "running"]).ok().lines().count(), 1);
    assert_eq!(world.torpor(["job", "rm", id, "check"]).ok(), format!("{id}\ncheck\n"));
    assert_eq!(world.torpor(["job", "show", id]).code, 1);
}

#[test]
fn inputs_come_from_a_file_and_one_key_begins_it_once() {
    let world = world();
    std::fs::write(world.here.join("tasks.json"), "[0, {\"a\": 1}]").unwrap();
    let args = ["job", "run", "check", "--tasks", "tasks.json", "--key", "k"];
    let id = world.torpor(args).ok();
    assert_eq!(world.torpor(args).ok(), id);
    let shown: Value =
        serde_json::from_str(&world.torpor(["job", "results", id.trim(), "1", "--json"]).ok())
            .unwrap();
    assert_eq!(shown["input"], json!({"a": 1}));
    drop(world.torpor(["job", "watch", id.trim()]));
    std::fs::write(world.here.join("tasks.json"), "{}").unwrap();
    let (code, words) = world.torpor(args).failed();
    assert!(code == 2 && words.contains("is not a JSON list"), "{words}");
    assert_eq!(world.torpor(["job", "cancel", id.trim()]).code, 0);
    assert_eq!(world.torpor(["job", "run", "check"]).code, 2);
}

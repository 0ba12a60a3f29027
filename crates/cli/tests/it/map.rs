//! map: fork, run, collect, and leave nothing behind.

use std::process::Stdio;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use torpor_protocol::ErrorCode;

use crate::stub::{Answer, Asked, Stub, done, lines, ok, refuse, sandbox, snapshot};
use crate::torpor::{PATIENCE, until};

const ID: &str = "exec-abcdefghijklmnopqrstu";

fn execution(state: &str, count: u64) -> Value {
    json!({
        "id": ID, "spec": {}, "state": state, "created_at": 1000, "deadline_at": null, "ended_at": null,
        "counts": {"queued": 0, "running": 0, "succeeded": count, "failed": 0, "cancelled": 0},
    })
}

/// A task that ended at 2.4 s.
fn task(index: u64, more: Value) -> Value {
    let mut task = json!({
        "execution": ID, "index": index, "state": "succeeded", "attempt": 1, "failures": 0, "interruptions": 0,
        "sandbox": "abcdefghijklmnopqrst".to_owned() + &index.to_string(), "ended_at": 2400, "ran_ms": 400,
        "exit": {"exit_code": 0, "signal": null, "timed_out": false, "oom_killed": false},
    });
    task.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    task
}

fn said(stream: &str, text: &str) -> Value {
    json!({"at": "1970-01-01T00:00:01Z", "pid": 7, "started_at": 1, "command": "x", "stream": stream, "text": text})
}

/// A host with a snapshot `base`, where each task becomes what `become_of` says; None: they never end.
fn host(become_of: impl Fn(u64) -> Option<Value> + Send + Sync + 'static) -> Stub {
    let count = Arc::new(Mutex::new(0));
    Stub::new(move |asked: &Asked| match asked.what.as_str() {
        "GET /v1/snapshots/base" => Some(ok(snapshot(Some("base"), json!({})))),
        "GET /v1/sandboxes/base" => Some(refuse(404, ErrorCode::SandboxNotFound, "none")),
        "GET /v1/snapshots/web" => Some(refuse(404, ErrorCode::SnapshotNotFound, "none")),
        "GET /v1/sandboxes/web" => Some(ok(sandbox("web", json!({})))),
        "POST /v1/sandboxes/web/snapshots" => {
            Some(ok(snapshot(None, json!({"id": "snap-abcdefghijklmnopqrstu"}))))
        }
        "POST /v1/executions" => {
            *count.lock() = asked.json()["count"].as_u64().unwrap();
            Some(ok(execution("running", 0)))
        }
        what if what.contains("/watch") && become_of(0).is_none() => Some(Answer::Never),
        what if what.contains("/watch") => Some(lines([json!(
            {"event": "ended", "execution": execution("succeeded", *count.lock())}
        )])),
        what if what.ends_with("/tasks") => {
            let tasks: Vec<_> =
                (0..*count.lock()).map(|n| task(n, become_of(n).unwrap())).collect();
            Some(ok(json!({"tasks": tasks})))
        }
        what if what.ends_with("/log") => {
            let n = what.split('/').rev().nth(1).unwrap().parse::<u64>().unwrap() + 1;
            let lines = [
                said("stdout", &format!("part {n}")),
                said("stdout", "more"),
                said("stderr", "oops"),
            ];
            Some(ok(json!({"lines": lines})))
        }
        what if what.ends_with("/cancel") => Some(ok(execution("cancelled", 0))),
        what if what.starts_with("DELETE ") => Some(done()),
        _ => None,
    })
}

fn deletions(stub: &Stub) -> Vec<String> {
    stub.asked().into_iter().filter(|what| what.starts_with("DELETE ")).collect()
}

#[test]
fn every_fork_runs_its_part_and_is_removed() {
    let stub = host(|_| Some(json!({})));
    let args = [
        "map",
        "base",
        "--count",
        "2",
        "-e",
        "SEED=s{n}",
        "--name",
        "f-{n}",
        "--",
        "./analyze",
        "{n}",
    ];
    let shown = stub.torpor(args).ok();
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(lines[0], "N   SANDBOX   EXIT   TIME     OUTPUT");
    assert_eq!(lines[1], "1   f-1       0      400 ms   part 1");
    assert_eq!(lines[2], "2   f-2       0      400 ms   part 2");
    assert_eq!(lines[4], "succeeded:  2 of 2");
    assert!(shown.contains("one by one: 800 ms (sum of the times)\n"), "{shown}");
    let asked = stub.body_of("POST /v1/executions");
    let spec = &asked["spec"];
    assert_eq!((&asked["count"], &spec["sandbox"]["snapshot"]), (&json!(2), &json!("base")));
    // The daemon puts the numbers in.
    assert_eq!((&spec["numbered"], &spec["command"]), (&json!(true), &json!(["./analyze", "{n}"])));
    assert_eq!((&spec["env"]["SEED"], &spec["sandbox_name"]), (&json!("s{n}"), &json!("f-{n}")));
    assert_eq!(spec["keep"], false);
    assert_eq!(deletions(&stub), [format!("DELETE /v1/executions/{ID}")]);
}

#[test]
fn a_failure_does_not_stop_the_others_and_is_not_hidden() {
    let stub = host(|n| {
        let nothing = |message: &str| json!({"state": "failed", "exit": null, "ran_ms": null, "message": message});
        Some(match n {
            1 => nothing("there is no ./analyze"),
            2 => nothing("full"),
            3 => {
                json!({"state": "failed", "exit": {"exit_code": 5, "signal": null, "timed_out": false, "oom_killed": false}})
            }
            _ => json!({}),
        })
    });
    let done = stub.torpor(["map", "base", "--count", "4", "--json", "--", "./analyze", "{n}"]);
    assert_eq!(done.code, 1, "{done:?}");
    let tally: Value = serde_json::from_str(&done.stdout).unwrap();
    let results = tally["results"].as_array().unwrap();
    assert_eq!(results[0]["stdout"], "part 1\nmore\n");
    assert_eq!(results[1]["error"], "error: there is no ./analyze");
    assert_eq!(results[2]["error"], "error: full");
    assert_eq!((&results[3]["exit_code"], &results[3]["stderr"]), (&json!(5), &json!("oops\n")));
    assert_eq!((&tally["failed"], &tally["sequential_ms"]), (&json!(3), &json!(800.0)));
    assert_eq!(deletions(&stub).len(), 1);
}

#[test]
fn forks_can_be_kept() {
    let stub = host(|_| Some(json!({})));
    stub.torpor(["map", "base", "-n", "2", "--keep", "--", "true"]).ok();
    assert_eq!(stub.body_of("POST /v1/executions")["spec"]["keep"], true);
}

#[test]
fn a_sandbox_is_forked_as_it_is_now_and_the_snapshot_for_that_is_removed() {
    let stub = host(|_| Some(json!({})));
    stub.torpor(["map", "web", "-n", "2", "--", "true"]).ok();
    let asked = stub.body_of("POST /v1/executions");
    assert_eq!(asked["spec"]["sandbox"]["snapshot"], "snap-abcdefghijklmnopqrstu");
    let removed = deletions(&stub);
    assert!(
        removed.contains(&"DELETE /v1/snapshots/snap-abcdefghijklmnopqrstu".to_owned()),
        "{removed:?}"
    );
}

#[test]
fn ctrl_c_cancels_it_and_waits_until_the_forks_are_gone() {
    let stub = host(|_| None);
    let mut command = stub.command(["map", "base", "-n", "2", "--", "sleep", "1000"]);
    let mut child = stub.runtime().block_on(async {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    until("it is watched", || {
        stub.asked().iter().any(|asked| asked.contains("/watch")).then_some(())
    });
    let pid = Pid::from_raw(child.id().unwrap() as i32).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let code = stub.runtime().block_on(async {
        let status = tokio::time::timeout(PATIENCE, child.wait()).await;
        status.expect("it ends").unwrap().code()
    });
    assert_eq!(code, Some(130));
    assert!(stub.asked().contains(&format!("POST /v1/executions/{ID}/cancel")));
    assert_eq!(deletions(&stub).len(), 1);
}

#[test]
fn a_request_that_was_refused_leaves_nothing_either() {
    let stub = Stub::new(|asked| match asked.what.as_str() {
        "GET /v1/sandboxes/web" => Some(ok(sandbox("web", json!({})))),
        "GET /v1/snapshots/web" => Some(refuse(404, ErrorCode::SnapshotNotFound, "none")),
        "POST /v1/sandboxes/web/snapshots" => Some(ok(snapshot(None, json!({})))),
        what if what.starts_with("DELETE ") => Some(done()),
        _ => Some(refuse(500, ErrorCode::Internal, "it broke in the middle")),
    });
    let (code, words) = stub.torpor(["map", "web", "-n", "2", "--", "true"]).failed();
    assert_eq!(code, 70);
    assert!(words.starts_with("error: it broke in the middle\n"), "{words}");
    assert!(deletions(&stub)[0].starts_with("DELETE /v1/snapshots/snap-"));
}

#[test]
fn the_command_comes_after_two_dashes() {
    let stub = host(|_| Some(json!({})));
    assert_eq!(stub.torpor(["map", "base", "--count", "2"]).code, 2);
    assert_eq!(stub.torpor(["map", "base", "--", "true"]).code, 2);
    stub.torpor(["map", "--snapshot", "base", "-n", "1", "--", "ls", "--count"]).ok();
    assert_eq!(stub.body_of("POST /v1/executions")["spec"]["command"], json!(["ls", "--count"]));
}

//! map: fork, run, collect, and leave nothing behind.

use std::process::Stdio;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use torpor_protocol::ErrorCode;

use crate::stub::{Answer, Asked, Stub, done, error, ok, refuse, sandbox, snapshot};
use crate::torpor::{PATIENCE, until};

/// A host with a snapshot `base`, whose third fork fails. What runs is decided by `run`, which is
/// given the command and its environment.
fn host(run: impl Fn(&Value) -> Answer + Send + Sync + 'static) -> Stub {
    host_with(|| (), run)
}

/// The same; the forks are there when `forking` is over.
fn host_with(
    forking: impl Fn() + Send + Sync + 'static,
    run: impl Fn(&Value) -> Answer + Send + Sync + 'static,
) -> Stub {
    let forks: Arc<Mutex<Vec<Value>>> = Arc::default();
    Stub::new(move |asked: &Asked| match asked.what.as_str() {
        "GET /v1/snapshots/base" => Some(ok(snapshot(Some("base"), json!({})))),
        "GET /v1/sandboxes/base" => Some(refuse(404, ErrorCode::SandboxNotFound, "none")),
        "POST /v1/snapshots/base/fork" => {
            forking();
            let request = asked.json();
            let outcomes: Vec<Value> = (1..=request["count"].as_u64().unwrap())
                .map(|n| {
                    if n == 3 {
                        return json!({"status": 503, "error": error(ErrorCode::CapacityReached, "full")});
                    }
                    let fork = sandbox(&format!("f-{n}"), json!({"labels": request["labels"]}));
                    forks.lock().push(fork.clone());
                    json!({"status": 201, "sandbox": fork})
                })
                .collect();
            Some(ok(json!({"forks": outcomes})))
        }
        what if what.starts_with("GET /v1/sandboxes?label=torpor.map") => {
            Some(ok(json!({"sandboxes": *forks.lock()})))
        }
        what if what.ends_with("/run") => Some(run(&asked.json())),
        what if what.starts_with("DELETE /v1/sandboxes/") => {
            forks.lock().retain(|fork| !what.ends_with(fork["id"].as_str().unwrap()));
            Some(done())
        }
        _ => None,
    })
}

fn result(code: i32, stdout: &str) -> Answer {
    ok(json!({
        "exit_code": code, "signal": null, "timed_out": false, "oom_killed": false,
        "stdout": stdout, "stderr": "oops\n", "truncated": false, "duration_ms": 400
    }))
}

fn deletions(stub: &Stub) -> usize {
    stub.asked().iter().filter(|what| what.starts_with("DELETE ")).count()
}

#[test]
fn every_fork_runs_its_part_and_is_removed() {
    let stub = host(|command| {
        let n = command["command"][1].as_str().unwrap();
        assert_eq!(command["env"]["SEED"], format!("s{n}"));
        result(0, &format!("part {n}\nmore\n"))
    });
    let args = ["map", "base", "--count", "2", "-e", "SEED=s{n}", "--", "./analyze", "{n}"];
    let shown = stub.torpor(args).ok();
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(lines[0], "N   SANDBOX   EXIT   TIME     OUTPUT");
    assert_eq!(lines[1], "1   f-1       0      400 ms   part 1");
    assert_eq!(lines[2], "2   f-2       0      400 ms   part 2");
    assert_eq!(lines[4], "succeeded:  2 of 2");
    assert!(shown.contains("one by one: 800 ms (sum of the times)\n"), "{shown}");
    assert_eq!(deletions(&stub), 2);
    let asked = stub.body_of("POST /v1/snapshots/base/fork");
    assert_eq!(asked["labels"]["torpor.map"].as_str().unwrap().len(), 21);
    assert_eq!(asked["lifetime"]["expire_idle_ms"], 3_600_000);
}

#[test]
fn a_failure_does_not_stop_the_others_and_is_not_hidden() {
    let stub = host(|command| match command["command"][1].as_str().unwrap() {
        "2" => refuse(422, ErrorCode::CommandFailed, "there is no ./analyze"),
        "4" => result(5, ""),
        n => result(0, n),
    });
    let done = stub.torpor(["map", "base", "--count", "4", "--json", "--", "./analyze", "{n}"]);
    assert_eq!(done.code, 1, "{done:?}");
    let tally: Value = serde_json::from_str(&done.stdout).unwrap();
    let results = tally["results"].as_array().unwrap();
    assert_eq!(results[0]["stdout"], "1");
    assert_eq!(results[1]["error"], "error: there is no ./analyze");
    assert_eq!(results[2]["error"], "error: full");
    assert_eq!((&results[3]["exit_code"], &results[3]["stderr"]), (&json!(5), &json!("oops\n")));
    assert_eq!((&tally["failed"], &tally["sequential_ms"]), (&json!(3), &json!(800.0)));
    assert_eq!(deletions(&stub), 3);
}

#[test]
fn forks_can_be_kept() {
    let stub = host(|_| result(0, "x"));
    stub.torpor(["map", "base", "-n", "2", "--keep", "--", "true"]).ok();
    assert_eq!(deletions(&stub), 0);
    let asked = stub.body_of("POST /v1/snapshots/base/fork");
    assert_eq!(asked["lifetime"]["expire_idle_ms"], json!(null));
}

/// A `map` in two forks that is interrupted as soon as this many of these were asked for; then
/// `meanwhile` happens. How it ended.
fn interrupted(stub: &Stub, what: &str, count: usize, meanwhile: impl FnOnce()) -> Option<i32> {
    let mut command = stub.command(["map", "base", "-n", "2", "--", "sleep", "1000"]);
    let mut child = stub.runtime().block_on(async {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    until(what, || {
        (stub.asked().iter().filter(|asked| asked.ends_with(what)).count() == count).then_some(())
    });
    let pid = Pid::from_raw(child.id().unwrap() as i32).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    meanwhile();
    stub.runtime().block_on(async {
        let status = tokio::time::timeout(PATIENCE, child.wait()).await;
        status.expect("it ends").unwrap().code()
    })
}

#[test]
fn ctrl_c_removes_the_forks() {
    let stub = host(|_| Answer::Never);
    assert_eq!(interrupted(&stub, "/run", 2, || ()), Some(130));
    assert_eq!(deletions(&stub), 2);
}

#[test]
fn forks_that_are_being_made_at_ctrl_c_are_waited_for_and_removed() {
    let (open, gate) = std::sync::mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let stub = host_with(
        move || gate.lock().recv_timeout(PATIENCE).unwrap(),
        |_| panic!("nothing is run any more"),
    );
    let code = interrupted(&stub, "/fork", 1, || open.send(()).unwrap());
    assert_eq!(code, Some(130));
    assert_eq!(deletions(&stub), 2);
}

#[test]
fn a_request_that_was_refused_leaves_nothing_either() {
    let stub = Stub::new(|asked| match asked.what.as_str() {
        "GET /v1/snapshots/base" => Some(ok(snapshot(Some("base"), json!({})))),
        "GET /v1/sandboxes/base" => Some(refuse(404, ErrorCode::SandboxNotFound, "none")),
        what if what.starts_with("GET /v1/sandboxes?label=") => {
            Some(ok(json!({"sandboxes": [sandbox("half", json!({}))]})))
        }
        what if what.starts_with("DELETE ") => Some(done()),
        _ => Some(refuse(500, ErrorCode::Internal, "it broke in the middle")),
    });
    let (code, words) = stub.torpor(["map", "base", "-n", "2", "--", "true"]).failed();
    assert_eq!(code, 70);
    assert!(words.starts_with("error: it broke in the middle\n"), "{words}");
    assert_eq!(deletions(&stub), 1);
}

#[test]
fn the_command_comes_after_two_dashes() {
    let stub = host(|_| result(0, ""));
    assert_eq!(stub.torpor(["map", "base", "--count", "2"]).code, 2);
    assert_eq!(stub.torpor(["map", "base", "--", "true"]).code, 2);
    stub.torpor(["map", "--snapshot", "base", "-n", "1", "--", "ls", "--count"]).ok();
    let run = stub.asked().into_iter().find(|what| what.ends_with("/run")).unwrap();
    assert_eq!(stub.body_of(&run)["command"], json!(["ls", "--count"]));
}

//! Running commands.

use serde_json::json;
use torpor_e2e::{World, wait_for};

#[test]
fn a_command_gets_arguments_environment_directory_user_and_input() {
    let world = World::start();
    world.create("web");
    let run = |args: &[&str]| world.torpor(&[&["run"], args].concat());
    assert_eq!(run(&["web", "--", "printf", "%s|", "a b", "$HOME", ""]).ok(), "a b|$HOME||");
    assert_eq!(run(&["-e", "X=1", "web", "--", "sh", "-c", "echo $X"]).ok(), "1\n");
    assert_eq!(run(&["-w", "/usr", "web", "--", "pwd"]).ok(), "/usr\n");
    assert_eq!(run(&["-u", "tl-user", "web", "--", "id", "-un"]).ok(), "tl-user\n");
    let counted = world.torpor_with(&["run", "web", "--", "wc", "-c"], &vec![b'x'; 3_000_000]);
    assert_eq!(counted.ok().trim(), "3000000");
}

#[test]
fn a_command_ends_with_its_own_code_or_signal() {
    let world = World::start();
    world.create("web");
    assert_eq!(world.sh("web", "echo out; echo err >&2; exit 7").code, 7);
    let both = world.sh("web", "echo out; echo err >&2");
    assert_eq!((both.stdout.as_str(), both.stderr.as_str()), ("out\n", "err\n"));
    assert_eq!(world.sh("web", "kill -9 $$").code, 128 + 9);
    let late = world.torpor(&["run", "--timeout", "300ms", "web", "--", "sleep", "60"]);
    assert_eq!(late.code, 124, "{late:?}");
}

#[test]
fn a_command_that_can_not_start_says_why() {
    let world = World::start();
    world.create("web");
    let run = |args: &[&str]| world.torpor(&[&["run"], args].concat());
    let cases: [(&[&str], &str); 4] = [
        (&["web", "--", "no-such-program"], "not found"),
        (&["web", "--", "/etc/passwd"], "permission denied"),
        (&["-w", "/no/such", "web", "--", "true"], "/no/such"),
        (&["-u", "nobody-here", "web", "--", "true"], "nobody-here"),
    ];
    for (args, word) in cases {
        let outcome = run(args);
        assert_ne!(outcome.code, 0);
        assert!(outcome.stderr.to_lowercase().contains(word), "{args:?}: {}", outcome.stderr);
    }
    let unknown = world.torpor(&["run", "wen", "--", "true"]).fails(1);
    assert!(unknown.contains("wen"), "{unknown}");
}

#[test]
fn a_gigabyte_that_nobody_reads_hurts_nobody() {
    let world = World::start();
    world.create("loud");
    let started = world.post(
        "/v1/sandboxes/loud/processes",
        &json!({"command": ["sh", "-c", "head -c 1G /dev/zero; echo done >/tmp/done; sleep 1000"]}),
    );
    assert_eq!(started.status, 201, "{started:?}");
    wait_for("the gigabyte to be written", || {
        (world.sh("loud", "cat /tmp/done").code == 0).then_some(())
    });
    let daemon = std::fs::read_to_string(format!("/proc/{}/status", world.daemon_pid())).unwrap();
    let rss = daemon.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    let kib: u64 = rss.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(kib < 200 * 1024, "the daemon uses {kib} KiB");
}

#[test]
fn a_client_that_goes_away_takes_its_command_with_it() {
    let world = World::start();
    world.create("web");
    let mut client = world
        .command(&["run", "web", "--", "sh", "-c", "sleep 4242 & sleep 4243"])
        .spawn()
        .unwrap();
    let sleepers = || world.sh("web", "pgrep -fc 'sleep 424[23]' || true").stdout.trim().to_owned();
    // pgrep -f sees the shell that runs it, too.
    wait_for("the command to run", || (sleepers().parse::<u32>().unwrap_or(0) >= 3).then_some(()));
    client.kill().unwrap();
    client.wait().unwrap();
    wait_for("the command to be gone", || {
        (world.sh("web", "ps -eo args | grep -c '^sleep 424' || true").stdout.trim() == "0")
            .then_some(())
    });
}

#[test]
fn a_background_process_can_be_followed_signalled_and_killed() {
    let world = World::start();
    world.create("web");
    let script = "trap 'echo got it' USR1; echo ready; while :; do sleep 0.1; done";
    let started = world
        .post("/v1/sandboxes/web/processes", &json!({"command": ["bash", "-c", script]}))
        .json();
    let pid = started["pid"].as_u64().unwrap().to_string();
    let logs = || world.torpor(&["output", "web", &pid]).stdout;
    wait_for("its first words", || logs().contains("ready").then_some(()));
    world.torpor(&["kill", "web", &pid, "-s", "USR1"]).ok();
    wait_for("its answer", || logs().contains("got it").then_some(()));
    world.torpor(&["kill", "web", &pid]).ok();
    wait_for("its end", || {
        let process = world.get(&format!("/v1/sandboxes/web/processes/{pid}")).json();
        (process["running"] == false).then_some(())
    });
}

#[test]
fn a_supervised_process_comes_back() {
    let world = World::start();
    world.create("web");
    let body = json!({
        "command": ["sh", "-c", "echo started >>/tmp/starts; exit 1"],
        "supervise": {"name": "worker", "restart": "on_failure", "max_restarts": 2, "initial_backoff_ms": 10}
    });
    assert_eq!(world.post("/v1/sandboxes/web/processes", &body).status, 201);
    wait_for("three starts", || {
        (world.sh("web", "wc -l </tmp/starts").stdout.trim() == "3").then_some(())
    });
    let process = world.get("/v1/sandboxes/web/processes/worker").json();
    assert_eq!(process["restarts"], 2, "{process}");
}

#[test]
fn ten_thousand_runs_leak_nothing() {
    let world = World::start();
    world.create_with("web", &["--cpus", "2"]);
    let health = || {
        let line = "ls /proc/1/fd | wc -l; awk '/VmRSS/{print $2}' /proc/1/status";
        let text = world.sh("web", line).ok();
        text.split_whitespace().map(|n| n.parse::<i64>().unwrap()).collect::<Vec<_>>()
    };
    // A loop of the API inside one connection each would take long; four at a time is enough.
    let runs = |count: usize| {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..count / 4 {
                        let answer =
                            world.post("/v1/sandboxes/web/run", &json!({"command": ["/bin/true"]}));
                        assert_eq!(answer.status, 200, "{answer:?}");
                    }
                });
            }
        });
    };
    runs(1_000);
    let before = health();
    runs(9_000);
    // What the last runs had open may be closed a moment after their answers.
    let after = wait_for("the agent to have no more files open than before", || {
        Some(health()).filter(|after| after[0] <= before[0])
    });
    assert!(after[1] - before[1] < 4_096, "memory of the agent: {before:?} → {after:?} KiB");
}

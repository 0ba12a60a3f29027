//! Background processes: run -d, processes, logs, kill, attach.

use serde_json::json;

use crate::stub::Stub;
use crate::world::{World, until};

fn detached(world: &World, script: &str) -> String {
    let pid = world.torpor(["run", "web", "-d", "--", "sh", "-c", script]).ok();
    assert!(pid.trim().parse::<u32>().is_ok(), "{pid:?}");
    pid.trim().to_owned()
}

/// Waits for the state of a process.
fn until_state(world: &World, pid: &str, state: &str) {
    until(state, || {
        let table = world.torpor(["processes", "web"]).ok();
        table
            .lines()
            .any(|line| line.starts_with(&format!("{pid} ")) && line.contains(state))
            .then_some(())
    });
}

#[test]
fn a_detached_process_is_listed_with_its_end() {
    let world = World::with_sandbox();
    let pid = detached(&world, "exit 4");
    until_state(&world, &pid, "exit 4");
    let table = world.torpor(["processes", "web"]).ok();
    let words: Vec<&str> = table.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(words, ["PID", "NAME", "STATE", "HEALTH", "AGE", "RESTARTS", "COMMAND"]);
    assert!(table.contains("sh -c 'exit 4'"), "{table}");
    let list = world.torpor(["processes", "web", "--json"]).json();
    assert_eq!(list["processes"][0]["exit"]["exit_code"], 4);
}

#[test]
fn the_output_of_a_process_is_what_it_printed_on_both_streams() {
    let world = World::with_sandbox();
    let pid = detached(&world, "echo two; echo oops >&2");
    until_state(&world, &pid, "exit 0");
    let done = world.torpor(["output", "web", &pid]);
    assert_eq!((&*done.stdout, &*done.stderr), ("two\n", "oops\n"));
}

#[test]
fn the_output_of_a_process_can_be_followed_to_its_end() {
    let world = World::with_sandbox();
    let gate = world.inside.join("gate");
    let pid = detached(
        &world,
        &format!("echo one; until [ -e {} ]; do sleep 0.05; done; echo two", gate.display()),
    );
    let mut command = world.command(["output", "web", &pid, "-f"]);
    let done = world.runtime().block_on(async {
        command.stdout(std::process::Stdio::piped());
        let child = command.spawn().unwrap();
        std::fs::write(&gate, "").unwrap();
        tokio::time::timeout(crate::world::PATIENCE, child.wait_with_output())
            .await
            .unwrap()
            .unwrap()
    });
    assert_eq!(String::from_utf8(done.stdout).unwrap(), "one\ntwo\n");
}

#[test]
fn kill_ends_a_process_and_signals_reach_it() {
    let world = World::with_sandbox();
    let pid = detached(&world, "sleep 100");
    world.torpor(["kill", "web", &pid]).ok();
    until_state(&world, &pid, "signal 9");
    let pid = detached(&world, "exec sleep 100");
    world.torpor(["kill", "web", &pid, "-s", "TERM"]).ok();
    until_state(&world, &pid, "signal 15");
    let (code, _) = world.torpor(["kill", "web", "999999"]).failed();
    assert_eq!(code, 1);
}

#[test]
fn a_supervised_process_goes_by_its_name() {
    let world = World::with_sandbox();
    let args = ["run", "web", "-d", "--name", "app", "--restart", "always", "--", "sleep", "100"];
    world.torpor(args).ok();
    let table = world.torpor(["processes", "web"]).ok();
    assert!(table.contains("app"), "{table}");
    world.torpor(["kill", "web", "app"]).ok();
}

#[test]
fn a_process_may_end_by_itself_within_its_grace() {
    let world = World::with_sandbox();
    let (ready, end) = (world.inside.join("ready"), world.inside.join("end"));
    let script = format!(
        "trap 'echo well > {}; exit 3' TERM; echo > {}; while :; do sleep 0.05; done",
        end.display(),
        ready.display()
    );
    let pid = detached(&world, &script);
    until("its trap", || ready.exists().then_some(()));
    world.torpor(["kill", "web", &pid, "--grace", "60s"]).ok();
    until_state(&world, &pid, "exit 3");
    assert_eq!(std::fs::read_to_string(end).unwrap(), "well\n");
    let both = world.torpor(["kill", "web", &pid, "--grace", "1s", "-s", "HUP"]);
    assert_eq!(both.code, 2, "{both:?}");
}

#[test]
fn a_process_is_listed_with_its_health() {
    let world = World::with_sandbox();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let well = ["run", "web", "-d", "--health-tcp", &port, "--health-delay", "1ms"];
    let pid = world.torpor([&well[..], &["--", "sleep", "100"]].concat()).ok();
    until_state(&world, pid.trim(), " healthy");
    let list = world.torpor(["processes", "web", "--json"]).json();
    assert_eq!(list["processes"][0]["health"]["state"], "healthy");
    assert_eq!(list["processes"][0]["supervise"]["restart"], "on_failure");
    world.torpor(["kill", "web", pid.trim()]).ok();
}

#[test]
fn what_is_to_be_discarded_is_not_kept() {
    let world = World::with_sandbox();
    let script = "echo one; echo two >&2";
    let args = ["run", "web", "-d", "--discard-stdout", "--", "sh", "-c", script];
    let pid = world.torpor(args).ok();
    until_state(&world, pid.trim(), "exit 0");
    let done = world.torpor(["output", "web", pid.trim()]);
    assert_eq!((&*done.stdout, &*done.stderr), ("", "two\n"));
    let done = world.torpor(["run", "web", "--discard-stderr", "--", "true"]);
    assert_eq!(done.code, 2, "{done:?}");
}

#[test]
fn how_a_process_is_kept_alive_is_passed_on() {
    let stub = Stub::new(|_| None);
    let words = "run web -d --restart always --max-restarts 7 --backoff 1s --max-backoff 1m \
                 --health-http 8080:/healthz --health-interval 2s --health-timeout 300ms \
                 --health-failures 5 --discard-stderr -- serve";
    stub.torpor(words.split_whitespace());
    let asked = stub.body_of("POST /v1/sandboxes/web/processes");
    let health = json!({
        "port": 8080, "path": "/healthz", "initial_delay_ms": 5000, "interval_ms": 2000,
        "timeout_ms": 300, "failure_threshold": 5
    });
    let supervise = json!({
        "name": null, "restart": "always", "max_restarts": 7, "initial_backoff_ms": 1000,
        "max_backoff_ms": 60_000, "health": health
    });
    assert_eq!(asked["supervise"], supervise);
    assert_eq!((&asked["discard_stdout"], &asked["discard_stderr"]), (&json!(false), &json!(true)));
}

#[test]
fn what_makes_no_sense_about_a_process_is_refused_before_anybody_is_asked() {
    let stub = Stub::new(|_| None);
    for words in [
        "run web --restart always -- true",
        "run web --health-tcp 80 -- true",
        "run web -d --max-restarts 3 -- true",
        "run web -d --health-delay 1s -- true",
        "run web -d --health-http 80 --health-tcp 80 -- true",
        "run web -d --health-http 80:healthz -- true",
    ] {
        assert_eq!(stub.torpor(words.split(' ')).code, 2, "{words}");
    }
    assert_eq!(stub.asked(), [""; 0]);
}

#[test]
fn attach_shows_what_was_said_and_passes_the_end_on() {
    let world = World::with_sandbox();
    let pid = detached(&world, "echo hello; exit 6");
    until_state(&world, &pid, "exit 6");
    let done = world.torpor(["attach", "web", &pid]);
    assert_eq!((done.code, &*done.stdout), (6, "hello\n"), "{done:?}");
}

#[test]
fn a_name_needs_a_background_process() {
    let world = World::new();
    let done = world.torpor(["run", "web", "--name", "x", "--", "true"]);
    assert_eq!(done.code, 2, "{done:?}");
}

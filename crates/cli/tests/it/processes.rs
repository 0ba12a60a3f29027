//! Background processes: run -d, processes, logs, kill, attach.

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
    assert_eq!(words, ["PID", "NAME", "STATE", "AGE", "RESTARTS", "COMMAND"]);
    assert!(table.contains("sh -c 'exit 4'"), "{table}");
    let list = world.torpor(["processes", "web", "--json"]).json();
    assert_eq!(list["processes"][0]["exit"]["exit_code"], 4);
}

#[test]
fn logs_are_what_each_process_said() {
    let world = World::with_sandbox();
    let first = detached(&world, "echo one");
    until_state(&world, &first, "exit 0");
    let second = detached(&world, "echo two; echo oops >&2");
    until_state(&world, &second, "exit 0");
    let done = world.torpor(["logs", "web"]);
    assert_eq!(
        done.stdout,
        format!(
            "==> {first}: sh -c 'echo one' (exit 0) <==\none\n\
             ==> {second}: sh -c 'echo two; echo oops >&2' (exit 0) <==\ntwo\n"
        )
    );
    assert_eq!(done.stderr, "oops\n");
    assert_eq!(world.torpor(["logs", "web", "--pid", &first]).ok(), "one\n");
}

#[test]
fn logs_can_be_followed_to_the_end() {
    let world = World::with_sandbox();
    let gate = world.inside.join("gate");
    let pid = detached(
        &world,
        &format!("echo one; until [ -e {} ]; do sleep 0.05; done; echo two", gate.display()),
    );
    let mut command = world.command(["logs", "web", "-f"]);
    let done = world.runtime().block_on(async {
        command.stdout(std::process::Stdio::piped());
        let child = command.spawn().unwrap();
        std::fs::write(&gate, "").unwrap();
        tokio::time::timeout(crate::world::PATIENCE, child.wait_with_output())
            .await
            .unwrap()
            .unwrap()
    });
    let text = String::from_utf8(done.stdout).unwrap();
    assert!(text.starts_with(&format!("==> {pid}: ")), "{text}");
    assert!(text.ends_with("<==\none\ntwo\n"), "{text}");
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

//! run, and exec without a terminal.

use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

use crate::world::{PATIENCE, World, finish};

#[test]
fn output_and_exit_code_become_ours() {
    let world = World::with_sandbox();
    let done = world.sh("echo out; echo err >&2; exit 3");
    assert_eq!((done.code, &*done.stdout, &*done.stderr), (3, "out\n", "err\n"));
}

#[test]
fn a_signal_inside_is_128_and_its_number() {
    let world = World::with_sandbox();
    assert_eq!(world.sh("kill -9 $$").code, 137);
}

#[test]
fn a_command_that_takes_too_long_exits_with_124() {
    let world = World::with_sandbox();
    let done = world.torpor(["run", "web", "--timeout", "200ms", "--", "sleep", "60"]);
    assert_eq!((done.code, &*done.stderr), (124, "torpor: killed: time was up after 200ms\n"));
}

#[test]
fn a_command_that_does_not_exist_exits_with_127() {
    let world = World::with_sandbox();
    let (code, words) = world.torpor(["run", "web", "--", "no-such-program"]).failed();
    assert_eq!(code, 127);
    assert!(words.starts_with("error: ") && words.contains("no-such-program"), "{words}");
}

#[test]
fn environment_and_directory_are_set() {
    let world = World::with_sandbox();
    let dir = world.inside.to_str().unwrap();
    let done = world.torpor(["run", "web", "-e", "A=1 2", "-w", dir, "sh", "-c", "echo $A; pwd"]);
    assert_eq!(done.ok(), format!("1 2\n{dir}\n"));
}

#[test]
fn piped_input_goes_in_whole_and_comes_out_whole() {
    let world = World::with_sandbox();
    let input: Vec<u8> = (0..8_000_000u32).map(|n| (n % 251) as u8).collect();
    std::fs::write(world.here.join("input"), &input).unwrap();
    let mut command = world.command(["run", "web", "--", "cat"]);
    command.stdin(std::fs::File::open(world.here.join("input")).unwrap());
    command.stdout(std::fs::File::create(world.here.join("output")).unwrap());
    let status = world.runtime().block_on(async {
        tokio::time::timeout(PATIENCE, command.status()).await.expect("no deadlock").unwrap()
    });
    assert!(status.success());
    assert!(std::fs::read(world.here.join("output")).unwrap() == input, "bytes were changed");
}

#[test]
fn output_comes_as_it_is_made() {
    let world = World::with_sandbox();
    let gate = world.inside.join("gate");
    let script =
        format!("echo one; while [ ! -e {0} ]; do sleep 0.05; done; echo two", gate.display());
    let mut command = world.command(["run", "web", "--", "sh", "-c", &script]);
    world.runtime().block_on(async {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        assert_eq!(first.expect("the first line comes before the end").unwrap().unwrap(), "one");
        std::fs::write(&gate, "").unwrap();
        assert_eq!(lines.next_line().await.unwrap().unwrap(), "two");
        assert!(child.wait().await.unwrap().success());
    });
}

#[test]
fn a_reader_that_goes_away_ends_us_silently() {
    let world = World::with_sandbox();
    let mut command = world.command(["run", "web", "--", "yes"]);
    world.runtime().block_on(async {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdout = child.stdout.take().unwrap();
        stdout.read_exact(&mut [0; 100]).await.unwrap();
        drop(stdout);
        let output = tokio::time::timeout(PATIENCE, child.wait_with_output()).await;
        let output = output.expect("it ends").unwrap();
        assert_eq!(output.status.code(), Some(141));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    });
}

#[test]
fn an_interrupt_goes_to_the_command() {
    let world = World::with_sandbox();
    let script = "trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.05; done";
    let mut command = world.command(["run", "web", "--", "sh", "-c", script]);
    world.runtime().block_on(async {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(lines.next_line().await.unwrap().unwrap(), "ready");
        let pid = rustix::process::Pid::from_raw(child.id().unwrap() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let caught = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        assert_eq!(caught.expect("the signal arrives").unwrap().unwrap(), "caught");
        assert_eq!(child.wait().await.unwrap().code(), Some(5));
    });
}

#[test]
fn exec_without_a_terminal_is_pipes() {
    let world = World::with_sandbox();
    let done = world.torpor_with(["exec", "-i", "web", "cat"], b"through");
    assert_eq!(done.ok(), "through");
    let done = world.torpor_with(["exec", "web", "cat"], b"not passed on");
    assert_eq!(done.ok(), "");
}

#[test]
fn an_unknown_sandbox_is_no_command() {
    let world = World::new();
    let done = world.runtime().block_on(finish(world.command(["run", "nope", "--", "true"]), b""));
    assert_eq!(done.code, 1);
    assert!(done.stderr.starts_with("error: "), "{done:?}");
}

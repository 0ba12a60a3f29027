//! A daemon that is stopped, killed and started again.

use std::io::Read;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use torpor_e2e::{Traces, World, wait_for};

#[test]
fn a_killed_daemon_finds_its_sandboxes_as_they_were() {
    let mut world = World::start();
    for n in 0..10 {
        world.create_with(&format!("box-{n}"), &["--memory", "256m"]);
        world.sh(&format!("box-{n}"), &format!("echo {n} >/tmp/mark")).ok();
    }
    let counter = json!({"command": ["sh", "-c", "n=0; while :; do n=$((n+1)); echo $n >/tmp/n; sleep 0.1; done"]});
    assert_eq!(world.post("/v1/sandboxes/box-3/processes", &counter).status, 201);
    world.kill_daemon();
    world.start_daemon();
    for n in 0..10 {
        assert_eq!(world.sh(&format!("box-{n}"), "cat /tmp/mark").ok(), format!("{n}\n"));
    }
    let count = || world.sh("box-3", "cat /tmp/n").stdout.trim().parse::<u64>().unwrap_or(0);
    let now = count();
    wait_for("the counter to go on", || (count() > now).then_some(()));
    let (tag, dir) = (world.tag(), world.data_dir());
    world.torpor(&["rm", "--all", "--yes"]).ok();
    world.has_no_machines();
    world.stop_daemon();
    assert_eq!(Traces::find(&tag, &dir), Traces::default(), "something is left on the host");
}

/// The process that is a sandbox's machine.
fn machine_of(world: &World, sandbox: &str) -> Pid {
    let id = world.inspect(sandbox)["id"].as_str().unwrap().to_owned();
    let mut processes = world.traces().processes.into_iter();
    let line = processes.find(|line| line.contains("runsc-sandbox") && line.contains(&id));
    let pid = line.expect("its process").split(' ').next().unwrap().parse().unwrap();
    Pid::from_raw(pid).unwrap()
}

#[test]
fn a_machine_that_died_meanwhile_is_reported_and_cleaned_up() {
    let mut world = World::start();
    world.create("web");
    world.create("other");
    let machine = machine_of(&world, "web");
    world.kill_daemon();
    kill_process(machine, Signal::KILL).unwrap();
    world.start_daemon();
    let status = wait_for("the loss to be told", || {
        (world.state("web") == "failed").then(|| world.inspect("web"))
    });
    assert!(status["reason"].as_str().unwrap().contains("lost"), "{status}");
    world.sh("other", "true").ok();
    world.torpor(&["rm", "web", "other"]).ok();
    world.has_no_machines();
}

#[test]
fn a_machine_killed_from_outside_is_reported_at_once() {
    let world = World::start();
    world.create("web");
    let machine = machine_of(&world, "web");
    kill_process(machine, Signal::KILL).unwrap();
    wait_for("the failure to be told", || (world.state("web") == "failed").then_some(()));
    world.has_no_machines();
}

#[test]
fn a_running_command_outlives_a_daemon_and_its_output_is_kept() {
    let mut world = World::start();
    world.create("web");
    let mut client = world
        .command(&[
            "run",
            "web",
            "--",
            "sh",
            "-c",
            "echo before; sleep 1; echo after >/tmp/after; sleep 1000",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut first = [0; 7];
    client.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    world.kill_daemon();
    client.wait().unwrap();
    world.start_daemon();
    wait_for("the command to go on", || {
        (world.sh("web", "cat /tmp/after").code == 0).then_some(())
    });
    let processes = world.get("/v1/sandboxes/web/processes").json();
    let pid = processes["processes"][0]["pid"].to_string();
    assert!(world.torpor(&["logs", "web", "--pid", &pid]).ok().contains("before"));
}

#[test]
fn a_stopped_daemon_leaves_sandboxes_running_for_the_next() {
    let mut world = World::start();
    world.create("web");
    world.sh("web", "echo kept >/tmp/mark").ok();
    world.stop_daemon();
    world.start_daemon();
    assert_eq!(world.sh("web", "cat /tmp/mark").ok(), "kept\n");
}

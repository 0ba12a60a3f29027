//! A daemon that is stopped, killed, replaced and started again.

use std::io::{Read, Write};
use std::process::Stdio;
use std::time::SystemTime;

use rustix::process::{Signal, kill_process};
use torpor_e2e::{Traces, World, request, wait_for};

use crate::terminal::Screen;

#[test]
fn a_killed_daemon_finds_its_sandboxes_as_they_were() {
    let mut world = World::start();
    for n in 0..10 {
        world.create_with(&format!("box-{n}"), &["--memory", "256m"]);
        world.sh(&format!("box-{n}"), &format!("echo {n} >/tmp/mark")).ok();
    }
    let counted = world.start_counter("box-3");
    world.kill_daemon();
    world.start_daemon();
    for n in 0..10 {
        assert_eq!(world.sh(&format!("box-{n}"), "cat /tmp/mark").ok(), format!("{n}\n"));
    }
    world.counts_on("box-3", counted);
    world.leaves_nothing();
}

#[test]
fn a_machine_that_died_meanwhile_is_reported_and_cleaned_up() {
    let mut world = World::start();
    world.create("web");
    world.create("other");
    let machine = world.machine_of("web");
    world.kill_daemon();
    kill_process(machine, Signal::KILL).unwrap();
    world.start_daemon();
    let status = wait_for("the loss to be told", || {
        (world.state("web") == "failed").then(|| world.inspect("web"))
    });
    assert!(status["message"].as_str().unwrap().contains("lost"), "{status}");
    world.sh("other", "true").ok();
    world.torpor(&["rm", "web", "other"]).ok();
    world.has_no_machines();
}

#[test]
fn a_machine_killed_from_outside_is_reported_at_once() {
    let world = World::start();
    world.create("web");
    let machine = world.machine_of("web");
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
    assert!(world.torpor(&["output", "web", &pid]).ok().contains("before"));
}

#[test]
fn a_stopped_daemon_leaves_every_sandbox_saved_and_no_process() {
    let mut world = World::start();
    for name in ["awake", "warm", "cold"] {
        world.create_with(name, &["--memory", "256m"]);
    }
    let counts = ["awake", "warm", "cold"].map(|name| world.start_counter(name));
    world.torpor(&["sleep", "warm"]).ok();
    world.torpor(&["sleep", "cold", "--cold"]).ok();
    assert_ne!(world.traces(), Traces::default());
    world.stop_daemon();
    assert_eq!(world.traces(), Traces::default(), "something is left on the host");
    world.start_daemon();
    // Who did not sleep is woken without being asked.
    wait_for("it to run again", || (world.state("awake") == "running").then_some(()));
    for name in ["warm", "cold"] {
        let status = world.inspect(name);
        assert_eq!(status["tier"], "cold", "{status}");
        assert_eq!(status["durable"], true, "{status}");
    }
    for (name, count) in ["awake", "warm", "cold"].into_iter().zip(counts) {
        world.counts_on(name, count);
        assert_eq!(world.inspect(name).get("recovered_from"), None, "something was lost");
    }
    world.is_tidy();
}

#[test]
fn a_daemon_that_makes_way_leaves_commands_terminals_and_previews_untouched() {
    let mut world = World::start();
    world.create_with("web", &["--idle-after", "never"]);
    world.create_with("warm", &["--memory", "256m"]);
    let counts = [world.start_counter("web"), world.start_counter("warm")];
    world.torpor(&["sleep", "warm"]).ok();
    world.start_process("web", &["python3", "-m", "http.server", "3000", "--bind", "127.0.0.1"]);
    let preview = |world: &World| {
        request(world.address(), "GET", "/", "host: 3000-web.localhost\r\n", b"").status
    };
    wait_for("the server", || (preview(&world) == 200).then_some(()));
    let mut screen = Screen::open(&world, &["exec", "-it", "-d", "web", "bash", "--norc"]);
    screen.types("MARK=still-here; echo begun-$((40+2))\n");
    screen.shows("begun-42");
    let before = [world.machine_of("web"), world.machine_of("warm")];
    world.hand_over();
    screen.ends();
    let begun = SystemTime::now();
    world.start_daemon();
    world.sh("web", "true").ok();
    let adopted = begun.elapsed().unwrap();
    let _ = writeln!(std::io::stderr(), "adopted and answered within {adopted:?}");
    assert_eq!([world.machine_of("web"), world.machine_of("warm")], before);
    assert_eq!(preview(&world), 200);
    let status = world.inspect("warm");
    assert_eq!((&status["tier"], &status["durable"]), (&"warm".into(), &true.into()), "{status}");
    for (name, count) in ["web", "warm"].into_iter().zip(counts) {
        world.counts_on(name, count);
    }
    let processes = world.get("/v1/sandboxes/web/processes").json();
    let processes = processes["processes"].as_array().unwrap();
    let bash = processes.iter().find(|process| process.to_string().contains("--norc")).unwrap();
    let mut again = Screen::open(&world, &["attach", "web", &bash["pid"].to_string()]);
    again.types("echo $MARK-$((1+1))\n");
    again.shows("still-here-2");
    again.types("exit\n");
    assert_eq!(again.ends(), 0);
    world.leaves_nothing();
}

#[test]
fn after_the_host_restarts_what_was_saved_is_there_and_the_rest_says_so() {
    let mut world = World::start();
    let names = ["cold", "warm", "ran", "never"];
    for name in names {
        world.create_with(name, &["--memory", "256m", "--idle-after", "never"]);
    }
    let counts = names.map(|name| world.start_counter(name));
    world.torpor(&["sleep", "cold", "--cold"]).ok();
    world.torpor(&["sleep", "warm"]).ok();
    world.torpor(&["snapshot", "ran", "--name", "then"]).ok();
    world.sh("ran", "echo lost >/tmp/lost").ok();
    let host = world.traces();
    world.kill_daemon();
    for pid in host.pids() {
        // Some end with others.
        let _ = kill_process(pid, Signal::KILL);
    }
    world.start_daemon();
    let status = wait_for("the loss to be told", || {
        Some(world.inspect("never")).filter(|status| status["state"] == "failed")
    });
    assert!(status["message"].as_str().unwrap().contains("lost"), "{status}");
    let status = wait_for("the last save to be found", || {
        Some(world.inspect("ran")).filter(|status| status["recovered_from"].is_string())
    });
    assert!(status["message"].as_str().unwrap().contains("last saved"), "{status}");
    let then = world.get("/v1/snapshots/then").json();
    assert!(status["recovered_from"].as_str() >= then["created_at"].as_str(), "{status}");
    for (name, count) in names.into_iter().zip(counts).take(3) {
        world.counts_on(name, count);
    }
    assert_eq!(world.sh("ran", "cat /tmp/lost").code, 1, "that was not saved");
    for name in ["cold", "warm"] {
        assert_eq!(world.inspect(name).get("recovered_from"), None, "something was lost");
    }
    world.is_tidy();
    world.leaves_nothing();
}

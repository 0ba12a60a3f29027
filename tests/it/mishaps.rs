//! What goes wrong around saves: full disks, flipped bits, machines that die asleep.

use std::fs;
use std::path::PathBuf;

use rustix::process::{Signal, kill_process};
use serde_json::Value;
use torpor_e2e::{World, wait_for};

/// Less than the save of a process with [`BALLAST`] needs.
const TOO_LITTLE_MIB: u64 = 12;
const BALLAST: &str =
    "import os, time; held = os.urandom(48 << 20); print('held', flush=True); time.sleep(1e6)";

#[test]
fn a_full_disk_fails_the_save_and_the_sandbox_goes_on() {
    let world = World::on_small_disk(400);
    world.create_with("web", &["--memory", "256m", "--idle-after", "never"]);
    let counted = world.start_counter("web");
    let process = world.start_process("web", &["python3", "-c", BALLAST]);
    wait_for("the ballast", || {
        let logs = world.torpor(&["output", "web", &process["pid"].to_string()]);
        logs.stdout.contains("held").then_some(())
    });
    let filler = fill(&world);
    for (args, what) in [
        (&["sleep", "web"] as &[&str], "a sleep"),
        (&["snapshot", "web", "--name", "base"], "a snapshot"),
        (&["fork", "web"], "a fork"),
    ] {
        let said = world.torpor(args).fails(1);
        assert!(said.contains("disk is full"), "{what}: {said}");
        assert_eq!(world.state("web"), "running", "after {what}");
    }
    let counted = world.counts_on("web", counted);
    let half = wait_for("the failure to be recorded", || {
        let half = world.get("/v1/snapshots/base").json();
        Some(half).filter(|half| half["state"] == "failed")
    });
    assert!(half["message"].as_str().unwrap().contains("full"), "{half}");
    fs::remove_file(filler).unwrap();
    world.is_tidy();
    world.torpor(&["sleep", "web", "--cold"]).ok();
    assert_eq!(world.inspect("web")["tier"], "cold");
    world.counts_on("web", counted);
}

/// Leaves [`TOO_LITTLE_MIB`] of room in the data directory.
fn fill(world: &World) -> PathBuf {
    let about = rustix::fs::statvfs(world.data_dir()).unwrap();
    let free = about.f_bavail * about.f_frsize;
    let path = world.data_dir().join("filler");
    let file = fs::File::create(&path).unwrap();
    let much = free - TOO_LITTLE_MIB * 1024 * 1024;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, much).unwrap();
    path
}

#[test]
fn a_corrupt_save_is_refused_by_the_name_of_its_file_and_can_be_healed() {
    let mut world = World::start();
    world.create_with("web", &["--memory", "256m"]);
    let counted = world.start_counter("web");
    world.torpor(&["sleep", "web", "--cold"]).ok();
    let saves = world.saves_on_disk();
    let save = world.data_dir().join("saves").join(saves.first().unwrap());
    assert_eq!(saves.len(), 1);
    for file in ["pages.img", "checkpoint.img"] {
        let path = save.join(file);
        flip(&path);
        let refused = world.post("/v1/sandboxes/web/wake", &Value::Null);
        assert_eq!(refused.json()["code"], "snapshot_corrupt", "{refused:?}");
        let said = world.torpor(&["run", "web", "--", "true"]);
        assert_ne!(said.code, 0);
        assert!(said.stderr.contains(file), "{}", said.stderr);
        let status = world.inspect("web");
        assert_eq!((&status["state"], &status["tier"]), (&"asleep".into(), &"cold".into()));
        assert!(status["message"].as_str().unwrap().contains(file), "{status}");
        world.has_no_machines();
        // Neither does the next daemon run it.
        world.kill_daemon();
        world.start_daemon();
        assert!(world.torpor(&["wake", "web"]).fails(1).contains(file));
        flip(&path);
        world.counts_on("web", counted);
        // The same save again.
        if file == "pages.img" {
            kill_process(world.machine_of("web"), Signal::KILL).unwrap();
            wait_for("the loss", || (world.state("web") == "asleep").then_some(()));
        }
    }
}

/// Changes a byte in the middle; once more, and it is as it was.
fn flip(path: &std::path::Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_machine_that_dies_asleep_is_cold_if_it_was_saved() {
    let world = World::start();
    world.create_with("web", &["--memory", "256m"]);
    let counted = world.start_counter("web");
    world.torpor(&["sleep", "web"]).ok();
    assert_eq!(world.inspect("web")["tier"], "warm");
    kill_process(world.machine_of("web"), Signal::KILL).unwrap();
    wait_for("the loss to be seen", || (world.inspect("web")["tier"] == "cold").then_some(()));
    world.is_tidy();
    world.counts_on("web", counted);
    assert_eq!(world.inspect("web").get("recovered_from"), None, "nothing was lost");
}

#[test]
fn a_machine_that_dies_asleep_before_it_was_saved_says_what_was_lost() {
    let world = World::start();
    for name in ["saved", "never"] {
        world.create_with(name, &["--memory", "256m", "--idle-after", "1s"]);
    }
    let counted = world.start_counter("saved");
    world.torpor(&["snapshot", "saved", "--name", "then"]).ok();
    world.sh("saved", "echo lost >/tmp/lost").ok();
    for name in ["saved", "never"] {
        let status = wait_for("it to fall asleep", || {
            Some(world.inspect(name)).filter(|status| status["tier"] == "warm")
        });
        assert_eq!(status["durable"], false, "{status}");
        kill_process(world.machine_of(name), Signal::KILL).unwrap();
    }
    let status = wait_for("the loss to be told", || {
        Some(world.inspect("saved")).filter(|status| status["tier"] == "cold")
    });
    let then = world.get("/v1/snapshots/then").json();
    let recovered = status["recovered_from"].as_str().unwrap();
    assert!(recovered >= then["created_at"].as_str().unwrap(), "{status} {then}");
    assert!(status["message"].as_str().unwrap().contains("last saved"), "{status}");
    world.counts_on("saved", counted);
    assert_eq!(world.sh("saved", "cat /tmp/lost").code, 1, "that was not saved");
    let status = wait_for("the failure to be told", || {
        Some(world.inspect("never")).filter(|status| status["state"] == "failed")
    });
    assert!(status["message"].as_str().unwrap().contains("gone"), "{status}");
    let said = world.torpor(&["run", "never", "--", "true"]).fails(1);
    assert!(said.contains("gone"), "{said}");
    world.is_tidy();
}

#[test]
fn a_keeper_that_dies_hurts_no_running_sandbox_and_is_replaced() {
    let mut world = World::start();
    world.create_with("web", &["--memory", "256m", "--idle-after", "never"]);
    world.create_with("cold", &["--memory", "256m"]);
    let (web, cold) = (world.start_counter("web"), world.start_counter("cold"));
    world.torpor(&["sleep", "cold", "--cold"]).ok();
    let keeper = world.traces().pids_of(" keeper ");
    assert_eq!(keeper.len(), 1);
    kill_process(keeper[0], Signal::KILL).unwrap();
    let web = world.counts_on("web", web);
    world.counts_on("cold", cold);
    world.create_with("fresh", &["--memory", "256m"]);
    world.sh("fresh", "true").ok();
    world.torpor(&["sleep", "web", "--cold"]).ok();
    world.counts_on("web", web);
    world.leaves_nothing();
}

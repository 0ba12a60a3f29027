//! Volumes of sandboxes whose machine dies, or that go back: memory of then meets the files of now.

use rustix::process::{Signal, kill_process};
use serde_json::json;
use torpor_e2e::{World, wait_for};

/// A process with an open file of the volume, and how to see that it goes on.
const COUNTS: &str = "exec 3>> /data/count; while :; do echo tick >&3; sleep 0.05; done";

fn lines(world: &World) -> usize {
    world.sh("web", "wc -l < /data/count").ok().trim().parse().unwrap()
}

fn counts_on(world: &World) {
    let from = lines(world);
    wait_for("it counts on", || (lines(world) > from).then_some(()));
}

/// Has something to lose: a process that counts on a volume, and a save that knows of it.
fn counter_on_a_volume(world: &World) -> u64 {
    for name in ["data", "other"] {
        world.torpor(&["volume", "create", name, "--size", "32m"]).ok();
    }
    world.create_with("web", &["-v", "data:/data", "--idle-after", "never"]);
    let counter = world.start_process("web", &["sh", "-c", COUNTS]);
    wait_for("it counts", || world.sh("web", "test -s /data/count").code.eq(&0).then_some(()));
    counter["pid"].as_u64().unwrap()
}

fn machine_dies(world: &World) {
    kill_process(world.machine_of("web"), Signal::KILL).unwrap();
    wait_for("it is back at its save", || world.state("web").eq("asleep").then_some(()));
    assert!(world.inspect("web")["recovered_from"].is_string());
}

fn what_was_attached_is_there_after_a_crash(mut world: World) {
    let counter = counter_on_a_volume(&world);
    world.sleep("web", "cold");
    world.sh("web", "echo after > /data/note; sync").ok();
    machine_dies(&world);
    assert_eq!(world.sh("web", "cat /data/note").ok(), "after\n", "files are not gone back");
    counts_on(&world);

    // The save knows a file of one volume open where another one is by now.
    world.sh("web", &format!("kill {counter}; sync")).ok();
    wait_for("it is let go", || {
        world.delete("/v1/sandboxes/web/mounts?path=/data").status.eq(&204).then_some(())
    });
    world.torpor(&["volume", "attach", "web", "other", "/data"]).ok();
    machine_dies(&world);
    assert_eq!(world.sh("web", "ls -A /data | grep -v lost+found | cat").ok(), "");
    world.sh("web", "echo mine > /data/mine; sync").ok();
    let kept = world.torpor(&["volume", "ls", "data:/", "--json"]).ok();
    assert!(kept.contains("note") && !kept.contains("mine"), "{kept}");
    world.torpor(&["rm", "web"]).ok();
    world.torpor(&["volume", "rm", "data", "other"]).ok();
    world.leaves_nothing();
}

#[test]
fn a_machine_that_dies_comes_back_with_its_volumes_and_no_others() {
    what_was_attached_is_there_after_a_crash(World::start());
}

#[test]
fn a_microvm_that_dies_comes_back_with_its_volumes_and_no_others() {
    let Some(world) = World::on_microvms() else { return };
    what_was_attached_is_there_after_a_crash(world);
}

#[test]
fn who_goes_back_to_a_snapshot_finds_its_volumes_as_they_are_now() {
    let mut world = World::start();
    let counter = counter_on_a_volume(&world);
    world.torpor(&["snapshot", "web", "--name", "base"]).ok();
    world.sh("web", "echo after > /data/note; sync").ok();
    world.torpor(&["restore", "web", "--to", "base"]).ok();
    assert_eq!(world.sh("web", "cat /data/note").ok(), "after\n");
    counts_on(&world);

    // Somebody else's: nothing happens to who wanted to go back.
    world.sh("web", &format!("kill {counter}; sync")).ok();
    wait_for("it is let go", || {
        world.delete("/v1/sandboxes/web/mounts?path=/data").status.eq(&204).then_some(())
    });
    world.sh("web", "echo here > /tmp/here").ok();
    world.create_with("writer", &["-v", "data:/data"]);
    let refused = world.torpor(&["restore", "web", "--to", "base"]).fails(1);
    assert!(refused.contains("data") && refused.contains("writer"), "{refused}");
    assert_eq!(world.sh("web", "cat /tmp/here").ok(), "here\n");
    world.torpor(&["rm", "writer"]).ok();
    world.torpor(&["restore", "web", "--to", "base"]).ok();
    counts_on(&world);

    // Gone: the snapshot says what it misses.
    world.torpor(&["rm", "web"]).ok();
    world.torpor(&["volume", "rm", "data"]).ok();
    let missing = world.post("/v1/snapshots/base/fork", &json!({"volumes": "share_ro"}));
    assert!(missing.text().contains("volume_not_found"), "{missing:?}");
    world.torpor(&["snapshot", "rm", "base"]).ok();
    world.torpor(&["volume", "rm", "other"]).ok();
    world.leaves_nothing();
}

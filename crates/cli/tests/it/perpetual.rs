//! sleep, wake, snapshot, fork, map, top and pool against a real daemon: both sides mean the same.

use serde_json::Value;

use crate::world::World;

fn state(world: &World) -> Value {
    world.torpor(["inspect", "web", "--json"]).json()["state"].clone()
}

#[test]
fn what_sleeps_is_woken_by_the_next_request() {
    let world = World::with_sandbox();
    let shown = world.torpor(["sleep", "web", "--cold"]).ok();
    assert!(shown.starts_with("web sleeps (cold, "), "{shown}");
    assert_eq!(state(&world), "asleep");
    assert_eq!(world.sh("echo awake").ok(), "awake\n");
    assert_eq!(state(&world), "running");
    world.torpor(["sleep", "web"]).ok();
    let shown = world.torpor(["wake", "web"]).ok();
    assert!(shown.starts_with("web is awake ("), "{shown}");
    assert_eq!(world.torpor(["inspect", "web", "--json"]).json()["wakes"], 2);
}

#[test]
fn who_wants_no_automatic_wake_gets_none() {
    let world = World::with_sandbox();
    world.torpor(["update", "web", "--no-auto-wake", "--idle-after", "never"]).ok();
    world.torpor(["sleep", "web"]).ok();
    let done = world.sh("true");
    assert_eq!(done.code, 1, "{done:?}");
    assert!(done.stderr.contains("torpor wake web"), "{done:?}");
    world.torpor(["wake", "web"]).ok();
    world.sh("true").ok();
}

#[test]
fn a_snapshot_is_taken_forked_restored_and_removed() {
    let world = World::with_sandbox();
    assert_eq!(world.torpor(["snapshot", "web", "--name", "base"]).ok(), "base\n");
    let table = world.torpor(["snapshot", "ls", "web"]).ok();
    assert!(table.lines().nth(1).is_some_and(|line| line.starts_with("base ")), "{table}");
    let shown = world.torpor(["snapshot", "show", "base"]).ok();
    assert!(shown.contains("kind:      memory\n"), "{shown}");
    world.torpor(["snapshot", "verify", "base"]).ok();
    let forks = world.torpor(["fork", "base", "--count", "2", "--name", "agent-{n}"]).ok();
    assert_eq!(forks, "agent-1\nagent-2\n");
    assert_eq!(world.torpor(["run", "agent-2", "--", "echo", "hi"]).ok(), "hi\n");
    let shown = world.torpor(["restore", "web", "--to", "base"]).ok();
    assert_eq!(shown, "web is as it was at base, and runs.\n");
    assert_eq!(world.torpor(["snapshot", "rm", "base"]).ok(), "base\n");
    assert_eq!(world.torpor(["snapshot", "ls", "-q"]).ok(), "");
}

#[test]
fn a_map_of_a_running_sandbox_leaves_only_results() {
    let world = World::with_sandbox();
    let done = world.torpor(["map", "web", "-n", "2", "--json", "--", "sh", "-c", "echo part-{n}"]);
    let tally = done.json();
    assert_eq!(tally["results"][1]["stdout"], "part-2\n");
    assert_eq!(tally["failed"], 0);
    assert_eq!(world.torpor(["ps", "-q"]).ok().lines().count(), 1);
}

#[test]
fn a_snapshot_goes_from_one_host_to_another() {
    let (here, there) = (World::with_sandbox(), World::new());
    here.torpor(["snapshot", "web", "--name", "base"]).ok();
    here.torpor(["snapshot", "export", "base", "-o", "base.tar"]).ok();
    let file = std::fs::read(here.here.join("base.tar")).unwrap();
    let args = ["snapshot", "import", "-", "--name", "copy"];
    assert_eq!(there.torpor_with(args, &file).ok(), "copy\n");
    assert_eq!(there.torpor(["create", "--name", "web", "--snapshot", "copy"]).ok(), "web\n");
    assert_eq!(there.sh("echo there").ok(), "there\n");
}

#[test]
fn top_and_pools_are_served() {
    let world = World::with_sandbox();
    let shown = world.torpor(["top"]).ok();
    assert!(shown.starts_with("1 sandboxes: 1 running, "), "{shown}");
    assert_eq!(world.torpor(["pool", "create", "plain", "--size", "1"]).ok(), "plain\n");
    assert!(world.torpor(["pool", "show", "plain"]).ok().contains("from:     torpor/base\n"));
    assert_eq!(world.torpor(["pool", "rm", "plain"]).ok(), "plain\n");
}

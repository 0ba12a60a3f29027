//! What is done at times, on real machines.

use serde_json::Value;
use torpor_e2e::{World, wait_for};
use torpor_lifecycle::fault::FIRING_POINTS;

fn firings(world: &World, schedule: &str) -> Vec<Value> {
    let list: Value =
        serde_json::from_str(&world.torpor(&["schedule", "history", schedule, "--json"]).ok())
            .unwrap();
    list["firings"].as_array().unwrap().clone()
}

fn succeeded(world: &World, schedule: &str) -> Vec<Value> {
    let mut firings = firings(world, schedule);
    firings.retain(|firing| firing["state"] == "succeeded");
    firings
}

#[test]
fn a_schedule_wakes_a_sandbox_and_lets_it_sleep_again_and_a_killed_daemon_fires_nothing_twice() {
    let mut world = World::start();
    world.create_with("web", &["--memory", "256m", "--idle-after", "1s"]);
    world.torpor(&["sleep", "web"]).ok();
    let create = "schedule create tick --every 4s --missed one --sandbox web -- sh -c";
    let mut words: Vec<_> = create.split(' ').collect();
    words.push("echo tick; date +%s%N >> /tmp/ticks");
    world.torpor(&words).ok();
    let done = wait_for("the first time", || succeeded(&world, "tick").pop());
    assert_eq!((&done["exit"], &done["output"]), (&0.into(), &"tick\n".into()));
    wait_for("it to sleep again", || (world.state("web") == "asleep").then_some(()));
    // Killed in the middle of something that takes long: the next daemon waits for it.
    let create = "schedule create long --after 1s --sandbox web -- sh -c";
    let mut words: Vec<_> = create.split(' ').collect();
    words.push("sleep 6; echo well");
    world.torpor(&words).ok();
    wait_for("it to begin", || {
        firings(&world, "long").pop().filter(|one| one["process"].is_object())
    });
    world.kill_daemon();
    world.start_daemon();
    let done = wait_for("its end", || succeeded(&world, "long").pop());
    assert_eq!(done["output"], "well\n");
    world.torpor(&["schedule", "pause", "tick"]).ok();
    wait_for("what still runs", || {
        firings(&world, "tick").iter().all(|one| one["state"] != "running").then_some(())
    });
    let all = firings(&world, "tick");
    let times: std::collections::BTreeSet<_> =
        all.iter().map(|one| one["fire_at"].to_string()).collect();
    assert_eq!(times.len(), all.len(), "a time fired twice");
    let ticks = world.sh("web", "wc -l < /tmp/ticks").ok();
    assert_eq!(ticks.trim().parse(), Ok(succeeded(&world, "tick").len()));
}

#[test]
fn of_scheduled_snapshots_two_stay() {
    let world = World::start();
    world.create_with("web", &["--memory", "256m"]);
    world.torpor(&["snapshot", "web", "--name", "mine"]).ok();
    world
        .torpor(&[
            "schedule",
            "create",
            "keep",
            "--cron",
            "0 0 1 1 *",
            "--snapshot",
            "web",
            "--keep",
            "2",
        ])
        .ok();
    for round in 1..=3 {
        world.torpor(&["schedule", "run", "keep"]).ok();
        wait_for("a snapshot", || (succeeded(&world, "keep").len() == round).then_some(()));
    }
    let list: Value =
        serde_json::from_str(&world.torpor(&["snapshot", "ls", "--json"]).ok()).unwrap();
    let list = list["snapshots"].as_array().unwrap();
    assert_eq!(list.len(), 3);
    assert!(list.iter().any(|snapshot| snapshot["name"] == "mine"));
    let newest = &succeeded(&world, "keep")[0]["result"];
    assert!(list.iter().any(|snapshot| snapshot["id"] == *newest));
}

#[test]
fn a_command_is_begun_once_and_found_again_at_whatever_step_the_daemon_is_killed() {
    let mut world = World::start();
    world.create_with("web", &["--memory", "256m"]);
    for (place, state) in FIRING_POINTS.iter().zip(["interrupted", "succeeded", "succeeded"]) {
        let name = place.replace('.', "-");
        let script = format!("echo begun >>/tmp/{name}; sleep 3; echo well");
        world.kill_daemon();
        world.start_daemon_that_dies_at(place);
        let create = ["schedule", "create", &name, "--after", "1s", "--sandbox", "web", "--"];
        world.torpor(&[&create[..], &["sh", "-c", &script]].concat()).ok();
        world.daemon_dies();
        world.start_daemon();
        let done = wait_for("its end", || {
            firings(&world, &name).pop().filter(|one| one["state"] != "running")
        });
        assert_eq!(done["state"], state, "{place}: {done}");
        let begun = world.sh("web", &format!("cat /tmp/{name} 2>/dev/null | wc -l")).ok();
        assert_eq!(begun.trim() == "1", state == "succeeded", "{place}: {begun}");
        assert_eq!(done["output"] == "well\n", state == "succeeded", "{place}: {done}");
    }
}

#[test]
fn a_job_begins_at_its_time_and_its_end_is_told() {
    let world = World::start();
    let job = "job create count --image torpor/base --memory 256m -- sh -c";
    let mut words: Vec<_> = job.split(' ').collect();
    words.push("echo $TORPOR_TASK_INDEX");
    world.torpor(&words).ok();
    let create = "schedule create nightly --after 1s --job count --count 2";
    world.torpor(&create.split(' ').collect::<Vec<_>>()).ok();
    let done = wait_for("its end", || succeeded(&world, "nightly").pop());
    let id = done["result"].as_str().unwrap();
    let told = world.torpor(&["events", "--type", "job.finished", "--subject", id, "--json"]).ok();
    let told: Value = serde_json::from_str(&told).unwrap();
    let data = &told["events"][0]["data"];
    assert_eq!((&data["job"], &data["state"]), (&"count".into(), &"succeeded".into()), "{told}");
}

//! The daemon is killed, as by a power cut, at every step of everything it does to a sandbox. The
//! next daemon finds every acknowledged thing, nothing half there, and nothing that is nobody's.

use std::collections::BTreeSet;
use std::io::Write;

use serde_json::Value;
use torpor_e2e::{Count, Traces, World, wait_for};
use torpor_lifecycle::fault::POINTS;

/// What is asked of the daemon when it dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Create,
    Sleep,
    Demote,
    Thaw,
    Revive,
    Snapshot,
    Fork,
    Restore,
    Delete,
}

/// The places each comes by.
const WAYS: &[(Act, &[&str])] = &[
    (Act::Create, &["create.recorded", "start.begun", "start.machine", "start.greeted"]),
    (
        Act::Sleep,
        &[
            "sleep.frozen",
            "save.staged",
            "save.written",
            "commit.placed",
            "save.committed",
            "save.recorded",
        ],
    ),
    (Act::Demote, &["demote.begun", "demote.killed"]),
    (Act::Thaw, &["thaw.begun", "thaw.greeted"]),
    (Act::Revive, &["start.begun", "start.machine", "start.greeted"]),
    (
        Act::Snapshot,
        &[
            "snapshot.recorded",
            "save.staged",
            "save.written",
            "commit.placed",
            "save.committed",
            "save.recorded",
            "snapshot.saved",
        ],
    ),
    (Act::Fork, &["create.recorded", "start.begun", "start.machine", "start.greeted"]),
    (Act::Restore, &["restore.recorded", "start.begun", "start.machine", "start.greeted"]),
    (Act::Delete, &["delete.erased", "delete.killed", "remove.dropped"]),
];

#[test]
fn every_place_where_a_daemon_can_be_killed_is_on_a_way() {
    let on_ways: BTreeSet<_> = WAYS.iter().flat_map(|(_, places)| *places).copied().collect();
    assert_eq!(on_ways, POINTS.iter().copied().collect());
}

/// A world whose sandbox `web` has a counter.
struct Stage {
    world: World,
    counted: Count,
}

impl Stage {
    fn set() -> Self {
        let world = World::start();
        world.create_with("web", &["--memory", "256m", "--idle-after", "never"]);
        let counted = world.start_counter("web");
        Self { world, counted }
    }

    /// Does all that is acknowledged before the daemon dies.
    fn prepare(&mut self, act: Act, place: &str) {
        let world = &self.world;
        world.sh("web", &format!("echo {place} >/tmp/mark")).ok();
        self.counted = world.counts_on("web", self.counted);
        match act {
            Act::Create | Act::Sleep | Act::Demote | Act::Snapshot => {}
            Act::Thaw => drop(world.torpor(&["sleep", "web"]).ok()),
            Act::Revive => drop(world.torpor(&["sleep", "web", "--cold"]).ok()),
            Act::Fork => drop(world.torpor(&["snapshot", "web", "--name", "base"]).ok()),
            Act::Restore => {
                world.torpor(&["snapshot", "web", "--name", "base"]).ok();
                world.sh("web", "rm /tmp/mark; echo later >/tmp/later").ok();
            }
            Act::Delete => {
                world.create_with("other", &["--memory", "256m"]);
                world.torpor(&["sleep", "other"]).ok();
            }
        }
    }

    /// Asks, of a daemon that will not answer.
    fn ask(&self, act: Act) {
        let args: &[&str] = match act {
            Act::Create => &["create", "--name", "other", "--memory", "256m"],
            Act::Sleep => &["sleep", "web"],
            Act::Demote => &["sleep", "web", "--cold"],
            Act::Thaw | Act::Revive => &["run", "web", "--", "true"],
            Act::Snapshot => &["snapshot", "web", "--name", "half"],
            Act::Fork => &["fork", "base", "--count", "2", "--name", "fork-{n}"],
            Act::Restore => &["restore", "web", "--to", "base"],
            Act::Delete => &["rm", "other"],
        };
        let answer = self.world.torpor(args);
        assert_ne!(answer.code, 0, "a dead daemon answered: {answer:?}");
    }

    /// Looks at what the next daemon makes of it, and removes what is not needed any more.
    fn check(&mut self, act: Act, place: &str) {
        let world = &self.world;
        let status = at_rest(world, "web").expect("nothing removed it");
        match act {
            // What was acknowledged before the daemon died is durable.
            Act::Demote => assert_eq!(status["durable"], true, "{status}"),
            Act::Sleep if place == "save.recorded" => {
                assert_eq!(status["durable"], true, "{status}")
            }
            Act::Snapshot => {
                let half = world.get("/v1/snapshots/half").json();
                assert_eq!(half["state"], "failed", "{half}");
                assert!(half["message"].as_str().unwrap().contains("daemon ended"), "{half}");
                world.torpor(&["fork", "half"]).fails(1);
                world.torpor(&["snapshot", "rm", "half"]).ok();
            }
            Act::Create => {
                at_rest(world, "other").expect("it was recorded");
                assert_eq!(world.sh("other", "hostname").ok(), "other\n");
                world.torpor(&["rm", "other"]).ok();
            }
            Act::Fork => self.check_forks(place),
            Act::Restore => {
                assert_eq!(world.sh("web", "cat /tmp/later").code, 1, "it was not restored");
                world.torpor(&["snapshot", "rm", "base"]).ok();
            }
            Act::Delete => {
                assert_eq!(world.get("/v1/sandboxes/other").status, 404);
            }
            Act::Sleep | Act::Thaw | Act::Revive => {}
        }
        // Whatever happened, it is the same sandbox, with all that was acknowledged.
        assert_eq!(world.sh("web", "cat /tmp/mark").ok(), format!("{place}\n"));
        self.counted = world.counts_on("web", self.counted);
        assert_eq!(world.inspect("web").get("recovered_from"), None, "something was lost");
        world.is_tidy();
    }

    /// Each is there whole, or not at all.
    fn check_forks(&self, place: &str) {
        let world = &self.world;
        for fork in ["fork-1", "fork-2"] {
            if at_rest(world, fork).is_some() {
                assert_eq!(world.sh(fork, "cat /tmp/mark").ok(), format!("{place}\n"));
                assert_eq!(world.sh(fork, "hostname").ok(), format!("{fork}\n"));
                world.counts_on(fork, self.counted);
                world.torpor(&["rm", fork]).ok();
            }
        }
        world.torpor(&["snapshot", "rm", "base"]).ok();
    }
}

/// The status of a sandbox when nothing is under way; none: there is no such sandbox. It is in a
/// state that it can leave.
#[track_caller]
fn at_rest(world: &World, sandbox: &str) -> Option<Value> {
    let status = wait_for("the sandbox to come to rest", || {
        let answer = world.get(&format!("/v1/sandboxes/{sandbox}"));
        if answer.status == 404 {
            return Some(None);
        }
        let status = answer.json();
        (status["state"] != "creating").then_some(Some(status))
    })?;
    assert!(status["state"] == "running" || status["state"] == "asleep", "{status}");
    Some(status)
}

/// Kills the daemon at every step of `act`.
#[track_caller]
fn survives(act: Act) {
    let mut stage = Stage::set();
    let (_, places) = WAYS.iter().find(|(on, _)| *on == act).unwrap();
    for place in *places {
        stage.prepare(act, place);
        stage.world.kill_daemon();
        stage.world.start_daemon_that_dies_at(place);
        stage.ask(act);
        stage.world.daemon_dies();
        stage.world.start_daemon();
        stage.check(act, place);
    }
    stage.world.leaves_nothing();
}

/// What several clients ask for at once.
const ASKED: &[&[&str]] = &[
    &["sleep", "web"],
    &["run", "web", "--", "true"],
    &["sleep", "web", "--cold"],
    &["snapshot", "web"],
    &["fork", "web", "--count", "2"],
    &["create", "--memory", "256m"],
    &["restore", "web", "--to", "nothing"],
];

/// Ends the daemon by `end` at random moments of random requests.
fn survives_any_moment(rounds: usize, end: fn(&mut World)) {
    let mut stage = Stage::set();
    let mut dice = std::time::UNIX_EPOCH.elapsed().unwrap().subsec_nanos();
    for round in 0..rounds {
        let world = &mut stage.world;
        // A linear congruence is random enough; what it gave is told if this fails.
        dice = dice.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let asked = [0, 8, 16].map(|shift| ASKED[(dice >> shift) as usize % ASKED.len()]);
        let clients = asked.map(|args| {
            let quiet = std::process::Stdio::null;
            world.command(args).stdout(quiet()).stderr(quiet()).spawn().unwrap()
        });
        let moment = std::time::Duration::from_millis(u64::from(dice >> 20) % 400);
        let _ = writeln!(std::io::stderr(), "round {round}: {asked:?}, ended after {moment:?}");
        std::thread::sleep(moment);
        end(world);
        for mut client in clients {
            client.wait().unwrap();
        }
        world.start_daemon();
        stage.counted = stage.world.counts_on("web", stage.counted);
        let status = at_rest(&stage.world, "web").unwrap();
        assert_eq!(status.get("recovered_from"), None, "something was lost: {status}");
        for one in stage.world.get("/v1/sandboxes").json()["sandboxes"].as_array().unwrap() {
            at_rest(&stage.world, one["id"].as_str().unwrap());
        }
        stage.world.is_tidy();
    }
    stage.world.leaves_nothing();
}

#[test]
fn a_daemon_killed_at_random_moments_loses_nothing() {
    survives_any_moment(10, World::kill_daemon);
}

#[test]
fn a_daemon_that_makes_way_at_random_moments_loses_nothing() {
    survives_any_moment(6, World::hand_over);
}

#[test]
fn a_daemon_stopped_at_random_moments_loses_nothing_and_leaves_no_process() {
    survives_any_moment(6, |world| {
        world.tag();
        world.stop_daemon();
        assert_eq!(world.traces(), Traces::default(), "something is left on the host");
    });
}

#[test]
fn a_daemon_killed_at_any_step_of_a_create_leaves_nothing_half() {
    survives(Act::Create);
}

#[test]
fn a_daemon_killed_at_any_step_of_a_sleep_loses_nothing() {
    survives(Act::Sleep);
}

#[test]
fn a_daemon_killed_at_any_step_of_a_demotion_loses_nothing() {
    survives(Act::Demote);
}

#[test]
fn a_daemon_killed_at_any_step_of_a_warm_wake_loses_nothing() {
    survives(Act::Thaw);
}

#[test]
fn a_daemon_killed_at_any_step_of_a_cold_wake_loses_nothing() {
    survives(Act::Revive);
}

#[test]
fn a_daemon_killed_at_any_step_of_a_snapshot_leaves_nothing_half() {
    survives(Act::Snapshot);
}

#[test]
fn a_daemon_killed_at_any_step_of_a_fork_leaves_nothing_half() {
    survives(Act::Fork);
}

#[test]
fn a_daemon_killed_at_any_step_of_a_restore_leaves_nothing_half() {
    survives(Act::Restore);
}

#[test]
fn a_daemon_killed_at_any_step_of_a_delete_leaves_nothing() {
    survives(Act::Delete);
}

//! Sandboxes that begin from a moment of another: independent, and like it in everything else.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use torpor_e2e::{Count, World, wait_for};

use crate::network::resolvable_name;

/// A world with a sandbox `web` that counts, and a memory snapshot `base` of it.
fn world_with_base() -> (World, Count) {
    let world = World::start();
    world.create_with("web", &["--memory", "256m", "--idle-after", "never"]);
    let counted = world.start_counter("web");
    world.sh("web", "echo then >/tmp/mark").ok();
    world.torpor(&["snapshot", "web", "--name", "base"]).ok();
    (world, counted)
}

fn boot_id(world: &World, sandbox: &str) -> String {
    let ids = world.sh(sandbox, "cat /run/torpor/boot_id /proc/sys/kernel/random/boot_id").ok();
    let (ours, kernels) = ids.split_once('\n').unwrap();
    assert_eq!(ours, kernels.trim(), "two boot ids");
    ours.to_owned()
}

#[test]
fn five_forks_are_as_the_snapshot_and_independent() {
    let (world, counted) = world_with_base();
    let original = boot_id(&world, "web");
    let forked = world.torpor(&["fork", "base", "--count", "5", "--name", "agent-{n}"]).ok();
    let names: Vec<_> = (1..=5).map(|n| format!("agent-{n}")).collect();
    assert_eq!(forked.lines().collect::<Vec<_>>(), names);
    let base = world.get("/v1/snapshots/base").json();
    let lookup = resolvable_name().map(|name| format!("getent hosts {name}"));
    let (mut ids, mut boots, mut machines, mut randoms) =
        (BTreeSet::new(), BTreeSet::from([original.clone()]), BTreeSet::new(), BTreeSet::new());
    let random = "python3 -c 'import os; print(os.getrandom(16).hex())'";
    machines.insert(world.sh("web", "cat /etc/machine-id").ok());
    for name in &names {
        assert_eq!(world.inspect(name)["parent"], base["id"], "{name}");
        ids.insert(world.id_of(name));
        boots.insert(boot_id(&world, name));
        machines.insert(world.sh(name, "cat /etc/machine-id").ok());
        randoms.insert(world.sh(name, random).ok());
        assert_eq!(world.sh(name, "hostname; cat /tmp/mark").ok(), format!("{name}\nthen\n"));
        world.counts_on(name, counted);
        world.sh(name, &format!("echo {name} >/tmp/own; rm /tmp/mark")).ok();
        if let Some(lookup) = &lookup {
            world.sh(name, lookup).ok();
        }
    }
    assert_eq!((ids.len(), boots.len(), machines.len(), randoms.len()), (5, 6, 6, 5));
    for name in &names {
        assert_eq!(world.sh(name, "cat /tmp/own").ok(), format!("{name}\n"));
    }
    assert_eq!(world.sh("web", "cat /tmp/own").code, 1, "a fork's file is in the original");
    assert_eq!(world.sh("web", "hostname; cat /tmp/mark").ok(), "web\nthen\n");
    assert_eq!(boot_id(&world, "web"), original);
    world.counts_on("web", counted);
    // A fork sleeps and wakes like any other sandbox, as itself.
    let own = boot_id(&world, "agent-3");
    world.torpor(&["sleep", "agent-3", "--cold"]).ok();
    assert_eq!(world.sh("agent-3", "hostname; cat /tmp/own").ok(), "agent-3\nagent-3\n");
    assert_eq!(boot_id(&world, "agent-3"), own);
    world.is_tidy();
}

#[test]
fn a_running_sandbox_is_forked_directly() {
    let (mut world, counted) = world_with_base();
    world.torpor(&["snapshot", "rm", "base"]).ok();
    world.sh("web", "echo now >/tmp/mark").ok();
    world.torpor(&["fork", "web", "--count", "2", "--name", "twin-{n}"]).ok();
    assert_eq!(world.state("web"), "running");
    assert_eq!(world.get("/v1/snapshots").json()["snapshots"], json!([]));
    world.counts_on("web", counted);
    world.torpor(&["rm", "web"]).ok();
    for name in ["twin-1", "twin-2"] {
        assert_eq!(world.sh(name, "cat /tmp/mark; hostname").ok(), format!("now\n{name}\n"));
        world.counts_on(name, counted);
    }
    world.leaves_nothing();
}

#[test]
fn a_sandbox_that_is_saved_in_the_middle_of_things_comes_back() {
    let (world, counted) = world_with_base();
    let busy = AtomicBool::new(true);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while busy.load(Ordering::Relaxed) {
                    world.sh("web", "true");
                }
            });
        }
        // Ends the others also when something fails here.
        let _end = Ends(&busy);
        for _ in 0..12 {
            world.torpor(&["fork", "web", "--name", "fork"]).ok();
            world.counts_on("fork", counted);
            world.torpor(&["rm", "fork"]).ok();
        }
    });
    world.is_tidy();
}

struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

#[test]
fn a_sleeping_sandbox_is_saved_and_forked_and_sleeps_on() {
    let (world, counted) = world_with_base();
    for (args, tier) in
        [(&["sleep", "web"] as &[&str], "warm"), (&["sleep", "web", "--cold"], "cold")]
    {
        world.torpor(args).ok();
        let before = world.inspect("web");
        assert_eq!(before["tier"], tier, "{before}");
        let taken = world.torpor(&["snapshot", "web", "--name", tier, "--json"]).ok();
        let taken: Value = serde_json::from_str(&taken).unwrap();
        assert_eq!(taken["pause_ms"], 0.0, "{taken}");
        world.torpor(&["fork", tier, "--name", &format!("from-{tier}")]).ok();
        world.torpor(&["fork", "web", "--name", &format!("of-{tier}")]).ok();
        for fork in ["from", "of"] {
            world.counts_on(&format!("{fork}-{tier}"), counted);
        }
        let after = world.inspect("web");
        for key in ["state", "tier", "durable", "wakes", "last_used_at"] {
            assert_eq!(before[key], after[key], "{key}");
        }
    }
    world.counts_on("web", counted);
}

#[test]
fn a_fork_that_fails_is_told_and_the_others_live() {
    let (world, counted) = world_with_base();
    world.create_with("agent-2", &["--memory", "256m"]);
    let taken = world.id_of("agent-2");
    let forked = world.torpor(&["fork", "base", "--count", "3", "--name", "agent-{n}"]);
    assert_eq!(forked.code, 1, "{forked:?}");
    assert_eq!(forked.stdout, "agent-1\nagent-3\n");
    assert!(forked.stderr.contains("agent-2 is taken"), "{}", forked.stderr);
    for name in ["agent-1", "agent-3"] {
        world.counts_on(name, counted);
    }
    assert_eq!(world.id_of("agent-2"), taken);
    world.is_tidy();
}

#[test]
fn what_can_not_be_forked_is_refused_before_anything_begins() {
    let (world, _) = world_with_base();
    let refused: [(&[&str], i32, &str); 7] = [
        (&["fork", "nothing"], 1, "nothing"),
        (&["fork", "base", "--count", "0"], 2, "1 to 1000"),
        (&["fork", "base", "--count", "1001"], 2, "1 to 1000"),
        (&["fork", "base", "--count", "2", "--name", "same"], 2, "same"),
        (&["fork", "base", "--name", "../../etc"], 1, "name"),
        (&["fork", "base", "--memory", "512m"], 1, "memory snapshot are locked"),
        (&["create", "--snapshot", "base", "--cpus", "2"], 1, "memory snapshot are locked"),
    ];
    for (args, code, word) in refused {
        let said = world.torpor(args).fails(code);
        assert!(said.contains(word), "{args:?}: {said}");
    }
    for body in [
        json!({"count": -1}),
        json!({"count": 1_000_000}),
        json!({"count": 2, "name": "{n}\u{0}"}),
        json!({"nmae": "x"}),
        json!([]),
    ] {
        let answer = world.post("/v1/snapshots/base/fork", &body);
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
    }
    let list = world.get("/v1/sandboxes").json();
    assert_eq!(list["sandboxes"].as_array().unwrap().len(), 1, "{list}");
    world.is_tidy();
}

#[test]
fn more_forks_than_there_is_room_for_are_refused_unless_somebody_can_make_room() {
    let world = World::with_env(&[("TORPOR_LIMITS_SANDBOXES", "3")]);
    world.create_with("web", &["--memory", "256m"]);
    world.create_with("other", &["--memory", "256m"]);
    let counted = world.start_counter("web");
    let said = world.torpor(&["fork", "web", "--count", "2"]).fails(1);
    assert!(said.contains('3'), "{said}");
    assert_eq!(world.torpor(&["ps", "-q"]).ok().lines().count(), 2);
    // Who sleeps in memory leaves it for them.
    world.torpor(&["sleep", "other"]).ok();
    world.torpor(&["fork", "web", "--count", "2", "--name", "fork-{n}"]).ok();
    assert_eq!(world.inspect("other")["tier"], "cold");
    world.counts_on("fork-2", counted);
    world.is_tidy();
}

#[test]
fn a_fork_keeps_what_it_needs_of_a_snapshot_that_is_removed() {
    let (mut world, counted) = world_with_base();
    world.torpor(&["fork", "base", "--name", "fork"]).ok();
    let needed = world.get("/v1/snapshots/base").json()["needed_by"].clone();
    assert!(needed.as_array().unwrap().contains(&world.id_of("fork").into()), "{needed}");
    world.torpor(&["snapshot", "rm", "base"]).ok();
    assert_eq!(world.get("/v1/snapshots/base").status, 404);
    world.torpor(&["rm", "web"]).ok();
    // Its last durable moment is the snapshot that is gone.
    kill_process(world.machine_of("fork"), Signal::KILL).unwrap();
    wait_for("the loss", || (world.inspect("fork")["tier"] == "cold").then_some(()));
    assert_eq!(world.saves_on_disk().len(), 1);
    world.kill_daemon();
    world.start_daemon();
    world.counts_on("fork", counted);
    world.leaves_nothing();
}

#[test]
fn a_sandbox_goes_back_to_a_snapshot_in_place() {
    let (world, counted) = world_with_base();
    let id = world.id_of("web");
    for (sleep, when) in [
        (None, "awake"),
        (Some(&["sleep", "web"] as &[&str]), "warm"),
        (Some(&["sleep", "web", "--cold"]), "cold"),
    ] {
        world.start_process("web", &["sleep", "4321"]);
        world.sh("web", "rm /tmp/mark; echo later >/tmp/later; pgrep -f 'sleep 4321'").ok();
        // It must go back by more than it counts meanwhile.
        let late = wait_for("the counter to be far", || {
            Some(world.count("web")).filter(|count| count.n > counted.n + 20)
        });
        if let Some(args) = sleep {
            world.torpor(args).ok();
        }
        world.torpor(&["restore", "web", "--to", "base"]).ok();
        let now = world.count("web");
        assert!(now.n < late.n || when != "awake", "it did not go back: {late:?} {now:?}");
        assert_eq!(world.sh("web", "cat /tmp/mark; cat /tmp/later").stdout, "then\n", "{when}");
        assert_eq!(world.sh("web", "pgrep -f 'sleep [4]321'").code, 1, "{when}");
        world.counts_on("web", counted);
        assert_eq!(world.id_of("web"), id);
        assert_eq!(world.sh("web", "hostname").ok(), "web\n");
    }
    let said = world.torpor(&["restore", "web", "--to", "nothing"]).fails(1);
    assert!(said.contains("nothing"), "{said}");
    world.torpor(&["restore", "web", "--to", "../../etc"]).fails(2);
    world.counts_on("web", counted);
    world.is_tidy();
}

#[test]
fn a_pool_has_machines_ready_and_is_refilled() {
    let (mut world, counted) = world_with_base();
    let pool = |world: &World, name: &str| world.get(&format!("/v1/pools/{name}")).json();
    let ready = |world: &World, name: &str, size: u64| {
        wait_for("the pool to be full", || (pool(world, name)["ready"] == size).then_some(()));
    };
    world.torpor(&["pool", "create", "plain", "--size", "2", "--memory", "192m"]).ok();
    ready(&world, "plain", 2);
    world.create_with("one", &["--memory", "192m"]);
    assert_eq!(world.sh("one", "hostname").ok(), "one\n");
    assert_eq!(pool(&world, "plain")["hits"], 1);
    ready(&world, "plain", 2);
    // Another kind is not taken from it.
    world.create_with("other", &["--memory", "160m"]);
    let now = pool(&world, "plain");
    assert_eq!((&now["hits"], &now["misses"]), (&1.into(), &0.into()));
    world.torpor(&["pool", "create", "agents", "--size", "1", "--snapshot", "base"]).ok();
    ready(&world, "agents", 1);
    world.torpor(&["fork", "base", "--name", "agent"]).ok();
    assert_eq!(pool(&world, "agents")["hits"], 1);
    assert_eq!(world.sh("agent", "hostname; cat /tmp/mark").ok(), "agent\nthen\n");
    world.counts_on("agent", counted);
    assert_ne!(boot_id(&world, "agent"), boot_id(&world, "web"));
    ready(&world, "agents", 1);
    let metrics = world.get("/metrics").text();
    assert!(metrics.contains("pool"), "{metrics}");
    // A pool is there again after a crash, and its machines of before are not.
    world.kill_daemon();
    world.start_daemon();
    ready(&world, "plain", 2);
    ready(&world, "agents", 1);
    assert!(world.torpor(&["pool", "create", "plain", "--size", "1"]).fails(1).contains("plain"));
    world.torpor(&["pool", "rm", "plain", "agents"]).ok();
    assert!(world.torpor(&["pool", "rm", "plain"]).fails(1).contains("plain"));
    world.is_tidy();
    world.leaves_nothing();
}

//! Snapshots, forks, restores and pools.

use super::*;
use crate::fleet::RestorePoint;
use crate::store::PoolRecord;
use torpor_protocol::guest::Request;
use torpor_protocol::volume::ForkVolumes;
use torpor_protocol::{Snapshot, SnapshotKind, SnapshotRef, SnapshotState, WorkFailure};

pub(super) async fn written(world: &World, name: &str, text: &str) -> Sandbox {
    let sandbox = world.running(name).await;
    world.host.set_memory(sandbox.id(), text);
    sandbox
}

pub(super) async fn snapshot(world: &World, of: &str, name: &str) -> Snapshot {
    let name = Some(name.parse().unwrap());
    let taking = world.fleet.take_snapshot(&reference(of), name, SnapshotKind::Memory).await;
    taking.unwrap().done().await.unwrap()
}

pub(super) fn named(name: &str) -> SnapshotRef {
    name.parse().unwrap()
}

async fn fork(world: &World, point: &RestorePoint, name: &str) -> Sandbox {
    let mut spec = point.spec().clone();
    spec.name = Some(name.parse().unwrap());
    let sandbox = world.fleet.begin(point, spec).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    sandbox
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_is_taken_while_it_runs_and_tells_the_pause() {
    let world = World::new().await;
    let sandbox = written(&world, "web", "base").await;
    let lease = sandbox.awake().await.unwrap();
    let taken = snapshot(&world, "web", "base").await;
    assert_eq!(taken.state, SnapshotState::Completed);
    assert!(taken.pause_ms > 0.0);
    lease.guest().done(&Request::Stat { path: "/".into() }).await.unwrap();
    assert_eq!(sandbox.status().parent, Some(taken.id));
}

#[tokio::test(start_paused = true)]
async fn a_sleeping_sandbox_is_snapshotted_without_waking_and_without_a_second_copy() {
    let world = World::new().await;
    let sandbox = written(&world, "web", "base").await;
    sandbox.sleep(true).await.unwrap();
    tokio::time::sleep(Duration::from_millis(10)).await;
    let taken = snapshot(&world, "web", "base").await;
    assert_eq!((taken.pause_ms, world.host.saves()), (0.0, 1));
    assert_eq!(world.store.saves().len(), 1);
    assert_eq!(world.host.revives(), 0);
}

#[tokio::test(start_paused = true)]
async fn forks_begin_where_the_snapshot_was_and_go_their_own_ways() {
    let world = World::new().await;
    let original = written(&world, "web", "base").await;
    snapshot(&world, "web", "base").await;
    world.host.set_memory(original.id(), "later");
    let point = world.fleet.restore_point(&named("base")).await.unwrap();
    let (one, two) = (fork(&world, &point, "one").await, fork(&world, &point, "two").await);
    world.fleet.let_go(point).await;
    world.host.set_memory(one.id(), "one");
    let memory = |sandbox: &Sandbox| world.host.memory(sandbox.id()).unwrap();
    assert_eq!([memory(&original), memory(&one), memory(&two)], ["later", "one", "base"]);
    let told = |sandbox: &Sandbox| {
        let asked = world.host.asked(sandbox.id());
        asked.into_iter().find_map(|request| {
            let Request::Identify(identity) = request else { return None };
            Some(identity)
        })
    };
    let (first, second) = (told(&one).unwrap(), told(&two).unwrap());
    assert_eq!((first.hostname.as_str(), second.hostname.as_str()), ("one", "two"));
    assert_ne!(first.entropy, second.entropy);
    assert!(first.boot_id.is_some() && first.boot_id != second.boot_id);
}

#[tokio::test(start_paused = true)]
async fn a_woken_sandbox_keeps_its_boot_id() {
    let world = World::new().await;
    let sandbox = written(&world, "web", "base").await;
    sandbox.sleep(true).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    let asked = world.host.asked(sandbox.id());
    let told = asked.iter().find_map(|request| {
        let Request::Identify(identity) = request else { return None };
        Some(identity.boot_id.clone())
    });
    assert_eq!(told, Some(None));
}

#[tokio::test(start_paused = true)]
async fn a_running_sandbox_is_forked_directly_and_nothing_stays_behind() {
    let world = World::new().await;
    let original = written(&world, "web", "base").await;
    let point =
        world.fleet.restore_point_now(&reference("web"), ForkVolumes::Refuse).await.unwrap();
    let copy = fork(&world, &point, "copy").await;
    world.fleet.let_go(point).await;
    assert_eq!(world.host.memory(copy.id()).as_deref(), Some("base"));
    assert!(world.snapshots().await.is_empty());
    original.delete().await;
    copy.delete().await;
    assert!(world.store.saves().is_empty());
}

#[tokio::test(start_paused = true)]
async fn one_fork_that_fails_does_not_harm_the_others() {
    let world = World::new().await;
    written(&world, "web", "base").await;
    snapshot(&world, "web", "base").await;
    let point = world.fleet.restore_point(&named("base")).await.unwrap();
    world.host.fail_starts(1);
    let mut spec = point.spec().clone();
    spec.name = Some("bad".parse().unwrap());
    let bad = world.fleet.begin(&point, spec).await.unwrap();
    assert!(bad.awake().await.is_err());
    fork(&world, &point, "good").await;
}

#[tokio::test(start_paused = true)]
async fn resources_of_a_memory_snapshot_are_locked_those_of_files_are_not() {
    let world = World::new().await;
    written(&world, "web", "base").await;
    snapshot(&world, "web", "memory").await;
    let files = Some("files".parse().unwrap());
    let kind = SnapshotKind::Filesystem;
    let taking = world.fleet.take_snapshot(&reference("web"), files, kind).await.unwrap();
    assert_eq!(taking.done().await.unwrap().kind, kind);
    for (name, locked) in [("memory", true), ("files", false)] {
        let point = world.fleet.restore_point(&named(name)).await.unwrap();
        let mut spec = point.spec().clone();
        spec.name = None;
        spec.resources.memory_mib *= 2;
        let begun = world.fleet.begin(&point, spec).await.map(|_| ());
        assert_eq!(begun.is_err(), locked, "{name}");
        if locked {
            assert!(matches!(refusal(begun), Refusal::Locked(_)));
        }
        world.fleet.let_go(point).await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_begins_from_files_boots_and_gets_them() {
    let world = World::new().await;
    written(&world, "web", "base").await;
    let kind = SnapshotKind::Filesystem;
    let taking = world.fleet.take_snapshot(&reference("web"), None, kind).await.unwrap();
    let id = taking.done().await.unwrap().id;
    let point = world.fleet.restore_point(&SnapshotRef::Id(id)).await.unwrap();
    let copy = fork(&world, &point, "copy").await;
    assert_eq!((world.host.boots(), world.host.revives()), (2, 0));
    let asked = world.host.asked(copy.id());
    assert!(asked.iter().any(|request| matches!(request, Request::Unpack { layer: true, .. })));
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_a_sandbox_needs_can_go_without_harm() {
    let world = World::new().await;
    let original = written(&world, "web", "base").await;
    snapshot(&world, "web", "base").await;
    let point = world.fleet.restore_point(&named("base")).await.unwrap();
    let copy = fork(&world, &point, "copy").await;
    world.fleet.let_go(point).await;
    world.fleet.erase_snapshot(&named("base")).await.unwrap();
    original.delete().await;
    world.host.crash(copy.id(), "killed");
    until(&copy, State::Asleep).await;
    drop(copy.awake().await.unwrap());
    assert_eq!(world.host.memory(copy.id()).as_deref(), Some("base"));
    copy.delete().await;
    assert!(world.store.saves().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_failed_snapshot_says_why_and_can_not_be_begun_from() {
    let world = World::new().await;
    let sandbox = written(&world, "web", "base").await;
    world.host.fail_saves(1);
    let name = Some("base".parse().unwrap());
    let taking = world.fleet.take_snapshot(&reference("web"), name, SnapshotKind::Memory).await;
    assert!(taking.unwrap().done().await.is_err());
    let record = world.fleet.find_snapshot(&named("base")).await.unwrap();
    assert_eq!(record.snapshot.state, SnapshotState::Failed);
    assert_eq!(record.snapshot.reason, Some(WorkFailure::NoCapacity));
    assert!(record.snapshot.message.unwrap().contains("disk is full"));
    let begun = world.fleet.restore_point(&named("base")).await.map(|_| ());
    assert!(matches!(refusal(begun), Refusal::SnapshotNotReady { .. }));
    assert_eq!(sandbox.status().state, State::Running);
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_in_the_making_when_the_daemon_ends_has_failed() {
    let world = World::new().await;
    written(&world, "web", "base").await;
    world.host.save_takes(Duration::from_secs(1000));
    let name = Some("base".parse().unwrap());
    let kind = SnapshotKind::Memory;
    let taking = world.fleet.take_snapshot(&reference("web"), name, kind).await.unwrap();
    assert_eq!(taking.snapshot.state, SnapshotState::InProgress);
    // The daemon is killed: nothing of it is asked or told any more.
    let fleet = world.daemon().await;
    let record = fleet.find_snapshot(&named("base")).await.unwrap();
    assert_eq!(record.snapshot.state, SnapshotState::Failed);
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_is_erased_while_it_is_taken_leaves_nothing() {
    let world = World::new().await;
    let sandbox = written(&world, "web", "base").await;
    world.host.save_takes(Duration::from_secs(1000));
    for fails in [0, 1] {
        world.host.fail_saves(fails);
        let kind = SnapshotKind::Memory;
        let taking = world.fleet.take_snapshot(&reference("web"), None, kind).await.unwrap();
        world.fleet.erase_snapshot(&SnapshotRef::Id(taking.snapshot.id.clone())).await.unwrap();
        assert!(taking.done().await.is_err());
        assert!(world.snapshots().await.is_empty());
    }
    assert_eq!(sandbox.status().parent, None);
    sandbox.delete().await;
    assert!(world.store.saves().is_empty());
}

#[tokio::test(start_paused = true)]
async fn snapshot_names_are_unique() {
    let world = World::new().await;
    written(&world, "web", "base").await;
    snapshot(&world, "web", "base").await;
    let name = Some("base".parse().unwrap());
    let again = world.fleet.take_snapshot(&reference("web"), name, SnapshotKind::Memory).await;
    assert!(matches!(refusal(again.map(|_| ())), Refusal::SnapshotNameTaken(_)));
}

#[tokio::test(start_paused = true)]
async fn snapshots_of_another_engine_version_are_refused_with_the_reason() {
    let world = World::new().await;
    written(&world, "web", "base").await;
    snapshot(&world, "web", "base").await;
    world.fleet.shutdown(ShutdownMode::Durable).await;
    let engine = FakeEngine::of_version(Arc::clone(&world.host), "1");
    let fleet = Fleet::recover(parts(engine, &world.store, &world.memory)).await.unwrap();
    let point = fleet.restore_point(&named("base")).await.unwrap();
    let spec = SandboxSpec { name: None, ..point.spec().clone() };
    let begun = fleet.begin(&point, spec).await.map(|_| ());
    let Refusal::Incompatible { reason, .. } = refusal(begun) else { panic!() };
    assert!(reason.contains("version 0") && reason.contains('1'), "{reason}");
    let woken = fleet.find(&reference("web")).unwrap().awake().await;
    assert!(crate::chain(&woken.unwrap_err()).contains("version 0"));
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_goes_back_to_a_snapshot_in_place() {
    let world = World::new().await;
    let sandbox = written(&world, "web", "base").await;
    let base = snapshot(&world, "web", "base").await;
    for asleep in [None, Some(false), Some(true)] {
        drop(sandbox.awake().await.unwrap());
        world.host.set_memory(sandbox.id(), "broken");
        if let Some(cold) = asleep {
            sandbox.sleep(cold).await.unwrap();
        }
        let restored = world.fleet.restore(&reference("web"), &named("base")).await.unwrap();
        assert_eq!(restored.id(), sandbox.id());
        assert_eq!(world.host.memory(sandbox.id()).as_deref(), Some("base"));
        assert_eq!(sandbox.status().parent.as_ref(), Some(&base.id));
        assert_eq!(world.host.alive().len(), 1);
    }
    assert_eq!(world.store.saves().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_failed_sandbox_can_be_restored() {
    let world = World::new().await;
    let sandbox = written(&world, "web", "base").await;
    snapshot(&world, "web", "base").await;
    world.host.fail_starts(1);
    let other = world.create("other").await;
    until(&other, State::Failed).await;
    world.fleet.restore(&reference("other"), &named("base")).await.unwrap();
    assert_eq!(world.host.memory(other.id()).as_deref(), Some("base"));
    assert_ne!(other.id(), sandbox.id());
}

// === Pools ===

fn pool(size: usize) -> PoolRecord {
    changes::pool(size, None)
}

async fn full(world: &World, size: usize) {
    let filled = async {
        while world.fleet.pools().first().is_none_or(|pool| pool.ready < size) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(SOON, filled).await.expect("the pool never filled");
}

#[tokio::test(start_paused = true)]
async fn a_pool_keeps_frozen_machines_that_creations_take() {
    let world = World::new().await;
    world.fleet.create_pool(pool(2)).await.unwrap();
    full(&world, 2).await;
    assert!(world.host.alive().iter().all(|id| world.host.paused(id)));
    let sandbox = world.running("web").await;
    assert!(!world.host.paused(sandbox.id()));
    full(&world, 2).await;
    let stock = &world.fleet.pools()[0];
    assert_eq!((stock.hits, stock.misses, world.host.boots()), (1, 0, 3));
    world.fleet.erase_pool(&"ready".parse().unwrap()).await.unwrap();
    assert_eq!(world.host.alive().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn who_takes_a_machine_goes_before_its_replacement_unless_most_are_gone() {
    let world = World::new().await;
    world.fleet.create_pool(pool(4)).await.unwrap();
    full(&world, 4).await;
    let begun = tokio::time::Instant::now();
    let _first = world.running("one").await;
    assert_eq!(world.host.boots(), 4);
    full(&world, 4).await;
    let refilled_after = begun.elapsed();
    assert!(refilled_after >= Duration::from_millis(100), "{refilled_after:?}");
    let begun = tokio::time::Instant::now();
    let _others = (world.running("two").await, world.running("three").await);
    full(&world, 4).await;
    assert!(begun.elapsed() < Duration::from_millis(100), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_unlike_the_pool_is_not_taken_from_it() {
    let world = World::new().await;
    world.fleet.create_pool(pool(1)).await.unwrap();
    full(&world, 1).await;
    let mut other = spec(Some("web"));
    other.resources.memory_mib += 1;
    drop(world.fleet.create(other).await.unwrap().awake().await.unwrap());
    assert_eq!(world.fleet.pools()[0].hits, 0);
}

#[tokio::test(start_paused = true)]
async fn forks_take_from_a_pool_of_their_snapshot() {
    let world = World::new().await;
    written(&world, "web", "base").await;
    let base = snapshot(&world, "web", "base").await;
    let point = world.fleet.restore_point(&named("base")).await.unwrap();
    let from = Some((base.id, point.save.id.clone()));
    world.fleet.create_pool(PoolRecord { from, ..pool(1) }).await.unwrap();
    full(&world, 1).await;
    let copy = fork(&world, &point, "copy").await;
    assert_eq!(world.host.memory(copy.id()).as_deref(), Some("base"));
    assert_eq!(world.fleet.pools()[0].hits, 1);
}

#[tokio::test(start_paused = true)]
async fn a_name_that_is_taken_costs_the_pool_nothing() {
    let world = World::new().await;
    world.running("web").await;
    world.fleet.create_pool(pool(1)).await.unwrap();
    full(&world, 1).await;
    assert!(world.fleet.create(spec(Some("web"))).await.is_err());
    assert_eq!(world.fleet.pools()[0].ready, 1);
    assert_eq!(world.host.boots(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_pool_comes_back_after_a_restart_and_old_machines_are_swept_away() {
    let world = World::new().await;
    world.fleet.create_pool(pool(2)).await.unwrap();
    full(&world, 2).await;
    let world = world.restart().await;
    full(&world, 2).await;
    assert_eq!(world.host.alive().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_can_not_be_filled_says_why_and_goes_on_trying() {
    let world = World::new().await;
    world.host.fail_starts(2);
    world.fleet.create_pool(pool(1)).await.unwrap();
    let failing = async {
        while world.fleet.pools()[0].reason.is_none() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(SOON, failing).await.unwrap();
    full(&world, 1).await;
    assert_eq!(world.fleet.pools()[0].reason, None);
}

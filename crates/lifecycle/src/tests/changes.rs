//! What can be changed of a sandbox while it lives; queues, secrets, entrypoints, logs, the archive.

use std::time::Duration;

use torpor_protocol::api::{Resize, UpdateSandbox};
use torpor_protocol::guest::Request;
use torpor_protocol::{EndReason, Network, PortAccess, SandboxSpec, StandbyPolicy, State, Tier};

use super::{SOON, World, reference, refusal, spec, until};
use crate::ledger::ArchiveLedger as _;
use crate::store::{PoolRecord, Search};
use crate::{Error, Plan, Refusal, Sandbox};

fn named(name: &str) -> UpdateSandbox {
    UpdateSandbox { name: Some(name.parse().unwrap()), ..UpdateSandbox::default() }
}

// === Names ===

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_is_renamed_is_found_by_its_new_name_only() {
    let world = World::new().await;
    let sandbox = world.running("web").await;
    world.fleet.update(&sandbox, named("shop")).await.unwrap();
    assert_eq!(world.find("shop").unwrap().id(), sandbox.id());
    assert!(matches!(refusal(world.find("web").map(|_| ())), Refusal::NoSuchSandbox(_)));
    world.running("web").await;
    let world = world.restart().await;
    assert_eq!(world.find("shop").unwrap().id(), sandbox.id());
    world.fleet.delete(&reference("shop")).await.unwrap();
    world.running("shop").await;
}

#[tokio::test(start_paused = true)]
async fn a_name_that_is_taken_changes_nothing() {
    let world = World::new().await;
    let sandbox = world.running("web").await;
    world.running("shop").await;
    let renamed = world.fleet.update(&sandbox, named("shop")).await;
    assert!(matches!(refusal(renamed), Refusal::NameTaken(_)));
    assert_eq!(world.find("web").unwrap().id(), sandbox.id());
}

#[tokio::test(start_paused = true)]
async fn a_name_is_free_again_when_the_ledger_did_not_take_it() {
    let world = World::new().await;
    let sandbox = world.running("web").await;
    world.store.fail(true);
    world.fleet.update(&sandbox, named("shop")).await.unwrap_err();
    world.store.fail(false);
    assert_eq!(world.find("web").unwrap().id(), sandbox.id());
    world.running("shop").await;
}

// === Limits ===

#[tokio::test(start_paused = true)]
async fn network_resources_and_ports_change_while_it_runs_and_while_it_sleeps_in_memory() {
    let world = World::new().await;
    let sandbox = world.running("web").await;
    let update = UpdateSandbox {
        network: Some(Network::CLOSED),
        ports: Some(PortAccess { exposed: vec![80], public: true }),
        resources: Some(Resize { cpus: Some(2.0), ..Resize::default() }),
        ..UpdateSandbox::default()
    };
    world.fleet.update(&sandbox, update).await.unwrap();
    let (network, resources) = world.host.limits(sandbox.id()).unwrap();
    assert_eq!((network, resources.cpus), (Network::CLOSED, 2.0));
    assert_eq!(sandbox.status().spec.ports.unwrap().exposed, [80]);
    sandbox.sleep(false).await.unwrap();
    let open = UpdateSandbox { network: Some(Network::default()), ..UpdateSandbox::default() };
    world.fleet.update(&sandbox, open).await.unwrap();
    assert_eq!(world.host.limits(sandbox.id()).unwrap().0, Network::default());
    assert_eq!(sandbox.status().tier, Some(Tier::Warm));
}

#[tokio::test(start_paused = true)]
async fn what_the_engine_refuses_changes_nothing_at_all() {
    let world = World::new().await;
    let sandbox = world.running("web").await;
    let before = (world.host.limits(sandbox.id()), sandbox.status().spec);
    world.host.fail_resizes(1);
    let update = UpdateSandbox {
        network: Some(Network::CLOSED),
        resources: Some(Resize { memory_mib: Some(2048), ..Resize::default() }),
        ..UpdateSandbox::default()
    };
    assert!(matches!(world.fleet.update(&sandbox, update).await, Err(Error::Engine(_))));
    assert_eq!((world.host.limits(sandbox.id()), sandbox.status().spec), before);
}

#[tokio::test(start_paused = true)]
async fn what_the_ledger_does_not_take_is_set_back() {
    let world = World::new().await;
    let sandbox = world.running("web").await;
    world.store.fail(true);
    let update = UpdateSandbox { network: Some(Network::CLOSED), ..UpdateSandbox::default() };
    world.fleet.update(&sandbox, update).await.unwrap_err();
    assert_eq!(world.host.limits(sandbox.id()).unwrap().0, Network::default());
}

#[tokio::test(start_paused = true)]
async fn a_cold_sandbox_has_its_network_changed_for_its_wake_and_keeps_its_resources() {
    let world = World::new().await;
    let sandbox = world.running("web").await;
    sandbox.sleep(true).await.unwrap();
    let update = UpdateSandbox { network: Some(Network::CLOSED), ..UpdateSandbox::default() };
    world.fleet.update(&sandbox, update).await.unwrap();
    let resize = Resize { memory_mib: Some(2048), ..Resize::default() };
    let update = UpdateSandbox { resources: Some(resize), ..UpdateSandbox::default() };
    let refused = world.fleet.update(&sandbox, update).await;
    assert!(matches!(refusal(refused), Refusal::ResizeAsleep(_)));
    assert_eq!(sandbox.status().tier, Some(Tier::Cold));
    sandbox.wake().await.unwrap();
    assert_eq!(world.host.limits(sandbox.id()).unwrap().0, Network::CLOSED);
}

// === Queues ===

/// One that waits for room until then.
async fn enqueue(world: &World, name: &str, until_ms: u64) -> Result<Sandbox, Error> {
    let plan = Plan { queued_until_ms: Some(until_ms), ..Plan::default() };
    world.fleet.create_from(spec(Some(name)), None, plan).await
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_waits_for_room_and_runs_when_there_is_some() {
    let world = World::new().await;
    world.memory.set_available_mib(0);
    let sandbox = enqueue(&world, "web", u64::MAX).await.unwrap();
    let mut status = sandbox.watch();
    let waits = status.wait_for(|status| status.reason.is_some()).await.unwrap().clone();
    assert_eq!((waits.state, waits.queued_until_ms), (State::Creating, Some(u64::MAX)));
    let world = world.restart().await;
    let sandbox = world.find("web").unwrap();
    assert!(world.host.alive().is_empty());
    world.memory.set_available_mib(u64::MAX);
    drop(sandbox.awake().await.unwrap());
    assert_eq!(sandbox.status().queued_until_ms, None);
    assert_eq!(world.store.record_of(sandbox.id()).unwrap().facts.queued_until_ms, None);
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_room_in_vain_ends_and_is_remembered_with_the_reason() {
    let world = World::new().await;
    world.memory.set_available_mib(0);
    let until_ms = world.fleet.clock().now_ms() + 60_000;
    let late = enqueue(&world, "late", until_ms).await.unwrap();
    let given_up = enqueue(&world, "given-up", u64::MAX).await.unwrap();
    given_up.delete().await;
    until(&late, State::Terminated).await;
    for (sandbox, reason) in [(&late, EndReason::NoCapacity), (&given_up, EndReason::Cancelled)] {
        let ended = world.store.find_archived(sandbox.id()).await.unwrap().unwrap();
        assert_eq!(ended.reason, Some(reason));
    }
    world.memory.set_available_mib(u64::MAX);
    world.running("late").await;
}

// === Secrets and entrypoints ===

fn with_secret() -> SandboxSpec {
    SandboxSpec { secrets: vec!["TOKEN".parse().unwrap()], ..spec(Some("web")) }
}

#[tokio::test(start_paused = true)]
async fn processes_get_the_value_of_a_secret_and_nobody_else_does() {
    let world = World::new().await;
    world.store.set_secret("TOKEN", Some("hunter2"));
    let sandbox = world.fleet.create(with_secret()).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    let told = world.host.asked(sandbox.id()).into_iter().find_map(|request| {
        let Request::Identify(identity) = request else { return None };
        identity.env.get("TOKEN").cloned()
    });
    assert_eq!(told.as_deref(), Some("hunter2"));
    let record = world.store.record_of(sandbox.id()).unwrap();
    assert!(!format!("{:?}{record:?}", sandbox.status()).contains("hunter2"));
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_is_missing_fails_a_start_and_no_wake() {
    let world = World::new().await;
    let sandbox = world.fleet.create(with_secret()).await.unwrap();
    assert!(sandbox.awake().await.is_err());
    let reason = until(&sandbox, State::Failed).await.message.unwrap();
    assert!(reason.contains("TOKEN"), "{reason}");
    sandbox.delete().await;
    world.store.set_secret("TOKEN", Some("hunter2"));
    let sandbox = world.fleet.create(with_secret()).await.unwrap();
    sandbox.sleep(true).await.unwrap();
    world.store.set_secret("TOKEN", None);
    drop(sandbox.awake().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_new_value_of_a_secret_is_there_after_any_sleep() {
    let world = World::new().await;
    world.store.set_secret("TOKEN", Some("old"));
    let sandbox = world.fleet.create(with_secret()).await.unwrap();
    for (cold, value) in [(false, "warm"), (true, "cold")] {
        sandbox.sleep(cold).await.unwrap();
        world.store.set_secret("TOKEN", Some(value));
        sandbox.wake().await.unwrap();
        let told = world.host.asked(sandbox.id()).into_iter().rev().find_map(|request| {
            let Request::Identify(identity) = request else { return None };
            identity.env.get("TOKEN").cloned()
        });
        assert_eq!(told.as_deref(), Some(value));
    }
    // One that can't be had is no reason not to wake.
    sandbox.sleep(false).await.unwrap();
    world.store.set_secret("TOKEN", None);
    sandbox.wake().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_entrypoint_is_started_when_it_boots_and_not_when_it_wakes() {
    let world = World::new().await;
    let entrypoint = vec!["serve".to_owned()];
    let wish = SandboxSpec { entrypoint, ..spec(Some("web")) };
    let sandbox = world.fleet.create(wish).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    let starts = |world: &World| {
        let asked = world.host.asked(sandbox.id());
        asked.iter().filter(|request| matches!(request, Request::Start(_))).count()
    };
    assert_eq!(starts(&world), 1);
    sandbox.sleep(true).await.unwrap();
    sandbox.wake().await.unwrap();
    assert_eq!(starts(&world), 0);
}

// === Logs and the archive ===

#[tokio::test(start_paused = true)]
async fn what_processes_said_is_read_without_waking_and_after_the_end() {
    let world = World::new().await;
    let sandbox = world.running("web").await;
    let search = Search { limit: 10, ..Search::default() };
    let texts = async |world: &World| {
        let lines = world.fleet.log(sandbox.id(), &search).await.unwrap();
        lines.into_iter().map(|line| line.text).collect::<Vec<_>>()
    };
    world.host.say(sandbox.id(), 1, "one");
    assert_eq!(texts(&world).await, ["one"]);
    world.host.say(sandbox.id(), 2, "two");
    sandbox.sleep(true).await.unwrap();
    assert_eq!(texts(&world).await, ["one", "two"]);
    assert_eq!(sandbox.status().tier, Some(Tier::Cold));
    sandbox.delete().await;
    assert_eq!(texts(&world).await, ["one", "two"]);
    let nobody = world.fleet.log(&torpor_protocol::SandboxId::random(), &search).await;
    assert!(matches!(refusal(nobody), Refusal::NoSuchSandbox(_)));
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_ended_is_in_the_archive_and_not_in_the_ledger() {
    let world = World::new().await;
    let sandbox = world.running("web").await;
    sandbox.delete().await;
    assert_eq!(world.recorded(), 0);
    let ended = world.store.archived(None, 10).await.unwrap();
    assert_eq!(ended.len(), 1);
    assert_eq!((&ended[0].id, &ended[0].reason), (sandbox.id(), &None));
}

// === Pools ===

pub(super) fn pool(size: usize, max: Option<usize>) -> PoolRecord {
    PoolRecord {
        name: "ready".parse().unwrap(),
        size,
        spec: spec(None),
        from: None,
        max,
        created_at_ms: 1,
        updated_at_ms: 1,
    }
}

async fn filled(world: &World, size: usize) {
    let filled = async {
        while world.fleet.pools()[0].ready != size {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(SOON, filled).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn no_more_sandboxes_are_claimed_from_a_pool_than_it_may_have() {
    let world = World::new().await;
    world.fleet.create_pool(pool(1, Some(2))).await.unwrap();
    let claim = || SandboxSpec { pool: Some("ready".parse().unwrap()), ..spec(None) };
    let claims = [claim(), claim(), claim()].map(|spec| world.fleet.create(spec));
    let claimed: Vec<_> = Box::pin(futures(claims)).await;
    let (made, refused): (Vec<_>, Vec<_>) = claimed.into_iter().partition(Result::is_ok);
    assert_eq!((made.len(), refused.len()), (2, 1));
    assert_eq!(world.fleet.pools()[0].claimed.len(), 2);
    made.into_iter().next().unwrap().unwrap().delete().await;
    world.fleet.create(claim()).await.unwrap();
}

async fn futures<F: Future>(all: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut done = Vec::new();
    for one in all {
        done.push(one.await);
    }
    done
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_becomes_another_one_gives_no_machine_of_the_old_kind() {
    let world = World::new().await;
    world.fleet.create_pool(pool(2, None)).await.unwrap();
    filled(&world, 2).await;
    let closed = SandboxSpec { network: Network::CLOSED, ..spec(None) };
    let changed = PoolRecord { spec: closed.clone(), size: 1, ..pool(1, None) };
    world.fleet.update_pool(changed).await.unwrap();
    filled(&world, 1).await;
    let standby = StandbyPolicy { idle_after_ms: 0, ..StandbyPolicy::default() };
    let wish = SandboxSpec { pool: Some("ready".parse().unwrap()), standby, ..closed };
    let sandbox = world.fleet.create(wish).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    assert_eq!(world.host.limits(sandbox.id()).unwrap().0, Network::CLOSED);
    assert_eq!(world.fleet.pools()[0].hits, 1);
}

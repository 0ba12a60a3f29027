//! Falling asleep and waking.

use super::*;
use torpor_protocol::guest::Request;
use torpor_protocol::{Hooks, SandboxId, Tier};

async fn asleep(sandbox: &Sandbox, tier: Tier) -> Status {
    let mut status = sandbox.watch();
    let reached = status.wait_for(|status| status.tier == Some(tier));
    tokio::time::timeout(SOON, reached).await.expect("it never slept").unwrap().clone()
}

async fn durable(sandbox: &Sandbox) {
    let mut status = sandbox.watch();
    let reached = status.wait_for(|status| status.durable);
    tokio::time::timeout(SOON, reached).await.expect("it was never durable").unwrap();
}

pub(super) async fn sleeper(world: &World, name: &str) -> Sandbox {
    let sandbox = world.fleet.create(sleepy(name)).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    world.host.set_memory(sandbox.id(), "remember");
    sandbox
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_nobody_uses_freezes_is_saved_and_at_last_leaves_memory() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    assert!(!asleep(&sandbox, Tier::Warm).await.durable);
    assert!(world.host.paused(sandbox.id()));
    durable(&sandbox).await;
    assert_eq!(world.host.alive().len(), 1);
    let mut status = sandbox.watch();
    let cold = status.wait_for(|status| status.tier == Some(Tier::Cold));
    tokio::time::timeout(Duration::from_secs(7200), cold).await.unwrap().unwrap();
    assert!(world.host.alive().is_empty());
    assert_eq!(world.host.saves(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_next_request_wakes_it_as_it_was_from_either_sleep() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    asleep(&sandbox, Tier::Warm).await;
    drop(sandbox.awake().await.unwrap());
    assert_eq!(world.host.revives(), 0);
    sandbox.sleep(true).await.unwrap();
    assert!(world.host.alive().is_empty());
    drop(sandbox.awake().await.unwrap());
    assert_eq!(world.host.memory(sandbox.id()).as_deref(), Some("remember"));
    assert_eq!((world.host.boots(), world.host.revives()), (1, 1));
    assert_eq!(sandbox.status().wakes, 2);
}

#[tokio::test(start_paused = true)]
async fn a_leased_sandbox_never_goes_to_standby() {
    let world = World::new().await;
    let sandbox = world.fleet.create(sleepy("web")).await.unwrap();
    let lease = sandbox.awake().await.unwrap();
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(sandbox.status().state, State::Running);
    drop(lease);
    asleep(&sandbox, Tier::Warm).await;
}

#[tokio::test(start_paused = true)]
async fn a_process_that_wants_it_awake_keeps_it_awake_until_it_ends() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    world.host.keep_awake(sandbox.id(), 1);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(sandbox.status().state, State::Running);
    world.host.keep_awake(sandbox.id(), 0);
    asleep(&sandbox, Tier::Warm).await;
}

#[tokio::test(start_paused = true)]
async fn an_idle_time_of_zero_means_never() {
    let world = World::new().await;
    let sandbox = world.running("web").await;
    tokio::time::sleep(Duration::from_secs(100_000)).await;
    assert_eq!(sandbox.status().state, State::Running);
}

#[tokio::test(start_paused = true)]
async fn a_thousand_requests_to_a_cold_sandbox_cause_one_wake() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    sandbox.sleep(true).await.unwrap();
    world.host.start_takes(Duration::from_secs(1));
    let mut requests = tokio::task::JoinSet::new();
    for _ in 0..1000 {
        let sandbox = sandbox.clone();
        requests.spawn(async move { sandbox.awake().await.is_ok() });
    }
    assert!(requests.join_all().await.into_iter().all(|served| served));
    assert_eq!(world.host.revives(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_request_while_it_is_being_saved_is_served() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    world.host.save_takes(Duration::from_secs(5));
    let sleep = tokio::spawn({
        let sandbox = sandbox.clone();
        async move { sandbox.sleep(false).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(world.host.paused(sandbox.id()));
    drop(sandbox.awake().await.unwrap());
    sleep.await.unwrap().unwrap();
    assert_eq!(world.host.memory(sandbox.id()).as_deref(), Some("remember"));
}

#[tokio::test(start_paused = true)]
async fn without_auto_wake_requests_are_refused_until_somebody_wakes_it() {
    let world = World::new().await;
    let mut spec = sleepy("web");
    spec.standby.auto_wake = false;
    let sandbox = world.fleet.create(spec).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    for cold in [false, true] {
        sandbox.sleep(cold).await.unwrap();
        assert!(matches!(refusal(sandbox.awake().await), Refusal::Asleep(_)));
        sandbox.wake().await.unwrap();
        drop(sandbox.awake().await.unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn put_to_sleep_under_a_request_the_request_hears_it() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    let lease = sandbox.awake().await.unwrap();
    sandbox.sleep(false).await.unwrap();
    let asked = lease.guest().done(&Request::Health).await;
    assert!(matches!(asked, Err(crate::guest::GuestError::Asleep)), "{asked:?}");
    drop(sandbox.awake().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_leaves_the_sandbox_running_and_says_so() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    world.host.fail_saves(1);
    let refused = sandbox.sleep(true).await.unwrap_err();
    assert!(crate::chain(&refused).contains("disk is full"), "{refused}");
    assert_eq!(until(&sandbox, State::Running).await.state, State::Running);
    drop(sandbox.awake().await.unwrap());
    world.store.fail_commits(1);
    assert!(sandbox.sleep(true).await.is_err());
    drop(sandbox.awake().await.unwrap());
    sandbox.sleep(true).await.unwrap();
    assert_eq!(world.store.saves().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_sleeping_sandbox_that_can_not_be_saved_is_tried_again() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    world.host.fail_saves(3);
    asleep(&sandbox, Tier::Warm).await;
    durable(&sandbox).await;
    assert_eq!(world.host.saves(), 1);
    assert_eq!(sandbox.status().reason, None);
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_dies_asleep_is_brought_back_from_its_save() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    sandbox.sleep(false).await.unwrap();
    world.host.crash(sandbox.id(), "killed");
    asleep(&sandbox, Tier::Cold).await;
    drop(sandbox.awake().await.unwrap());
    assert_eq!(world.host.memory(sandbox.id()).as_deref(), Some("remember"));
    assert_eq!(sandbox.status().recovered_from_ms, None, "nothing was lost");
}

#[tokio::test(start_paused = true)]
async fn a_running_machine_that_dies_comes_back_from_its_last_save_and_says_so() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    sandbox.sleep(true).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    world.host.set_memory(sandbox.id(), "newer");
    world.host.crash(sandbox.id(), "killed");
    let status = asleep(&sandbox, Tier::Cold).await;
    assert_eq!(status.reason, Some(ReasonCode::Recovered));
    assert!(status.message.unwrap().contains("killed"));
    assert!(status.recovered_from_ms.is_some());
    drop(sandbox.awake().await.unwrap());
    assert_eq!(world.host.memory(sandbox.id()).as_deref(), Some("remember"));
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_does_not_thaw_is_replaced_by_its_save() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    sandbox.sleep(false).await.unwrap();
    world.host.fail_resumes(1);
    drop(sandbox.awake().await.unwrap());
    assert_eq!(world.host.memory(sandbox.id()).as_deref(), Some("remember"));
    assert_eq!(world.host.revives(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_wake_that_fails_loses_nothing_and_is_tried_at_the_next_request() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    sandbox.sleep(true).await.unwrap();
    world.host.fail_starts(1);
    assert!(sandbox.awake().await.is_err());
    assert_eq!(sandbox.status().state, State::Asleep);
    drop(sandbox.awake().await.unwrap());
    assert_eq!(world.host.memory(sandbox.id()).as_deref(), Some("remember"));
}

#[tokio::test(start_paused = true)]
async fn a_corrupt_save_is_detected_before_it_runs() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    sandbox.sleep(true).await.unwrap();
    let save = world.store.record_of(sandbox.id()).unwrap().save.unwrap();
    world.store.corrupt(&save);
    let error = crate::chain(&sandbox.awake().await.unwrap_err());
    assert!(error.contains("corrupt: memory"), "{error}");
    assert_eq!(world.host.revives(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_warm_wake_writes_the_ledger_only_if_it_was_durable() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    asleep(&sandbox, Tier::Warm).await;
    let before = world.store.writes();
    drop(sandbox.awake().await.unwrap());
    assert_eq!(world.store.writes(), before);
    sandbox.sleep(false).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    let record = world.store.record_of(sandbox.id()).unwrap();
    assert_eq!(record.state, crate::store::PersistedState::Running);
}

#[tokio::test(start_paused = true)]
async fn under_pressure_the_one_unused_longest_leaves_memory_first() {
    let world = World::new().await;
    let (first, second) = (sleeper(&world, "one").await, sleeper(&world, "two").await);
    drop(first.awake().await.unwrap());
    tokio::time::sleep(Duration::from_millis(10)).await;
    drop(second.awake().await.unwrap());
    asleep(&first, Tier::Warm).await;
    asleep(&second, Tier::Warm).await;
    assert_eq!(world.fleet.demote_least_used().await.as_ref(), Some(first.id()));
    asleep(&first, Tier::Cold).await;
    assert_eq!(second.status().tier, Some(Tier::Warm));
    assert_eq!(world.fleet.demote_least_used().await.as_ref(), Some(second.id()));
    asleep(&second, Tier::Cold).await;
    assert_eq!(world.fleet.demote_least_used().await, None);
}

#[tokio::test(start_paused = true)]
async fn a_stop_leaves_everything_durable_and_no_machine() {
    let world = World::new().await;
    let busy = sleeper(&world, "busy").await;
    let lease = busy.awake().await.unwrap();
    let idle = sleeper(&world, "idle").await;
    asleep(&idle, Tier::Warm).await;
    drop(lease);
    let world = world.restart_after(ShutdownMode::Durable).await;
    until(&world.find("busy").unwrap(), State::Running).await;
    asleep(&world.find("idle").unwrap(), Tier::Cold).await;
    for name in ["busy", "idle"] {
        let sandbox = world.find(name).unwrap();
        drop(sandbox.awake().await.unwrap());
        assert_eq!(world.host.memory(sandbox.id()).as_deref(), Some("remember"), "{name}");
        assert_eq!(sandbox.status().recovered_from_ms, None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stop_that_can_not_save_leaves_the_machine_for_the_next_daemon() {
    let world = World::new().await;
    sleeper(&world, "web").await;
    world.host.fail_saves(1);
    let world = world.restart_after(ShutdownMode::Durable).await;
    let sandbox = world.find("web").unwrap();
    drop(sandbox.awake().await.unwrap());
    assert_eq!(world.host.memory(sandbox.id()).as_deref(), Some("remember"));
    assert_eq!(world.host.revives(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_new_daemon_finds_sleepers_asleep() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    asleep(&sandbox, Tier::Warm).await;
    let world = world.restart().await;
    let sandbox = world.find("web").unwrap();
    asleep(&sandbox, Tier::Warm).await;
    assert!(world.host.paused(sandbox.id()));
    drop(sandbox.awake().await.unwrap());
    assert_eq!(world.host.memory(sandbox.id()).as_deref(), Some("remember"));
}

#[tokio::test(start_paused = true)]
async fn after_a_power_cut_what_slept_is_there_and_what_ran_is_back_at_its_save() {
    let world = World::new().await;
    let slept = sleeper(&world, "slept").await;
    slept.sleep(false).await.unwrap();
    let ran = sleeper(&world, "ran").await;
    ran.sleep(true).await.unwrap();
    drop(ran.awake().await.unwrap());
    world.host.set_memory(ran.id(), "newer");
    world.fleet.shutdown(ShutdownMode::Running).await;
    world.host.lose_power();
    let fleet = world.daemon().await;
    for (name, recovered) in [("slept", false), ("ran", true)] {
        let sandbox = fleet.find(&reference(name)).unwrap();
        drop(sandbox.awake().await.unwrap());
        assert_eq!(world.host.memory(sandbox.id()).as_deref(), Some("remember"));
        assert_eq!(sandbox.status().recovered_from_ms.is_some(), recovered, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn hooks_run_before_sleep_and_after_every_wake() {
    let world = World::new().await;
    let mut spec = sleepy("web");
    let words = |text: &str| vec![text.to_owned()];
    let (before_sleep, after_wake) = (words("flush"), words("reconnect"));
    spec.standby.hooks = Hooks { before_sleep, after_wake, ..Hooks::default() };
    let sandbox = world.fleet.create(spec).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    let ran = |world: &World, id: &SandboxId| {
        let asked = world.host.asked(id).into_iter();
        let run = |request| {
            let Request::Run(spec) = request else { return None };
            spec.command.first().cloned()
        };
        asked.filter_map(run).collect::<Vec<_>>()
    };
    assert!(ran(&world, sandbox.id()).is_empty());
    sandbox.sleep(false).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    assert_eq!(ran(&world, sandbox.id()), ["flush", "reconnect"]);
    sandbox.sleep(true).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    assert_eq!(ran(&world, sandbox.id()), ["reconnect"]);
}

#[tokio::test(start_paused = true)]
async fn a_sleeping_sandbox_can_be_changed_and_ends_when_its_time_is_up_without_waking() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    sandbox.sleep(true).await.unwrap();
    let lifetime = Some(Lifetime { max_age_ms: Some(100_000_000), ..Lifetime::default() });
    sandbox.update(UpdateSandbox { lifetime, ..UpdateSandbox::default() }).await.unwrap();
    let mut status = sandbox.watch();
    let over = status.wait_for(|status| status.state == State::Terminated);
    tokio::time::timeout(Duration::from_secs(200_000), over).await.unwrap().unwrap();
    assert_eq!(world.host.revives(), 0);
    assert!(world.store.saves().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_machine_is_revived_on_the_root_it_was_booted_from() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    let root = world.host.root(sandbox.id());
    world.store.renew_images();
    for _ in 0..2 {
        sandbox.sleep(true).await.unwrap();
        drop(sandbox.awake().await.unwrap());
        assert_eq!(world.host.root(sandbox.id()), root);
    }
    let fresh = sleeper(&world, "fresh").await;
    assert_ne!(world.host.root(fresh.id()), root);
}

#[tokio::test(start_paused = true)]
async fn only_the_last_save_of_a_sandbox_is_kept() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    for _ in 0..3 {
        sandbox.sleep(true).await.unwrap();
        drop(sandbox.awake().await.unwrap());
    }
    assert_eq!(world.store.saves().len(), 1);
    sandbox.delete().await;
    assert!(world.store.saves().is_empty());
}

#[tokio::test(start_paused = true)]
async fn when_many_are_awake_for_nothing_those_unused_longest_fall_asleep_before_their_time() {
    let world = World::new().await;
    let most = Policy::default().idle_awake_max;
    let mut spec = sleepy("x");
    // One that is to stay awake for long has work to do.
    spec.standby.idle_after_ms = 3_600_000;
    spec.name = Some("patient".parse().unwrap());
    let patient = world.fleet.create(spec.clone()).await.unwrap();
    drop(patient.awake().await.unwrap());
    spec.standby.idle_after_ms = 60_000;
    let mut all = Vec::new();
    for n in 0..most + 3 {
        spec.name = Some(format!("box-{n}").parse().unwrap());
        let sandbox = world.fleet.create(spec.clone()).await.unwrap();
        drop(sandbox.awake().await.unwrap());
        tokio::time::sleep(Duration::from_millis(10)).await;
        all.push(sandbox);
    }
    for sandbox in &all[..3] {
        asleep(sandbox, Tier::Warm).await;
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(all[..3].iter().all(|sandbox| sandbox.status().tier == Some(Tier::Warm)));
    assert!(all[3..].iter().all(|sandbox| sandbox.status().state == State::Running));
    assert_eq!(patient.status().state, State::Running);
}

#[tokio::test(start_paused = true)]
async fn a_new_daemon_knows_what_sleepers_have_on_disk() {
    let world = World::new().await;
    sleeper(&world, "web").await.sleep(true).await.unwrap();
    let world = world.restart().await;
    let status = asleep(&world.find("web").unwrap(), Tier::Cold).await;
    assert_eq!(status.saved_bytes, 7);
}

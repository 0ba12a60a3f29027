//! Promises of every engine: nothing here knows which one it is asked of.

use std::collections::HashSet;
use std::time::Duration;

use torpor_lifecycle::engine::{BootPlan, EngineError, Machine};
use torpor_lifecycle::guest::Guest;

use crate::world::{PATIENCE, World, boot, eventually, greet, revive, stage, unquiesce, world};

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_boots_and_its_agent_says_hello() {
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    assert!(!guest.health().await.unwrap().agent_version.is_empty());
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_share_nothing() {
    let Some(world) = world().await else { return };
    let (first, second) = (world.plan(), world.plan());
    let (one, in_one) = boot(&**world.engine(), first.clone()).await;
    let (two, in_two) = boot(&**world.engine(), second.clone()).await;
    world.note(&first.id, &in_one, "secret").await;
    assert_eq!(world.noted(&second.id, &in_two).await, "");
    one.kill().await.unwrap();
    in_two.health().await.expect("it is still here");
    two.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_machine_does_nothing_and_goes_on_when_resumed() {
    let Some(world) = world().await else { return };
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    assert!(!machine.paused());
    world.pause(&mut machine, &guest).await;
    machine.pause().await.expect("twice is once");
    assert!(machine.paused());
    // Time has to pass for this claim: there is no event for "nothing happened".
    let silence = tokio::time::timeout(Duration::from_millis(300), guest.health()).await;
    assert!(silence.is_err(), "a paused machine answered");
    machine.resume().await.unwrap();
    machine.resume().await.expect("twice is once");
    assert!(!machine.paused());
    unquiesce(&**world.engine(), &guest).await;
    guest.health().await.expect("it goes on");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_is_being_paged_out_can_be_resumed_at_once() {
    let Some(world) = world().await else { return };
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    machine.page_out();
    guest.health().await.expect("a machine that runs is left alone");
    world.pause(&mut machine, &guest).await;
    machine.page_out();
    machine.page_out();
    world.resume(&mut machine, &guest).await;
    guest.health().await.expect("it goes on");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_is_paused_can_be_killed() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    world.pause(&mut machine, &guest).await;
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_outlives_its_daemon_and_is_adopted_by_the_next() {
    let Some(mut world) = world().await else { return };
    let plan = world.plan();
    let (machine, guest) = boot(&**world.engine(), plan.clone()).await;
    world.note(&plan.id, &guest, "kept").await;
    drop((machine, guest));
    world.reopen().await;

    let keep = HashSet::from([plan.id.clone()]);
    assert_eq!(world.engine().sweep(&keep).await.unwrap(), 0);
    let machine = world.engine().adopt(&plan.id).await.unwrap().expect("it is there");
    let guest = greet(machine.channel()).await;
    assert_eq!(world.noted(&plan.id, &guest).await, "kept");
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
    assert!(world.engine().adopt(&plan.id).await.unwrap().is_none(), "the dead are not adopted");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_machine_is_adopted_paused_and_can_be_saved_resumed_or_killed() {
    let Some(mut world) = world().await else { return };
    let (plan, other, save) = (world.plan(), world.plan(), stage());
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    world.note(&plan.id, &guest, "kept").await;
    world.pause(&mut machine, &guest).await;
    let mut machine = adopted(&mut world, &plan, (machine, guest)).await;
    machine.save(save.path()).await.unwrap();
    assert!(machine.paused(), "nor does a save resume it");
    machine.resume().await.unwrap();
    let guest = greet(machine.channel()).await;
    unquiesce(&**world.engine(), &guest).await;
    assert_eq!(world.noted(&plan.id, &guest).await, "kept");
    let (copy, in_copy) = revive(&world, &other, save.path()).await;
    assert_eq!(world.noted(&other.id, &in_copy).await, "kept");
    copy.kill().await.unwrap();
    drop(in_copy);
    world.pause(&mut machine, &guest).await;
    let machine = adopted(&mut world, &plan, (machine, guest)).await;
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

/// The paused machine, as the next daemon has it.
async fn adopted(
    world: &mut World,
    plan: &BootPlan,
    before: (Box<dyn Machine>, Guest),
) -> Box<dyn Machine> {
    drop(before);
    world.reopen().await;
    assert_eq!(world.engine().sweep(&HashSet::from([plan.id.clone()])).await.unwrap(), 0);
    let machine = world.engine().adopt(&plan.id).await.unwrap().expect("it is there");
    assert!(machine.paused());
    machine
}

#[tokio::test(flavor = "multi_thread")]
async fn sweep_removes_what_is_not_kept_and_nothing_else() {
    let Some(mut world) = world().await else { return };
    let (kept, gone) = (world.plan(), world.plan());
    let (one, in_one) = boot(&**world.engine(), kept.clone()).await;
    let (two, in_two) = boot(&**world.engine(), gone.clone()).await;
    drop((one, two, in_one, in_two));
    world.reopen().await;

    assert_eq!(world.engine().sweep(&HashSet::from([kept.id.clone()])).await.unwrap(), 1);
    assert_eq!(world.traces(&gone.id), Vec::<String>::new());
    let machine = world.engine().adopt(&kept.id).await.unwrap().expect("it was kept");
    greet(machine.channel()).await.health().await.unwrap();
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_boot_that_nobody_waits_for_any_more_leaves_nothing() {
    let Some(world) = world().await else { return };
    // From before the first step to after the last.
    for after in [0, 3, 15, 40, 80, 110, 140, 200] {
        let plan = world.plan();
        let _ =
            tokio::time::timeout(Duration::from_millis(after), world.engine().boot(plan.clone()))
                .await
                .map(|booted| booted.map(|machine| tokio::spawn(machine.kill())));
        eventually("the machine is gone", || world.traces(&plan.id).is_empty()).await;
    }
    world.engine().close().await;
    eventually("close finds nothing left", || world.gone()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_can_be_booted_again_at_once_after_a_boot_was_given_up() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    for after in [30, 100] {
        let given_up = world.engine().boot(plan.clone());
        let _ = tokio::time::timeout(Duration::from_millis(after), given_up).await;
    }
    let (machine, guest) = boot(&**world.engine(), plan).await;
    guest.health().await.unwrap();
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn many_boots_at_once_all_come_up() {
    let Some(world) = world().await else { return };
    let mut boots = tokio::task::JoinSet::new();
    for _ in 0..world.rounds(12) {
        let (engine, plan) = (world.engine().clone(), world.plan());
        boots.spawn(async move {
            let (machine, guest) = boot(&*engine, plan).await;
            guest.health().await.unwrap();
            machine
        });
    }
    for machine in boots.join_all().await {
        machine.kill().await.unwrap();
    }
    world.engine().close().await;
    eventually("nothing is left", || world.gone()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_is_killed_from_outside_says_so() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, _guest) = boot(&**world.engine(), plan.clone()).await;
    let silence = tokio::time::timeout(Duration::from_millis(50), machine.exited()).await;
    assert!(silence.is_err(), "a live machine has not exited");
    world.kill_sandbox(&plan.id);
    let reason = tokio::time::timeout(PATIENCE, machine.exited()).await.unwrap();
    assert_eq!(reason, "killed by the host: signal 9");
    let again = tokio::time::timeout(PATIENCE, machine.exited()).await.unwrap();
    assert_eq!(again, reason, "it can be asked again");
    machine.kill().await.expect("a dead machine can be removed");
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn close_leaves_machines_alone_and_removes_the_engines_traces_after_the_last() {
    let Some(mut world) = world().await else { return };
    let plan = world.plan();
    let (machine, guest) = boot(&**world.engine(), plan.clone()).await;
    drop((machine, guest));
    world.engine().close().await;
    world.reopen().await;
    let machine = world.engine().adopt(&plan.id).await.unwrap().expect("it went on");
    greet(machine.channel()).await.health().await.unwrap();
    assert!(!world.gone());
    machine.kill().await.unwrap();
    world.engine().close().await;
    // The keeper has said its last word before, and its process ends.
    eventually("nothing is left", || world.gone()).await;
}

/// Whether it was done, or refused by the engine's name.
fn answered<T>(answer: Result<T, EngineError>, kind: &str) -> bool {
    match answer {
        Ok(_) => true,
        Err(EngineError::Unsupported { engine, what }) => {
            assert!((engine == kind || engine == "this") && !what.is_empty(), "{engine}: {what}");
            false
        }
        Err(error) => panic!("neither done nor refused: {error}"),
    }
}

/// What an engine says of its abilities is so.
pub(crate) async fn is_as_it_says(world: &World) {
    let (plan, other, save) = (world.plan(), world.plan(), stage());
    let engine = world.engine();
    let about = engine.about().clone();
    let (mut machine, guest) = boot(&**engine, plan.clone()).await;
    let paused = answered(machine.pause().await, about.kind);
    assert_eq!(paused, about.abilities.warm_standby);
    if paused {
        machine.resume().await.unwrap();
    }
    let processes = crate::world::quiesce(&**engine, &guest).await;
    assert_eq!(processes.iter().any(|p| p.pid == 1), about.abilities.quiesces, "{processes:?}");
    let saved = answered(machine.save(save.path()).await, about.kind);
    assert_eq!(saved, about.abilities.live_snapshots);
    unquiesce(&**engine, &guest).await;
    machine.kill().await.unwrap();
    let changes = engine.changes(save.path());
    assert_eq!(answered(changes, about.kind), about.abilities.saved_files);
    let revived = engine.revive(other, save.path(), &engine.about().version).await;
    let revived = match revived {
        Ok(machine) => answered(machine.kill().await, about.kind),
        Err(error) => answered::<()>(Err(error), about.kind),
    };
    assert_eq!(revived, about.abilities.memory_snapshots);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_engine_says_it_can_it_does_and_the_rest_it_refuses() {
    let Some(world) = world().await else { return };
    is_as_it_says(&world).await;
}

//! Promises of every engine: nothing here knows which one it is asked of.

use std::collections::HashSet;
use std::time::Duration;

use torpor_lifecycle::engine::{Engine, EngineError};
use torpor_protocol::Resources;
use torpor_protocol::guest::Exit;

use crate::world::{PATIENCE, boot, eventually, greet, say, shell, spec, world};

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_boots_and_its_agent_says_hello() {
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    assert!(!guest.health().await.unwrap().agent_version.is_empty());
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_runs_inside_and_its_end_is_told() {
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    assert_eq!(say(&guest, "echo $((6*7))").await, "42");
    assert_eq!(shell(&guest, "exit 3").await.1, Exit::Code { code: 3 });
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_share_nothing() {
    let Some(world) = world().await else { return };
    let (one, in_one) = boot(&**world.engine(), world.plan()).await;
    let (two, in_two) = boot(&**world.engine(), world.plan()).await;
    say(&in_one, "echo secret > /root/file").await;
    assert_eq!(say(&in_two, "ls /root").await, "");
    one.kill().await.unwrap();
    assert_eq!(say(&in_two, "echo still here").await, "still here");
    two.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_machine_does_nothing_and_goes_on_when_resumed() {
    let Some(world) = world().await else { return };
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    let meter = machine.meter();
    say(&guest, "while :; do :; done & sleep 0").await;
    machine.pause().await.unwrap();
    machine.pause().await.expect("twice is once");
    let before = meter.usage().cpu_micros;
    // Time has to pass for this claim: there is no event for "nothing happened".
    let silence = tokio::time::timeout(Duration::from_millis(300), guest.health()).await;
    assert!(silence.is_err(), "a paused machine answered");
    assert_eq!(meter.usage().cpu_micros, before, "a paused machine used the processor");
    machine.resume().await.unwrap();
    machine.resume().await.expect("twice is once");
    guest.health().await.expect("it goes on");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_is_being_paged_out_can_be_resumed_at_once() {
    let Some(world) = world().await else { return };
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    machine.page_out();
    guest.health().await.expect("a machine that runs is left alone");
    machine.pause().await.unwrap();
    machine.page_out();
    machine.page_out();
    machine.resume().await.unwrap();
    guest.health().await.expect("it goes on");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_is_paused_can_be_killed() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, _guest) = boot(&**world.engine(), plan.clone()).await;
    machine.pause().await.unwrap();
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_outlives_its_daemon_and_is_adopted_by_the_next() {
    let Some(mut world) = world().await else { return };
    let plan = world.plan();
    let (machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, "echo kept > /root/file; sleep 1000 & echo $! > /root/pid").await;
    drop((machine, guest));
    world.reopen().await;

    let keep = HashSet::from([plan.id.clone()]);
    assert_eq!(world.engine().sweep(&keep).await.unwrap(), 0);
    let machine = world.engine().adopt(&plan.id).await.unwrap().expect("it is there");
    let guest = greet(machine.channel()).await;
    assert_eq!(
        say(&guest, "cat /root/file; kill -0 $(cat /root/pid) && echo alive").await,
        "kept\nalive"
    );
    assert!(machine.meter().usage().memory_bytes > 0);
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
    assert!(world.engine().adopt(&plan.id).await.unwrap().is_none(), "the dead are not adopted");
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
    assert!(!world.config.runtime_dir.exists(), "close finds nothing left");
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
async fn more_memory_than_the_host_has_is_refused_before_anything_is_made() {
    let Some(world) = world().await else { return };
    let mut plan = world.plan();
    plan.spec = spec(Resources { memory_mib: 1 << 40, ..Resources::default() });
    let Err(error) = world.engine().boot(plan.clone()).await else { panic!("it booted") };
    assert!(matches!(error, EngineError::Capacity { what: "memory", .. }), "{error}");
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn many_boots_at_once_all_come_up() {
    let Some(world) = world().await else { return };
    let mut boots = tokio::task::JoinSet::new();
    for _ in 0..12 {
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
    assert!(!world.config.runtime_dir.exists(), "nothing is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_is_killed_from_outside_says_so() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    let silence = tokio::time::timeout(Duration::from_millis(50), machine.exited()).await;
    assert!(silence.is_err(), "a live machine has not exited");
    world.kill_sandbox(&plan.id);
    let reason = tokio::time::timeout(PATIENCE, machine.exited()).await.unwrap();
    assert_eq!(reason, "killed by the host: signal 9");
    let again = tokio::time::timeout(PATIENCE, machine.exited()).await.unwrap();
    assert_eq!(again, reason, "it can be asked again");
    tokio::time::timeout(PATIENCE, guest.gone()).await.expect("the channel is closed too");
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
    machine.kill().await.unwrap();
    world.engine().close().await;
    assert!(!world.config.runtime_dir.exists());
    assert_eq!(world.keepers(), 0, "the keeper is gone");
}

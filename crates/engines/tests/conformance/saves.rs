//! Saving machines and reviving them: promises of every engine that can.

use std::time::Duration;

use torpor_lifecycle::engine::{ChangeKind, EngineError};

use crate::world::{Installation, boot, eventually, revive, stage, world};

#[tokio::test(flavor = "multi_thread")]
async fn a_revived_machine_remembers() {
    let Some(world) = world().await else { return };
    let (plan, save) = (world.plan(), stage());
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    world.note(&plan.id, &guest, "kept").await;
    let mut processes = world.pause(&mut machine, &guest).await;
    let saved = machine.save(save.path()).await.unwrap();
    assert_eq!(saved.pause, Duration::ZERO, "it stood still anyway");
    processes.extend(saved.processes);
    assert!(processes.iter().any(|p| p.pid == 1), "{processes:?}");
    machine.kill().await.unwrap();

    let (machine, guest) = revive(&world, &plan, save.path()).await;
    assert_eq!(world.noted(&plan.id, &guest).await, "kept");
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn one_save_is_many_machines_and_they_share_nothing() {
    let Some(world) = world().await else { return };
    let (parent, save) = (world.plan(), stage());
    let (mut machine, guest) = boot(&**world.engine(), parent.clone()).await;
    world.note(&parent.id, &guest, "common").await;
    world.save(&mut machine, &guest, save.path()).await;
    let (first, second) = (world.plan(), world.plan());
    let ((one, in_one), (two, in_two)) =
        tokio::join!(revive(&world, &first, save.path()), revive(&world, &second, save.path()));
    assert_eq!(world.noted(&second.id, &in_two).await, "common");
    world.note(&first.id, &in_one, "one").await;
    world.note(&second.id, &in_two, "two").await;
    assert_eq!(world.noted(&first.id, &in_one).await, "one");
    assert_eq!(world.noted(&second.id, &in_two).await, "two");
    assert_eq!(world.noted(&parent.id, &guest).await, "common");
    for machine in [machine, one, two] {
        machine.kill().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_copies_of_one_save_come_up_at_once() {
    const COPIES: usize = 10;
    let Some(world) = world().await else { return };
    let (parent, save) = (world.plan(), stage());
    let (mut machine, guest) = boot(&**world.engine(), parent.clone()).await;
    world.note(&parent.id, &guest, "common").await;
    world.save(&mut machine, &guest, save.path()).await;
    machine.kill().await.unwrap();
    let plans: Vec<_> = (0..COPIES).map(|_| world.plan()).collect();
    let copies = plans.iter().map(|plan| revive(&world, plan, save.path()));
    let copies = futures_util::future::join_all(copies).await;
    for (index, (plan, (_, guest))) in plans.iter().zip(&copies).enumerate() {
        assert_eq!(world.noted(&plan.id, guest).await, "common");
        world.note(&plan.id, guest, &index.to_string()).await;
    }
    for (index, (plan, (machine, guest))) in plans.iter().zip(copies).enumerate() {
        assert_eq!(world.noted(&plan.id, &guest).await, index.to_string());
        machine.kill().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_runs_goes_on_after_it_was_saved() {
    let Some(world) = world().await else { return };
    let (plan, save) = (world.plan(), stage());
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    let saved = world.save(&mut machine, &guest, save.path()).await;
    assert!(saved.pause > Duration::ZERO && !machine.paused());
    world.note(&plan.id, &guest, "after").await;
    world.pause(&mut machine, &guest).await;
    world.resume(&mut machine, &guest).await;
    assert_eq!(world.noted(&plan.id, &guest).await, "after");
    machine.kill().await.unwrap();
    let (machine, guest) = revive(&world, &plan, save.path()).await;
    assert_eq!(world.noted(&plan.id, &guest).await, "", "that was before");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn again_and_again_saved_and_revived_it_is_still_itself() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, mut guest) = boot(&**world.engine(), plan.clone()).await;
    for cycle in 1..=world.rounds(30) {
        let save = stage();
        world.note(&plan.id, &guest, &cycle.to_string()).await;
        world.pause(&mut machine, &guest).await;
        machine.save(save.path()).await.unwrap();
        machine.kill().await.unwrap();
        (machine, guest) = revive(&world, &plan, save.path()).await;
        assert_eq!(world.noted(&plan.id, &guest).await, cycle.to_string());
    }
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_files_of_a_save_are_read_without_reviving_it() {
    let Some(world) = world().await else { return };
    let (plan, save) = (world.plan(), stage());
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    world.note(&plan.id, &guest, "written").await;
    world.save(&mut machine, &guest, save.path()).await;
    machine.kill().await.unwrap();
    let changes = world.engine().changes(save.path()).unwrap();
    let file = world.installed.note_file().as_bytes();
    let (index, entry) =
        changes.entries().iter().enumerate().find(|(_, entry)| entry.path == file).unwrap();
    let mut text = Vec::new();
    changes.copy(index, &mut text).unwrap();
    assert_eq!(String::from_utf8_lossy(&text).trim(), "written");
    assert_eq!(entry.kind, ChangeKind::File { size: text.len() as u64 });
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_at_all_is_no_save() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let Err(error) = world.revive(&plan, stage().path()).await else {
        panic!("nothing at all was enough")
    };
    assert!(matches!(error, EngineError::Failed { .. }), "{error}");
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revive_that_nobody_waits_for_any_more_leaves_nothing() {
    let Some(world) = world().await else { return };
    let save = stage();
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    world.save(&mut machine, &guest, save.path()).await;
    machine.kill().await.unwrap();
    for after in [0, 20, 60, 140, 180, 220] {
        let plan = world.plan();
        let revive = world.revive(&plan, save.path());
        let _ = tokio::time::timeout(Duration::from_millis(after), revive)
            .await
            .map(|revived| revived.map(|machine| tokio::spawn(machine.kill())));
        eventually("it is gone", || world.traces(&plan.id).is_empty()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_build_that_saved_a_machine_may_revive_it() {
    let Some(world) = world().await else { return };
    let engine = world.engine();
    let here = engine.about().version.clone();
    assert_eq!(engine.can_revive(&here), Ok(here));
    let refused = engine.can_revive("release-20200101.0").unwrap_err();
    assert!(refused.contains("release-20200101.0"), "{refused}");
}

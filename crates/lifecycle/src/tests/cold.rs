//! Who sleeps on disk has no driver; nobody notices.

use super::standby::sleeper;
use super::*;
use torpor_protocol::{SandboxId, Tier};

/// Returns when its driver has gone.
async fn alone(sandbox: &Sandbox) {
    let gone = async {
        while !sandbox.slot.is_free() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(SOON, gone).await.expect("its driver stays");
}

async fn cold(world: &World, name: &str) -> Sandbox {
    let sandbox = sleeper(world, name).await;
    sandbox.sleep(true).await.unwrap();
    alone(&sandbox).await;
    sandbox
}

fn labelled(value: &str) -> UpdateSandbox {
    let labels = Some([("team".to_owned(), value.to_owned())].into());
    UpdateSandbox { labels, ..UpdateSandbox::default() }
}

#[tokio::test(start_paused = true)]
async fn a_driver_comes_for_a_request_and_goes_when_it_is_answered() {
    let world = World::new().await;
    let sandbox = cold(&world, "web").await;
    let mut events = world.fleet.events();
    sandbox.update(labelled("blue")).await.unwrap();
    assert_eq!(events.recv().await.unwrap().spec.labels["team"], "blue");
    alone(&sandbox).await;
    assert_eq!(sandbox.status().tier, Some(Tier::Cold));
    drop(sandbox.awake().await.unwrap());
    assert_eq!(world.host.memory(sandbox.id()).as_deref(), Some("remember"));
    assert_eq!(sandbox.status().spec.labels["team"], "blue");
    assert!(!sandbox.slot.is_free());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn who_asks_while_the_driver_goes_is_answered() {
    let world = World::new().await;
    let sandbox = cold(&world, "web").await;
    let mut askers = tokio::task::JoinSet::new();
    for asker in 0..8 {
        let sandbox = sandbox.clone();
        askers.spawn(async move {
            for turn in 0..500 {
                sandbox.note_lines().await.unwrap();
                if turn % 8 == asker {
                    tokio::task::yield_now().await;
                }
            }
        });
    }
    askers.join_all().await;
    alone(&sandbox).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_given_up_leaves_no_driver_for_long() {
    let world = World::new().await;
    let sandbox = cold(&world, "web").await;
    let way_in = sandbox.slot.inbox(&sandbox);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!sandbox.slot.is_free());
    drop(way_in);
    alone(&sandbox).await;
}

#[tokio::test(start_paused = true)]
async fn its_time_runs_out_without_a_driver() {
    let world = World::new().await;
    let sandbox = cold(&world, "web").await;
    let lifetime = Some(Lifetime { expire_idle_ms: Some(3_600_000), ..Lifetime::default() });
    sandbox.update(UpdateSandbox { lifetime, ..UpdateSandbox::default() }).await.unwrap();
    alone(&sandbox).await;
    tokio::time::sleep(Duration::from_secs(3000)).await;
    assert!(sandbox.slot.is_free());
    let keep = sandbox.keep().unwrap();
    keep.used();
    tokio::time::sleep(Duration::from_secs(3500)).await;
    assert_eq!(sandbox.status().state, State::Asleep);
    alone(&sandbox).await;
    let ended = until(&sandbox, State::Terminated).await;
    assert_eq!(ended.reason, Some(ReasonCode::Idle));
    assert!(keep.when_awake().await.is_none());
    assert_eq!(world.recorded(), 0);
}

#[tokio::test(start_paused = true)]
async fn it_is_deleted_like_any_other() {
    let world = World::new().await;
    let sandbox = cold(&world, "web").await;
    sandbox.delete().await;
    assert_eq!((world.recorded(), world.fleet.count()), (0, 0));
    assert!(matches!(refusal(sandbox.wake().await), Refusal::Terminated(_)));
}

#[tokio::test(start_paused = true)]
async fn who_watches_it_hears_that_the_daemon_stops() {
    let world = World::new().await;
    let sandbox = cold(&world, "web").await;
    let mut status = sandbox.watch();
    status.mark_unchanged();
    world.fleet.shutdown(ShutdownMode::Running).await;
    assert!(status.changed().await.is_err());
    assert_eq!(refusal(sandbox.wake().await), Refusal::Stopping);
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_has_started_knows_its_sleepers_and_has_no_driver_for_them() {
    let world = World::new().await;
    for n in 0..100 {
        cold(&world, &format!("s{n}")).await;
    }
    let world = world.restart().await;
    let listed = world.fleet.list();
    assert_eq!(listed.len(), 100);
    assert!(listed.iter().all(|status| status.tier == Some(Tier::Cold) && status.saved_bytes > 0));
    for sandbox in world.fleet.sandboxes() {
        alone(&sandbox).await;
    }
    drop(world.find("s7").unwrap().awake().await.unwrap());
    assert_eq!(world.host.alive().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn pages_show_everybody_once_while_others_come_and_go() {
    let world = World::new().await;
    let mut stay: Vec<SandboxId> = Vec::new();
    for n in 0..20 {
        stay.push(cold(&world, &format!("s{n}")).await.id().clone());
    }
    stay.sort();
    let (mut seen, mut after) = (Vec::new(), None);
    loop {
        let (page, more) = world.fleet.page(after.as_ref(), 3, |_| true);
        seen.extend(page.into_iter().map(|status| status.id));
        if !more {
            break;
        }
        after = seen.last().cloned();
        // The last of this page is what the next begins with: it may be gone by then.
        let guest = seen.len() - 1;
        if guest % 2 == 0 {
            world.fleet.delete(&SandboxRef::Id(seen[guest].clone())).await.unwrap();
        }
        world.create(&format!("new{guest}")).await;
    }
    assert!(seen.is_sorted_by(|a, b| a < b), "sorted, and nobody twice");
    assert!(stay.iter().all(|id| seen.contains(id)));
    // Of the others any may be gone: ids are random, and so is who ends a page.
    world.create("wanted").await;
    let wanted = Some("wanted".parse().unwrap());
    let (page, more) = world.fleet.page(None, 2, |status| status.spec.name == wanted);
    assert_eq!((page.len(), more), (1, false));
}

//! Who wakes first, and who is served, when many want something at once.

use super::standby::sleeper;
use super::*;
use torpor_protocol::guest::Request;

// === Many at once ===

async fn all_awake(sandboxes: &[Sandbox]) {
    let mut wakes = tokio::task::JoinSet::new();
    for sandbox in sandboxes {
        let sandbox = sandbox.clone();
        wakes.spawn(async move { sandbox.awake().await.is_ok() });
    }
    assert!(wakes.join_all().await.into_iter().all(|woken| woken));
}

async fn sleepers(world: &World, count: usize) -> Vec<Sandbox> {
    let mut sandboxes = Vec::new();
    for number in 0..count {
        let sandbox = sleeper(world, &format!("web{number}")).await;
        sandbox.sleep(false).await.unwrap();
        sandboxes.push(sandbox);
    }
    sandboxes
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_wakes_from_memory_is_served_in_turn() {
    let world = World::new().await;
    let sandboxes = sleepers(&world, 20).await;
    world.host.resume_takes(Duration::from_millis(10));
    let begun = tokio::time::Instant::now();
    all_awake(&sandboxes).await;
    let at_once = Policy::default().wakes_at_once;
    assert_eq!(world.host.resuming_max(), at_once);
    let rounds = u32::try_from(20usize.div_ceil(at_once)).unwrap();
    assert_eq!(begun.elapsed(), Duration::from_millis(10) * rounds);
}

#[tokio::test(start_paused = true)]
async fn machines_that_do_not_go_on_keep_nobody_else_from_waking() {
    let world = World::new().await;
    let stuck = sleepers(&world, Policy::default().wakes_at_once).await;
    let well = sleeper(&world, "well").await;
    well.sleep(false).await.unwrap();
    world.host.resume_takes(Duration::from_secs(20));
    let waking = stuck.iter().map(|sandbox| {
        tokio::spawn({
            let sandbox = sandbox.clone();
            async move { sandbox.awake().await.map(drop) }
        })
    });
    let waking: Vec<_> = waking.collect();
    while world.host.resuming_max() < stuck.len() {
        tokio::task::yield_now().await;
    }
    world.host.resume_takes(Duration::ZERO);
    let begun = tokio::time::Instant::now();
    drop(well.awake().await.unwrap());
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    for woken in waking {
        woken.await.unwrap().unwrap();
    }
}

// === An order to sleep while it wakes ===

#[tokio::test(start_paused = true)]
async fn who_waited_for_a_wake_is_served_although_it_is_told_to_sleep_meanwhile() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    for cold in [true, false] {
        sandbox.sleep(cold).await.unwrap();
        world.host.start_takes(Duration::from_secs(1));
        world.host.resume_takes(Duration::from_millis(100));
        let waiting = tokio::spawn({
            let sandbox = sandbox.clone();
            async move {
                let lease = sandbox.awake().await?;
                // It has something to do before it asks.
                tokio::time::sleep(Duration::from_millis(50)).await;
                Ok::<_, Error>(lease.guest().done(&Request::Stat { path: "/".into() }).await?)
            }
        });
        tokio::time::sleep(Duration::from_millis(10)).await;
        sandbox.sleep(false).await.unwrap();
        waiting.await.unwrap().unwrap();
        assert_eq!(sandbox.status().state, State::Asleep);
    }
}

#[tokio::test(start_paused = true)]
async fn an_order_to_sleep_does_not_wait_for_who_stays() {
    let world = World::new().await;
    let sandbox = sleeper(&world, "web").await;
    sandbox.sleep(true).await.unwrap();
    let lease = sandbox.awake().await.unwrap();
    let begun = tokio::time::Instant::now();
    sandbox.sleep(false).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert!(lease.guest().health().await.is_err());
}

//! How much may run on a host, and who has to make room.

use super::*;
use parking_lot::Mutex;
use torpor_protocol::Tier;
use torpor_protocol::volume::ForkVolumes;

use crate::fleet::{Cause, MemoryReading, Observer};
use crate::{Plan, wake_deadline};

/// A host on which each sandbox that leaves memory gives back 100 MiB.
#[derive(Default)]
struct Scarce {
    causes: Mutex<Vec<Cause>>,
    waits: Mutex<Vec<Tier>>,
}

impl Observer for Scarce {
    fn waited(&self, from: Tier, _took: Duration) {
        self.waits.lock().push(from);
    }

    fn demoted(&self, cause: Cause) {
        self.causes.lock().push(cause);
    }
}

const ROOMY: MemoryReading = MemoryReading { available_mib: u64::MAX / 2, stalled_percent: 0.0 };

async fn world(policy: Policy, reading: MemoryReading) -> (World, Arc<Scarce>) {
    let (host, store) = (FakeHost::new(Inside::Scripted), FakeStore::new());
    let (memory, scarce) = (FakeMemory::endless(), Arc::new(Scarce::default()));
    let freed = Arc::clone(&scarce);
    let gauge = move || {
        let freed_mib = freed.causes.lock().len() as u64 * 100;
        MemoryReading { available_mib: reading.available_mib + freed_mib, ..reading }
    };
    let engine = FakeEngine::new(Arc::clone(&host));
    let parts = Parts {
        gauge: Arc::new(gauge),
        observer: scarce.clone(),
        policy,
        ..parts(engine, &store, &memory)
    };
    let fleet = Fleet::recover(parts).await.unwrap();
    (World { host, store, memory, fleet }, scarce)
}

fn at_most(sandboxes_max: usize) -> Policy {
    Policy { sandboxes_max, ..Policy::default() }
}

/// A sandbox that sleeps.
async fn asleep(world: &World, name: &str, cold: bool) -> Sandbox {
    let sandbox = world.running(name).await;
    sandbox.sleep(cold).await.unwrap();
    sandbox
}

#[tokio::test(start_paused = true)]
async fn nobody_wakes_from_disk_on_a_full_host() {
    let (world, scarce) = world(at_most(1), ROOMY).await;
    let cold = asleep(&world, "cold", true).await;
    world.running("busy").await;
    let keeping = world.fleet.awake(&world.find("busy").unwrap(), wake_deadline()).await.unwrap();
    for _ in 0..2 {
        let refused = world.fleet.awake(&cold, wake_deadline()).await.map(drop);
        assert_eq!(refusal(refused), Refusal::HostFull(1));
        let refused = world.fleet.wake(&cold, wake_deadline()).await;
        assert_eq!(refusal(refused), Refusal::HostFull(1));
    }
    assert_eq!((cold.status().tier, cold.status().reason), (Some(Tier::Cold), None));
    assert!(matches!(
        refusal(world.fleet.create(spec(None)).await.map(drop)),
        Refusal::HostFull(1)
    ));
    drop(keeping);
    world.find("busy").unwrap().sleep(false).await.unwrap();
    drop(world.fleet.awake(&cold, wake_deadline()).await.unwrap());
    assert_eq!(world.find("busy").unwrap().status().tier, Some(Tier::Cold));
    assert_eq!((*scarce.causes.lock()).as_slice(), [Cause::Room]);
    assert_eq!((*scarce.waits.lock()).as_slice(), [Tier::Cold]);
}

#[tokio::test(start_paused = true)]
async fn many_that_wake_at_once_do_not_get_the_same_room() {
    let (world, _) = world(at_most(2), ROOMY).await;
    let mut sleepers = Vec::new();
    for name in ["a", "b", "c", "d", "e"] {
        sleepers.push(asleep(&world, name, true).await);
    }
    world.host.start_takes(Duration::from_secs(3));
    let mut wakes = tokio::task::JoinSet::new();
    for sleeper in sleepers {
        let fleet = world.fleet.clone();
        wakes.spawn(async move { fleet.awake(&sleeper, wake_deadline()).await });
    }
    let woken = wakes.join_all().await;
    assert_eq!(woken.iter().filter(|woken| woken.is_ok()).count(), 2);
    assert_eq!(world.host.alive().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn forks_have_their_room_before_the_first_begins() {
    let (world, _) = world(at_most(3), ROOMY).await;
    world.running("web").await;
    let point =
        world.fleet.restore_point_now(&reference("web"), ForkVolumes::Refuse).await.unwrap();
    let refused = world.fleet.reserve_forks(&point, 3).await.map(drop);
    assert!(matches!(refusal(refused), Refusal::HostFull(3)));
    let mut room = world.fleet.reserve_forks(&point, 2).await.unwrap();
    // What is promised to one is not given to another.
    assert!(matches!(
        refusal(world.fleet.create(spec(None)).await.map(drop)),
        Refusal::HostFull(3)
    ));
    for name in ["one", "two"] {
        let plan = Plan { room: Some(room.one()), ..Plan::default() };
        let begun = world.fleet.create_from(spec(Some(name)), Some(&point), plan).await.unwrap();
        drop(world.fleet.awake(&begun, wake_deadline()).await.unwrap());
    }
    drop(room);
    world.find("one").unwrap().delete().await;
    world.running("three").await;
}

#[tokio::test(start_paused = true)]
async fn a_start_that_lacks_something_of_the_engine_gets_it_from_a_sleeper() {
    let (world, scarce) = world(Policy::default(), ROOMY).await;
    let warm = asleep(&world, "warm", false).await;
    let cold = asleep(&world, "cold", true).await;
    world.host.lack_addresses(2);
    let refused = world.fleet.awake(&cold, wake_deadline()).await.map(drop);
    assert!(matches!(refused, Err(Error::Engine(_))), "{refused:?}");
    assert_eq!(warm.status().tier, Some(Tier::Cold));
    drop(world.fleet.awake(&cold, wake_deadline()).await.unwrap());
    assert_eq!((*scarce.causes.lock()).as_slice(), [Cause::Room]);
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_a_wake_has_a_deadline_and_the_wake_goes_on() {
    let (world, _) = world(Policy::default(), ROOMY).await;
    let cold = asleep(&world, "cold", true).await;
    world.host.start_takes(Duration::from_secs(10));
    let deadline = tokio::time::Instant::now() + Duration::from_secs(1);
    let refused = world.fleet.awake(&cold, deadline).await.map(drop);
    assert!(matches!(refusal(refused), Refusal::StillWaking(_)));
    until(&cold, State::Running).await;
    assert_eq!(cold.status().wakes, 1);
}

// === Pressure ===

fn pressed() -> Policy {
    Policy { memory_floor_mib: 1000, stalled_percent_max: Some(20), ..Policy::default() }
}

async fn sleepers(count: usize, available_mib: u64, stalled_percent: f64) -> Vec<Cause> {
    let (world, scarce) = world(pressed(), MemoryReading { available_mib, stalled_percent }).await;
    for n in 0..count {
        asleep(&world, &format!("s{n}"), false).await;
    }
    scarce.causes.lock().clear();
    world.fleet.relieve().await;
    let causes = scarce.causes.lock().clone();
    let cold = world.fleet.list().into_iter().filter(|status| status.tier == Some(Tier::Cold));
    assert!(cold.count() >= causes.len());
    causes
}

#[tokio::test]
async fn sandboxes_leave_memory_until_the_floor_is_reached_again() {
    assert_eq!(sleepers(5, 750, 0.0).await, [Cause::Memory; 3]);
}

#[tokio::test]
async fn a_host_without_sleepers_is_left_alone() {
    assert_eq!(sleepers(2, 21, 0.0).await, [Cause::Memory; 2]);
}

#[tokio::test]
async fn stalls_take_one_sandbox_a_look() {
    assert_eq!(sleepers(3, 5000, 20.1).await, [Cause::Stalls]);
}

#[tokio::test]
async fn a_host_with_enough_memory_keeps_everybody() {
    assert!(sleepers(3, 1000, 20.0).await.is_empty());
}

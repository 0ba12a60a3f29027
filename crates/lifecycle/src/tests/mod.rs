//! The life of a sandbox, told as behaviours, on fakes and virtual time.

mod builds;
mod ca;
mod capacity;
mod changes;
mod cold;
mod engines;
mod kept;
mod lives;
mod mounts;
mod owners;
mod requests;
mod snapshots;
mod standby;
mod turns;

use std::sync::Arc;
use std::time::Duration;

use torpor_protocol::api::UpdateSandbox;
use torpor_protocol::{
    FailureReason, Lifetime, Network, ReasonCode, Resources, SandboxRef, SandboxSpec,
    StandbyPolicy, State, Status,
};

use crate::fake::{FakeEngine, FakeHost, FakeMemory, FakeStore, Inside};
use crate::guest_defaults::GuestDefaults;
use crate::ledger::{SandboxLedger as _, SnapshotFilter};
use crate::store::SnapshotRecord;
use crate::{Engines, Error, Fleet, Parts, Policy, Refusal, Sandbox, ShutdownMode};

/// Longer than anything may take in virtual time.
const SOON: Duration = Duration::from_secs(600);

struct World {
    host: Arc<FakeHost>,
    store: Arc<FakeStore>,
    memory: Arc<FakeMemory>,
    fleet: Fleet,
}

impl World {
    async fn new() -> Self {
        let (host, store) = (FakeHost::new(Inside::Scripted), FakeStore::new());
        let memory = FakeMemory::endless();
        let engine = FakeEngine::new(Arc::clone(&host));
        let fleet = Fleet::recover(parts(engine, &store, &memory)).await.unwrap();
        Self { host, store, memory, fleet }
    }

    /// Another daemon on the same host and ledger.
    async fn daemon(&self) -> Fleet {
        let engine = FakeEngine::new(Arc::clone(&self.host));
        Fleet::recover(parts(engine, &self.store, &self.memory)).await.unwrap()
    }

    /// The daemon hands over to another one on the same host and ledger.
    async fn restart(self) -> Self {
        self.restart_after(ShutdownMode::Running).await
    }

    async fn restart_after(self, mode: ShutdownMode) -> Self {
        self.fleet.shutdown(mode).await;
        let fleet = self.daemon().await;
        Self { fleet, ..self }
    }

    async fn create(&self, name: &str) -> Sandbox {
        self.fleet.create(spec(Some(name))).await.unwrap()
    }

    async fn running(&self, name: &str) -> Sandbox {
        let sandbox = self.create(name).await;
        drop(sandbox.awake().await.unwrap());
        sandbox
    }

    fn find(&self, name: &str) -> Result<Sandbox, Error> {
        self.fleet.find(&reference(name))
    }

    async fn snapshots(&self) -> Vec<SnapshotRecord> {
        self.fleet.snapshots(&SnapshotFilter::default(), None, 100).await.unwrap()
    }

    fn recorded(&self) -> usize {
        self.store.records().len()
    }
}

fn parts(engine: FakeEngine, store: &Arc<FakeStore>, memory: &Arc<FakeMemory>) -> Parts {
    Parts {
        engines: Engines::new(Arc::new(engine), []),
        ledger: store.clone(),
        images: store.clone(),
        saves: store.clone(),
        journal: store.clone(),
        vault: store.clone(),
        volumes: store.clone(),
        gauge: memory.clone(),
        observer: Arc::new(()),
        ca: None,
        guest: GuestDefaults::default(),
        policy: Policy::default(),
    }
}

fn reference(name: &str) -> SandboxRef {
    name.parse().unwrap()
}

fn spec(name: Option<&str>) -> SandboxSpec {
    SandboxSpec {
        name: name.map(|name| name.parse().unwrap()),
        image: "test".to_owned(),
        image_id: FakeStore::image_id(),
        resources: Resources::default(),
        engine: None,
        env: [].into(),
        labels: [].into(),
        network: Network::default(),
        lifetime: Lifetime::default(),
        standby: StandbyPolicy { idle_after_ms: 0, ..StandbyPolicy::default() },
        entrypoint: Vec::new(),
        secrets: Vec::new(),
        ports: None,
        pool: None,
        mounts: Some(Vec::new()),
    }
}

/// A sandbox that falls asleep when nobody uses it.
fn sleepy(name: &str) -> SandboxSpec {
    SandboxSpec { standby: StandbyPolicy::default(), ..spec(Some(name)) }
}

async fn until(sandbox: &Sandbox, state: State) -> Status {
    let mut status = sandbox.watch();
    let reached = tokio::time::timeout(SOON, status.wait_for(|status| status.state == state)).await;
    reached.unwrap_or_else(|_| panic!("never {state:?}: {:?}", sandbox.status())).unwrap().clone()
}

fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> Refusal {
    match result {
        Err(Error::Refused(refusal)) => refusal,
        other => panic!("expected a refusal, not {other:?}"),
    }
}

// === Being created ===

#[tokio::test(start_paused = true)]
async fn a_created_sandbox_runs_and_answers() {
    let world = World::new().await;
    let sandbox = world.create("web").await;
    let lease = sandbox.awake().await.unwrap();
    lease.guest().health().await.unwrap();
    assert_eq!(sandbox.status().state, State::Running);
    assert_eq!(world.host.alive().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_thousand_requests_cause_one_boot() {
    let world = World::new().await;
    world.host.start_takes(Duration::from_secs(3));
    let sandbox = world.create("web").await;
    let mut requests = tokio::task::JoinSet::new();
    for _ in 0..1000 {
        let sandbox = sandbox.clone();
        requests.spawn(async move { sandbox.awake().await.is_ok() });
    }
    assert!(requests.join_all().await.into_iter().all(|served| served));
    assert_eq!(world.host.boots(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_name_is_taken_until_its_sandbox_is_gone() {
    let world = World::new().await;
    world.running("web").await;
    let again = world.fleet.create(spec(Some("web"))).await.map(|_| ());
    assert!(matches!(refusal(again), Refusal::NameTaken(_)));
    world.fleet.delete(&reference("web")).await.unwrap();
    world.running("web").await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_boot_fails_the_sandbox_and_says_why() {
    let world = World::new().await;
    world.host.fail_starts(1);
    let sandbox = world.create("web").await;
    let Refusal::Failed { reason, .. } = refusal(sandbox.awake().await) else { panic!() };
    let FailureReason::StartFailed { cause } = &reason else { panic!("{reason:?}") };
    assert!(cause.contains("a fake fault"), "{cause}");
    let status = until(&sandbox, State::Failed).await;
    assert_eq!((status.reason, status.message), (Some(reason.code()), Some(reason.to_string())));
    assert!(world.host.alive().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_can_not_be_recorded_is_not_created() {
    let world = World::new().await;
    world.store.fail(true);
    let refused = world.fleet.create(spec(Some("web"))).await.map(|_| ());
    assert!(matches!(refused, Err(Error::Store(_))), "{refused:?}");
    world.store.fail(false);
    assert_eq!(world.host.boots(), 0);
    world.running("web").await;
}

// === Ending ===

#[tokio::test(start_paused = true)]
async fn deletion_leaves_nothing() {
    let world = World::new().await;
    let sandbox = world.running("web").await;
    sandbox.delete().await;
    assert!(world.host.alive().is_empty());
    assert_eq!(world.recorded(), 0);
    assert!(matches!(refusal(world.find("web").map(|_| ())), Refusal::NoSuchSandbox(_)));
    assert!(matches!(refusal(sandbox.awake().await), Refusal::Terminated(_)));
    assert_eq!(sandbox.status().state, State::Terminated);
}

#[tokio::test(start_paused = true)]
async fn a_stuck_boot_can_be_deleted() {
    let world = World::new().await;
    world.host.start_takes(Duration::from_secs(10_000));
    let sandbox = world.create("web").await;
    let waiter = tokio::spawn({
        let sandbox = sandbox.clone();
        async move { sandbox.awake().await }
    });
    tokio::task::yield_now().await;
    sandbox.delete().await;
    assert!(matches!(refusal(waiter.await.unwrap()), Refusal::Terminated(_)));
    assert_eq!(world.recorded(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_boot_that_takes_too_long_fails() {
    let world = World::new().await;
    world.host.start_takes(Duration::from_secs(10_000));
    let sandbox = world.create("web").await;
    let reason = until(&sandbox, State::Failed).await.message.unwrap();
    assert!(reason.contains("took more than"), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_dies_fails_its_sandbox_and_says_why() {
    let world = World::new().await;
    let sandbox = world.running("web").await;
    world.host.crash(sandbox.id(), "out of memory");
    let status = until(&sandbox, State::Failed).await;
    assert_eq!(status.reason, Some(ReasonCode::MachineLost));
    let reason = status.message.unwrap();
    assert!(reason.contains("out of memory") && reason.contains("files and memory are gone"));
    assert!(matches!(refusal(sandbox.awake().await), Refusal::Failed { .. }));
    sandbox.delete().await;
    assert_eq!(world.recorded(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_ends_at_its_maximum_age() {
    let world = World::new().await;
    let mut spec = spec(Some("web"));
    spec.lifetime.max_age_ms = Some(3_600_000);
    let sandbox = world.fleet.create(spec).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    tokio::time::sleep(Duration::from_secs(3590)).await;
    assert_eq!(sandbox.status().state, State::Running);
    let status = until(&sandbox, State::Terminated).await;
    assert_eq!(status.reason, Some(ReasonCode::MaxAge));
    assert!(world.host.alive().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_leased_sandbox_is_not_idle() {
    let world = World::new().await;
    let mut spec = spec(Some("web"));
    spec.lifetime.expire_idle_ms = Some(60_000);
    let sandbox = world.fleet.create(spec).await.unwrap();
    let lease = sandbox.awake().await.unwrap();
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(sandbox.status().state, State::Running);
    drop(lease);
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert_eq!(sandbox.status().state, State::Running);
    until(&sandbox, State::Terminated).await;
}

#[tokio::test(start_paused = true)]
async fn a_date_in_the_past_ends_a_sandbox_at_once() {
    let world = World::new().await;
    let mut spec = spec(None);
    spec.lifetime.expires_at_ms = Some(1000);
    let sandbox = world.fleet.create(spec).await.unwrap();
    until(&sandbox, State::Terminated).await;
    assert_eq!(world.recorded(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_longer_life_can_be_given_while_it_runs() {
    let world = World::new().await;
    let mut spec = spec(Some("web"));
    spec.lifetime.max_age_ms = Some(100_000);
    let sandbox = world.fleet.create(spec).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    let lifetime = Some(Lifetime { max_age_ms: Some(1_000_000), ..Lifetime::default() });
    sandbox.update(UpdateSandbox { lifetime, ..UpdateSandbox::default() }).await.unwrap();
    tokio::time::sleep(Duration::from_secs(500)).await;
    assert_eq!(sandbox.status().state, State::Running);
    until(&sandbox, State::Terminated).await;
}

// === Being watched ===

#[tokio::test(start_paused = true)]
async fn a_status_has_a_growing_generation_and_everybody_hears_of_it() {
    let world = World::new().await;
    let mut events = world.fleet.events();
    let sandbox = world.running("web").await;
    let first = sandbox.status().generation;
    let labels = Some([("team".to_owned(), "blue".to_owned())].into());
    sandbox.update(UpdateSandbox { labels, ..UpdateSandbox::default() }).await.unwrap();
    let status = sandbox.status();
    assert!(status.generation > first);
    assert_eq!(status.spec.labels["team"], "blue");
    sandbox.delete().await;
    let last = async { while events.recv().await.unwrap().state != State::Terminated {} };
    tokio::time::timeout(SOON, last).await.unwrap();
}

// === Being brought back ===

#[tokio::test(start_paused = true)]
async fn a_restarted_daemon_adopts_what_runs() {
    let world = World::new().await;
    let id = world.running("web").await.id().clone();
    let world = world.restart().await;
    let sandbox = world.find("web").unwrap();
    sandbox.awake().await.unwrap();
    assert_eq!(sandbox.id(), &id);
    assert_eq!(world.host.boots(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_was_lost_meanwhile_is_told() {
    let world = World::new().await;
    let id = world.running("web").await.id().clone();
    world.fleet.shutdown(ShutdownMode::Running).await;
    world.host.crash(&id, "power cut");
    let fleet = world.daemon().await;
    let sandbox = fleet.find(&reference("web")).unwrap();
    let reason = until(&sandbox, State::Failed).await.message.unwrap();
    assert!(reason.contains("lost while the daemon was away"), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn a_boot_cut_short_by_a_stop_starts_over() {
    let world = World::new().await;
    world.host.start_takes(Duration::from_secs(50));
    world.create("web").await;
    let world = world.restart().await;
    world.find("web").unwrap().awake().await.unwrap();
    assert_eq!(world.host.alive().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_failed_sandbox_is_still_failed_after_a_restart() {
    let world = World::new().await;
    world.host.fail_starts(1);
    until(&world.create("web").await, State::Failed).await;
    let world = world.restart().await;
    let sandbox = world.find("web").unwrap();
    assert!(until(&sandbox, State::Failed).await.message.unwrap().contains("a fake fault"));
}

#[tokio::test(start_paused = true)]
async fn a_machine_nobody_recorded_is_swept_away() {
    let world = World::new().await;
    let sandbox = world.running("web").await;
    world.fleet.shutdown(ShutdownMode::Running).await;
    let record = world.store.record_of(sandbox.id()).unwrap();
    let owner = world.store.take_over().await.unwrap();
    world.store.archive_sandbox(&owner, &record.ended(0, None)).await.unwrap();
    world.daemon().await;
    assert!(world.host.alive().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_stopping_daemon_creates_nothing() {
    let world = World::new().await;
    world.fleet.shutdown(ShutdownMode::Running).await;
    let refused = world.fleet.create(spec(None)).await.map(|_| ());
    assert_eq!(refusal(refused), Refusal::Stopping);
}

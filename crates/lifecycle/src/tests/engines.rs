//! Several engines on one host.

use super::snapshots::named;
use super::*;
use crate::engine::Engine;
use torpor_protocol::SnapshotKind;

/// Two engines, each with machines of its own.
struct Both {
    first: Arc<FakeHost>,
    second: Arc<FakeHost>,
    store: Arc<FakeStore>,
    fleet: Fleet,
}

async fn recover(hosts: [&Arc<FakeHost>; 2], store: &Arc<FakeStore>) -> Fleet {
    let [first, second] = hosts.map(|host| FakeEngine::new(Arc::clone(host)));
    let second = Arc::new(second.of_kind("second"));
    let parts = parts(first.of_kind("first"), store, &FakeMemory::endless());
    let engines = Engines::new(parts.engines.default_engine().clone(), [second as Arc<dyn Engine>]);
    Fleet::recover(Parts { engines, ..parts }).await.unwrap()
}

impl Both {
    async fn new() -> Self {
        let [first, second] = [(), ()].map(|()| FakeHost::new(Inside::Scripted));
        let store = FakeStore::new();
        let fleet = recover([&first, &second], &store).await;
        Self { first, second, store, fleet }
    }

    async fn restart(self, mode: ShutdownMode) -> Self {
        self.fleet.shutdown(mode).await;
        let fleet = recover([&self.first, &self.second], &self.store).await;
        Self { fleet, ..self }
    }

    async fn running(&self, name: &str, engine: Option<&str>) -> Sandbox {
        let sandbox = self.fleet.create(on(name, engine)).await.unwrap();
        drop(sandbox.awake().await.unwrap());
        sandbox
    }

    /// How many machines each engine has.
    fn alive(&self) -> (usize, usize) {
        (self.first.alive().len(), self.second.alive().len())
    }
}

fn on(name: &str, engine: Option<&str>) -> SandboxSpec {
    SandboxSpec { engine: engine.map(str::to_owned), ..spec(Some(name)) }
}

fn engine_of(sandbox: &Sandbox) -> Option<String> {
    sandbox.status().spec.engine
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_runs_on_the_engine_it_asks_for_or_on_the_default() {
    let both = Both::new().await;
    let (plain, other) =
        (both.running("plain", None).await, both.running("other", Some("second")).await);
    assert_eq!(both.alive(), (1, 1));
    assert_eq!(engine_of(&plain), Some("first".into()));
    assert_eq!(engine_of(&other), Some("second".into()));
    let refused = refusal(both.fleet.create(on("x", Some("third"))).await.map(drop));
    assert_eq!(refused.to_string(), "this host has no engine third, but first, second");
}

#[tokio::test(start_paused = true)]
async fn both_are_adopted_and_woken_by_the_engine_they_had() {
    let both = Both::new().await;
    both.running("plain", None).await;
    both.running("other", Some("second")).await;
    let both = both.restart(ShutdownMode::Running).await;
    for name in ["plain", "other"] {
        drop(both.fleet.find(&reference(name)).unwrap().awake().await.unwrap());
    }
    assert_eq!((both.first.boots(), both.second.boots()), (1, 1), "nothing was started anew");
    let both = both.restart(ShutdownMode::Durable).await;
    for name in ["plain", "other"] {
        drop(both.fleet.find(&reference(name)).unwrap().awake().await.unwrap());
    }
    assert_eq!((both.first.revives(), both.second.revives()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn memory_goes_on_in_the_engine_that_saved_it_and_in_no_other() {
    let both = Both::new().await;
    both.running("other", Some("second")).await;
    let name = Some("base".parse().unwrap());
    let taking = both.fleet.take_snapshot(&reference("other"), name, SnapshotKind::Memory).await;
    taking.unwrap().done().await.unwrap();
    let point = both.fleet.restore_point(&named("base")).await.unwrap();
    let refused = refusal(both.fleet.begin(&point, on("x", Some("first"))).await.map(drop));
    assert!(matches!(refused, Refusal::Incompatible { .. }), "{refused}");
    let reason = refused.to_string();
    assert!(reason.contains("the second engine saved its memory"), "{reason}");
    let fork = both.fleet.begin(&point, on("fork", None)).await.unwrap();
    drop(fork.awake().await.unwrap());
    assert_eq!(engine_of(&fork).as_deref(), Some("second"));
    assert_eq!(both.alive(), (0, 2));
}

#[tokio::test(start_paused = true)]
async fn who_is_older_than_the_choice_has_the_engine_of_its_save_or_the_default() {
    let both = Both::new().await;
    let saved = both.running("saved", Some("second")).await;
    saved.sleep(true).await.unwrap();
    let fresh = both.running("fresh", None).await;
    both.fleet.shutdown(ShutdownMode::Durable).await;
    let owner = both.store.take_over().await.unwrap();
    for sandbox in [&saved, &fresh] {
        let mut record = both.store.record_of(sandbox.id()).unwrap();
        record.spec.engine = None;
        both.store.update_sandbox(&owner, &record).await.unwrap();
    }
    let both = both.restart(ShutdownMode::Durable).await;
    for (name, engine) in [("saved", "second"), ("fresh", "first")] {
        let sandbox = both.fleet.find(&reference(name)).unwrap();
        drop(sandbox.awake().await.unwrap());
        assert_eq!(engine_of(&sandbox).as_deref(), Some(engine), "{name}");
    }
}

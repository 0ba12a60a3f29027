//! After the engine's program was replaced by another build.

use torpor_protocol::engine::{EngineBuild, Migrated, MigratedKind};
use torpor_protocol::{SnapshotKind, Tier};

use super::snapshots::{named, snapshot, written};
use super::*;

impl World {
    /// The daemon ends, and one with another build begins; it has no copy of the former.
    async fn upgraded(self, version: &str) -> Self {
        self.fleet.shutdown(ShutdownMode::Durable).await;
        let engine = FakeEngine::of_version(Arc::clone(&self.host), version);
        let fleet = Fleet::recover(parts(engine, &self.store, &self.room)).await.unwrap();
        Self { fleet, ..self }
    }

    async fn builds(&self) -> Vec<(String, bool, usize, usize)> {
        let count =
            |b: EngineBuild| (b.version, b.present && b.machines == 0, b.sandboxes, b.snapshots);
        self.fleet.builds().await.unwrap().into_iter().map(count).collect()
    }
}

fn reason(items: &[Migrated], kind: MigratedKind) -> Option<&str> {
    let item = items.iter().find(|item| item.kind == kind).expect("it is told");
    assert_eq!(item.done, item.reason.is_none(), "{item:?}");
    item.reason.as_deref()
}

#[tokio::test(start_paused = true)]
async fn what_needs_a_build_is_counted_also_when_the_build_is_gone() {
    let world = World::new().await;
    written(&world, "web", "base").await.sleep(true).await.unwrap();
    snapshot(&world, "web", "base").await;
    assert_eq!(world.builds().await, [("0".to_owned(), true, 1, 1)]);
    let world = world.upgraded("1").await;
    let expected = [("1".to_owned(), true, 0, 0), ("0".to_owned(), false, 1, 1)];
    assert_eq!(world.builds().await, expected);
}

#[tokio::test(start_paused = true)]
async fn what_no_build_here_can_revive_goes_on_with_its_files() {
    let world = World::new().await;
    written(&world, "web", "base").await.sleep(true).await.unwrap();
    snapshot(&world, "web", "base").await;
    let world = world.upgraded("1").await;
    let web = world.fleet.find(&reference("web")).unwrap();

    let told = world.fleet.migrate(None, true).await.unwrap();
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(web.awake().await.is_err(), "telling changes nothing");

    let items = world.fleet.migrate(None, false).await.unwrap();
    for kind in [MigratedKind::Sandbox, MigratedKind::Snapshot] {
        assert_eq!(reason(&items, kind), None);
    }
    assert_eq!(world.builds().await, [("1".to_owned(), true, 0, 0)]);
    let base = world.fleet.find_snapshot(&named("base")).await.unwrap().snapshot;
    assert_eq!(base.kind, SnapshotKind::Filesystem);
    assert_eq!(web.status().tier, Some(Tier::Cold), "it was not woken for it");
    drop(web.awake().await.unwrap());
    web.sleep(true).await.unwrap();
    assert_eq!(world.builds().await, [("1".to_owned(), true, 1, 0)]);
    assert_eq!(world.fleet.migrate(None, false).await.unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_is_awake_keeps_what_it_has_and_that_is_said() {
    let world = World::new().await;
    let web = written(&world, "web", "base").await;
    web.sleep(true).await.unwrap();
    drop(web.awake().await.unwrap());
    let items = world.fleet.migrate(Some("0"), false).await.unwrap();
    let left = reason(&items, MigratedKind::Sandbox).expect("it is left");
    assert!(left.contains("awake") && left.contains("torpor sleep"), "{left}");
    assert_eq!(world.host.memory(web.id()).as_deref(), Some("base"));
    web.sleep(false).await.unwrap();
    let items = world.fleet.migrate(Some("0"), false).await.unwrap();
    assert_eq!(reason(&items, MigratedKind::Sandbox), None, "asleep in memory is asleep");
    drop(web.awake().await.unwrap());
    assert_eq!(world.host.memory(web.id()).as_deref(), Some(""), "it booted with its files alone");
}

#[tokio::test(start_paused = true)]
async fn a_save_that_is_damaged_is_left_with_the_reason_and_the_rest_is_done() {
    let world = World::new().await;
    for name in ["web", "api"] {
        written(&world, name, "base").await.sleep(true).await.unwrap();
    }
    let save = world.store.records()[0].save.clone().unwrap();
    world.store.corrupt(&save);
    let items = world.fleet.migrate(Some("0"), false).await.unwrap();
    assert_eq!(items.iter().filter(|item| item.done).count(), 1, "{items:?}");
    let left = items.iter().find(|item| !item.done).unwrap();
    assert!(left.reason.as_ref().unwrap().contains("a fake fault"), "{left:?}");
    assert_eq!(world.builds().await, [("0".to_owned(), true, 1, 0)]);
}

//! What the ledger promises, on a real file.

mod archive;
mod builds;
mod domains;
mod events;
mod hosting;
mod jobs;
mod mcp_gateway;
mod mcp_tasks;
mod nodes;
mod previews;
mod schedules;
mod schema;

use std::collections::BTreeMap;

use torpor_lifecycle::ledger::{
    ArchiveLedger as _, FleetLedger, Owner, PoolLedger as _, SandboxLedger as _,
    SnapshotLedger as _,
};
use torpor_lifecycle::store::{
    Facts, Manifest, PersistedState, PoolRecord, Record, SaveAbout, SnapshotRecord,
};
use torpor_protocol::api::ArchivedSandbox;
use torpor_protocol::snapshot::{SavedFile, SnapshotKind, SnapshotState};
use torpor_protocol::{
    EndReason, FailureReason, ImageId, SandboxId, SandboxSpec, Snapshot, SnapshotId,
};

use super::*;
use crate::{ImageLedger as _, ImageRow, KeyLedger as _, Layout, SaveLedger as _};

struct World {
    ledger: SqliteLedger,
    owner: Owner,
    layout: Layout,
    dir: tempfile::TempDir,
}

async fn world() -> World {
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout::open(dir.path()).unwrap();
    let ledger = SqliteLedger::open(&layout).await.unwrap();
    World { owner: ledger.take_over().await.unwrap(), ledger, layout, dir }
}

struct Subject {
    world: World,
    image: ImageId,
}

#[async_trait]
impl torpor_lifecycle::ledger::contract::Subject for Subject {
    fn ledger(&self) -> &dyn FleetLedger {
        &self.world.ledger
    }

    fn image(&self) -> ImageId {
        self.image.clone()
    }

    async fn save(&self) -> SaveId {
        save(&self.world, &self.image).await
    }
}

async fn subject() -> Subject {
    let (world, image) = pictured().await;
    Subject { world, image }
}

mod contract {
    torpor_lifecycle::ledger_contract!(super::subject().await);
}

impl World {
    /// Inserts or replaces.
    async fn record(&self, record: &Record) -> Result<(), StoreError> {
        match self.ledger.find_sandbox(&record.id).await? {
            Some(_) => self.ledger.update_sandbox(&self.owner, record).await,
            None => self.ledger.create_sandbox(&self.owner, record).await,
        }
    }

    async fn record_pool(&self, record: &PoolRecord) -> Result<(), StoreError> {
        if self.ledger.update_pool(record).await? {
            return Ok(());
        }
        self.ledger.create_pool(record).await
    }

    async fn archive(&self, ended: &ArchivedSandbox) -> Result<(), StoreError> {
        self.ledger.archive_sandbox(&self.owner, ended).await
    }

    async fn all(&self) -> Vec<Record> {
        self.ledger.sandboxes(&self.owner, None, 1000).await.unwrap()
    }
}

fn image_row(digit: char) -> ImageRow {
    ImageRow {
        layers: super::super::LayerFacts::default(),
        id: digit.to_string().repeat(64).parse().unwrap(),
        config: Default::default(),
        file: "x.erofs".to_owned(),
        file_bytes: 1,
        file_hash: "h".to_owned(),
        agent_hash: "a".to_owned(),
        created_at_ms: 5,
        names: Vec::new(),
    }
}

fn record(image: &ImageId, name: Option<&str>) -> Record {
    Record {
        id: SandboxId::random(),
        spec: SandboxSpec {
            name: name.map(|name| name.parse().unwrap()),
            image: "torpor/base".to_owned(),
            image_id: image.clone(),
            resources: Default::default(),
            env: BTreeMap::from([("KEY".to_owned(), "value with 'quotes' and ü".to_owned())]),
            labels: Default::default(),
            network: Default::default(),
            lifetime: Default::default(),
            standby: Default::default(),
            entrypoint: vec!["python3".to_owned()],
            secrets: vec!["TOKEN".parse().unwrap()],
            ports: None,
            engine: None,
            pool: None,
            mounts: Some(Vec::new()),
        },
        state: PersistedState::Created,
        save: None,
        facts: Default::default(),
        created_at_ms: 1_700_000_000_123,
        last_used_at_ms: 1_700_000_000_456,
    }
}

#[tokio::test]
async fn a_record_comes_back_as_it_was_also_after_a_restart() {
    let world = world().await;
    let image = image_row('a');
    world.ledger.commit_image(&image, None, None).await.unwrap();
    let mut one = record(&image.id, Some("web"));
    let two = record(&image.id, None);
    world.record(&one).await.unwrap();
    world.record(&two).await.unwrap();
    one.state = PersistedState::Failed {
        reason: FailureReason::StartFailed { cause: "no memory".to_owned() },
    };
    one.last_used_at_ms += 5;
    world.record(&one).await.unwrap();
    let mut expected = vec![one, two];
    expected.sort_by(|a, b| a.id.cmp(&b.id));
    assert_eq!(world.all().await, expected);
    world.ledger.close().await;
    let again = SqliteLedger::open(&world.layout).await.unwrap();
    let owner = again.take_over().await.unwrap();
    assert_eq!(again.sandboxes(&owner, None, 9).await.unwrap(), expected);
}

#[tokio::test]
async fn a_row_that_cannot_be_read_is_named() {
    let world = world().await;
    let image = image_row('a');
    world.ledger.commit_image(&image, None, None).await.unwrap();
    let record = record(&image.id, None);
    world.record(&record).await.unwrap();
    let broken = sqlx::query("UPDATE sandboxes SET spec = '{}'");
    broken.execute(&world.ledger.writer).await.unwrap();
    let page = world.ledger.sandboxes(&world.owner, None, 9).await;
    let error = page.unwrap_err().to_string();
    assert!(error.contains(record.id.as_str()), "{error}");
}

#[tokio::test]
async fn many_writers_at_once_all_get_their_turn() {
    let world = world().await;
    let image = image_row('a');
    world.ledger.commit_image(&image, None, None).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..200 {
        let (ledger, owner) = (world.ledger.clone(), world.owner.clone());
        let record = record(&image.id, None);
        tasks.spawn(async move { ledger.create_sandbox(&owner, &record).await });
    }
    for result in tasks.join_all().await {
        result.unwrap();
    }
    assert_eq!(world.all().await.len(), 200);
}

#[tokio::test]
async fn the_ledger_is_durable_and_private() {
    use std::os::unix::fs::PermissionsExt;
    let world = world().await;
    let pragma = |sql: &'static str| {
        let ledger = world.ledger.clone();
        async move { sqlx::query(sql).fetch_one(&ledger.writer).await.unwrap() }
    };
    assert_eq!(pragma("PRAGMA journal_mode").await.get::<String, _>(0), "wal");
    assert_eq!(pragma("PRAGMA synchronous").await.get::<i64, _>(0), 2);
    assert_eq!(pragma("PRAGMA foreign_keys").await.get::<i64, _>(0), 1);
    for name in ["ledger.db", "ledger.db-wal"] {
        let mode = world.dir.path().join(name).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[tokio::test]
async fn a_key_is_found_until_it_is_deleted() {
    let world = world().await;
    let (row, secret) = world.ledger.create_key("laptop").await.unwrap();
    assert!(secret.starts_with("tpk_") && secret.len() == 4 + 64, "{secret}");
    assert!(secret.starts_with(&row.prefix) && row.prefix.len() < 12);
    assert_eq!(row.last_used_at_ms, None);
    assert_eq!(world.ledger.find_key(&secret).await.unwrap(), Some(row.clone()));
    let listed = world.ledger.keys(None, 9).await.unwrap();
    assert!(listed[0].last_used_at_ms.is_some());
    let swapped = secret.to_uppercase();
    for wrong in ["", "tpk_", "' OR 1=1 --", swapped.as_str(), &secret[..67], &"x".repeat(10_000)] {
        assert_eq!(world.ledger.find_key(wrong).await.unwrap(), None, "{wrong}");
    }
    assert!(world.ledger.delete_key(&row.id).await.unwrap());
    assert!(!world.ledger.delete_key(&row.id).await.unwrap());
    assert_eq!(world.ledger.find_key(&secret).await.unwrap(), None);
}

#[tokio::test]
async fn the_ledger_never_holds_a_key_itself() {
    let world = world().await;
    let (_, secret) = world.ledger.create_key("laptop").await.unwrap();
    world.ledger.close().await;
    for entry in std::fs::read_dir(world.dir.path()).unwrap().flatten() {
        if entry.file_type().unwrap().is_file() {
            let bytes = std::fs::read(entry.path()).unwrap();
            let found = bytes.windows(secret.len()).any(|window| window == secret.as_bytes());
            assert!(!found, "{:?}", entry.path());
        }
    }
}

#[tokio::test]
async fn a_label_has_bounds() {
    let world = world().await;
    assert!(world.ledger.create_key(&"x".repeat(201)).await.is_err());
    assert!(world.ledger.create_key("two\nlines").await.is_err());
}

// === Saves, snapshots, pools ===

fn manifest(image: &ImageId) -> Manifest {
    Manifest {
        format: Manifest::FORMAT,
        about: SaveAbout {
            kind: SnapshotKind::Memory,
            sandbox: SandboxId::random(),
            spec: record(image, None).spec,
            root: None,
            engine: "fake".to_owned(),
            engine_version: "1".to_owned(),
            created_at_ms: 7,
            pause_ms: 1.5,
            processes: Vec::new(),
            held: Vec::new(),
        },
        files: vec![SavedFile { name: "x".to_owned(), bytes: 40, hash: "h".to_owned() }],
        stored_bytes: None,
    }
}

async fn save(world: &World, image: &ImageId) -> SaveId {
    let id = SaveId::random();
    world.ledger.commit_save(&id, &manifest(image), &[40]).await.unwrap();
    id
}

fn snapshot(image: &ImageId, name: Option<&str>, save: Option<&SaveId>) -> SnapshotRecord {
    let snapshot = Snapshot {
        id: SnapshotId::random(),
        name: name.map(|name| name.parse().unwrap()),
        kind: SnapshotKind::Memory,
        state: SnapshotState::Completed,
        reason: None,
        message: None,
        sandbox: SandboxId::random(),
        sandbox_name: None,
        parent: None,
        image: "torpor/base".to_owned(),
        image_id: image.clone(),
        resources: Default::default(),
        created_at_ms: 9,
        size_bytes: 40,
        pause_ms: 0.5,
        engine: "fake".to_owned(),
        engine_version: "1".to_owned(),
    };
    SnapshotRecord { snapshot, save: save.cloned() }
}

fn pool_of(image: &ImageId, from: Option<(SnapshotId, SaveId)>) -> PoolRecord {
    PoolRecord {
        name: "ready".parse().unwrap(),
        size: 3,
        spec: record(image, None).spec,
        from,
        max: None,
        created_at_ms: 11,
        updated_at_ms: 11,
    }
}

/// A world with one image.
async fn pictured() -> (World, ImageId) {
    let world = world().await;
    let image = image_row('a');
    world.ledger.commit_image(&image, None, None).await.unwrap();
    (world, image.id)
}

#[tokio::test]
async fn what_a_sandbox_sleeps_in_comes_back_with_it() {
    let (world, image) = pictured().await;
    let mut one = record(&image, None);
    one.save = Some(save(&world, &image).await);
    one.state = PersistedState::Standby { interrupted: true };
    one.facts = Facts {
        wakes: 3,
        parent: Some(SnapshotId::random()),
        recovered_from_ms: Some(12),
        root: Some("a.erofs".to_owned()),
        queued_until_ms: Some(u64::MAX),
        request: Some("r".to_owned()),
    };
    world.record(&one).await.unwrap();
    assert_eq!(world.all().await, [one]);
}

#[tokio::test]
async fn what_names_a_save_or_an_image_that_is_gone_is_told_which() {
    let (world, image) = pictured().await;
    let (gone, no_image) = (SaveId::random(), image_row('b').id);
    let no_save = |error: StoreError| {
        assert!(
            matches!(&error, StoreError::NoSuchSave(id) if *id == gone.to_string()),
            "{error:?}"
        )
    };
    let mut sandbox = record(&image, None);
    sandbox.save = Some(gone.clone());
    no_save(world.record(&sandbox).await.unwrap_err());
    no_save(world.ledger.record_snapshot(&snapshot(&image, None, Some(&gone))).await.unwrap_err());
    let from = Some((SnapshotId::random(), gone.clone()));
    no_save(world.record_pool(&pool_of(&image, from)).await.unwrap_err());

    let image_gone = |error: StoreError| {
        assert!(
            matches!(&error, StoreError::NoSuchImage(id) if *id == no_image.to_string()),
            "{error:?}"
        )
    };
    let there = save(&world, &image).await;
    let mut sandbox = record(&no_image, None);
    sandbox.save = Some(there.clone());
    image_gone(world.record(&sandbox).await.unwrap_err());
    let from = Some((SnapshotId::random(), there));
    image_gone(world.record_pool(&pool_of(&no_image, from)).await.unwrap_err());
    let error = world.ledger.commit_save(&SaveId::random(), &manifest(&no_image), &[40]).await;
    image_gone(error.unwrap_err());
}

#[tokio::test]
async fn a_save_stays_while_anything_names_it() {
    let (world, image) = pictured().await;
    let id = save(&world, &image).await;
    let mut sandbox = record(&image, None);
    sandbox.save = Some(id.clone());
    let named = snapshot(&image, None, Some(&id));
    let pool = pool_of(&image, Some((named.snapshot.id.clone(), id.clone())));
    world.record(&sandbox).await.unwrap();
    world.ledger.record_snapshot(&named).await.unwrap();
    world.record_pool(&pool).await.unwrap();
    assert_eq!(world.ledger.save_bytes().await.unwrap(), 40);
    assert_eq!(world.ledger.drop_save(&id).await.unwrap(), None);
    world.archive(&sandbox.ended(1, None)).await.unwrap();
    assert_eq!(world.ledger.drop_save(&id).await.unwrap(), None);
    world.ledger.erase_snapshot(&named.snapshot.id).await.unwrap();
    assert_eq!(world.ledger.drop_save(&id).await.unwrap(), None);
    assert_eq!(world.ledger.drop_unpinned_saves().await.unwrap(), 0);
    world.ledger.erase_pool(&pool.name).await.unwrap();
    assert!(world.ledger.drop_save(&id).await.unwrap().is_some());
    assert_eq!(world.ledger.save(&id).await.unwrap(), None);
    assert_eq!(world.ledger.save_bytes().await.unwrap(), 0);
}

#[tokio::test]
async fn an_image_that_a_save_or_a_pool_needs_stays_and_says_for_whom() {
    let (world, image) = pictured().await;
    let needed_by = async || {
        let error = world.ledger.remove_image(&image, None).await.unwrap_err();
        let StoreError::InUse { by, .. } = error else { panic!("{error:?}") };
        by
    };
    let id = save(&world, &image).await;
    assert_eq!(needed_by().await, format!("save {id}"));
    let named = snapshot(&image, Some("base"), Some(&id));
    world.ledger.record_snapshot(&named).await.unwrap();
    assert_eq!(needed_by().await, "snapshot base");
    world.record_pool(&pool_of(&image, None)).await.unwrap();
    assert_eq!(needed_by().await, "pool ready and snapshot base");
    world.record(&record(&image, Some("web"))).await.unwrap();
    assert_eq!(needed_by().await, "pool ready, sandbox web and others");
}

#[tokio::test]
async fn images_are_read_by_pages_with_their_names() {
    let world = world().await;
    for digit in ['a', 'b', 'c'] {
        world
            .ledger
            .commit_image(&image_row(digit), Some(&format!("{digit}:1")), None)
            .await
            .unwrap();
    }
    let (second, third) = (image_row('b').id, image_row('c').id);
    world.ledger.name_image("b:0", &second).await.unwrap();
    let first = world.ledger.images(None, 2).await.unwrap();
    assert_eq!((first.len(), &first[1].names[..]), (2, &["b:0".to_owned(), "b:1".to_owned()][..]));
    let rest = world.ledger.images(Some(&(first[1].created_at_ms, second)), 9).await.unwrap();
    assert_eq!(rest.iter().map(|row| &row.id).collect::<Vec<_>>(), [&third]);
}

//! What every ledger promises a fleet, as tests that each implementation runs:
//!
//! ```ignore
//! torpor_lifecycle::ledger_contract!(MySubject::new().await);
//! ```

use async_trait::async_trait;
use serde_json::json;
use torpor_protocol::volume::UpdateVolume;
use torpor_protocol::{
    ImageId, Mount, SandboxId, SaveId, Snapshot, SnapshotId, SnapshotRef, VolumeId, VolumeKind,
    VolumeRef,
};

use crate::ledger::{FleetLedger, Owner, SnapshotFilter};
use crate::store::{
    Facts, PersistedState, PoolRecord, Record, SnapshotRecord, StoreError, VolumeRecord,
};

/// A ledger without anything in it but what a test records.
#[async_trait]
pub trait Subject: Send + Sync {
    fn ledger(&self) -> &dyn FleetLedger;
    /// An image that is there.
    fn image(&self) -> ImageId;
    /// A save that is there.
    async fn save(&self) -> SaveId;
}

/// A test for each promise; `$subject` makes a fresh one.
#[macro_export]
macro_rules! ledger_contract {
    ($subject:expr) => {
        $crate::ledger_contract!($subject,
            a_daemon_of_an_earlier_epoch_writes_nothing
            a_name_belongs_to_one_sandbox
            sandboxes_are_read_by_pages_each_once
            a_sandbox_that_ended_is_in_the_archive_only
            the_archive_is_read_by_pages_in_both_directions
            a_snapshot_is_found_by_its_id_and_by_its_name
            snapshots_are_read_by_pages_also_when_the_last_of_one_is_gone
            snapshots_of_a_sandbox_are_found_by_its_id_and_by_its_name
            ancestors_end_where_nobody_knows_more_and_where_they_began
            a_pool_is_created_once_changed_and_erased
            a_volume_is_found_changed_listed_by_kind_and_erased
            a_volume_has_one_writer_and_any_readers
            a_volume_that_a_sandbox_has_stays_until_the_sandbox_lets_go_or_ends
            a_sandbox_can_have_no_volume_that_is_gone
        );
    };
    ($subject:expr, $($test:ident)*) => {
        $(
            #[tokio::test]
            async fn $test() {
                $crate::ledger::contract::$test(&$subject).await;
            }
        )*
    };
}

fn record(subject: &impl Subject, name: Option<&str>) -> Record {
    let spec = json!({
        "name": name, "image": "torpor/base", "image_id": subject.image(), "resources": {},
    });
    Record {
        id: SandboxId::random(),
        spec: serde_json::from_value(spec).expect("it is a specification"),
        state: PersistedState::Created,
        save: None,
        facts: Facts::default(),
        created_at_ms: 1_700_000_000_123,
        last_used_at_ms: 1_700_000_000_456,
    }
}

fn snapshot(subject: &impl Subject, name: Option<&str>, created_at_ms: u64) -> SnapshotRecord {
    let snapshot = json!({
        "id": SnapshotId::random(), "name": name, "kind": "memory", "state": "completed",
        "sandbox": SandboxId::random(), "sandbox_name": null, "parent": null,
        "image": "torpor/base", "image_id": subject.image(), "resources": {},
        "created_at_ms": created_at_ms, "size_bytes": 40, "pause_ms": 0.5, "engine": "fake",
        "engine_version": "1",
    });
    let snapshot: Snapshot = serde_json::from_value(snapshot).expect("it is a snapshot");
    SnapshotRecord { snapshot, save: None }
}

async fn recorded(subject: &impl Subject, owner: &Owner) -> Vec<Record> {
    subject.ledger().sandboxes(owner, None, 100).await.unwrap()
}

fn not_owner(result: Result<(), StoreError>) {
    assert!(matches!(result, Err(StoreError::NotOwner(_))), "{result:?}");
}

fn name_taken(result: Result<(), StoreError>) {
    assert!(matches!(result, Err(StoreError::NameTaken(_))), "{result:?}");
}

pub async fn a_daemon_of_an_earlier_epoch_writes_nothing(subject: &impl Subject) {
    let ledger = subject.ledger();
    let old = ledger.take_over().await.unwrap();
    let kept = record(subject, Some("web"));
    ledger.create_sandbox(&old, &kept).await.unwrap();
    let new = ledger.take_over().await.unwrap();
    assert_eq!(new.node, old.node);
    assert!(new.epoch > old.epoch);

    let changed = Record { last_used_at_ms: 1, ..kept.clone() };
    not_owner(ledger.create_sandbox(&old, &record(subject, None)).await);
    not_owner(ledger.update_sandbox(&old, &changed).await);
    not_owner(ledger.archive_sandbox(&old, &kept.ended(1, None)).await);
    not_owner(ledger.archive_sandbox(&old, &record(subject, None).ended(1, None)).await);
    assert_eq!(recorded(subject, &old).await, []);
    assert_eq!(recorded(subject, &new).await, [kept]);
    assert_eq!(ledger.archived(None, 9).await.unwrap(), []);

    ledger.update_sandbox(&new, &changed).await.unwrap();
    not_owner(ledger.update_sandbox(&new, &record(subject, None)).await);
    assert_eq!(recorded(subject, &new).await, [changed]);
}

pub async fn a_name_belongs_to_one_sandbox(subject: &impl Subject) {
    let ledger = subject.ledger();
    let owner = ledger.take_over().await.unwrap();
    let (web, other) = (record(subject, Some("web")), record(subject, Some("other")));
    ledger.create_sandbox(&owner, &web).await.unwrap();
    ledger.create_sandbox(&owner, &other).await.unwrap();
    name_taken(ledger.create_sandbox(&owner, &record(subject, Some("web"))).await);
    let renamed = Record { spec: web.spec.clone(), ..other.clone() };
    name_taken(ledger.update_sandbox(&owner, &renamed).await);
    assert_eq!(ledger.find_sandbox(&other.id).await.unwrap(), Some(other.clone()));
    // Whoever ended has it no longer.
    ledger.archive_sandbox(&owner, &web.ended(1, None)).await.unwrap();
    ledger.update_sandbox(&owner, &renamed).await.unwrap();
}

pub async fn sandboxes_are_read_by_pages_each_once(subject: &impl Subject) {
    let ledger = subject.ledger();
    let owner = ledger.take_over().await.unwrap();
    let mut all: Vec<_> = (0..7).map(|_| record(subject, None)).collect();
    for one in &all {
        ledger.create_sandbox(&owner, one).await.unwrap();
    }
    all.sort_by(|a, b| a.id.cmp(&b.id));
    let mut found: Vec<Record> = Vec::new();
    loop {
        let page = ledger.sandboxes(&owner, found.last().map(|last| &last.id), 3).await.unwrap();
        assert!(page.len() <= 3);
        if page.is_empty() {
            break;
        }
        found.extend(page);
        assert!(found.len() <= all.len(), "a page begins again");
    }
    assert_eq!(found, all);
}

pub async fn a_sandbox_that_ended_is_in_the_archive_only(subject: &impl Subject) {
    let ledger = subject.ledger();
    let owner = ledger.take_over().await.unwrap();
    let (first, second) = (record(subject, Some("web")), record(subject, Some("web")));
    let now_ms = first.created_at_ms;
    for (one, ended_at_ms) in [(&first, now_ms + 1), (&second, now_ms + 2)] {
        ledger.create_sandbox(&owner, one).await.unwrap();
        let ended = one.ended(ended_at_ms, None);
        ledger.archive_sandbox(&owner, &ended).await.unwrap();
        // It ends once, however often that is said.
        ledger.archive_sandbox(&owner, &one.ended(now_ms + 9, None)).await.unwrap();
        assert_eq!(ledger.find_sandbox(&one.id).await.unwrap(), None);
        assert_eq!(ledger.find_archived(&one.id).await.unwrap(), Some(ended));
    }
    let name = "web".parse().unwrap();
    let last = ledger.find_archived_by_name(&name).await.unwrap().unwrap();
    assert_eq!(last.id, second.id);
    let nobody = "nobody".parse().unwrap();
    assert_eq!(ledger.find_archived_by_name(&nobody).await.unwrap(), None);
    let ids = ledger.archived_ids().await.unwrap();
    assert!(ids.len() == 2 && ids.contains(&first.id) && ids.contains(&second.id));
}

pub async fn the_archive_is_read_by_pages_in_both_directions(subject: &impl Subject) {
    let ledger = subject.ledger();
    let owner = ledger.take_over().await.unwrap();
    let now_ms = 1_700_000_000_000;
    let mut all: Vec<_> =
        [3, 1, 2, 2, 5].map(|n| record(subject, None).ended(now_ms + n, None)).into();
    for ended in &all {
        ledger.archive_sandbox(&owner, ended).await.unwrap();
    }
    all.sort_by(|a, b| (b.ended_at_ms, &b.id).cmp(&(a.ended_at_ms, &a.id)));
    let id = |place: usize| Some(&all[place].id);
    assert_eq!(ledger.archived(None, 2).await.unwrap(), all[..2]);
    assert_eq!(ledger.archived(id(1), 2).await.unwrap(), all[2..4]);
    assert_eq!(ledger.archived(id(4), 2).await.unwrap(), []);
    assert_eq!(ledger.archived_after(None, 2).await.unwrap(), all[3..]);
    assert_eq!(ledger.archived_after(id(3), 2).await.unwrap(), all[1..3]);
    assert_eq!(ledger.archived_after(id(0), 2).await.unwrap(), []);
    let stranger = SandboxId::random();
    for page in
        [ledger.archived(Some(&stranger), 2).await, ledger.archived_after(Some(&stranger), 2).await]
    {
        assert!(matches!(page, Err(StoreError::Invalid(_))), "{page:?}");
    }
}

pub async fn a_snapshot_is_found_by_its_id_and_by_its_name(subject: &impl Subject) {
    let ledger = subject.ledger();
    let mut base = snapshot(subject, Some("base"), 9);
    ledger.record_snapshot(&base).await.unwrap();
    ledger.record_snapshot(&snapshot(subject, None, 9)).await.unwrap();
    ledger.record_snapshot(&snapshot(subject, None, 9)).await.unwrap();
    name_taken(ledger.record_snapshot(&snapshot(subject, Some("base"), 9)).await);
    base.save = Some(subject.save().await);
    assert!(ledger.update_snapshot(&base).await.unwrap());
    let gone = SnapshotRecord { save: Some(SaveId::random()), ..snapshot(subject, None, 9) };
    let refused = ledger.record_snapshot(&gone).await;
    assert!(matches!(refused, Err(StoreError::NoSuchSave(_))), "{refused:?}");
    let gone = SnapshotRecord { save: gone.save, ..base.clone() };
    let refused = ledger.update_snapshot(&gone).await;
    assert!(matches!(refused, Err(StoreError::NoSuchSave(_))), "{refused:?}");

    let (by_id, by_name) =
        (SnapshotRef::Id(base.snapshot.id.clone()), SnapshotRef::Name("base".parse().unwrap()));
    for reference in [&by_id, &by_name] {
        assert_eq!(ledger.find_snapshot(reference).await.unwrap(), Some(base.clone()));
    }
    ledger.erase_snapshot(&base.snapshot.id).await.unwrap();
    ledger.erase_snapshot(&base.snapshot.id).await.unwrap();
    assert!(!ledger.update_snapshot(&base).await.unwrap(), "what is erased stays so");
    for reference in [&by_id, &by_name] {
        assert_eq!(ledger.find_snapshot(reference).await.unwrap(), None);
    }
}

pub async fn snapshots_are_read_by_pages_also_when_the_last_of_one_is_gone(subject: &impl Subject) {
    let ledger = subject.ledger();
    let mut all: Vec<_> = [4, 2, 2, 2, 1].map(|at_ms| snapshot(subject, None, at_ms)).into();
    for one in &all {
        ledger.record_snapshot(one).await.unwrap();
    }
    let place = |r: &SnapshotRecord| (r.snapshot.created_at_ms, r.snapshot.id.clone());
    all.sort_by_key(place);
    let every = SnapshotFilter::default();
    let mut found = ledger.snapshots(&every, None, 2).await.unwrap();
    let place = place(&found[1]);
    ledger.erase_snapshot(&place.1).await.unwrap();
    found.extend(ledger.snapshots(&every, Some(&place), 9).await.unwrap());
    assert_eq!(found, all);
}

pub async fn snapshots_of_a_sandbox_are_found_by_its_id_and_by_its_name(subject: &impl Subject) {
    let ledger = subject.ledger();
    let (mut named, other) = (snapshot(subject, None, 2), snapshot(subject, None, 1));
    named.snapshot.sandbox_name = Some("web".parse().unwrap());
    ledger.record_snapshot(&named).await.unwrap();
    ledger.record_snapshot(&other).await.unwrap();
    let sandbox = Some(other.snapshot.sandbox.clone());
    let sandbox_name = Some("web".parse().unwrap());
    let found = async |sandbox: Option<SandboxId>, sandbox_name| {
        let filter = SnapshotFilter { sandbox, sandbox_name };
        ledger.snapshots(&filter, None, 9).await.unwrap()
    };
    assert_eq!(found(sandbox.clone(), None).await, std::slice::from_ref(&other));
    assert_eq!(found(None, sandbox_name.clone()).await, std::slice::from_ref(&named));
    assert_eq!(found(sandbox, sandbox_name).await, [other, named]);
    assert_eq!(found(Some(SandboxId::random()), None).await, []);
}

pub async fn ancestors_end_where_nobody_knows_more_and_where_they_began(subject: &impl Subject) {
    let ledger = subject.ledger();
    let mut line: Vec<_> = (0..4).map(|at_ms| snapshot(subject, None, at_ms)).collect();
    let ids: Vec<_> = line.iter().map(|record| record.snapshot.id.clone()).collect();
    let forgotten = SnapshotId::random();
    line[0].snapshot.parent = Some(forgotten.clone());
    for place in 1..line.len() {
        line[place].snapshot.parent = Some(ids[place - 1].clone());
    }
    for record in &line {
        ledger.record_snapshot(record).await.unwrap();
    }
    let ancestors = async |limit| ledger.snapshot_ancestors(&ids[3], limit).await.unwrap();
    let expected = [ids[2].clone(), ids[1].clone(), ids[0].clone(), forgotten];
    assert_eq!(ancestors(9).await, expected);
    assert_eq!(ancestors(2).await, expected[..2]);
    // A sandbox that was restored is its own grandparent's child.
    line[0].snapshot.parent = Some(ids[3].clone());
    ledger.record_snapshot(&line[0]).await.unwrap();
    assert_eq!(ancestors(9).await, expected[..3]);
}

pub async fn a_pool_is_created_once_changed_and_erased(subject: &impl Subject) {
    let ledger = subject.ledger();
    let mut pool = PoolRecord {
        name: "ready".parse().unwrap(),
        size: 3,
        spec: record(subject, None).spec,
        from: None,
        max: None,
        created_at_ms: 11,
        updated_at_ms: 11,
    };
    assert!(!ledger.update_pool(&pool).await.unwrap());
    ledger.create_pool(&pool).await.unwrap();
    name_taken(ledger.create_pool(&pool).await);
    let later = PoolRecord { name: "second".parse().unwrap(), ..pool.clone() };
    ledger.create_pool(&later).await.unwrap();
    pool.size = 5;
    pool.max = Some(7);
    pool.from = Some((SnapshotId::random(), subject.save().await));
    assert!(ledger.update_pool(&pool).await.unwrap());
    assert_eq!(ledger.pools(None, 1).await.unwrap(), [pool.clone()]);
    assert_eq!(ledger.pools(Some(&pool.name), 9).await.unwrap(), [later]);
    assert!(ledger.erase_pool(&pool.name).await.unwrap());
    assert!(!ledger.erase_pool(&pool.name).await.unwrap());
}

fn volume(name: &str, kind: VolumeKind, created_at_ms: u64) -> VolumeRecord {
    VolumeRecord {
        id: VolumeId::random(),
        name: name.parse().unwrap(),
        kind,
        size_mib: 64,
        labels: Default::default(),
        permissions: Vec::new(),
        copy_of: None,
        made_for: None,
        elsewhere: None,
        created_at_ms,
    }
}

fn mount(of: &VolumeRecord, slot: u16, read_only: bool) -> Mount {
    Mount {
        slot,
        volume: of.id.clone(),
        name: of.name.clone(),
        kind: of.kind,
        subpath: "/".parse().unwrap(),
        path: format!("/mnt/{slot}").parse().unwrap(),
        read_only,
    }
}

fn with_mounts(record: &Record, mounts: Vec<Mount>) -> Record {
    let mut record = record.clone();
    record.spec.mounts = Some(mounts);
    record
}

fn in_use<T: std::fmt::Debug>(result: Result<T, StoreError>) {
    assert!(matches!(result, Err(StoreError::InUse { .. })), "{result:?}");
}

pub async fn a_volume_is_found_changed_listed_by_kind_and_erased(subject: &impl Subject) {
    let ledger = subject.ledger();
    let sandbox = SandboxId::random();
    let mut data = volume("data", VolumeKind::Volume, 2);
    let copy = VolumeRecord {
        copy_of: Some(data.id.clone()),
        made_for: Some(sandbox.clone()),
        ..volume("data-copy", VolumeKind::Volume, 2)
    };
    let shared = volume("shared", VolumeKind::Drive, 1);
    for one in [&data, &copy, &shared] {
        ledger.create_volume(one).await.unwrap();
    }
    name_taken(ledger.create_volume(&volume("data", VolumeKind::Drive, 9)).await);
    data.size_mib = 128;
    data.labels.insert("team".to_owned(), "a".to_owned());
    data.permissions = serde_json::from_value(json!([{ "access": "ro" }])).unwrap();
    // One after the other, by who knows of no other: none undoes another.
    for change in [
        UpdateVolume { size_mib: Some(128), ..UpdateVolume::default() },
        UpdateVolume { labels: Some(data.labels.clone()), ..UpdateVolume::default() },
        UpdateVolume { permissions: Some(data.permissions.clone()), ..UpdateVolume::default() },
    ] {
        ledger.update_volume(&data.id, &change).await.unwrap();
    }
    let nothing = UpdateVolume::default();
    assert_eq!(ledger.update_volume(&data.id, &nothing).await.unwrap(), data);
    let unknown = ledger.update_volume(&VolumeId::random(), &nothing).await;
    assert!(matches!(unknown, Err(StoreError::NoSuchVolume(_))), "{unknown:?}");

    for reference in [VolumeRef::Id(data.id.clone()), VolumeRef::Name(data.name.clone())] {
        assert_eq!(ledger.find_volume(&reference).await.unwrap().as_ref(), Some(&data));
    }
    let mut all = [data.clone(), copy.clone(), shared.clone()];
    all.sort_by_key(|record| (record.created_at_ms, record.id.clone()));
    let place = Some((all[0].created_at_ms, all[0].id.clone()));
    assert_eq!(ledger.volumes(None, None, 1).await.unwrap(), all[..1]);
    assert_eq!(ledger.volumes(None, place.as_ref(), 9).await.unwrap(), all[1..]);
    assert_eq!(ledger.volumes(Some(VolumeKind::Drive), None, 9).await.unwrap(), [shared]);
    assert_eq!(ledger.volumes_made_for(&sandbox).await.unwrap(), [copy.id]);
    assert_eq!(ledger.volumes_made_for(&SandboxId::random()).await.unwrap(), []);
    ledger.keep_volumes_of(&SandboxId::random()).await.unwrap();
    assert_eq!(ledger.volumes_made_for(&sandbox).await.unwrap().len(), 1);
    ledger.keep_volumes_of(&sandbox).await.unwrap();
    assert_eq!(ledger.volumes_made_for(&sandbox).await.unwrap(), []);
    assert!(ledger.erase_volume(&data.id).await.unwrap());
    assert!(!ledger.erase_volume(&data.id).await.unwrap());
    assert_eq!(ledger.find_volume(&VolumeRef::Name(data.name)).await.unwrap(), None);
}

pub async fn a_volume_has_one_writer_and_any_readers(subject: &impl Subject) {
    let ledger = subject.ledger();
    let owner = ledger.take_over().await.unwrap();
    let data = volume("data", VolumeKind::Volume, 1);
    let shared = volume("shared", VolumeKind::Drive, 2);
    ledger.create_volume(&data).await.unwrap();
    ledger.create_volume(&shared).await.unwrap();
    let [writer, reader, other] = [Some("writer"), None, None].map(|name| record(subject, name));
    let both = |record| with_mounts(record, vec![mount(&data, 0, false), mount(&shared, 1, false)]);
    let reads = |record| with_mounts(record, vec![mount(&data, 0, true), mount(&shared, 1, false)]);
    ledger.create_sandbox(&owner, &both(&writer)).await.unwrap();
    ledger.create_sandbox(&owner, &reads(&reader)).await.unwrap();
    in_use(ledger.create_sandbox(&owner, &both(&other)).await);
    assert_eq!(ledger.find_sandbox(&other.id).await.unwrap(), None);
    in_use(ledger.update_sandbox(&owner, &both(&reader)).await);
    assert_eq!(ledger.find_sandbox(&reader.id).await.unwrap(), Some(reads(&reader)));
    let twice = vec![mount(&data, 0, false), mount(&data, 1, false)];
    in_use(ledger.update_sandbox(&owner, &with_mounts(&writer, twice)).await);

    let mut expected = vec![(writer.id.clone(), false), (reader.id.clone(), true)];
    expected.sort();
    let held = ledger.attachments(&data.id).await.unwrap();
    let held: Vec<_> = held.into_iter().map(|one| (one.sandbox, one.read_only)).collect();
    assert_eq!(held, expected);
    let name = ledger.attachments(&shared.id).await.unwrap();
    assert!(name.iter().any(|one| one.sandbox_name == writer.spec.name));
    // The writer goes on as a reader: another one may write.
    ledger.update_sandbox(&owner, &reads(&writer)).await.unwrap();
    ledger.update_sandbox(&owner, &both(&reader)).await.unwrap();
}

pub async fn a_volume_that_a_sandbox_has_stays_until_the_sandbox_lets_go_or_ends(
    subject: &impl Subject,
) {
    let ledger = subject.ledger();
    let owner = ledger.take_over().await.unwrap();
    let data = volume("data", VolumeKind::Volume, 1);
    ledger.create_volume(&data).await.unwrap();
    let sandbox = record(subject, None);
    let has = with_mounts(&sandbox, vec![mount(&data, 3, true)]);
    ledger.create_sandbox(&owner, &sandbox).await.unwrap();
    ledger.update_sandbox(&owner, &has).await.unwrap();
    in_use(ledger.erase_volume(&data.id).await);
    // What changes otherwise does not touch it.
    ledger.update_sandbox(&owner, &Record { last_used_at_ms: 1, ..has.clone() }).await.unwrap();
    assert_eq!(ledger.attachments(&data.id).await.unwrap().len(), 1);
    ledger.update_sandbox(&owner, &sandbox).await.unwrap();
    assert_eq!(ledger.attachments(&data.id).await.unwrap(), []);
    ledger.update_sandbox(&owner, &has).await.unwrap();
    ledger.archive_sandbox(&owner, &has.ended(1, None)).await.unwrap();
    assert_eq!(ledger.attachments(&data.id).await.unwrap(), []);
    assert!(ledger.erase_volume(&data.id).await.unwrap());
}

pub async fn a_sandbox_can_have_no_volume_that_is_gone(subject: &impl Subject) {
    let ledger = subject.ledger();
    let owner = ledger.take_over().await.unwrap();
    let gone = volume("gone", VolumeKind::Drive, 1);
    let sandbox = record(subject, None);
    let has = with_mounts(&sandbox, vec![mount(&gone, 0, false)]);
    let refused = ledger.create_sandbox(&owner, &has).await;
    assert!(matches!(refused, Err(StoreError::NoSuchVolume(_))), "{refused:?}");
    ledger.create_sandbox(&owner, &sandbox).await.unwrap();
    let refused = ledger.update_sandbox(&owner, &has).await;
    assert!(matches!(refused, Err(StoreError::NoSuchVolume(_))), "{refused:?}");
    assert_eq!(ledger.find_sandbox(&sandbox.id).await.unwrap(), Some(sandbox));
}

//! What a save promises: it is whole or not there, damage is noticed and named, and it stays while
//! somebody needs it.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use torpor_lifecycle::store::{LocalSave, SaveAbout, Saves as _, SnapshotRecord, StoreError};
use torpor_protocol::snapshot::{SavedProcess, SnapshotKind, SnapshotState};
use torpor_protocol::{ImageId, SandboxId, SaveId, Snapshot, SnapshotId};

use crate::crash::sqlite;
use crate::world::{AGENT, World, names, record, sample};

/// Larger than what is hashed in one go, and no multiple of anything.
pub(crate) const PAGES: usize = 9_000_001;
/// Until then something in the background has happened.
const SOON: Duration = Duration::from_secs(20);

/// A world with one image.
pub(crate) async fn pictured() -> (World, ImageId) {
    let world = World::new().await;
    let source = tempfile::tempdir().unwrap();
    sample(source.path());
    let image = world.import_dir("sample", source.path()).await.unwrap();
    (world, image.id)
}

pub(crate) fn about(image: &ImageId) -> SaveAbout {
    SaveAbout {
        kind: SnapshotKind::Memory,
        sandbox: SandboxId::random(),
        spec: record(image, None).spec,
        root: None,
        engine: "gvisor".to_owned(),
        engine_version: "release-1".to_owned(),
        created_at_ms: 1_700_000_000_000,
        pause_ms: 72.123_456_789,
        held: Vec::new(),
        processes: vec![SavedProcess {
            pid: 1,
            parent: 0,
            command: "/bin/sh".to_owned(),
            user: 0,
            threads: 1,
        }],
    }
}

pub(crate) async fn commit(world: &World, image: &ImageId) -> Arc<LocalSave> {
    let staged = world.saves.stage().await.unwrap();
    let pages: Vec<u8> = (0..PAGES).map(|at| (at % 253) as u8).collect();
    std::fs::write(staged.path().join("pages.img"), pages).unwrap();
    std::fs::write(staged.path().join("checkpoint.img"), "state").unwrap();
    std::fs::write(staged.path().join("empty.img"), "").unwrap();
    world.saves.commit(staged, about(image)).await.unwrap()
}

pub(crate) fn snapshot(image: &ImageId, save: &LocalSave) -> SnapshotRecord {
    let snapshot = Snapshot {
        id: SnapshotId::random(),
        name: Some("base".parse().unwrap()),
        kind: save.manifest.about.kind,
        state: SnapshotState::Completed,
        reason: None,
        message: None,
        sandbox: save.manifest.about.sandbox.clone(),
        sandbox_name: None,
        parent: None,
        image: "sample".to_owned(),
        image_id: image.clone(),
        resources: Default::default(),
        created_at_ms: 5,
        size_bytes: save.manifest.size_bytes(),
        pause_ms: 1.0,
        engine: "gvisor".to_owned(),
        engine_version: "release-1".to_owned(),
    };
    SnapshotRecord { snapshot, save: Some(save.id.clone()) }
}

/// Makes something name the save.
pub(crate) async fn keep(world: &World, image: &ImageId, save: &LocalSave) -> SnapshotRecord {
    let record = snapshot(image, save);
    world.ledger.record_snapshot(&record).await.unwrap();
    record
}

/// The blobs of a data directory.
pub(crate) fn blobs(world: &World) -> Vec<String> {
    names(&world.dir.join("blobs"))
}

fn in_saves(world: &World) -> Vec<String> {
    names(&world.dir.join("saves"))
}

/// Waits until nothing is in staging and only these saves are left, and their blobs.
pub(crate) async fn settled(world: &World, saves: &[&SaveId]) {
    let mut expected: Vec<String> = saves.iter().map(|id| id.to_string()).collect();
    expected.sort();
    let mut named = BTreeSet::new();
    for id in saves {
        let manifest = world.saves.manifest(id).await.unwrap();
        named.extend(manifest.files.into_iter().map(|file| file.hash));
    }
    let expected = (expected, Vec::from_iter(named), Vec::<String>::new());
    let found = || (in_saves(world), blobs(world), names(&world.dir.join("staging")));
    let waiting = async {
        while found() != expected {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    if tokio::time::timeout(SOON, waiting).await.is_err() {
        panic!("{:?} instead of {expected:?}", found());
    }
}

pub(crate) fn flip(path: &Path, at: u64) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0u8];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

type Damage = fn(PathBuf);

pub(crate) fn corrupt_file(error: &StoreError) -> &str {
    let StoreError::CorruptSave { file, .. } = error else { panic!("{error:?}") };
    file
}

#[tokio::test]
async fn a_commit_is_there_with_its_hashes_also_after_a_restart() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    let listed: Vec<_> = save.manifest.files.iter().map(|f| (f.name.as_str(), f.bytes)).collect();
    assert_eq!(listed, [("checkpoint.img", 5), ("empty.img", 0), ("pages.img", PAGES as u64)]);
    let pages = std::fs::read(save.dir.join("pages.img")).unwrap();
    assert_eq!(save.manifest.files[2].hash, blake3::hash(&pages).to_hex().to_string());
    assert_eq!(world.saves.bytes().await.unwrap(), PAGES as u64 + 5);
    keep(&world, &image, &save).await;
    let (id, before) = (save.id.clone(), save.manifest.clone());
    drop(save);
    let world = world.reopen(AGENT).await;
    let save = world.saves.materialize(&id).await.unwrap();
    assert_eq!(save.manifest.files, before.files);
    assert_eq!(save.manifest.about.processes, before.about.processes);
    assert_eq!(world.saves.manifest(&id).await.unwrap(), save.manifest);
    assert_eq!(names(&world.dir.join("staging")), Vec::<String>::new());
}

#[tokio::test]
async fn a_stage_that_is_dropped_or_left_by_a_crash_goes() {
    let (world, _) = pictured().await;
    let staged = world.saves.stage().await.unwrap();
    std::fs::write(staged.path().join("pages.img"), "half").unwrap();
    drop(staged);
    settled(&world, &[]).await;
    let staged = world.saves.stage().await.unwrap();
    std::fs::write(staged.path().join("pages.img"), "half").unwrap();
    std::mem::forget(staged);
    let world = world.reopen(AGENT).await;
    settled(&world, &[]).await;
}

#[tokio::test]
async fn a_crash_between_rename_and_row_leaves_nothing() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    keep(&world, &image, &save).await;
    let orphan = world.dir.join("saves").join(SaveId::random().as_str());
    std::fs::create_dir(&orphan).unwrap();
    std::fs::copy(save.dir.join("pages.img"), orphan.join("pages.img")).unwrap();
    let id = save.id.clone();
    drop(save);
    let world = world.reopen(AGENT).await;
    settled(&world, &[&id]).await;
    world.saves.materialize(&id).await.unwrap();
}

#[tokio::test]
async fn a_crash_before_anything_names_a_save_leaves_nothing() {
    let (world, image) = pictured().await;
    let unnamed = commit(&world, &image).await.id.clone();
    let named = commit(&world, &image).await;
    keep(&world, &image, &named).await;
    let named = Arc::into_inner(named).unwrap().id;
    let world = world.reopen(AGENT).await;
    settled(&world, &[&named]).await;
    let error = world.saves.materialize(&unnamed).await.unwrap_err();
    assert!(matches!(error, StoreError::NoSuchSave(_)), "{error:?}");
    world.saves.materialize(&named).await.unwrap();
}

#[tokio::test]
async fn a_save_without_its_bytes_stays_and_says_what_is_missing() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    keep(&world, &image, &save).await;
    let (id, dir) = (save.id.clone(), save.dir.clone());
    drop(save);
    std::fs::remove_dir_all(dir).unwrap();
    for blob in blobs(&world) {
        std::fs::remove_file(world.dir.join("blobs").join(blob)).unwrap();
    }
    for _ in 0..2 {
        let error = world.saves.materialize(&id).await.unwrap_err();
        assert_eq!(corrupt_file(&error), "checkpoint.img");
        assert!(error.to_string().contains("it is missing"), "{error}");
    }
    let world = world.reopen(AGENT).await;
    assert_eq!(corrupt_file(&world.saves.materialize(&id).await.unwrap_err()), "checkpoint.img");
    world.saves.manifest(&id).await.unwrap();
}

#[tokio::test]
async fn every_damage_is_noticed_before_use_and_named() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    let (id, dir) = (save.id.clone(), save.dir.clone());
    keep(&world, &image, &save).await;
    let damages: [(&str, Damage); 3] = [
        ("pages.img", |dir| flip(&dir.join("pages.img"), PAGES as u64 - 1)),
        ("pages.img", |dir| flip(&dir.join("pages.img"), 0)),
        ("checkpoint.img", |dir| std::fs::write(dir.join("checkpoint.img"), "stat").unwrap()),
    ];
    for (file, damage) in damages {
        let whole = std::fs::read(dir.join(file)).unwrap();
        world.saves.materialize(&id).await.unwrap();
        damage(dir.clone());
        assert_eq!(corrupt_file(&world.saves.materialize(&id).await.unwrap_err()), file);
        assert_eq!(corrupt_file(&world.saves.verify(&id).await.unwrap_err()), file);
        std::fs::write(dir.join(file), whole).unwrap();
        world.saves.materialize(&id).await.unwrap();
    }
}

#[tokio::test]
async fn what_is_lost_or_replaced_in_the_directory_of_a_save_is_linked_again() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    let (id, dir) = (save.id.clone(), save.dir.clone());
    keep(&world, &image, &save).await;
    let damages: [Damage; 5] = [
        |dir| std::fs::remove_dir_all(dir).unwrap(),
        |dir| std::fs::remove_file(dir.join("empty.img")).unwrap(),
        |dir| {
            std::fs::remove_file(dir.join("pages.img")).unwrap();
            std::fs::write(dir.join("pages.img"), "something else").unwrap();
        },
        |dir| {
            std::fs::rename(dir.join("checkpoint.img"), dir.join("moved")).unwrap();
            std::os::unix::fs::symlink("moved", dir.join("checkpoint.img")).unwrap();
        },
        |dir| {
            std::fs::remove_file(dir.join("pages.img")).unwrap();
            std::os::unix::fs::symlink("/etc/passwd", dir.join("pages.img")).unwrap();
        },
    ];
    for damage in damages {
        damage(dir.clone());
        let before = bytes_read();
        let save = world.saves.materialize(&id).await.unwrap();
        assert!(bytes_read() - before < 1_000_000, "what is known is not read again");
        for file in &save.manifest.files {
            let found = std::fs::read(save.dir.join(&file.name)).unwrap();
            assert_eq!(blake3::hash(&found).to_hex().to_string(), file.hash);
            assert!(save.dir.join(&file.name).symlink_metadata().unwrap().is_file());
        }
    }
}

#[tokio::test]
async fn damage_that_leaves_no_trace_is_noticed_after_a_restart_and_by_verify() {
    use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};
    use std::os::unix::fs::MetadataExt;
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    keep(&world, &image, &save).await;
    let (id, path) = (save.id.clone(), save.dir.join("pages.img"));
    drop(save);
    let meta = path.metadata().unwrap();
    flip(&path, 77);
    let at = Timespec { tv_sec: meta.mtime(), tv_nsec: meta.mtime_nsec() };
    let times = Timestamps { last_access: at, last_modification: at };
    utimensat(CWD, &path, &times, AtFlags::empty()).unwrap();
    assert_eq!(corrupt_file(&world.saves.verify(&id).await.unwrap_err()), "pages.img");
    let world = world.reopen(AGENT).await;
    assert_eq!(corrupt_file(&world.saves.materialize(&id).await.unwrap_err()), "pages.img");
}

#[tokio::test]
async fn verify_tells_how_much_it_read() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    let verified = world.saves.verify(&save.id).await.unwrap();
    assert_eq!((verified.files, verified.bytes), (3, PAGES as u64 + 5));
    let error = world.saves.verify(&SaveId::random()).await.unwrap_err();
    assert!(matches!(error, StoreError::NoSuchSave(_)), "{error:?}");
}

#[tokio::test]
async fn a_manifest_of_a_newer_program_is_refused_with_the_reason() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    keep(&world, &image, &save).await;
    let id = save.id.clone();
    drop(save);
    let sql = "UPDATE saves SET manifest = json_set(manifest, '$.format', 3, '$.more', 1)";
    sqlite(&world.dir.join("ledger.db"), sql).await;
    let world = world.reopen(AGENT).await;
    let error = world.saves.materialize(&id).await.unwrap_err();
    assert!(matches!(error, StoreError::Invalid(_)), "{error:?}");
    assert!(error.to_string().contains("has format 3, this program knows up to 2"), "{error}");
}

#[tokio::test]
async fn what_an_engine_must_not_write_is_refused() {
    let (world, image) = pictured().await;
    let bad: [fn(&Path); 5] = [
        |_| {},
        |dir| std::fs::create_dir(dir.join("sub")).unwrap(),
        |dir| std::os::unix::fs::symlink("/etc/passwd", dir.join("link")).unwrap(),
        |dir| std::fs::write(dir.join("manifest.json"), "{}").unwrap(),
        |dir| std::fs::write(dir.join("odd name"), "").unwrap(),
    ];
    for fill in bad {
        let staged = world.saves.stage().await.unwrap();
        fill(staged.path());
        let error = world.saves.commit(staged, about(&image)).await.unwrap_err();
        assert!(matches!(error, StoreError::Invalid(_)), "{error:?}");
        assert_eq!(in_saves(&world), Vec::<String>::new());
        assert_eq!(blobs(&world), Vec::<String>::new());
        assert_eq!(names(&world.dir.join("staging")), Vec::<String>::new());
    }
}

#[tokio::test]
async fn a_commit_for_an_image_that_is_gone_leaves_nothing() {
    let (world, _) = pictured().await;
    let staged = world.saves.stage().await.unwrap();
    std::fs::write(staged.path().join("x.img"), "x").unwrap();
    let gone: ImageId = "0".repeat(64).parse().unwrap();
    let error = world.saves.commit(staged, about(&gone)).await.unwrap_err();
    assert!(matches!(error, StoreError::NoSuchImage(_)), "{error:?}");
    settled(&world, &[]).await;
}

#[tokio::test]
async fn a_commit_that_nobody_waits_for_leaves_nothing() {
    let (world, image) = pictured().await;
    let staged = world.saves.stage().await.unwrap();
    std::fs::write(staged.path().join("x.img"), vec![1; 1 << 20]).unwrap();
    let commit = world.saves.commit(staged, about(&image));
    assert!(tokio::time::timeout(Duration::ZERO, commit).await.is_err());
    settled(&world, &[]).await;
    assert_eq!(world.saves.bytes().await.unwrap(), 0);
}

#[tokio::test]
async fn a_released_save_goes_with_its_last_user_and_not_before() {
    let (world, image) = pictured().await;
    let first = commit(&world, &image).await;
    let id = first.id.clone();
    let second = world.saves.materialize(&id).await.unwrap();
    world.saves.release(&id).await;
    assert!(first.dir.join("pages.img").exists());
    drop(first);
    world.saves.release(&id).await;
    // Somebody may still begin to use it.
    let third = world.saves.materialize(&id).await.unwrap();
    drop(second);
    assert!(third.dir.join("pages.img").exists());
    drop(third);
    settled(&world, &[]).await;
    let error = world.saves.materialize(&id).await.unwrap_err();
    assert!(matches!(error, StoreError::NoSuchSave(_)), "{error:?}");
    world.saves.release(&id).await;
}

#[tokio::test]
async fn a_guard_may_be_dropped_anywhere() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    world.saves.release(&save.id).await;
    std::thread::spawn(move || drop(save)).join().unwrap();
    settled(&world, &[]).await;
}

#[tokio::test]
async fn a_save_that_something_names_is_kept_whoever_lets_go() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    let id = save.id.clone();
    // Released while it is used, and named before the last user goes.
    world.saves.release(&id).await;
    let record = keep(&world, &image, &save).await;
    drop(save);
    world.saves.release(&id).await;
    drop(world.saves.materialize(&id).await.unwrap());
    assert_eq!(in_saves(&world), [id.to_string()]);
    world.ledger.erase_snapshot(&record.snapshot.id).await.unwrap();
    world.saves.release(&id).await;
    settled(&world, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_users_at_once_read_a_save_once_and_all_get_it() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    keep(&world, &image, &save).await;
    let id = save.id.clone();
    drop(save);
    let world = world.reopen(AGENT).await;
    let before = bytes_read();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let (saves, id) = (world.saves.clone(), id.clone());
        tasks.spawn(async move { saves.materialize(&id).await.map(drop) });
    }
    for result in tasks.join_all().await {
        result.unwrap();
    }
    let read = bytes_read() - before;
    assert!((PAGES as u64..2 * PAGES as u64).contains(&read), "{read}");
}

/// Bytes this process has read; each test is a process of its own.
pub(crate) fn bytes_read() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap();
    line.parse().unwrap()
}

#[tokio::test]
async fn a_save_is_read_once_per_daemon() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    keep(&world, &image, &save).await;
    let before = bytes_read();
    for _ in 0..10 {
        world.saves.materialize(&save.id).await.unwrap();
    }
    assert!(bytes_read() - before < 1_000_000, "a committed save is known");
    let id = save.id.clone();
    drop(save);
    let world = world.reopen(AGENT).await;
    world.saves.warm_up().await;
    let before = bytes_read();
    world.saves.materialize(&id).await.unwrap();
    assert!(bytes_read() - before < 1_000_000, "it was read ahead");
    // A file that was written anew is read anew.
    let path = world.dir.join("saves").join(id.as_str()).join("pages.img");
    let pages = std::fs::read(&path).unwrap();
    std::fs::write(&path, pages).unwrap();
    let before = bytes_read();
    world.saves.materialize(&id).await.unwrap();
    assert!(bytes_read() - before >= PAGES as u64);
}

#[tokio::test]
async fn reading_ahead_survives_corrupt_saves() {
    let (world, image) = pictured().await;
    let mut ids = Vec::new();
    for number in 0..2 {
        let staged = world.saves.stage().await.unwrap();
        std::fs::write(staged.path().join("pages.img"), vec![number; 2_000_000]).unwrap();
        let save = world.saves.commit(staged, about(&image)).await.unwrap();
        let mut record = snapshot(&image, &save);
        record.snapshot.name = None;
        world.ledger.record_snapshot(&record).await.unwrap();
        flip(&save.dir.join("pages.img"), 5);
        ids.push(save.id.clone());
    }
    let whole = commit(&world, &image).await;
    keep(&world, &image, &whole).await;
    drop(whole);
    let world = world.reopen(AGENT).await;
    world.saves.warm_up().await;
    for id in ids {
        assert_eq!(corrupt_file(&world.saves.materialize(&id).await.unwrap_err()), "pages.img");
    }
}

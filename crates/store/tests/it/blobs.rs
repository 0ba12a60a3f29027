//! What saves have in common is stored once, goes with the last of them, and is never taken on trust;
//! saves of before there were blobs still open.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use torpor_lifecycle::store::{LocalSave, PinOwner, Saves as _};
use torpor_protocol::ImageId;
use torpor_store::{CachedStep, Outcome};

use crate::crash::sqlite;
use crate::saves::{PAGES, about, blobs, commit, flip, keep, pictured, settled, snapshot};
use crate::world::{AGENT, World};

/// A snapshot without a name keeps it.
async fn keep_unnamed(world: &World, image: &ImageId, save: &LocalSave) {
    let mut record = snapshot(image, save);
    record.snapshot.name = None;
    world.ledger.record_snapshot(&record).await.unwrap();
}

fn inode(save: &LocalSave, file: &str) -> u64 {
    save.dir.join(file).metadata().unwrap().ino()
}

#[tokio::test]
async fn what_two_saves_have_in_common_is_stored_and_counted_once() {
    let (world, image) = pictured().await;
    let first = commit(&world, &image).await;
    let staged = world.saves.stage().await.unwrap();
    std::fs::copy(first.dir.join("pages.img"), staged.path().join("other.img")).unwrap();
    std::fs::write(staged.path().join("delta"), "12345678").unwrap();
    let second = world.saves.commit(staged, about(&image)).await.unwrap();
    assert_eq!(inode(&first, "pages.img"), inode(&second, "other.img"));
    assert_eq!(world.saves.bytes().await.unwrap(), PAGES as u64 + 5 + 8);
    assert_eq!(second.manifest.size_bytes(), PAGES as u64 + 8);
    assert_eq!(blobs(&world).len(), 4);
    let id = first.id.clone();
    drop(first);
    world.saves.release(&id).await;
    settled(&world, &[&second.id]).await;
    world.saves.verify(&second.id).await.unwrap();
}

#[tokio::test]
async fn a_save_of_an_older_program_opens_as_it_is_and_becomes_blobs() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    let files = save.manifest.files.clone();
    keep(&world, &image, &save).await;
    let (id, dir) = (save.id.clone(), save.dir.clone());
    let text = serde_json::to_vec_pretty(&save.manifest).unwrap();
    drop(save);
    let closed = world.close().await;
    // What such a program left: all of it in one directory, and a ledger that knows no blobs.
    std::fs::write(dir.join("manifest.json"), text).unwrap();
    std::fs::remove_dir_all(closed.dir.join("blobs")).unwrap();
    let ledger = closed.dir.join("ledger.db");
    for sql in [
        "DROP VIEW save_pins",
        "DROP TABLE save_files",
        "DELETE FROM _sqlx_migrations WHERE version = 12",
    ] {
        sqlite(&ledger, sql).await;
    }
    let world = closed.open(AGENT).await;
    assert_eq!(world.saves.bytes().await.unwrap(), PAGES as u64 + 5);
    let save = world.saves.materialize(&id).await.unwrap();
    assert_eq!(save.manifest.files, files);
    assert_eq!(std::fs::read(save.dir.join("checkpoint.img")).unwrap(), b"state");
    assert_eq!(blobs(&world).len(), 3);
    world.saves.verify(&id).await.unwrap();
    // The next one shares what it has.
    let next = commit(&world, &image).await;
    assert_eq!(inode(&save, "pages.img"), inode(&next, "pages.img"));
    let unnamed = next.id.clone();
    drop((save, next));
    world.saves.release(&unnamed).await;
    settled(&world, &[&id]).await;
}

#[tokio::test]
async fn damage_in_a_blob_does_not_spread_to_the_next_save_with_its_content() {
    let (world, image) = pictured().await;
    let first = commit(&world, &image).await;
    keep(&world, &image, &first).await;
    let id = first.id.clone();
    flip(&first.dir.join("pages.img"), 7);
    flip(&first.dir.join("checkpoint.img"), 0);
    drop(first);
    // This daemon has read nothing of it.
    let world = world.reopen(AGENT).await;
    let second = commit(&world, &image).await;
    world.saves.verify(&second.id).await.unwrap();
    world.saves.verify(&id).await.expect("it is the same content, which is whole again");
    assert_eq!(
        inode(&second, "pages.img"),
        inode(&world.saves.materialize(&id).await.unwrap(), "pages.img")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn saves_with_the_same_content_come_and_go_at_once_and_what_is_kept_is_whole() {
    let (world, image) = pictured().await;
    let world = Arc::new(world);
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8 {
        let (world, image) = (Arc::clone(&world), image.clone());
        tasks.spawn(async move {
            let mut last = None;
            for round in 0..20 {
                let staged = world.saves.stage().await.unwrap();
                // Three contents for everybody.
                let content = [b'a' + (task + round) % 3; 5000];
                std::fs::write(staged.path().join("pages.img"), content).unwrap();
                let save = world.saves.commit(staged, about(&image)).await.unwrap();
                if round == 19 {
                    keep_unnamed(&world, &image, &save).await;
                    last = Some(save.id.clone());
                }
                let id = save.id.clone();
                drop(save);
                world.saves.release(&id).await;
            }
            last.unwrap()
        });
    }
    let kept = tasks.join_all().await;
    settled(&world, &kept.iter().collect::<Vec<_>>()).await;
    for id in &kept {
        world.saves.verify(id).await.unwrap();
    }
    assert!(blobs(&world).len() <= 3, "{:?}", blobs(&world));
}

#[tokio::test]
async fn a_blob_that_no_save_names_goes_at_the_next_start() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    keep(&world, &image, &save).await;
    let id = save.id.clone();
    drop(save);
    for orphan in ["0".repeat(64), format!("sparse:{}", "1".repeat(64)), "draft".to_owned()] {
        std::fs::write(world.dir.join("blobs").join(orphan), "left by a crash").unwrap();
    }
    let world = world.reopen(AGENT).await;
    settled(&world, &[&id]).await;
    world.saves.verify(&id).await.unwrap();
}

#[tokio::test]
async fn whoever_keeps_a_save_is_known() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    let id = save.id.clone();
    assert_eq!(world.saves.pins(&id).await.unwrap(), [PinOwner::Reader]);
    let snapshot = keep(&world, &image, &save).await.snapshot.id;
    drop(save);
    assert_eq!(world.saves.pins(&id).await.unwrap(), [PinOwner::Snapshot(snapshot.clone())]);
    world.ledger.erase_snapshot(&snapshot).await.unwrap();
    assert_eq!(world.saves.pins(&id).await.unwrap(), []);
}

#[tokio::test]
async fn a_step_of_a_build_keeps_its_save_until_it_is_forgotten() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    let id = save.id.clone();
    let step = CachedStep {
        key: "key".to_owned(),
        outcome: Outcome::Save(id.clone()),
        step: "RUN make".to_owned(),
        bytes: 7,
        created_at_ms: 1,
        used_at_ms: 1,
    };
    assert_eq!(world.ledger.record_cached_step(&step).await.unwrap(), None);
    drop(save);
    let world = world.reopen(AGENT).await;
    assert_eq!(world.saves.pins(&id).await.unwrap(), [PinOwner::Build("key".to_owned())]);
    let error = world.images.remove(image.as_str()).await.unwrap_err().to_string();
    assert!(error.contains("build cache"), "{error}");
    let found = world.ledger.use_cached_step("key", 9).await.unwrap().unwrap();
    assert_eq!((found.outcome, found.bytes), (step.outcome.clone(), 7));
    assert_eq!(world.ledger.cached_steps().await.unwrap()[0].used_at_ms, 9);

    // Another save under the same key lets the first go.
    let other = commit(&world, &image).await.id.clone();
    let again = CachedStep { outcome: Outcome::Save(other.clone()), ..step };
    assert_eq!(world.ledger.record_cached_step(&again).await.unwrap(), Some(id.clone()));
    world.saves.release(&id).await;
    world.saves.manifest(&id).await.unwrap_err();
    world.ledger.forget_cached_step("key").await.unwrap();
    world.saves.release(&other).await;
    settled(&world, &[]).await;
    world.images.remove(image.as_str()).await.unwrap();
}

//! Large files of saves: shared by several of them, and mostly holes.

use std::io::Cursor;
use std::os::unix::fs::{FileExt, MetadataExt};

use torpor_lifecycle::store::{Ledger as _, Save, Saves as _};
use torpor_protocol::SnapshotId;

use crate::parcel::export;
use crate::saves::{PAGES, about, bytes_read, commit, corrupt_file, flip, keep, pictured, settled};
use crate::world::{AGENT, World};

#[tokio::test]
async fn a_file_that_two_saves_share_is_read_once_and_by_verify_again() {
    let (world, image) = pictured().await;
    let first = commit(&world, &image).await;
    let staged = world.saves.stage().await.unwrap();
    std::fs::hard_link(first.dir.join("pages.img"), staged.path().join("pages.img")).unwrap();
    std::fs::write(staged.path().join("delta"), "more").unwrap();
    let before = bytes_read();
    let second = world.saves.commit(staged, about(&image)).await.unwrap();
    world.saves.open(&first.id).await.unwrap();
    assert!(bytes_read() - before < 1_000_000, "{}", bytes_read() - before);
    let hash = |save: &Save| {
        let mut files = save.manifest.files.iter();
        files.find(|file| file.name == "pages.img").unwrap().hash.clone()
    };
    assert_eq!(hash(&first), hash(&second));
    let before = bytes_read();
    world.saves.verify(&second.id).await.unwrap();
    assert!(bytes_read() - before >= PAGES as u64);

    let mut record = keep(&world, &image, &first).await;
    record.snapshot.id = SnapshotId::random();
    record.snapshot.name = None;
    record.save = Some(second.id.clone());
    world.ledger.record_snapshot(&record).await.unwrap();
    let ids = [first.id.clone(), second.id.clone()];
    drop((first, second));
    let world = world.reopen(AGENT).await;
    let before = bytes_read();
    world.saves.warm_up().await;
    let read = bytes_read() - before;
    assert!((PAGES as u64..2 * PAGES as u64).contains(&read), "{read}");
    // One goes, the other stays known and whole.
    world.ledger.erase_snapshot(&record.snapshot.id).await.unwrap();
    world.saves.release(&ids[1]).await;
    settled(&world, &[&ids[0]]).await;
    let before = bytes_read();
    world.saves.open(&ids[0]).await.unwrap();
    assert!(bytes_read() - before < 1_000_000, "losing a name is no change");
    flip(&world.dir.join("saves").join(ids[0].as_str()).join("pages.img"), 5);
    assert_eq!(corrupt_file(&world.saves.open(&ids[0]).await.unwrap_err()), "pages.img");
}

#[tokio::test]
async fn holes_are_neither_read_nor_counted() {
    let (world, image) = pictured().await;
    let staged = world.saves.stage().await.unwrap();
    let disk = std::fs::File::create(staged.path().join("disk")).unwrap();
    disk.set_len(64 << 20).unwrap();
    disk.write_all_at(&[1; 8192], 32 << 20).unwrap();
    drop(disk);
    let before = bytes_read();
    let save = world.saves.commit(staged, about(&image)).await.unwrap();
    assert!(bytes_read() - before < 1_000_000);
    assert_eq!(save.manifest.files[0].bytes, 64 << 20);
    let mut whole = vec![0; 64 << 20];
    whole[32 << 20..][..8192].fill(1);
    assert_eq!(save.manifest.files[0].hash, blake3::hash(&whole).to_hex().to_string());
    assert!((8192..1 << 20).contains(&save.manifest.size_bytes()), "{:?}", save.manifest);
    assert_eq!(world.saves.bytes().await.unwrap(), save.manifest.size_bytes());
    assert_eq!(world.saves.verify(&save.id).await.unwrap().bytes, 64 << 20);
}

#[tokio::test]
async fn holes_are_holes_again_in_another_installation() {
    let (here, image) = pictured().await;
    let staged = here.saves.stage().await.unwrap();
    let disk = std::fs::File::create(staged.path().join("disk")).unwrap();
    disk.set_len(8 << 20).unwrap();
    for at in [0, 300_000, 4 << 20, (8 << 20) - 4096 - 5] {
        disk.write_all_at(&[1; 100], at).unwrap();
    }
    drop(disk);
    let save = here.saves.commit(staged, about(&image)).await.unwrap();
    let bytes = export(&here, &image, &save, true).await;
    let there = World::new().await;
    let imported = there.saves.import(&there.images, Cursor::new(bytes)).await.unwrap();
    assert_eq!(imported.save.manifest.files, save.manifest.files);
    let found = imported.save.dir.join("disk");
    assert!(found.metadata().unwrap().blocks() * 512 < 256 * 1024);
    assert!(std::fs::read(&found).unwrap() == std::fs::read(save.dir.join("disk")).unwrap());
}

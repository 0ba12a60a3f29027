//! Large files of saves: shared by several of them, and mostly holes.

use std::fs::File;
use std::io::Cursor;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use torpor_lifecycle::store::{LocalSave, Saves as _};
use torpor_protocol::{ImageId, SnapshotId};

use crate::saves::{
    PAGES, about, bytes_read, commit, corrupt_file, flip, keep, pictured, settled, snapshot,
};
use crate::snapshot_file::{export, nothing_in, packed, parts, refused};
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
    world.saves.materialize(&first.id).await.unwrap();
    assert!(bytes_read() - before < 1_000_000, "{}", bytes_read() - before);
    let hash = |save: &LocalSave| {
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
    world.saves.materialize(&ids[0]).await.unwrap();
    assert!(bytes_read() - before < 1_000_000, "losing a name is no change");
    flip(&world.dir.join("saves").join(ids[0].as_str()).join("pages.img"), 5);
    assert_eq!(corrupt_file(&world.saves.materialize(&ids[0]).await.unwrap_err()), "pages.img");
}

/// A file with data at a few places, as the disk of a machine.
fn sparse_file(path: &Path, bytes: u64, places: &[u64]) {
    let file = File::create(path).unwrap();
    file.set_len(bytes).unwrap();
    for at in places {
        file.write_all_at(&[1; 100], *at).unwrap();
    }
}

/// A save of one sparse file.
async fn commit_disk(world: &World, image: &ImageId, bytes: u64, places: &[u64]) -> Arc<LocalSave> {
    let staged = world.saves.stage().await.unwrap();
    sparse_file(&staged.path().join("disk"), bytes, places);
    world.saves.commit(staged, about(image)).await.unwrap()
}

#[tokio::test]
async fn holes_are_neither_read_nor_counted() {
    let (world, image) = pictured().await;
    let before = bytes_read();
    let save = commit_disk(&world, &image, 10 << 30, &[0, 5 << 30]).await;
    world.saves.materialize(&save.id).await.unwrap();
    assert_eq!(world.saves.verify(&save.id).await.unwrap().bytes, 10 << 30);
    assert!(bytes_read() - before < 1_000_000, "{}", bytes_read() - before);
    let disk = &save.manifest.files[0];
    assert_eq!((disk.bytes, save.manifest.format), (10 << 30, 2));
    assert!(disk.hash.starts_with("sparse:"), "{disk:?}");
    assert!((8192..1 << 20).contains(&save.manifest.size_bytes()), "{:?}", save.manifest);
    assert_eq!(world.saves.bytes().await.unwrap(), save.manifest.size_bytes());
}

#[tokio::test]
async fn files_without_holes_are_hashed_as_older_programs_do() {
    let (world, image) = pictured().await;
    let save = commit(&world, &image).await;
    assert_eq!(save.manifest.format, 1);
    for file in &save.manifest.files {
        let content = std::fs::read(save.dir.join(&file.name)).unwrap();
        assert_eq!(file.hash, blake3::hash(&content).to_hex().to_string());
    }
}

#[tokio::test]
async fn every_damage_of_a_sparse_file_is_noticed() {
    let (world, image) = pictured().await;
    let bytes = 64 << 20;
    let damages: [fn(&File); 5] = [
        |disk| disk.write_all_at(&[2], (20 << 20) + 5).unwrap(),
        |disk| disk.write_all_at(&[1], 40 << 20).unwrap(),
        |disk| disk.write_all_at(&[0; 100], 20 << 20).unwrap(),
        |disk| disk.set_len((64 << 20) - 1).unwrap(),
        |disk| disk.set_len((64 << 20) + 4096).unwrap(),
    ];
    for damage in damages {
        let save = commit_disk(&world, &image, bytes, &[0, 20 << 20]).await;
        damage(&File::options().write(true).open(save.dir.join("disk")).unwrap());
        assert_eq!(corrupt_file(&world.saves.materialize(&save.id).await.unwrap_err()), "disk");
        assert_eq!(corrupt_file(&world.saves.verify(&save.id).await.unwrap_err()), "disk");
        let record = snapshot(&image, &save);
        let exported = world.saves.export(save, &record.snapshot, false, std::io::sink()).await;
        assert_eq!(corrupt_file(&exported.unwrap_err()), "disk");
    }
}

#[tokio::test]
async fn zeros_in_the_place_of_a_hole_are_no_damage() {
    let (world, image) = pictured().await;
    let save = commit_disk(&world, &image, 64 << 20, &[0, 20 << 20]).await;
    let disk = File::options().write(true).open(save.dir.join("disk")).unwrap();
    disk.write_all_at(&[0; 100_000], 30 << 20).unwrap();
    world.saves.materialize(&save.id).await.unwrap();
    world.saves.verify(&save.id).await.unwrap();
}

#[tokio::test]
async fn an_export_is_as_large_as_what_is_in_it_and_comes_back_the_same() {
    let (here, image) = pictured().await;
    let staged = here.saves.stage().await.unwrap();
    let places: Vec<u64> = (0..100).map(|n| n * 70_000_000).collect();
    sparse_file(&staged.path().join("disk"), (10 << 30) + 5, &places);
    sparse_file(&staged.path().join("memory"), 1 << 30, &[0, 4096, 300_000, (1 << 30) - 100]);
    sparse_file(&staged.path().join("nothing"), 1 << 30, &[]);
    std::fs::write(staged.path().join("state"), vec![7; 100_000]).unwrap();
    let save = here.saves.commit(staged, about(&image)).await.unwrap();
    // Zeros that somebody wrote are not worth their bytes.
    let disk = File::options().write(true).open(save.dir.join("disk")).unwrap();
    disk.write_all_at(&vec![0; 4 << 20], 9 << 30).unwrap();
    drop(disk);
    let bytes = export(&here, &image, &save, false).await;
    assert!(bytes.len() < 1_200_000, "{}", bytes.len());
    let with_image = export(&here, &image, &save, true).await;
    let there = World::new().await;
    let imported = there.saves.import(&there.images, Cursor::new(with_image)).await.unwrap();
    assert_eq!(imported.save.manifest.files, save.manifest.files);
    let blocks = |save: &LocalSave, name: &str| save.dir.join(name).metadata().unwrap().blocks();
    assert_eq!(blocks(&imported.save, "memory"), blocks(&save, "memory"));
    assert!(blocks(&imported.save, "disk") < blocks(&save, "disk"), "the zeros are a hole now");
    assert_eq!(blocks(&imported.save, "nothing"), 0);
    let disk = File::open(imported.save.dir.join("disk")).unwrap();
    for place in places {
        let mut found = [0; 102];
        disk.read_exact_at(&mut found[..101], place).unwrap();
        assert!(found[..100] == [1; 100] && found[100] == 0, "{place}");
    }
}

#[tokio::test]
async fn other_tools_read_sparse_files_and_may_write_them_as_plain_ones() {
    let (here, image) = pictured().await;
    let places: Vec<u64> = (0..60).map(|n| n * 1_000_000).collect();
    let save = commit_disk(&here, &image, (64 << 20) + 7, &places).await;
    let bytes = export(&here, &image, &save, true).await;
    let found = parts(&bytes);
    let content = std::fs::read(save.dir.join("disk")).unwrap();
    assert!(found[1].1 == content);
    let there = World::new().await;
    let again = there.saves.import(&there.images, Cursor::new(packed(&found))).await.unwrap();
    assert_eq!(again.save.manifest.files, save.manifest.files);
    let to = tempfile::tempdir().unwrap();
    std::fs::write(to.path().join("x.tar"), &bytes).unwrap();
    let tar = Command::new("tar").args(["-xf", "x.tar", "disk"]).current_dir(to.path()).status();
    match tar {
        Ok(status) => {
            assert!(status.success());
            assert!(std::fs::read(to.path().join("disk")).unwrap() == content);
        }
        Err(error) => torpor_testkit::missing(format!("there is no tar: {error}")),
    }
}

/// Where the header of the sparse entry is.
fn sparse_header(bytes: &[u8]) -> usize {
    let is = |at: &usize| bytes[*at..].starts_with(b"disk\0") && bytes[*at + 156] == b'S';
    (0..bytes.len()).step_by(512).find(is).unwrap()
}

type Tampering = fn(&mut tar::GnuHeader);

#[tokio::test]
async fn sparse_files_made_to_do_harm_are_refused() {
    let (here, image) = pictured().await;
    let save = commit_disk(&here, &image, 64 << 20, &[0, 20 << 20]).await;
    let whole = export(&here, &image, &save, true).await;
    let there = World::new().await;
    let at = sparse_header(&whole);
    let cases: [(&str, &str, Tampering, &str); 9] = [
        ("", "", |header| header.set_real_size(1 << 60), "should have 67108864"),
        ("", "", |header| header.set_real_size((64 << 20) + 1), "should have 67108864"),
        ("67108864", "67108865", |header| header.set_real_size((64 << 20) + 1), "damaged"),
        ("", "", |header| header.set_real_size(4096), "leads out"),
        ("", "", |header| header.sparse[1].set_offset(0), "goes back"),
        ("", "", |header| header.sparse[1].set_offset(30 << 20), "damaged"),
        ("", "", |header| header.sparse[1].set_length(1 << 20), "another content"),
        ("sparse:", "SPARSE:", |_| {}, "is no hash"),
        ("\"hash\":\"sparse:", "       \"hash\":\"", |_| {}, "is sparse"),
    ];
    for (from, to, tampering, says) in cases {
        let mut bytes = whole.clone();
        let mut header = tar::Header::new_old();
        header.as_mut_bytes().copy_from_slice(&bytes[at..at + 512]);
        tampering(header.as_gnu_mut().unwrap());
        header.set_cksum();
        bytes[at..at + 512].copy_from_slice(header.as_bytes());
        if !from.is_empty() {
            let place = bytes.windows(from.len()).position(|text| text == from.as_bytes()).unwrap();
            bytes[place..place + to.len()].copy_from_slice(to.as_bytes());
        }
        let text = refused(&there, bytes).await;
        assert!(text.contains(says), "{says}: {text}");
        nothing_in(&there);
    }
}

#[tokio::test]
async fn holes_are_holes_again_in_another_installation() {
    let (here, image) = pictured().await;
    let places = [0, 300_000, 4 << 20, (8 << 20) - 4096 - 5];
    let save = commit_disk(&here, &image, 8 << 20, &places).await;
    let bytes = export(&here, &image, &save, true).await;
    let there = World::new().await;
    let imported = there.saves.import(&there.images, Cursor::new(bytes)).await.unwrap();
    assert_eq!(imported.save.manifest.files, save.manifest.files);
    let found = imported.save.dir.join("disk");
    assert!(found.metadata().unwrap().blocks() * 512 < 256 * 1024);
    assert!(std::fs::read(&found).unwrap() == std::fs::read(save.dir.join("disk")).unwrap());
}

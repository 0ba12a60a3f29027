//! A full disk is called a full disk, loses nothing that was acknowledged, and passes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use torpor_lifecycle::store::{Journal as _, Saves as _, Search, StoreError};
use torpor_protocol::guest::LogLine;
use torpor_protocol::{ImageId, SandboxId};
use torpor_store::{Journals, Layout, Limits};

use crate::files::Made;
use crate::saves::{about, snapshot};
use crate::world::{AGENT, World, names, record, sample};

/// A small filesystem that goes away with this value.
struct SmallDisk {
    dir: tempfile::TempDir,
}

impl SmallDisk {
    fn mount(kib: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={kib}k,mode=700");
        let status = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "torpor-test"])
            .arg(dir.path())
            .status()
            .unwrap();
        assert!(status.success());
        Self { dir }
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Leaves no byte free.
    fn fill(&self) -> PathBuf {
        let path = self.dir.path().join("filler");
        let mut file = std::fs::File::create(&path).unwrap();
        let full = std::io::copy(&mut std::io::repeat(1), &mut file).unwrap_err();
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.dir.path()).status();
    }
}

async fn open(disk: &SmallDisk) -> Result<World, StoreError> {
    World::open(&disk.data(), AGENT, Limits::default()).await
}

fn big(dir: &Path, bytes: usize) {
    sample(dir);
    std::fs::write(dir.join("big"), vec![3; bytes]).unwrap();
}

#[tokio::test]
async fn an_import_that_does_not_fit_says_so_and_leaves_nothing() {
    let disk = SmallDisk::mount(8 * 1024);
    let world = open(&disk).await.unwrap();
    // Too large to stage; and small enough to stage but not to pack as well.
    for bytes in [12 << 20, 6 << 20] {
        let source = tempfile::tempdir().unwrap();
        big(source.path(), bytes);
        let error = world.import_dir("big", source.path()).await.unwrap_err();
        assert!(matches!(error, StoreError::DiskFull(_)), "{bytes}: {error:?}");
        assert_eq!(world.leftovers(), (vec![], vec![]));
    }
    let source = tempfile::tempdir().unwrap();
    sample(source.path());
    world.import_dir("small", source.path()).await.unwrap();
}

#[tokio::test]
async fn a_ledger_on_a_full_disk_refuses_writes_and_keeps_what_it_has() {
    let disk = SmallDisk::mount(8 * 1024);
    let world = open(&disk).await.unwrap();
    let source = tempfile::tempdir().unwrap();
    sample(source.path());
    let image = world.import_dir("sample", source.path()).await.unwrap();
    let filler = disk.fill();
    let mut kept = Vec::new();
    let error = loop {
        let record = record(&image.id, None);
        match world.record(&record).await {
            Ok(()) => kept.push(record.id),
            Err(error) => break error,
        }
        assert!(kept.len() < 100_000, "the disk never became full");
    };
    assert!(matches!(error, StoreError::DiskFull(_)), "{error:?}");
    let found = world.recorded().await;
    assert_eq!(found.len(), kept.len());
    // With room again it goes on, without a restart.
    std::fs::remove_file(filler).unwrap();
    world.record(&record(&image.id, None)).await.unwrap();
    world.ledger.close().await;
    drop(world);
    let world = open(&disk).await.unwrap();
    assert_eq!(world.recorded().await.len(), kept.len() + 1);
}

#[tokio::test]
async fn a_data_directory_on_a_full_disk_is_called_that() {
    let disk = SmallDisk::mount(256);
    disk.fill();
    let Err(error) = open(&disk).await else { panic!("it was opened") };
    assert!(matches!(error, StoreError::DiskFull(_)), "{error:?}");
}

#[tokio::test]
async fn a_directory_that_cannot_be_written_is_refused() {
    let disk = SmallDisk::mount(1024);
    std::fs::create_dir(disk.data()).unwrap();
    let status = std::process::Command::new("mount")
        .args(["-o", "remount,ro"])
        .arg(disk.dir.path())
        .status()
        .unwrap();
    assert!(status.success());
    let Err(error) = open(&disk).await else { panic!("it was opened") };
    assert!(error.to_string().contains("can't be written: Read-only"), "{error}");
}

/// A world on a small disk with one image.
async fn pictured(disk: &SmallDisk) -> (World, ImageId) {
    let world = open(disk).await.unwrap();
    let source = tempfile::tempdir().unwrap();
    sample(source.path());
    let image = world.import_dir("sample", source.path()).await.unwrap();
    (world, image.id)
}

async fn no_saves(world: &World) {
    assert_eq!(names(&world.dir.join("saves")), Vec::<String>::new());
    // Bytes are given back in the background.
    let empty = async {
        while !world.leftovers().0.is_empty() {
            tokio::task::yield_now().await;
        }
    };
    let waited = tokio::time::timeout(std::time::Duration::from_secs(30), empty).await;
    assert!(waited.is_ok(), "left: {:?}", world.leftovers().0);
}

#[tokio::test]
async fn a_save_that_does_not_fit_says_so_and_leaves_nothing() {
    let disk = SmallDisk::mount(8 * 1024);
    let (world, image) = pictured(&disk).await;
    let staged = world.saves.stage().await.unwrap();
    std::fs::write(staged.path().join("pages.img"), "saved").unwrap();
    let filler = disk.fill();
    let error = world.saves.commit(staged, about(&image)).await.unwrap_err();
    assert!(matches!(error, StoreError::DiskFull(_)), "{error:?}");
    no_saves(&world).await;
    // With room again it goes on.
    std::fs::remove_file(filler).unwrap();
    let staged = world.saves.stage().await.unwrap();
    std::fs::write(staged.path().join("pages.img"), "saved").unwrap();
    world.saves.commit(staged, about(&image)).await.unwrap();
}

#[tokio::test]
async fn files_of_a_save_and_an_import_that_do_not_fit_say_so_and_leave_nothing() {
    let roomy = World::new().await;
    let source = tempfile::tempdir().unwrap();
    sample(source.path());
    let image = roomy.import_dir("sample", source.path()).await.unwrap().id;
    let staged = roomy.saves.stage().await.unwrap();
    std::fs::write(staged.path().join("pages.img"), vec![1; 12 << 20]).unwrap();
    let large = roomy.saves.commit(staged, about(&image)).await.unwrap();
    let shelf = tempfile::NamedTempFile::new().unwrap();
    let told = snapshot(&image, &large).snapshot;
    roomy.saves.export(large.clone(), &told, true, shelf.reopen().unwrap()).await.unwrap();

    let disk = SmallDisk::mount(8 * 1024);
    let (world, _) = pictured(&disk).await;
    let made = Made::default().file("large", vec![1; 12 << 20]);
    let error = world.saves.files_of(&large, made.boxed()).await.unwrap_err();
    assert!(matches!(error, StoreError::DiskFull(_)), "{error:?}");
    no_saves(&world).await;
    let error = world.saves.import(&world.images, shelf.reopen().unwrap()).await.unwrap_err();
    assert!(matches!(error, StoreError::DiskFull(_)), "{error:?}");
    no_saves(&world).await;
}

fn line(stamp_us: u64) -> LogLine {
    LogLine {
        stamp_us,
        pid: 1,
        started_at_ms: 1,
        command: "sh".to_owned(),
        name: None,
        stderr: false,
        text: "x".repeat(100),
    }
}

#[tokio::test]
async fn a_journal_on_a_full_disk_keeps_what_it_has_and_goes_on_later() {
    let disk = SmallDisk::mount(1024);
    let layout = Arc::new(Layout::open(&disk.data()).unwrap());
    let journals = Journals::open(layout);
    let id = SandboxId::random();
    let all = Search { limit: usize::MAX, ..Search::default() };
    let first: Vec<_> = (1..=10).map(line).collect();
    journals.append(&id, &first).await.unwrap();
    let filler = disk.fill();
    // More than the rest of the file's last page.
    let more: Vec<_> = (11..=100).map(line).collect();
    let error = journals.append(&id, &more).await.unwrap_err();
    assert!(matches!(error, StoreError::DiskFull(_)), "{error:?}");
    assert_eq!(journals.last(&id).await.unwrap(), 10);
    assert_eq!(journals.read(&id, &all).await.unwrap(), first);
    std::fs::remove_file(filler).unwrap();
    journals.append(&id, &more).await.unwrap();
    assert_eq!(journals.read(&id, &all).await.unwrap(), [first, more].concat());
}

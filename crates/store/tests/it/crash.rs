//! What survives: a writer killed at any instant, a newer program's database.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use torpor_lifecycle::fault;
use torpor_lifecycle::store::{Saves as _, StoreError};
use torpor_store::{Layout, Ledger, Limits};

use crate::saves::{about, blobs, snapshot};
use crate::world::{AGENT, World, names, record, sample};

/// Set for the process that plays the daemon.
const WRITER_DIR: &str = "TORPOR_TEST_WRITER_DIR";
/// Where it dies, after a while; empty: nowhere.
const DIES_AT: &str = "TORPOR_TEST_DIES_AT";
/// Acknowledged rows before the writer is killed.
const ACKNOWLEDGED: usize = 40;

struct Writer(Child);

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test of its own: the other process of the one below, which writes until it is killed and
/// says what was acknowledged.
#[tokio::test]
async fn writer_process() {
    let Some(dir) = std::env::var_os(WRITER_DIR) else { return };
    let layout = Layout::open(dir.as_ref()).unwrap();
    let ledger = Ledger::open(&layout).await.unwrap();
    let owner = ledger.take_over().await.unwrap();
    let image = std::env::var("TORPOR_TEST_IMAGE").unwrap().parse().unwrap();
    loop {
        let record = record(&image, None);
        ledger.create_sandbox(&owner, &record).await.unwrap();
        println!("\nacknowledged {}", record.id);
    }
}

#[tokio::test]
async fn every_acknowledged_row_survives_a_killed_writer() {
    let source = tempfile::tempdir().unwrap();
    sample(source.path());
    let mut world = World::new().await;
    let image = world.import_dir("sample", source.path()).await.unwrap();
    let mut acknowledged = Vec::new();
    for _ in 0..3 {
        let closed = world.close().await;
        let writer = "crash::writer_process";
        let end = End::Killed { acknowledged: ACKNOWLEDGED };
        acknowledged.extend(end_a_writer(writer, &closed.dir, image.id.as_str(), end));
        world = closed.open(AGENT).await;
        let found = world.recorded().await;
        for id in &acknowledged {
            assert!(found.iter().any(|record| record.id.as_str() == id), "{id} is lost");
        }
    }
}

/// How a writer ends.
#[derive(Debug, Clone, Copy)]
enum End {
    /// When so much is acknowledged.
    Killed { acknowledged: usize },
    /// By itself, at a place of the store.
    At(&'static str),
}

fn end_a_writer(process: &str, dir: &std::path::Path, image: &str, end: End) -> Vec<String> {
    let (acknowledged, place) = match end {
        End::Killed { acknowledged } => (acknowledged, ""),
        End::At(place) => (usize::MAX, place),
    };
    let child = Command::new(std::env::current_exe().unwrap())
        .env(DIES_AT, place)
        .args(["--exact", process, "--nocapture"])
        .env(WRITER_DIR, dir)
        .env("TORPOR_TEST_IMAGE", image)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut writer = Writer(child);
    let lines = BufReader::new(writer.0.stdout.take().unwrap()).lines();
    let mut found = Vec::new();
    for line in lines.map_while(Result::ok) {
        if let Some(id) = line.strip_prefix("acknowledged ") {
            found.push(id.to_owned());
        }
        if found.len() == acknowledged {
            writer.0.kill().unwrap();
        }
    }
    let signal = writer.0.wait().unwrap().signal();
    assert_eq!(signal, Some(9), "{end:?}: the writer said {} rows", found.len());
    found
}

/// Not a test of its own: commits saves, names every second one, and forgets some, until it is
/// killed.
#[tokio::test(flavor = "multi_thread")]
async fn saver_process() {
    let Some(dir) = std::env::var_os(WRITER_DIR) else { return };
    let world = World::open(dir.as_ref(), AGENT, Limits::default()).await.unwrap();
    let image = std::env::var("TORPOR_TEST_IMAGE").unwrap().parse().unwrap();
    let dies_at = std::env::var(DIES_AT).unwrap();
    for round in 0u64.. {
        if round == 3 {
            fault::arm(&dies_at);
        }
        let staged = world.saves.stage().await.unwrap();
        for name in ["checkpoint.img", "pages.img"] {
            std::fs::write(staged.path().join(name), round.to_le_bytes().repeat(20_000)).unwrap();
        }
        let save = world.saves.commit(staged, about(&image)).await.unwrap();
        let mut record = snapshot(&image, &save);
        record.snapshot.name = None;
        if round % 2 == 1 {
            world.ledger.record_snapshot(&record).await.unwrap();
            println!("\nacknowledged {}", save.id);
        }
        let id = save.id.clone();
        drop(save);
        world.saves.release(&id).await;
    }
}

#[tokio::test]
async fn every_named_save_survives_a_killed_daemon_and_nothing_else_does() {
    let source = tempfile::tempdir().unwrap();
    sample(source.path());
    let mut world = World::new().await;
    let image = world.import_dir("sample", source.path()).await.unwrap();
    let mut acknowledged = Vec::new();
    let killed = (1..6).map(|acknowledged| End::Killed { acknowledged });
    let places = ["commit.placed", "remove.dropped"].map(End::At);
    for end in killed.chain(places) {
        let closed = world.close().await;
        let saver = "crash::saver_process";
        acknowledged.extend(end_a_writer(saver, &closed.dir, image.id.as_str(), end));
        world = closed.open(AGENT).await;
        let rows = world.snapshots().await;
        let mut named: Vec<_> =
            rows.iter().map(|row| row.save.as_ref().unwrap().to_string()).collect();
        named.sort();
        assert_eq!(names(&world.dir.join("saves")), named);
        let mut hashes = BTreeSet::new();
        for id in &named {
            let manifest = world.saves.manifest(&id.parse().unwrap()).await.unwrap();
            hashes.extend(manifest.files.into_iter().map(|file| file.hash));
        }
        assert_eq!(blobs(&world), Vec::from_iter(hashes));
        for id in &acknowledged {
            assert!(named.contains(id), "{id} is lost");
        }
        for id in &named {
            world.saves.verify(&id.parse().unwrap()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_database_of_a_newer_program_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let world = World::open(&data, AGENT, Limits::default()).await.unwrap();
    world.ledger.close().await;
    drop(world);
    let sql = "INSERT INTO _sqlx_migrations VALUES (9999, 'future', '2030-01-01', 1, x'00', 1)";
    sqlite(&data.join("ledger.db"), sql).await;
    let Err(error) = World::open(&data, AGENT, Limits::default()).await else {
        panic!("it was opened")
    };
    assert!(matches!(error, StoreError::Invalid(_)), "{error:?}");
    assert!(error.to_string().contains("newer torpor (it has migration 9999)"), "{error}");
    sqlite(&data.join("ledger.db"), "DELETE FROM _sqlx_migrations WHERE version = 9999").await;
    World::open(&data, AGENT, Limits::default()).await.unwrap();
}

pub(crate) async fn sqlite(path: &std::path::Path, sql: &'static str) {
    use sqlx::Connection;
    let url = format!("sqlite:{}", path.display());
    let mut connection = sqlx::SqliteConnection::connect(&url).await.unwrap();
    sqlx::query(sql).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

#[tokio::test]
async fn a_file_that_is_no_database_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    drop(Layout::open(&data).unwrap());
    std::fs::write(data.join("ledger.db"), "this is no database, it is a letter".repeat(100))
        .unwrap();
    let Err(error) = World::open(&data, AGENT, Limits::default()).await else {
        panic!("it was opened")
    };
    assert!(error.to_string().contains("could not open the ledger"), "{error}");
}

//! A daemon killed at each step of a volume's life.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use torpor_lifecycle::fault;
use torpor_lifecycle::store::Volumes as _;

use crate::world::{Place, World};

/// Set for the process that plays the daemon, with what it does and where it dies.
const DIR: &str = "TORPOR_TEST_VOLUMES_DIR";
const DOES: &str = "TORPOR_TEST_DOES";
const DIES_AT: &str = "TORPOR_TEST_DIES_AT";

/// Not a test of its own: the daemon that dies.
#[tokio::test(flavor = "multi_thread")]
async fn dying_daemon() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let world = World::open(Path::new(&dir)).await;
    fault::arm(&std::env::var(DIES_AT).unwrap());
    let data = world.find("data").await.unwrap();
    match std::env::var(DOES).unwrap().as_str() {
        "create" => drop(world.create("other", 16).await),
        "copy" => drop(world.copy(&data, "other").await.unwrap()),
        "grow" => drop(world.volumes.grow(&data.id, 64).await.unwrap()),
        "remove" => world.volumes.remove(&data.id).await.unwrap(),
        does => panic!("{does}"),
    }
    panic!("it was to die");
}

fn die(place: &Place, does: &str, at: &str) {
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kills::dying_daemon", "--nocapture"])
        .env(DIR, place.path())
        .env(DOES, does)
        .env(DIES_AT, at)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(9), "{does} at {at}: {status}");
}

/// A place with one volume that has a file.
async fn prepared() -> Option<Place> {
    let place = Place::new()?;
    let world = place.open().await;
    let data = world.create("data", 32).await;
    let open = world.volumes.open(&data.id).await.unwrap();
    fs::write(open.dir.join("kept"), "x").unwrap();
    drop(open);
    world.close().await;
    Some(place)
}

/// What holds after a restart: rows and directories are the same, files are whole and writable, nothing is left.
async fn check(place: &Place, at: &str) -> Vec<String> {
    let world = place.open().await;
    let records = world.ledger.volumes(None, None, 9).await.unwrap();
    let mut ids: Vec<_> = records.iter().map(|record| record.id.to_string()).collect();
    ids.sort();
    assert_eq!(place.entries(), ids, "{at}");
    for record in &records {
        let open = world.volumes.open(&record.id).await.unwrap();
        if record.name.as_str() == "data" || record.copy_of.is_some() {
            assert_eq!(fs::read_to_string(open.dir.join("kept")).unwrap(), "x", "{at}");
        }
        // It would hang if it were frozen.
        fs::write(open.dir.join("new"), "y").unwrap();
    }
    world.close().await;
    place.expect_no_traces().await;
    records.iter().map(|record| format!("{} {}", record.name, record.size_mib)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_is_there_after_a_kill_if_it_was_recorded_and_else_nothing_of_it() {
    for does in ["create", "copy"] {
        for at in ["volume.made", "volume.placed", "volume.recorded"] {
            let Some(place) = prepared().await else { return };
            die(&place, does, at);
            let there = check(&place, at).await.len();
            assert_eq!(there, if at == "volume.recorded" { 2 } else { 1 }, "{does} at {at}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_dies_while_it_copies_leaves_the_volume_usable() {
    for at in ["volume.frozen", "volume.copied"] {
        let Some(place) = prepared().await else { return };
        die(&place, "copy", at);
        assert_eq!(check(&place, at).await, ["data 32"], "{at}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn growing_goes_on_after_a_kill() {
    for at in ["volume.lengthened", "volume.grown"] {
        let Some(place) = prepared().await else { return };
        die(&place, "grow", at);
        assert_eq!(check(&place, at).await, ["data 32"], "{at}");
        let world = place.open().await;
        let data = world.find("data").await.unwrap();
        world.volumes.grow(&data.id, 64).await.unwrap();
        let open = world.volumes.open(&data.id).await.unwrap();
        fs::write(open.dir.join("large"), vec![1; 40 << 20]).unwrap();
        drop(open);
        world.close().await;
        assert_eq!(check(&place, at).await, ["data 64"], "{at}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_was_forgotten_is_gone_after_a_kill() {
    let Some(place) = prepared().await else { return };
    die(&place, "remove", "volume.erased");
    assert_eq!(check(&place, "volume.erased").await, Vec::<String>::new());
}

#[test]
fn each_place_has_a_test() {
    let text = include_str!("kills.rs");
    for place in fault::VOLUME_POINTS {
        assert!(text.contains(&format!("\"{place}\"")), "{place}");
    }
}

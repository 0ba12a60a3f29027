//! A daemon killed at each step of a volume's life.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::mount::{UnmountFlags, unmount};
use tokio::time::Instant;
use torpor_disk::mountinfo;
use torpor_lifecycle::fault;
use torpor_lifecycle::store::Volumes as _;

use crate::world::{Place, World};

/// Set for the process that plays the daemon, with what it does and where it dies.
const DIR: &str = "TORPOR_TEST_VOLUMES_DIR";
const DOES: &str = "TORPOR_TEST_DOES";
const DIES_AT: &str = "TORPOR_TEST_DIES_AT";
/// Set if somebody has the volume mounted meanwhile, there.
const WRITER: &str = "TORPOR_TEST_WRITER";
const MACHINE: &str = "machine";
const LOG: &str = "log";
/// For what takes moments.
const PATIENCE: Duration = Duration::from_secs(30);

/// Not a test of its own: the daemon that dies.
#[tokio::test(flavor = "multi_thread")]
async fn dying_daemon() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let world = World::open(Path::new(&dir)).await;
    let data = world.find("data").await.unwrap();
    let mut held = None;
    if std::env::var_os(WRITER).is_some() {
        let open = world.volumes.open(&data.id).await.unwrap();
        // As a machine has it, which does not end with the daemon.
        rustix::mount::mount_bind(&open.dir, Path::new(&dir).join(MACHINE)).unwrap();
        held = Some(open);
        let log = Path::new(&dir).join(MACHINE).join(LOG);
        until("somebody writes", || fs::read(&log).is_ok_and(|log| !log.is_empty()));
    }
    fault::arm(&std::env::var(DIES_AT).unwrap());
    match std::env::var(DOES).unwrap().as_str() {
        "create" => drop(world.create("other", 16).await),
        "copy" => drop(world.copy(&data, "other").await.unwrap()),
        "grow" => drop(world.volumes.grow(&data.id, 64).await.unwrap()),
        "remove" => world.volumes.remove(&data.id).await.unwrap(),
        "grow unmounted" => {
            let image = world.image(&data);
            drop(tokio::task::spawn_blocking(move || image.grow_unmounted(64)).await);
        }
        does => panic!("{does}"),
    }
    drop(held);
    panic!("it was to die");
}

fn daemon(place: &Place, does: &str, at: &str) -> Command {
    let mut daemon = Command::new(std::env::current_exe().unwrap());
    daemon
        .args(["--exact", "kills::dying_daemon", "--nocapture"])
        .env(DIR, place.path())
        .env(DOES, does)
        .env(DIES_AT, at)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    daemon
}

fn die(place: &Place, does: &str, at: &str) {
    let status = daemon(place, does, at).status().unwrap();
    assert_eq!(status.signal(), Some(9), "{does} at {at}: {status}");
}

/// Waits for a value, in a thread that may wait.
fn until(what: &str, is: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether the kernel lets this process grow what is mounted: `CAP_SYS_RESOURCE`.
fn grows_mounted() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let has = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(has.trim(), 16).unwrap() & (1 << 24) != 0
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
    let unmounted = ["volume.unmounted", "volume.filesystem_grown"];
    let unmounted = if grows_mounted() { &[][..] } else { &unmounted };
    for at in [&["volume.lengthened", "volume.device_grown", "volume.grown"], unmounted].concat() {
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

/// Writes numbers until it is told to end; how many.
fn write(log: &Path, end: &AtomicBool, written: &AtomicUsize) {
    let mut file = fs::File::create(log).unwrap();
    while !end.load(Ordering::Relaxed) {
        writeln!(file, "{}", written.load(Ordering::Relaxed)).unwrap();
        file.sync_data().unwrap();
        written.fetch_add(1, Ordering::Relaxed);
    }
}

/// A daemon dies while a machine, which lives on, writes to the volume.
async fn die_beside_a_writer(place: &Place, does: &str, at: &str) {
    let machine = place.path().join(MACHINE);
    fs::create_dir(&machine).unwrap();
    let state: Arc<(AtomicBool, AtomicUsize)> = Arc::default();
    let mut dying = daemon(place, does, at).env(WRITER, "").spawn().unwrap();
    let is_there = || mountinfo::read().unwrap().iter().any(|mount| mount.point == machine);
    until("the machine has it", is_there);
    let (log, of) = (machine.join(LOG), Arc::clone(&state));
    let writer = std::thread::spawn(move || write(&log, &of.0, &of.1));
    let status = dying.wait().unwrap();
    assert_eq!(status.signal(), Some(9), "{does} at {at}: {status}");
    // The next daemon; who waits for a frozen one goes on.
    let world = place.open().await;
    let (end, written) = &*state;
    let before = written.load(Ordering::Relaxed);
    until("it writes on", || written.load(Ordering::Relaxed) > before + 3);
    end.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    world.close().await;
    let lines = fs::read_to_string(machine.join(LOG)).unwrap();
    let lines: Vec<usize> = lines.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(lines, (0..written.load(Ordering::Relaxed)).collect::<Vec<_>>(), "{does} at {at}");
    unmount(&machine, UnmountFlags::empty()).unwrap();
    place.expect_no_traces().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_writes_goes_on_after_a_kill_while_its_volume_is_copied_or_grown() {
    let copied =
        ["volume.frozen", "volume.copied", "volume.made", "volume.placed", "volume.recorded"];
    let grown = if grows_mounted() { &["volume.grown"][..] } else { &[] };
    let grown = [&["volume.lengthened", "volume.device_grown"], grown].concat();
    let copied = copied.map(|at| ("copy", at));
    for (does, at) in copied.into_iter().chain(grown.into_iter().map(|at| ("grow", at))) {
        let Some(place) = prepared().await else { return };
        die_beside_a_writer(&place, does, at).await;
        check(&place, at).await;
    }
}

/// A program that goes on when who started it is killed.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_is_still_being_grown_is_not_mounted() {
    let Some(place) = prepared().await else { return };
    let bin = place.path().join("bin");
    fs::create_dir(&bin).unwrap();
    let path = std::env::var("PATH").unwrap();
    let slow = format!(
        "#!/bin/sh\ncd {0}\necho > begun\nwhile [ ! -e go ]; do sleep 0.01; done\nPATH={path}:/usr/sbin:/sbin resize2fs \"$@\" && echo > ended\n",
        bin.display()
    );
    fs::write(bin.join("resize2fs"), slow).unwrap();
    fs::set_permissions(bin.join("resize2fs"), fs::Permissions::from_mode(0o755)).unwrap();
    let search = format!("{}:{path}", bin.display());
    let mut dying =
        daemon(&place, "grow unmounted", "nowhere").env("PATH", search).spawn().unwrap();
    until("it grows", || bin.join("begun").exists());
    dying.kill().unwrap();
    dying.wait().unwrap();

    let world = place.open().await;
    let data = world.find("data").await.unwrap();
    let mut opening = Box::pin(world.volumes.open(&data.id));
    let early = tokio::time::timeout(Duration::from_millis(500), &mut opening).await;
    assert!(early.is_err(), "it is mounted while a program writes to it");
    fs::write(bin.join("go"), "").unwrap();
    let open = opening.await.unwrap();
    assert!(bin.join("ended").exists());
    assert_eq!(fs::read_to_string(open.dir.join("kept")).unwrap(), "x");
    drop(open);
    world.close().await;
    place.expect_no_traces().await;
}

/// By an error in the filesystem which only a check mends.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_whose_growth_was_interrupted_is_checked_before_it_is_mounted() {
    let Some(place) = prepared().await else { return };
    let world = place.open().await;
    let data = world.find("data").await.unwrap();
    let image = place.path().join("data/volumes").join(data.id.as_str()).join("image.ext4");
    let set = ["-w", "-R", "set_inode_field / links_count 9"];
    let broken = Command::new("debugfs").args(set).arg(&image).output().unwrap();
    assert!(broken.status.success(), "{broken:?}");
    fs::write(image.with_extension("growing"), "").unwrap();
    drop(world.volumes.open(&data.id).await.unwrap());
    world.close().await;
    place.expect_no_traces().await;
    assert!(!image.with_extension("growing").exists());
    let sound = Command::new("e2fsck").args(["-f", "-n"]).arg(&image).output().unwrap();
    assert!(sound.status.success(), "{sound:?}");
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

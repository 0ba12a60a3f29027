//! What runs in machines, and what becomes of it when they are paused, saved and revived: promises of
//! every engine that isolates.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tokio::time::Instant;
use torpor_lifecycle::engine::EngineError;
use torpor_protocol::guest::Exit;

use crate::world::{PATIENCE, boot, chain, greet, quiesce, revive, say, shell, stage, world};

/// Counts in a file, as fast as it can.
pub(crate) const COUNTER: &str = "(i=0; while :; do i=$((i+1)); echo $i > /dev/shm/count; done) & \
                       until [ -s /dev/shm/count ]; do :; done";

/// Returns when the counter has counted.
pub(crate) const GOES_ON: &str = "a=; while [ -z \"$a\" ]; do a=$(cat /dev/shm/count); done; b=$a; \
                       until [ -n \"$b\" -a \"$b\" != \"$a\" ]; do b=$(cat /dev/shm/count); done";

#[tokio::test(flavor = "multi_thread")]
async fn a_process_runs_inside_and_its_end_is_told() {
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    assert_eq!(say(&guest, "echo $((6*7))").await, "42");
    assert_eq!(shell(&guest, "exit 3").await.1, Exit::Code { code: 3 });
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_machine_uses_no_processor() {
    let Some(world) = world().await else { return };
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    let meter = machine.meter();
    say(&guest, COUNTER).await;
    // Paused without a word to the guest, which is busy.
    machine.pause().await.unwrap();
    let before = meter.usage().cpu_micros;
    // A kernel that pauses its guest itself has things to finish first; one that goes on never rests.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let begun = meter.usage().cpu_micros;
        // Time has to pass for this claim: there is no event for "nothing happened".
        let silence = tokio::time::timeout(Duration::from_millis(300), guest.health()).await;
        assert!(silence.is_err(), "a paused machine answered");
        let used = meter.usage().cpu_micros - begun;
        if used < 3_000 {
            break;
        }
        assert!(Instant::now() < deadline, "it used the processor for {used} µs of 300,000");
    }
    machine.resume().await.unwrap();
    say(&guest, GOES_ON).await;
    assert!(meter.usage().cpu_micros > before);
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_outlive_the_daemon_that_started_them() {
    let Some(mut world) = world().await else { return };
    let plan = world.plan();
    let (machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, "sleep 1000 & echo $! > /root/pid").await;
    drop((machine, guest));
    world.reopen().await;
    let machine = world.engine().adopt(&plan.id).await.unwrap().expect("it is there");
    let guest = greet(machine.channel()).await;
    assert_eq!(say(&guest, "kill -0 $(cat /root/pid) && echo alive").await, "alive");
    assert!(machine.meter().usage().memory_bytes > 0);
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revived_machine_has_its_files_memory_and_processes() {
    let Some(world) = world().await else { return };
    let (plan, save) = (world.plan(), stage());
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, "echo kept > /root/file; echo shared > /dev/shm/file").await;
    say(&guest, "sleep 1000 & echo $! > /root/pid").await;
    say(&guest, COUNTER).await;
    let mut processes = world.pause(&mut machine, &guest).await;
    processes.extend(machine.save(save.path()).await.unwrap().processes);
    let commands: Vec<&str> = processes.iter().map(|p| p.command.as_str()).collect();
    assert!(commands.contains(&"sleep") && commands.contains(&"bash"), "{commands:?}");
    for file in std::fs::read_dir(save.path()).unwrap().flatten() {
        let mode = std::os::unix::fs::PermissionsExt::mode(&file.metadata().unwrap().permissions());
        assert_eq!(mode & 0o137, 0, "nobody else's to read: {file:?}");
    }
    machine.kill().await.unwrap();

    let (machine, guest) = revive(&world, &plan, save.path()).await;
    let script = "cat /root/file /dev/shm/file; kill -0 $(cat /root/pid) && echo alive";
    assert_eq!(say(&guest, script).await, "kept\nshared\nalive");
    say(&guest, GOES_ON).await;
    assert!(!machine.start_steps().is_empty(), "where the time went is known");
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_go_on_after_a_save_and_after_a_pause() {
    let Some(world) = world().await else { return };
    let save = stage();
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    say(&guest, COUNTER).await;
    world.save(&mut machine, &guest, save.path()).await;
    say(&guest, GOES_ON).await;
    world.pause(&mut machine, &guest).await;
    world.resume(&mut machine, &guest).await;
    say(&guest, GOES_ON).await;
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_the_same_one_however_often_its_machine_is_saved_and_revived() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, mut guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, "sleep 1000 & echo $! > /root/pid").await;
    for cycle in 1..=world.rounds(10) {
        let save = stage();
        let mut processes = world.pause(&mut machine, &guest).await;
        processes.extend(machine.save(save.path()).await.unwrap().processes);
        let sleeping = processes.iter().filter(|p| p.command == "sleep").count();
        assert_eq!(sleeping, 1, "cycle {cycle}: {processes:?}");
        machine.kill().await.unwrap();
        (machine, guest) = revive(&world, &plan, save.path()).await;
        say(&guest, "kill -0 $(cat /root/pid)").await;
    }
    machine.kill().await.unwrap();
}

/// A small filesystem; unmounted when dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new() -> Self {
        let disk = Self(stage());
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=2m", "none"]).arg(disk.0.path());
        assert!(mount.status().unwrap().success());
        disk
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_save_that_finds_the_disk_full_leaves_the_machine_as_it_was() {
    let Some(world) = world().await else { return };
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    say(&guest, "dd if=/dev/urandom of=/dev/shm/big bs=1M count=20").await;
    say(&guest, COUNTER).await;
    for paused in [false, true] {
        let disk = SmallDisk::new();
        quiesce(&**world.engine(), &guest).await;
        if paused {
            machine.pause().await.unwrap();
        }
        let error = machine.save(disk.0.path()).await.unwrap_err();
        assert!(matches!(error, EngineError::DiskFull(_)), "{error}");
        assert_eq!(machine.paused(), paused);
        world.resume(&mut machine, &guest).await;
        say(&guest, GOES_ON).await;
    }
    let save = stage();
    world.save(&mut machine, &guest, save.path()).await;
    machine.kill().await.unwrap();
    let (machine, guest) = revive(&world, &world.plan(), save.path()).await;
    assert_eq!(say(&guest, "stat -c %s /dev/shm/big").await, (20 << 20).to_string());
    machine.kill().await.unwrap();
}

/// Has a file only its first bytes, while what it was stays whole under another name.
fn cut(file: &Path, whole: &Path, kept: u64) {
    let mut begin = File::open(whole).unwrap().take(kept);
    std::io::copy(&mut begin, &mut File::create(file).unwrap()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_whole_save_is_an_error_and_leaves_nothing() {
    let Some(world) = world().await else { return };
    let (save, aside) = (stage(), stage());
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    say(&guest, "dd if=/dev/urandom of=/dev/shm/big bs=1M count=8").await;
    world.save(&mut machine, &guest, save.path()).await;
    machine.kill().await.unwrap();
    let files: Vec<_> = std::fs::read_dir(save.path()).unwrap().flatten().collect();
    assert!(files.len() > 1);
    for entry in files {
        // Put aside and not written to: the file may be more than this save's.
        let (file, whole) = (entry.path(), aside.path().join(entry.file_name()));
        std::fs::rename(&file, &whole).unwrap();
        for kept in [whole.metadata().unwrap().len() / 2, 0] {
            cut(&file, &whole, kept);
            let plan = world.plan();
            let Err(error) = world.revive(&plan, save.path()).await else {
                panic!("{kept} bytes of {file:?} were enough")
            };
            let text = chain(&error);
            assert!(text.contains("could not revive") && text.len() < 300, "{file:?}: {text}");
            assert_eq!(world.traces(&plan.id), Vec::<String>::new());
        }
        std::fs::rename(&whole, &file).unwrap();
    }
    let (machine, guest) = revive(&world, &world.plan(), save.path()).await;
    guest.health().await.expect("the whole save is fine");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_save_that_nobody_waits_for_any_more_changes_nothing() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, COUNTER).await;
    for after in [0, 2, 10] {
        for paused in [false, true] {
            let save = stage();
            quiesce(&**world.engine(), &guest).await;
            if paused {
                machine.pause().await.unwrap();
            }
            let after = Duration::from_millis(after);
            let _ = tokio::time::timeout(after, machine.save(save.path())).await;
            assert_eq!(machine.paused(), paused);
            world.resume(&mut machine, &guest).await;
            say(&guest, GOES_ON).await;
        }
    }
    let save = stage();
    quiesce(&**world.engine(), &guest).await;
    let _ = tokio::time::timeout(Duration::from_millis(5), machine.save(save.path())).await;
    machine.kill().await.expect("it can be killed in the middle of a save");
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_uses_most_of_its_memory_can_be_saved_again_and_again() {
    let Some(world) = world().await else { return };
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    let full = "(perl -e '$n = 105000000; $x = \"x\" x $n; open(F, \">\", \"/dev/shm/full\"); \
                print(F length($x)); close(F); sleep(1000)' >/dev/null 2>&1 &) ; \
                until [ -s /dev/shm/full ]; do :; done";
    say(&guest, full).await;
    assert!(machine.meter().usage().memory_bytes > 100 << 20);
    let mut save = stage();
    for _ in 0..4 {
        save = stage();
        world.save(&mut machine, &guest, save.path()).await;
    }
    assert_eq!(machine.meter().oom_kills(), 0);
    assert_eq!(say(&guest, "cat /dev/shm/full").await, "105000000");
    machine.kill().await.unwrap();
    let (machine, guest) = revive(&world, &world.plan(), save.path()).await;
    assert_eq!(say(&guest, "cat /dev/shm/full").await, "105000000");
    assert_eq!(machine.meter().oom_kills(), 0);
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_died_takes_its_channel_along_and_its_sandbox_can_be_booted_again() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    world.kill_sandbox(&plan.id);
    machine.exited().await;
    tokio::time::timeout(PATIENCE, guest.gone()).await.expect("the channel is closed too");
    drop((machine, guest));
    let (machine, guest) = boot(&**world.engine(), plan).await;
    guest.health().await.unwrap();
    machine.kill().await.unwrap();
}

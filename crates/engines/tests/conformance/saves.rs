//! Saving machines and reviving them: promises of every engine that can.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use torpor_lifecycle::engine::{BootPlan, Engine, EngineError, Machine};
use torpor_lifecycle::guest::Guest;

use crate::world::{World, boot, chain, eventually, greet, say, world};

/// Counts in a file, as fast as it can.
pub(crate) const COUNTER: &str = "(i=0; while :; do i=$((i+1)); echo $i > /dev/shm/count; done) & \
                       until [ -s /dev/shm/count ]; do :; done";

const PAGE: usize = 4096;

/// Returns when the counter has counted.
pub(crate) const GOES_ON: &str =
    "a=$(cat /dev/shm/count); until [ \"$(cat /dev/shm/count)\" != \"$a\" ]; do :; done";

/// An empty directory for a save.
pub(crate) fn stage() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("tps").tempdir().expect("a directory")
}

pub(crate) async fn revive(
    world: &World,
    plan: &BootPlan,
    saved: &Path,
) -> (Box<dyn Machine>, Guest) {
    let machine = world.engine().revive(plan.clone(), saved).await.expect("it is revived");
    let guest = greet(machine.channel()).await;
    (machine, guest)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revived_machine_has_its_files_memory_and_processes() {
    let Some(world) = world().await else { return };
    let (plan, save) = (world.plan(), stage());
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, "echo kept > /root/file; echo shared > /dev/shm/file").await;
    say(&guest, "sleep 1000 & echo $! > /root/pid").await;
    say(&guest, COUNTER).await;
    machine.pause().await.unwrap();
    let saved = machine.save(save.path()).await.unwrap();
    assert_eq!(saved.pause, Duration::ZERO, "it stood still anyway");
    let commands: Vec<&str> = saved.processes.iter().map(|p| p.command.as_str()).collect();
    assert!(commands.contains(&"sleep") && commands.contains(&"bash"), "{commands:?}");
    assert!(saved.processes.iter().any(|p| p.pid == 1), "{:?}", saved.processes);
    for file in std::fs::read_dir(save.path()).unwrap().flatten() {
        let mode = std::os::unix::fs::PermissionsExt::mode(&file.metadata().unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600, "{file:?}");
    }
    machine.kill().await.unwrap();

    let (machine, guest) = revive(&world, &plan, save.path()).await;
    let script = "cat /root/file /dev/shm/file; kill -0 $(cat /root/pid) && echo alive";
    assert_eq!(say(&guest, script).await, "kept\nshared\nalive");
    say(&guest, GOES_ON).await;
    let steps: Vec<&str> = machine.start_steps().iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, ["prepare", "runsc create", "network", "restore"]);
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn one_save_is_many_machines_and_they_share_nothing() {
    let Some(world) = world().await else { return };
    let save = stage();
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    say(&guest, "echo common > /root/file").await;
    machine.save(save.path()).await.unwrap();
    let (one, two) = (world.plan(), world.plan());
    let ((one, in_one), (two, in_two)) =
        tokio::join!(revive(&world, &one, save.path()), revive(&world, &two, save.path()));
    say(&in_one, "echo one >> /root/file").await;
    say(&in_two, "echo two >> /root/file").await;
    assert_eq!(say(&in_one, "cat /root/file").await, "common\none");
    assert_eq!(say(&in_two, "cat /root/file").await, "common\ntwo");
    assert_eq!(say(&guest, "cat /root/file").await, "common");
    for machine in [machine, one, two] {
        machine.kill().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_runs_goes_on_after_it_was_saved() {
    let Some(world) = world().await else { return };
    let save = stage();
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    say(&guest, COUNTER).await;
    let saved = machine.save(save.path()).await.unwrap();
    assert!(saved.pause > Duration::ZERO && !machine.paused());
    say(&guest, GOES_ON).await;
    machine.pause().await.unwrap();
    machine.resume().await.unwrap();
    say(&guest, GOES_ON).await;
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_times_saved_and_revived_it_is_still_itself() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, "echo 0 > /root/cycles; sleep 1000 & echo $! > /root/pid").await;
    for cycle in 1..=30 {
        let save = stage();
        machine.pause().await.unwrap();
        let saved = machine.save(save.path()).await.unwrap();
        let sleeping = saved.processes.iter().filter(|p| p.command == "sleep").count();
        assert_eq!(sleeping, 1, "cycle {cycle}: {:?}", saved.processes);
        machine.kill().await.unwrap();
        let guest;
        (machine, guest) = revive(&world, &plan, save.path()).await;
        let script = "echo $(($(cat /root/cycles)+1)) > /root/cycles; cat /root/cycles; \
                      kill -0 $(cat /root/pid)";
        assert_eq!(say(&guest, script).await, cycle.to_string());
    }
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_machine_executes_nothing_while_it_is_saved_and_afterwards() {
    let Some(world) = world().await else { return };
    let saves = [stage(), stage(), stage()];
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    say(&guest, COUNTER).await;
    machine.pause().await.unwrap();
    machine.save(saves[0].path()).await.unwrap();
    machine.save(saves[1].path()).await.unwrap();
    machine.resume().await.unwrap();
    say(&guest, GOES_ON).await;
    machine.save(saves[2].path()).await.unwrap();
    machine.kill().await.unwrap();
    // The counter changes its memory with every instruction. One page is the kernel's own: the
    // clock that it lets the guest read.
    let pages = saves.each_ref().map(|save| std::fs::read(save.path().join("pages.img")).unwrap());
    assert!(different(&pages[0], &pages[1]) <= 1, "its memory changed between two saves");
    assert!(different(&pages[1], &pages[2]) > 1, "a guest that runs changes its memory");
}

/// In how many pages two memories differ.
fn different(one: &[u8], other: &[u8]) -> usize {
    let common = one.chunks(PAGE).zip(other.chunks(PAGE)).filter(|(a, b)| a != b).count();
    common + one.len().abs_diff(other.len()) / PAGE
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
        if paused {
            machine.pause().await.unwrap();
        }
        let error = machine.save(disk.0.path()).await.unwrap_err();
        assert!(matches!(error, EngineError::DiskFull(_)), "{error}");
        assert_eq!(machine.paused(), paused);
        machine.resume().await.unwrap();
        say(&guest, GOES_ON).await;
    }
    let save = stage();
    machine.save(save.path()).await.expect("where there is room it can still be saved");
    machine.kill().await.unwrap();
    let (machine, guest) = revive(&world, &world.plan(), save.path()).await;
    assert_eq!(say(&guest, "stat -c %s /dev/shm/big").await, (20 << 20).to_string());
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_whole_save_is_an_error_and_leaves_nothing() {
    let Some(world) = world().await else { return };
    let save = stage();
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    say(&guest, "dd if=/dev/urandom of=/dev/shm/big bs=1M count=8").await;
    machine.save(save.path()).await.unwrap();
    machine.kill().await.unwrap();
    for name in ["pages.img", "pages_meta.img", "checkpoint.img"] {
        let file = save.path().join(name);
        let whole = std::fs::read(&file).unwrap();
        for kept in [whole.len() / 2, 0] {
            std::fs::write(&file, &whole[..kept]).unwrap();
            let plan = world.plan();
            let Err(error) = world.engine().revive(plan.clone(), save.path()).await else {
                panic!("{kept} bytes of {name} were enough")
            };
            let text = chain(&error);
            assert!(text.contains("could not revive") && text.len() < 200, "{text}");
            assert_eq!(world.traces(&plan.id), Vec::<String>::new());
        }
        std::fs::write(&file, &whole).unwrap();
    }
    let Err(error) = world.engine().revive(world.plan(), stage().path()).await else {
        panic!("nothing at all was enough")
    };
    assert!(matches!(error, EngineError::Failed { .. }), "{error}");
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
            if paused {
                machine.pause().await.unwrap();
            }
            let after = Duration::from_millis(after);
            let _ = tokio::time::timeout(after, machine.save(save.path())).await;
            assert_eq!(machine.paused(), paused);
            machine.resume().await.unwrap();
            say(&guest, GOES_ON).await;
        }
    }
    let save = stage();
    let _ = tokio::time::timeout(Duration::from_millis(5), machine.save(save.path())).await;
    machine.kill().await.expect("it can be killed in the middle of a save");
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revive_that_nobody_waits_for_any_more_leaves_nothing() {
    let Some(world) = world().await else { return };
    let save = stage();
    let (mut machine, _guest) = boot(&**world.engine(), world.plan()).await;
    machine.save(save.path()).await.unwrap();
    machine.kill().await.unwrap();
    for after in [0, 60, 140, 180, 220] {
        let plan = world.plan();
        let revive = world.engine().revive(plan.clone(), save.path());
        let _ = tokio::time::timeout(Duration::from_millis(after), revive)
            .await
            .map(|revived| revived.map(|machine| tokio::spawn(machine.kill())));
        eventually("it is gone", || world.traces(&plan.id).is_empty()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_build_that_saved_a_machine_may_revive_it() {
    let Some(world) = world().await else { return };
    let engine = world.engine();
    assert_eq!(engine.can_revive(&engine.about().version), Ok(()));
    let refused = engine.can_revive("release-20200101.0").unwrap_err();
    assert!(refused.contains("release-20200101.0"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_uses_most_of_its_memory_can_be_saved_again_and_again() {
    let Some(world) = world().await else { return };
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    // Twice as much at first, as the shell copies it.
    let full = "(printf -v x '%*s' 105000000 ''; echo ${#x} > /dev/shm/full; sleep 1000; :) & \
                until [ -s /dev/shm/full ]; do :; done";
    say(&guest, full).await;
    assert!(machine.meter().usage().memory_bytes > 100 << 20);
    let mut save = stage();
    for _ in 0..4 {
        save = stage();
        machine.save(save.path()).await.unwrap();
    }
    assert_eq!(machine.meter().oom_kills(), 0);
    assert_eq!(say(&guest, "cat /dev/shm/full").await, "105000000");
    machine.kill().await.unwrap();
    let (machine, guest) = revive(&world, &world.plan(), save.path()).await;
    assert_eq!(say(&guest, "cat /dev/shm/full").await, "105000000");
    assert_eq!(machine.meter().oom_kills(), 0);
    machine.kill().await.unwrap();
}

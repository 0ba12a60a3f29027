//! What is particular to gVisor: its traps, its words, and what a crash of the daemon can leave.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;

use torpor_lifecycle::engine::{EngineError, Machine};
use torpor_protocol::guest::{Exit, ProcessSpec};
use torpor_protocol::{Resources, SandboxId};

use crate::processes::{COUNTER, GOES_ON};
use crate::world::{
    PATIENCE, boot, command_line, eventually, plan, plant, revive, say, shell, stage, world,
};

const PAGE: usize = 4096;

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_takes_too_much_memory_dies_of_it_and_is_counted() {
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    let meter = machine.meter();
    assert_eq!(meter.oom_kills(), 0);
    let (text, exit) = shell(&guest, "x=aaaaaaaa; while :; do x=$x$x; done").await;
    assert_ne!(exit, Exit::Code { code: 0 }, "{text}");
    assert!(meter.oom_kills() > 0);
    assert_eq!(say(&guest, "echo alive").await, "alive");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_bomb_hurts_only_its_own_machine() {
    let Some(world) = world().await else { return };
    let mut bombed = world.plan();
    bombed.spec.resources = Resources { pids: 300, memory_mib: 512, ..Resources::default() };
    let (mut machine, guest) = boot(&**world.engine(), bombed).await;
    let (neighbour, beside) = boot(&**world.engine(), world.plan()).await;
    let bomb = tokio::spawn(async move {
        shell(&guest, "bomb() { bomb | bomb & }; bomb; sleep 1000").await;
    });
    let reason = tokio::time::timeout(PATIENCE, machine.exited()).await.expect("it crashes");
    assert_eq!(reason, "crashed: process limit reached (pids.max)");
    bomb.abort();
    assert_eq!(say(&beside, "echo alive").await, "alive");
    machine.kill().await.unwrap();
    neighbour.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_was_saved_is_one_process_without_a_gofer() {
    let Some(world) = world().await else { return };
    let mut plan = world.plan();
    // As those that were made before there were volumes.
    plan.spec.mounts = None;
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    assert_eq!(say(&guest, "cd /dev; echo .g*").await, ".g*", "nothing of it is inside");
    machine.save(stage().path()).await.unwrap();
    eventually("the gofer is gone", || {
        let processes = world.processes(&plan.id);
        assert!(processes.iter().any(|line| line.starts_with("runsc-sandbox")), "{processes:?}");
        !processes.iter().any(|line| line.contains("gofer "))
    })
    .await;
    machine.kill().await.unwrap();
}

/// How far behind others the host's scheduler puts a thread; `None`: it ended.
fn nice(thread: &Path) -> Option<i32> {
    let stat = std::fs::read_to_string(thread.join("stat")).ok()?;
    let after_name = stat.rsplit_once(')').expect("a name").1;
    Some(after_name.split_whitespace().nth(16).expect("a number").parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machines_kernel_goes_before_its_guest() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, "true").await;
    let (kernel, guests): (Vec<_>, Vec<_>) = world
        .process_dirs(&plan.id)
        .into_iter()
        .partition(|dir| command_line(dir.clone()).starts_with("runsc-sandbox"));
    assert_eq!(kernel.len(), 1);
    let threads = std::fs::read_dir(kernel[0].join("task")).unwrap().flatten();
    let of_kernel: Vec<i32> = threads.filter_map(|thread| nice(&thread.path())).collect();
    assert!(of_kernel.len() > 1 && of_kernel.iter().all(|nice| *nice == -10), "{of_kernel:?}");
    let of_guest: Vec<i32> = guests.iter().filter_map(|dir| nice(dir)).collect();
    assert!(!of_guest.is_empty() && of_guest.iter().all(|nice| *nice >= 0), "{of_guest:?}");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_with_packed_files_is_refused_with_the_remedy() {
    let Some(world) = world().await else { return };
    let dir = tempfile::tempdir().unwrap();
    let (tree, image) = (dir.path().join("tree"), dir.path().join("packed.erofs"));
    plant(&tree);
    let mut mkfs = Command::new("mkfs.erofs");
    assert!(mkfs.args(["-x-1", "--quiet"]).arg(&image).arg(&tree).status().unwrap().success());
    let plan = plan(&image, world.plan().spec.resources);
    let Err(error) = world.engine().boot(plan.clone()).await else { panic!("it booted") };
    assert!(matches!(error, EngineError::Image(_)), "{error}");
    assert!(error.to_string().contains("noinline_data"), "{error}");
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_crash_between_two_steps_leaves_is_swept() {
    let Some(world) = world().await else { return };
    let (dir, image, group) = (SandboxId::random(), SandboxId::random(), SandboxId::random());
    let machines = world.runtime_dir().join("machines");
    std::fs::create_dir(machines.join(dir.as_str())).unwrap();
    std::fs::write(machines.join(dir.as_str()).join("config.json"), "{}").unwrap();
    std::fs::write(world.config.scratch_dir.join(format!("{image}.img")), "").unwrap();
    let hierarchy = torpor_engines::limits::Hierarchy::discover().unwrap();
    let resources = Resources::default();
    torpor_engines::limits::Group::create(
        &hierarchy,
        &world.config.tag,
        group.as_str(),
        &resources,
    )
    .unwrap();
    assert_eq!(world.engine().sweep(&HashSet::new()).await.unwrap(), 3);
    for id in [dir, image, group] {
        assert_eq!(world.traces(&id), Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_costs_the_whole_machine_for_want_of_memory_is_told() {
    let Some(world) = world().await else { return };
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    let meter = machine.meter();
    // Filled by the guest's kernel and not by the guest, so either may be the one that is killed.
    let greedy = tokio::spawn(async move { shell(&guest, "tail /dev/zero").await });
    tokio::select! {
        reason = machine.exited() => assert_eq!(reason, "killed by the host: out of memory"),
        _ = greedy => assert!(meter.oom_kills() > 0),
        () = tokio::time::sleep(PATIENCE) => panic!("neither died"),
    }
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_killed_from_inside_ends_its_machine() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    let command = ["/bin/bash", "-c", "kill -9 1"].map(str::to_owned).to_vec();
    // Whether its start is still answered is a matter of luck.
    let _ = guest.start(ProcessSpec { command, ..ProcessSpec::default() }).await;
    let reason = tokio::time::timeout(PATIENCE, machine.exited()).await.unwrap();
    assert_eq!(reason, "agent was killed: signal 9");
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

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_without_a_shell_has_one_made() {
    let Some(world) = world().await else { return };
    let (plan, save) = (world.plan(), stage());
    let steps = |machine: &dyn Machine| -> Vec<&str> {
        machine.start_steps().iter().map(|(step, _)| *step).collect()
    };
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    assert_eq!(steps(&*machine), ["prepare", "runsc create", "network", "start"]);
    world.save(&mut machine, &guest, save.path()).await;
    machine.kill().await.unwrap();
    let (machine, _guest) = revive(&world, &plan, save.path()).await;
    assert_eq!(steps(&*machine), ["prepare", "runsc create", "network", "restore"]);
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_whose_keeper_died_is_not_adopted_and_the_next_one_boots() {
    let Some(mut world) = world().await else { return };
    let plan = world.plan();
    let (machine, guest) = boot(&**world.engine(), plan.clone()).await;
    drop((machine, guest));
    world.kill_keeper();
    world.reopen().await;
    assert_eq!(world.engine().sweep(&HashSet::from([plan.id.clone()])).await.unwrap(), 0);
    assert!(world.engine().adopt(&plan.id).await.unwrap().is_none());
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    guest.health().await.unwrap();
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_inside_sends_packets_of_their_own_making() {
    const NET_RAW: u64 = 1 << 13;
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    let status = say(&guest, "cat /proc/self/status").await;
    let bounding = status.lines().find_map(|line| line.strip_prefix("CapBnd:\t")).unwrap();
    assert_eq!(u64::from_str_radix(bounding, 16).unwrap() & NET_RAW, 0, "{bounding}");
    machine.kill().await.unwrap();
}

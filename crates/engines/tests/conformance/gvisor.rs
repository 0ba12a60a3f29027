//! What is particular to gVisor: limits, its traps, and what a crash of the daemon can leave.

use std::collections::HashSet;
use std::process::Command;
use std::time::Duration;

use tokio::time::Instant;
use torpor_lifecycle::engine::{Engine, EngineError};
use torpor_protocol::guest::{Exit, ProcessSpec};
use torpor_protocol::{Resources, SandboxId};

use crate::world::{PATIENCE, boot, eventually, plant, say, shell, spec, world};

const MIB: u64 = 1 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn kill_leaves_nothing_and_takes_less_than_a_second() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, "sleep 1000 & sleep 1000 & echo x > /root/x").await;
    assert!(!world.traces(&plan.id).is_empty(), "traces are found while it lives");
    let begun = Instant::now();
    machine.kill().await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_guest_sees_its_limits() {
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    let meminfo = say(&guest, "head -1 /proc/meminfo").await;
    let kib: u64 = meminfo.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(kib <= 256 * 1024, "{meminfo}");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_an_error_inside_and_no_more() {
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    for target in ["/root/big", "/tmp/big"] {
        let script = format!("dd if=/dev/zero of={target} bs=1M count=200 2>&1");
        let (text, exit) = shell(&guest, &script).await;
        assert_eq!(exit, Exit::Code { code: 1 }, "{text}");
        assert!(text.contains("No space left"), "{text}");
        say(&guest, &format!("rm {target}")).await;
    }
    assert_eq!(say(&guest, "echo fine > /root/small; cat /root/small").await, "fine");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_guest_writes_is_on_disk_and_not_in_its_memory() {
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    let meter = machine.meter();
    let before = meter.usage();
    for target in ["/root/big", "/tmp/big"] {
        say(&guest, &format!("dd if=/dev/urandom of={target} bs=1M count=20; sync")).await;
    }
    eventually("40 MiB of disk are counted", || {
        meter.usage().disk_bytes >= before.disk_bytes + 40 * MIB
    })
    .await;
    machine.kill().await.unwrap();
}

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
    bombed.spec = spec(Resources { pids: 300, memory_mib: 512, ..Resources::default() });
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
async fn a_machine_is_one_process_without_a_gofer() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (machine, _guest) = boot(&**world.engine(), plan.clone()).await;
    let processes = world.processes(&plan.id);
    assert!(processes.iter().any(|line| line.starts_with("runsc-sandbox")), "{processes:?}");
    assert!(!processes.iter().any(|line| line.contains("gofer ")), "{processes:?}");
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
    let mut plan = world.plan();
    plan.root = image;
    let Err(error) = world.engine().boot(plan.clone()).await else { panic!("it booted") };
    assert!(matches!(error, EngineError::Image(_)), "{error}");
    assert!(error.to_string().contains("noinline_data"), "{error}");
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_without_an_agent_is_refused() {
    let Some(world) = world().await else { return };
    let dir = tempfile::tempdir().unwrap();
    let (tree, image) = (dir.path().join("tree"), dir.path().join("bare.erofs"));
    std::fs::create_dir_all(tree.join("proc")).unwrap();
    let mut mkfs = Command::new("mkfs.erofs");
    mkfs.args(["-x-1", "-E", "noinline_data", "--quiet"]).arg(&image).arg(&tree);
    assert!(mkfs.status().unwrap().success());
    let mut plan = world.plan();
    plan.root = image;
    let Err(error) = world.engine().boot(plan.clone()).await else { panic!("it booted") };
    assert!(matches!(error, EngineError::Image(_)), "{error}");
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
async fn a_keeper_that_dies_is_replaced_at_the_next_boot() {
    let Some(world) = world().await else { return };
    world.kill_keeper();
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    guest.health().await.unwrap();
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_guest_has_the_same_address() {
    let Some(world) = world().await else { return };
    let (one, in_one) = boot(&**world.engine(), world.plan()).await;
    let (two, in_two) = boot(&**world.engine(), world.plan()).await;
    let script = "ip -4 -o addr show dev eth0; ip route";
    let (first, second) = (say(&in_one, script).await, say(&in_two, script).await);
    assert!(first.contains("10.0.0.2") && first.contains("default"), "{first}");
    assert_eq!(first, second);
    one.kill().await.unwrap();
    two.kill().await.unwrap();
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
async fn processes_inside_are_not_as_mighty_as_the_agent() {
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    let status = say(&guest, "cat /proc/self/status").await;
    let bounding = status.lines().find_map(|line| line.strip_prefix("CapBnd:\t")).unwrap();
    let bounding = u64::from_str_radix(bounding, 16).unwrap();
    let has = |capability: u32| bounding & (1 << capability) != 0;
    let (net_raw, sys_admin, mknod, setuid) = (13, 21, 27, 7);
    assert!(!has(net_raw) && !has(sys_admin) && !has(mknod) && has(setuid), "{bounding:x}");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_whose_machine_died_can_be_booted_again() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    world.kill_sandbox(&plan.id);
    machine.exited().await;
    drop((machine, guest));
    let (machine, guest) = boot(&**world.engine(), plan).await;
    guest.health().await.unwrap();
    machine.kill().await.unwrap();
}

//! What is particular to a guest with a kernel of its own.

use std::collections::HashSet;
use std::path::Path;

use torpor_lifecycle::engine::EngineError;
use torpor_lifecycle::guest::Item;
use torpor_protocol::Resources;
use torpor_protocol::guest::{Exit, ProcessSpec, Request};

use crate::outside::{Outside, PORT};
use crate::processes::{COUNTER, GOES_ON};
use crate::world::{PATIENCE, boot, chain, greet, revive, say, shell, stage, world};

#[tokio::test(flavor = "multi_thread")]
async fn files_of_two_moments_are_refused() {
    let Some(world) = world().await else { return };
    let (plan, saves) = (world.plan(), [stage(), stage()]);
    let (mut machine, guest) = boot(&**world.engine(), plan).await;
    for save in &saves {
        say(&guest, "echo $SRANDOM > /root/file; echo $SRANDOM > /dev/shm/file").await;
        world.pause(&mut machine, &guest).await;
        machine.save(save.path()).await.unwrap();
        world.resume(&mut machine, &guest).await;
    }
    machine.kill().await.unwrap();
    let mut mixed = 0;
    for entry in std::fs::read_dir(saves[0].path()).unwrap().flatten() {
        let name = entry.file_name();
        let (file, other) = (entry.path(), saves[1].path().join(&name));
        if same(&file, &other) {
            continue;
        }
        let aside = saves[0].path().with_extension("aside");
        std::fs::rename(&file, &aside).unwrap();
        std::fs::copy(&other, &file).unwrap();
        let plan = world.plan();
        let refused = world.revive(&plan, saves[0].path()).await;
        std::fs::rename(&aside, &file).unwrap();
        let Err(error) = refused else { panic!("{name:?} of another moment was run") };
        let text = chain(&error);
        assert!(matches!(error, EngineError::Failed { .. }) && text.contains("moment"), "{text}");
        assert_eq!(world.traces(&plan.id), Vec::<String>::new());
        mixed += 1;
    }
    assert!(mixed >= 4, "memory or its delta, devices, disk and description: {mixed}");
    for save in &saves {
        let (machine, guest) = revive(&world, &world.plan(), save.path()).await;
        guest.health().await.expect("each by itself is whole");
        machine.kill().await.unwrap();
    }
}

/// Whether both are names of one file.
fn same(one: &Path, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let (one, other) = (one.metadata().unwrap(), other.metadata().unwrap());
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_takes_too_much_memory_dies_of_it_alone() {
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    let (text, exit) = shell(&guest, "tail /dev/zero").await;
    assert_ne!(exit, Exit::Code { code: 0 }, "{text}");
    assert_eq!(say(&guest, "echo alive").await, "alive");
    assert_eq!(machine.meter().oom_kills(), 0, "its own kernel sees to that");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_bomb_hurts_only_its_own_machine() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (bombed, guest) = boot(&**world.engine(), plan.clone()).await;
    let (neighbour, beside) = boot(&**world.engine(), world.plan()).await;
    // Its own words say that it works: a shell that counted would have to fork too.
    let command = ["/bin/bash", "-c", "bomb() { echo x >&2; bomb | bomb & }; bomb; sleep 1000"];
    let command = command.map(str::to_owned).to_vec();
    let spec = ProcessSpec { command, ..ProcessSpec::default() };
    let mut stream = guest.open(&Request::Run(spec)).await.unwrap();
    let mut bombs = 0;
    while bombs < 30 {
        let next = tokio::time::timeout(PATIENCE, stream.next()).await.expect("it forks");
        if let Some(Item::DataErr(bytes)) = next.unwrap() {
            bombs += bytes.len() / 2;
        }
    }
    assert_eq!(say(&beside, "echo alive").await, "alive");
    bombed.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
    neighbour.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kernel_that_crashes_ends_its_machine_with_a_reason() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    let crash = tokio::spawn(async move { shell(&guest, "echo c > /proc/sysrq-trigger").await });
    let reason = tokio::time::timeout(PATIENCE, machine.exited()).await.expect("it ends");
    assert!(reason.starts_with("its kernel stopped"), "{reason}");
    crash.abort();
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_to_the_outside_survives_a_save_of_a_machine_that_goes_on() {
    let Some(world) = world().await else { return };
    let outside = Outside::new(&world);
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    outside.connect(&guest).await;
    world.save(&mut machine, &guest, stage().path()).await;
    world.pause(&mut machine, &guest).await;
    world.resume(&mut machine, &guest).await;
    let waits =
        format!("(exec 3<>/dev/tcp/{}/{PORT}; head -1 <&3) && cat /root/out", outside.addresses[1]);
    assert_eq!(say(&guest, &waits).await, "hi\nhi", "the old one has not ended, new ones are made");
    assert!(outside.still_open());
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_was_killed_in_a_save_leaves_a_machine_that_goes_on() {
    let Some(mut world) = world().await else { return };
    let plan = world.plan();
    let (machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, COUNTER).await;
    drop((machine, guest));
    stop(&world.machine_dir(&plan.id).join("run/monitor"));
    world.reopen().await;
    let machine = world.engine().adopt(&plan.id).await.unwrap().expect("it is there");
    assert!(!machine.paused());
    say(&greet(machine.channel()).await, GOES_ON).await;
    machine.kill().await.unwrap();
}

/// Has QEMU stop its guest, as a daemon does before it saves it, and hangs up.
fn stop(monitor: &Path) {
    use std::io::{BufRead, BufReader, Write};
    let mut socket = std::os::unix::net::UnixStream::connect(monitor).unwrap();
    let mut answers = BufReader::new(socket.try_clone().unwrap()).lines();
    socket.write_all(b"{\"execute\":\"qmp_capabilities\"}{\"execute\":\"stop\"}").unwrap();
    let stopped = answers.find(|line| line.as_ref().unwrap().contains("\"STOP\""));
    assert!(stopped.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_of_another_size_have_a_template_of_their_own() {
    let Some(world) = world().await else { return };
    let mut plan = world.plan();
    plan.spec.resources = Resources { memory_mib: 192, ..plan.spec.resources };
    let (machine, guest) = boot(&**world.engine(), plan).await;
    let meminfo = say(&guest, "head -1 /proc/meminfo").await;
    let kib: u64 = meminfo.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!((96 * 1024..=192 * 1024).contains(&kib), "{meminfo}");
    let (other, guest) = boot(&**world.engine(), world.plan()).await;
    let meminfo = say(&guest, "head -1 /proc/meminfo").await;
    let kib: u64 = meminfo.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!((192 * 1024..=256 * 1024).contains(&kib), "{meminfo}");
    machine.kill().await.unwrap();
    other.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_whose_keeper_died_goes_on_and_is_adopted() {
    let Some(mut world) = world().await else { return };
    let plan = world.plan();
    let (machine, guest) = boot(&**world.engine(), plan.clone()).await;
    drop((machine, guest));
    world.kill_keeper();
    world.reopen().await;
    assert_eq!(world.engine().sweep(&HashSet::from([plan.id.clone()])).await.unwrap(), 0);
    let machine = world.engine().adopt(&plan.id).await.unwrap().expect("its channel is its QEMU's");
    assert_eq!(say(&greet(machine.channel()).await, "echo alive").await, "alive");
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

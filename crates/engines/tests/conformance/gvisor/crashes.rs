//! A daemon that is killed leaves machines at any instant of what it was doing with them; the next
//! one takes them over as running or paused.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use torpor_engines::limits::{Group, Hierarchy};
use torpor_lifecycle::engine::{BootPlan, Machine};

use super::freezes;
use crate::processes::{COUNTER, GOES_ON};
use crate::world::{World, boot, greet, revive, say, stage, world};

/// What a killed daemon left.
struct Left {
    what: &'static str,
    /// Whether the guest's kernel was told to pause, and not told to resume.
    told: bool,
    frozen: bool,
    /// The letter in the mark's file.
    mark: u8,
    /// How it must be found.
    paused: bool,
}

/// Where a frozen cgroup stops guests.
const BY_FREEZER: [Left; 11] = [
    left("running", false, false, b'r', false),
    left("frozen, or about to be thawed, and not marked so", false, true, b'r', false),
    left("frozen", false, true, b'f', true),
    left("about to thaw it for a save", false, true, b'q', true),
    left("about to tell its kernel to pause", false, false, b'q', true),
    left("told its kernel to pause", true, false, b'q', true),
    left("saving it", true, false, b'p', true),
    left("saved and frozen", true, true, b'p', true),
    left("about to thaw it", true, true, b's', true),
    left("thawed, about to resume it", true, false, b's', true),
    left("resumed it", false, false, b's', false),
];

/// Where their kernels do, and nothing is ever frozen.
const BY_KERNEL: [Left; 6] = [
    left("running", false, false, b'r', false),
    left("about to tell its kernel to pause", false, false, b'q', false),
    left("told its kernel to pause", true, false, b'q', true),
    left("paused, or saving it", true, false, b'p', true),
    left("about to resume it", true, false, b's', true),
    left("resumed it", false, false, b's', false),
];

const fn left(what: &'static str, told: bool, frozen: bool, mark: u8, paused: bool) -> Left {
    Left { what, told, frozen, mark, paused }
}

fn group(world: &World, plan: &BootPlan) -> Group {
    let machine = world.machine_of(&plan.id).expect("it has a machine");
    Group::open(&Hierarchy::discover().unwrap(), &world.config.tag, &machine)
}

/// Brings the machine to where the daemon was killed.
async fn bring(world: &World, plan: &BootPlan, machine: &mut Box<dyn Machine>, left: &Left) {
    machine.resume().await.unwrap();
    if left.told {
        machine.pause().await.unwrap();
        machine.save(stage().path()).await.unwrap();
    }
    let group = group(world, plan);
    if left.frozen {
        group.freeze().unwrap()
    } else {
        group.thaw().unwrap()
    }
    let mark = world.machine_dir(&plan.id).join("mark");
    File::options().write(true).open(mark).unwrap().write_all_at(&[left.mark], 0).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn at_whatever_instant_a_daemon_was_killed_its_machine_is_found_running_or_paused() {
    let Some(mut world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, COUNTER).await;
    drop(guest);
    let freezes = freezes().await;
    for left in if freezes { &BY_FREEZER[..] } else { &BY_KERNEL[..] } {
        bring(&world, &plan, &mut machine, left).await;
        drop(machine);
        world.reopen().await;
        let keep = HashSet::from([plan.id.clone()]);
        assert_eq!(world.engine().sweep(&keep).await.unwrap(), 0);
        machine = world.engine().adopt(&plan.id).await.unwrap().expect(left.what);
        assert_eq!(machine.paused(), left.paused, "{}", left.what);
        let frozen = left.paused && freezes;
        assert_eq!(group(&world, &plan).frozen().unwrap(), frozen, "{}", left.what);
        // One pause too few would show as a guest that runs, one too many as one that never does.
        machine.pause().await.unwrap();
        machine.resume().await.unwrap();
        let guest = greet(machine.channel()).await;
        say(&guest, GOES_ON).await;
    }
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_was_cut_off_is_not_adopted() {
    let Some(mut world) = world().await else { return };
    let plan = world.plan();
    let (machine, guest) = boot(&**world.engine(), plan.clone()).await;
    std::fs::remove_file(world.machine_dir(&plan.id).join("mark")).unwrap();
    drop((machine, guest));
    world.reopen().await;
    assert_eq!(world.engine().sweep(&HashSet::from([plan.id.clone()])).await.unwrap(), 0);
    assert!(world.engine().adopt(&plan.id).await.unwrap().is_none());
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_machine_is_adopted_paused_and_can_be_saved_resumed_or_killed() {
    let Some(mut world) = world().await else { return };
    let (plan, other, save) = (world.plan(), world.plan(), stage());
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, COUNTER).await;
    machine.pause().await.unwrap();
    drop((machine, guest));
    world.reopen().await;
    let mut machine = world.engine().adopt(&plan.id).await.unwrap().expect("it is there");
    let frozen = freezes().await;
    assert!(machine.paused() && group(&world, &plan).frozen().unwrap() == frozen);
    machine.save(save.path()).await.unwrap();
    assert!(machine.paused() && group(&world, &plan).frozen().unwrap() == frozen);
    machine.resume().await.unwrap();
    let guest = greet(machine.channel()).await;
    say(&guest, GOES_ON).await;
    let (copy, in_copy) = revive(&world, &other, save.path()).await;
    say(&in_copy, GOES_ON).await;
    copy.kill().await.unwrap();
    machine.pause().await.unwrap();
    drop((machine, guest));
    world.reopen().await;
    let machine = world.engine().adopt(&plan.id).await.unwrap().expect("it is there");
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_save_whose_daemon_is_gone_does_not_change_how_the_machine_stands() {
    let Some(mut world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, "dd if=/dev/urandom of=/dev/shm/big bs=1M count=40").await;
    say(&guest, COUNTER).await;
    drop(guest);
    for paused in [false, true] {
        if paused {
            machine.pause().await.unwrap();
            group(&world, &plan).thaw().unwrap();
        }
        let save = stage();
        let control = ask_to_save(&world, &plan, save.path());
        drop((machine, control));
        world.reopen().await;
        machine = world.engine().adopt(&plan.id).await.unwrap().expect("it is there");
        assert_eq!(machine.paused(), paused);
        machine.resume().await.unwrap();
        machine.pause().await.unwrap();
        machine.resume().await.unwrap();
        say(&greet(machine.channel()).await, GOES_ON).await;
    }
    machine.kill().await.unwrap();
}

/// Sends the request as a daemon does, which then dies with the returned connection.
fn ask_to_save(world: &World, plan: &BootPlan, into: &Path) -> std::os::unix::net::UnixStream {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::os::fd::AsFd;
    let machine = world.machine_of(&plan.id).expect("it has a machine");
    let socket = world.runtime_dir().join("runsc").join(format!("runsc-{machine}.sock"));
    let control = std::os::unix::net::UnixStream::connect(socket).unwrap();
    let names = ["checkpoint.img", "pages_meta.img", "pages.img"];
    let files = names.map(|name| File::create_new(into.join(name)).unwrap());
    let fds = files.each_ref().map(AsFd::as_fd);
    let call = r#"{"method":"containerManager.Checkpoint","arg":{"key":null,"metadata":
        {"compression":"none","resume":"true"},"MemoryFileSaveOpts":{},"have_pages_file":true,
        "Resume":true}}"#;
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    assert!(beside.push(SendAncillaryMessage::ScmRights(&fds)));
    let iov = [std::io::IoSlice::new(call.as_bytes())];
    sendmsg(&control, &iov, &mut beside, SendFlags::NOSIGNAL).unwrap();
    control
}

//! Directories of the host in a guest: volumes and drives.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use torpor_lifecycle::engine::{BootPlan, HostMount};
use torpor_lifecycle::guest::{Guest, GuestError};
use torpor_lifecycle::store::{OpenVolume, SavePin};
use torpor_protocol::VolumeId;
use torpor_protocol::guest::{
    BoundMount, Exit, FailureCode, HeldPath, ProcessSpec, Reply, Request,
};

use crate::world::{boot, revive, say, shell, stage, world};

/// A directory as a volume.
fn mount(dir: &Path, slot: u16) -> HostMount {
    let hold = SavePin::new(|| {});
    let volume = OpenVolume { id: VolumeId::random(), dir: dir.to_owned(), hold };
    let subpath = "/".parse().unwrap();
    HostMount { slot, volume: Arc::new(volume), subpath, read_only: false }
}

async fn bring(guest: &Guest, mounts: &[(u16, &str)]) -> Result<(), GuestError> {
    let bound = |(slot, path): &(u16, &str)| BoundMount { slot: *slot, path: (*path).to_owned() };
    guest.done(&Request::SetMounts { mounts: mounts.iter().map(bound).collect() }).await
}

async fn held(guest: &Guest) -> Vec<HeldPath> {
    let Reply::Held { paths } = guest.call(&Request::HeldPaths).await.unwrap() else { panic!() };
    paths
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_comes_and_goes_while_the_guest_runs() {
    let Some(world) = world().await else { return };
    let volume = stage();
    let plan = world.plan();
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    machine.bind(&mount(volume.path(), 3)).await.unwrap();
    bring(&guest, &[(3, "/data/deep")]).await.unwrap();

    fs::set_permissions(volume.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let command = ["/bin/bash", "-c", "umask 027; echo of the guest > /data/deep/a"];
    let command = command.map(str::to_owned).to_vec();
    let spec = ProcessSpec { command, user: Some("1234:4321".into()), ..ProcessSpec::default() };
    let mut stream = guest.open(&Request::Run(spec)).await.unwrap();
    while stream.next().await.unwrap().is_some() {}
    let about = fs::metadata(volume.path().join("a")).unwrap();
    assert_eq!((about.uid(), about.gid(), about.mode() & 0o777), (1234, 4321, 0o640));
    fs::write(volume.path().join("b"), "of the host").unwrap();
    assert_eq!(say(&guest, "cat /data/deep/b; cd /data/deep; echo *").await, "of the hosta b");
    // What it is not given it does not reach.
    let (_, made) = shell(&guest, "echo x > /dev/.mounts/5/x").await;
    assert_ne!(made, Exit::Code { code: 0 }, "an empty slot is read-only");

    bring(&guest, &[]).await.unwrap();
    machine.unbind(3).await.unwrap();
    guest.done(&Request::FlushMounts).await.unwrap();
    assert_eq!(say(&guest, "cd /data/deep; echo *; cd /dev/.mounts/3; echo *").await, "*\n*");
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
    assert_eq!(fs::read_to_string(volume.path().join("b")).unwrap(), "of the host");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_in_use_is_not_taken_away() {
    let Some(world) = world().await else { return };
    let volume = stage();
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    machine.bind(&mount(volume.path(), 0)).await.unwrap();
    bring(&guest, &[(0, "/data")]).await.unwrap();
    say(
        &guest,
        "mkdir /data/dir; cd /data/dir; (exec 3> /data/open; exec sleep 1000) > /dev/null 2>&1 &",
    )
    .await;
    let error = bring(&guest, &[]).await.unwrap_err();
    assert!(matches!(error, GuestError::Refused { code: FailureCode::Busy, .. }), "{error}");
    assert!(error.to_string().contains("sleep"), "{error}");
    let held = held(&guest).await;
    let path = |path: &str, directory| HeldPath { slot: 0, path: path.into(), directory };
    assert_eq!(held, [path("dir", true), path("open", false)]);
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_volume_and_a_part_of_one_stay_what_they_are() {
    let Some(world) = world().await else { return };
    let volume = stage();
    fs::create_dir_all(volume.path().join("team/a")).unwrap();
    fs::write(volume.path().join("team/file"), "x").unwrap();
    std::os::unix::fs::symlink("/etc", volume.path().join("out")).unwrap();
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    let part =
        HostMount { subpath: "/team".parse().unwrap(), read_only: true, ..mount(volume.path(), 0) };
    machine.bind(&part).await.unwrap();
    bring(&guest, &[(0, "/mnt/team")]).await.unwrap();
    assert_eq!(say(&guest, "cd /mnt/team; echo *").await, "a file");
    let (text, exit) = shell(&guest, "echo y > /mnt/team/file").await;
    assert_ne!(exit, Exit::Code { code: 0 }, "{text}");
    let (text, exit) = shell(&guest, "echo y > /dev/.mounts/0/file").await;
    assert_ne!(exit, Exit::Code { code: 0 }, "{text}");
    let out = HostMount { subpath: "/out".parse().unwrap(), ..mount(volume.path(), 1) };
    assert!(machine.bind(&out).await.is_err(), "a link leads nowhere");
    machine.kill().await.unwrap();
    assert_eq!(fs::read_to_string(volume.path().join("team/file")).unwrap(), "x");
}

const WRITER: &str = "cd /data/dir; (exec 3>> /data/log; n=0; while :; do n=$((n+1)); echo $n >&3; sleep 0.1; done) > /dev/null 2>&1 &";

/// A guest with an open file on a volume, saved and gone.
async fn saved_with_open_files(
    world: &crate::world::World,
    volume: &Path,
    save: &Path,
) -> (BootPlan, Vec<HeldPath>) {
    let plan = BootPlan { mounts: vec![mount(volume, 0)], ..world.plan() };
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    bring(&guest, &[(0, "/data")]).await.unwrap();
    say(&guest, &format!("mkdir /data/dir; {WRITER}")).await;
    say(&guest, "until [ -s /data/log ]; do sleep 0.05; done").await;
    let held = held(&guest).await;
    world.pause(&mut machine, &guest).await;
    machine.save(save).await.unwrap();
    machine.kill().await.unwrap();
    (plan, held)
}

#[tokio::test(flavor = "multi_thread")]
async fn open_files_of_a_volume_go_on_when_the_guest_is_revived() {
    let Some(world) = world().await else { return };
    let (volume, save) = (stage(), stage());
    let (plan, held) = saved_with_open_files(&world, volume.path(), save.path()).await;
    assert!(held.iter().any(|held| held.path == "log"), "{held:?}");
    let log = volume.path().join("log");
    let before = fs::read_to_string(&log).unwrap().lines().count();
    // Others may write meanwhile.
    fs::write(volume.path().join("new"), "meanwhile").unwrap();
    let (machine, guest) = revive(&world, &plan, save.path()).await;
    crate::world::eventually("it goes on writing", || {
        fs::read_to_string(&log).unwrap().lines().count() > before + 2
    })
    .await;
    assert_eq!(say(&guest, "cat /data/new").await, "meanwhile");
    bring(&guest, &[(0, "/data")]).await.unwrap();
    machine.kill().await.unwrap();
    let lines: Vec<usize> =
        fs::read_to_string(&log).unwrap().lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(lines, (1..=lines.len()).collect::<Vec<_>>(), "none lost, none twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_deleted_meanwhile_is_a_placeholder_away_from_reviving() {
    let Some(world) = world().await else { return };
    let (volume, save) = (stage(), stage());
    let (plan, held) = saved_with_open_files(&world, volume.path(), save.path()).await;
    fs::remove_file(volume.path().join("log")).unwrap();
    fs::remove_dir(volume.path().join("dir")).unwrap();
    let plan_of = BootPlan { id: torpor_protocol::SandboxId::random(), ..plan.clone() };
    assert!(world.revive(&plan_of, save.path()).await.is_err(), "this is why");
    for held in held {
        let path = volume.path().join(&held.path);
        if held.directory { fs::create_dir(path).unwrap() } else { fs::write(path, "").unwrap() }
    }
    let (machine, guest) = revive(&world, &plan, save.path()).await;
    assert_eq!(say(&guest, "echo alive").await, "alive");
    machine.kill().await.unwrap();
}

/// Its open file was changed by others while it was saved: it is revived, and says something.
async fn is_revived_after(change: impl Fn(&Path)) {
    let Some(world) = world().await else { return };
    let (volume, save) = (stage(), stage());
    let (plan, _) = saved_with_open_files(&world, volume.path(), save.path()).await;
    change(&volume.path().join("log"));
    let (machine, guest) = revive(&world, &plan, save.path()).await;
    assert_eq!(say(&guest, "echo alive").await, "alive");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_file_may_have_grown_meanwhile() {
    is_revived_after(|log| {
        let mut file = fs::OpenOptions::new().append(true).open(log).unwrap();
        std::io::Write::write_all(&mut file, &[b'x'; 1 << 20]).unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_file_may_be_another_one_of_the_same_name_meanwhile() {
    is_revived_after(|log| {
        let other = log.with_extension("other");
        fs::write(&other, "another\n").unwrap();
        fs::rename(other, log).unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_file_may_be_empty_meanwhile() {
    is_revived_after(|log| fs::write(log, "").unwrap()).await;
}

/// Whoever maps it may die of that; the others go on.
#[tokio::test(flavor = "multi_thread")]
async fn a_mapped_file_may_be_empty_meanwhile() {
    let Some(world) = world().await else { return };
    let (volume, save) = (stage(), stage());
    let plan = BootPlan { mounts: vec![mount(volume.path(), 0)], ..world.plan() };
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    bring(&guest, &[(0, "/data")]).await.unwrap();
    let runs = "cat $(command -v sleep) > /data/program; chmod 755 /data/program
        (exec /data/program 1000) > /dev/null 2>&1 &
        for n in {1..100}; do
            [[ $(readlink /proc/$!/exe) == /data/program ]] && break; sleep 0.05
        done";
    say(&guest, runs).await;
    let held = held(&guest).await;
    assert!(held.iter().any(|held| held.path == "program"), "{held:?}");
    world.pause(&mut machine, &guest).await;
    machine.save(save.path()).await.unwrap();
    machine.kill().await.unwrap();
    fs::write(volume.path().join("program"), "").unwrap();
    let (machine, guest) = revive(&world, &plan, save.path()).await;
    assert_eq!(say(&guest, "echo alive").await, "alive");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_with_open_files_is_not_revived_without_its_volume() {
    let Some(world) = world().await else { return };
    let (volume, save) = (stage(), stage());
    let (plan, _) = saved_with_open_files(&world, volume.path(), save.path()).await;
    let without = BootPlan { mounts: Vec::new(), ..plan.clone() };
    let Err(error) = world.revive(&without, save.path()).await else {
        panic!("its open files are nowhere")
    };
    let words = torpor_lifecycle::chain(&error);
    assert!(words.contains("no such file or directory"), "{words}");
    // Nothing is lost by that.
    let (machine, guest) = revive(&world, &plan, save.path()).await;
    assert_eq!(say(&guest, "echo alive").await, "alive");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_forks_of_one_save_go_on_each_with_its_copy_of_the_volume() {
    let Some(world) = world().await else { return };
    let (volume, save) = (stage(), stage());
    let (plan, _) = saved_with_open_files(&world, volume.path(), save.path()).await;
    let saved = fs::read_to_string(volume.path().join("log")).unwrap().lines().count();
    let copies = [stage(), stage()];
    let mut forks = Vec::new();
    for copy in &copies {
        fs::create_dir(copy.path().join("dir")).unwrap();
        fs::copy(volume.path().join("log"), copy.path().join("log")).unwrap();
        let id = torpor_protocol::SandboxId::random();
        let fork = BootPlan { id, mounts: vec![mount(copy.path(), 0)], ..plan.clone() };
        forks.push(revive(&world, &fork, save.path()).await);
    }
    for (copy, (_, guest)) in copies.iter().zip(&forks) {
        let log = copy.path().join("log");
        crate::world::eventually("it goes on writing", || {
            fs::read_to_string(&log).unwrap().lines().count() > saved + 2
        })
        .await;
        assert_eq!(say(guest, "echo alive").await, "alive");
    }
    let untouched = fs::read_to_string(volume.path().join("log")).unwrap().lines().count();
    assert_eq!(untouched, saved);
    for (machine, _) in forks {
        machine.kill().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_holds_a_file_it_deleted_is_not_saved_and_lives_on() {
    let Some(world) = world().await else { return };
    let (volume, save) = (stage(), stage());
    let plan = BootPlan { mounts: vec![mount(volume.path(), 0)], ..world.plan() };
    let (mut machine, guest) = boot(&**world.engine(), plan).await;
    bring(&guest, &[(0, "/data")]).await.unwrap();
    say(&guest, "(exec 3> /data/open; rm /data/open; exec sleep 1000) > /dev/null 2>&1 &").await;
    crate::world::eventually("it is deleted", || !volume.path().join("open").exists()).await;
    world.pause(&mut machine, &guest).await;
    let refused = machine.save(save.path()).await;
    assert!(refused.is_err(), "{refused:?}");
    world.resume(&mut machine, &guest).await;
    assert_eq!(say(&guest, "echo alive").await, "alive");
    machine.kill().await.unwrap();
}

//! Volumes and drives of sandboxes: one writer, and what becomes of them when it sleeps, ends or is forked.

use super::*;
use crate::ledger::VolumeLedger;
use crate::store::{Saves as _, StoreError, VolumeRecord};
use crate::{Plan, Refusal};
use torpor_protocol::guest::HeldPath;
use torpor_protocol::volume::ForkVolumes;
use torpor_protocol::{Mount, SnapshotKind, SnapshotRef, VolumeId, VolumeKind};

async fn volume(world: &World, name: &str, kind: VolumeKind) -> Mount {
    let record = VolumeRecord {
        id: VolumeId::random(),
        name: name.parse().unwrap(),
        kind,
        size_mib: 64,
        labels: [].into(),
        permissions: Vec::new(),
        copy_of: None,
        made_for: None,
        elsewhere: None,
        created_at_ms: 1,
    };
    world.store.create_volume(&record).await.unwrap();
    Mount {
        slot: 0,
        volume: record.id,
        name: record.name,
        kind,
        subpath: "/".parse().unwrap(),
        path: format!("/{name}").parse().unwrap(),
        read_only: false,
    }
}

async fn mount(sandbox: &Sandbox, mount: &Mount) -> Result<(), Error> {
    let lease = sandbox.awake().await.unwrap();
    sandbox.mount(&lease, mount.clone()).await
}

async fn unmount(sandbox: &Sandbox, mount: &Mount) -> Result<(), Error> {
    let lease = sandbox.awake().await.unwrap();
    sandbox.unmount(&lease, mount.path.clone()).await
}

#[tokio::test(start_paused = true)]
async fn a_volume_has_one_writer_until_that_one_lets_go_or_is_gone() {
    let world = World::new().await;
    let data = volume(&world, "data", VolumeKind::Volume).await;
    let (a, b) = (world.running("a").await, world.running("b").await);
    mount(&a, &data).await.unwrap();
    mount(&a, &data).await.unwrap();
    let taken = mount(&b, &data).await.unwrap_err();
    assert!(matches!(taken, Error::Store(StoreError::InUse { .. })), "{taken:?}");
    assert_eq!(b.status().spec.mounts(), [], "it is as it was");
    mount(&b, &Mount { read_only: true, ..data.clone() }).await.unwrap();
    unmount(&b, &data).await.unwrap();
    a.sleep(true).await.unwrap();
    assert!(mount(&b, &data).await.is_err(), "the volume of one that sleeps is its own");
    a.delete().await;
    mount(&b, &data).await.unwrap();
    unmount(&b, &data).await.unwrap();
    let error = unmount(&b, &data).await.unwrap_err();
    assert!(matches!(error, Error::Refused(Refusal::NotMounted(_))), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn many_sandboxes_have_a_drive_and_each_path_is_one_mount() {
    let world = World::new().await;
    let shared = volume(&world, "shared", VolumeKind::Drive).await;
    let (a, b) = (world.running("a").await, world.running("b").await);
    mount(&a, &shared).await.unwrap();
    mount(&b, &shared).await.unwrap();
    for path in ["/shared/below", "/"] {
        let there = Mount { path: path.parse().unwrap(), ..shared.clone() };
        let error = mount(&a, &there).await.unwrap_err();
        assert!(matches!(error, Error::Refused(Refusal::PathTaken(_))), "{error:?}");
    }
    let elsewhere = Mount { path: "/else".parse().unwrap(), ..shared.clone() };
    mount(&a, &elsewhere).await.unwrap();
    let slots: Vec<_> = a.status().spec.mounts().iter().map(|mount| mount.slot).collect();
    assert_eq!(slots, [0, 1]);
    assert_eq!(world.store.attachments(&shared.volume).await.unwrap().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn mounts_outlive_sleep_and_the_daemon() {
    let world = World::new().await;
    let data = volume(&world, "data", VolumeKind::Volume).await;
    mount(&world.running("a").await, &data).await.unwrap();
    let world = world.restart_after(ShutdownMode::Running).await;
    let a = world.find("a").unwrap();
    assert_eq!(a.status().spec.mounts(), std::slice::from_ref(&data));
    a.sleep(true).await.unwrap();
    let world = world.restart_after(ShutdownMode::Durable).await;
    let a = world.find("a").unwrap();
    unmount(&a, &data).await.unwrap();
    assert_eq!(a.status().spec.mounts(), []);
}

#[tokio::test(start_paused = true)]
async fn a_fork_gets_a_copy_or_reads_or_is_refused() {
    let world = World::new().await;
    let data = volume(&world, "data", VolumeKind::Volume).await;
    let a = world.running("a").await;
    mount(&a, &data).await.unwrap();
    let fork = async |name: &str, volumes| {
        let point = world.fleet.restore_point_now(&reference("a"), volumes).await?;
        let plan = Plan { volumes, ..Plan::default() };
        let made = world.fleet.create_from(spec(Some(name)), Some(&point), plan).await;
        world.fleet.let_go(point).await;
        made
    };
    let refused = fork("b", ForkVolumes::Refuse).await.err().unwrap();
    assert!(matches!(refused, Error::Refused(Refusal::WritesToVolume(_))), "{refused:?}");
    assert!(world.find("b").is_err(), "its name is free");

    let reader = fork("c", ForkVolumes::ShareRo).await.unwrap();
    let shared = Mount { read_only: true, ..data.clone() };
    assert_eq!(reader.status().spec.mounts(), [shared]);

    let copied = fork("d", ForkVolumes::Copy).await.unwrap();
    let [copy] = copied.status().spec.mounts().to_vec().try_into().unwrap();
    assert_ne!(copy.volume, data.volume);
    let known = world.store.volumes(None, None, 100).await.unwrap();
    assert_eq!(known.len(), 2, "the copy that forks were made of is gone: {known:?}");
    copied.delete().await;
    assert_eq!(world.store.volumes(None, None, 100).await.unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_copy_of_a_fork_stays_if_a_snapshot_needs_it() {
    let world = World::new().await;
    let data = volume(&world, "data", VolumeKind::Volume).await;
    mount(&world.running("a").await, &data).await.unwrap();
    let volumes = ForkVolumes::Copy;
    let point = world.fleet.restore_point_now(&reference("a"), volumes).await.unwrap();
    let plan = Plan { volumes, ..Plan::default() };
    let fork = world.fleet.create_from(spec(Some("b")), Some(&point), plan).await.unwrap();
    world.fleet.let_go(point).await;
    let taking = world.fleet.take_snapshot(&reference("b"), None, SnapshotKind::Memory).await;
    let snapshot = taking.unwrap().done().await.unwrap();
    fork.delete().await;
    let point = world.fleet.restore_point(&SnapshotRef::Id(snapshot.id)).await.unwrap();
    let again = world.fleet.begin(&point, spec(Some("c"))).await.unwrap();
    assert_ne!(again.status().spec.mounts()[0].volume, data.volume);
    drop(again.awake().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn what_comes_back_after_a_crash_has_the_volumes_it_had_before_the_crash() {
    let world = World::new().await;
    let data = volume(&world, "data", VolumeKind::Volume).await;
    let other = volume(&world, "other", VolumeKind::Volume).await;
    let (a, b) = (world.running("a").await, world.running("b").await);
    mount(&a, &data).await.unwrap();
    a.sleep(true).await.unwrap();
    unmount(&a, &data).await.unwrap();
    // Somebody else's by now, and another one is in its place.
    mount(&b, &data).await.unwrap();
    mount(&a, &other).await.unwrap();
    world.host.crash(a.id(), "killed");
    assert!(until(&a, State::Asleep).await.recovered_from_ms.is_some());
    drop(a.awake().await.unwrap());
    assert_eq!(a.status().spec.mounts(), std::slice::from_ref(&other));
    let save = world.store.record_of(a.id()).unwrap().save.unwrap();
    let saved = world.store.manifest(&save).await.unwrap().about.spec;
    assert_eq!(saved.mounts(), [], "no memory that knows the volume is gone back to");
    assert_eq!(b.status().spec.mounts(), [data]);
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_cant_be_forgotten_stays() {
    let world = World::new().await;
    let data = volume(&world, "data", VolumeKind::Volume).await;
    let a = world.running("a").await;
    mount(&a, &data).await.unwrap();
    a.sleep(true).await.unwrap();
    drop(a.awake().await.unwrap());
    world.store.fail_commits(1);
    unmount(&a, &data).await.unwrap_err();
    assert_eq!(a.status().spec.mounts(), std::slice::from_ref(&data));
    assert_eq!(world.store.attachments(&data.volume).await.unwrap().len(), 1);
    unmount(&a, &data).await.unwrap();
    assert_eq!(world.store.attachments(&data.volume).await.unwrap().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_cant_open_a_volume_leaves_the_sandbox_as_it_is() {
    let world = World::new().await;
    let data = volume(&world, "data", VolumeKind::Volume).await;
    let (runs, sleeps) = (world.running("runs").await, world.running("sleeps").await);
    mount(&runs, &data).await.unwrap();
    mount(&sleeps, &Mount { read_only: true, ..data }).await.unwrap();
    sleeps.sleep(false).await.unwrap();
    world.host.set_memory(runs.id(), "newer");
    world.store.lose_volumes(true);
    let world = world.restart().await;
    for name in ["runs", "sleeps"] {
        let sandbox = world.find(name).unwrap();
        drop(sandbox.awake().await.unwrap());
        assert_eq!(sandbox.status().recovered_from_ms, None, "{name}");
    }
    assert_eq!(world.host.memory(runs.id()).as_deref(), Some("newer"));
}

#[tokio::test(start_paused = true)]
async fn a_save_says_what_is_held_of_volumes_also_if_another_daemon_makes_it() {
    let world = World::new().await;
    let data = volume(&world, "data", VolumeKind::Volume).await;
    let a = world.fleet.create(sleepy("a")).await.unwrap();
    mount(&a, &data).await.unwrap();
    world.host.hold(a.id(), HeldPath { slot: 0, path: "/x".to_owned(), directory: false });
    until(&a, State::Asleep).await;
    assert!(!a.status().durable, "it is frozen and nothing more");
    let world = world.restart().await;
    let a = world.find("a").unwrap();
    a.sleep(true).await.unwrap();
    let save = world.store.record_of(a.id()).unwrap().save.unwrap();
    let about = world.store.manifest(&save).await.unwrap().about;
    assert_eq!(about.held.len(), 1, "{about:?}");
}

#[tokio::test(start_paused = true)]
async fn a_fork_that_is_given_up_leaves_no_copies() {
    let world = World::new().await;
    let data = volume(&world, "data", VolumeKind::Volume).await;
    let a = world.running("a").await;
    mount(&a, &data).await.unwrap();
    world.host.save_takes(Duration::from_secs(2));
    let of = reference("a");
    let forking = world.fleet.restore_point_now(&of, ForkVolumes::Copy);
    tokio::time::timeout(Duration::from_secs(1), forking).await.unwrap_err();
    // After the save, which nobody can stop, and its copies.
    mount(&a, &data).await.unwrap();
    assert_eq!(world.host.saves(), 1);
    let gone = async {
        while world.store.volumes(None, None, 100).await.unwrap().len() > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(SOON, gone).await.expect("the copy goes");
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_is_older_than_volumes_is_refused_one() {
    let world = World::new().await;
    let data = volume(&world, "data", VolumeKind::Volume).await;
    let old = SandboxSpec { mounts: None, ..spec(Some("old")) };
    let sandbox = world.fleet.create(old).await.unwrap();
    let refused = mount(&sandbox, &data).await.unwrap_err();
    assert!(matches!(refused, Error::Refused(Refusal::NotMountable(_))), "{refused:?}");
    // What begins from it is no younger.
    let volumes = ForkVolumes::Refuse;
    let point = world.fleet.restore_point_now(&reference("old"), volumes).await.unwrap();
    let fork = SandboxSpec { mounts: Some(vec![data]), ..spec(Some("fork")) };
    let refused = world.fleet.begin(&point, fork).await.err().unwrap();
    assert!(matches!(refused, Error::Refused(Refusal::NotMountable(_))), "{refused:?}");
    assert_eq!(
        world.fleet.begin(&point, spec(Some("fork"))).await.unwrap().status().spec.mounts,
        None
    );
}

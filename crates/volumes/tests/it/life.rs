//! What volumes promise while nobody is killed.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use torpor_disk::mountinfo;
use torpor_lifecycle::store::{StoreError, Volumes as _};
use torpor_protocol::guest::HeldPath;
use torpor_protocol::volume::UpdateVolume;
use torpor_protocol::{GuestPath, NodeId, SandboxId, VolumeId};

use crate::world::{Place, record};

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_stays_and_nothing_is_left_mounted() {
    let Some(place) = Place::new() else { return };
    let world = place.open().await;
    let data = world.create("data", 32).await;
    let open = world.volumes.open(&data.id).await.unwrap();
    assert_eq!(fs::read_dir(&open.dir).unwrap().count(), 0, "it begins empty");
    fs::write(open.dir.join("kept"), "x").unwrap();
    let options = mountinfo::read().unwrap().into_iter().find(|m| m.point == open.dir).unwrap();
    assert!(!options.options.iter().any(|o| o == "nobarrier"), "it is durable");
    drop(open);
    world.close().await;
    place.expect_no_traces().await;
    let mode =
        |path: &str| fs::metadata(place.path().join(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode("data/volumes"), 0o700);
    assert_eq!(mode(&format!("data/volumes/{}/image.ext4", data.id)), 0o600);

    let world = place.open().await;
    let open = world.volumes.open(&data.id).await.unwrap();
    assert_eq!(fs::read_to_string(open.dir.join("kept")).unwrap(), "x");
    drop(open);
    world.volumes.remove(&data.id).await.unwrap();
    assert!(matches!(world.volumes.open(&data.id).await, Err(StoreError::NoSuchVolume(_))));
    world.close().await;
    place.expect_no_traces().await;
    assert_eq!(place.entries(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_volume_says_so_and_its_sizes_are_true() {
    let Some(place) = Place::new() else { return };
    let world = place.open().await;
    let data = world.create("data", 16).await;
    let open = world.volumes.open(&data.id).await.unwrap();
    let mut file = fs::File::create(open.dir.join("large")).unwrap();
    let written = (0..64).try_for_each(|_| file.write_all(&[7; 1 << 20]));
    assert_eq!(written.unwrap_err().kind(), ErrorKind::StorageFull);
    file.sync_all().unwrap();
    let sizes = world.volumes.sizes(&data.id).await.unwrap();
    let used = sizes.used_bytes.unwrap();
    assert!(used > 6 << 20 && used < 16 << 20, "{sizes:?}");
    assert!(sizes.stored_bytes >= used, "{sizes:?}");
    drop(file);
    drop(open);
    // The same is known without mounting it.
    world.close().await;
    place.expect_no_traces().await;
    let world = place.open().await;
    let unmounted = world.volumes.sizes(&data.id).await.unwrap().used_bytes.unwrap();
    assert!(unmounted.abs_diff(used) <= 64 << 10, "{unmounted} and {used}");
    assert_eq!(place.traces(), Vec::<String>::new(), "nothing was mounted for it");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filesystem_is_known_to_the_kernel_once_whoever_holds_it() {
    let Some(place) = Place::new() else { return };
    let world = place.open().await;
    let data = world.create("data", 16).await;
    let open = world.volumes.open(&data.id).await.unwrap();
    // A machine has it, by a mount of its own.
    let machine = place.path().join("machine");
    fs::create_dir(&machine).unwrap();
    rustix::mount::mount_bind(&open.dir, &machine).unwrap();
    drop(open);
    world.close().await;
    let world = place.open().await;
    assert_eq!(place.traces().len(), 2, "only the machine's is left: {:?}", place.traces());
    let open = world.volumes.open(&data.id).await.unwrap();
    fs::write(machine.join("seen"), "at once").unwrap();
    assert_eq!(fs::read_to_string(open.dir.join("seen")).unwrap(), "at once");
    let devices = torpor_disk::images_in_use(place.path()).unwrap();
    assert_eq!(devices.len(), 1, "{devices:?}");
    rustix::mount::unmount(&machine, rustix::mount::UnmountFlags::empty()).unwrap();
    drop(open);
    world.close().await;
    place.expect_no_traces().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_has_the_files_of_its_moment_and_a_life_of_its_own() {
    let Some(place) = Place::new() else { return };
    let world = place.open().await;
    let data = world.create("data", 32).await;
    let open = world.volumes.open(&data.id).await.unwrap();
    fs::write(open.dir.join("file"), "before").unwrap();
    let copy = world.copy(&data, "copy").await.unwrap();
    fs::write(open.dir.join("file"), "after").unwrap();
    let copied = world.volumes.open(&copy.id).await.unwrap();
    assert_eq!(fs::read_to_string(copied.dir.join("file")).unwrap(), "before");
    // Sparse stays sparse.
    let stored = world.volumes.sizes(&copy.id).await.unwrap().stored_bytes;
    assert!(stored < 16 << 20, "{stored}");
    let taken = world.copy(&data, "copy").await;
    assert!(matches!(taken, Err(StoreError::NameTaken(_))), "{taken:?}");

    let sandbox = SandboxId::random();
    let own = world.volumes.copy_for(&data.id, &sandbox).await.unwrap();
    assert_eq!((own.copy_of, own.made_for), (Some(data.id), Some(sandbox.clone())));
    world.volumes.discard_copies(&sandbox).await;
    assert_eq!(world.find(own.name.as_str()).await, None);
    drop((open, copied));
    world.close().await;
    place.expect_no_traces().await;
    assert_eq!(place.entries().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_grows_and_never_shrinks() {
    let Some(place) = Place::new() else { return };
    let world = place.open().await;
    let data = world.create("data", 16).await;
    let open = world.volumes.open(&data.id).await.unwrap();
    fs::write(open.dir.join("kept"), "x").unwrap();
    // As far as the host allows; else it says what to do, and all is as before.
    match world.volumes.grow(&data.id, 32).await {
        Ok(grown) => assert_eq!(grown.size_mib, 32),
        Err(StoreError::InUse { what, .. }) => assert!(what.contains("data"), "{what}"),
        Err(error) => panic!("{error}"),
    }
    fs::write(open.dir.join("more"), "y").unwrap();
    drop(open);
    assert_eq!(world.volumes.grow(&data.id, 64).await.unwrap().size_mib, 64);
    let open = world.volumes.open(&data.id).await.unwrap();
    assert_eq!(fs::read_to_string(open.dir.join("kept")).unwrap(), "x");
    fs::write(open.dir.join("large"), vec![1; 40 << 20]).unwrap();
    drop(open);
    let smaller = world.volumes.grow(&data.id, 32).await;
    assert!(matches!(smaller, Err(StoreError::Invalid(_))), "{smaller:?}");
    assert_eq!(world.find("data").await.unwrap().size_mib, 64);
    world.close().await;
    place.expect_no_traces().await;
}

/// What df says of a mounted volume.
fn room_mib(dir: &Path) -> u64 {
    let fs = rustix::fs::statvfs(dir).unwrap();
    (fs.f_blocks * fs.f_frsize) >> 20
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_grows_to_what_is_asked_also_after_a_growth_that_was_given_up() {
    let Some(place) = Place::new() else { return };
    let world = place.open().await;
    let data = world.create("data", 16).await;
    // So far it comes before the kernel says no, or the daemon dies.
    let image = place.path().join("data/volumes").join(data.id.as_str()).join("image.ext4");
    fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(512 << 20).unwrap();
    assert_eq!(world.volumes.grow(&data.id, 64).await.unwrap().size_mib, 64);
    let open = world.volumes.open(&data.id).await.unwrap();
    let room = room_mib(&open.dir);
    assert!((32..=64).contains(&room), "{room}");
    drop(open);
    world.close().await;
    place.expect_no_traces().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_growth_that_was_not_recorded_is_found_and_never_undone() {
    let Some(place) = Place::new() else { return };
    let world = place.open().await;
    let data = world.create("data", 16).await;
    world.volumes.grow(&data.id, 64).await.unwrap();
    let lost = UpdateVolume { size_mib: Some(16), ..UpdateVolume::default() };
    world.ledger.update_volume(&data.id, &lost).await.unwrap();
    assert_eq!(world.volumes.grow(&data.id, 32).await.unwrap().size_mib, 64);
    assert_eq!(world.find("data").await.unwrap().size_mib, 64);
    let open = world.volumes.open(&data.id).await.unwrap();
    fs::write(open.dir.join("large"), vec![1; 40 << 20]).unwrap();
    drop(open);
    world.close().await;
    place.expect_no_traces().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn growing_leaves_labels_that_were_changed_meanwhile() {
    let Some(place) = Place::new() else { return };
    let world = place.open().await;
    let data = world.create("data", 16).await;
    let labels = Some([("team".to_owned(), "a".to_owned())].into());
    let changes = UpdateVolume { labels: labels.clone(), ..UpdateVolume::default() };
    let (grown, labelled) = tokio::join!(
        world.volumes.grow(&data.id, 32),
        world.ledger.update_volume(&data.id, &changes)
    );
    grown.unwrap();
    labelled.unwrap();
    let now = world.find("data").await.unwrap();
    assert_eq!((now.size_mib, Some(now.labels)), (32, labels));
    world.close().await;
    place.expect_no_traces().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_files_that_nobody_has_open_any_more_take_no_room() {
    let Some(place) = Place::new() else { return };
    let world = place.open().await;
    let data = world.create("data", 32).await;
    let open = world.volumes.open(&data.id).await.unwrap();
    // As a microVM leaves it that died with an open file which it had removed.
    let hidden = open.dir.join(".torpor-removed");
    fs::create_dir(&hidden).unwrap();
    fs::write(hidden.join("left"), vec![1; 20 << 20]).unwrap();
    let again = world.volumes.open(&data.id).await.unwrap();
    assert!(hidden.join("left").exists(), "somebody has it");
    drop((open, again));
    world.close().await;
    place.expect_no_traces().await;
    let world = place.open().await;
    let open = world.volumes.open(&data.id).await.unwrap();
    fs::write(open.dir.join("new"), vec![1; 20 << 20]).unwrap();
    drop(open);
    world.close().await;
    place.expect_no_traces().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_in_the_way_of_an_open_file_is_named_and_left() {
    let Some(place) = Place::new() else { return };
    let world = place.open().await;
    let data = world.create("data", 32).await;
    let open = world.volumes.open(&data.id).await.unwrap();
    let back = async |path: &str, directory| {
        let held = vec![HeldPath { slot: 0, path: path.to_owned(), directory }];
        world.volumes.put_back(&open, &GuestPath::root(), held).await
    };
    assert_eq!(back("/a/b/file", false).await.unwrap(), ["a/b/file"]);
    assert_eq!(back("/a/b", true).await.unwrap(), [""; 0], "it is there");
    std::os::unix::fs::symlink("/etc", open.dir.join("link")).unwrap();
    for (path, directory) in [
        ("/a/b/file", true),
        ("/a/b", false),
        ("/a/b/file/below", false),
        ("/link/passwd", false),
        ("/link", false),
    ] {
        let error = back(path, directory).await.unwrap_err();
        assert!(
            matches!(&error, StoreError::Invalid(why) if why.contains(path)),
            "{path}: {error:?}"
        );
    }
    drop(open);
    world.close().await;
    place.expect_no_traces().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_in_the_path_of_the_mounts_is_followed() {
    let Some(place) = Place::new() else { return };
    fs::create_dir(place.path().join("really")).unwrap();
    std::os::unix::fs::symlink("really", place.path().join("run")).unwrap();
    let world = place.open().await;
    let data = world.create("data", 16).await;
    let held = [world.volumes.open(&data.id).await, world.volumes.open(&data.id).await];
    let held = held.map(|open| open.unwrap());
    assert_eq!(place.traces().len(), 2, "one mount, one device: {:?}", place.traces());
    drop(held);
    world.close().await;
    place.expect_no_traces().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_for_a_sandbox_of_another_node_is_that_node_s() {
    let Some(place) = Place::new() else { return };
    let world = place.open().await;
    let data = world.create("data", 16).await;
    let copy = world.volumes.copy_for(&data.id, &SandboxId::random()).await.unwrap();
    world.close().await;
    fs::write(place.path().join("data/node"), format!("{}\n", NodeId::random())).unwrap();
    let world = place.open().await;
    assert!(world.find(copy.name.as_str()).await.is_some(), "its sandbox is not known here");
    world.close().await;
    assert_eq!(place.entries().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_t_be_is_refused_and_leaves_nothing() {
    let Some(place) = Place::new() else { return };
    let world = place.open().await;
    for size_mib in [0, 15, u64::MAX] {
        let refused = world.volumes.create(&record("data", size_mib)).await;
        assert!(matches!(refused, Err(StoreError::Invalid(_))), "{refused:?}");
    }
    let refused = world.volumes.create(&record("data", torpor_volumes::VOLUME_MAX_MIB)).await;
    assert!(matches!(refused, Err(StoreError::DiskFull(_))), "{refused:?}");
    let nobody = VolumeId::random();
    for refused in [
        world.volumes.open(&nobody).await.map(drop),
        world.volumes.copy(&nobody, &record("copy", 16)).await,
        world.volumes.remove(&nobody).await,
        world.volumes.grow(&nobody, 64).await.map(drop),
    ] {
        assert!(matches!(refused, Err(StoreError::NoSuchVolume(_))), "{refused:?}");
    }
    let data = world.create("data", 32).await;
    let smaller = world.volumes.copy(&data.id, &record("copy", 16)).await;
    assert!(matches!(smaller, Err(StoreError::Invalid(_))), "{smaller:?}");
    world.close().await;
    assert_eq!(place.entries(), [data.id.as_str()]);
    place.expect_no_traces().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_files_of_a_volume_are_used_on_its_own_node_only() {
    let Some(place) = Place::new() else { return };
    let world = place.open().await;
    let data = world.create("data", 32).await;
    world.close().await;
    fs::write(place.path().join("data/node"), format!("{}\n", NodeId::random())).unwrap();
    let world = place.open().await;
    for refused in [
        world.volumes.open(&data.id).await.map(drop),
        world.volumes.copy(&data.id, &record("copy", 32)).await,
        world.volumes.grow(&data.id, 64).await.map(drop),
        world.volumes.remove(&data.id).await,
    ] {
        assert!(matches!(refused, Err(StoreError::VolumeElsewhere { .. })), "{refused:?}");
    }
    assert!(world.find("data").await.is_some());
    world.close().await;
    place.expect_no_traces().await;
}

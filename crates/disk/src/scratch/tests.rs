//! Disks on the real kernel. They need root and loop devices and say so when they are skipped.

use std::io::Write;

use super::*;

/// A directory whose disks go away when the test ends, however it ends.
struct World {
    directory: tempfile::TempDir,
}

impl World {
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
            torpor_testkit::missing("disks need root and loop devices");
            return None;
        }
        Some(Self { directory: tempfile::tempdir().expect("a directory") })
    }

    fn disk(&self, name: &str, size_mib: u64) -> io::Result<ScratchDisk> {
        let image = self.directory.path().join(format!("{name}.ext4"));
        ScratchDisk::create(&image, &self.directory.path().join(name), size_mib)
    }

    /// Devices, mounts and files that belong to this world.
    fn traces(&self) -> Vec<String> {
        let files = fs::read_dir(self.directory.path()).expect("the directory").flatten();
        let mut traces: Vec<String> = files.map(|file| format!("{:?}", file.path())).collect();
        let mounts = mountinfo::read().expect("mountinfo").into_iter();
        let here = mounts.filter(|mount| mount.point.starts_with(self.directory.path()));
        traces.extend(here.map(|mount| format!("{mount:?}")));
        for device in fs::read_dir("/sys/block").expect("block devices").flatten() {
            let device = Path::new("/dev").join(device.file_name());
            let file = loop_device::backing_file(&device);
            traces.extend(
                file.filter(|file| file.starts_with(self.directory.path()))
                    .map(|file| format!("{device:?} {file:?}")),
            );
        }
        traces
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = sweep(self.directory.path(), |_| false);
    }
}

#[test]
fn a_full_disk_says_so_and_frees_what_is_deleted() {
    let Some(world) = World::new() else { return };
    let disk = world.disk("one", 32).expect("a disk");
    assert!(disk.used_bytes().expect("readable") < 1 << 20);
    let file = disk.path().join("big");
    let mut open = File::create(&file).expect("a file");
    let block = vec![1; 1 << 20];
    let error = (0..40).find_map(|_| open.write_all(&block).err()).expect("it gets full");
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    assert!(disk.used_bytes().expect("readable") > 28 << 20, "most of it is usable");
    drop(open);
    fs::remove_file(&file).expect("deleted");
    assert!(disk.used_bytes().expect("readable") < 1 << 20);
    disk.remove().expect("removed");
    disk.remove().expect("a second time changes nothing");
    assert_eq!(world.traces(), Vec::<String>::new());
}

#[test]
fn space_freed_inside_goes_back_to_the_host() {
    use std::os::unix::fs::MetadataExt;
    let Some(world) = World::new() else { return };
    let disk = world.disk("one", 64).expect("a disk");
    let blocks = || fs::metadata(&disk.image).expect("the image").blocks();
    let file = disk.path().join("big");
    fs::write(&file, vec![1; 20 << 20]).expect("written");
    let inside = File::open(disk.path()).expect("open");
    rustix::fs::syncfs(&inside).expect("synced");
    assert!(blocks() > (20 << 20) / 512);
    fs::remove_file(&file).expect("deleted");
    rustix::fs::syncfs(&inside).expect("synced");
    let deadline = Instant::now() + Duration::from_secs(10);
    while blocks() > (5 << 20) / 512 {
        assert!(Instant::now() < deadline, "the host does not get the blocks back");
        std::thread::sleep(PAUSE);
    }
}

#[test]
fn many_at_once_get_a_device_each() {
    let Some(world) = World::new() else { return };
    std::thread::scope(|scope| {
        for n in 0..20 {
            let world = &world;
            scope.spawn(move || {
                let disk = world.disk(&n.to_string(), 16).expect("a disk");
                fs::write(disk.path().join("who"), n.to_string()).expect("written");
            });
        }
    });
    for n in 0..20 {
        let who = fs::read_to_string(world.directory.path().join(n.to_string()).join("who"));
        assert_eq!(who.expect("readable"), n.to_string());
    }
    let keep = world.directory.path().join("7");
    assert_eq!(sweep(world.directory.path(), |point| point == keep).expect("swept"), 19);
    assert!(ScratchDisk::open(Path::new("/none"), &keep).mounted().expect("known"));
    assert_eq!(sweep(world.directory.path(), |_| false).expect("swept"), 1);
    assert_eq!(world.traces(), Vec::<String>::new());
}

#[test]
fn a_disk_of_a_dead_daemon_is_adopted_or_swept_by_its_names() {
    let Some(world) = World::new() else { return };
    let disk = world.disk("one", 16).expect("a disk");
    let (image, mountpoint) = (disk.image.clone(), disk.mountpoint.clone());
    fs::write(mountpoint.join("kept"), "x").expect("written");
    drop(disk);
    let adopted = ScratchDisk::open(&image, &mountpoint);
    assert!(adopted.mounted().expect("known"));
    assert!(adopted.used_bytes().expect("readable") > 0);
    assert_eq!(fs::read_to_string(mountpoint.join("kept")).expect("readable"), "x");
    adopted.remove().expect("removed");
    assert!(!adopted.mounted().expect("known"));
    assert_eq!(world.traces(), Vec::<String>::new());
}

#[test]
fn a_disk_in_use_goes_out_of_sight_and_then_for_good() {
    let Some(world) = World::new() else { return };
    let disk = world.disk("one", 16).expect("a disk");
    let held = File::create(disk.path().join("held")).expect("a file");
    disk.remove().expect("removed in spite of its user");
    assert!(!disk.path().exists());
    drop(held);
    let deadline = Instant::now() + Duration::from_secs(10);
    while !world.traces().is_empty() {
        assert!(Instant::now() < deadline, "left: {:?}", world.traces());
        std::thread::sleep(PAUSE);
    }
}

#[test]
fn a_refused_disk_leaves_nothing_and_takes_nothing_away() {
    let Some(world) = World::new() else { return };
    assert!(world.disk("none", 0).is_err());
    assert_eq!(world.traces(), Vec::<String>::new());
    let disk = world.disk("one", 16).expect("a disk");
    let again = world.disk("one", 16).expect_err("the name is taken");
    assert_eq!(again.kind(), ErrorKind::AlreadyExists);
    assert!(disk.mounted().expect("known"), "the first one stays");
}

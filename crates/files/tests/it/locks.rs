//! Locks that are refused, given back in pieces, or lost.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use torpor_protocol::guest::files::{Call, Handle, Lock, Locking};

use crate::machine::{Machine, Server, World, eventually, files};
use crate::world::{Disk, Guest, access};

const EAGAIN: u32 = 11;
const ENOLCK: u32 = 37;
/// More than an attachment may have files open for locks.
const MANY: usize = 2000;

fn set(guest: &Guest, file: Handle, flock: bool, kind: Locking, range: (u64, u64)) -> Option<u32> {
    let lock = Lock { owner: 1, flock, kind, start: range.0, end: range.1 };
    guest.done(&Call::Setlk { file, lock }).err()
}

fn two(disk: &Disk) -> [Guest; 2] {
    let volume = disk.volume();
    [(); 2].map(|()| Guest::new(volume.attach(Path::new(""), access(false)).unwrap()))
}

#[test]
fn locks_that_were_refused_leave_nothing() {
    let Some(disk) = Disk::new(16) else { return };
    let [one, two] = two(&disk);
    let all = (0, i64::MAX.cast_unsigned());
    for number in 0..MANY {
        let file = one.create(one.root, &format!("{number}")).unwrap();
        let flock = number % 2 == 0;
        assert_eq!(set(&one, file, flock, Locking::Exclusive, all), None, "{number}");
        assert_eq!(set(&two, file, flock, Locking::Exclusive, all), Some(EAGAIN), "{number}");
        assert_eq!(set(&one, file, flock, Locking::Unlocked, all), None);
        one.done(&Call::Unlink {
            dir: one.root,
            name: crate::world::name(&format!("{number}")),
            keep: false,
        })
        .unwrap();
    }
    assert!(descriptors() < MANY / 2);
}

#[test]
fn locks_that_are_given_back_in_pieces_leave_nothing() {
    let Some(disk) = Disk::new(16) else { return };
    let [one, two] = two(&disk);
    for number in 0..MANY {
        let file = one.create(one.root, &format!("{number}")).unwrap();
        // As a database does with its shared memory: never the whole file.
        for (kind, range) in [
            (Locking::Shared, (128, 128)),
            (Locking::Exclusive, (120, 127)),
            (Locking::Unlocked, (120, 123)),
            (Locking::Unlocked, (124, 127)),
        ] {
            assert_eq!(set(&one, file, false, kind, range), None, "{number}");
        }
        assert_eq!(set(&two, file, false, Locking::Exclusive, (128, 128)), Some(EAGAIN));
        assert_eq!(set(&one, file, false, Locking::Unlocked, (128, 128)), None);
        assert_eq!(set(&two, file, false, Locking::Exclusive, (128, 128)), None, "{number}");
        assert_eq!(set(&two, file, false, Locking::Unlocked, (128, 128)), None);
    }
    assert!(descriptors() < MANY / 2);
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn pieces_of_a_file_that_one_owner_locks_are_limited() {
    let Some(disk) = Disk::new(16) else { return };
    let [one, two] = two(&disk);
    let file = one.create(one.root, "file").unwrap();
    let refused = (0..10_000)
        .find_map(|number| set(&one, file, false, Locking::Exclusive, (2 * number, 2 * number)));
    assert_eq!(refused, Some(ENOLCK));
    assert_eq!(set(&one, file, false, Locking::Unlocked, (0, i64::MAX.cast_unsigned())), None);
    // Side by side they are one.
    for number in 0..10_000 {
        assert_eq!(set(&one, file, false, Locking::Exclusive, (number, number)), None);
    }
    assert_eq!(set(&two, file, false, Locking::Shared, (5000, 5000)), Some(EAGAIN));
}

#[test]
fn programs_are_refused_locks_as_often_as_they_like() {
    let Some(disk) = Disk::new(32) else { return };
    let volume = disk.volume();
    let (mut one, mut two) = (Machine::new(), Machine::new());
    let _one = one.mount(files(&disk, 1, "one"), &Server::new(&volume, false));
    let _two = two.mount(files(&disk, 1, "two"), &Server::new(&volume, false));
    for number in 0..MANY {
        let held = File::create(disk.beside("one").join(format!("{number}"))).unwrap();
        rustix::fs::flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
        let other = File::open(disk.beside("two").join(format!("{number}"))).unwrap();
        let refused = rustix::fs::flock(&other, FlockOperation::NonBlockingLockExclusive);
        assert_eq!(refused, Err(Errno::AGAIN), "{number}");
    }
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

#[test]
fn what_is_done_under_a_lost_lock_fails() {
    let Some(mut world) = World::new(32) else { return };
    fs::write(world.host("file"), "content").unwrap();
    let mut file = open(&world.path("file"));
    rustix::fs::flock(&file, FlockOperation::LockExclusive).unwrap();
    world.machine.kill_daemon();
    // Whoever serves it is gone, and the lock with it.
    world.server = Server::new(&world.disk.volume(), false);
    let host = File::open(world.host("file")).unwrap();
    eventually("it is free", || {
        rustix::fs::flock(&host, FlockOperation::NonBlockingLockExclusive).ok()
    });
    let waiting = {
        let mut file = file.try_clone().unwrap();
        std::thread::spawn(move || file.write_all(b"CONTENT"))
    };
    world.restart_daemon();
    let lost = |error: std::io::Error| Errno::from_io_error(&error) == Some(Errno::IO);
    assert!(waiting.join().unwrap().is_err_and(lost), "it was asked for meanwhile");
    assert!(file.write_all(b"CONTENT").is_err_and(lost));
    assert_eq!(fs::read(world.host("file")).unwrap(), b"content");
    // Who gives it back, or closes the file, begins anew.
    rustix::fs::flock(&file, FlockOperation::Unlock).unwrap();
    rustix::fs::flock(&host, FlockOperation::Unlock).unwrap();
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
    file.write_all(b"CONTENT").unwrap();
    assert_eq!(fs::read(world.host("file")).unwrap(), b"CONTENT");
}

#[test]
fn a_mount_that_was_alone_sees_others_when_it_is_shared() {
    let Some(mut world) = World::new(32) else { return };
    fs::write(world.host("file"), "old").unwrap();
    let read = |world: &World| {
        let mut content = String::new();
        File::open(world.path("file")).unwrap().read_to_string(&mut content).unwrap();
        content
    };
    assert_eq!(read(&world), "old");
    // As a fork that reads what its origin writes has it.
    let mount =
        torpor_lifecycle::guest::FilesMount { shared: true, ..files(&world.disk, 1, "guest") };
    world.served = Some(world.machine.mount(mount, &world.server));
    fs::write(world.host("file"), "newer").unwrap();
    eventually("what was believed is forgotten", || (read(&world) == "newer").then_some(()));
    for number in 0..50 {
        let content = format!("{number}, {}", "x".repeat(number));
        fs::write(world.host("file"), &content).unwrap();
        assert_eq!(read(&world), content);
    }
}

//! Calls of an honest guest.

use std::borrow::Cow;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use torpor_protocol::guest::files::{Answer, Call, Change, Lock, Locking, Owner, Renaming};

use crate::world::{Disk, Guest, ROOT, access, free, name};

const ENOENT: u32 = 2;
const EAGAIN: u32 = 11;
const EEXIST: u32 = 17;
const ENOSPC: u32 = 28;
const EROFS: u32 = 30;
const ESTALE: u32 = 116;

#[test]
fn a_file_is_made_written_read_and_removed() {
    let Some(disk) = Disk::new(16) else { return };
    let guest = Guest::attached(&disk);
    let owner = Owner { user: 1000, group: 1001 };
    let (exclusive, truncate) = (true, false);
    let create =
        |mode| Call::Create { dir: guest.root, name: name("a"), owner, mode, exclusive, truncate };
    let (file, attributes) = guest.entry(&create(0o4666)).unwrap();
    assert_eq!((attributes.mode, attributes.owner), (0o104_666, owner));
    guest.write(file, b"hello").unwrap();
    assert_eq!(guest.read(file).unwrap(), b"hello");
    assert_eq!(fs::read(disk.path().join("a")).unwrap(), b"hello");
    assert_eq!(guest.done(&create(0o600)), Err(EEXIST));
    // Somebody else's change is seen at once.
    fs::write(disk.path().join("a"), "HELLO, all").unwrap();
    assert_eq!(guest.read(file).unwrap(), b"HELLO, all");
    let change = Change { size: Some(2), user: Some(5), ..Change::default() };
    guest.done(&Call::Setattr { file, change }).unwrap();
    let stat = fs::metadata(disk.path().join("a")).unwrap();
    assert_eq!((stat.len(), stat.uid(), stat.gid()), (2, 5, 1001));
    guest.done(&Call::Unlink { dir: guest.root, name: name("a"), keep: false }).unwrap();
    assert_eq!(guest.read(file), Err(ESTALE));
    assert!(!disk.path().join("a").exists());
    drop(guest);
    assert!(free(&disk), "nothing is held");
}

#[test]
fn a_handle_stays_with_its_file_and_with_no_other() {
    let Some(disk) = Disk::new(16) else { return };
    let guest = Guest::attached(&disk);
    let directory = guest.mkdir(guest.root, "d").unwrap();
    let file = guest.create(directory, "a").unwrap();
    guest.write(file, b"a").unwrap();
    fs::rename(disk.path().join("d"), disk.path().join("e")).unwrap();
    fs::rename(disk.path().join("e/a"), disk.path().join("b")).unwrap();
    assert_eq!(guest.read(file).unwrap(), b"a");
    // A restart.
    let again = Guest::attached(&disk);
    assert_eq!(again.read(file).unwrap(), b"a");
    // Replaced by another file, of the same inode perhaps.
    fs::remove_file(disk.path().join("b")).unwrap();
    fs::write(disk.path().join("b"), "other").unwrap();
    assert_eq!((guest.read(file), again.read(file)), (Err(ESTALE), Err(ESTALE)));
    assert_ne!(again.lookup(again.root, "b").unwrap(), file);
}

#[test]
fn new_files_in_a_directory_of_a_group_belong_to_it() {
    let Some(disk) = Disk::new(16) else { return };
    let guest = Guest::attached(&disk);
    let team = guest.mkdir(guest.root, "team").unwrap();
    std::os::unix::fs::chown(disk.path().join("team"), None, Some(77)).unwrap();
    fs::set_permissions(disk.path().join("team"), fs::Permissions::from_mode(0o2775)).unwrap();
    let owner = Owner { user: 1000, group: 1000 };
    let call = Call::Mkdir { dir: team, name: name("sub"), owner, mode: 0o755 };
    let (_, attributes) = guest.entry(&call).unwrap();
    assert_eq!(attributes.owner, Owner { user: 1000, group: 77 });
    assert_eq!(attributes.mode, 0o042_755);
}

#[test]
fn a_file_that_is_removed_while_open_stays_until_it_is_released() {
    let Some(disk) = Disk::new(16) else { return };
    let guest = Guest::attached(&disk);
    let root = guest.root;
    for over in [false, true] {
        let file = guest.create(root, "open").unwrap();
        guest.write(file, b"still here").unwrap();
        let answer = if over {
            guest.create(root, "new").unwrap();
            let (from, to_name, how) = (name("new"), name("open"), Renaming::Replace);
            guest.call(&Call::Rename { dir: root, name: from, to: root, to_name, how, keep: true })
        } else {
            guest.call(&Call::Unlink { dir: root, name: name("open"), keep: true })
        };
        assert_eq!(answer, Answer::Removed { kept: Some(file) });
        assert_eq!(guest.lookup(root, "open").is_ok(), over);
        assert_eq!(guest.read(file).unwrap(), b"still here");
        guest.done(&Call::Release { file }).unwrap();
        assert_eq!(guest.read(file), Err(ESTALE));
        guest.done(&Call::Release { file }).unwrap();
        let _ = fs::remove_file(disk.path().join("open"));
    }
    // Whoever never released it.
    let file = guest.create(root, "open").unwrap();
    guest.done(&Call::Unlink { dir: root, name: name("open"), keep: true }).unwrap();
    assert_eq!(guest.names(root), ["lost+found"]);
    guest.service.volume().empty_removed().unwrap();
    assert_eq!(guest.read(file), Err(ESTALE));
}

#[test]
fn a_call_that_is_sent_again_is_done_once() {
    let Some(disk) = Disk::new(16) else { return };
    let guest = Guest::attached(&disk);
    let dir = guest.root;
    let file = guest.create(dir, "log").unwrap();
    let data = Cow::Borrowed(&b"line\n"[..]);
    let append = Call::Write { file, offset: 0, append: true, strip: false, data };
    let calls = [
        Call::Mkdir { dir, name: name("d"), owner: ROOT, mode: 0o755 },
        append.clone(),
        Call::Rename {
            dir,
            name: name("d"),
            to: dir,
            to_name: name("e"),
            how: Renaming::NoReplace,
            keep: false,
        },
        Call::Rmdir { dir, name: name("e") },
        Call::Link { file, dir, name: name("log2") },
        Call::Unlink { dir, name: name("log"), keep: false },
    ];
    // By the same service, and by one that remembers nothing.
    for restarted in [false, true] {
        for call in &calls {
            let sequence = guest.sequence();
            let first = guest.send(sequence, false, call);
            assert!(!matches!(first, Answer::Failed { .. }), "{call:?}: {first:?}");
            let after = Guest::attached(&disk);
            let service = if restarted { &after } else { &guest };
            let second = service.send(sequence, true, call);
            assert!(!matches!(second, Answer::Failed { .. }), "{call:?}: {second:?}");
        }
        assert_eq!(fs::read(disk.path().join("log2")).unwrap(), b"line\n");
        fs::rename(disk.path().join("log2"), disk.path().join("log")).unwrap();
        let change = Change { size: Some(0), ..Change::default() };
        guest.done(&Call::Setattr { file, change }).unwrap();
    }
    // A guest that counts anew is not taken for the one before.
    let sequence = guest.sequence();
    guest.send(sequence, false, &append);
    let other = Call::Mkdir { dir, name: name("other"), owner: ROOT, mode: 0o755 };
    assert!(matches!(guest.send(sequence, true, &other), Answer::Entry { .. }));
    // Nothing that was not done is taken for done.
    let sequence = guest.sequence();
    guest.send(sequence, true, &append);
    assert_eq!(fs::read(disk.path().join("log")).unwrap(), b"line\n");
    let data = Cow::Borrowed(&b"line\n"[..]);
    let later = Call::Write { file, offset: 5, append: true, strip: false, data };
    guest.send(guest.sequence(), true, &later);
    assert_eq!(fs::read(disk.path().join("log")).unwrap(), b"line\nline\n");
}

#[test]
fn lines_that_ten_append_at_once_are_whole() {
    let Some(disk) = Disk::new(16) else { return };
    let volume = disk.volume();
    let guest = Guest::new(volume.attach(Path::new(""), access(false)).unwrap());
    let file = guest.create(guest.root, "log").unwrap();
    std::thread::scope(|scope| {
        for writer in 0..10_u8 {
            let guest = Guest::new(volume.attach(Path::new(""), access(false)).unwrap());
            scope.spawn(move || {
                for number in 0..100 {
                    let line = format!("{writer} {number} {}\n", "x".repeat(number));
                    let data = Cow::Borrowed(line.as_bytes());
                    let (append, strip) = (true, false);
                    guest.done(&Call::Write { file, offset: 0, append, strip, data }).unwrap();
                }
            });
        }
    });
    let log = fs::read_to_string(disk.path().join("log")).unwrap();
    assert_eq!(log.lines().count(), 1000);
    for line in log.lines() {
        let words: Vec<_> = line.split(' ').collect();
        let number: usize = words[1].parse().unwrap();
        assert_eq!(words[2].len(), number, "{line}");
    }
}

#[test]
fn a_full_disk_says_so_and_goes_on_when_there_is_room() {
    let Some(disk) = Disk::new(8) else { return };
    let guest = Guest::attached(&disk);
    let file = guest.create(guest.root, "big").unwrap();
    let data = vec![1; 100_000];
    let full = (0..200).find_map(|number| {
        let data = Cow::Borrowed(&data[..]);
        let offset = number * 100_000;
        guest.done(&Call::Write { file, offset, append: false, strip: false, data }).err()
    });
    assert_eq!(full, Some(ENOSPC));
    guest.done(&Call::Unlink { dir: guest.root, name: name("big"), keep: false }).unwrap();
    let file = guest.create(guest.root, "small").unwrap();
    guest.write(file, b"room").unwrap();
}

#[test]
fn locks_exclude_other_owners_and_other_attachments() {
    let Some(disk) = Disk::new(16) else { return };
    let volume = disk.volume();
    let [one, two] =
        [(); 2].map(|()| Guest::new(volume.attach(Path::new(""), access(false)).unwrap()));
    let file = one.create(one.root, "db").unwrap();
    for flock in [false, true] {
        let lock = |owner, kind, start, end| Call::Setlk {
            file,
            lock: Lock { owner, flock, kind, start, end },
        };
        let all = i64::MAX.cast_unsigned();
        one.done(&lock(1, Locking::Exclusive, 0, all)).unwrap();
        one.done(&lock(1, Locking::Exclusive, 0, all)).unwrap();
        for guest in [&one, &two] {
            assert_eq!(guest.done(&lock(2, Locking::Shared, 0, all)), Err(EAGAIN));
        }
        if !flock {
            let asked = Lock { owner: 2, flock, kind: Locking::Shared, start: 5, end: 9 };
            let Answer::Lock { lock: Some(held) } = two.call(&Call::Getlk { file, lock: asked })
            else {
                panic!("nobody holds it")
            };
            assert_eq!((held.kind, held.start, held.end), (Locking::Exclusive, 0, all));
            one.done(&lock(1, Locking::Unlocked, 0, 9)).unwrap();
            two.done(&lock(2, Locking::Exclusive, 5, 9)).unwrap();
            assert_eq!(two.done(&lock(2, Locking::Exclusive, 5, 10)), Err(EAGAIN));
            two.done(&lock(2, Locking::Unlocked, 0, all)).unwrap();
        }
        one.done(&lock(1, Locking::Unlocked, 0, all)).unwrap();
        two.done(&lock(2, Locking::Exclusive, 0, all)).unwrap();
        two.done(&lock(2, Locking::Unlocked, 0, all)).unwrap();
    }
    // Locks go with the attachment.
    let lock = Lock { owner: 1, flock: true, kind: Locking::Exclusive, start: 0, end: 0 };
    one.done(&Call::Setlk { file, lock }).unwrap();
    drop(one);
    two.done(&Call::Setlk { file, lock }).unwrap();
}

#[test]
fn a_read_only_attachment_changes_nothing() {
    let Some(disk) = Disk::new(16) else { return };
    fs::write(disk.path().join("a"), "a").unwrap();
    let guest = Guest::new(disk.volume().attach(Path::new(""), access(true)).unwrap());
    let file = guest.lookup(guest.root, "a").unwrap();
    assert_eq!(guest.read(file).unwrap(), b"a");
    assert_eq!(guest.write(file, b"b"), Err(EROFS));
    assert_eq!(guest.create(guest.root, "b"), Err(EROFS));
    assert_eq!(guest.mkdir(guest.root, "b"), Err(EROFS));
    let unlink = Call::Unlink { dir: guest.root, name: name("a"), keep: true };
    assert_eq!(guest.done(&unlink), Err(EROFS));
    let change = Change { mode: Some(0), ..Change::default() };
    assert_eq!(guest.done(&Call::Setattr { file, change }), Err(EROFS));
    assert_eq!(guest.names(guest.root), ["a", "lost+found"]);
}

#[test]
fn a_large_directory_is_listed_whole_in_pieces() {
    let Some(disk) = Disk::new(64) else { return };
    let guest = Guest::attached(&disk);
    let many = guest.mkdir(guest.root, "many").unwrap();
    for number in 0..5000 {
        fs::write(disk.path().join(format!("many/{number:04}")), "").unwrap();
    }
    let names = guest.names(many);
    assert_eq!(names.len(), 5000);
    assert!(names.iter().enumerate().all(|(number, name)| *name == format!("{number:04}")));
    assert_eq!(guest.lookup(many, "5000"), Err(ENOENT));
}

#[test]
fn attributes_of_users_are_kept_and_others_refused() {
    const EOPNOTSUPP: u32 = 95;
    let Some(disk) = Disk::new(16) else { return };
    let guest = Guest::attached(&disk);
    let file = guest.create(guest.root, "a").unwrap();
    let set = |attribute: &'static str| Call::Setxattr {
        file,
        name: name(attribute),
        how: torpor_protocol::guest::files::Replacing::Either,
        value: Cow::Borrowed(b"value"),
    };
    guest.done(&set("user.one")).unwrap();
    for attribute in ["security.capability", "trusted.x", "system.posix_acl_access"] {
        assert_eq!(guest.done(&set(attribute)), Err(EOPNOTSUPP), "{attribute}");
    }
    let listed = guest.call(&Call::Listxattr { file });
    assert_eq!(listed, Answer::Data { data: Cow::Borrowed(b"user.one\0") });
    let got = guest.call(&Call::Getxattr { file, name: name("user.one") });
    assert_eq!(got, Answer::Data { data: Cow::Borrowed(b"value") });
    guest.done(&Call::Removexattr { file, name: name("user.one") }).unwrap();
}

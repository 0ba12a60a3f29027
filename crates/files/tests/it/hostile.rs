//! A guest that wants what is not its own.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use torpor_protocol::guest::files::{Answer, Call, Handle, PREFIX, Renaming, decode_answer};

use crate::world::{Disk, Guest, ROOT, access, name};

const EPERM: u32 = 1;
const ENOENT: u32 = 2;
const EACCES: u32 = 13;
const ENOTDIR: u32 = 20;
const EINVAL: u32 = 22;
const EBADMSG: u32 = 74;
const ESTALE: u32 = 116;

#[test]
fn no_handle_can_be_made_up_or_taken_from_another_attachment() {
    let Some(disk) = Disk::new(16) else { return };
    let volume = disk.volume();
    fs::create_dir(disk.path().join("team")).unwrap();
    fs::write(disk.path().join("secret"), "secret").unwrap();
    let all = Guest::new(volume.attach(Path::new(""), access(false)).unwrap());
    let attach = |path: &str| Guest::new(volume.attach(Path::new(path), access(false)).unwrap());
    let team = attach("/team");
    let secret = all.lookup(all.root, "secret").unwrap();
    let shared = all.lookup(all.root, "team").unwrap();
    assert_eq!(team.read(secret), Err(ESTALE));
    assert_eq!(team.lookup(all.root, "secret"), Err(ESTALE));
    assert_eq!(team.done(&Call::Getattr { file: shared }), Err(ESTALE));
    // The same folder, later or by another spelling, is the same.
    for same in ["/team", "team", "./team/"] {
        assert_eq!(attach(same).root, team.root, "{same}");
    }
    // The handle of its own directory, with the inode of another.
    let own = team.root.as_bytes();
    for bit in 0..own.len() * 8 {
        let mut forged = own.to_vec();
        forged[bit / 8] ^= 1 << (bit % 8);
        let file = Handle::new(&forged).unwrap();
        assert_eq!(team.done(&Call::Getattr { file }), Err(ESTALE), "bit {bit}");
    }
    for length in [0, 1, 15, 16, 17] {
        let file = Handle::new(&own[..length.min(own.len())]).unwrap();
        assert_eq!(team.done(&Call::Getattr { file }), Err(ESTALE), "{length} bytes");
    }
}

#[test]
fn links_are_shown_and_never_followed() {
    let Some(disk) = Disk::new(16) else { return };
    symlink("/", disk.path().join("up")).unwrap();
    symlink("/etc/passwd", disk.path().join("file")).unwrap();
    let guest = Guest::attached(&disk);
    let up = guest.lookup(guest.root, "up").unwrap();
    assert_eq!(guest.lookup(up, "etc"), Err(ENOTDIR));
    assert_eq!(guest.mkdir(up, "x"), Err(ENOTDIR));
    let file = guest.lookup(guest.root, "file").unwrap();
    assert_eq!(guest.read(file), Err(EINVAL));
    assert_eq!(guest.write(file, b"x"), Err(EINVAL));
    let change = torpor_protocol::guest::files::Change { mode: Some(0o777), ..Default::default() };
    assert!(guest.done(&Call::Setattr { file, change }).is_err());
    let (exclusive, truncate) = (false, true);
    let create = Call::Create {
        dir: guest.root,
        name: name("file"),
        owner: ROOT,
        mode: 0o644,
        exclusive,
        truncate,
    };
    assert!(guest.done(&create).is_err());
}

#[test]
fn no_part_of_a_volume_leads_out_of_it() {
    let Some(disk) = Disk::new(16) else { return };
    fs::create_dir_all(disk.path().join("a/b")).unwrap();
    symlink("b", disk.path().join("a/link")).unwrap();
    symlink("/etc", disk.path().join("etc")).unwrap();
    let volume = disk.volume();
    let attach = |path: &str| volume.attach(Path::new(path), access(false));
    for good in ["", "/", "a", "/a/b", "a/./b/"] {
        assert!(attach(good).is_ok(), "{good}");
    }
    for bad in ["..", "a/../..", "a/link", "etc", "/etc", "missing", ".torpor-removed"] {
        assert!(attach(bad).is_err(), "{bad}");
    }
}

#[test]
fn the_hidden_directory_is_nobodys() {
    let Some(disk) = Disk::new(16) else { return };
    let guest = Guest::attached(&disk);
    let (root, hidden) = (guest.root, ".torpor-removed");
    let file = guest.create(root, "open").unwrap();
    guest.done(&Call::Unlink { dir: root, name: name("open"), keep: true }).unwrap();
    assert!(disk.path().join(hidden).exists());
    assert_eq!(guest.names(root), ["lost+found"]);
    assert_eq!(guest.lookup(root, hidden), Err(ENOENT));
    assert_eq!(guest.mkdir(root, hidden), Err(EACCES));
    assert_eq!(guest.create(root, hidden), Err(EACCES));
    assert_eq!(guest.done(&Call::Rmdir { dir: root, name: name(hidden) }), Err(ENOENT));
    let rename = Call::Rename {
        dir: root,
        name: name(hidden),
        to: root,
        to_name: name("mine"),
        how: Renaming::Replace,
        keep: false,
    };
    assert_eq!(guest.done(&rename), Err(ENOENT));
    assert!(guest.read(file).is_ok());
    // The name is free elsewhere.
    let elsewhere = guest.mkdir(root, "d").unwrap();
    guest.mkdir(elsewhere, hidden).unwrap();
}

#[test]
fn there_are_no_devices() {
    let Some(disk) = Disk::new(16) else { return };
    let guest = Guest::attached(&disk);
    let node = |kind: u32| Call::Mknod {
        dir: guest.root,
        name: name("node"),
        owner: ROOT,
        mode: kind | 0o666,
    };
    for device in [0o020_000, 0o060_000, 0, 0o120_000, 0o040_000] {
        assert_eq!(guest.done(&node(device)), Err(EPERM), "{device:o}");
    }
    guest.done(&node(0o010_000)).unwrap();
    let pipe = guest.lookup(guest.root, "node").unwrap();
    assert_eq!(guest.read(pipe), Err(EINVAL), "it would wait");
}

#[test]
fn what_is_no_call_is_answered_if_it_has_a_number() {
    let Some(disk) = Disk::new(16) else { return };
    let guest = Guest::attached(&disk);
    assert!(guest.service.serve(b"short").is_empty());
    let answer = guest.service.serve(&[7, 0, 0, 0, 0, 0, 0, 0, 0, 200, 1, 2, 3]);
    let failed = Answer::Failed { errno: EBADMSG };
    assert_eq!(decode_answer(&answer[PREFIX..]), Ok((7, failed)));
}

#[test]
fn what_is_said_to_be_sent_again_is_looked_for_in_no_time() {
    let Some(disk) = Disk::new(16) else { return };
    let guest = Guest::attached(&disk);
    // Nearly there, everywhere.
    fs::write(disk.path().join("log"), vec![b'a'; 1 << 20]).unwrap();
    let file = guest.lookup(guest.root, "log").unwrap();
    let mut data = vec![b'a'; 64 << 10];
    data.push(b'b');
    let begun = tokio::time::Instant::now();
    for _ in 0..10 {
        let data = std::borrow::Cow::Borrowed(&data[..]);
        let append = Call::Write { file, offset: 0, append: true, strip: false, data };
        assert!(matches!(guest.send(guest.sequence(), true, &append), Answer::Length { .. }));
    }
    let took = begun.elapsed();
    assert!(took < std::time::Duration::from_secs(5), "{took:?}");
}

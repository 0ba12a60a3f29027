//! Files by path, from outside of a guest.

use std::borrow::Cow;
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use torpor_files::{Volume, WriteOptions};
use torpor_protocol::guest::files::{Answer, Call, Owner};

use crate::world::{Disk, Guest, ROOT};

fn names(volume: &Volume, path: &str) -> Vec<String> {
    let page = volume.list(Path::new(path), None, 1000).unwrap();
    page.entries.iter().map(|it| String::from_utf8(it.name.clone()).unwrap()).collect()
}

#[test]
fn a_file_is_replaced_as_a_whole_or_not_at_all() {
    let Some(disk) = Disk::new(16) else { return };
    let volume = disk.volume();
    let path = Path::new("/a/b/file");
    volume.make_dirs(Path::new("a/b"), 0o755, Owner { user: 3, group: 4 }).unwrap();
    volume.make_dirs(Path::new("a/b"), 0o755, ROOT).unwrap();
    assert_eq!(fs::metadata(disk.path().join("a/b")).unwrap().uid(), 3);
    let options = WriteOptions { mode: Some(0o600), owner: Some(Owner { user: 5, group: 6 }) };
    let mut upload = volume.write(path, options).unwrap();
    upload.write_all(b"first").unwrap();
    assert!(volume.stat(path).is_err(), "not before it is complete");
    upload.finish().unwrap();
    assert_eq!(volume.read(path, 1, 3).unwrap(), b"irs");
    let mut upload = volume.write(path, WriteOptions::default()).unwrap();
    upload.write_all(b"never").unwrap();
    drop(upload);
    assert_eq!(volume.read(path, 0, 100).unwrap(), b"first");
    let mut upload = volume.write(path, WriteOptions::default()).unwrap();
    upload.write_all(b"second").unwrap();
    upload.finish().unwrap();
    let stat = volume.stat(path).unwrap();
    assert_eq!((stat.mode & 0o7777, stat.owner, stat.size), (0o600, options.owner.unwrap(), 6));
    assert_eq!(names(&volume, "/"), ["a", "lost+found"]);
    assert!(fs::read_dir(disk.path().join(".torpor-removed")).unwrap().next().is_none());
}

#[test]
fn nothing_is_read_where_nothing_is_wanted() {
    let Some(disk) = Disk::new(16) else { return };
    fs::write(disk.path().join("file"), "content").unwrap();
    let guest = Guest::attached(&disk);
    let volume = guest.service.volume();
    assert_eq!(volume.read(Path::new("file"), 0, 0).unwrap(), b"");
    assert_eq!(volume.read(Path::new("file"), 100, 5).unwrap(), b"");
    assert!(volume.read(Path::new("none"), 0, 0).is_err());
    let file = guest.lookup(guest.root, "file").unwrap();
    let nothing = Answer::Data { data: Cow::Borrowed(b"") };
    for (offset, length) in [(0, 0), (100, 5)] {
        let read = Call::Read { file, offset, length };
        assert_eq!(guest.call(&read), nothing);
        assert_eq!(guest.service.call(guest.sequence(), false, &read), nothing);
    }
}

#[test]
fn a_directory_is_listed_in_pages_by_name() {
    let Some(disk) = Disk::new(16) else { return };
    for number in 0..25 {
        fs::write(disk.path().join(format!("f{number:02}")), "").unwrap();
    }
    symlink("/etc", disk.path().join("zlink")).unwrap();
    let volume = disk.volume();
    let (mut after, mut all) = (None, Vec::new());
    loop {
        let page = volume.list(Path::new(""), after.as_deref(), 10).unwrap();
        assert!(page.entries.len() <= 10);
        after = page.entries.last().map(|entry| entry.name.clone());
        all.extend(page.entries);
        if !page.more {
            break;
        }
    }
    assert_eq!(all.len(), 27);
    assert!(all.is_sorted_by(|a, b| a.name < b.name));
    assert_eq!(all[26].target.as_deref(), Some(&b"/etc"[..]));
}

#[test]
fn paths_lead_nowhere_else() {
    let Some(disk) = Disk::new(16) else { return };
    let volume = disk.volume();
    symlink("/etc", disk.path().join("etc")).unwrap();
    fs::write(disk.beside("outside"), "outside").unwrap();
    for bad in ["etc/passwd", "../outside", "etc/../../outside", ".torpor-removed/x"] {
        let path = Path::new(bad);
        assert!(volume.read(path, 0, 10).is_err(), "{bad}");
        assert!(volume.write(path, WriteOptions::default()).is_err(), "{bad}");
        assert!(volume.remove(path, true).is_err(), "{bad}");
        assert!(volume.rename(path, Path::new("x")).is_err(), "{bad}");
        assert!(volume.make_dirs(path, 0o755, ROOT).is_err(), "{bad}");
        assert!(volume.list(path, None, 10).is_err(), "{bad}");
    }
    assert!(volume.remove(Path::new("/"), true).is_err());
    // A link itself can be looked at, moved and removed.
    assert_eq!(volume.stat(Path::new("etc")).unwrap().mode & 0o170_000, 0o120_000);
    volume.rename(Path::new("etc"), Path::new("link")).unwrap();
    volume.remove(Path::new("link"), true).unwrap();
    assert_eq!(fs::read_to_string(disk.beside("outside")).unwrap(), "outside");
}

#[test]
fn a_tree_is_removed_however_deep_it_is() {
    let Some(disk) = Disk::new(64) else { return };
    let volume = disk.volume();
    let mut deep = std::path::PathBuf::from("top");
    for number in 0..300 {
        deep.push(format!("{number}"));
    }
    fs::create_dir_all(disk.path().join(&deep)).unwrap();
    fs::write(disk.path().join(&deep).join("file"), "x").unwrap();
    let refused = volume.remove(Path::new("top"), false).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::DirectoryNotEmpty);
    volume.remove(Path::new("top"), true).unwrap();
    assert_eq!(names(&volume, ""), ["lost+found"]);
}

#[test]
fn what_is_hidden_is_reached_by_no_spelling() {
    let Some(disk) = Disk::new(16) else { return };
    let volume = disk.volume();
    let hidden = disk.path().join(".torpor-removed");
    for before in [false, true] {
        if before {
            fs::create_dir(&hidden).unwrap();
            fs::write(hidden.join("kept"), "kept").unwrap();
        }
        for prefix in ["", "/", "./", "/./", "//", ".//./"] {
            for suffix in ["", "/", "/.", "/kept", "/./kept"] {
                let bad = format!("{prefix}.torpor-removed{suffix}");
                let path = Path::new(&bad);
                assert!(volume.stat(path).is_err(), "{bad}");
                assert!(volume.list(path, None, 10).is_err(), "{bad}");
                assert!(volume.write(path, WriteOptions::default()).is_err(), "{bad}");
                assert!(volume.make_dirs(path, 0o777, ROOT).is_err(), "{bad}");
                assert!(volume.remove(path, true).is_err(), "{bad}");
                assert!(volume.rename(path, Path::new("x")).is_err(), "{bad}");
                assert!(volume.rename(Path::new("lost+found"), path).is_err(), "{bad}");
                assert_eq!(hidden.exists(), before, "{bad}");
            }
        }
    }
    assert_eq!(fs::read_to_string(hidden.join("kept")).unwrap(), "kept");
}

#[test]
fn a_guest_that_fills_or_replaces_what_is_hidden_keeps_nobody_from_writing() {
    let Some(disk) = Disk::new(64) else { return };
    let guest = Guest::attached(&disk);
    let volume = guest.service.volume();
    let hidden = disk.path().join(".torpor-removed");
    let write = |content: &[u8]| {
        let mut upload = volume.write(Path::new("file"), WriteOptions::default()).unwrap();
        upload.write_all(content).unwrap();
        upload.finish().unwrap();
        assert_eq!(fs::read(disk.path().join("file")).unwrap(), content);
    };
    fs::create_dir(&hidden).unwrap();
    for number in 0..10_000 {
        fs::write(hidden.join(format!("upload-{number}")), "").unwrap();
    }
    write(b"beside many");
    fs::remove_dir_all(&hidden).unwrap();
    fs::write(&hidden, "a file").unwrap();
    write(b"in place of a file");
    fs::remove_dir_all(&hidden).unwrap();
    symlink(disk.beside(""), &hidden).unwrap();
    write(b"in place of a link");
    // Nor from what it has open: whatever is called as that would be.
    let remove = |file: &str| {
        let name = crate::world::name(file);
        guest.call(&Call::Unlink { dir: guest.root, name, keep: true })
    };
    let open = guest.create(guest.root, "open").unwrap();
    guest.write(open, b"open").unwrap();
    remove("open");
    let kept = fs::read_dir(&hidden).unwrap().next().unwrap().unwrap().path();
    fs::rename(&kept, disk.path().join("open")).unwrap();
    fs::create_dir_all(kept.join("not/empty")).unwrap();
    assert_eq!(remove("open"), Answer::Removed { kept: Some(open) });
    assert_eq!(guest.read(open).unwrap(), b"open");
}

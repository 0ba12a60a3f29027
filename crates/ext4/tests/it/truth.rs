//! What is put into a disk is what is read from it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use torpor_ext4::{Entry, Filesystem, Kind, Limits, Upper};

use crate::disk::{
    OURS, can_make_disks, check, contents, data, empty_tree, every_kind, format, read, truth,
};

/// mke2fs writes times in seconds.
fn in_seconds(mut entries: Vec<Entry>) -> Vec<Entry> {
    for entry in &mut entries {
        entry.modified_at_ms = entry.modified_at_ms.div_euclid(1000) * 1000;
    }
    entries
}

fn put_in_and_read(mib: u64, arguments: &[&str]) {
    if !can_make_disks() {
        return;
    }
    let (root, upper) = empty_tree();
    every_kind(&upper);
    let (_dir, disk) = format(root.path(), mib, arguments);
    let found = read(File::open(disk).unwrap()).unwrap();
    let truth = in_seconds(truth(&upper));
    assert!(truth.len() > 30);
    let contents = contents(&upper, &truth);
    check(&found, &truth, &contents);
}

#[test]
fn every_kind_of_file_reads_back_as_it_was_put_in() {
    put_in_and_read(64, &OURS);
}

#[test]
fn a_filesystem_as_mke2fs_makes_it_by_default_reads_back() {
    put_in_and_read(64, &["-q"]);
}

#[test]
fn small_blocks_and_large_inodes_read_back() {
    put_in_and_read(64, &["-q", "-b1024", "-I1024"]);
}

#[test]
fn tables_of_blocks_and_the_smallest_inodes_read_back() {
    put_in_and_read(64, &["-q", "-b1024", "-I128", "-O^extents,^64bit,^metadata_csum,^flex_bg"]);
}

#[test]
fn tables_of_large_blocks_read_back() {
    put_in_and_read(64, &["-q", "-b4096", "-O^extents,^64bit"]);
}

#[test]
fn a_file_of_holes_has_no_more_than_its_data() {
    if !can_make_disks() {
        return;
    }
    let (root, upper) = empty_tree();
    let file = File::create(upper.join("huge")).unwrap();
    file.set_len(30 << 30).unwrap();
    file.write_all_at(&[7; 5000], 10 << 30).unwrap();
    File::create(upper.join("nothing")).unwrap().set_len(30 << 30).unwrap();
    let (_dir, disk) = format(root.path(), 16, &OURS);
    let found = read(File::open(disk).unwrap()).unwrap();
    let sizes: Vec<_> = found.entries.iter().map(|entry| &entry.kind).collect();
    assert_eq!(sizes, [&Kind::File { size: 30 << 30 }, &Kind::File { size: 30 << 30 }]);
    let [(at, piece)] = &data(&found, 0).unwrap()[..] else { panic!("it is not in one place") };
    assert_eq!((*at, piece.len()), (10 << 30, 8192), "whole blocks");
    assert!(piece[..5000].iter().all(|byte| *byte == 7));
    assert_eq!(data(&found, 1).unwrap(), []);
}

#[test]
fn a_directory_of_thousands_reads_back_in_the_order_of_paths() {
    if !can_make_disks() {
        return;
    }
    let (root, upper) = empty_tree();
    fs::create_dir(upper.join("many")).unwrap();
    // Sorts between the directory and what is in it.
    fs::write(upper.join("many-"), b"").unwrap();
    for number in 0..5000 {
        fs::write(upper.join(format!("many/a-file-with-number-{number}")), b"x").unwrap();
    }
    let (_dir, disk) = format(root.path(), 64, &OURS);
    let found = read(fs::read(disk).unwrap()).unwrap();
    let truth = in_seconds(truth(&upper));
    assert_eq!(truth[1].path, b"many-");
    let contents = contents(&upper, &truth);
    check(&found, &truth, &contents);
}

#[test]
fn what_is_removed_in_a_directory_that_hides_all_below_is_not_told() {
    if !can_make_disks() {
        return;
    }
    let (root, upper) = empty_tree();
    fs::create_dir_all(upper.join("new/below")).unwrap();
    crate::disk::attribute(&upper.join("new"), crate::disk::OPAQUE, b"y");
    let removed = |path: &str| {
        crate::disk::device(&upper.join(path), rustix::fs::FileType::CharacterDevice, 0, 0);
    };
    removed("new/below/gone");
    removed("gone");
    let (_dir, disk) = format(root.path(), 8, &OURS);
    let found = read(File::open(disk).unwrap()).unwrap();
    let found: Vec<_> = found.entries.into_iter().map(|entry| (entry.path, entry.kind)).collect();
    let expected = [
        (b"gone".to_vec(), Kind::Removed),
        (b"new".to_vec(), Kind::Directory { opaque: true }),
        (b"new/below".to_vec(), Kind::Directory { opaque: false }),
    ];
    assert_eq!(found, expected);
}

#[test]
fn the_limits_of_entries_and_of_text_are_kept() {
    if !can_make_disks() {
        return;
    }
    let (root, upper) = empty_tree();
    let name = "n".repeat(100);
    fs::write(upper.join(&name), b"x").unwrap();
    for number in 0..9 {
        fs::hard_link(upper.join(&name), upper.join(format!("z{number}"))).unwrap();
    }
    let (_dir, disk) = format(root.path(), 8, &OURS);
    let read = |entries, text_bytes| {
        let filesystem = Filesystem::open(File::open(&disk).unwrap()).unwrap();
        Upper::read(filesystem, "upper", Limits { entries, text_bytes }).map(drop)
    };
    // One path, nine of two bytes, and nine links that lead to the first.
    let text = 100 + 9 * 2 + 9 * 100;
    read(10, text).unwrap();
    assert!(read(9, text).unwrap_err().to_string().contains("more than 9 files"));
    assert!(read(10, text - 1).unwrap_err().to_string().contains("too long"));
}

#[test]
fn a_directory_is_found_by_its_path_and_missed_by_name() {
    if !can_make_disks() {
        return;
    }
    let (root, upper) = empty_tree();
    fs::create_dir_all(upper.join("a/b")).unwrap();
    fs::write(upper.join("a/b/file"), b"x").unwrap();
    let (_dir, disk) = format(root.path(), 8, &OURS);
    let read = |directory: &str| {
        let filesystem = Filesystem::open(File::open(&disk).unwrap()).unwrap();
        Upper::read(filesystem, directory, Limits::default()).map(|upper| upper.entries.len())
    };
    assert_eq!(read("upper").unwrap(), 3);
    assert_eq!(read("/upper/a/").unwrap(), 2);
    assert!(read("").unwrap() > 4, "the whole disk");
    for wrong in ["nothing", "upper/a/b/file", "upper/a/b/file/more"] {
        let error = read(wrong).unwrap_err().to_string();
        assert!(error.contains(wrong), "{error}");
    }
}

#[test]
fn used_bytes_are_what_files_take() {
    if !can_make_disks() {
        return;
    }
    let (root, upper) = empty_tree();
    let used = || {
        let (_dir, disk) = format(root.path(), 300, &OURS);
        Filesystem::open(File::open(disk).unwrap()).unwrap().used_bytes().unwrap()
    };
    let before = used();
    fs::write(upper.join("file"), vec![1; 8 << 20]).unwrap();
    assert_eq!(used() - before, 8 << 20);
}

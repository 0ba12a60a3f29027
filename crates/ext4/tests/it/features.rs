//! Filesystems that are not as ours are: refused by name, or read.

use std::fs::{self, File};

use torpor_ext4::Ext4Error;

use crate::disk::{OURS, attribute, can_make_disks, empty_tree, format, read, run};

#[test]
fn features_that_change_where_things_are_are_refused_by_name() {
    if !can_make_disks() {
        return;
    }
    let (root, _) = empty_tree();
    for (feature, told) in [
        ("meta_bg,^resize_inode", "meta_bg"),
        ("inline_data", "inline_data"),
        ("ea_inode", "ea_inode"),
        ("encrypt", "encrypted"),
        ("casefold", "casefold"),
        ("bigalloc", "bigalloc"),
        ("mmp", "mmp"),
    ] {
        let (_dir, disk) = format(root.path(), 16, &["-q", &format!("-O{feature}")]);
        let error = read(File::open(disk).unwrap()).unwrap_err();
        assert!(matches!(error, Ext4Error::Unsupported(_)), "{feature}: {error}");
        assert!(error.to_string().contains(told), "{feature}: {error}");
    }
}

#[test]
fn a_journal_is_read_past_unless_something_is_in_it() {
    if !can_make_disks() {
        return;
    }
    let (root, upper) = empty_tree();
    fs::write(upper.join("file"), b"x").unwrap();
    let (_dir, disk) = format(root.path(), 16, &["-q", "-Ohas_journal"]);
    assert_eq!(read(File::open(&disk).unwrap()).unwrap().entries.len(), 1);
    run("debugfs", &["-w", "-R", "feature needs_recovery", disk.to_str().unwrap()]);
    let error = read(File::open(&disk).unwrap()).unwrap_err().to_string();
    assert!(error.contains("a journal that was not written back"), "{error}");
}

#[test]
fn what_an_overlay_left_below_is_refused() {
    if !can_make_disks() {
        return;
    }
    for (path, name, refused) in [
        ("upper/moved", "trusted.overlay.redirect", true),
        ("upper/moved/file", "trusted.overlay.metacopy", true),
        // Of a file whose content is here, where it was does not matter.
        ("upper/moved/file", "trusted.overlay.redirect", false),
        ("upper/moved", "user.overlay.redirect", false),
        ("upper/moved", "trusted.overlay.origin", false),
    ] {
        let (root, upper) = empty_tree();
        fs::create_dir(upper.join("moved")).unwrap();
        fs::write(upper.join("moved/file"), b"x").unwrap();
        attribute(&root.path().join(path), name, b"/elsewhere");
        let (_dir, disk) = format(root.path(), 8, &OURS);
        let found = read(File::open(disk).unwrap());
        assert_eq!(found.is_err(), refused, "{path} {name}: {found:?}");
        if let Err(error) = found {
            assert!(matches!(error, Ext4Error::Unsupported(_)), "{error}");
        }
    }
}

#[test]
fn what_is_no_filesystem_is_told_apart() {
    for disk in [vec![], vec![0; 1024], vec![0; 2047], vec![0; 2048], vec![0xff; 1 << 20]] {
        let error = read(disk).unwrap_err();
        assert!(matches!(error, Ext4Error::NoFilesystem), "{error}");
    }
}

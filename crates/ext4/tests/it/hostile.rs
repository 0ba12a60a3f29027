//! Disks that somebody prepared.

use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;
use torpor_ext4::{Filesystem, Kind};

use crate::disk::{
    OPAQUE, OURS, attribute, can_make_disks, data, empty_tree, format, read, run, sparse,
};

/// A disk in memory and in a file, to be changed in one place or a few.
struct Prepared {
    bytes: Vec<u8>,
    disk: PathBuf,
    _dir: TempDir,
}

/// Fields of an inode.
const SIZE: usize = 0x4;
const SIZE_HIGH: usize = 0x6C;
const EXTENTS: usize = 0x28;
/// The first entry of a node, after its header.
const FIRST: usize = 12;

impl Prepared {
    fn new() -> Self {
        let (root, upper) = empty_tree();
        let at = |name: &str| upper.join(name);
        fs::write(at("first"), b"x").unwrap();
        for number in 0..20 {
            fs::write(at(&format!("other{number}")), vec![b'x'; 3 * 4096]).unwrap();
        }
        let pieces: Vec<_> = (0..9).map(|n| (n * 3 * 4096, 1)).collect();
        sparse(&at("pieces"), 200_000, &pieces);
        fs::create_dir_all(at("outer/inner")).unwrap();
        attribute(&at("outer"), OPAQUE, b"y");
        for length in [10, 100] {
            std::os::unix::fs::symlink("t".repeat(length), at(&format!("link{length}"))).unwrap();
        }
        let (dir, disk) = format(root.path(), 2, &[&OURS[..], &["-N48"]].concat());
        let bytes = fs::read(&disk).unwrap();
        assert_eq!(read(&bytes).unwrap().entries.len(), 26);
        Self { bytes, disk, _dir: dir }
    }

    /// Where an inode is.
    fn inode(&self, path: &str) -> usize {
        let text = run("debugfs", &["-R", &format!("imap {path}"), self.disk.to_str().unwrap()]);
        let number = |after: &str, base| {
            let rest = &text[text.find(after).unwrap() + after.len()..];
            let end = rest.find(|c: char| !c.is_ascii_hexdigit()).unwrap();
            usize::from_str_radix(&rest[..end], base).unwrap()
        };
        number("located at block ", 10) * 4096 + number("offset 0x", 16)
    }

    /// Where the entry of a name is in its directory.
    fn name(&self, name: &str) -> usize {
        let found =
            |window: &[u8]| usize::from(window[6]) == name.len() && window[8..] == *name.as_bytes();
        self.bytes.windows(8 + name.len()).position(found).unwrap()
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    /// What is said about the disk with some bytes changed.
    fn error(&self, changes: &[(usize, &[u8])]) -> String {
        match read(self.with(changes)) {
            Ok(_) => panic!("{changes:x?} can't be seen"),
            Err(error) => error.to_string(),
        }
    }

    fn with(&self, changes: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        for (at, change) in changes {
            bytes[*at..at + change.len()].copy_from_slice(change);
        }
        bytes
    }
}

fn refused(error: &str, why: &str) {
    assert!(error.contains(why), "{error}");
}

#[test]
fn directories_that_lead_back_are_refused() {
    if !can_make_disks() {
        return;
    }
    let disk = Prepared::new();
    let inner = disk.name("inner");
    let inode_of = |name| disk.u32(disk.name(name)).to_le_bytes();
    refused(&disk.error(&[(inner, &inode_of("upper"))]), "is inside of itself");
    refused(&disk.error(&[(inner, &inode_of("outer"))]), "has two names");
    refused(&disk.error(&[(inner, &2u32.to_le_bytes())]), "is inside of itself");
    refused(&disk.error(&[(disk.name("first"), &inode_of("inner"))]), "has two names");
}

#[test]
fn names_that_no_file_can_have_are_refused() {
    if !can_make_disks() {
        return;
    }
    let disk = Prepared::new();
    let at = disk.name("first");
    refused(&disk.error(&[(at + 8, b"../et")]), "an impossible name");
    refused(&disk.error(&[(at + 8, b"\0")]), "an impossible name");
    refused(&disk.error(&[(at + 6, &[0])]), "an impossible name");
    refused(&disk.error(&[(disk.name("other1") + 8, b"other2")]), "two of other2");
    for length in [0u16, 4, 7, 10, 13, 4097, 65535] {
        refused(&disk.error(&[(at + 4, &length.to_le_bytes())]), "an impossible entry");
    }
}

#[test]
fn inodes_that_are_none_are_refused() {
    if !can_make_disks() {
        return;
    }
    let disk = Prepared::new();
    let at = disk.name("first");
    for number in [49u32, 1 << 20, u32::MAX] {
        refused(&disk.error(&[(at, &number.to_le_bytes())]), "does not exist");
    }
    refused(&disk.error(&[(at, &48u32.to_le_bytes())]), "has the mode 0");
    let inode = disk.inode("upper/first");
    refused(&disk.error(&[(inode + 128, &[255, 0])]), "fields beyond its end");
    refused(&disk.error(&[(inode + 0x23, &[0x10])]), "inline_data");
}

#[test]
fn blocks_that_are_elsewhere_or_everywhere_are_refused() {
    if !can_make_disks() {
        return;
    }
    let disk = Prepared::new();
    let extents = disk.inode("upper/first") + EXTENTS;
    let (length, high, low) = (extents + FIRST + 4, extents + FIRST + 6, extents + FIRST + 8);
    let not_of_disk = "is not one of the disk";
    refused(&disk.error(&[(high, &[255, 255])]), not_of_disk);
    refused(&disk.error(&[(low, &512u32.to_le_bytes())]), not_of_disk);
    refused(&disk.error(&[(low, &[0; 4])]), not_of_disk);
    refused(&disk.error(&[(length, &[0, 0])]), "not in order");
    refused(&disk.error(&[(length, &[0, 0x80])]), "more blocks than the disk");
    refused(&disk.error(&[(extents, &[0])]), "a tree that is none");
    refused(&disk.error(&[(extents + 2, &[5, 0])]), "a tree that is none");
    refused(&disk.error(&[(disk.inode("upper/outer") + SIZE, &[1, 0])]), "has holes");
    refused(&disk.error(&[(disk.inode("upper/outer") + SIZE, &[0, 0x20])]), "has holes");

    // Twenty files that all have the same hundred blocks: more than there are.
    let shared: Vec<_> = (0..20)
        .map(|number| disk.inode(&format!("upper/other{number}")) + EXTENTS + FIRST)
        .collect();
    let one = [[0; 4], [100, 0, 0, 0], 100u32.to_le_bytes()].concat();
    let changes = shared.iter().flat_map(|at| [(at - FIRST + 2, &[1u8][..]), (*at, &one[..])]);
    let changes: Vec<_> = changes.collect();
    refused(&disk.error(&changes), "more blocks than the disk");
}

#[test]
fn trees_that_lead_to_themselves_are_refused() {
    if !can_make_disks() {
        return;
    }
    let disk = Prepared::new();
    let root = disk.inode("upper/pieces") + EXTENTS;
    assert_eq!(disk.bytes[root + 6], 1, "it has a node besides its root");
    let block = disk.u32(root + FIRST + 4);
    let node = block as usize * 4096;
    let itself = [&[0; 4][..], &block.to_le_bytes(), &[0; 4]].concat();
    let none = "a tree that is none";
    refused(&disk.error(&[(node + 2, &[1]), (node + 6, &[1]), (node + FIRST, &itself)]), none);
    for depth in [2u8, 5] {
        let deep = [(root + 6, &[depth][..]), (node + 6, &[depth - 1]), (node + FIRST, &itself)];
        refused(&disk.error(&deep), none);
    }
    refused(&disk.error(&[(root + 6, &[6])]), none);
    // Two ways to the same node.
    let twice = [(root + 2, &[2][..]), (root + FIRST + 12, &itself)];
    refused(&disk.error(&twice), "not in order");
    // Nodes with nothing in them, over and over: four times 340 ways to one.
    let nothing = disk.u32(disk.inode("upper/other0") + EXTENTS + FIRST + 8);
    let way = [&[0; 4][..], &nothing.to_le_bytes(), &[0; 4]].concat();
    let (ways, again) = (way.repeat(340), itself.repeat(4));
    let around = [
        (root + 2, &[4][..]),
        (root + 6, &[2]),
        (root + FIRST, &again),
        (node, &[0x0A, 0xF3, 84, 1, 84, 1, 1, 0]),
        (node + FIRST, &ways),
        (nothing as usize * 4096, &[0x0A, 0xF3, 0, 0, 84, 1, 0, 0]),
    ];
    refused(&disk.error(&around), "more blocks than the disk");
}

#[test]
fn sizes_are_believed_as_far_as_they_are_possible() {
    if !can_make_disks() {
        return;
    }
    let disk = Prepared::new();
    let inode = disk.inode("upper/first");
    let huge = (1u32 << 28).to_le_bytes();
    refused(&disk.error(&[(inode + SIZE_HIGH, &huge)]), "has 1152921504606846977 bytes");
    // The largest there can be is a hole: nobody reads it.
    let bytes = disk.with(&[(inode + SIZE, &[0; 4]), (inode + SIZE_HIGH, &[0, 16, 0, 0])]);
    let found = read(&bytes).unwrap();
    let index = found.entries.iter().position(|entry| entry.path == b"first").unwrap();
    assert_eq!(found.entries[index].kind, Kind::File { size: 1 << 44 });
    let stored: usize = data(&found, index).unwrap().iter().map(|(_, piece)| piece.len()).sum();
    assert!(stored <= bytes.len(), "{stored} bytes of data");

    for (link, sizes) in [("link10", [0u32, 60, 4097]), ("link100", [0, 4096, 5000])] {
        let size = disk.inode(&format!("upper/{link}")) + SIZE;
        for bytes in sizes {
            let error = disk.error(&[(size, &bytes.to_le_bytes())]);
            assert!(error.contains("leads nowhere") || error.contains("is not one"), "{error}");
        }
    }
}

#[test]
fn attributes_beyond_their_room_are_refused() {
    if !can_make_disks() {
        return;
    }
    let disk = Prepared::new();
    let inode = disk.inode("upper/outer");
    let room = inode + 128 + usize::from(disk.bytes[inode + 128]);
    assert_eq!(disk.u32(room), 0xEA02_0000);
    let entry = room + 4;
    let impossible = "impossible attributes";
    refused(&disk.error(&[(entry, &[255])]), impossible);
    refused(&disk.error(&[(entry + 2, &[0xff, 0xff])]), impossible);
    refused(&disk.error(&[(entry + 8, &[0xff; 4])]), impossible);
    // A block of attributes that is a directory's, or nowhere.
    refused(
        &disk.error(&[(inode + 0x68, &disk.u32(inode + EXTENTS + FIRST + 8).to_le_bytes())]),
        impossible,
    );
    refused(&disk.error(&[(inode + 0x76, &[1])]), "is not one of the disk");
}

#[test]
fn a_filesystem_that_says_impossible_things_of_itself_is_refused() {
    if !can_make_disks() {
        return;
    }
    let disk = Prepared::new();
    let most = u32::MAX.to_le_bytes();
    let changes: [(usize, &[u8]); 16] = [
        (0x4, &[0; 4]),
        (0x150, &most),
        (0x14, &[1]),
        (0x18, &[3]),
        (0x18, &most),
        (0x20, &[0; 4]),
        (0x20, &[8, 0, 0, 0]),
        (0x20, &most),
        (0x28, &[0; 4]),
        (0x28, &most),
        (0x4C, &[0]),
        (0x58, &[0, 0]),
        (0x58, &[0, 16]),
        (0x58, &[200, 0]),
        (0xFE, &[0, 0]),
        (0xFE, &[100, 0]),
    ];
    for (at, bytes) in changes {
        disk.error(&[(1024 + at, bytes)]);
    }
    // More of everything than there is: what is not there is not looked for.
    let more = disk.with(&[(1024, &most), (1024 + 4, &most)]);
    assert_eq!(read(&more).unwrap().entries.len(), 26);
    assert!(Filesystem::open(&more).unwrap().used_bytes().unwrap() <= 2 << 20);
}

//! Disks with bytes that are anything, at places that are anywhere.

use std::cell::Cell;
use std::fs;
use std::io;

use rustix::fs::FileType;
use torpor_ext4::{Filesystem, Kind, Limits, ReadAt, Upper};

use crate::disk::{
    OPAQUE, OURS, attribute, can_make_disks, data, device, empty_tree, format, sparse,
};

const LIMITS: Limits = Limits { entries: 500, text_bytes: 100_000 };
const BLOCK: usize = 4096;
/// Blocks of the disk.
const BLOCKS: u64 = (2 << 20) / BLOCK as u64;
const CASES: usize = 6000;

/// Counts how often it is read.
struct Counted<'d> {
    bytes: &'d [u8],
    reads: Cell<u64>,
}

impl ReadAt for Counted<'_> {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.reads.set(self.reads.get() + 1);
        self.bytes.read_exact_at(buffer, offset)
    }

    fn size(&self) -> io::Result<u64> {
        self.bytes.size()
    }
}

/// A small disk with a bit of everything.
fn small() -> Vec<u8> {
    let (root, upper) = empty_tree();
    let at = |name: &str| upper.join(name);
    fs::write(at("file"), b"x").unwrap();
    fs::write(at("blocks"), vec![b'x'; 3 * BLOCK]).unwrap();
    let pieces: Vec<_> = (0..9).map(|n| (n * 3 * BLOCK as u64, 1)).collect();
    sparse(&at("pieces"), 200_000, &pieces);
    fs::create_dir_all(at("one/two/three")).unwrap();
    fs::write(at("one/two/three/file"), b"x").unwrap();
    fs::create_dir(at("opaque")).unwrap();
    attribute(&at("opaque"), OPAQUE, b"y");
    attribute(&at("opaque"), "user.long", &[b'v'; 200]);
    for length in [10, 100] {
        std::os::unix::fs::symlink("t".repeat(length), at(&format!("link-{length}"))).unwrap();
    }
    device(&at("removed"), FileType::CharacterDevice, 0, 0);
    device(&at("device"), FileType::BlockDevice, 300, 300);
    fs::hard_link(at("file"), at("again")).unwrap();
    let (_dir, disk) = format(root.path(), 2, &[&OURS[..], &["-N48"]].concat());
    fs::read(disk).unwrap()
}

/// Reads all that can be read, and fails if that takes long; whether the list could be read.
fn read_all(bytes: &[u8]) -> bool {
    let disk = Counted { bytes, reads: Cell::new(0) };
    let filesystem = match Filesystem::open(&disk) {
        Ok(filesystem) => filesystem,
        Err(_) => return false,
    };
    let _ = filesystem.used_bytes();
    let read = Upper::read(filesystem, "upper", LIMITS);
    // The descriptors; the way to the directory; all blocks of the rest; inodes and attributes.
    let entries = LIMITS.entries as u64;
    let most = 10 + 2 * (BLOCKS + 2) + BLOCKS + 6 * entries;
    assert!(disk.reads.get() <= most, "{} reads for the list", disk.reads.get());
    let Ok(read) = read else { return false };
    assert!(read.entries.len() <= LIMITS.entries);
    assert!(read.entries.is_sorted_by(|a, b| a.path < b.path));
    for (index, entry) in read.entries.iter().enumerate() {
        disk.reads.set(0);
        if matches!(entry.kind, Kind::File { .. })
            && let Ok(found) = data(&read, index)
        {
            let bytes: usize = found.iter().map(|(_, piece)| piece.len()).sum();
            assert!(bytes <= 2 << 20, "{bytes} bytes of a file");
        }
        // Where its data is, and the data.
        assert!(disk.reads.get() <= 2 * (BLOCKS + 2), "{} reads for a file", disk.reads.get());
    }
    true
}

/// Numbers that are the same in every run.
struct Luck(u64);

impl Luck {
    fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % most
    }
}

#[test]
fn whatever_the_bytes_are_reading_ends_soon_and_well() {
    if !can_make_disks() {
        return;
    }
    let mut disk = small();
    assert!(read_all(&disk));
    // What is free, in files, or the end of a map of bits, changes nothing.
    let dull = |byte: u8| [0, b'x', b'v', 0xff].contains(&byte);
    let places: Vec<usize> = (0..disk.len()).filter(|at| !dull(disk[*at])).collect();
    let mut luck = Luck(0x9E37_79B9_7F4A_7C15);
    let mut good = 0;
    for _ in 0..CASES {
        let mut before = Vec::new();
        for _ in 0..=luck.below(6) {
            // Most of a disk is empty: near what is not, something happens.
            let near = places[luck.below(places.len())] + luck.below(9);
            let at = [near, near, near, luck.below(disk.len())][luck.below(4)].min(disk.len() - 1);
            before.push((at, disk[at]));
            let bit = disk[at] ^ 1 << luck.below(8);
            let any = luck.below(256) as u8;
            disk[at] = [bit, bit, any, 0, 1, 0x7f, 0x80, 0xff][luck.below(8)];
        }
        good += usize::from(read_all(&disk));
        for (at, byte) in before.into_iter().rev() {
            disk[at] = byte;
        }
    }
    println!("{good} of {CASES} could be read");
    assert!(good > CASES / 10 && good < CASES * 9 / 10, "{good}: the cases are too much alike");
}

#[test]
fn whole_blocks_of_anything_are_survived() {
    if !can_make_disks() {
        return;
    }
    let disk = small();
    let used = |number: &usize| disk[number * BLOCK..][..BLOCK].iter().any(|byte| *byte != 0);
    let used: Vec<usize> = (0..disk.len() / BLOCK).filter(used).collect();
    let mut luck = Luck(0xD1B5_4A32_D192_ED03);
    for _ in 0..600 {
        let mut disk = disk.clone();
        let (from, to) = (used[luck.below(used.len())], used[luck.below(used.len())]);
        // The superblock is in the first; without it there is nothing to survive.
        if to == 0 {
            continue;
        }
        if luck.below(2) == 0 {
            disk.copy_within(from * BLOCK..(from + 1) * BLOCK, to * BLOCK);
        } else {
            disk[to * BLOCK..(to + 1) * BLOCK].fill_with(|| luck.below(256) as u8);
        }
        read_all(&disk);
    }
}

#[test]
fn a_disk_that_ends_too_early_is_read_as_far_as_it_goes() {
    if !can_make_disks() {
        return;
    }
    let disk = small();
    let mut good = Vec::new();
    for blocks in 0..disk.len() / BLOCK {
        for odd in [0, 1, 2000] {
            good.push(read_all(&disk[..blocks * BLOCK + odd]));
        }
    }
    assert!(!good[0] && !good[30], "without its tables there is nothing");
    assert!(good.last().unwrap(), "the last block is free");
    let mut longer = disk;
    longer.extend([7; 5000]);
    assert!(read_all(&longer));
}

//! Entry point of a fuzz target: what holds whatever is on a disk.

#[path = "../../../fuzz/input.rs"]
mod input;

use std::cell::Cell;
use std::io;
use std::ops::Range;

use crate::{Filesystem, Kind, Limits, ReadAt, Upper};

/// Bytes of a block of the input.
const BLOCK: usize = 1024;
/// Blocks of the disk.
const BLOCKS: usize = 128;
const LIMITS: Limits = Limits { entries: 500, text_bytes: 100_000 };
/// More reads than a disk of this size can need: each block by itself, for the list and for each file.
const READS_MAX: u64 = 1_000_000;

/// Counts how often it is read.
struct Disk {
    bytes: Vec<u8>,
    reads: Cell<u64>,
}

impl ReadAt for Disk {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.reads.set(self.reads.get() + 1);
        assert!(self.reads.get() < READS_MAX, "reading ends");
        self.bytes.read_exact_at(buffer, offset)
    }

    fn size(&self) -> io::Result<u64> {
        self.bytes.size()
    }
}

/// The list is within its limits, and the data of files within their sizes. The input has the blocks of
/// the disk that are not zero, each behind its number.
pub fn ext4(bytes: &[u8]) {
    let mut disk = vec![0; BLOCKS * BLOCK];
    for chunk in bytes.chunks(1 + BLOCK) {
        let Some((number, content)) = chunk.split_first() else { continue };
        let at = usize::from(*number) % BLOCKS * BLOCK;
        disk[at..at + content.len()].copy_from_slice(content);
    }
    let Ok(filesystem) = Filesystem::open(Disk { bytes: disk, reads: Cell::new(0) }) else {
        return;
    };
    let _ = filesystem.used_bytes();
    let Ok(upper) = Upper::read(filesystem, "upper", LIMITS) else { return };
    assert!(upper.entries.len() <= LIMITS.entries, "{} entries", upper.entries.len());
    for (index, entry) in upper.entries.iter().enumerate() {
        let Kind::File { size } = entry.kind else { continue };
        let Ok(data) = upper.files.data(index) else { continue };
        let apart = data.windows(2).all(|pair| pair[0].end < pair[1].start);
        assert!(apart && data.last().is_none_or(|last| last.end <= size), "{data:?} of {size}");
        let mut shown: Vec<Range<u64>> = Vec::new();
        let read = upper.files.read(index, &mut |at, bytes| {
            let end = at + bytes.len() as u64;
            match shown.last_mut() {
                Some(last) if last.end == at => last.end = end,
                Some(_) | None => shown.push(at..end),
            }
            Ok(())
        });
        assert!(read.is_err() || shown == data, "all data is shown");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_ext4() {
        input::replay("ext4", ext4);
    }
}

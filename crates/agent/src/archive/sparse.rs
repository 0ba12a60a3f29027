//! Files with holes in a tar, as GNU tar has them in PAX archives (version 1.0): the content is what is
//! no hole, and before it comes a text with where that belongs, a number a line.

use std::fs::File;
use std::ops::Range;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::header::BLOCK;

/// Runs begin and end with blocks of this size: those of the usual file systems.
const ALIGNED: u64 = 4096;
/// Runs of a file that is packed. Looking for them takes a system call or two each, and nobody else
/// has a turn meanwhile; behind the last one holes are sent as zeros.
const PACKED_MAX: usize = 16 * 1024;
/// Runs of a file that is unpacked, and its end: a few MiB of map, and as many as a layer has.
const UNPACKED_MAX: u64 = 256 * 1024 + 1;

pub(super) type Runs = Vec<Range<u64>>;

pub(super) fn stored(runs: &[Range<u64>]) -> u64 {
    runs.iter().map(|run| run.end - run.start).sum()
}

// === Packing ===

/// What of a file with so many bytes is no hole. All of it, where nobody knows.
pub(super) fn runs(file: &File, size: u64) -> Runs {
    let mut runs = Runs::new();
    let mut at = 0;
    while at < size {
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) if data < size => data,
            Ok(_) | Err(Errno::NXIO) => break,
            // gVisor's file systems do not know their holes.
            Err(_) => return std::iter::once(0..size).collect(),
        };
        let hole = match runs.len() {
            PACKED_MAX.. => size,
            _ => seek(file, SeekFrom::Hole(data)).unwrap_or(size).max(data + 1),
        };
        let start = (data - data % ALIGNED).max(at);
        at = hole.checked_next_multiple_of(ALIGNED).unwrap_or(size).min(size);
        match runs.last_mut() {
            Some(last) if last.end == start => last.end = at,
            Some(_) | None => runs.push(start..at),
        }
    }
    runs
}

/// The map of a file with so many bytes, whole blocks of it.
pub(super) fn text(size: u64, runs: &[Range<u64>]) -> Vec<u8> {
    let end = runs.last().is_none_or(|run| run.end < size).then_some(size..size);
    let mut text = format!("{}\n", runs.len() + usize::from(end.is_some())).into_bytes();
    for run in runs.iter().cloned().chain(end) {
        text.extend_from_slice(format!("{}\n{}\n", run.start, run.end - run.start).as_bytes());
    }
    text.resize(text.len().next_multiple_of(BLOCK), 0);
    text
}

// === Unpacking ===

/// A map in the making.
#[derive(Debug)]
pub(super) struct Map {
    pub(super) size: u64,
    runs: Runs,
    /// Numbers that are to come; not known before the first one.
    left: Option<u64>,
    /// Where the next run begins, once that was said.
    start: Option<u64>,
    /// The digits so far.
    number: Option<u64>,
}

const DAMAGED: &str = "the map of a sparse file in the archive is damaged";

impl Map {
    pub(super) fn new(size: u64) -> Self {
        Self { size, runs: Runs::new(), left: None, start: None, number: None }
    }

    /// Takes the next block; gives the runs after the last one.
    pub(super) fn push(&mut self, block: &[u8; BLOCK]) -> Result<Option<Runs>, &'static str> {
        for byte in block {
            match (byte, self.number) {
                (b'\n', Some(number)) => {
                    self.number = None;
                    self.take(number)?;
                }
                (b'0'..=b'9', number) => {
                    let digit = u64::from(byte - b'0');
                    let more = number.unwrap_or(0).checked_mul(10);
                    let more = more.and_then(|more| more.checked_add(digit));
                    self.number = Some(more.ok_or(DAMAGED)?);
                }
                (_, _) => return Err(DAMAGED),
            }
            if self.left == Some(0) {
                return Ok(Some(std::mem::take(&mut self.runs)));
            }
        }
        Ok(None)
    }

    fn take(&mut self, number: u64) -> Result<(), &'static str> {
        let Some(left) = self.left else {
            if number > UNPACKED_MAX {
                return Err("a sparse file in the archive has too many pieces");
            }
            self.left = Some(2 * number);
            return Ok(());
        };
        self.left = Some(left - 1);
        let Some(start) = self.start.take() else {
            self.start = Some(number);
            return Ok(());
        };
        let end = start.checked_add(number).filter(|end| *end <= self.size).ok_or(DAMAGED)?;
        if self.runs.last().is_some_and(|last| start < last.end) {
            return Err(DAMAGED);
        }
        if start < end {
            self.runs.push(start..end);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn read(size: u64, text: &[u8]) -> Result<Option<Runs>, &'static str> {
        let mut map = Map::new(size);
        for block in text.chunks_exact(BLOCK) {
            if let Some(runs) = map.push(block.try_into().unwrap())? {
                return Ok(Some(runs));
            }
        }
        Ok(None)
    }

    #[test]
    fn a_map_is_read_as_it_was_written() {
        for count in [0, 1, 5, 1000] {
            let runs: Runs = (0..count).map(|n| 3 * n * ALIGNED..(3 * n + 1) * ALIGNED).collect();
            let size = 30 << 30;
            assert_eq!(read(size, &text(size, &runs)), Ok(Some(runs)));
        }
        assert_eq!(read(5, &text(5, &[0..1, 4..5])), Ok(Some(vec![0..1, 4..5])));
    }

    #[test]
    fn maps_that_make_no_sense_are_refused() {
        let cases = ["x", "\n", "1\n0\n9\n", "1\n-1\n1\n", "2\n4\n4\n0\n4\n", "300000\n", "1\n0\n"];
        let endless = "9".repeat(30);
        for bad in cases.into_iter().chain([endless.as_str()]) {
            let mut text = bad.as_bytes().to_vec();
            text.resize(BLOCK, 0);
            assert!(read(8, &text).is_err(), "{bad:?}");
        }
    }

    fn only(file: &File, size: u64) -> Range<u64> {
        let mut runs = runs(file, size);
        assert_eq!(runs.len(), 1, "{runs:?}");
        runs.remove(0)
    }

    #[test]
    fn holes_are_found() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(30 << 30).unwrap();
        assert_eq!(runs(&file, 30 << 30), []);
        file.write_all_at(b"x", (10 << 30) + 5).unwrap();
        assert_eq!(only(&file, 30 << 30), 10 << 30..(10 << 30) + ALIGNED);
        file.write_all_at(b"x", (30 << 30) - 1).unwrap();
        assert_eq!(runs(&file, 30 << 30).len(), 2);
        file.set_len(5000).unwrap();
        file.write_all_at(&[1; 5000], 0).unwrap();
        assert_eq!(only(&file, 5000), 0..5000);
        assert_eq!(only(&file, 4000), 0..4000);
    }
}

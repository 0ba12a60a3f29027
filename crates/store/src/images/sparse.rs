//! Sparse files in a tar archive: a map says where the content's runs belong; all else is zeros. In one
//! of two forms of GNU tar:
//!
//! - the old one, of snapshot files: the header (type `S`) and blocks that continue it hold the map;
//! - that of PAX, version 1.0, of layers and of what an agent packs: the map is a text of its own, a
//!   number a line, before the content.
//!
//! A map that is read was written by somebody else: its runs are in order, apart, within the file, and
//! as long as the content altogether, or it is refused. Runs consist of whole blocks of
//! [`SparseMap::ALIGNED`] bytes.

use std::io::{self, Read, Write};
use std::ops::Range;

use tar::{EntryType, GnuExtSparseHeader, GnuSparseHeader, Header};

/// Runs that one header names.
const IN_HEADER: usize = 4;
const IN_BLOCK: usize = 21;
/// Most runs of one file: a few MiB of map. A guest decides where its data is.
const RUNS_MAX: usize = 256 * 1024;
/// Blocks of so many runs, and of the end of the file.
const BLOCKS_MAX: usize = RUNS_MAX / IN_BLOCK + 1;

/// What a map as a text is filled up to.
const TEXT_BLOCK: usize = 512;

/// Where the content of a sparse file belongs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SparseMap {
    bytes: u64,
    runs: Vec<Range<u64>>,
    /// Shorter gaps between two runs are part of them.
    gap: u64,
}

impl SparseMap {
    /// A page of memory, and a block of the usual filesystems.
    pub(crate) const ALIGNED: u64 = 4096;

    /// Of a file with so many bytes, all zeros so far.
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes, runs: Vec::new(), gap: 1 }
    }

    pub(crate) fn runs(&self) -> &[Range<u64>] {
        &self.runs
    }

    /// How long the file is, holes included.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How long the content of the entry is.
    pub(crate) fn stored(&self) -> u64 {
        self.runs.iter().map(|run| run.end - run.start).sum()
    }

    /// Of a file that has data there, in rising order: whole blocks around it.
    pub(crate) fn around(bytes: u64, data: &[Range<u64>]) -> Self {
        let mut map = Self::new(bytes);
        let mut done = 0;
        for run in data {
            let start = (run.start - run.start % Self::ALIGNED).max(done);
            let end = run.end.checked_next_multiple_of(Self::ALIGNED).unwrap_or(bytes).min(bytes);
            if start < end {
                map.push(start..end);
                done = end;
            }
        }
        map
    }

    /// Whether there are no holes.
    pub(crate) fn is_whole(&self) -> bool {
        self.stored() == self.bytes
    }

    /// The next run. If there are too many, the smallest gaps are given up.
    pub(crate) fn push(&mut self, run: Range<u64>) {
        let gap = self.gap;
        match self.runs.last_mut() {
            Some(last) if run.start - last.end < gap => last.end = run.end,
            Some(_) | None => self.runs.push(run),
        }
        while self.runs.len() > RUNS_MAX {
            self.gap = (self.gap * 2).max(2 * Self::ALIGNED);
            let gap = self.gap;
            self.runs.dedup_by(|next, last| {
                let near = next.start - last.end < gap;
                if near {
                    last.end = next.end;
                }
                near
            });
        }
    }

    // === Writing ===

    /// The header of an entry, and the rest of its map. The name must fit a header.
    pub(crate) fn write(&self, name: &str, out: &mut impl Write) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_path(name)?;
        header.set_entry_type(EntryType::GNUSparse);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(self.stored());
        // A file that ends with a hole ends with an empty run.
        let hole = self.runs.last().is_none_or(|run| run.end < self.bytes);
        let end = hole.then_some(self.bytes..self.bytes);
        let mut runs = self.runs.iter().cloned().chain(end).peekable();
        let gnu = header.as_gnu_mut().ok_or_else(|| io::Error::other("it is no GNU header"))?;
        gnu.set_real_size(self.bytes);
        for (place, run) in gnu.sparse.iter_mut().zip(runs.by_ref().take(IN_HEADER)) {
            set(place, &run);
        }
        gnu.set_is_extended(runs.peek().is_some());
        header.set_cksum();
        out.write_all(header.as_bytes())?;
        while runs.peek().is_some() {
            let mut block = GnuExtSparseHeader::new();
            for (place, run) in block.sparse_mut().iter_mut().zip(runs.by_ref().take(IN_BLOCK)) {
                set(place, &run);
            }
            block.set_is_extended(runs.peek().is_some());
            out.write_all(block.as_bytes())?;
        }
        Ok(())
    }

    /// The map as a text, which comes before the content.
    pub(crate) fn text(&self) -> Vec<u8> {
        let hole = self.runs.last().is_none_or(|run| run.end < self.bytes);
        let end = hole.then_some(self.bytes..self.bytes);
        let mut text = format!("{}\n", self.runs.len() + usize::from(hole)).into_bytes();
        for run in self.runs.iter().cloned().chain(end) {
            text.extend_from_slice(format!("{}\n{}\n", run.start, run.end - run.start).as_bytes());
        }
        text.resize(text.len().next_multiple_of(TEXT_BLOCK), 0);
        text
    }

    // === Reading ===

    /// The map that comes as a text before the content of a file with so many bytes.
    pub(crate) fn read_text(bytes: u64, input: impl Read) -> io::Result<Self> {
        let mut map = Self::new(bytes);
        let mut numbers = Numbers { input, block: [0; TEXT_BLOCK], at: TEXT_BLOCK };
        let count = numbers.next()?;
        if count > RUNS_MAX as u64 + 1 {
            return Err(bad("its map is too long"));
        }
        for _ in 0..count {
            map.read_place(numbers.next()?, numbers.next()?)?;
        }
        Ok(map)
    }

    /// The map that begins in a header, and what its entry's content is long. Gives the bytes that
    /// it took from the input too.
    pub(crate) fn read(header: &Header, input: &mut impl Read) -> io::Result<(Self, u64)> {
        let gnu = header.as_gnu().ok_or_else(|| bad("its header is not of GNU tar"))?;
        let mut map = Self::new(gnu.real_size()?);
        map.read_places(&gnu.sparse)?;
        let (mut more, mut blocks) = (gnu.is_extended(), 0);
        while more {
            blocks += 1;
            if blocks > BLOCKS_MAX {
                return Err(bad("its map is too long"));
            }
            let mut block = GnuExtSparseHeader::new();
            input.read_exact(block.as_mut_bytes())?;
            map.read_places(block.sparse())?;
            more = block.is_extended();
        }
        if map.stored() != header.entry_size()? {
            return Err(bad("its map is that of another content"));
        }
        let taken = blocks * size_of::<GnuExtSparseHeader>();
        Ok((map, taken as u64))
    }

    fn read_places(&mut self, places: &[GnuSparseHeader]) -> io::Result<()> {
        let mut places = places.iter().filter(|place| !place.is_empty());
        places.try_for_each(|place| self.read_place(place.offset()?, place.length()?))
    }

    fn read_place(&mut self, start: u64, length: u64) -> io::Result<()> {
        let end = start.checked_add(length).filter(|end| *end <= self.bytes);
        let end = end.ok_or_else(|| bad("its map leads out of it"))?;
        if self.runs.last().is_some_and(|last| start < last.end) {
            return Err(bad("its map goes back"));
        }
        let whole = |at: u64| at.is_multiple_of(Self::ALIGNED);
        if length == 0 {
            return Ok(());
        }
        if !whole(start) || !(whole(end) || end == self.bytes) {
            return Err(bad("its map is not about whole blocks"));
        }
        self.runs.push(start..end);
        Ok(())
    }
}

/// Numbers in a text, one a line. The block with the last one is read to its end and no further.
struct Numbers<R> {
    input: R,
    block: [u8; TEXT_BLOCK],
    at: usize,
}

impl<R: Read> Numbers<R> {
    fn next(&mut self) -> io::Result<u64> {
        let mut number: Option<u64> = None;
        loop {
            if self.at == TEXT_BLOCK {
                self.input.read_exact(&mut self.block)?;
                self.at = 0;
            }
            let byte = self.block[self.at];
            self.at += 1;
            let digit = match (byte, number) {
                (b'\n', Some(number)) => return Ok(number),
                (b'0'..=b'9', _) => u64::from(byte - b'0'),
                (_, _) => return Err(bad("its map is no list of numbers")),
            };
            let more = number.unwrap_or(0).checked_mul(10).and_then(|ten| ten.checked_add(digit));
            number = Some(more.ok_or_else(|| bad("its map leads out of it"))?);
        }
    }
}

fn set(place: &mut GnuSparseHeader, run: &Range<u64>) {
    place.set_offset(run.start);
    place.set_length(run.end - run.start);
}

fn bad(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    const BLOCK: u64 = SparseMap::ALIGNED;

    fn map(bytes: u64, runs: &[Range<u64>]) -> SparseMap {
        let mut map = SparseMap::new(bytes);
        runs.iter().for_each(|run| map.push(run.clone()));
        map
    }

    /// As it is, whether it may be so or not.
    fn raw(bytes: u64, runs: &[Range<u64>]) -> SparseMap {
        SparseMap { bytes, runs: runs.to_vec(), gap: 1 }
    }

    fn again(map: &SparseMap) -> io::Result<SparseMap> {
        let mut bytes = Vec::new();
        map.write("disk", &mut bytes)?;
        let mut header = Header::new_old();
        header.as_mut_bytes().copy_from_slice(&bytes[..512]);
        let mut rest = Cursor::new(&bytes[512..]);
        let (found, taken) = SparseMap::read(&header, &mut rest)?;
        assert_eq!(taken, rest.get_ref().len() as u64);
        let mut text = Cursor::new(map.text());
        assert_eq!(SparseMap::read_text(map.bytes, &mut text)?.runs, found.runs);
        assert_eq!(text.position(), text.get_ref().len() as u64);
        Ok(found)
    }

    #[test]
    fn a_map_of_any_length_is_read_as_it_was_written() {
        let bytes = (10 << 30) + 5;
        for count in [0, 1, 3, 4, 5, 24, 25, 26, 1000] {
            let mut runs: Vec<_> = (0..count).map(|n| 3 * n * BLOCK..(3 * n + 1) * BLOCK).collect();
            let found = again(&map(bytes, &runs)).unwrap();
            assert_eq!((found.bytes(), found.runs()), (bytes, runs.as_slice()));
            runs.push((10 << 30)..bytes);
            assert_eq!(again(&map(bytes, &runs)).unwrap().runs(), runs);
        }
    }

    #[test]
    fn runs_that_touch_are_one() {
        let found = map(1 << 20, &[0..BLOCK, BLOCK..2 * BLOCK, 4 * BLOCK..5 * BLOCK]);
        assert_eq!(found.runs(), [0..2 * BLOCK, 4 * BLOCK..5 * BLOCK]);
        assert_eq!(found.stored(), 3 * BLOCK);
    }

    #[test]
    fn blocks_around_data_are_whole_and_apart() {
        let data = [
            0..1,
            5..9,
            2 * BLOCK + 1..3 * BLOCK,
            3 * BLOCK..3 * BLOCK + 9,
            9 * BLOCK..10 * BLOCK - 7,
        ];
        let found = SparseMap::around(10 * BLOCK - 5, &data);
        assert_eq!(found.runs(), [0..BLOCK, 2 * BLOCK..4 * BLOCK, 9 * BLOCK..10 * BLOCK - 5]);
        assert!(!found.is_whole());
        assert!(SparseMap::around(0, &[]).is_whole());
        assert!(SparseMap::around(5, &[0..3, 3..5]).is_whole());
        assert_eq!(SparseMap::around(u64::MAX, &[0..1, u64::MAX - 1..u64::MAX]).runs().len(), 2);
    }

    #[test]
    fn texts_that_are_no_map_are_refused() {
        let cases = [
            ("", "fill whole buffer"),
            ("x\n", "no list of numbers"),
            ("\n", "no list of numbers"),
            ("1\n-1\n1\n", "no list of numbers"),
            ("1\n0\n", "no list of numbers"),
            ("99999999999999999999\n", "leads out"),
            ("1000000\n", "too long"),
            ("1\n0\n99999\n", "leads out"),
            ("2\n0\n4096\n0\n4096\n", "goes back"),
        ];
        for (text, says) in cases {
            let mut bytes = text.as_bytes().to_vec();
            bytes.resize(bytes.len().next_multiple_of(TEXT_BLOCK), 0);
            let error = SparseMap::read_text(4 * BLOCK, &bytes[..]).unwrap_err();
            assert!(error.to_string().contains(says), "{text:?}: {error}");
        }
    }

    #[test]
    fn too_many_runs_become_fewer_and_longer_and_lose_nothing() {
        let count = 2 * RUNS_MAX as u64 + 7;
        let mut map = SparseMap::new(2 * count * BLOCK);
        (0..count).for_each(|n| map.push(2 * n * BLOCK..(2 * n + 1) * BLOCK));
        assert!(map.runs().len() <= RUNS_MAX);
        let mut runs = map.runs().iter();
        let mut run = runs.next().unwrap();
        for start in (0..count).map(|n| 2 * n * BLOCK) {
            while run.end <= start {
                run = runs.next().unwrap();
            }
            assert!(run.start <= start && start + BLOCK <= run.end, "{start}");
        }
        assert_eq!(again(&map).unwrap().runs(), map.runs());
    }

    #[test]
    fn maps_made_to_do_harm_are_refused() {
        let cases = [
            (1 << 20, vec![0..2 * BLOCK, BLOCK..3 * BLOCK], "goes back"),
            (1 << 20, vec![8 * BLOCK..9 * BLOCK, 0..BLOCK], "goes back"),
            (1 << 20, vec![0..BLOCK, 2 * BLOCK..2 << 20], "leads out"),
            (1 << 20, vec![0..BLOCK, u64::MAX - 4095..u64::MAX], "leads out"),
            (1 << 20, vec![0..BLOCK, BLOCK + 512..2 * BLOCK], "whole blocks"),
            (1 << 20, vec![0..100, BLOCK..2 * BLOCK], "whole blocks"),
        ];
        for (bytes, runs, says) in cases {
            let error = again(&raw(bytes, &runs)).unwrap_err();
            assert!(error.to_string().contains(says), "{runs:?}: {error}");
        }
        let many: Vec<_> = (0..RUNS_MAX as u64 + 50).map(|n| n * BLOCK..(n + 1) * BLOCK).collect();
        let error = again(&raw(1 << 40, &many)).unwrap_err();
        assert!(error.to_string().contains("too long"), "{error}");
    }

    #[test]
    fn a_map_of_another_content_or_without_an_end_is_refused() {
        let mut bytes = Vec::new();
        map(1 << 20, &[0..BLOCK, 2 * BLOCK..3 * BLOCK]).write("disk", &mut bytes).unwrap();
        let mut header = Header::new_old();
        header.as_mut_bytes().copy_from_slice(&bytes);
        header.set_size(3 * BLOCK);
        let error = SparseMap::read(&header, &mut io::empty()).unwrap_err();
        assert!(error.to_string().contains("another content"), "{error}");
        header.as_gnu_mut().unwrap().set_is_extended(true);
        SparseMap::read(&header, &mut io::empty()).unwrap_err();
        // Blocks that say nothing but that there is another one.
        let mut block = GnuExtSparseHeader::new();
        block.set_is_extended(true);
        let block = *block.as_bytes();
        let mut endless = Cursor::new(block.repeat(BLOCKS_MAX + 1));
        let error = SparseMap::read(&header, &mut endless).unwrap_err();
        assert!(error.to_string().contains("too long"), "{error}");
    }
}

//! `delta`: the pages that differ from `memory`.
//!
//! ```text
//!   header      one page, see below
//!   pages       those that are not zero, one after the other
//!   index       runs of pages in ascending order, 16 bytes each: first page, count; the highest bit
//!               of the count says that they are zero, and that no bytes of theirs are in `pages`
//! ```
//!
//! The index is at the end because what is zero is known when all was read, and the header is written
//! after everything: a torn file has none. Both are covered by a checksum; the pages are as long as
//! the index says, and their bytes are the business of who keeps saves.
//!
//! A delta is read with distrust: it may come from another installation.

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, BufWriter, IntoInnerError, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};

use super::Flaw;
use super::id::{ID_BYTES, UnitId};
use super::seal::part;
use super::sparse::{data_extents, within};
use crate::memory::{GuestMemory, PAGE, Piece, Run};

const MAGIC: &[u8; 8] = b"torpor\x00D";
const FORMAT: u32 = 1;
/// What the checksum is of, in the header; the index is added.
pub(super) const SUMMED: usize = 80;
pub(super) const USED: usize = SUMMED + 32;
/// Bytes of a run in the index.
const RUN_BYTES: u64 = 16;
const ZERO: u64 = 1 << 63;
/// Bytes of pages that are read or written at a time.
const CHUNK: usize = 1024 * 1024;
/// Runs of a delta that is read: every other page of 128 GiB. An index in memory has 24 bytes each.
const RUNS_MAX: u64 = 16 * 1024 * 1024;

/// The largest delta that is worth it: reviving copies it into memory first, at about a gigabyte in a
/// second, and what was copied no fork shares with another.
const DELTA_MAX: u64 = 256 * 1024 * 1024;
/// A delta that is always worth it: copying it in takes no longer than starting QEMU does.
const DELTA_SMALL: u64 = 48 * 1024 * 1024;

/// Whether to write a delta instead of a full memory file. `delta_bytes`: what was written since;
/// `base_bytes`: what is in the file below ([`super::data_bytes`]).
///
/// A full file costs a copy of all that is below, now, and hashing it; a delta costs copying its
/// pages at each revival, private memory in each fork, and is written again as a whole at the next
/// save. So it must be small, or else clearly less than what is below it.
pub fn worth_a_delta(delta_bytes: u64, base_bytes: u64) -> bool {
    delta_bytes <= DELTA_MAX.min((base_bytes / 4).max(DELTA_SMALL))
}

/// What became of the pages that were written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeltaSize {
    /// Pages in the file.
    pub data_pages: u64,
    /// Pages that became zero.
    pub zero_pages: u64,
    /// Pages that are zero, as they are below: not in the delta.
    pub same_pages: u64,
}

/// Writes the pages `runs` of `memory`, which maps `base`, to an empty file.
pub fn write_delta(
    memory: &GuestMemory,
    runs: &[Run],
    base: &File,
    (unit, base_unit): (&UnitId, &UnitId),
    to: &File,
) -> io::Result<DeltaSize> {
    let below = data_extents(base, memory.bytes())?;
    let mut size = DeltaSize::default();
    let mut index = Index::default();
    // Runs may be of a page each.
    let mut pages = BufWriter::with_capacity(CHUNK, to);
    pages.seek(SeekFrom::Start(PAGE))?;
    memory.copy_out(runs, |piece| match piece {
        Piece::Data { first_page, bytes } => {
            pages.write_all(bytes)?;
            let count = bytes.len() as u64 / PAGE;
            size.data_pages += count;
            index.push(Run { first_page, count }, false);
            Ok(())
        }
        Piece::Zero(run) => {
            size.same_pages += run.count;
            for part in within(run, &below) {
                size.same_pages -= part.count;
                size.zero_pages += part.count;
                index.push(part, true);
            }
            Ok(())
        }
    })?;
    let entries = index.bytes();
    pages.write_all(&entries)?;
    pages.into_inner().map_err(IntoInnerError::into_error)?;
    let heading = Heading {
        unit: *unit,
        base: *base_unit,
        memory_bytes: memory.bytes(),
        runs: index.runs.len() as u64,
        data_pages: size.data_pages,
    };
    to.write_all_at(&heading.block(&entries), 0)?;
    Ok(size)
}

/// Runs, and whether their pages are zero.
#[derive(Debug, Default)]
struct Index {
    runs: Vec<(Run, bool)>,
}

impl Index {
    /// Behind all that is in it.
    fn push(&mut self, run: Run, zero: bool) {
        match self.runs.last_mut() {
            Some((last, same)) if *same == zero && last.end() == run.first_page => {
                last.count += run.count;
            }
            Some(_) | None => self.runs.push((run, zero)),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let entry = |(run, zero): &(Run, bool)| {
            let count = run.count | if *zero { ZERO } else { 0 };
            [run.first_page.to_le_bytes(), count.to_le_bytes()].concat()
        };
        self.runs.iter().flat_map(entry).collect()
    }

    /// Every run must be behind the one before it and below `pages`.
    fn parse(bytes: &[u8], pages: u64) -> Result<Self, Flaw> {
        let mut runs = Vec::with_capacity(bytes.len() / 16);
        let mut free = 0;
        for entry in bytes.as_chunks::<16>().0 {
            let first_page = u64::from_le_bytes(part(entry, 0));
            let count = u64::from_le_bytes(part(entry, 8));
            let (count, zero) = (count & !ZERO, count & ZERO != 0);
            let end = first_page.checked_add(count);
            let Some(end) = end.filter(|end| count > 0 && first_page >= free && *end <= pages)
            else {
                let why = format!("{count} pages at {first_page} can't be in it");
                return Err(Flaw::Damaged(why));
            };
            free = end;
            runs.push((Run { first_page, count }, zero));
        }
        Ok(Self { runs })
    }

    fn data_pages(&self) -> u64 {
        self.runs.iter().filter(|(_, zero)| !zero).map(|(run, _)| run.count).sum()
    }
}

/// The header without its checksum.
#[derive(Debug)]
struct Heading {
    unit: UnitId,
    base: UnitId,
    memory_bytes: u64,
    runs: u64,
    data_pages: u64,
}

impl Heading {
    fn block(&self, index: &[u8]) -> [u8; PAGE as usize] {
        let mut block = [0; PAGE as usize];
        block[..8].copy_from_slice(MAGIC);
        block[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        block[16..32].copy_from_slice(self.unit.bytes());
        block[32..48].copy_from_slice(self.base.bytes());
        block[48..56].copy_from_slice(&self.memory_bytes.to_le_bytes());
        block[56..64].copy_from_slice(&self.runs.to_le_bytes());
        block[64..72].copy_from_slice(&self.data_pages.to_le_bytes());
        let sum = sum(&block, index);
        block[SUMMED..USED].copy_from_slice(sum.as_bytes());
        block
    }

    fn parse(block: &[u8; USED]) -> Result<Self, Flaw> {
        if block[..8] != *MAGIC {
            return Err(Flaw::Damaged("it has no header".to_owned()));
        }
        let format = u32::from_le_bytes(part(block, 8));
        if format > FORMAT {
            return Err(Flaw::Newer { format, known: FORMAT });
        }
        let number = |from| u64::from_le_bytes(part(block, from));
        Ok(Self {
            unit: UnitId::from_bytes(part::<ID_BYTES>(block, 16)),
            base: UnitId::from_bytes(part::<ID_BYTES>(block, 32)),
            memory_bytes: number(48),
            runs: number(56),
            data_pages: number(64),
        })
    }

    /// Where the index begins, if a file of this size can have such a header.
    fn index_at(&self, size: u64) -> Option<u64> {
        let index_at = self.data_pages.checked_add(1)?.checked_mul(PAGE)?;
        let end = index_at.checked_add(self.runs.checked_mul(RUN_BYTES)?)?;
        (self.runs <= RUNS_MAX && end == size).then_some(index_at)
    }
}

pub(super) fn sum(header: &[u8], index: &[u8]) -> blake3::Hash {
    blake3::Hasher::new().update(&header[..SUMMED]).update(index).finalize()
}

/// A delta whose header and index are as they should be.
#[derive(Debug)]
pub struct Delta {
    file: File,
    memory_bytes: u64,
    index: Index,
}

impl Delta {
    /// Reads header and index, and refuses what is damaged or of other units.
    pub(super) fn open(
        file: File,
        unit: &UnitId,
        base: &UnitId,
        memory_bytes: u64,
    ) -> Result<Self, Flaw> {
        let size = file.metadata()?.size();
        let mut block = [0; USED];
        if size < PAGE {
            return Err(Flaw::Damaged(format!("it has {size} bytes")));
        }
        file.read_exact_at(&mut block, 0)?;
        let heading = Heading::parse(&block)?;
        let Some(index_at) = heading.index_at(size) else {
            return Err(Flaw::Damaged(format!("{size} bytes are not what its header says")));
        };
        let mut entries = vec![0; usize::try_from(size - index_at).map_err(io::Error::other)?];
        file.read_exact_at(&mut entries, index_at)?;
        if sum(&block, &entries).as_bytes() != &block[SUMMED..] {
            return Err(Flaw::Damaged("header and index have another checksum".to_owned()));
        }
        if heading.unit != *unit || heading.base != *base {
            return Err(Flaw::Mixed(format!(
                "it belongs to unit {} on {}, not to {unit} on {base}",
                heading.unit, heading.base
            )));
        }
        let index = Index::parse(&entries, memory_bytes / PAGE)?;
        if heading.memory_bytes != memory_bytes || heading.data_pages != index.data_pages() {
            return Err(Flaw::Damaged("its header does not fit its index".to_owned()));
        }
        Ok(Self { file, memory_bytes, index })
    }

    /// The memory that it is of.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Gives the content of its pages to `take`, in order.
    pub fn read(&self, mut take: impl FnMut(Piece<'_>) -> io::Result<()>) -> io::Result<()> {
        // Runs may be of a page each: the file is read in large parts whatever they are.
        let mut buffer = vec![0; CHUNK];
        let (mut window, mut at) = (0..0, PAGE);
        let mut unread = self.index.data_pages() * PAGE;
        for (run, zero) in &self.index.runs {
            if *zero {
                take(Piece::Zero(*run))?;
                continue;
            }
            let (mut page, mut left) = (run.first_page, usize_of(run.count * PAGE)?);
            while left > 0 {
                if window.is_empty() {
                    window = 0..usize_of(unread)?.min(CHUNK);
                    self.file.read_exact_at(&mut buffer[window.clone()], at)?;
                    (at, unread) = (at + window.len() as u64, unread - window.len() as u64);
                }
                let count = left.min(window.len());
                let bytes = &buffer[window.start..window.start + count];
                take(Piece::Data { first_page: page, bytes })?;
                (window.start, left) = (window.start + count, left - count);
                page += count as u64 / PAGE;
            }
        }
        Ok(())
    }
}

fn usize_of(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(io::Error::other)
}

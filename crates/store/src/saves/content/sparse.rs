//! The hash of a file that is mostly zeros.
//!
//! ```text
//!  part: 4 MiB   = BLAKE3( its blocks of 4 KiB that are not all zeros ‖ map: a bit for each block )
//!  file          = BLAKE3( length ‖ (index, hash) of each part that has such blocks )
//! ```
//!
//! - A hole and zeros that were written are the same; nothing else is: the map tells where each block
//!   belongs, and the length where the last one ends.
//! - Both hashes have a context of their own, so none is ever one of another kind.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use blake3::{Hash, Hasher};

use super::{BLOCK, PART, data_in, on_all_cores, runs, visit_written};

/// Blocks of a part.
const BLOCKS: usize = PART as usize / BLOCK;
/// Never to be changed: a hash that is computed otherwise needs another name.
const PART_CONTEXT: &str = "torpor sparse file, part, version 1";
const FILE_CONTEXT: &str = "torpor sparse file, whole, version 1";

/// The hash of a part in the making.
struct Part {
    index: u64,
    hasher: Hasher,
    map: [u8; BLOCKS / 8],
}

impl Part {
    fn new(index: u64) -> Self {
        let hasher = Hasher::new_derive_key(PART_CONTEXT);
        Self { index, hasher, map: [0; BLOCKS / 8] }
    }

    /// A run of blocks that are not all zeros; `at` counts from the part's begin.
    fn add(&mut self, at: usize, run: &[u8]) {
        for block in at / BLOCK..(at + run.len()).div_ceil(BLOCK) {
            self.map[block / 8] |= 1 << (block % 8);
        }
        self.hasher.update(run);
    }

    /// None if there is nothing in it.
    fn finish(mut self) -> Option<(u64, Hash)> {
        if self.map.iter().all(|byte| *byte == 0) {
            return None;
        }
        self.hasher.update(&self.map);
        Some((self.index, self.hasher.finalize()))
    }
}

/// Takes a content in order, and leaves out what is zeros.
pub(crate) struct SparseHasher {
    whole: Hasher,
    part: Part,
}

impl SparseHasher {
    pub(super) fn new(bytes: u64) -> Self {
        let mut whole = Hasher::new_derive_key(FILE_CONTEXT);
        whole.update(&bytes.to_le_bytes());
        Self { whole, part: Part::new(0) }
    }

    pub(super) fn feed(&mut self, mut at: u64, mut piece: &[u8]) {
        debug_assert!(at.is_multiple_of(BLOCK as u64), "a piece begins with a block");
        while !piece.is_empty() {
            let (index, offset) = (at / PART, at % PART);
            if index != self.part.index {
                let done = std::mem::replace(&mut self.part, Part::new(index));
                self.add(done.finish());
            }
            let most = usize::try_from(PART - offset).unwrap_or(usize::MAX).min(piece.len());
            let (here, rest) = piece.split_at(most);
            let offset = usize::try_from(offset).unwrap_or(usize::MAX);
            for (within, run) in runs(here) {
                self.part.add(offset + within, run);
            }
            (at, piece) = (at + most as u64, rest);
        }
    }

    fn add(&mut self, part: Option<(u64, Hash)>) {
        if let Some((index, hash)) = part {
            self.whole.update(&index.to_le_bytes());
            self.whole.update(hash.as_bytes());
        }
    }

    pub(super) fn finish(mut self) -> Hash {
        let last = std::mem::replace(&mut self.part, Part::new(0));
        self.add(last.finish());
        self.whole.finalize()
    }
}

/// The hash of a file with so many bytes.
pub(super) fn hash_bytes(file: &File, bytes: u64) -> io::Result<Hash> {
    let indexes = parts_with_data(file, bytes)?;
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        while let Some(index) = indexes.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.extend(hash_part(file, *index, bytes)?);
        }
        Ok(done)
    };
    let mut parts = on_all_cores(indexes.len() as u64, worker)?;
    parts.sort_unstable_by_key(|(index, _)| *index);
    let mut whole = SparseHasher::new(bytes);
    parts.into_iter().for_each(|part| whole.add(Some(part)));
    Ok(whole.finish())
}

/// Parts that are not one hole.
fn parts_with_data(file: &File, bytes: u64) -> io::Result<Vec<u64>> {
    let (mut found, mut at) = (Vec::new(), 0);
    while at < bytes {
        let data = data_in(file, at, bytes)?;
        if data.is_empty() {
            break;
        }
        let (first, last) = (data.start / PART, (data.end - 1) / PART);
        found.extend(first..=last);
        at = (last + 1) * PART;
    }
    Ok(found)
}

fn hash_part(file: &File, index: u64, bytes: u64) -> io::Result<Option<(u64, Hash)>> {
    let mut part = Part::new(index);
    let (from, until) = (index * PART, ((index + 1) * PART).min(bytes));
    visit_written(file, from, until, |at, run| {
        part.add(usize::try_from(at - from).unwrap_or(usize::MAX), run);
    })?;
    Ok(part.finish())
}

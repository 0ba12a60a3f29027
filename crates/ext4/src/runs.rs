//! Where the blocks of a file are, in order.
//!
//! Files have a tree of extents, whose root is in the inode:
//!
//! ```text
//!   header: mark, entries, room, depth
//!   entries of depth 0: first block of the file, how many, where they are
//!   entries of others:  first block of the file, block with the next header and entries
//! ```
//!
//! Old ones have a table instead: twelve blocks, then a block with blocks, one with blocks of blocks,
//! and one with blocks of blocks of blocks. Zero is a hole.

use crate::error::{Ext4Error, Result, damaged};
use crate::filesystem::{Budget, Filesystem};
use crate::inode::Inode;
use crate::number::{u16_at, u32_at, wide};
use crate::source::ReadAt;

const MAGIC: u16 = 0xF30A;
const HEADER: usize = 12;
const ENTRY: usize = 12;
/// The kernel's own limit: more is needed by no file.
const DEPTH_MAX: u16 = 5;
/// Longer ones are this much shorter and were never written.
const WRITTEN_MAX: u16 = 32768;
const DIRECT: usize = 12;

/// Blocks of a file that are side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// Where they are in the file.
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// Where they are on the disk. `None`: they were set aside and read as zeros.
    pub(crate) at: Option<u64>,
}

/// Shows all runs of an inode, in rising order; what lies between them is a hole. There may be some
/// beyond the end of the file.
pub(crate) fn each<D: ReadAt, E: From<Ext4Error>>(
    filesystem: &Filesystem<D>,
    inode: &Inode,
    budget: &mut Budget,
    see: &mut dyn FnMut(Run) -> Result<(), E>,
) -> Result<(), E> {
    let mut walk = Walk { filesystem, number: inode.number, budget, see, next: 0 };
    if inode.has_extents { walk.extents(inode.blocks(), None) } else { walk.table(inode.blocks()) }
}

struct Walk<'w, D, E> {
    filesystem: &'w Filesystem<D>,
    number: u32,
    budget: &'w mut Budget,
    see: &'w mut dyn FnMut(Run) -> Result<(), E>,
    /// The first block of the file that was not seen yet.
    next: u64,
}

impl<D: ReadAt, E: From<Ext4Error>> Walk<'_, D, E> {
    /// Goes through a node of a tree. Below the root its depth is known.
    fn extents(&mut self, node: &[u8], depth: Option<u16>) -> Result<(), E> {
        let (entries, found) = (usize::from(u16_at(node, 2)), u16_at(node, 6));
        let fits = entries <= (node.len() - HEADER) / ENTRY;
        let expected = depth.map_or(found <= DEPTH_MAX, |depth| depth == found);
        if u16_at(node, 0) != MAGIC || !fits || !expected {
            return Err(self.damaged("a tree that is none").into());
        }
        let entries = node[HEADER..].chunks_exact(ENTRY).take(entries);
        if found == 0 {
            return entries.into_iter().try_for_each(|entry| self.extent(entry));
        }
        let mut below = self.filesystem.empty_block();
        for entry in entries {
            let at = wide(u32_at(entry, 4), u32::from(u16_at(entry, 8)));
            self.budget.take(1)?;
            self.filesystem.block(at, &mut below)?;
            self.extents(&below, Some(found - 1))?;
        }
        Ok(())
    }

    fn extent(&mut self, entry: &[u8]) -> Result<(), E> {
        let length = u16_at(entry, 4);
        let at = wide(u32_at(entry, 8), u32::from(u16_at(entry, 6)));
        let written = length <= WRITTEN_MAX;
        let count = u64::from(if written { length } else { length - WRITTEN_MAX });
        self.run(u64::from(u32_at(entry, 0)), count, at, written)
    }

    fn table(&mut self, blocks: &[u8]) -> Result<(), E> {
        for (index, place) in blocks.chunks_exact(4).enumerate() {
            self.place(u32_at(place, 0), (index + 1).saturating_sub(DIRECT))?;
        }
        Ok(())
    }

    /// Goes through what a place in a table leads to, through `levels` more tables.
    fn place(&mut self, at: u32, levels: usize) -> Result<(), E> {
        let per_block = self.filesystem.about.block_bytes as u64 / 4;
        let at = u64::from(at);
        match (at, levels) {
            // No overflow: at most a thousand to the power of three, a few times.
            (0, _) => self.next += (0..levels).fold(1, |blocks, _| blocks * per_block),
            (_, 0) => self.run(self.next, 1, at, true)?,
            (_, _) => {
                self.budget.take(1)?;
                let mut table = self.filesystem.empty_block();
                self.filesystem.block(at, &mut table)?;
                for place in table.chunks_exact(4) {
                    self.place(u32_at(place, 0), levels - 1)?;
                }
            }
        }
        Ok(())
    }

    fn run(&mut self, first: u64, count: u64, at: u64, written: bool) -> Result<(), E> {
        if count == 0 || first < self.next {
            return Err(self.damaged("blocks that are not in order").into());
        }
        self.budget.take(count)?;
        if written {
            self.filesystem.check_blocks(at, count)?;
        }
        self.next = first + count;
        (self.see)(Run { first, count, at: written.then_some(at) })
    }

    fn damaged(&self, what: &str) -> Ext4Error {
        damaged(format!("inode {} has {what}", self.number))
    }
}

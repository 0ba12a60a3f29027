//! What a filesystem says about itself, checked.

use crate::error::{Ext4Error, Result, damaged};
use crate::number::{u16_at, u32_at, wide};

/// Where it is, whatever the size of blocks is.
pub(crate) const AT: u64 = 1024;
pub(crate) const BYTES: usize = 1024;

const MAGIC: u16 = 0xEF53;
/// Features are in use; the only other one is from 1993.
const REVISION: u32 = 1;
/// Larger blocks than pages are something that few kernels mount.
const BLOCK_SHIFT_MAX: u32 = 2;
const INODE_BYTES: std::ops::RangeInclusive<u16> = 128..=1024;
const DESCRIPTOR_BYTES: u16 = 32;
const WIDE_DESCRIPTOR_BYTES: std::ops::RangeInclusive<u16> = 64..=1024;
/// Smaller groups are made by nobody, and there would be many of them.
const GROUP_BLOCKS_MIN: u32 = 256;

const WIDE: u32 = 0x80;
const LARGE_DIRECTORIES: u32 = 0x4000;
/// Incompatible features that change nothing here, or are dealt with: types in names, extents, 64
/// bits, groups packed together, a seed for checksums, large directories.
const READ: u32 = 0x2 | 0x40 | WIDE | 0x200 | 0x2000 | LARGE_DIRECTORIES;
/// Those that others have, by name.
const REFUSED: [(u32, &str); 9] = [
    (0x4, "a journal that was not written back"),
    (0x1, "compressed files"),
    (0x8, "a journal instead of files"),
    (0x10, "its group descriptors spread over the disk (meta_bg)"),
    (0x100, "protection against several mounts (mmp)"),
    (0x400, "attributes in inodes of their own (ea_inode)"),
    (0x8000, "files inside of inodes (inline_data)"),
    (0x10000, "encrypted files"),
    (0x20000, "names without case (casefold)"),
];
/// Of the features that others may read without knowing them, one that changes what is counted.
const CLUSTERS: u32 = 0x200;

/// The numbers that are needed to find anything.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Superblock {
    pub(crate) block_bytes: usize,
    pub(crate) blocks: u64,
    pub(crate) first_block: u64,
    pub(crate) blocks_per_group: u32,
    pub(crate) inodes: u32,
    pub(crate) inodes_per_group: u32,
    pub(crate) inode_bytes: usize,
    pub(crate) descriptor_bytes: usize,
    /// Descriptors have upper halves.
    pub(crate) wide: bool,
    pub(crate) large_directories: bool,
}

impl Superblock {
    pub(crate) fn parse(bytes: &[u8; BYTES]) -> Result<Self> {
        if u16_at(bytes, 0x38) != MAGIC {
            return Err(Ext4Error::NoFilesystem);
        }
        let incompatible = features(bytes)?;
        let wide_numbers = incompatible & WIDE != 0;
        let shift = u32_at(bytes, 0x18);
        if shift > BLOCK_SHIFT_MAX {
            return Err(Ext4Error::Unsupported("blocks larger than 4096 bytes".to_owned()));
        }
        let descriptor_bytes = match wide_numbers {
            true => u16_at(bytes, 0xFE),
            false => DESCRIPTOR_BYTES,
        };
        let found = Self {
            block_bytes: 1024 << shift,
            blocks: wide(u32_at(bytes, 0x4), if wide_numbers { u32_at(bytes, 0x150) } else { 0 }),
            first_block: u64::from(u32_at(bytes, 0x14)),
            blocks_per_group: u32_at(bytes, 0x20),
            inodes: u32_at(bytes, 0x0),
            inodes_per_group: u32_at(bytes, 0x28),
            inode_bytes: usize::from(u16_at(bytes, 0x58)),
            descriptor_bytes: usize::from(descriptor_bytes),
            wide: wide_numbers,
            large_directories: incompatible & LARGE_DIRECTORIES != 0,
        };
        if wide_numbers && !WIDE_DESCRIPTOR_BYTES.contains(&descriptor_bytes) {
            return Err(damaged(format!("its descriptors have {descriptor_bytes} bytes")));
        }
        found.check()
    }

    fn check(self) -> Result<Self> {
        // A group is what one block of bits is about.
        let most = 8 * self.block_bytes as u32;
        let inode_bytes = u16::try_from(self.inode_bytes).unwrap_or(u16::MAX);
        if !INODE_BYTES.contains(&inode_bytes) || !inode_bytes.is_power_of_two() {
            return Err(damaged(format!("its inodes have {} bytes", self.inode_bytes)));
        }
        if !self.descriptor_bytes.is_power_of_two() {
            return Err(damaged(format!("its descriptors have {} bytes", self.descriptor_bytes)));
        }
        if self.first_block != u64::from(self.block_bytes == 1024) {
            return Err(damaged(format!("its first block is {}", self.first_block)));
        }
        if !(GROUP_BLOCKS_MIN..=most).contains(&self.blocks_per_group)
            || !(1..=most).contains(&self.inodes_per_group)
        {
            return Err(damaged("its groups have an impossible size"));
        }
        // In bytes it must be a number that fits.
        if self.blocks <= self.first_block || self.blocks > u64::MAX / (2 * self.block_bytes as u64)
        {
            return Err(damaged(format!("it has {} blocks", self.blocks)));
        }
        Ok(self)
    }

    /// In how many groups so many blocks are.
    pub(crate) fn groups(&self, blocks: u64) -> u64 {
        blocks.saturating_sub(self.first_block).div_ceil(u64::from(self.blocks_per_group))
    }
}

/// The incompatible features, if all of them are ones that can be read.
fn features(bytes: &[u8; BYTES]) -> Result<u32> {
    let revision = u32_at(bytes, 0x4C);
    if revision != REVISION {
        return Err(Ext4Error::Unsupported(format!("revision {revision}")));
    }
    let incompatible = u32_at(bytes, 0x60);
    for (feature, name) in REFUSED {
        if incompatible & feature != 0 {
            return Err(Ext4Error::Unsupported(name.to_owned()));
        }
    }
    if incompatible & !READ != 0 {
        let unknown = incompatible & !READ;
        return Err(Ext4Error::Unsupported(format!("unknown features ({unknown:#x})")));
    }
    if u32_at(bytes, 0x64) & CLUSTERS != 0 {
        return Err(Ext4Error::Unsupported("clusters of blocks (bigalloc)".to_owned()));
    }
    Ok(incompatible)
}

//! A filesystem: blocks, descriptors and inodes by their number.

use crate::error::{Ext4Error, Result, damaged};
use crate::inode::Inode;
use crate::number::{u16_at, u32_at, wide};
use crate::source::ReadAt;
use crate::superblock::{self, Superblock};

/// Flags of a group follow the lower halves; all that is needed is before them.
const DESCRIPTOR_NEEDED: usize = 0x40;

/// An ext4 filesystem on a disk that nobody trusts.
#[derive(Debug)]
pub struct Filesystem<D> {
    disk: D,
    pub(crate) about: Superblock,
    /// Blocks that the disk really has.
    pub(crate) present: u64,
}

/// How many blocks may still be claimed. No two files share a block, so all files together have no
/// more of them than the disk; on a disk where they do, this is what ends the walk.
#[derive(Debug)]
pub(crate) struct Budget {
    left: u64,
}

impl Budget {
    pub(crate) fn take(&mut self, blocks: u64) -> Result<()> {
        self.left = self
            .left
            .checked_sub(blocks)
            .ok_or_else(|| damaged("its files have more blocks than the disk"))?;
        Ok(())
    }
}

impl<D: ReadAt> Filesystem<D> {
    /// Opens the filesystem that fills the disk from its first byte. A disk that is shorter than its
    /// filesystem can be read as far as it goes.
    pub fn open(disk: D) -> Result<Self> {
        let mut bytes = [0; superblock::BYTES];
        let at = superblock::AT;
        let failed = |source| Ext4Error::Io { at, source };
        let size = disk.size().map_err(failed)?;
        if size < at + superblock::BYTES as u64 {
            return Err(Ext4Error::NoFilesystem);
        }
        disk.read_exact_at(&mut bytes, at).map_err(failed)?;
        let about = Superblock::parse(&bytes)?;
        let present = about.blocks.min(size / about.block_bytes as u64);
        Ok(Self { disk, about, present })
    }

    /// What is in use, with the filesystem's own tables, as the disk says: a guest that runs writes
    /// it down only now and then.
    pub fn used_bytes(&self) -> Result<u64> {
        let mut free = 0;
        for group in 0..self.about.groups(self.present) {
            let descriptor = self.descriptor(group)?;
            let high = if self.about.wide { u16_at(&descriptor, 0x2C) } else { 0 };
            let here = u32::from(u16_at(&descriptor, 0xC)) | u32::from(high) << 16;
            free += u64::from(here.min(self.about.blocks_per_group));
        }
        Ok(self.present.saturating_sub(free) * self.about.block_bytes as u64)
    }

    pub(crate) fn budget(&self) -> Budget {
        Budget { left: self.present }
    }

    pub(crate) fn read(&self, at: u64, buffer: &mut [u8]) -> Result<()> {
        self.disk.read_exact_at(buffer, at).map_err(|source| Ext4Error::Io { at, source })
    }

    /// Reads a block; the buffer has the size of one.
    pub(crate) fn block(&self, number: u64, buffer: &mut [u8]) -> Result<()> {
        self.check_blocks(number, 1)?;
        self.read(number * self.about.block_bytes as u64, buffer)
    }

    /// Refuses blocks that can't be a file's, or that the disk does not have.
    pub(crate) fn check_blocks(&self, first: u64, count: u64) -> Result<()> {
        let end = first.checked_add(count).filter(|end| *end <= self.present);
        if first <= self.about.first_block || end.is_none() {
            return Err(damaged(format!("block {first} is not one of the disk")));
        }
        Ok(())
    }

    pub(crate) fn empty_block(&self) -> Vec<u8> {
        vec![0; self.about.block_bytes]
    }

    fn descriptor(&self, group: u64) -> Result<[u8; DESCRIPTOR_NEEDED]> {
        let about = &self.about;
        let table = (about.first_block + 1) * about.block_bytes as u64;
        let mut descriptor = [0; DESCRIPTOR_NEEDED];
        let length = about.descriptor_bytes.min(DESCRIPTOR_NEEDED);
        // No overflow: there are fewer groups than blocks, and a descriptor is no larger than one.
        self.read(table + group * about.descriptor_bytes as u64, &mut descriptor[..length])?;
        Ok(descriptor)
    }

    pub(crate) fn inode(&self, number: u32) -> Result<Inode> {
        let about = &self.about;
        let nowhere = || damaged(format!("inode {number} does not exist"));
        if number == 0 || number > about.inodes {
            return Err(nowhere());
        }
        let group = u64::from((number - 1) / about.inodes_per_group);
        let index = u64::from((number - 1) % about.inodes_per_group);
        if group >= about.groups(about.blocks) {
            return Err(nowhere());
        }
        let descriptor = self.descriptor(group)?;
        let high = if about.wide { u32_at(&descriptor, 0x28) } else { 0 };
        let table = wide(u32_at(&descriptor, 0x8), high);
        let offset = index * about.inode_bytes as u64;
        self.check_blocks(table, offset / about.block_bytes as u64 + 1)?;
        let mut bytes = [0; Inode::BYTES_MAX];
        let at = table * about.block_bytes as u64 + offset;
        self.read(at, &mut bytes[..about.inode_bytes])?;
        Inode::parse(number, bytes, about)
    }
}

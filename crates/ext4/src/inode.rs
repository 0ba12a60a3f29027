//! An inode: what a file is, and where to find the rest of it.

use crate::error::{Ext4Error, Result, damaged};
use crate::number::{u16_at, u32_at, wide};
use crate::superblock::Superblock;

/// What every inode has.
const BASE: usize = 128;
/// Links to files, or the short target of a symbolic link.
const BLOCKS: std::ops::Range<usize> = 0x28..0x64;

const EXTENTS: u32 = 0x8_0000;
/// What a file of ours can't have, by name.
const REFUSED: [(u32, &str); 3] = [
    (0x800, "an encrypted file"),
    (0x20_0000, "attributes in inodes of their own (ea_inode)"),
    (0x1000_0000, "files inside of inodes (inline_data)"),
];

/// Longest file: its blocks are counted with 32 bits.
const FILE_BLOCKS_MAX: u64 = 1 << 32;
const MODE_KIND: u16 = 0o170_000;

/// What kind of file it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    File,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

#[derive(Debug, Clone)]
pub(crate) struct Inode {
    pub(crate) number: u32,
    pub(crate) shape: Shape,
    /// Permission bits.
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) size: u64,
    pub(crate) modified_at_ms: i64,
    /// Its blocks are in extents, not in a table of blocks.
    pub(crate) has_extents: bool,
    /// A block with attributes, or 0.
    pub(crate) attribute_block: u64,
    bytes: [u8; Inode::BYTES_MAX],
    /// Where attributes are in the inode itself.
    room: std::ops::Range<usize>,
}

impl Inode {
    pub(crate) const BYTES_MAX: usize = 1024;

    pub(crate) fn parse(
        number: u32,
        bytes: [u8; Self::BYTES_MAX],
        about: &Superblock,
    ) -> Result<Self> {
        let mode = u16_at(&bytes, 0x0);
        let shape =
            shape(mode).ok_or_else(|| damaged(format!("inode {number} has the mode {mode:o}")))?;
        let flags = u32_at(&bytes, 0x20);
        if let Some((_, name)) = REFUSED.iter().find(|(flag, _)| flags & flag != 0) {
            return Err(Ext4Error::Unsupported((*name).to_owned()));
        }
        // The upper half means something else in what is neither a file nor a large directory.
        let long = shape == Shape::File || about.large_directories && shape == Shape::Directory;
        let size = wide(u32_at(&bytes, 0x4), if long { u32_at(&bytes, 0x6C) } else { 0 });
        if size.div_ceil(about.block_bytes as u64) > FILE_BLOCKS_MAX {
            return Err(damaged(format!("inode {number} has {size} bytes")));
        }
        let room = room(number, &bytes, about.inode_bytes)?;
        Ok(Self {
            number,
            shape,
            mode: mode & !MODE_KIND,
            uid: u32::from(u16_at(&bytes, 0x2)) | u32::from(u16_at(&bytes, 0x78)) << 16,
            gid: u32::from(u16_at(&bytes, 0x18)) | u32::from(u16_at(&bytes, 0x7A)) << 16,
            size,
            modified_at_ms: modified(&bytes, room.start),
            has_extents: flags & EXTENTS != 0,
            attribute_block: wide(u32_at(&bytes, 0x68), u32::from(u16_at(&bytes, 0x76))),
            bytes,
            room,
        })
    }

    /// What is in the place where most have the root of their extents.
    pub(crate) fn blocks(&self) -> &[u8] {
        &self.bytes[BLOCKS]
    }

    /// Where the inode itself has attributes, if it has any.
    pub(crate) fn attribute_room(&self) -> &[u8] {
        &self.bytes[self.room.clone()]
    }

    /// Major and minor number of a device, as the kernel writes them: small numbers in 16 bits in
    /// the first place, others in 32 bits in the second.
    pub(crate) fn device(&self) -> (u32, u32) {
        match u32_at(self.blocks(), 0) {
            0 => {
                let number = u32_at(self.blocks(), 4);
                (number >> 8 & 0xfff, number & 0xff | number >> 12 & 0xf_ff00)
            }
            old => (old >> 8 & 0xff, old & 0xff),
        }
    }
}

fn shape(mode: u16) -> Option<Shape> {
    Some(match mode & MODE_KIND {
        0o010_000 => Shape::Fifo,
        0o020_000 => Shape::CharDevice,
        0o040_000 => Shape::Directory,
        0o060_000 => Shape::BlockDevice,
        0o100_000 => Shape::File,
        0o120_000 => Shape::Symlink,
        0o140_000 => Shape::Socket,
        _ => return None,
    })
}

/// What is left of an inode behind its fields. Of one that says nothing about them, nothing.
fn room(number: u32, bytes: &[u8], inode_bytes: usize) -> Result<std::ops::Range<usize>> {
    if inode_bytes == BASE {
        return Ok(BASE..BASE);
    }
    let extra = usize::from(u16_at(bytes, BASE));
    if extra % 4 != 0 || BASE + extra > inode_bytes {
        return Err(damaged(format!("inode {number} has fields beyond its end")));
    }
    Ok(if extra == 0 { BASE..BASE } else { BASE + extra..inode_bytes })
}

/// `fields_end`: where the fields of the inode end.
fn modified(bytes: &[u8], fields_end: usize) -> i64 {
    const EXTRA: usize = 0x88;
    let seconds = i64::from(u32_at(bytes, 0x10).cast_signed());
    if fields_end < EXTRA + 4 {
        return seconds * 1000;
    }
    let extra = u32_at(bytes, EXTRA);
    // Two bits of seconds, for the time after 2038, and thirty of nanoseconds.
    let seconds = seconds + (i64::from(extra & 3) << 32);
    seconds * 1000 + i64::from(extra >> 2).min(999_999_999) / 1_000_000
}

//! The names in a directory.
//!
//! A block of a directory is filled with entries: inode, length of the entry, length of the name,
//! kind, name. Blocks of a directory's index, and checksums, look like entries without an inode, so
//! all directories are read from the first to the last block.

use crate::error::{Result, damaged};
use crate::filesystem::{Budget, Filesystem};
use crate::inode::Inode;
use crate::number::{u16_at, u32_at};
use crate::runs;
use crate::source::ReadAt;

const HEADER: usize = 8;

/// Shows the names in a directory and their inodes, without `.` and `..`. What is shown can be a
/// file's name.
pub(crate) fn each<D: ReadAt>(
    filesystem: &Filesystem<D>,
    inode: &Inode,
    budget: &mut Budget,
    see: &mut dyn FnMut(&[u8], u32) -> Result<()>,
) -> Result<()> {
    let bytes = filesystem.about.block_bytes as u64;
    let odd = || damaged(format!("directory {} has holes", inode.number));
    if !inode.size.is_multiple_of(bytes) {
        return Err(odd());
    }
    let blocks = inode.size / bytes;
    let mut block = filesystem.empty_block();
    let mut next = 0;
    runs::each(filesystem, inode, budget, &mut |run| {
        if run.first >= blocks {
            return Ok(());
        }
        let at = run.at.filter(|_| run.first == next).ok_or_else(odd)?;
        next = blocks.min(run.first + run.count);
        for number in 0..next - run.first {
            filesystem.block(at + number, &mut block)?;
            names(&block, inode.number, see)?;
        }
        Ok(())
    })?;
    if next == blocks { Ok(()) } else { Err(odd()) }
}

fn names(
    block: &[u8],
    directory: u32,
    see: &mut dyn FnMut(&[u8], u32) -> Result<()>,
) -> Result<()> {
    let mut rest = block;
    while !rest.is_empty() {
        let broken = || damaged(format!("directory {directory} has an impossible entry"));
        let header = rest.get(..HEADER).ok_or_else(broken)?;
        let (inode, length) = (u32_at(header, 0), usize::from(u16_at(header, 4)));
        let name_end = HEADER + usize::from(header[6]);
        if length < name_end || length % 4 != 0 || length > rest.len() {
            return Err(broken());
        }
        let name = &rest[HEADER..name_end];
        rest = &rest[length..];
        if inode == 0 || name == b"." || name == b".." {
            continue;
        }
        if name.is_empty() || name.iter().any(|byte| matches!(byte, 0 | b'/')) {
            return Err(damaged(format!("directory {directory} has an impossible name")));
        }
        see(name, inode)?;
    }
    Ok(())
}

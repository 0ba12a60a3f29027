//! The marks that an overlay filesystem puts on files, in their extended attributes.
//!
//! ```text
//!   in the inode:  mark · entries … 0 … values        a value's place is counted from the entries
//!   in a block:    mark, 28 bytes · entries … 0 … values        … from the start of the block
//!   entry: length of the name, prefix, place, inode, size, hash, name
//! ```

use crate::error::{Ext4Error, Result, damaged};
use crate::filesystem::Filesystem;
use crate::inode::Inode;
use crate::number::{u16_at, u32_at};
use crate::source::ReadAt;

const MAGIC: u32 = 0xEA02_0000;
const INODE_HEADER: usize = 4;
const BLOCK_HEADER: usize = 32;
const ENTRY: usize = 16;
/// `trusted.`
const TRUSTED: u8 = 4;
const OPAQUE: &[u8] = b"overlay.opaque";
const REDIRECT: &[u8] = b"overlay.redirect";
const METACOPY: &[u8] = b"overlay.metacopy";

/// What an overlay says about a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    /// Nothing of the directory below shines through.
    pub(crate) opaque: bool,
    /// Its content is that of another directory below.
    redirect: bool,
    /// Its content is still below.
    metacopy: bool,
}

impl Marks {
    pub(crate) fn of<D: ReadAt>(filesystem: &Filesystem<D>, inode: &Inode) -> Result<Self> {
        let mut marks = Self::default();
        let bad = || damaged(format!("inode {} has impossible attributes", inode.number));
        let room = inode.attribute_room();
        if room.len() >= INODE_HEADER && u32_at(room, 0) == MAGIC {
            let room = &room[INODE_HEADER..];
            marks.take(room, room).ok_or_else(bad)?;
        }
        if inode.attribute_block != 0 {
            let mut block = filesystem.empty_block();
            filesystem.block(inode.attribute_block, &mut block)?;
            if u32_at(&block, 0) != MAGIC {
                return Err(bad());
            }
            marks.take(&block[BLOCK_HEADER..], &block).ok_or_else(bad)?;
        }
        Ok(marks)
    }

    /// Takes what entries say. `None`: they can't be.
    fn take(&mut self, entries: &[u8], values: &[u8]) -> Option<()> {
        let mut rest = entries;
        // Zeros end the entries, or the room does.
        while rest.len() >= 4 && u32_at(rest, 0) != 0 {
            let entry = rest.get(..ENTRY)?;
            let name_end = ENTRY + usize::from(entry[0]);
            let name = rest.get(ENTRY..name_end)?;
            if entry[1] == TRUSTED {
                let (place, size) = (usize::from(u16_at(entry, 2)), u32_at(entry, 8));
                let end = place.checked_add(usize::try_from(size).ok()?)?;
                self.note(name, values.get(place..end)?);
            }
            rest = rest.get(name_end.next_multiple_of(4)..)?;
        }
        Some(())
    }

    fn note(&mut self, name: &[u8], value: &[u8]) {
        match name {
            OPAQUE => self.opaque = value == b"y",
            REDIRECT => self.redirect = true,
            METACOPY => self.metacopy = true,
            _ => {}
        }
    }

    /// Refuses a directory whose names are not all here.
    pub(crate) fn of_directory(self, number: u32) -> Result<Self> {
        if self.redirect {
            return Err(elsewhere("directory", number, "redirect"));
        }
        Ok(self)
    }

    /// Refuses a file whose content is not here.
    pub(crate) fn of_file(self, number: u32) -> Result<Self> {
        if self.metacopy {
            return Err(elsewhere("file", number, "metacopy"));
        }
        Ok(self)
    }
}

fn elsewhere(what: &str, number: u32, mark: &str) -> Ext4Error {
    Ext4Error::Unsupported(format!("a {what} (inode {number}) that an overlay left below ({mark})"))
}

//! The upper directory of an overlay filesystem, as a list: all that was made or touched on top of
//! what is below.
//!
//! What was removed is marked as overlay filesystems do: a character device 0:0 in place of a name,
//! and an attribute on a directory that hides the one below. A name that was made and removed again
//! may leave the same mark, so a removed path need not be below. Other attributes are not looked at.

use std::io;
use std::ops::Range;

use crate::error::Result;
use crate::filesystem::Filesystem;
use crate::inode::Shape;
use crate::runs::{self, Run};
use crate::source::ReadAt;
use crate::walk;

/// Bytes copied at once.
const CHUNK: usize = 256 * 1024;

/// One path of the upper directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Relative to the upper directory: `etc/hostname`. Any bytes but `/` in a name, and 0.
    pub path: Vec<u8>,
    pub kind: Kind,
    /// Permission bits.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub modified_at_ms: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    File {
        size: u64,
    },
    /// Another name of what is at `to`, which comes earlier.
    HardLink {
        to: Vec<u8>,
    },
    Directory {
        /// Nothing of the directory below shines through.
        opaque: bool,
    },
    Symlink {
        target: Vec<u8>,
    },
    Fifo,
    Socket,
    CharDevice {
        major: u32,
        minor: u32,
    },
    BlockDevice {
        major: u32,
        minor: u32,
    },
    /// It was below, and is gone.
    Removed,
}

/// What a list may take of the memory of a host.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub entries: usize,
    /// All paths, and all that links lead to.
    pub text_bytes: usize,
}

impl Default for Limits {
    /// As many paths as a layer can have, and half a gigabyte of them.
    fn default() -> Self {
        Self { entries: 4_000_000, text_bytes: 512 << 20 }
    }
}

/// What is in an upper directory.
#[derive(Debug)]
pub struct Upper<D> {
    /// Sorted by path; a directory comes before what is in it.
    pub entries: Vec<Entry>,
    pub files: Files<D>,
}

/// The content of files.
#[derive(Debug)]
pub struct Files<D> {
    filesystem: Filesystem<D>,
    /// The inode of each entry.
    inodes: Vec<u32>,
}

impl<D: ReadAt> Upper<D> {
    /// Reads all that is below `directory`, a path from the filesystem's root. Of files, their
    /// content is not read, but it is known where all of it is.
    pub fn read(filesystem: Filesystem<D>, directory: &str, limits: Limits) -> Result<Self> {
        let (entries, inodes) = walk::read(&filesystem, directory, limits)?;
        Ok(Self { entries, files: Files { filesystem, inodes } })
    }
}

impl<D: ReadAt> Files<D> {
    /// Where the file at `index` of [`Upper::entries`] has data: in rising order, apart, within its
    /// size. All else of it is zeros.
    pub fn data(&self, index: usize) -> io::Result<Vec<Range<u64>>> {
        let mut data: Vec<Range<u64>> = Vec::new();
        self.each(index, &mut |bytes, _| {
            match data.last_mut() {
                Some(last) if last.end == bytes.start => last.end = bytes.end,
                Some(_) | None => data.push(bytes),
            }
            Ok(())
        })?;
        Ok(data)
    }

    /// Shows that data in rising order, piece by piece, each with its place in the file.
    pub fn read(
        &self,
        index: usize,
        see: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut buffer = Vec::new();
        self.each(index, &mut |bytes, on_disk| {
            let mut at = bytes.start;
            while at < bytes.end {
                let length = usize::try_from(bytes.end - at).unwrap_or(CHUNK).min(CHUNK);
                if buffer.len() < length {
                    buffer.resize(length, 0);
                }
                self.filesystem.read(on_disk + (at - bytes.start), &mut buffer[..length])?;
                see(at, &buffer[..length])?;
                at += length as u64;
            }
            Ok(())
        })
    }

    /// Shows each run of data of a file, and where it begins on the disk.
    fn each(
        &self,
        index: usize,
        see: &mut dyn FnMut(Range<u64>, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let number = self.inodes.get(index).ok_or(io::ErrorKind::NotFound)?;
        let inode = self.filesystem.inode(*number)?;
        if inode.shape != Shape::File {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "only files have content"));
        }
        let block = self.filesystem.about.block_bytes as u64;
        let mut run = |run: Run| {
            let bytes = run.first * block..inode.size.min((run.first + run.count) * block);
            match run.at {
                Some(at) if !bytes.is_empty() => see(bytes, at * block),
                // What was set aside is zeros; and some is beyond the end.
                Some(_) | None => Ok(()),
            }
        };
        runs::each(&self.filesystem, &inode, &mut self.filesystem.budget(), &mut run)
    }
}

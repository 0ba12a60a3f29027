//! The upper directory of an overlay filesystem, as a list: all that was made or touched on top of
//! what is below.
//!
//! What was removed is marked as overlay filesystems do: a character device 0:0 in place of a name,
//! and an attribute on a directory that hides the one below. A name that was made and removed again
//! may leave the same mark, so a removed path need not be below. Other attributes are not looked at.

use std::io::{self, Write};

use crate::error::Result;
use crate::filesystem::Filesystem;
use crate::inode::Shape;
use crate::runs::{self, Run};
use crate::source::ReadAt;
use crate::walk;

/// Bytes copied at once.
const CHUNK: usize = 256 * 1024;
static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];

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
    /// The content of the file at `index` of [`Upper::entries`], whole: as many bytes as its size.
    pub fn copy(&self, index: usize, to: &mut dyn Write) -> io::Result<()> {
        let number = self.inodes.get(index).ok_or(io::ErrorKind::NotFound)?;
        let inode = self.filesystem.inode(*number)?;
        if inode.shape != Shape::File {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "only files have content"));
        }
        let mut copy = Copy { filesystem: &self.filesystem, buffer: Vec::new(), to, done: 0 };
        let mut budget = self.filesystem.budget();
        runs::each(&self.filesystem, &inode, &mut budget, &mut |run| copy.run(run, inode.size))?;
        copy.zeros_until(inode.size)
    }
}

/// A file that is being copied.
struct Copy<'c, D> {
    filesystem: &'c Filesystem<D>,
    buffer: Vec<u8>,
    to: &'c mut dyn Write,
    /// Bytes that were written.
    done: u64,
}

impl<D: ReadAt> Copy<'_, D> {
    fn run(&mut self, run: Run, size: u64) -> io::Result<()> {
        let block = self.filesystem.about.block_bytes as u64;
        // What was set aside is zeros, written with the next run or at the end.
        let Some(at) = run.at else { return Ok(()) };
        let start = run.first * block;
        if start >= size {
            return Ok(());
        }
        self.zeros_until(start)?;
        let end = size.min((run.first + run.count) * block);
        let mut at = at * block;
        while self.done < end {
            let length = chunk(end - self.done, CHUNK);
            if self.buffer.len() < length {
                self.buffer.resize(length, 0);
            }
            self.filesystem.read(at, &mut self.buffer[..length])?;
            self.to.write_all(&self.buffer[..length])?;
            at += length as u64;
            self.done += length as u64;
        }
        Ok(())
    }

    fn zeros_until(&mut self, end: u64) -> io::Result<()> {
        while self.done < end {
            let length = chunk(end - self.done, ZEROS.len());
            self.to.write_all(&ZEROS[..length])?;
            self.done += length as u64;
        }
        Ok(())
    }
}

fn chunk(left: u64, most: usize) -> usize {
    usize::try_from(left).unwrap_or(most).min(most)
}

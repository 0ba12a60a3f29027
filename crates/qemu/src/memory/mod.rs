//! The memory of a stopped QEMU's guest, seen and changed from outside.
//!
//! ```text
//!   file `memory` ──private mapping──▶ guest RAM        /proc/PID/pagemap   which pages are no longer
//!   (never changes)                    │                                    the file's: written()
//!                                      └─ written page  /proc/PID/mem       their bytes: copy_out(),
//!                                                                           copy_in()
//! ```
//!
//! - The process must stand still, and what it maps must be the file it was started with: who calls
//!   sees to the first, [`GuestMemory::of`] to the second.
//! - The process is found by its pid once; afterwards everything goes through files that the kernel
//!   has bound to that process, so that a pid which is used anew is never somebody else's memory.
//! - Everything here blocks.
//!
//! What a broken QEMU says of itself is believed in one respect only: which of its pages are
//! written. It could lie there about its own guest, and about nothing else.

#[cfg(test)]
pub(crate) mod guest;
mod maps;
mod scan;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{Mode, OFlags, openat};

use crate::unit::Delta;

/// Bytes of a page: of the guest, of the host, of every file here.
pub const PAGE: u64 = 4096;
const PAGE_BYTES: usize = 4096;
/// Copied at a time: large enough that system calls do not count, small enough for a core's cache.
const CHUNK: usize = 1024 * 1024;

/// Consecutive pages. A list of runs is sorted, and they neither touch nor overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub first_page: u64,
    pub count: u64,
}

impl Run {
    /// The page behind its last one.
    pub fn end(&self) -> u64 {
        self.first_page.saturating_add(self.count)
    }
}

/// Bytes of all pages of these runs.
pub fn bytes_of(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.count * PAGE).sum()
}

/// Some of the pages that are copied out, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Whole pages, none of them zero.
    Data { first_page: u64, bytes: &'a [u8] },
    /// Pages that contain zeros only.
    Zero(Run),
}

/// The guest's memory in a QEMU that stands still.
#[derive(Debug)]
pub struct GuestMemory {
    mem: File,
    pagemap: File,
    /// Where the process has it.
    start: u64,
    bytes: u64,
}

impl GuestMemory {
    /// The memory of the process `pid`, which maps the first `bytes` of `memory` privately, in one
    /// piece and nowhere else. Needs the right to trace it.
    pub fn of(pid: i32, memory: &File, bytes: u64) -> io::Result<Self> {
        if rustix::param::page_size() as u64 != PAGE {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "pages are not of 4096 bytes"));
        }
        let process = File::open(format!("/proc/{pid}"))?;
        let open = |name: &str, flags: OFlags| -> io::Result<File> {
            let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            Ok(File::from(openat(&process, name, flags, Mode::empty())?))
        };
        let start = maps::find(&process, open("maps", OFlags::RDONLY)?, memory, bytes)?;
        let (mem, pagemap) = (open("mem", OFlags::RDWR)?, open("pagemap", OFlags::RDONLY)?);
        Ok(Self { mem, pagemap, start, bytes })
    }

    /// How much memory the guest has.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The pages that were written since the file was mapped, also if they are swapped out.
    pub fn written(&self) -> io::Result<Vec<Run>> {
        scan::written(&self.pagemap, self.start, self.bytes)
    }

    /// Gives the content of these pages to `take`, in order.
    pub fn copy_out(
        &self,
        runs: &[Run],
        mut take: impl FnMut(Piece<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        check(runs, self.bytes / PAGE)?;
        let mut buffer = vec![0; CHUNK];
        for run in runs {
            let (mut page, mut left) = (run.first_page, run.count);
            while left > 0 {
                let count = left.min(CHUNK as u64 / PAGE);
                let part =
                    &mut buffer[..usize::try_from(count * PAGE).map_err(io::Error::other)?];
                self.mem.read_exact_at(part, self.start + page * PAGE)?;
                split(page, part, &mut take)?;
                (page, left) = (page + count, left - count);
            }
        }
        Ok(())
    }

    /// Puts the pages of a delta in their places.
    pub fn copy_in(&self, delta: &Delta) -> io::Result<()> {
        if delta.memory_bytes() != self.bytes {
            let (found, have) = (delta.memory_bytes(), self.bytes);
            return Err(invalid(format!("the delta is of {found} bytes of memory, not {have}")));
        }
        delta.read(|piece| match piece {
            Piece::Data { first_page, bytes } => self.write(first_page, bytes),
            Piece::Zero(run) => {
                let zeros = vec![0; CHUNK.min(usize::try_from(run.count * PAGE).unwrap_or(CHUNK))];
                let (mut page, mut left) = (run.first_page, run.count);
                while left > 0 {
                    let count = left.min(zeros.len() as u64 / PAGE);
                    let part = usize::try_from(count * PAGE).map_err(io::Error::other)?;
                    self.write(page, &zeros[..part])?;
                    (page, left) = (page + count, left - count);
                }
                Ok(())
            }
        })
    }

    fn write(&self, first_page: u64, bytes: &[u8]) -> io::Result<()> {
        self.mem.write_all_at(bytes, self.start + first_page * PAGE)
    }
}

/// Tells pages of zeros from the others, and gives both on in the longest pieces.
fn split(
    first_page: u64,
    bytes: &[u8],
    take: &mut impl FnMut(Piece<'_>) -> io::Result<()>,
) -> io::Result<()> {
    let pages = bytes.len() / PAGE_BYTES;
    let is_zero = |page: usize| is_zero(&bytes[page * PAGE_BYTES..(page + 1) * PAGE_BYTES]);
    let mut from = 0;
    while from < pages {
        let zero = is_zero(from);
        let until = (from + 1..pages).find(|page| is_zero(*page) != zero).unwrap_or(pages);
        let page = first_page + from as u64;
        take(match zero {
            true => Piece::Zero(Run { first_page: page, count: (until - from) as u64 }),
            false => Piece::Data {
                first_page: page,
                bytes: &bytes[from * PAGE_BYTES..until * PAGE_BYTES],
            },
        })?;
        from = until;
    }
    Ok(())
}

fn is_zero(page: &[u8]) -> bool {
    static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
    page == ZEROS
}

/// Whether runs are as they should be, and below a number of pages.
fn check(runs: &[Run], pages: u64) -> io::Result<()> {
    let mut free = 0;
    for run in runs {
        let end = run.first_page.checked_add(run.count);
        if run.count == 0 || run.first_page < free || end.is_none_or(|end| end > pages) {
            return Err(invalid(format!("{run:?} is not a run of pages that can be here")));
        }
        free = run.end();
    }
    Ok(())
}

fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

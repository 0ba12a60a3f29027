//! Sparse files: copied without their holes, and with pages on top.
//!
//! Filesystems that can share blocks between files (`FICLONE`: XFS, btrfs) copy in no time; on the
//! others the data is copied inside the kernel, and holes stay holes. What is written here is either
//! sealed at the end or left without a seal, and then refused.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, SeekFrom, copy_file_range, fallocate, ioctl_ficlone, linkat, seek,
};
use rustix::io::Errno;

use super::delta::Delta;
use super::id::UnitId;
use super::seal::{self, Kind, SEAL_BYTES};
use crate::memory::{GuestMemory, PAGE, Piece, Run};

/// Copied at a time where the kernel does not copy by itself.
const CHUNK: usize = 1024 * 1024;

/// How a file came to its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placed {
    Linked,
    Copied,
}

/// An empty memory for the first boot: zeros, none of them on disk.
pub fn fresh_memory(to: &File, bytes: u64, unit: &UnitId) -> io::Result<()> {
    seal::write(to, Kind::Memory, bytes, unit)
}

/// Writes a memory file of its own: what is in `base`, with the pages `runs` of `memory`, which maps
/// it, on top. `to` is empty.
pub fn write_full(
    base: &File,
    memory: &GuestMemory,
    runs: &[Run],
    unit: &UnitId,
    to: &File,
) -> io::Result<()> {
    copy_data(base, to, memory.bytes())?;
    memory.copy_out(runs, |piece| put(to, piece))?;
    seal::write(to, Kind::Memory, memory.bytes(), unit)
}

/// Writes a memory file of its own out of a base and a delta to it. `to` is empty.
pub fn merge(base: &File, delta: &Delta, unit: &UnitId, to: &File) -> io::Result<()> {
    copy_data(base, to, delta.memory_bytes())?;
    delta.read(|piece| put(to, piece))?;
    seal::write(to, Kind::Memory, delta.memory_bytes(), unit)
}

/// The same file at another place: a hard link where that is possible, so that all machines started
/// from either share its pages; else a copy, with the same seal.
pub fn link_or_copy(base: &File, to: &Path, group: Option<u32>) -> io::Result<Placed> {
    // Through the open file: what is linked is what was looked at.
    let here = format!("/proc/self/fd/{}", base.as_raw_fd());
    match linkat(CWD, here, CWD, to, AtFlags::SYMLINK_FOLLOW) {
        Ok(()) => return Ok(Placed::Linked),
        // Another filesystem, too many links, none on this filesystem, or the file has no name left.
        Err(Errno::XDEV | Errno::MLINK | Errno::PERM | Errno::OPNOTSUPP | Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let copy = super::create(to, group)?;
    copy_data(base, &copy, base.metadata()?.size())?;
    Ok(Placed::Copied)
}

/// Copies the `bytes` that a guest sees of a disk to an empty file: sealed for a unit, or without a
/// seal for a machine to write to.
pub fn copy_disk(from: &File, to: &File, bytes: u64, unit: Option<&UnitId>) -> io::Result<()> {
    copy_data(from, to, bytes)?;
    match unit {
        Some(unit) => seal::write(to, Kind::Disk, bytes, unit),
        None => Ok(()),
    }
}

/// Bytes of a file that are not holes, without a seal.
pub fn data_bytes(file: &File) -> io::Result<u64> {
    let bytes = file.metadata()?.size().saturating_sub(SEAL_BYTES);
    Ok(data_extents(file, bytes)?.iter().map(|run| run.count * PAGE).sum())
}

fn put(to: &File, piece: Piece<'_>) -> io::Result<()> {
    match piece {
        Piece::Data { first_page, bytes } => to.write_all_at(bytes, first_page * PAGE),
        Piece::Zero(run) => make_zero(to, run),
    }
}

fn make_zero(to: &File, run: Run) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match fallocate(to, flags, run.first_page * PAGE, run.count * PAGE) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP) => {
            let zeros = [0; PAGE as usize];
            (run.first_page..run.end()).try_for_each(|page| to.write_all_at(&zeros, page * PAGE))
        }
        Err(error) => Err(error.into()),
    }
}

/// Copies the first `bytes` of a file to an empty one that is as long then.
fn copy_data(from: &File, to: &File, bytes: u64) -> io::Result<()> {
    if from.metadata()?.size() < bytes {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file is shorter than that"));
    }
    if ioctl_ficlone(to, from).is_ok() {
        return to.set_len(bytes);
    }
    to.set_len(bytes)?;
    for run in data_extents(from, bytes)? {
        copy_range(from, to, run.first_page * PAGE, (run.end() * PAGE).min(bytes))?;
    }
    Ok(())
}

fn copy_range(from: &File, to: &File, mut at: u64, until: u64) -> io::Result<()> {
    while at < until {
        let most = usize::try_from(until - at).unwrap_or(usize::MAX);
        let (mut read_at, mut write_at) = (at, at);
        match copy_file_range(from, Some(&mut read_at), to, Some(&mut write_at), most) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => at += count as u64,
            Err(Errno::INTR) => {}
            Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                return copy_by_hand(from, to, at, until);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn copy_by_hand(from: &File, to: &File, mut at: u64, until: u64) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    while at < until {
        let count = usize::try_from(until - at).unwrap_or(CHUNK).min(CHUNK);
        from.read_exact_at(&mut buffer[..count], at)?;
        to.write_all_at(&buffer[..count], at)?;
        at += count as u64;
    }
    Ok(())
}

/// Where the first `bytes` of a file have data, in whole pages; the last may reach behind them.
pub(super) fn data_extents(file: &File, bytes: u64) -> io::Result<Vec<Run>> {
    let mut extents = Vec::new();
    let mut at = 0;
    while at < bytes {
        let from = match seek(file, SeekFrom::Data(at)) {
            Ok(from) if from < bytes => from,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let until = seek(file, SeekFrom::Hole(from))?.min(bytes);
        let first_page = from / PAGE;
        extents.push(Run { first_page, count: until.div_ceil(PAGE) - first_page });
        at = until.next_multiple_of(PAGE);
    }
    Ok(extents)
}

/// The parts of a run that are in one of several others, which are sorted.
pub(super) fn within(run: Run, others: &[Run]) -> impl Iterator<Item = Run> + '_ {
    let from = others.partition_point(|other| other.end() <= run.first_page);
    let near = others[from..].iter().take_while(move |other| other.first_page < run.end());
    near.map(move |other| {
        let first_page = run.first_page.max(other.first_page);
        Run { first_page, count: run.end().min(other.end()) - first_page }
    })
}

//! Reading and writing.

use std::io::IoSlice;
use std::os::fd::OwnedFd;

use rustix::buffer::spare_capacity;
use rustix::fs::{FallocateFlags, SeekFrom, Stat};
use rustix::io::{Errno, ReadWriteFlags};
use torpor_protocol::guest::files::{Answer, DATA_MAX, Handle};

use crate::attributes::strip;
use crate::service::{Answered, FileService};

/// Bytes copied by one call: as much as a slow disk does in a moment.
const COPY_MAX: usize = 16 * 1024 * 1024;
/// How far behind where an append was meant to go it is looked for: what others append in the meantime.
const APPENDED_MAX: usize = 1024 * 1024;

impl FileService {
    /// Reads to the end of `out`.
    pub(crate) fn read_to(
        &self,
        file: &Handle,
        offset: u64,
        length: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), Errno> {
        let (file, stat) = self.content(file)?;
        let left = u64::try_from(stat.st_size).unwrap_or(0).saturating_sub(offset);
        let length = u64::from(length).min(left).min(DATA_MAX as u64);
        let length = usize::try_from(length).unwrap_or(DATA_MAX);
        if length == 0 {
            return Ok(());
        }
        let before = out.len();
        out.reserve_exact(length);
        rustix::io::pread(&file, spare_capacity(out), offset)?;
        // There may have been more room.
        out.truncate(before + length);
        Ok(())
    }

    /// `append`: at the end, and whether it is sent again.
    pub(crate) fn write(
        &self,
        file: &Handle,
        offset: u64,
        append: Option<bool>,
        strip_too: bool,
        data: &[u8],
    ) -> Answered {
        let (file, stat) = self.content(file)?;
        if strip_too {
            strip(&file, &stat)?;
        }
        let written = match append {
            Some(true) if appended(&file, &stat, offset, data)? => data.len(),
            Some(_) => {
                let data = &[IoSlice::new(data)];
                rustix::io::pwritev2(&file, data, 0, ReadWriteFlags::APPEND)?
            }
            None => write_at(&file, data, offset)?,
        };
        Ok(Answer::Length { length: written as u64 })
    }

    pub(crate) fn fsync(&self, file: &Handle, data_only: bool) -> Answered {
        let (file, _) = match self.content(file) {
            Err(Errno::ISDIR) => self.volume.descriptor(self.id(file)?, crate::cache::Use::Read)?,
            file => file?,
        };
        if data_only {
            rustix::fs::fdatasync(&file)?;
        } else {
            rustix::fs::fsync(&file)?;
        }
        Ok(Answer::Done {})
    }

    pub(crate) fn fallocate(&self, file: &Handle, mode: u32, offset: u64, length: u64) -> Answered {
        let mode = FallocateFlags::from_bits(mode).ok_or(Errno::OPNOTSUPP)?;
        let allowed =
            FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !allowed.contains(mode) {
            return Err(Errno::OPNOTSUPP);
        }
        rustix::fs::fallocate(self.content(file)?.0, mode, offset, length)?;
        Ok(Answer::Done {})
    }

    pub(crate) fn seek(&self, file: &Handle, offset: u64, hole: bool) -> Answered {
        let (file, _) = self.content(file)?;
        // Nobody uses the position of this descriptor.
        let to = if hole { SeekFrom::Hole(offset) } else { SeekFrom::Data(offset) };
        Ok(Answer::Length { length: rustix::fs::seek(&file, to)? })
    }

    pub(crate) fn copy(
        &self,
        (from, mut from_offset): (&Handle, u64),
        (to, mut to_offset): (&Handle, u64),
        length: u64,
    ) -> Answered {
        let length = usize::try_from(length).unwrap_or(COPY_MAX).min(COPY_MAX);
        let ((from, _), (to, _)) = (self.content(from)?, self.content(to)?);
        let copied = rustix::fs::copy_file_range(
            &from,
            Some(&mut from_offset),
            &to,
            Some(&mut to_offset),
            length,
        )?;
        Ok(Answer::Length { length: copied as u64 })
    }
}

fn write_at(file: &OwnedFd, data: &[u8], offset: u64) -> Result<usize, Errno> {
    let mut written = 0;
    while written < data.len() {
        let at = offset.checked_add(written as u64).ok_or(Errno::FBIG)?;
        match rustix::io::pwrite(file, &data[written..], at) {
            Ok(0) => break,
            Ok(more) => written += more,
            Err(Errno::INTR) => {}
            // What is written is written.
            Err(_) if written > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(written)
}

/// Whether data that should have gone behind `offset` is there: asked only when nobody remembers.
fn appended(file: &OwnedFd, stat: &Stat, offset: u64, data: &[u8]) -> Result<bool, Errno> {
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let behind = usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX);
    let mut found = vec![0; behind.min(APPENDED_MAX)];
    let mut filled = 0;
    while filled < found.len() {
        match rustix::io::pread(file, &mut found[filled..], offset + filled as u64)? {
            0 => break,
            more => filled += more,
        }
    }
    // In a time that does not depend on what a guest wrote there.
    Ok(!data.is_empty() && memchr::memmem::find(&found[..filled], data).is_some())
}

//! Empty filesystems, formatted once per size and then copied.
//!
//! Of an empty filesystem only some hundred kilobytes are not zero, whatever its size; these are
//! kept in memory, so that a new disk costs a few writes instead of a process.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SeekFrom, memfd_create, seek};

use crate::program;

/// Sizes kept; there is one per resource class, not one per sandbox.
const SIZES_MAX: usize = 16;
/// Formatting takes some ten milliseconds.
const FORMAT_DEADLINE: Duration = Duration::from_secs(30);
/// What a template may hold in memory; the largest seen is a tenth of it.
const BYTES_MAX: u64 = 64 << 20;
/// An engine makes a handful of large files in a disk. Few inodes mean small tables.
const INODES: &str = "1024";

/// No journal and no reserve; nothing is initialised that the kernel can take as zero.
const FORMAT: [&str; 9] = [
    "-q",
    "-F",
    "-O",
    "^has_journal,^resize_inode",
    "-E",
    "lazy_itable_init=1,nodiscard",
    "-m",
    "0",
    "-b4096",
];

/// Most recently made last.
static TEMPLATES: Mutex<Vec<(u64, Arc<Template>)>> = Mutex::new(Vec::new());

#[derive(Debug)]
pub(crate) struct Template {
    bytes: u64,
    extents: Vec<(u64, Vec<u8>)>,
}

/// The template of a size, formatted now if it is the first time.
pub(crate) fn of_size(mib: u64) -> io::Result<Arc<Template>> {
    // Held while formatting: a hundred disks of a new size format once.
    let mut templates = TEMPLATES.lock();
    if let Some((_, template)) = templates.iter().find(|(size, _)| *size == mib) {
        return Ok(Arc::clone(template));
    }
    let template = Arc::new(Template::format(bytes_of(mib)?)?);
    if templates.len() == SIZES_MAX {
        templates.remove(0);
    }
    templates.push((mib, Arc::clone(&template)));
    Ok(template)
}

impl Template {
    fn format(bytes: u64) -> io::Result<Self> {
        // In memory: no file to clean up.
        let file = File::from(memfd_create("template", MemfdFlags::CLOEXEC)?);
        file.set_len(bytes)?;
        make_filesystem(&file, &[&FORMAT[..], &["-N", INODES]].concat())?;
        Ok(Self { bytes, extents: extents_of(&file, bytes)? })
    }

    /// Makes an empty file this filesystem.
    pub(crate) fn fill(&self, image: &File) -> io::Result<()> {
        image.set_len(self.bytes)?;
        self.extents.iter().try_for_each(|(offset, data)| image.write_all_at(data, *offset))
    }
}

/// Makes an empty file a filesystem for files of all sizes, which nobody but a guest mounts.
pub(crate) fn format_whole(file: &File, mib: u64) -> io::Result<()> {
    file.set_len(bytes_of(mib)?)?;
    make_filesystem(file, &FORMAT)
}

pub(crate) fn bytes_of(mib: u64) -> io::Result<u64> {
    let bytes = mib.checked_mul(1 << 20).filter(|bytes| *bytes > 0);
    bytes.ok_or_else(|| io::Error::new(ErrorKind::InvalidInput, "no such disk size"))
}

/// mkfs reaches the file by the name of our descriptor.
pub(crate) fn make_filesystem(file: &File, options: &[&str]) -> io::Result<()> {
    let file = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let make = &mut Command::new("mkfs.ext4");
    let make = make.args(options).arg(file).stdin(Stdio::null());
    program::run(make, Some(FORMAT_DEADLINE), &[0])
}

fn extents_of(file: &File, bytes: u64) -> io::Result<Vec<(u64, Vec<u8>)>> {
    let mut extents = Vec::new();
    let mut total = 0;
    let mut from = 0;
    while from < bytes {
        let start = match seek(file, SeekFrom::Data(from)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = seek(file, SeekFrom::Hole(start))?;
        total += end - start;
        if total > BYTES_MAX {
            return Err(io::Error::new(ErrorKind::InvalidInput, "the disk is too large"));
        }
        let mut data = vec![0; usize::try_from(end - start).map_err(io::Error::other)?];
        file.read_exact_at(&mut data, start)?;
        extents.push((start, data));
        from = end;
    }
    Ok(extents)
}

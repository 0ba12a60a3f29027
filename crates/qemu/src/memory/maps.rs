//! Where a process has the memory file.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::MetadataExt;

use rustix::fs::{AtFlags, makedev, statat};

use super::invalid;

/// Mappings of a process that are looked at; a QEMU has a few hundred, and the kernel's own limit is
/// 65530.
const MAPPINGS_MAX: usize = 70_000;

/// One line of `/proc/PID/maps`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) rights: String,
    pub(super) offset: u64,
    pub(super) dev: u64,
    pub(super) ino: u64,
}

impl Mapping {
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        let line = String::from_utf8_lossy(line);
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let rights = words.next()?.to_owned();
        let offset = words.next()?;
        let (major, minor) = words.next()?.split_once(':')?;
        let ino = words.next()?.parse().ok()?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let small = |text| u32::from_str_radix(text, 16).ok();
        Some(Self {
            start: hex(start)?,
            end: hex(end)?,
            rights,
            offset: hex(offset)?,
            dev: makedev(small(major)?, small(minor)?),
            ino,
        })
    }
}

/// The address at which the first `bytes` of a file are mapped, privately and writable; an error if
/// the process maps it in any other way too.
pub(super) fn find(process: &File, maps: File, memory: &File, bytes: u64) -> io::Result<u64> {
    let file = memory.metadata()?;
    let mut found = Vec::new();
    for line in BufReader::new(maps).split(b'\n').take(MAPPINGS_MAX) {
        let line = line?;
        let Some(mapping) = Mapping::parse(&line) else {
            return Err(invalid(format!("{:?} is no mapping", String::from_utf8_lossy(&line))));
        };
        if mapping.ino == file.ino() && is_of(process, &mapping, &file) {
            found.push(mapping);
        }
    }
    match found.as_slice() {
        [one] if one.rights == "rw-p" && one.offset == 0 && one.end - one.start == bytes => {
            Ok(one.start)
        }
        [] => Err(invalid("the process does not map the memory file".to_owned())),
        others => Err(invalid(format!(
            "the process maps the memory file, but not its first {bytes} bytes privately and in \
             one piece: {others:?}"
        ))),
    }
}

/// Whether a mapping with the inode of a file is of that file. Some filesystems (btrfs, overlays)
/// have one device for `stat` and another for mappings; there the kernel is asked what is mapped.
fn is_of(process: &File, mapping: &Mapping, file: &std::fs::Metadata) -> bool {
    if mapping.dev == file.dev() {
        return true;
    }
    let entry = format!("map_files/{:x}-{:x}", mapping.start, mapping.end);
    statat(process, entry, AtFlags::empty())
        .is_ok_and(|found| found.st_dev == file.dev() && found.st_ino == file.ino())
}

//! The block behind the last byte that a guest can see of `memory` or `disk`: to which unit the file
//! belongs.
//!
//! ```text
//!   0   magic, 8 bytes      12   kind          32   unit, 16 bytes    all numbers little-endian
//!   8   format              16   guest bytes   48   BLAKE3 of 0..48, then zeros
//! ```
//!
//! QEMU maps or uses as many bytes as it was told, so a guest can neither read nor change it. It is
//! written last: a file without it is not whole.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use super::id::{ID_BYTES, UnitId};
use super::{DISK_FILE, Flaw, MEMORY_FILE};

/// Bytes of a seal: a page, so that the file's length stays a multiple of one.
pub const SEAL_BYTES: u64 = 4096;
const MAGIC: &[u8; 8] = b"torpor\x00S";
const FORMAT: u32 = 1;
/// What the checksum is of.
const SUMMED: usize = 48;
const USED: usize = SUMMED + 32;

/// Which file of a unit: one can't stand in for the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Memory,
    Disk,
}

impl Kind {
    pub(super) fn file_name(self) -> &'static str {
        match self {
            Self::Memory => MEMORY_FILE,
            Self::Disk => DISK_FILE,
        }
    }

    fn number(self) -> u32 {
        match self {
            Self::Memory => 1,
            Self::Disk => 2,
        }
    }
}

/// Gives a file its length and its last block.
pub(super) fn write(file: &File, kind: Kind, bytes: u64, unit: &UnitId) -> io::Result<()> {
    let mut block = [0; SEAL_BYTES as usize];
    block[..8].copy_from_slice(MAGIC);
    block[8..12].copy_from_slice(&FORMAT.to_le_bytes());
    block[12..16].copy_from_slice(&kind.number().to_le_bytes());
    block[16..24].copy_from_slice(&bytes.to_le_bytes());
    block[32..48].copy_from_slice(unit.bytes());
    let sum = blake3::hash(&block[..SUMMED]);
    block[SUMMED..USED].copy_from_slice(sum.as_bytes());
    file.set_len(bytes)?;
    file.write_all_at(&block, bytes)
}

/// The unit that a file was sealed for, if it is of this kind and shows a guest `bytes`.
pub(super) fn read(file: &File, kind: Kind, bytes: u64) -> Result<UnitId, Flaw> {
    let (size, whole) = (file.metadata()?.size(), bytes.checked_add(SEAL_BYTES));
    if whole != Some(size) {
        return Err(Flaw::Damaged(format!("it has {size} bytes, not {bytes} and a seal")));
    }
    let mut block = [0; USED];
    file.read_exact_at(&mut block, bytes)?;
    if block[..8] != *MAGIC {
        return Err(Flaw::Damaged("it has no seal".to_owned()));
    }
    let format = u32::from_le_bytes(part(&block, 8));
    if format > FORMAT {
        return Err(Flaw::Newer { format, known: FORMAT });
    }
    let broken = blake3::hash(&block[..SUMMED]).as_bytes() != &block[SUMMED..];
    let same = part(&block, 12) == kind.number().to_le_bytes();
    if broken || !same || part(&block, 16) != bytes.to_le_bytes() {
        return Err(Flaw::Damaged("its seal is not that of such a file".to_owned()));
    }
    Ok(UnitId::from_bytes(part::<ID_BYTES>(&block, 32)))
}

/// Whether a file is sealed for a unit.
pub(super) fn check(file: &File, kind: Kind, bytes: u64, unit: &UnitId) -> Result<(), Flaw> {
    let found = read(file, kind, bytes)?;
    if found != *unit {
        return Err(Flaw::Mixed(format!("it belongs to unit {found}, not {unit}")));
    }
    Ok(())
}

/// `N` bytes of a block.
pub(super) fn part<const N: usize>(block: &[u8], from: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&block[from..from + N]);
    bytes
}

//! Entry points of fuzz targets: what holds whatever a microVM was saved as.

use crate::input;
use std::fs;

use super::delta::{SUMMED, USED, sum};
use super::id::ID_BYTES;
use super::seal::part;
use super::{ABOUT_FILE, Delta, PAGE, UnitId, open, read_about};
use crate::memory::Piece;

/// `machine.json` is refused, or survives being written; a unit of nothing else is refused.
pub fn qemu_about(bytes: &[u8]) {
    let scratch = input::Scratch::new();
    fs::write(scratch.inside().join(ABOUT_FILE), bytes).expect("a file can be written");
    assert!(open(&scratch.inside()).is_err(), "its other files are missing");
    let Ok(about) = read_about(&scratch.inside()) else { return };
    let again = serde_json::to_vec(&about).expect("it can be written");
    assert_eq!(serde_json::from_slice::<super::About>(&again).expect("it can be read"), about);
}

/// A delta is refused, or its pages are in order, within the memory, and in the file. Its checksum is
/// put right, and it has the ids that it says.
pub fn qemu_delta(bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    let page = usize::try_from(PAGE).expect("a page is small");
    if bytes.len() < page {
        return;
    }
    let number = |from| u64::from_le_bytes(part(&bytes, from));
    let (memory_bytes, pages) = (number(48), number(64));
    let index = pages.checked_add(1).and_then(|pages| pages.checked_mul(PAGE));
    let index = index.and_then(|at| usize::try_from(at).ok()).unwrap_or(usize::MAX);
    let right = sum(&bytes, bytes.get(index..).unwrap_or_default());
    bytes[SUMMED..USED].copy_from_slice(right.as_bytes());
    let id = |from| UnitId::from_bytes(part::<ID_BYTES>(&bytes, from));
    let scratch = input::Scratch::new();
    let path = scratch.inside().join("delta");
    fs::write(&path, &bytes).expect("a file can be written");
    let file = fs::File::open(&path).expect("it is there");
    let Ok(delta) = Delta::open(file, &id(16), &id(32), memory_bytes) else { return };
    let (mut free, mut data) = (0, 0);
    let read = delta.read(|piece| {
        let (first, count) = match piece {
            Piece::Data { first_page, bytes } => (first_page, bytes.len() as u64 / PAGE),
            Piece::Zero(run) => (run.first_page, run.count),
        };
        if let Piece::Data { bytes, .. } = piece {
            data += bytes.len();
        }
        assert!(first >= free && first + count <= memory_bytes / PAGE, "{count} pages at {first}");
        free = first + count;
        Ok(())
    });
    read.expect("an accepted delta can be read");
    assert!(data <= bytes.len(), "{data} bytes of pages");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_qemu_about() {
        input::replay("qemu_about", qemu_about);
    }

    #[test]
    fn no_seed_breaks_qemu_delta() {
        input::replay("qemu_delta", qemu_delta);
    }
}

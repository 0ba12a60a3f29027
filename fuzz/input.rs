//! What the fuzz targets of all crates, and the tests that replay their seeds, have in common. Crates
//! with targets include this file in their module `fuzzing`.

#![allow(dead_code, reason = "no crate needs all of it")]

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a block of a tar archive.
const BLOCK: usize = 512;

/// Gives every seed of a target to its entry function.
#[cfg(test)]
pub(crate) fn replay(target: &str, entry: fn(&[u8])) {
    let seeds = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
    let mut count = 0;
    for seed in fs::read_dir(&seeds).expect("the target has seeds") {
        let path = seed.expect("the directory can be read").path();
        // Shown if it fails.
        println!("{}", path.display());
        entry(&fs::read(&path).expect("the seed can be read"));
        count += 1;
    }
    assert!(count > 0, "{target} has seeds");
}

/// The content of an input, whole and in pieces: the first four bytes say how long these are.
pub(crate) fn pieces(bytes: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let (lengths, content) = bytes.split_first_chunk::<4>()?;
    let mut rest = content;
    let mut pieces = Vec::new();
    for length in lengths.iter().cycle() {
        let (piece, after) = rest.split_at((usize::from(*length) + 1).min(rest.len()));
        pieces.push(piece);
        rest = after;
        if rest.is_empty() {
            break;
        }
    }
    Some((content, pieces))
}

/// Parts of an input, each behind its length: two bytes, the lower first. The last may be cut.
pub(crate) fn parts(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut parts = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
        let (part, after) = rest.split_at(length);
        parts.push(part);
        bytes = after;
    }
    parts
}

/// A tar archive whose headers have the right checksums: nobody finds one by chance.
pub(crate) fn tar(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for block in bytes.chunks_exact_mut(BLOCK).filter(|block| block[257..].starts_with(b"ustar")) {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    }
    bytes
}

/// A directory that goes away with this value, with one `inside` of it for whatever is tested.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("torpor-fuzz-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir(&dir).expect("a directory can be made");
        fs::create_dir(dir.join("inside")).expect("a directory can be made");
        Self(dir)
    }

    pub(crate) fn inside(&self) -> PathBuf {
        self.0.join("inside")
    }

    /// Nothing was made outside of `inside`.
    pub(crate) fn check(&self) {
        let names = fs::read_dir(&self.0).expect("it is there").flatten();
        let names: Vec<_> = names.map(|entry| entry.file_name()).collect();
        assert_eq!(names, ["inside"], "nothing is made outside");
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Takes so many bytes and no more, as a disk does, and counts them.
pub(crate) struct Sink {
    pub(crate) left: usize,
    pub(crate) taken: u64,
}

impl Sink {
    pub(crate) fn new(left: usize) -> Self {
        Self { left, taken: 0 }
    }
}

impl std::io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let left = self.left.checked_sub(bytes.len()).ok_or(std::io::ErrorKind::StorageFull)?;
        self.left = left;
        self.taken += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

//! The bytes of a save's files: their hash, computed on all cores, and the marks by which a file is
//! known to be the one that was hashed.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root,
};
use blake3::{Hash, Hasher};
use rustix::fs::OFlags;

/// What one core hashes before it takes the next part: a power of two, so that it is a subtree of
/// BLAKE3's tree.
const PART: u64 = 4 * 1024 * 1024;
/// Read at a time: it still fits in a core's cache.
const BUFFER: usize = 256 * 1024;
/// More cores than this wait for memory only.
const CORES_MAX: usize = 8;

/// What tells a file from another one, and from itself after a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    dev: u64,
    ino: u64,
    pub(crate) bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Identity {
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        Ok(Self::from(&file.metadata()?))
    }

    /// Of what is at a path, links not followed.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::from(&path.symlink_metadata()?))
    }
}

impl From<&std::fs::Metadata> for Identity {
    fn from(meta: &std::fs::Metadata) -> Self {
        Self {
            dev: meta.dev(),
            ino: meta.ino(),
            bytes: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

/// Opens a regular file; links and everything else are refused.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no regular file"));
    }
    Ok(file)
}

/// BLAKE3 of a whole file, and its identity; an error if it changed meanwhile.
pub(crate) fn hash(file: &File) -> io::Result<(Hash, Identity)> {
    let before = Identity::of(file)?;
    let hash = hash_bytes(file, before.bytes)?;
    if Identity::of(file)? != before {
        return Err(io::Error::other("it changed while it was read"));
    }
    Ok((hash, before))
}

fn hash_bytes(file: &File, bytes: u64) -> io::Result<Hash> {
    if bytes <= PART {
        let mut hasher = Hasher::new();
        feed(&mut hasher, file, 0, bytes, &mut vec![0; BUFFER])?;
        return Ok(hasher.finalize());
    }
    let count = bytes.div_ceil(PART);
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(CORES_MAX);
    let next = AtomicU64::new(0);
    let worker = || hash_parts(file, bytes, &next);
    let mut parts = std::thread::scope(|scope| {
        let others: Vec<_> = (1..cores).map(|_| scope.spawn(worker)).collect();
        let mut parts = worker()?;
        for other in others {
            let found = other.join().map_err(|_| io::Error::other("a thread panicked"))?;
            parts.extend(found?);
        }
        io::Result::Ok(parts)
    })?;
    parts.sort_unstable_by_key(|(index, _)| *index);
    let values: Vec<ChainingValue> = parts.into_iter().map(|(_, value)| value).collect();
    debug_assert_eq!(values.len() as u64, count, "every part was taken by somebody");
    let (left, right) = values.split_at(left_of(values.len()));
    Ok(merge_subtrees_root(&merge(left), &merge(right), Mode::Hash))
}

/// Takes parts until none is left.
fn hash_parts(file: &File, bytes: u64, next: &AtomicU64) -> io::Result<Vec<(u64, ChainingValue)>> {
    let mut buffer = vec![0; BUFFER];
    let mut done = Vec::new();
    loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let from = index.saturating_mul(PART);
        if from >= bytes {
            return Ok(done);
        }
        let mut hasher = Hasher::new();
        hasher.set_input_offset(from);
        feed(&mut hasher, file, from, (from + PART).min(bytes), &mut buffer)?;
        done.push((index, hasher.finalize_non_root()));
    }
}

fn feed(
    hasher: &mut Hasher,
    file: &File,
    mut at: u64,
    until: u64,
    buffer: &mut [u8],
) -> io::Result<()> {
    while at < until {
        let most = usize::try_from(until - at).unwrap_or(usize::MAX).min(buffer.len());
        file.read_exact_at(&mut buffer[..most], at)?;
        hasher.update(&buffer[..most]);
        at += most as u64;
    }
    Ok(())
}

/// The root of a subtree that consists of these parts.
fn merge(parts: &[ChainingValue]) -> ChainingValue {
    if let [only] = parts {
        return *only;
    }
    let (left, right) = parts.split_at(left_of(parts.len()));
    merge_subtrees_non_root(&merge(left), &merge(right), Mode::Hash)
}

/// How many of several parts are on the left: the largest power of two that leaves some.
fn left_of(count: usize) -> usize {
    count.next_power_of_two() / 2
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_hash_on_all_cores_is_the_plain_one() {
        let part = usize::try_from(PART).unwrap();
        for bytes in [0, 1, 1024, part - 1, part, part + 1, 2 * part, 5 * part + 7, 9 * part] {
            let content: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&content).unwrap();
            assert_eq!(hash(&file).unwrap().0, blake3::hash(&content), "{bytes}");
        }
    }

    #[test]
    fn a_changed_file_has_another_identity() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, "one").unwrap();
        let before = Identity::at(&path).unwrap();
        assert_eq!(before, Identity::of(&File::open(&path).unwrap()).unwrap());
        std::fs::rename(&path, dir.path().join("y")).unwrap();
        std::fs::write(&path, "two").unwrap();
        assert_ne!(before, Identity::at(&path).unwrap());
    }

    #[test]
    fn a_link_or_a_directory_is_no_file() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link")).unwrap();
        assert!(open(&dir.path().join("link")).is_err());
        assert!(open(dir.path()).is_err());
    }
}

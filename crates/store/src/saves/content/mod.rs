//! The bytes of a save's files: their hash, computed on all cores, and the marks by which a file is
//! known to be the one that was hashed.

mod digest;
mod sparse;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root,
};
use blake3::{Hash, Hasher};
use parking_lot::Mutex;
use rustix::fs::{OFlags, SeekFrom, seek};
use rustix::io::Errno;

use crate::images::sparse::SparseMap;
pub(crate) use digest::{Digest, Form, StreamHasher};

/// What one core hashes before it takes the next part: a power of two, so that it is a subtree of
/// BLAKE3's tree.
const PART: u64 = 4 * 1024 * 1024;
/// Read at a time: it still fits in a core's cache.
const BUFFER: usize = 256 * 1024;
/// More cores than this wait for memory only.
const CORES_MAX: usize = 8;

/// Holes are fed from here: reading them would fill the host's memory with zeros.
static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];
/// What a hole consists of, on the usual filesystems.
const BLOCK: usize = 4096;
const _: () = assert!(BLOCK as u64 == SparseMap::ALIGNED, "what is exported is hashed on the way");
/// Files of which the hash is remembered; more than a host has machines asleep.
const REMEMBERED_MAX: usize = 1024;
/// Smaller ones are hashed in less than a millisecond.
const REMEMBERED_MIN: u64 = 1024 * 1024;

/// What tells a file from another one, and from itself after a change.
///
/// The time of the last change of its inode is not part of it: that also changes when the file gets
/// another name or loses one, and saves share files by such names. So a write after which somebody
/// sets back the time of the last modification goes unnoticed, until the bytes are read for a reason
/// of their own. The time of birth can't be set: a file that has the inode of an older one is
/// another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    dev: u64,
    ino: u64,
    pub(crate) bytes: u64,
    modified: (i64, i64),
    /// Not every filesystem knows.
    born: Option<SystemTime>,
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
            born: meta.created().ok(),
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

/// Hashes of large files that were read, so that a file that is in several saves is read once.
#[derive(Debug, Default)]
pub(crate) struct Hashes {
    remembered: Mutex<Remembered>,
}

#[derive(Debug, Default)]
struct Remembered {
    /// With the number of its last use.
    hashes: HashMap<(Identity, Form), (Hash, u64)>,
    uses: u64,
}

impl Hashes {
    /// The hash of a whole file, and its identity; read only if it was not before.
    pub(crate) fn of(&self, file: &File, form: Form) -> io::Result<(Digest, Identity)> {
        let identity = Identity::of(file)?;
        let remembered = self.remembered.lock().get(&(identity, form));
        if let Some(hash) = remembered {
            return Ok((Digest { form, hash }, identity));
        }
        self.read(file, form)
    }

    /// Whether a file is known to have this hash; a large one is not read for that.
    pub(crate) fn vouches(&self, file: &File, digest: Digest) -> bool {
        let Ok(identity) = Identity::of(file) else { return false };
        if identity.bytes < REMEMBERED_MIN {
            return self.read(file, digest.form).is_ok_and(|(found, _)| found == digest);
        }
        self.remembered.lock().get(&(identity, digest.form)) == Some(digest.hash)
    }

    /// [`Hashes::of`] a file that is read in any case.
    pub(crate) fn read(&self, file: &File, form: Form) -> io::Result<(Digest, Identity)> {
        let (hash, identity) = hash(file, form)?;
        if identity.bytes >= REMEMBERED_MIN {
            self.remembered.lock().insert((identity, form), hash);
        }
        Ok((Digest { form, hash }, identity))
    }
}

impl Remembered {
    fn get(&mut self, file: &(Identity, Form)) -> Option<Hash> {
        self.uses += 1;
        let (hash, last_use) = self.hashes.get_mut(file)?;
        *last_use = self.uses;
        Some(*hash)
    }

    fn insert(&mut self, file: (Identity, Form), hash: Hash) {
        let full = self.hashes.len() >= REMEMBERED_MAX && !self.hashes.contains_key(&file);
        let oldest = self.hashes.iter().min_by_key(|(_, (_, last_use))| *last_use);
        if let Some((oldest, _)) = oldest.filter(|_| full) {
            let oldest = *oldest;
            self.hashes.remove(&oldest);
        }
        self.uses += 1;
        self.hashes.insert(file, (hash, self.uses));
    }
}

/// The hash of a whole file, and its identity; an error if it changed meanwhile.
fn hash(file: &File, form: Form) -> io::Result<(Hash, Identity)> {
    let before = Identity::of(file)?;
    let hash = match form {
        Form::Plain => hash_bytes(file, before.bytes)?,
        Form::Sparse => sparse::hash_bytes(file, before.bytes)?,
    };
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
    let next = AtomicU64::new(0);
    let mut parts = on_all_cores(count, || hash_parts(file, bytes, &next))?;
    parts.sort_unstable_by_key(|(index, _)| *index);
    let values: Vec<ChainingValue> = parts.into_iter().map(|(_, value)| value).collect();
    debug_assert_eq!(values.len() as u64, count, "every part was taken by somebody");
    let (left, right) = values.split_at(left_of(values.len()));
    Ok(merge_subtrees_root(&merge(left), &merge(right), Mode::Hash))
}

/// What several workers found who share so many parts.
fn on_all_cores<T: Send>(
    parts: u64,
    worker: impl Fn() -> io::Result<Vec<T>> + Sync,
) -> io::Result<Vec<T>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(CORES_MAX);
    let cores = usize::try_from(parts).unwrap_or(usize::MAX).min(cores);
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..cores).map(|_| scope.spawn(&worker)).collect();
        let mut found = worker()?;
        for other in others {
            let more = other.join().map_err(|_| io::Error::other("a thread panicked"))?;
            found.extend(more?);
        }
        Ok(found)
    })
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
        let data = data_in(file, at, until)?;
        while at < data.start {
            let most = usize::try_from(data.start - at).unwrap_or(usize::MAX).min(ZEROS.len());
            hasher.update(&ZEROS[..most]);
            at += most as u64;
        }
        while at < data.end {
            let most = usize::try_from(data.end - at).unwrap_or(usize::MAX).min(buffer.len());
            file.read_exact_at(&mut buffer[..most], at)?;
            hasher.update(&buffer[..most]);
            at += most as u64;
        }
    }
    Ok(())
}

/// The first part of a file that is no hole; empty and at the end if there is none.
fn data_in(file: &File, from: u64, until: u64) -> io::Result<Range<u64>> {
    let start = match seek(file, SeekFrom::Data(from)) {
        Ok(start) => start.min(until),
        Err(Errno::NXIO) => until,
        // A filesystem that does not know its holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(from..until),
        Err(error) => return Err(error.into()),
    };
    if start == until {
        return Ok(until..until);
    }
    Ok(start..seek(file, SeekFrom::Hole(start))?.min(until))
}

/// The runs of blocks in a content that are not all zeros, and where in it they are.
fn runs(content: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let mut blocks = content.chunks(BLOCK).map(|block| block != &ZEROS[..block.len()]).enumerate();
    std::iter::from_fn(move || {
        let first = blocks.find(|(_, written)| *written)?.0;
        let end = blocks.find(|(_, written)| !*written).map(|(index, _)| index * BLOCK);
        let (start, end) = (first * BLOCK, end.unwrap_or(content.len()));
        Some((start, &content[start..end]))
    })
}

/// Writes bytes into a part of a file that is a hole, and leaves it one where they are zeros.
pub(crate) fn write_around_zeros(file: &File, at: u64, bytes: &[u8]) -> io::Result<()> {
    runs(bytes).try_for_each(|(offset, run)| file.write_all_at(run, at + offset as u64))
}

/// Calls with every run of a file's blocks that are not all zeros, in order. Holes are not read. It
/// begins at the begin of a block.
pub(crate) fn visit_written(
    file: &File,
    mut at: u64,
    until: u64,
    mut visit: impl FnMut(u64, &[u8]),
) -> io::Result<()> {
    let (block, mut buffer) = (BLOCK as u64, Vec::new());
    while at < until {
        let data = data_in(file, at, until)?;
        if data.is_empty() {
            break;
        }
        buffer.resize(BUFFER, 0);
        // Whole blocks, even if those of the filesystem are smaller.
        at = data.start - data.start % block;
        let end = data.end.next_multiple_of(block).min(until);
        while at < end {
            let most = usize::try_from(end - at).unwrap_or(usize::MAX).min(BUFFER);
            file.read_exact_at(&mut buffer[..most], at)?;
            for (offset, run) in runs(&buffer[..most]) {
                visit(at + offset as u64, run);
            }
            at += most as u64;
        }
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
mod tests;

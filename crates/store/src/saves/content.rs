//! The bytes of a save's files: their hash, computed on all cores, and the marks by which a file is
//! known to be the one that was hashed.

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
    hashes: HashMap<Identity, (Hash, u64)>,
    uses: u64,
}

impl Hashes {
    /// BLAKE3 of a whole file, and its identity; read only if it was not before.
    pub(crate) fn of(&self, file: &File) -> io::Result<(Hash, Identity)> {
        let identity = Identity::of(file)?;
        let mut remembered = self.remembered.lock();
        remembered.uses += 1;
        let now = remembered.uses;
        if let Some((hash, last_use)) = remembered.hashes.get_mut(&identity) {
            *last_use = now;
            return Ok((*hash, identity));
        }
        drop(remembered);
        self.read(file)
    }

    /// [`Hashes::of`] a file that is read in any case.
    pub(crate) fn read(&self, file: &File) -> io::Result<(Hash, Identity)> {
        let (hash, identity) = hash(file)?;
        if identity.bytes >= REMEMBERED_MIN {
            self.remembered.lock().insert(identity, hash);
        }
        Ok((hash, identity))
    }
}

impl Remembered {
    fn insert(&mut self, identity: Identity, hash: Hash) {
        let full = self.hashes.len() >= REMEMBERED_MAX && !self.hashes.contains_key(&identity);
        let oldest = self.hashes.iter().min_by_key(|(_, (_, last_use))| *last_use);
        if let Some((oldest, _)) = oldest.filter(|_| full) {
            let oldest = *oldest;
            self.hashes.remove(&oldest);
        }
        self.uses += 1;
        self.hashes.insert(identity, (hash, self.uses));
    }
}

/// BLAKE3 of a whole file, and its identity; an error if it changed meanwhile.
fn hash(file: &File) -> io::Result<(Hash, Identity)> {
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

/// Writes bytes into a part of a file that is a hole, and leaves it one where they are zeros.
pub(crate) fn write_around_zeros(file: &File, mut at: u64, bytes: &[u8]) -> io::Result<()> {
    let zero = |block: &[u8]| block == &ZEROS[..block.len()];
    let blocks: Vec<&[u8]> = bytes.chunks(BLOCK).collect();
    let mut rest = bytes;
    for alike in blocks.chunk_by(|one, next| zero(one) == zero(next)) {
        let (part, others) = rest.split_at(alike.iter().map(|block| block.len()).sum());
        if !zero(alike[0]) {
            file.write_all_at(part, at)?;
        }
        (at, rest) = (at + part.len() as u64, others);
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
    fn another_name_does_not_make_another_file() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("x"), dir.path().join("y"));
        std::fs::write(&path, "one").unwrap();
        let before = Identity::at(&path).unwrap();
        std::fs::hard_link(&path, &link).unwrap();
        assert_eq!(before, Identity::at(&link).unwrap());
        std::fs::remove_file(&path).unwrap();
        assert_eq!(before, Identity::at(&link).unwrap());
    }

    #[test]
    fn a_file_with_the_times_of_another_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, "one").unwrap();
        let before = Identity::at(&path).unwrap();
        let modified = path.metadata().unwrap().modified().unwrap();
        // Whatever inode it gets: many filesystems take the one that was just given back.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "two").unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        assert_eq!(path.metadata().unwrap().modified().unwrap(), modified);
        assert_ne!(before, Identity::at(&path).unwrap());
    }

    #[test]
    fn holes_are_hashed_as_zeros() {
        let part = usize::try_from(PART).unwrap();
        for (bytes, written) in [
            (0, vec![]),
            (part, vec![]),
            (3 * part + 5, vec![]),
            (3 * part, vec![0, part + 70_000, 3 * part - 100]),
            (5 * part + 4096, vec![2 * part - 50, 5 * part]),
            (100_000, vec![50_000]),
        ] {
            let file = tempfile::tempfile().unwrap();
            file.set_len(bytes as u64).unwrap();
            let mut content = vec![0; bytes];
            for at in written {
                content[at..at + 100].fill(7);
                file.write_all_at(&[7; 100], at as u64).unwrap();
            }
            assert_eq!(hash(&file).unwrap().0, blake3::hash(&content), "{bytes}");
        }
    }

    #[test]
    fn a_large_file_is_read_once_whatever_its_names_are() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("x"), dir.path().join("y"));
        let content = vec![7; usize::try_from(REMEMBERED_MIN).unwrap()];
        std::fs::write(&path, &content).unwrap();
        let modified = path.metadata().unwrap().modified().unwrap();
        let hashes = Hashes::default();
        let expected = blake3::hash(&content);
        assert_eq!(hashes.of(&open(&path).unwrap()).unwrap().0, expected);
        std::fs::hard_link(&path, &link).unwrap();
        // What can't be seen from outside is not looked for, unless it is asked for.
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"x", 5).unwrap();
        file.set_modified(modified).unwrap();
        let file = open(&link).unwrap();
        assert_eq!(hashes.of(&file).unwrap().0, expected, "it was not read again");
        assert_ne!(hashes.read(&file).unwrap().0, expected);
        assert_ne!(hashes.of(&file).unwrap().0, expected, "the last word counts");
    }

    #[test]
    fn what_was_not_used_for_long_is_forgotten_first() {
        let (dir, mut remembered) = (tempfile::tempdir().unwrap(), Remembered::default());
        std::fs::write(dir.path().join("x"), "").unwrap();
        let some = Identity::at(&dir.path().join("x")).unwrap();
        let numbered = |number| Identity { bytes: number, ..some };
        for number in 0..REMEMBERED_MAX as u64 {
            remembered.insert(numbered(number), blake3::hash(b""));
        }
        remembered.insert(numbered(0), blake3::hash(b"again"));
        assert_eq!(remembered.hashes.len(), REMEMBERED_MAX);
        remembered.insert(numbered(u64::MAX), blake3::hash(b""));
        assert_eq!(remembered.hashes.len(), REMEMBERED_MAX);
        assert!(remembered.hashes.contains_key(&numbered(0)));
        assert!(!remembered.hashes.contains_key(&numbered(1)));
    }

    #[test]
    fn a_link_or_a_directory_is_no_file() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link")).unwrap();
        assert!(open(&dir.path().join("link")).is_err());
        assert!(open(dir.path()).is_err());
    }
}

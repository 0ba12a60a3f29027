//! The directory of kernels: put there whole, checked when taken, removed at once.
//!
//! Invariants
//! - a directory under a release was complete on disk before it got that name;
//! - what [`newest`] returns has the hashes that were written when it was put there;
//! - work in progress has a name that no release can have, and what a crash left of it is removed by
//!   the next one who works here, which the lock tells from somebody who is still at it.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use serde::{Deserialize, Serialize};

use crate::modules::Module;
use crate::{Kernel, KernelError, failed, release};

/// Raised when a program that does not know of the change would do harm.
const FORMAT: u32 = 1;
/// A list of at most 65 files.
const RECORD_MAX: u64 = 64 << 10;
const RECORD: &str = "kernel.json";
const VMLINUX: &str = "vmlinux";
const MODULES: &str = "modules";
const LOCK: &str = ".lock";
const STAGE: &str = ".stage-";
/// Digits of an id: 128 bits, nobody finds two of them.
const ID_DIGITS: usize = 32;

/// A kernel that is not installed yet.
#[derive(Debug)]
pub(crate) struct Draft {
    pub release: String,
    pub source: String,
    pub sha256: Option<String>,
    pub vmlinux: Vec<u8>,
    pub modules: Vec<Module>,
}

/// A kernel among others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub release: String,
    /// None: nobody can tell.
    pub id: Option<String>,
    /// The name of the package, or the path of the file.
    pub source: Option<String>,
    pub bytes: u64,
    /// Why it can't be used.
    pub damage: Option<String>,
}

/// `kernel.json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    format: u32,
    release: String,
    id: String,
    source: String,
    /// Of the package, as its distribution knows it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    sha256: Option<String>,
    files: Vec<Entry>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    size: u64,
    blake3: String,
}

/// The newest kernel in a directory of kernels; checked against its hashes.
pub fn newest(kernels: &Path) -> Result<Kernel, KernelError> {
    let release = releases(kernels)?.into_iter().next().ok_or(KernelError::None)?;
    let damaged = |why| KernelError::Damaged { release: release.clone(), why };
    let dir = kernels.join(&release);
    let record = load(&dir).map_err(damaged)?;
    verify(&dir, &record).map_err(damaged)?;
    Ok(kernel(&dir, &record))
}

/// All kernels, the newest first, each checked against its hashes.
pub fn list(kernels: &Path) -> Result<Vec<Listed>, KernelError> {
    let listed = |release: String| {
        let dir = kernels.join(&release);
        let record = match load(&dir) {
            Ok(record) => record,
            Err(why) => {
                return Listed { release, id: None, source: None, bytes: 0, damage: Some(why) };
            }
        };
        let damage = verify(&dir, &record).err();
        let bytes = record.files.iter().map(|file| file.size).sum();
        Listed { release, id: Some(record.id), source: Some(record.source), bytes, damage }
    };
    Ok(releases(kernels)?.into_iter().map(listed).collect())
}

/// Removes a kernel. Machines that were booted with it, and saves of them, do not need it.
pub fn remove(kernels: &Path, release: &str) -> Result<(), KernelError> {
    let unknown = || KernelError::Unknown(release.to_owned());
    if !release::is_name(release) || !kernels.join(release).is_dir() {
        return Err(unknown());
    }
    let _lock = lock(kernels)?;
    let stage = stage(kernels)?;
    let gone = stage.path().join("removed");
    let action = || failed(format!("remove the kernel {release}"));
    std::fs::rename(kernels.join(release), gone).map_err(action())?;
    sync(kernels).map_err(action())?;
    stage.close().map_err(action())
}

/// The kernel that was made from a package with this hash, if it is here and whole.
pub(crate) fn of_package(kernels: &Path, sha256: &str) -> Option<Kernel> {
    let dirs = releases(kernels).ok()?.into_iter().map(|release| kernels.join(release));
    let mut records = dirs.filter_map(|dir| load(&dir).ok().map(|record| (dir, record)));
    let (dir, record) = records.find(|(_, record)| record.sha256.as_deref() == Some(sha256))?;
    verify(&dir, &record).ok()?;
    Some(kernel(&dir, &record))
}

/// Whether a kernel could be put there: known before the long part of the work is done.
pub(crate) fn check_place(kernels: &Path) -> Result<(), KernelError> {
    make_dir(kernels, 0o700)
        .map_err(failed(format!("make the directory {}", kernels.display())))?;
    lock(kernels).map(drop)
}

/// Puts a kernel under its release; one of the same release is replaced.
pub(crate) fn put(kernels: &Path, draft: Draft) -> Result<Kernel, KernelError> {
    let action = || failed(format!("write the kernel {}", draft.release));
    make_dir(kernels, 0o700).map_err(action())?;
    let _lock = lock(kernels)?;
    let stage = stage(kernels)?;
    let fresh = stage.path().join("kernel");
    let record = write(&fresh, &draft).map_err(action())?;
    let place = kernels.join(&draft.release);
    // What was there before goes with the stage.
    let flags = if place.exists() { RenameFlags::EXCHANGE } else { RenameFlags::empty() };
    renameat_with(CWD, &fresh, CWD, &place, flags).map_err(|error| action()(error.into()))?;
    sync(kernels).map_err(action())?;
    stage.close().map_err(action())?;
    Ok(kernel(&place, &record))
}

fn write(dir: &Path, draft: &Draft) -> io::Result<Record> {
    make_dir(dir, 0o755)?;
    let modules = dir.join(MODULES);
    make_dir(&modules, 0o755)?;
    let mut files = vec![write_file(dir, VMLINUX.to_owned(), &draft.vmlinux)?];
    for (at, module) in draft.modules.iter().enumerate() {
        let name = format!("{MODULES}/{at:02}-{}.ko", module.name);
        files.push(write_file(dir, name, &module.bytes)?);
    }
    sync(&modules)?;
    let id = identity(&draft.release, &files);
    let (release, source) = (draft.release.clone(), draft.source.clone());
    let record =
        Record { format: FORMAT, release, id, source, sha256: draft.sha256.clone(), files };
    let text = serde_json::to_vec_pretty(&record).map_err(io::Error::other)?;
    write_file(dir, RECORD.to_owned(), &text)?;
    sync(dir)?;
    Ok(record)
}

/// Readable for everybody, whoever asked for it: QEMU runs as nobody in particular.
fn write_file(dir: &Path, name: String, bytes: &[u8]) -> io::Result<Entry> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(dir.join(&name))?;
    file.write_all(bytes)?;
    file.set_permissions(Permissions::from_mode(0o644))?;
    file.sync_all()?;
    let blake3 = blake3::hash(bytes).to_hex().to_string();
    Ok(Entry { name, size: bytes.len() as u64, blake3 })
}

/// Of everything that a guest could notice, and of nothing else.
fn identity(release: &str, files: &[Entry]) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("torpor kernel 1");
    hasher.update(release.as_bytes());
    for file in files {
        hasher.update(format!("\n{} {} {}", file.name, file.size, file.blake3).as_bytes());
    }
    hasher.finalize().to_hex()[..ID_DIGITS].to_owned()
}

/// Names of kernels, the newest first; whatever else lies around is not ours to complain about.
fn releases(kernels: &Path) -> Result<Vec<String>, KernelError> {
    let action = || failed(format!("read the kernels in {}", kernels.display()));
    let entries = match std::fs::read_dir(kernels) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(action()(error)),
    };
    let mut releases = Vec::new();
    for entry in entries {
        let entry = entry.map_err(action())?;
        let name =
            entry.file_name().to_str().filter(|name| release::is_name(name)).map(str::to_owned);
        let is_kernel = entry.path().join(RECORD).is_file();
        releases.extend(name.filter(|_| is_kernel));
    }
    releases.sort_by(|one, other| release::compare(other, one).then_with(|| other.cmp(one)));
    Ok(releases)
}

/// What is recorded of a kernel, if it can be that.
fn load(dir: &Path) -> Result<Record, String> {
    let mut text = Vec::new();
    let file = File::open(dir.join(RECORD)).map_err(|error| format!("{RECORD}: {error}"))?;
    file.take(RECORD_MAX).read_to_end(&mut text).map_err(|error| format!("{RECORD}: {error}"))?;
    let record: Record =
        serde_json::from_slice(&text).map_err(|error| format!("{RECORD}: {error}"))?;
    if record.format != FORMAT {
        return Err(format!("{RECORD} has format {}, known is {FORMAT}", record.format));
    }
    let named = dir.file_name().and_then(|name| name.to_str()) == Some(&record.release);
    let listed = record.files.first().is_some_and(|file| file.name == VMLINUX)
        && record.files[1..].iter().all(|file| is_module(&file.name));
    if !named || !listed || record.id != identity(&record.release, &record.files) {
        return Err(format!("{RECORD} does not fit to itself"));
    }
    Ok(record)
}

fn is_module(name: &str) -> bool {
    let name = name.strip_prefix(MODULES).and_then(|name| name.strip_prefix('/'));
    let ours = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    name.is_some_and(|name| name.ends_with(".ko") && name.chars().all(ours))
}

fn verify(dir: &Path, record: &Record) -> Result<(), String> {
    for entry in &record.files {
        let hash = hash(&dir.join(&entry.name), entry.size);
        let hash = hash.map_err(|error| format!("{}: {error}", entry.name))?;
        if hash != entry.blake3 {
            return Err(format!("{} is not what was put there", entry.name));
        }
    }
    Ok(())
}

fn hash(path: &Path, size: u64) -> io::Result<String> {
    let file = File::open(path)?;
    if file.metadata()?.len() != size {
        return Err(io::Error::other("it is not as long as it was"));
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file.take(size))?;
    Ok(hasher.finalize().to_hex().to_string())
}

fn kernel(dir: &Path, record: &Record) -> Kernel {
    let path = |entry: &Entry| dir.join(&entry.name);
    Kernel {
        release: record.release.clone(),
        id: record.id.clone(),
        vmlinux: path(&record.files[0]),
        modules: record.files[1..].iter().map(path).collect(),
    }
}

/// Only one at a time changes the directory; the lock goes with the file.
fn lock(kernels: &Path) -> Result<File, KernelError> {
    let action = || failed(format!("lock {}", kernels.display()));
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    let file = options.open(kernels.join(LOCK)).map_err(action())?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(KernelError::Busy(kernels.to_owned())),
        Err(error) => Err(action()(error.into())),
    }
}

/// A directory for work in progress; those of others who did not finish are removed. To be called
/// with the lock.
fn stage(kernels: &Path) -> Result<tempfile::TempDir, KernelError> {
    for entry in std::fs::read_dir(kernels).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(STAGE)
            && let Err(error) = std::fs::remove_dir_all(entry.path())
        {
            tracing::warn!(path = %entry.path().display(), %error, "work in progress was not cleared");
        }
    }
    let made = tempfile::Builder::new().prefix(STAGE).tempdir_in(kernels);
    made.map_err(failed(format!("make a directory in {}", kernels.display())))
}

fn make_dir(dir: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(dir)
}

fn sync(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(release: &str, vmlinux: &[u8]) -> Draft {
        let modules = vec![Module { name: "erofs".into(), bytes: b"module".to_vec() }];
        let (release, source) = (release.to_owned(), "a test".to_owned());
        Draft { release, source, sha256: Some("ab".into()), vmlinux: vmlinux.to_vec(), modules }
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_newest_is_found_by_number_not_by_text() {
        let dir = tempfile::tempdir().unwrap();
        for release in ["6.9.1-x", "6.12.95-x", "6.1.0-x"] {
            put(dir.path(), draft(release, b"kernel")).unwrap();
        }
        assert_eq!(newest(dir.path()).unwrap().release, "6.12.95-x");
        let listed = list(dir.path()).unwrap();
        let releases: Vec<_> = listed.iter().map(|kernel| kernel.release.as_str()).collect();
        assert_eq!(releases, ["6.12.95-x", "6.9.1-x", "6.1.0-x"]);
        assert!(listed.iter().all(|kernel| kernel.damage.is_none() && kernel.bytes == 12));
    }

    #[test]
    fn where_there_is_none_it_is_said() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(newest(dir.path()), Err(KernelError::None)));
        assert!(matches!(newest(&dir.path().join("gone")), Err(KernelError::None)));
        // What is no kernel does not count as one.
        std::fs::create_dir(dir.path().join("6.1.0-half")).unwrap();
        std::fs::write(dir.path().join("notes"), "x").unwrap();
        assert!(matches!(newest(dir.path()), Err(KernelError::None)));
    }

    #[test]
    fn a_kernel_that_was_changed_is_not_booted() {
        let changes: [fn(&Kernel); 4] = [
            |kernel| std::fs::write(&kernel.vmlinux, b"Kernel").unwrap(),
            |kernel| std::fs::write(&kernel.vmlinux, b"kernel and more").unwrap(),
            |kernel| std::fs::write(&kernel.modules[0], b"modulE").unwrap(),
            |kernel| std::fs::remove_file(&kernel.modules[0]).unwrap(),
        ];
        for change in changes {
            let dir = tempfile::tempdir().unwrap();
            let kernel = put(dir.path(), draft("6.1.0-x", b"kernel")).unwrap();
            change(&kernel);
            let error = newest(dir.path()).unwrap_err();
            assert!(matches!(&error, KernelError::Damaged { .. }), "{error}");
            assert!(error.hint().unwrap().contains("torpor kernel rm 6.1.0-x"));
            assert!(list(dir.path()).unwrap()[0].damage.is_some());
            assert_eq!(of_package(dir.path(), "ab"), None);
            remove(dir.path(), "6.1.0-x").unwrap();
            assert!(matches!(newest(dir.path()), Err(KernelError::None)));
        }
    }

    #[test]
    fn a_record_that_was_changed_is_refused() {
        let changes: [(&str, &str); 6] = [
            ("\"name\": \"vmlinux\"", "\"name\": \"../../vmlinux\""),
            ("modules/00-erofs.ko", "modules/../../x.ko"),
            ("\"format\": 1", "\"format\": 2"),
            ("\"release\": \"6.1.0-x\"", "\"release\": \"6.1.0-y\""),
            ("\"id\": \"", "\"id\": \"0"),
            ("{", ""),
        ];
        for (from, to) in changes {
            let dir = tempfile::tempdir().unwrap();
            put(dir.path(), draft("6.1.0-x", b"kernel")).unwrap();
            let record = dir.path().join("6.1.0-x").join(RECORD);
            let text = std::fs::read_to_string(&record).unwrap();
            assert!(text.contains(from), "{text}");
            std::fs::write(&record, text.replacen(from, to, 1)).unwrap();
            let error = newest(dir.path()).unwrap_err();
            assert!(matches!(&error, KernelError::Damaged { .. }), "{to}: {error}");
        }
    }

    #[test]
    fn the_id_is_that_of_the_content() {
        let dir = tempfile::tempdir().unwrap();
        let first = put(dir.path(), draft("6.1.0-x", b"kernel")).unwrap();
        let again = put(dir.path(), Draft { source: "else".into(), ..draft("6.1.0-x", b"kernel") });
        assert_eq!(first.id, again.unwrap().id);
        let other = put(dir.path(), draft("6.1.0-x", b"another")).unwrap();
        assert_ne!(first.id, other.id);
        // It replaced the one before.
        assert_eq!(newest(dir.path()).unwrap(), other);
        assert_eq!(names(dir.path()), [LOCK, "6.1.0-x"]);
    }

    #[test]
    fn a_package_that_is_here_is_known_by_its_hash() {
        let dir = tempfile::tempdir().unwrap();
        let kernel = put(dir.path(), draft("6.1.0-x", b"kernel")).unwrap();
        assert_eq!(of_package(dir.path(), "ab"), Some(kernel));
        assert_eq!(of_package(dir.path(), "cd"), None);
    }

    #[test]
    fn what_a_crash_left_goes_with_the_next_work() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join(".stage-dead/kernel")).unwrap();
        put(dir.path(), draft("6.1.0-x", b"kernel")).unwrap();
        assert_eq!(names(dir.path()), [LOCK, "6.1.0-x"]);
    }

    #[test]
    fn two_do_not_work_at_the_same_time() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock(dir.path()).unwrap();
        let error = put(dir.path(), draft("6.1.0-x", b"kernel")).unwrap_err();
        assert!(matches!(error, KernelError::Busy(_)), "{error}");
        drop(held);
        put(dir.path(), draft("6.1.0-x", b"kernel")).unwrap();
    }

    #[test]
    fn only_kernels_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let kernels = dir.path().join("kernels");
        put(&kernels, draft("6.1.0-x", b"kernel")).unwrap();
        std::fs::create_dir(dir.path().join("precious")).unwrap();
        for name in ["6.1.0-y", "../precious", "..", ".", "", ".lock", "6.1.0-x/modules"] {
            let error = remove(&kernels, name).unwrap_err();
            assert!(matches!(error, KernelError::Unknown(_)), "{name}: {error}");
        }
        remove(&kernels, "6.1.0-x").unwrap();
        assert_eq!(names(&kernels), [LOCK]);
        assert!(dir.path().join("precious").exists());
    }

    #[test]
    fn what_qemu_reads_is_readable_for_everybody() {
        let dir = tempfile::tempdir().unwrap();
        let kernel = put(dir.path(), draft("6.1.0-x", b"kernel")).unwrap();
        for path in [&kernel.vmlinux, &kernel.modules[0]] {
            assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o644);
        }
    }
}

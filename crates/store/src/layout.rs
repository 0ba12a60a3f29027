//! The data directory: every path in it, and nothing else knows one.
//!
//! ```text
//!  VERSION      format of all below; a newer one than ours is refused, untouched
//!  node         who this host is among others of the installation
//!  lock         held by the daemon that uses the directory; contains its process id
//!  ledger.db    SQLite (with -wal and -shm beside it)
//!  secret.key   the vault's key, if it has no other; readable for nobody else
//!  tls/         certificates with their keys, and accounts for getting them
//!  kernels/     prepared kernels for microVMs
//!  engine/HASH/ a program that saves were made by, and may need again
//!  images/ID/   one committed image
//!  layers/HEX   a layer of a registry, compressed as it came, by its digest; HEX.part is still coming
//!  blobs/HASH   a content that saves have, each stored once
//!  saves/ID/    the files of one save, as links to blobs; what it lacks is linked again
//!  logs/        what processes said: ID.jsonl, and ID.jsonl.1 before it
//!  audit/       what sandboxes sent out: egress.jsonl, and .1 to .3 before it
//!  volumes/ID/  one volume or drive
//!  jobs/ID/     files that tasks of one execution left: INDEX.tar
//!  staging/     work in progress; emptied at start
//!  scratch/     overlay disks of machines; belongs to the engine
//! ```

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, flock};
use rustix::io::Errno;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::{ExecutionId, ImageId, NodeId, SandboxId, SaveId};

use crate::files;

/// Raised when a program that does not know of the change would do harm.
const FORMAT: u32 = 1;
/// Longest VERSION or lock file that is read: a number and a line end.
const NUMBER_FILE_MAX: u64 = 64;
/// What may be in a directory that was never set up: a lock from a crash in the first instant, and
/// what a fresh filesystem brings. Kernels may be fetched before the first daemon starts.
const HARMLESS: [&str; 4] = ["lock", "VERSION.draft", "lost+found", "kernels"];

/// How often, and how far apart, removal of an abandoned stage is tried: five seconds in all, within
/// which a killed process is gone.
const ABANDON_TRIES: usize = 50;
const ABANDON_PAUSE: Duration = Duration::from_millis(100);

/// An open data directory. While it lives, no other daemon can open the same one.
#[derive(Debug)]
pub struct Layout {
    root: PathBuf,
    tag: String,
    node: NodeId,
    /// The flock goes with the file, also when the process dies.
    _lock: File,
}

impl Layout {
    /// Opens or creates the directory, alone. On `Err` nothing was changed in a directory that is
    /// not ours, too new, or in use.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        make_dir(dir)?;
        let root = dir.canonicalize().map_err(refused(dir, "can't be opened"))?;
        // Before the lock, which would already be a change.
        let fresh = check_version(&root)?;
        close_to_others(&root)?;
        let lock = take_lock(&root)?;
        if fresh {
            let text = format!("{FORMAT}\n");
            files::write_whole(&root.join("VERSION"), text.as_bytes())
                .map_err(files::failed("write the VERSION file of the data directory"))?;
        }
        let tag = blake3::hash(root.as_os_str().as_encoded_bytes()).to_hex()[..8].to_owned();
        let node = node_of(&root)?;
        let layout = Self { root, tag, node, _lock: lock };
        let (staging, scratch) = (layout.staging(), layout.scratch());
        let (logs, audits) = (layout.logs(), layout.audits());
        let (blobs, saves) = (layout.blobs(), layout.saves());
        for dir in [layout.images(), layout.layers(), blobs, saves, logs, audits, staging, scratch]
        {
            make_dir(&dir)?;
        }
        layout.clear_staging();
        Ok(layout)
    }

    /// The process id of the daemon that uses a directory now; changes nothing in it.
    pub fn user(dir: &Path) -> Option<u32> {
        let lock = File::open(dir.join("lock")).ok()?;
        match flock(&lock, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK) => read_number(lock).ok().flatten(),
            Ok(()) | Err(_) => None,
        }
    }

    /// Eight hexadecimal digits that tell this installation from others on the same host.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// This host, for ever: the data directory says who it is.
    pub fn node(&self) -> &NodeId {
        &self.node
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn ledger(&self) -> PathBuf {
        self.root.join("ledger.db")
    }

    /// Of a data directory that somebody else has open.
    pub(crate) fn certificates(data_dir: &Path) -> PathBuf {
        data_dir.join("tls")
    }

    pub(crate) fn secret_key(&self) -> PathBuf {
        self.root.join("secret.key")
    }

    /// Programs of an engine that saves were made by.
    pub fn engine_builds(&self) -> PathBuf {
        self.root.join("engine")
    }

    /// What cache mounts of image builds hold between builds.
    pub(crate) fn build_mounts(&self) -> PathBuf {
        self.root.join("build-mounts")
    }

    /// Kernels for microVMs.
    pub fn kernels(&self) -> PathBuf {
        Self::kernels_in(&self.root)
    }

    /// The same of a data directory that somebody else may have open.
    pub fn kernels_in(data_dir: &Path) -> PathBuf {
        data_dir.join("kernels")
    }

    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    pub fn image(&self, id: &ImageId) -> PathBuf {
        self.images().join(id.as_str())
    }

    pub(crate) fn layers(&self) -> PathBuf {
        self.root.join("layers")
    }

    pub(crate) fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }

    pub(crate) fn blob(&self, hash: &str) -> PathBuf {
        self.blobs().join(hash)
    }

    pub fn saves(&self) -> PathBuf {
        self.root.join("saves")
    }

    pub fn save(&self, id: &SaveId) -> PathBuf {
        self.saves().join(id.as_str())
    }

    pub(crate) fn logs(&self) -> PathBuf {
        self.root.join("logs")
    }

    /// The newest lines of a sandbox.
    pub(crate) fn journal(&self, id: &SandboxId) -> PathBuf {
        self.logs().join(format!("{id}.jsonl"))
    }

    /// The lines before those in [`Layout::journal`].
    pub(crate) fn journal_before(&self, id: &SandboxId) -> PathBuf {
        self.logs().join(format!("{id}.jsonl.1"))
    }

    /// What sandboxes sent out: the file that grows, or the one so many before it.
    pub(crate) fn audit(&self, before: usize) -> PathBuf {
        let name = match before {
            0 => "egress.jsonl".to_owned(),
            before => format!("egress.jsonl.{before}"),
        };
        self.audits().join(name)
    }

    fn audits(&self) -> PathBuf {
        self.root.join("audit")
    }

    pub fn scratch(&self) -> PathBuf {
        self.root.join("scratch")
    }

    /// Volumes and drives, which have rows in the ledger.
    pub fn volumes(&self) -> PathBuf {
        self.root.join("volumes")
    }

    pub(crate) fn results(&self) -> PathBuf {
        self.root.join("jobs")
    }

    pub(crate) fn execution_results(&self, id: &ExecutionId) -> PathBuf {
        self.results().join(id.as_str())
    }

    pub(crate) fn task_results(&self, id: &ExecutionId, index: u32) -> PathBuf {
        self.execution_results(id).join(format!("{index}.tar"))
    }

    /// What microVMs begin from; made anew if it is missing.
    pub fn templates(&self) -> PathBuf {
        self.root.join("templates")
    }

    fn staging(&self) -> PathBuf {
        self.root.join("staging")
    }

    /// A fresh directory for work in progress, on the same filesystem as everything else.
    pub fn stage(&self) -> Result<Stage, StoreError> {
        let path = self.draft()?;
        make_dir(&path)?;
        Ok(Stage { path })
    }

    /// Takes a committed directory out of its place at once; its files go with the returned value.
    pub(crate) fn unplace(&self, dir: &Path) -> Result<Stage, StoreError> {
        let path = self.draft()?;
        std::fs::rename(dir, &path)
            .map_err(files::failed("move what is removed out of its place"))?;
        Ok(Stage { path })
    }

    /// A path for work in progress; nothing is there.
    pub(crate) fn draft(&self) -> Result<PathBuf, StoreError> {
        let mut bytes = [0u8; 8];
        getrandom::fill(&mut bytes).map_err(StoreError::failed("get a random number"))?;
        Ok(self.staging().join(format!("{:016x}", u64::from_le_bytes(bytes))))
    }

    /// What an earlier daemon left is of no use, and no reason not to start.
    fn clear_staging(&self) {
        let left = std::fs::read_dir(self.staging()).into_iter().flatten().flatten();
        for entry in left {
            if let Err(error) = files::remove_tree(&entry.path()) {
                tracing::warn!(path = %entry.path().display(), %error, "staging was not cleared");
            }
        }
    }
}

/// A directory that goes away with this value, unless it was renamed.
#[derive(Debug)]
pub struct Stage {
    path: PathBuf,
}

impl Stage {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it in the background, patiently: processes that are being killed may still write.
    pub(crate) fn abandon(self) {
        std::thread::spawn(move || {
            for _ in 0..ABANDON_TRIES {
                if files::remove_tree(&self.path).is_ok() {
                    break;
                }
                std::thread::sleep(ABANDON_PAUSE);
            }
            // What is left now is complained about, and goes at the next start.
            drop(self);
        });
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Err(error) = files::remove_tree(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "staging was not cleared");
        }
    }
}

/// For nobody else.
pub(crate) fn make_dir(dir: &Path) -> Result<(), StoreError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(refused(dir, "can't be created"))
}

/// Whoever writes into the data directory is root in every sandbox.
fn close_to_others(dir: &Path) -> Result<(), StoreError> {
    let stat =
        rustix::fs::stat(dir).map_err(|error| refused(dir, "can't be read")(error.into()))?;
    if stat.st_uid != rustix::process::geteuid().as_raw() {
        return Err(StoreError::Invalid(format!(
            "the data directory {} belongs to user {}: run torpor as that user, or choose another",
            dir.display(),
            stat.st_uid
        )));
    }
    let others = Mode::WGRP | Mode::WOTH;
    let mode = Mode::from_raw_mode(stat.st_mode);
    if !mode.intersects(others) {
        return Ok(());
    }
    let closed = rustix::fs::chmod(dir, mode.difference(others));
    closed.map_err(|error| refused(dir, "is open to others and can't be closed")(error.into()))
}

/// Whether the directory still has to be set up.
fn check_version(root: &Path) -> Result<bool, StoreError> {
    let shown = root.display();
    let path = root.join("VERSION");
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return check_empty(root).map(|()| true);
        }
        Err(error) => return Err(refused(&path, "can't be read")(error)),
    };
    match read_number(file).map_err(refused(&path, "can't be read"))? {
        Some(FORMAT) => Ok(false),
        Some(newer) if newer > FORMAT => Err(StoreError::Invalid(format!(
            "the data directory {shown} has format {newer}, this program knows up to {FORMAT}: \
             use a newer torpor, or another data directory"
        ))),
        Some(_) | None => Err(StoreError::Invalid(format!(
            "{} does not contain a format number that torpor ever wrote",
            path.display()
        ))),
    }
}

/// The id in the file, which is made once: under another one its sandboxes would be nobody's.
fn node_of(root: &Path) -> Result<NodeId, StoreError> {
    let path = root.join("node");
    match std::fs::read_to_string(&path) {
        Ok(text) => text.trim().parse().map_err(|error| {
            StoreError::Invalid(format!("{} can't be read: {error}", path.display()))
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let node = NodeId::random();
            let written = files::write_whole(&path, format!("{node}\n").as_bytes());
            written.map_err(refused(&path, "can't be written"))?;
            Ok(node)
        }
        Err(error) => Err(refused(&path, "can't be read")(error)),
    }
}

/// A directory with somebody's files in it is not ours to empty.
fn check_empty(root: &Path) -> Result<(), StoreError> {
    for entry in std::fs::read_dir(root).map_err(refused(root, "can't be read"))? {
        let name = entry.map_err(refused(root, "can't be read"))?.file_name();
        if !HARMLESS.iter().any(|harmless| name == *harmless) {
            return Err(StoreError::Invalid(format!(
                "{} is not empty and not a data directory of torpor: name an empty or a new one",
                root.display()
            )));
        }
    }
    Ok(())
}

fn take_lock(root: &Path) -> Result<File, StoreError> {
    let path = root.join("lock");
    // Who holds the lock has its id in there: not truncated before it is ours.
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let opened = options.open(&path);
    let mut lock = opened.map_err(refused(root, "can't be written"))?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            let pid = read_number(lock).ok().flatten();
            let who = pid.map_or_else(String::new, |pid| format!(" (pid {pid})"));
            let shown = root.display();
            return Err(StoreError::Invalid(format!(
                "another daemon{who} uses this data directory: {shown}"
            )));
        }
        Err(error) => return Err(files::failed("lock the data directory")(error)),
    }
    let text = format!("{}\n", std::process::id());
    let written = lock.set_len(0).and_then(|()| lock.write_all(text.as_bytes()));
    written.map_err(files::failed("write the lock file of the data directory"))?;
    Ok(lock)
}

fn read_number(file: File) -> io::Result<Option<u32>> {
    let mut text = Vec::new();
    file.take(NUMBER_FILE_MAX).read_to_end(&mut text)?;
    Ok(std::str::from_utf8(&text).ok().and_then(|text| text.trim().parse().ok()))
}

/// The user chose the directory, so what is wrong with it is theirs to know.
fn refused(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> StoreError {
    let shown = path.display().to_string();
    move |error| {
        if files::is_full(&error) {
            return StoreError::DiskFull(format!("{shown} {what}"));
        }
        StoreError::Invalid(format!("the data directory {shown} {what}: {error}"))
    }
}

#[cfg(test)]
mod tests;

//! A save of a machine: memory, device state and disk of one moment, bound as one unit.
//!
//! ```text
//!   memory         what QEMU maps as the guest's RAM, sparse; a seal behind it. May be a hard link to
//!                  the file the machine was started from, and is then sealed with that one's id
//!   delta          only then: the pages that were written since (see `delta`)
//!   state          the devices, as QEMU wrote them
//!   disk           what the guest wrote to its disk, sparse; a seal behind it
//!   machine.json   what the machine must be revived with: About
//! ```
//!
//! - Old memory on a newer disk corrupts silently. So every unit has a random id, all its files name
//!   it (`state`, which is QEMU's, is named by its hash), and [`open`] refuses a mix.
//! - A file is of no use before its last bytes are written, which are its seal or its header: a torn
//!   one is refused too.
//! - No file is ever changed after it was sealed. Nothing here waits for the disk: who keeps saves
//!   makes them durable, and compares all bytes with hashes.
//! - A full disk is [`io::ErrorKind::StorageFull`] in every function.

mod delta;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod id;
mod seal;
mod sparse;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{Gid, Mode, OFlags, fchmod, fchown};
use serde::{Deserialize, Serialize};

use crate::memory::PAGE;
use crate::monitor::{STATE_MAX, shortened};
use seal::Kind;

pub use delta::{Delta, DeltaSize, worth_a_delta, write_delta};
pub use id::UnitId;
pub use seal::SEAL_BYTES;
pub use sparse::{Placed, copy_disk, data_bytes, fresh_memory, link_or_copy, merge, write_full};

pub const MEMORY_FILE: &str = "memory";
pub const DELTA_FILE: &str = "delta";
pub const STATE_FILE: &str = "state";
pub const DISK_FILE: &str = "disk";
pub const ABOUT_FILE: &str = "machine.json";

/// Largest `machine.json`: a kilobyte is usual.
const ABOUT_MAX: u64 = 64 * 1024;

/// `machine.json`: what a machine must be revived with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Raised when an older program would misunderstand the rest.
    pub format: u32,
    pub unit: UnitId,
    /// The unit that `memory` was written for, if it is not this one; `delta` has the rest then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<UnitId>,
    pub memory_bytes: u64,
    /// As the guest sees it.
    pub disk_bytes: u64,
    pub cpus: u32,
    /// Version of QEMU, which wrote `state`.
    pub qemu: String,
    /// Names the kernel that runs in the memory.
    pub kernel: String,
    /// The model that the guest sees, as QEMU was told.
    pub cpu: String,
    /// `kvm` or `tcg`.
    pub accel: String,
    /// BLAKE3 of `state`, hexadecimal.
    pub state_hash: String,
}

impl About {
    pub const FORMAT: u32 = 1;
}

/// A save whose files belong together, all of them open for reading.
#[derive(Debug)]
pub struct Unit {
    pub about: About,
    pub memory: File,
    pub delta: Option<Delta>,
    pub state: File,
    pub disk: File,
}

/// Why a directory is no unit. Names the file.
#[derive(Debug, thiserror::Error)]
pub enum UnitError {
    #[error("could not read {file}")]
    Unreadable {
        file: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("{file} is damaged: {why}")]
    Damaged { file: &'static str, why: String },
    #[error("{file} is of another moment: {why}")]
    Mixed { file: &'static str, why: String },
    #[error("{file} has format {format}, this program knows up to {known}: use a newer torpor")]
    Newer { file: &'static str, format: u32, known: u32 },
}

/// What is wrong with one file; [`UnitError`] without its name.
#[derive(Debug)]
pub(crate) enum Flaw {
    Unreadable(io::Error),
    Damaged(String),
    Mixed(String),
    Newer { format: u32, known: u32 },
}

impl Flaw {
    fn of(self, file: &'static str) -> UnitError {
        match self {
            Self::Unreadable(source) => UnitError::Unreadable { file, source },
            Self::Damaged(why) => UnitError::Damaged { file, why },
            Self::Mixed(why) => UnitError::Mixed { file, why },
            Self::Newer { format, known } => UnitError::Newer { file, format, known },
        }
    }
}

impl From<io::Error> for Flaw {
    fn from(error: io::Error) -> Self {
        Self::Unreadable(error)
    }
}

// === Writing ===

/// A new file that only its owner may read, or also a group. Open for reading too.
pub fn create(path: &Path, group: Option<u32>) -> io::Result<File> {
    let flags = i32::try_from(OFlags::NOFOLLOW.bits()).map_err(io::Error::other)?;
    let mut options = File::options();
    options.read(true).write(true).create_new(true).mode(0o600).custom_flags(flags);
    let file = options.open(path)?;
    if let Some(group) = group {
        fchown(&file, None, Some(Gid::from_raw(group)))?;
        // Whatever the process masks.
        fchmod(&file, Mode::from_raw_mode(0o640))?;
    }
    Ok(file)
}

/// BLAKE3 of what QEMU wrote as `state`, hexadecimal: for [`About::state_hash`].
pub fn hash_state(dir: &Path) -> Result<String, UnitError> {
    let state = open_file(&dir.join(STATE_FILE)).and_then(|file| hash_small(&file));
    state.map_err(|flaw| flaw.of(STATE_FILE))
}

/// Writes `machine.json`, the last file of a unit.
pub fn write_about(dir: &Path, about: &About, group: Option<u32>) -> io::Result<()> {
    let mut file = create(&dir.join(ABOUT_FILE), group)?;
    let text = serde_json::to_vec_pretty(about).map_err(io::Error::other)?;
    io::Write::write_all(&mut file, &text)
}

// === Reading ===

/// Opens a save if its files belong together. Reads the small ones; of `memory`, `delta` and `disk`
/// only what says to which unit they belong.
pub fn open(dir: &Path) -> Result<Unit, UnitError> {
    let about = read_about(dir).map_err(|flaw| flaw.of(ABOUT_FILE))?;
    let bound = |kind: Kind, bytes: u64, unit: &UnitId| {
        let file = open_file(&dir.join(kind.file_name()))?;
        seal::check(&file, kind, bytes, unit)?;
        Ok(file)
    };
    let base = about.base.as_ref().unwrap_or(&about.unit);
    let memory = bound(Kind::Memory, about.memory_bytes, base);
    let memory = memory.map_err(|flaw: Flaw| flaw.of(MEMORY_FILE))?;
    let delta = open_delta(dir, &about).map_err(|flaw| flaw.of(DELTA_FILE))?;
    let state = open_state(dir, &about).map_err(|flaw| flaw.of(STATE_FILE))?;
    let disk = bound(Kind::Disk, about.disk_bytes, &about.unit);
    let disk = disk.map_err(|flaw: Flaw| flaw.of(DISK_FILE))?;
    Ok(Unit { about, memory, delta, state, disk })
}

/// The delta of a unit that is being written; none if its memory is its own.
pub fn delta_of(dir: &Path, about: &About) -> Result<Option<Delta>, UnitError> {
    open_delta(dir, about).map_err(|flaw| flaw.of(DELTA_FILE))
}

fn read_about(dir: &Path) -> Result<About, Flaw> {
    #[derive(Deserialize)]
    struct Head {
        format: u32,
    }
    let file = open_file(&dir.join(ABOUT_FILE))?;
    let text = read_small(&file, ABOUT_MAX)?;
    let damaged = |error: serde_json::Error| Flaw::Damaged(shortened(&error.to_string()));
    let Head { format } = serde_json::from_slice(&text).map_err(damaged)?;
    if format > About::FORMAT {
        return Err(Flaw::Newer { format, known: About::FORMAT });
    }
    let about: About = serde_json::from_slice(&text).map_err(damaged)?;
    let odd = |bytes: u64| bytes == 0 || !bytes.is_multiple_of(PAGE) || bytes > i64::MAX as u64;
    if odd(about.memory_bytes) || odd(about.disk_bytes) || about.cpus == 0 {
        return Err(Flaw::Damaged("no machine has such sizes".to_owned()));
    }
    Ok(about)
}

fn open_delta(dir: &Path, about: &About) -> Result<Option<Delta>, Flaw> {
    let path = dir.join(DELTA_FILE);
    let Some(base) = &about.base else {
        return match path.symlink_metadata() {
            Ok(_) => Err(Flaw::Mixed(format!("{ABOUT_FILE} does not know it"))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        };
    };
    Delta::open(open_file(&path)?, &about.unit, base, about.memory_bytes).map(Some)
}

fn open_state(dir: &Path, about: &About) -> Result<File, Flaw> {
    let file = open_file(&dir.join(STATE_FILE))?;
    let found = hash_small(&file)?;
    if found != about.state_hash {
        let expected = &about.state_hash;
        return Err(Flaw::Mixed(format!("it has BLAKE3 {found}, not {expected}")));
    }
    Ok(file)
}

/// A regular file; links and everything else are refused.
fn open_file(path: &Path) -> Result<File, Flaw> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(Flaw::Damaged("it is no regular file".to_owned()));
    }
    Ok(file)
}

fn read_small(file: &File, max: u64) -> Result<Vec<u8>, Flaw> {
    let size = file.metadata()?.size();
    if size > max {
        return Err(Flaw::Damaged(format!("it has {size} bytes")));
    }
    let mut bytes = Vec::new();
    file.take(max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn hash_small(file: &File) -> Result<String, Flaw> {
    let bytes = read_small(file, STATE_MAX as u64)?;
    // Who gets the file starts to read at its beginning.
    rustix::fs::seek(file, rustix::fs::SeekFrom::Start(0)).map_err(io::Error::from)?;
    Ok(blake3::hash(&bytes).to_hex().to_string())
}

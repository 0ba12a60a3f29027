//! Manifests: written once, read with distrust, and compared with what is on disk.

use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::Advice;
use serde::Deserialize;
use torpor_lifecycle::store::{Manifest, SaveAbout, StoreError};
use torpor_protocol::SaveId;
use torpor_protocol::snapshot::SavedFile;

use super::content::{self, Digest, Form, Hashes, Identity};
use crate::files;
use crate::layout::Stage;

pub(crate) const MANIFEST_FILE: &str = "manifest.json";
/// Largest manifest that is read: tens of thousands of processes.
pub(crate) const MANIFEST_MAX: u64 = 16 * 1024 * 1024;
/// Files of one save; engines write a handful.
pub(crate) const FILES_MAX: usize = 64;
/// Of manifests whose hashes are all plain: older programs know no others.
const FORMAT_PLAIN: u32 = 1;
/// Longest name of a file.
const NAME_MAX: usize = 100;

/// What this daemon knows of a save because it wrote or read all of it.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    pub(crate) manifest: Manifest,
    /// Also of the manifest file.
    files: Vec<(String, Identity)>,
}

impl Known {
    /// Whether the files are still the ones that were read; microseconds.
    pub(crate) fn holds(&self, dir: &Path) -> bool {
        let same = |(name, known): &(String, Identity)| {
            Identity::at(&dir.join(name)).is_ok_and(|found| found == *known)
        };
        self.files.iter().all(same)
    }
}

/// How a save is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Bytes that the host still has in memory are believed, and so are files that were read for
    /// another save.
    Cached,
    /// From the disk, all of it.
    Fresh,
}

/// The manifest in a text, if this program understands it.
pub(crate) fn parse(what: &str, text: &[u8]) -> Result<Manifest, StoreError> {
    #[derive(Deserialize)]
    struct Head {
        format: u32,
    }
    let action = || format!("read the manifest of {what}");
    let broken = |error| StoreError::failed(action())(error);
    let head: Head = serde_json::from_slice(text).map_err(broken)?;
    let known = Manifest::FORMAT;
    if head.format > known {
        let format = head.format;
        return Err(StoreError::Invalid(format!(
            "{what} has format {format}, this program knows up to {known}: use a newer torpor"
        )));
    }
    let manifest: Manifest = serde_json::from_slice(text).map_err(broken)?;
    for file in &manifest.files {
        file.hash.parse::<Digest>().map_err(StoreError::failed(action()))?;
    }
    Ok(manifest)
}

/// Whether a file of a save may be called so: one plain part of a path.
pub(crate) fn is_file_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    (1..=NAME_MAX).contains(&name.len())
        && name.bytes().all(plain)
        && !name.starts_with('.')
        && name != MANIFEST_FILE
}

// === Writing ===

/// Hashes what is in a stage, adds the manifest, and makes all of it durable under its present name.
/// A file that is also in an earlier save is not read again.
pub(crate) fn seal(stage: &Stage, about: SaveAbout, hashes: &Hashes) -> Result<Known, StoreError> {
    let names = staged_names(stage.path())?;
    let (format, files, mut known) = std::thread::scope(|scope| {
        let synced = scope.spawn(|| sync_files(stage.path(), &names));
        let hashed = hash_files(stage.path(), &names, hashes);
        let panicked = || StoreError::failed("write a save to disk")("a thread panicked");
        synced.join().map_err(|_| panicked())??;
        hashed
    })?;
    let stored_bytes = stored_bytes(stage.path(), &files)?;
    let manifest = Manifest { format, about, files, stored_bytes };
    let action = "write the manifest of a save";
    let text = serde_json::to_vec_pretty(&manifest).map_err(StoreError::failed(action))?;
    let path = stage.path().join(MANIFEST_FILE);
    // Also makes the names in the directory durable.
    files::write_whole(&path, &text).map_err(files::failed(action))?;
    known.push((MANIFEST_FILE.to_owned(), Identity::at(&path).map_err(files::failed(action))?));
    Ok(Known { manifest, files: known })
}

fn staged_names(dir: &Path) -> Result<Vec<String>, StoreError> {
    let action = "read what was saved";
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(files::failed(action))? {
        let entry = entry.map_err(files::failed(action))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let plain = entry.file_type().map_err(files::failed(action))?.is_file();
        if !plain || !is_file_name(&name) {
            return Err(StoreError::Invalid(format!("a save can't contain {name:?}")));
        }
        names.push(name);
        if names.len() > FILES_MAX {
            return Err(StoreError::Invalid(format!("a save can't have over {FILES_MAX} files")));
        }
    }
    if names.is_empty() {
        return Err(StoreError::Invalid("there is nothing in the save".to_owned()));
    }
    names.sort_unstable();
    Ok(names)
}

fn sync_files(dir: &Path, names: &[String]) -> Result<(), StoreError> {
    for name in names {
        let synced = content::open(&dir.join(name)).and_then(|file| file.sync_all());
        synced.map_err(files::failed(format!("write {name} of a save to disk")))?;
    }
    Ok(())
}

/// The format that this needs, and what is known of the files.
type Hashed = (u32, Vec<SavedFile>, Vec<(String, Identity)>);

fn hash_files(dir: &Path, names: &[String], hashes: &Hashes) -> Result<Hashed, StoreError> {
    let (mut format, mut listed, mut known) = (FORMAT_PLAIN, Vec::new(), Vec::new());
    for name in names {
        let hashed = content::open(&dir.join(name)).and_then(|file| {
            let form = Form::suiting(&file.metadata()?);
            hashes.of(&file, form)
        });
        let (digest, identity) = hashed.map_err(files::failed(format!("hash {name} of a save")))?;
        match digest.form {
            Form::Plain => {}
            Form::Sparse => format = Manifest::FORMAT,
        }
        let (bytes, hash) = (identity.bytes, digest.to_string());
        listed.push(SavedFile { name: name.clone(), bytes, hash });
        known.push((name.clone(), identity));
    }
    Ok((format, listed, known))
}

/// What files take on disk, if holes make it less than their lengths. To be asked when they are
/// there: before, some filesystems do not know.
fn stored_bytes(dir: &Path, listed: &[SavedFile]) -> Result<Option<u64>, StoreError> {
    let (mut stored, mut long) = (0, 0);
    for file in listed {
        let found = dir.join(&file.name).symlink_metadata();
        let found = found.map_err(files::failed("look at what was saved"))?;
        stored += found.blocks().saturating_mul(512).min(file.bytes);
        long += file.bytes;
    }
    Ok((stored < long).then_some(stored))
}

// === Checking ===

/// Reads all of a save and compares it with what the ledger says of it.
pub(crate) fn check(
    id: &SaveId,
    dir: &Path,
    manifest: Manifest,
    reading: Reading,
    hashes: &Hashes,
) -> Result<Known, StoreError> {
    let mut known = vec![(MANIFEST_FILE.to_owned(), check_manifest(id, dir, &manifest)?)];
    for file in &manifest.files {
        let identity =
            check_file(dir, file, reading, hashes).map_err(|detail| corrupt(id, file, detail))?;
        known.push((file.name.clone(), identity));
    }
    Ok(Known { manifest, files: known })
}

fn check_manifest(id: &SaveId, dir: &Path, expected: &Manifest) -> Result<Identity, StoreError> {
    let broken = |detail: String| StoreError::CorruptSave {
        id: id.to_string(),
        file: MANIFEST_FILE.to_owned(),
        detail,
    };
    let read = || -> io::Result<_> {
        let file = content::open(&dir.join(MANIFEST_FILE))?;
        let identity = Identity::of(&file)?;
        let mut text = Vec::new();
        file.take(MANIFEST_MAX).read_to_end(&mut text)?;
        Ok((identity, text))
    };
    let (identity, text) = read().map_err(|error| broken(detail(&error)))?;
    let found = match parse(&format!("save {id}"), &text) {
        Ok(found) => found,
        Err(error @ StoreError::Invalid(_)) => return Err(error),
        Err(_) => return Err(broken("it is no manifest".to_owned())),
    };
    if found != *expected {
        return Err(broken("it does not say what the ledger says".to_owned()));
    }
    Ok(identity)
}

fn check_file(
    dir: &Path,
    expected: &SavedFile,
    reading: Reading,
    hashes: &Hashes,
) -> Result<Identity, String> {
    let file = content::open(&dir.join(&expected.name)).map_err(|error| detail(&error))?;
    let bytes = Identity::of(&file).map_err(|error| detail(&error))?.bytes;
    if bytes != expected.bytes {
        return Err(format!("it has {bytes} bytes and had {}", expected.bytes));
    }
    let digest: Digest = expected.hash.parse()?;
    let hashed = match reading {
        Reading::Cached => hashes.of(&file, digest.form),
        Reading::Fresh => {
            // If the host keeps them all the same, they are what everybody else reads too.
            let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
            hashes.read(&file, digest.form)
        }
    };
    let (found, identity) = hashed.map_err(|error| detail(&error))?;
    if found != digest {
        return Err(format!("it has BLAKE3 {found} and had {digest}"));
    }
    Ok(identity)
}

fn corrupt(id: &SaveId, file: &SavedFile, detail: String) -> StoreError {
    StoreError::CorruptSave { id: id.to_string(), file: file.name.clone(), detail }
}

fn detail(error: &io::Error) -> String {
    if error.kind() == io::ErrorKind::NotFound {
        return "it is missing".to_owned();
    }
    error.to_string()
}

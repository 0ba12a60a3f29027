//! Manifests: made once, read with distrust, and compared with what is on disk.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::Advice;
use serde::Deserialize;
use torpor_lifecycle::store::{Manifest, SaveAbout, StoreError};
use torpor_protocol::SaveId;
use torpor_protocol::snapshot::SavedFile;

use super::blobs::Blobs;
use super::content::{self, Digest, Form, Hashes, Identity};
use crate::files;
use crate::layout::{Stage, make_dir};

/// Largest manifest that is read: tens of thousands of processes.
pub(crate) const MANIFEST_MAX: u64 = 16 * 1024 * 1024;
/// Files of one save; engines write a handful.
pub(crate) const FILES_MAX: usize = 64;
/// Of manifests whose hashes are all plain: older programs know no others.
const FORMAT_PLAIN: u32 = 1;
/// Longest name of a file.
const NAME_MAX: usize = 100;
/// Saves had one before manifests were in the ledger alone.
const RESERVED: &str = "manifest.json";

/// What this daemon knows of a save because it wrote or read all of it.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    pub(crate) manifest: Manifest,
    files: Vec<KnownFile>,
}

#[derive(Debug, Clone)]
struct KnownFile {
    name: String,
    digest: Digest,
    blob: Identity,
    /// In the save's directory: the same file, unless it could not be linked.
    local: Identity,
}

impl Known {
    /// Whether the files are still the ones that were read; microseconds.
    pub(crate) fn holds(&self, dir: &Path, blobs: &Blobs) -> bool {
        let is = |path: &Path, known| Identity::at(path).is_ok_and(|found| found == known);
        self.files.iter().all(|file| {
            is(&blobs.path(file.digest), file.blob) && is(&dir.join(&file.name), file.local)
        })
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
        && name != RESERVED
}

// === Writing ===

/// A save whose bytes are on disk, under names that do not last yet.
pub(crate) struct Sealed {
    stage: Stage,
    pub(crate) manifest: Manifest,
    digests: Vec<Digest>,
    /// What each file takes on disk.
    pub(crate) stored: Vec<u64>,
}

/// Hashes what is in a stage, and syncs it. A file that is also in an earlier save is not read again.
pub(crate) fn seal(stage: Stage, about: SaveAbout, hashes: &Hashes) -> Result<Sealed, StoreError> {
    let names = staged_names(stage.path())?;
    let (files, digests) = std::thread::scope(|scope| {
        let synced = scope.spawn(|| sync_files(stage.path(), &names));
        let hashed = hash_files(stage.path(), &names, hashes);
        let panicked = || StoreError::failed("write a save to disk")("a thread panicked");
        synced.join().map_err(|_| panicked())??;
        hashed
    })?;
    let stored = stored(stage.path(), &files)?;
    let sum: u64 = stored.iter().sum();
    let long: u64 = files.iter().map(|file| file.bytes).sum();
    let sparse = digests.iter().any(|digest| digest.form == Form::Sparse);
    let format = if sparse { Manifest::FORMAT } else { FORMAT_PLAIN };
    let stored_bytes = (sum < long).then_some(sum);
    let manifest = Manifest { format, about, files, stored_bytes };
    Ok(Sealed { stage, manifest, digests, stored })
}

impl Sealed {
    /// Makes the files blobs, durably, and the stage the directory of the save. That is not synced:
    /// what of it a power cut takes is linked again.
    pub(crate) fn place(
        &self,
        dir: &Path,
        blobs: &Blobs,
        hashes: &Hashes,
    ) -> Result<Known, StoreError> {
        let mut files = Vec::new();
        for (file, digest) in self.manifest.files.iter().zip(&self.digests) {
            let path = self.stage.path().join(&file.name);
            let added = blobs.add(&path, *digest, hashes).and_then(|()| Identity::at(&path));
            let local = added.map_err(files::failed(format!("keep {} of a save", file.name)))?;
            // A stage is on the filesystem of the blobs, so they are the same file.
            files.push(KnownFile { name: file.name.clone(), digest: *digest, blob: local, local });
        }
        let placed = blobs.sync().and_then(|()| std::fs::rename(self.stage.path(), dir));
        placed.map_err(files::failed("move a save to its place"))?;
        Ok(Known { manifest: self.manifest.clone(), files })
    }
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

type Hashed = (Vec<SavedFile>, Vec<Digest>);

fn hash_files(dir: &Path, names: &[String], hashes: &Hashes) -> Result<Hashed, StoreError> {
    let (mut listed, mut digests) = (Vec::new(), Vec::new());
    for name in names {
        let hashed = content::open(&dir.join(name)).and_then(|file| {
            let form = Form::suiting(&file.metadata()?);
            hashes.of(&file, form)
        });
        let (digest, identity) = hashed.map_err(files::failed(format!("hash {name} of a save")))?;
        let (bytes, hash) = (identity.bytes, digest.to_string());
        listed.push(SavedFile { name: name.clone(), bytes, hash });
        digests.push(digest);
    }
    Ok((listed, digests))
}

/// What each file takes on disk. To be asked when they are there: before, some filesystems do not
/// know.
fn stored(dir: &Path, listed: &[SavedFile]) -> Result<Vec<u64>, StoreError> {
    let stored = |file: &SavedFile| {
        let found = dir.join(&file.name).symlink_metadata();
        let found = found.map_err(files::failed("look at what was saved"))?;
        Ok(found.blocks().saturating_mul(512).min(file.bytes))
    };
    listed.iter().map(stored).collect()
}

// === Checking ===

/// Reads all of a save, compares it with what its manifest says, and has it in its directory.
pub(crate) fn check(
    id: &SaveId,
    dir: &Path,
    manifest: Manifest,
    reading: Reading,
    (blobs, hashes): (&Blobs, &Hashes),
) -> Result<Known, StoreError> {
    let action = "make the directory of a save";
    make_dir(dir)?;
    let (mut files, mut adopted) = (Vec::new(), false);
    for file in &manifest.files {
        let corrupt = |detail| StoreError::CorruptSave {
            id: id.to_string(),
            file: file.name.clone(),
            detail,
        };
        let digest: Digest = file.hash.parse().map_err(corrupt)?;
        let (path, local) = (blobs.path(digest), dir.join(&file.name));
        // Before there were blobs, what is in the directory was all of a save.
        let old = path.symlink_metadata().is_err();
        let found = if old { &local } else { &path };
        let blob = check_file(found, file.bytes, digest, reading, hashes).map_err(corrupt)?;
        if old {
            blobs.add(&local, digest, hashes).map_err(files::failed(action))?;
            adopted = true;
        }
        let local = blobs.link(digest, &blob, &local).map_err(files::failed(action))?;
        files.push(KnownFile { name: file.name.clone(), digest, blob, local });
    }
    if adopted {
        blobs.sync().map_err(files::failed(action))?;
    }
    Ok(Known { manifest, files })
}

fn check_file(
    path: &Path,
    expected: u64,
    digest: Digest,
    reading: Reading,
    hashes: &Hashes,
) -> Result<Identity, String> {
    let file = content::open(path).map_err(|error| detail(&error))?;
    let bytes = Identity::of(&file).map_err(|error| detail(&error))?.bytes;
    if bytes != expected {
        return Err(format!("it has {bytes} bytes and had {expected}"));
    }
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

fn detail(error: &io::Error) -> String {
    if error.kind() == io::ErrorKind::NotFound {
        return "it is missing".to_owned();
    }
    error.to_string()
}

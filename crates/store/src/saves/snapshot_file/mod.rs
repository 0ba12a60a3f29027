//! A snapshot as one file, for another installation or for the shelf: a plain tar, so that every tool
//! can look into it. Files whose hash is of the sparse form are sparse in it too, as GNU tar writes
//! them.
//!
//! ```text
//!  torpor-snapshot.json   what follows, with sizes and hashes
//!  NAME…                  the files of the save, in the order of its manifest
//!  image.erofs            the image, if it was asked for
//! ```

mod export;
pub(crate) mod import;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::sync::Arc;
use torpor_lifecycle::store::{LAYER_FILE, LocalSave, Manifest, StoreError};
use torpor_protocol::Snapshot;
use torpor_protocol::snapshot::SnapshotKind;

use super::content::{Digest, Form};
use super::manifest::{self, FILES_MAX, MANIFEST_MAX};
use crate::images::ImageConfig;

const HEADER_FILE: &str = "torpor-snapshot.json";
const IMAGE_FILE: &str = "image.erofs";
/// Raised when an older program would misunderstand the file.
const FORMAT: u32 = 1;
/// Largest header: the manifest, the snapshot and the image's configuration.
const HEADER_MAX: u64 = 2 * MANIFEST_MAX;
/// Most bytes of a save that is imported, holes included: what is hashed and written is what the
/// file brings, and the disk is the nearer bound of that.
const BYTES_MAX: u64 = 1 << 40;
/// Copied at a time.
const BUFFER: usize = 256 * 1024;

/// What an import brought. Nothing names the save yet.
#[derive(Debug)]
pub struct Imported {
    pub save: Arc<LocalSave>,
    /// As it was where it came from; its id and name are those of another installation.
    pub snapshot: Snapshot,
}

/// `torpor-snapshot.json`
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    format: u32,
    snapshot: Snapshot,
    /// A [`Manifest`], which has a format of its own.
    manifest: Box<RawValue>,
    /// The agent in the image's root file, which is in saved memory too.
    agent_hash: String,
    image: Option<HeaderImage>,
}

/// What is needed to make the image again.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct HeaderImage {
    config: ImageConfig,
    bytes: u64,
    /// BLAKE3, hexadecimal, never of the sparse form: there are no holes in images.
    hash: String,
}

impl Header {
    fn parse(text: &[u8]) -> Result<(Self, Manifest), StoreError> {
        #[derive(Deserialize)]
        struct Head {
            format: u32,
        }
        let head: Head = serde_json::from_slice(text).map_err(|_| no_snapshot())?;
        if head.format > FORMAT {
            return Err(StoreError::Invalid(format!(
                "the snapshot file has format {}, this program knows up to {FORMAT}: use a newer \
                 torpor",
                head.format
            )));
        }
        let header: Self = serde_json::from_slice(text)
            .map_err(|error| unusable(&format!("{HEADER_FILE}: {error}")))?;
        let manifest = manifest::parse("the snapshot file", header.manifest.get().as_bytes());
        let manifest = match manifest {
            Err(StoreError::Failed { source, .. }) => {
                return Err(unusable(&format!("its manifest: {source}")));
            }
            manifest => manifest?,
        };
        header.check(&manifest)?;
        Ok((header, manifest))
    }

    /// Names and sizes decide what is written where, so they are looked at before anything else.
    fn check(&self, manifest: &Manifest) -> Result<(), StoreError> {
        let files = &manifest.files;
        if files.is_empty() || files.len() > FILES_MAX {
            return Err(unusable("its manifest lists no files, or too many"));
        }
        for (index, file) in files.iter().enumerate() {
            let again = files[..index].iter().any(|other| other.name == file.name);
            if again || file.name == IMAGE_FILE || !manifest::is_file_name(&file.name) {
                return Err(unusable(&format!("it can't contain {:?}", file.name)));
            }
        }
        let sizes = files.iter().map(|file| file.bytes);
        let sizes = sizes.chain(self.image.iter().map(|image| image.bytes));
        let sum = sizes.fold(0, u64::saturating_add);
        if sum > BYTES_MAX {
            return Err(unusable(&format!("it says that it has {sum} bytes")));
        }
        let plain = |image: &HeaderImage| {
            image.hash.parse().is_ok_and(|digest: Digest| digest.form == Form::Plain)
        };
        if !self.image.as_ref().is_none_or(plain) {
            return Err(unusable("its image has no hash"));
        }
        let about = &manifest.about;
        if about.kind != self.snapshot.kind || about.spec.image_id != self.snapshot.image_id {
            return Err(unusable("its manifest is that of another snapshot"));
        }
        let layer = files.iter().any(|file| file.name == LAYER_FILE);
        match about.kind {
            SnapshotKind::Filesystem if !layer => Err(unusable(&format!("it has no {LAYER_FILE}"))),
            SnapshotKind::Filesystem | SnapshotKind::Memory => Ok(()),
        }
    }
}

fn unusable(why: &str) -> StoreError {
    StoreError::Invalid(format!("the snapshot file can't be used: {why}"))
}

fn no_snapshot() -> StoreError {
    StoreError::Invalid("this is no snapshot file of torpor".to_owned())
}

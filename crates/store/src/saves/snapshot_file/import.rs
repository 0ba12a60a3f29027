//! Reading a snapshot file. Nothing in it is believed: names come from a checked list, every byte is
//! compared with its hash, a sparse file is as long as the header says, and an image is made anew from the
//! files in it, under its true id.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use torpor_lifecycle::store::{Manifest, SaveAbout, StoreError};
use torpor_protocol::ImageId;
use torpor_protocol::snapshot::SnapshotKind;

use super::super::content::{self, Digest, Form, StreamHasher};
use super::super::{LayerChanges, Saves};
use super::{BUFFER, HEADER_FILE, HEADER_MAX, Header, IMAGE_FILE, Imported, no_snapshot, unusable};
use crate::files;
use crate::images::sparse::SparseMap;
use crate::images::tarball::{EntryKind, Tarball};
use crate::images::{Images, blocking};
use crate::layout::Stage;

/// A snapshot file, taken apart into a stage.
pub(crate) struct Unpacked {
    stage: Stage,
    header: Header,
    manifest: Manifest,
    /// The root file, in a stage of its own.
    image: Option<(Stage, PathBuf)>,
}

/// What somebody else saved has no claim to the secrets and gateways of this installation: a route of
/// theirs would send our values to hosts of theirs.
fn without_privileges(mut about: SaveAbout) -> SaveAbout {
    let spec = &mut about.spec;
    spec.secrets.clear();
    spec.network.routes.clear();
    spec.network.secrets.clear();
    spec.network.gateway = None;
    about
}

impl Saves {
    /// Reads a snapshot file that [`Saves::export`] wrote, and makes a save of it. Its image is
    /// installed if it is not there. After an error nothing is left of it. How long the reader may
    /// stall is its own business: an error from it ends the import.
    pub async fn import(
        &self,
        images: &Images,
        reader: impl Read + Send + 'static,
    ) -> Result<Imported, StoreError> {
        let shared = self.shared.clone();
        let unpacked = blocking(move || {
            let stage = shared.layout.stage()?;
            let spare = shared.layout.stage()?;
            let present =
                |id: &ImageId| Ok(shared.runtime.block_on(shared.ledger.image(id))?.is_some());
            unpack(reader, stage, spare, present)
        });
        let Unpacked { stage, header, manifest, image } = unpacked.await?;
        let id = header.snapshot.image_id.clone();
        let installed = image.is_some();
        if let Some((_spare, path)) = image {
            let config = header.image.map(|image| image.config).unwrap_or_default();
            images.install_root(&id, config, path).await?;
        }
        let done = async {
            let ours = images.agent_hash(&id).await?;
            if manifest.about.kind == SnapshotKind::Memory && header.agent_hash != ours {
                return Err(unusable(
                    "its memory holds the agent of another version of torpor; a filesystem \
                     snapshot of it could be imported",
                ));
            }
            self.commit_stage(stage, without_privileges(manifest.about)).await
        };
        match done.await {
            Ok(save) => Ok(Imported { save, snapshot: header.snapshot }),
            Err(error) => {
                if installed && let Err(error) = images.remove(id.as_str()).await {
                    tracing::warn!(image = %id, %error, "an image without a use stays");
                }
                Err(error)
            }
        }
    }
}

pub(crate) fn unpack(
    reader: impl Read,
    stage: Stage,
    spare: Stage,
    present: impl FnOnce(&ImageId) -> Result<bool, StoreError>,
) -> Result<Unpacked, StoreError> {
    let mut tarball = Tarball::with_sparse_files(reader);
    let (header, manifest) = read_header(&mut tarball)?;
    for file in &manifest.files {
        let path = stage.path().join(&file.name);
        let to = File::create_new(&path).map_err(files::failed("create a file of a save"))?;
        take(&mut tarball, &file.name, file.bytes, &file.hash, Some(to))?;
    }
    let have = present(&header.snapshot.image_id)?;
    let mut image = None;
    if let Some(brought) = &header.image {
        let path = spare.path().join(IMAGE_FILE);
        let to = match have {
            true => None,
            false => Some(create(&path)?),
        };
        take(&mut tarball, IMAGE_FILE, brought.bytes, &brought.hash, to)?;
        image = (!have).then_some((spare, path));
    } else if !have {
        let (id, name) = (&header.snapshot.image_id, &header.snapshot.image);
        return Err(unusable(&format!(
            "its image {name} ({id}) is neither here nor in the file: import the image first, or \
             export the snapshot with its image"
        )));
    }
    match manifest.about.kind {
        SnapshotKind::Memory => {}
        // What can't be read must not be kept.
        SnapshotKind::Filesystem => drop(LayerChanges::open(stage.path())?),
    }
    match next(&mut tarball)? {
        None => Ok(Unpacked { stage, header, manifest, image }),
        Some(more) => Err(unusable(&format!("nobody said that it contains {:?}", more.name))),
    }
}

fn create(path: &Path) -> Result<File, StoreError> {
    File::create_new(path).map_err(files::failed("create a staging file"))
}

fn read_header(tarball: &mut Tarball<impl Read>) -> Result<(Header, Manifest), StoreError> {
    let first = next(tarball).map_err(|_| no_snapshot())?;
    let size = match first {
        Some(next) if next.name == HEADER_FILE && next.sparse.is_none() => next.bytes,
        Some(_) | None => return Err(no_snapshot()),
    };
    if size > HEADER_MAX {
        return Err(unusable(&format!("its {HEADER_FILE} has {size} bytes")));
    }
    let mut text = Vec::new();
    tarball.body().read_to_end(&mut text).map_err(cut_off)?;
    Header::parse(&text)
}

/// What the next entry says of itself.
struct Next {
    name: String,
    bytes: u64,
    sparse: Option<SparseMap>,
}

/// The next entry, which must be a file.
fn next(tarball: &mut Tarball<impl Read>) -> Result<Option<Next>, StoreError> {
    let entry = tarball.next_entry().map_err(|error| unusable(&error.to_string()))?;
    let Some(entry) = entry else { return Ok(None) };
    let name = String::from_utf8_lossy(&entry.path[..entry.path.len().min(200)]).into_owned();
    match entry.kind {
        EntryKind::File => Ok(Some(Next { name, bytes: entry.size, sparse: entry.sparse })),
        EntryKind::Dir | EntryKind::Symlink | EntryKind::Hardlink | EntryKind::Special => {
            Err(unusable(&format!("{name:?} in it is no file")))
        }
    }
}

/// The next entry must be this file; gives where its content belongs.
fn expect(
    tarball: &mut Tarball<impl Read>,
    name: &str,
    bytes: u64,
    form: Form,
) -> Result<SparseMap, StoreError> {
    let Some(next) = next(tarball)? else {
        return Err(unusable(&format!("it is cut off: {name} is missing")));
    };
    let found = next.bytes;
    if next.name != name {
        return Err(unusable(&format!("{:?} is where {name} should be", next.name)));
    }
    if found != bytes {
        return Err(unusable(&format!("{name} has {found} bytes in it and should have {bytes}")));
    }
    match (next.sparse, form) {
        (Some(map), Form::Sparse) => Ok(map),
        // A plain hash has to be fed with all those zeros, which cost the sender nothing.
        (Some(_), Form::Plain) => Err(unusable(&format!("{name} in it is sparse"))),
        // As a tool writes it that does not look for holes.
        (None, Form::Plain | Form::Sparse) => {
            let mut map = SparseMap::new(bytes);
            map.push(0..bytes);
            Ok(map)
        }
    }
}

/// The next entry must be this file, and its content what the header said.
fn take(
    tarball: &mut Tarball<impl Read>,
    name: &str,
    bytes: u64,
    hash: &str,
    to: Option<File>,
) -> Result<(), StoreError> {
    let digest: Digest = hash.parse().map_err(|error: String| unusable(&error))?;
    let map = expect(tarball, name, bytes, digest.form)?;
    let write = "write a file of a save";
    if let Some(to) = &to {
        to.set_len(bytes).map_err(files::failed(write))?;
    }
    let mut hasher = StreamHasher::new(digest.form, bytes);
    let mut buffer = vec![0; BUFFER];
    let mut body = tarball.body();
    for run in map.runs() {
        let mut at = run.start;
        while at < run.end {
            let most = usize::try_from(run.end - at).unwrap_or(usize::MAX).min(BUFFER);
            let piece = &mut buffer[..most];
            body.read_exact(piece).map_err(cut_off)?;
            hasher.feed(at, piece);
            if let Some(to) = &to {
                // Memory and disks are mostly holes, and so they stay.
                content::write_around_zeros(to, at, piece).map_err(files::failed(write))?;
            }
            at += most as u64;
        }
    }
    let found = hasher.finish();
    if found != digest {
        return Err(unusable(&format!("{name} is damaged: BLAKE3 is {found}, should be {digest}")));
    }
    Ok(())
}

fn cut_off(error: io::Error) -> StoreError {
    unusable(&error.to_string())
}

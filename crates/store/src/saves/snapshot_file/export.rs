//! Writing a snapshot file. All sizes are known ahead, so it may go into a pipe.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use serde_json::value::to_raw_value;
use torpor_lifecycle::store::{LocalSave, StoreError};
use torpor_protocol::Snapshot;

use super::super::Saves;
use super::super::content::{self, Digest, Form, Identity, StreamHasher};
use super::super::layer::{finish, head, pad};
use super::{BUFFER, FORMAT, HEADER_FILE, Header, HeaderImage, IMAGE_FILE};
use crate::files;
use crate::images::blocking;
use crate::images::sparse::SparseMap;
use crate::ledger::ImageRow;

const WRITE: &str = "write the snapshot file";

impl Saves {
    /// Writes a snapshot as one file; with the image, another installation needs nothing else.
    /// Every byte is compared with its hash on the way: after an error, what was written is of no
    /// use.
    pub async fn export(
        &self,
        save: Arc<LocalSave>,
        snapshot: &Snapshot,
        image: bool,
        mut out: impl Write + Send + 'static,
    ) -> Result<(), StoreError> {
        let id = &save.manifest.about.spec.image_id;
        let row = self.shared.ledger.image(id).await?;
        let row = row.ok_or_else(|| StoreError::NoSuchImage(id.to_string()))?;
        let root = self.shared.layout.image(id).join(&row.file);
        let header = Header {
            format: FORMAT,
            snapshot: snapshot.clone(),
            manifest: to_raw_value(&save.manifest).map_err(StoreError::failed(WRITE))?,
            agent_hash: row.agent_hash.clone(),
            image: image.then(|| HeaderImage {
                config: row.config.clone(),
                bytes: row.file_bytes,
                hash: row.file_hash.clone(),
            }),
        };
        blocking(move || {
            // Opened first: an image that gets another agent meanwhile loses this file.
            let root = match image {
                true => Some(File::open(&root).map_err(|error| broken_image(&row, &error))?),
                false => None,
            };
            write_header(&mut out, &header)?;
            write_files(&mut out, &save)?;
            if let Some(root) = root {
                write_image(&mut out, &row, root)?;
            }
            finish(&mut out).and_then(|()| out.flush()).map_err(files::failed(WRITE))
        })
        .await
    }
}

fn write_header(out: &mut impl Write, header: &Header) -> Result<(), StoreError> {
    let text = serde_json::to_vec_pretty(header).map_err(StoreError::failed(WRITE))?;
    let size = text.len() as u64;
    let entry = head(HEADER_FILE.as_bytes(), b'0', b"", None).size(size).bytes();
    let written = out.write_all(&entry).and_then(|()| out.write_all(&text));
    written.and_then(|()| pad(out, size)).map_err(files::failed(WRITE))
}

fn write_files(out: &mut impl Write, save: &LocalSave) -> Result<(), StoreError> {
    for file in &save.manifest.files {
        let corrupt = |detail: String| StoreError::CorruptSave {
            id: save.id.to_string(),
            file: file.name.clone(),
            detail,
        };
        let opened = content::open(&save.dir.join(&file.name));
        let opened = opened.map_err(|error| corrupt(error.to_string()))?;
        write_content(out, &file.name, &opened, file.bytes, &file.hash, corrupt)?;
    }
    Ok(())
}

fn write_image(out: &mut impl Write, row: &ImageRow, root: File) -> Result<(), StoreError> {
    let corrupt = |detail| StoreError::CorruptImage { id: row.id.to_string(), detail };
    write_content(out, IMAGE_FILE, &root, row.file_bytes, &row.file_hash, corrupt)
}

fn write_content(
    out: &mut impl Write,
    name: &str,
    file: &File,
    size: u64,
    hash: &str,
    corrupt: impl Fn(String) -> StoreError,
) -> Result<(), StoreError> {
    let unread = |error: io::Error| corrupt(error.to_string());
    let digest: Digest = hash.parse().map_err(&corrupt)?;
    let found = Identity::of(file).map_err(unread)?.bytes;
    if found != size {
        return Err(corrupt(format!("it has {found} bytes and had {size}")));
    }
    let mut map = SparseMap::new(size);
    let written = match digest.form {
        Form::Plain => {
            map.push(0..size);
            out.write_all(&head(name.as_bytes(), b'0', b"", None).size(size).bytes())
        }
        Form::Sparse => {
            let push = |at, run: &[u8]| map.push(at..at + run.len() as u64);
            content::visit_written(file, 0, size, push).map_err(unread)?;
            map.write(name, out)
        }
    };
    written.map_err(files::failed(WRITE))?;
    let mut hasher = StreamHasher::new(digest.form, size);
    let mut buffer = vec![0; BUFFER];
    for run in map.runs() {
        let mut at = run.start;
        while at < run.end {
            let most = usize::try_from(run.end - at).unwrap_or(usize::MAX).min(BUFFER);
            let piece = &mut buffer[..most];
            file.read_exact_at(piece, at).map_err(unread)?;
            hasher.feed(at, piece);
            out.write_all(piece).map_err(files::failed(WRITE))?;
            at += most as u64;
        }
    }
    let found = hasher.finish();
    if found != digest {
        return Err(corrupt(format!("it has BLAKE3 {found} and had {digest}")));
    }
    pad(out, map.stored()).map_err(files::failed(WRITE))
}

fn broken_image(row: &ImageRow, error: &io::Error) -> StoreError {
    StoreError::CorruptImage { id: row.id.to_string(), detail: error.to_string() }
}

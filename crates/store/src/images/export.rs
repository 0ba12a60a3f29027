//! An image as others store it: its tree as one compressed tar, and its configuration as OCI has it.
//!
//! The same image gives the same bytes: entries are in the order of their names, with their own times, and
//! nothing says when or where it was made. What only the agent needs is not in it.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};
use torpor_lifecycle::store::StoreError;

use super::layered::architecture;
use super::limits::Limits;
use super::path::TreePath;
use super::reader::{Erofs, Inode, Kind};
use super::tree::unreadable;
use super::{Image, Images, blocking};
use crate::files;
use crate::layout::Stage;

/// Marks in layers of others: a file of such a name would remove another.
const WHITEOUT: &[u8] = b".wh.";
const BUFFER: usize = 256 * 1024;

/// An image to be pushed; its file goes with it.
#[derive(Debug)]
pub struct Exported {
    pub config: Vec<u8>,
    pub layer: PathBuf,
    /// `sha256:…` of the layer as it is stored.
    pub digest: String,
    pub bytes: u64,
    _stage: Stage,
}

impl Images {
    /// Writes an image as one layer.
    pub async fn export(&self, image: &Image) -> Result<Exported, StoreError> {
        let row = self.usable(&image.id).await?;
        let (from, stage) = (self.path_of(&row), self.shared.layout.stage()?);
        blocking(move || {
            let layer = stage.path().join("layer");
            let (digest, bytes, diff) = write_layer(&from, &layer)?;
            let config = row.config.to_oci(architecture(), &diff);
            Ok(Exported { config, layer, digest, bytes, _stage: stage })
        })
        .await
    }
}

/// Digest and bytes of the file, and the digest of what is compressed in it.
fn write_layer(root: &Path, layer: &Path) -> Result<(String, u64, String), StoreError> {
    let failed = || files::failed("write a layer");
    let erofs = Erofs::open(File::open(root).map_err(unreadable)?).map_err(unreadable)?;
    let file = BufWriter::with_capacity(BUFFER, File::create_new(layer).map_err(failed())?);
    let gzip = GzEncoder::new(Hashing::new(file), Compression::default());
    let mut tar =
        Tar { erofs: &erofs, out: Builder::new(Hashing::new(gzip)), linked: HashMap::new() };
    let root = erofs.inode(Erofs::ROOT).map_err(unreadable)?;
    tar.dir(&root, &TreePath::ROOT)?;
    let (gzip, diff) = tar.out.into_inner().map_err(failed())?.finish();
    let stored = gzip.finish().map_err(failed())?;
    let bytes = stored.written;
    let (mut file, digest) = stored.finish();
    file.flush().map_err(failed())?;
    Ok((digest, bytes, diff))
}

struct Tar<'a, W: Write> {
    erofs: &'a Erofs,
    out: Builder<W>,
    /// The first path of files with several.
    linked: HashMap<u64, TreePath>,
}

impl<W: Write> Tar<'_, W> {
    fn dir(&mut self, dir: &Inode, path: &TreePath) -> Result<(), StoreError> {
        let mut names = self.erofs.names(dir).map_err(unreadable)?;
        names.sort();
        for (name, nid) in names {
            // Also bounds the depth.
            let path =
                TreePath::parse(path.child(OsStr::from_bytes(&name)).bytes(), &Limits::default())?;
            if path.is_ignored() {
                continue;
            }
            if name.starts_with(WHITEOUT) {
                let text = format!("{path} would mean something else in an image of a registry");
                return Err(StoreError::Invalid(text));
            }
            let inode = self.erofs.inode(nid).map_err(unreadable)?;
            self.entry(nid, &inode, &path)?;
        }
        Ok(())
    }

    fn entry(&mut self, nid: u64, inode: &Inode, path: &TreePath) -> Result<(), StoreError> {
        let mut header = Header::new_gnu();
        header.set_mode(inode.meta.mode);
        header.set_uid(inode.meta.uid.into());
        header.set_gid(inode.meta.gid.into());
        header.set_mtime(u64::try_from(inode.meta.mtime).unwrap_or(0));
        header.set_size(0);
        let name = Path::new(path.as_os_str());
        let failed = || files::failed("write a layer");
        if let Some(first) = self.linked.get(&nid) {
            header.set_entry_type(EntryType::Link);
            let to = Path::new(first.as_os_str());
            return self.out.append_link(&mut header, name, to).map_err(failed());
        }
        if inode.kind != Kind::Dir && inode.links > 1 {
            self.linked.insert(nid, path.clone());
        }
        match inode.kind {
            Kind::Dir => {
                header.set_entry_type(EntryType::Directory);
                let with_slash = [path.bytes(), b"/"].concat();
                let name = Path::new(OsStr::from_bytes(&with_slash));
                self.out.append_data(&mut header, name, io::empty()).map_err(failed())?;
                self.dir(inode, path)
            }
            Kind::File => {
                header.set_entry_type(EntryType::Regular);
                header.set_size(inode.size);
                let content = self.erofs.content(inode);
                self.out.append_data(&mut header, name, content).map_err(failed())
            }
            Kind::Symlink => {
                header.set_entry_type(EntryType::Symlink);
                let target = self.erofs.small(inode).map_err(unreadable)?;
                let target = Path::new(OsStr::from_bytes(&target));
                self.out.append_link(&mut header, name, target).map_err(failed())
            }
            Kind::Other => Ok(()),
        }
    }
}

/// Hashes what passes through.
struct Hashing<W> {
    out: W,
    hasher: Sha256,
    written: u64,
}

impl<W: Write> Hashing<W> {
    fn new(out: W) -> Self {
        Self { out, hasher: Sha256::new(), written: 0 }
    }

    fn finish(self) -> (W, String) {
        (self.out, format!("sha256:{}", hex::encode(self.hasher.finalize())))
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.out.write(bytes)?;
        self.hasher.update(&bytes[..count]);
        self.written += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

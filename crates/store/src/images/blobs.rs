//! The named parts of an image archive (`docker save`, OCI layout): a tar file with an index of
//! where its files are. Nothing is unpacked.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use torpor_lifecycle::store::StoreError;

use super::limits::Budget;
use super::path::TreePath;
use super::tarball::{EntryKind, Tarball};
use super::tree::unreadable;

/// Largest manifest, index or configuration that is read.
const JSON_MAX: u64 = 8 * 1024 * 1024;
/// How many links from one name to the next are followed in an archive.
const LINKS_MAX: usize = 8;

pub(crate) struct Blobs {
    file: Arc<File>,
    index: HashMap<TreePath, Place>,
}

/// Where a name of a tar file leads.
#[derive(Debug, Clone)]
enum Place {
    Bytes { at: u64, size: u64 },
    Link(TreePath),
}

impl Blobs {
    /// Indexes an uncompressed tar file.
    pub(crate) fn tar(file: File, budget: &mut Budget) -> Result<Self, StoreError> {
        let file = Arc::new(file);
        let mut index = HashMap::new();
        let mut tarball = Tarball::new(Seeking { file: file.clone(), at: 0 });
        while let Some(entry) = tarball.next_entry()? {
            budget.spend_entry()?;
            let Ok(path) = TreePath::parse(&entry.path, &budget.limits) else { continue };
            let place = match entry.kind {
                EntryKind::File => Place::Bytes { at: entry.at, size: entry.size },
                EntryKind::Symlink | EntryKind::Hardlink => {
                    let Some(target) = target(&path, &entry.link, entry.kind, budget) else {
                        continue;
                    };
                    Place::Link(target)
                }
                EntryKind::Dir | EntryKind::Special => continue,
            };
            index.insert(path, place);
            tarball.skip_body(|input, left| input.at += left);
        }
        Ok(Self { file, index })
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.open(name).is_ok()
    }

    pub(crate) fn open(&self, name: &str) -> Result<Box<dyn Read>, StoreError> {
        let missing = || StoreError::Invalid(format!("the image archive has no {name:?}"));
        let (at, size) = find(&self.index, name).ok_or_else(missing)?;
        Ok(Box::new(Seeking { file: self.file.clone(), at }.take(size)))
    }

    /// A small file whole.
    pub(crate) fn read(&self, name: &str) -> Result<Vec<u8>, StoreError> {
        let mut bytes = Vec::new();
        self.open(name)?.take(JSON_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        if bytes.len() as u64 > JSON_MAX {
            return Err(StoreError::Invalid(format!("{name:?} in the image archive is too large")));
        }
        Ok(bytes)
    }
}

fn find(index: &HashMap<TreePath, Place>, name: &str) -> Option<(u64, u64)> {
    let mut path = TreePath::parse(name.as_bytes(), &super::Limits::default()).ok()?;
    for _ in 0..LINKS_MAX {
        match index.get(&path)? {
            Place::Bytes { at, size } => return Some((*at, *size)),
            Place::Link(next) => path = next.clone(),
        }
    }
    None
}

/// Where a link leads, within the archive; `docker save` links equal layers like `../ID/layer.tar`.
fn target(path: &TreePath, link: &[u8], kind: EntryKind, budget: &Budget) -> Option<TreePath> {
    if kind == EntryKind::Hardlink || link.starts_with(b"/") {
        return TreePath::parse(link, &budget.limits).ok();
    }
    let (dir, _) = path.split()?;
    let mut parts: Vec<&[u8]> = dir.bytes().split(|b| *b == b'/').collect();
    for part in link.split(|b| *b == b'/') {
        match part {
            b".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    TreePath::parse(&parts.join(&b'/'), &budget.limits).ok()
}

/// Reads a shared file from a place of its own.
pub(crate) struct Seeking {
    pub(crate) file: Arc<File>,
    pub(crate) at: u64,
}

impl Read for Seeking {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

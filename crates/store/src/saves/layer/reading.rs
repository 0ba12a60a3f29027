//! Reading a layer: its index is in memory, its content stays where it is.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use torpor_lifecycle::engine::{Change, ChangeKind, Changes, See};
use torpor_lifecycle::store::{LAYER_FILE, StoreError};

use super::super::content;
use super::{BUFFER, FILE_MAX, MARK, OPAQUE, PATH_MAX, WHITEOUT, join, split};
use crate::files;
use crate::images::blobs::Seeking;
use crate::images::path::refused;
use crate::images::sparse::SparseMap;
use crate::images::tarball::{Entry, Tarball};

/// Changed paths of one layer; memory is needed for each.
const ENTRIES_MAX: usize = 4_000_000;

/// The changes in a `layer.tar`. Its index is in memory, its content is read from the file.
#[derive(Debug)]
pub struct LayerChanges {
    file: Arc<File>,
    entries: Vec<Change>,
    places: Vec<Place>,
}

/// Where the content of an entry starts, and of a sparse file which parts of it there are.
#[derive(Debug, Clone, Default)]
struct Place {
    at: u64,
    sparse: Option<Box<SparseMap>>,
}

impl LayerChanges {
    /// Reads the index of the layer in the directory of a filesystem save. Blocks.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let action = "open the files of a save";
        let file = Arc::new(content::open(&dir.join(LAYER_FILE)).map_err(files::failed(action))?);
        let length = file.metadata().map_err(files::failed(action))?.len();
        let mut index = Index::default();
        let mut tarball = Tarball::with_sparse_files(Seeking { file: file.clone(), at: 0 });
        while let Some(entry) = tarball.next_entry()? {
            let stored = entry.sparse.as_ref().map_or(entry.size, SparseMap::stored);
            if entry.at.checked_add(stored).is_none_or(|end| end > length) {
                return Err(refused(&entry.path, "the layer ends before it does"));
            }
            index.take(entry)?;
            tarball.skip_body(|input, left| input.at += left);
        }
        let (entries, places) = index.finish()?;
        Ok(Self { file, entries, places })
    }

    fn file(&self, index: usize) -> io::Result<(u64, &Place)> {
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let ChangeKind::File { size } = self.entries.get(index).ok_or_else(missing)?.kind else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "only files have content"));
        };
        Ok((size, &self.places[index]))
    }
}

impl Changes for LayerChanges {
    fn entries(&self) -> &[Change] {
        &self.entries
    }

    fn data(&self, index: usize) -> io::Result<Vec<Range<u64>>> {
        let (size, place) = self.file(index)?;
        Ok(match &place.sparse {
            Some(map) => map.runs().to_vec(),
            None if size == 0 => Vec::new(),
            None => std::iter::once(0..size).collect(),
        })
    }

    fn read(&self, index: usize, see: See<'_>) -> io::Result<()> {
        let mut from = self.file(index)?.1.at;
        let mut buffer = Vec::new();
        for run in self.data(index)? {
            let mut at = run.start;
            while at < run.end {
                let most = usize::try_from(run.end - at).unwrap_or(BUFFER).min(BUFFER);
                buffer.resize(most.max(buffer.len()), 0);
                self.file.read_exact_at(&mut buffer[..most], from)?;
                see(at, &buffer[..most])?;
                (at, from) = (at + most as u64, from + most as u64);
            }
        }
        Ok(())
    }
}

/// What a layer was found to say so far.
#[derive(Default)]
struct Index {
    found: BTreeMap<Vec<u8>, (Change, Place)>,
    opaque: Vec<Vec<u8>>,
}

impl Index {
    fn take(&mut self, entry: Entry) -> Result<(), StoreError> {
        if self.found.len() >= ENTRIES_MAX {
            let text = format!("a layer has more than {ENTRIES_MAX} entries");
            return Err(StoreError::Invalid(text));
        }
        let path = safe(&entry.path)?;
        let (dir, name) = split(&path);
        if !entry.literal && name == OPAQUE {
            self.opaque.push(dir.to_vec());
        } else if !entry.literal && name.starts_with(MARK) {
            return Ok(());
        } else if let Some(name) = name.strip_prefix(WHITEOUT).filter(|_| !entry.literal) {
            let path = join(dir, name);
            // What the same layer brings stays, on top of nothing.
            match self.found.get_mut(&path) {
                Some((change, _)) => hide_below(change),
                None => {
                    let removed = change(path.clone(), ChangeKind::Removed);
                    self.found.insert(path, (removed, Place::default()));
                }
            }
        } else {
            self.bring(entry, path)?;
        }
        Ok(())
    }

    fn bring(&mut self, entry: Entry, path: Vec<u8>) -> Result<(), StoreError> {
        let (major, minor) = entry.device;
        let kind = match entry.raw {
            b'1' => ChangeKind::HardLink { to: safe(&entry.link)? },
            b'2' => ChangeKind::Symlink { target: entry.link },
            b'3' => ChangeKind::CharDevice { major, minor },
            b'4' => ChangeKind::BlockDevice { major, minor },
            b'5' => ChangeKind::Directory { opaque: false },
            b'6' => ChangeKind::Fifo,
            _ if entry.path.ends_with(b"/") => ChangeKind::Directory { opaque: false },
            _ if entry.size > FILE_MAX => return Err(refused(&path, super::TOO_LONG)),
            _ => ChangeKind::File { size: entry.size },
        };
        let mut change = Change {
            mode: entry.meta.mode,
            uid: entry.meta.uid,
            gid: entry.meta.gid,
            modified_at_ms: entry.modified_at_ms,
            ..change(path.clone(), kind)
        };
        if self.found.get(&path).is_some_and(|(old, _)| old.kind == ChangeKind::Removed) {
            hide_below(&mut change);
        }
        let place = Place { at: entry.at, sparse: entry.sparse.map(Box::new) };
        self.found.insert(path, (change, place));
        Ok(())
    }

    fn finish(mut self) -> Result<(Vec<Change>, Vec<Place>), StoreError> {
        for path in std::mem::take(&mut self.opaque) {
            let kind = ChangeKind::Directory { opaque: true };
            let made = || (change(path.clone(), kind), Place::default());
            hide_below(&mut self.found.entry(path.clone()).or_insert_with(made).0);
        }
        self.order_links()?;
        Ok(self.found.into_values().unzip())
    }

    /// The first name of a file becomes the file, and the others links to it.
    fn order_links(&mut self) -> Result<(), StoreError> {
        let mut first: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
        for (path, (change, _)) in &self.found {
            if let ChangeKind::HardLink { to } = &change.kind
                && path < to
            {
                // The map is in order, so the first one seen is the first one.
                first.entry(to.clone()).or_insert_with(|| path.clone());
            }
        }
        let nothing = |path: &[u8]| refused(path, "it is a link to nothing in its layer");
        for (old, new) in &first {
            let (kind, place) = match self.found.get_mut(old) {
                Some((change, place)) => (change.kind.clone(), std::mem::take(place)),
                None => return Err(nothing(new)),
            };
            self.set(old, ChangeKind::HardLink { to: new.clone() }, Place::default());
            self.set(new, kind, place);
        }
        let links: Vec<(Vec<u8>, Vec<u8>)> = self.found.values().filter_map(link).collect();
        for (path, to) in links {
            let to = first.get(&to).cloned().unwrap_or(to);
            match self.found.get(&to).map(|(target, _)| &target.kind) {
                Some(
                    ChangeKind::Directory { .. }
                    | ChangeKind::Removed
                    | ChangeKind::HardLink { .. },
                )
                | None => return Err(nothing(&path)),
                Some(
                    ChangeKind::File { .. }
                    | ChangeKind::Symlink { .. }
                    | ChangeKind::Fifo
                    | ChangeKind::Socket
                    | ChangeKind::CharDevice { .. }
                    | ChangeKind::BlockDevice { .. },
                ) => self.set(&path, ChangeKind::HardLink { to }, Place::default()),
            }
        }
        Ok(())
    }

    fn set(&mut self, path: &[u8], kind: ChangeKind, place: Place) {
        if let Some(found) = self.found.get_mut(path) {
            found.0.kind = kind;
            found.1 = place;
        }
    }
}

fn link((change, _): &(Change, Place)) -> Option<(Vec<u8>, Vec<u8>)> {
    let ChangeKind::HardLink { to } = &change.kind else { return None };
    Some((change.path.clone(), to.clone()))
}

/// A path that stays in its tree, in one spelling. Parts may be longer than names of files are: the
/// mark of a removed file is.
fn safe(path: &[u8]) -> Result<Vec<u8>, StoreError> {
    if path.len() > PATH_MAX {
        return Err(refused(path, "its name is too long"));
    }
    let parts = path.split(|byte| *byte == b'/');
    let parts: Vec<&[u8]> = parts.filter(|part| !part.is_empty() && *part != b".").collect();
    if path.contains(&0) || parts.contains(&b"..".as_slice()) {
        return Err(refused(path, "its name contains \"..\" or a NUL"));
    }
    Ok(parts.join(&b'/'))
}

pub(super) fn change(path: Vec<u8>, kind: ChangeKind) -> Change {
    Change { path, kind, mode: 0o755, uid: 0, gid: 0, modified_at_ms: 0 }
}

fn hide_below(change: &mut Change) {
    if let ChangeKind::Directory { opaque } = &mut change.kind {
        *opaque = true;
    }
}

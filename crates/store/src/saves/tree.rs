//! The files of a save without its machine: an image with changes on top, as the guest saw them.
//!
//! Paths of users are absolute; `..` is resolved in the text, before anything is looked up. Links on
//! the way to a path are followed inside the tree, a link at its end is not, except by `list`.
//! What belongs to the agent is not shown.

mod walk;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io::{self, Read as _, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use torpor_lifecycle::engine::{Change, ChangeKind, Changes, See};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::api::FileEntry;

use super::content::Identity;
use super::spot::{Content, Facts, PATH_MAX, SpotKind, TreeError, entry, join, lexical, split};
use crate::images::path::{IN_TMP, OURS};
use crate::images::reader::{Erofs, Kind};

pub use walk::{Walked, WalkedKind};

/// Links followed on the way to one path, as in Linux.
const LINKS_MAX: usize = 40;
/// Read of an image at a time.
const BUFFER: usize = 256 * 1024;
/// Entries of one listing.
const ENTRIES_MAX: usize = 100_000;

/// An image with changes on top.
pub struct SavedTree {
    image: Erofs,
    /// Tells whether two trees stand on the same file.
    image_file: Identity,
    /// Directories of the image that were read: name and inode.
    image_dirs: Mutex<HashMap<u64, Arc<ImageDir>>>,
    changes: Box<dyn Changes>,
    /// The changed paths as a tree; the first is the root.
    nodes: Vec<Node>,
}

type ImageDir = BTreeMap<Vec<u8>, u64>;

/// A changed path, or a directory on the way to one.
#[derive(Default)]
struct Node {
    change: Option<usize>,
    children: BTreeMap<Vec<u8>, usize>,
}

/// Something in the tree: in the changes, in the image, or, for a directory, in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) node: Option<usize>,
    pub(super) inode: Option<u64>,
}

impl SavedTree {
    /// An image as it is.
    pub fn of_image(image_root: &Path) -> Result<Self, StoreError> {
        Self::new(image_root, Box::new(NoChanges))
    }

    /// Puts changes on top of an image's root file. Blocks, as all methods do.
    pub fn new(image_root: &Path, changes: Box<dyn Changes>) -> Result<Self, StoreError> {
        let open = || {
            let file = super::content::open(image_root)?;
            let identity = Identity::of(&file)?;
            Ok((Erofs::open(file)?, identity))
        };
        let (image, image_file) =
            open().map_err(crate::files::failed::<io::Error>("open the image of a save"))?;
        let mut nodes = vec![Node::default()];
        for (index, change) in changes.entries().iter().enumerate() {
            let mut at = 0;
            for part in change.path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
                let fresh = nodes.len();
                at = *nodes[at].children.entry(part.to_vec()).or_insert(fresh);
                if at == fresh {
                    nodes.push(Node::default());
                }
            }
            nodes[at].change = Some(index);
        }
        Ok(Self { image, image_file, image_dirs: Mutex::default(), changes, nodes })
    }

    /// What is in a directory, level by level down to `depth`, in the order of paths, which are
    /// relative to it.
    pub fn list(&self, path: &str, depth: u32) -> Result<Vec<FileEntry>, TreeError> {
        let (spot, _) = self.find(path, LastLink::Follow)?;
        if self.facts(spot)?.kind != SpotKind::Directory {
            return Err(TreeError::NotADirectory(path.to_owned()));
        }
        let mut entries = Vec::new();
        let mut rest = vec![(spot, Vec::new(), 0)];
        while let Some((spot, shown, level)) = rest.pop() {
            let facts = self.facts(spot)?;
            if level > 0 {
                if entries.len() == ENTRIES_MAX {
                    return Err(TreeError::TooMany(ENTRIES_MAX));
                }
                entries.push(entry(&shown, &facts));
            }
            if facts.kind != SpotKind::Directory || level >= depth {
                continue;
            }
            // The last one pushed comes first.
            for name in self.names(spot, NamesOf::All)?.into_iter().rev() {
                if let Some(child) = self.child(spot, &name)? {
                    rest.push((child, join(&shown, &name), level + 1));
                }
            }
        }
        Ok(entries)
    }

    /// What is at a path.
    pub fn stat(&self, path: &str) -> Result<FileEntry, TreeError> {
        let (spot, _) = self.find(path, LastLink::Stay)?;
        Ok(FileEntry { path: path.to_owned(), ..entry(b"", &self.facts(spot)?) })
    }

    /// Writes the content of a file, whole; gives its size.
    pub fn copy(&self, path: &str, out: &mut dyn Write) -> Result<u64, TreeError> {
        let (spot, _) = self.find(path, LastLink::Stay)?;
        match self.facts(spot)?.kind {
            SpotKind::File { size, content } => {
                self.pour(content, out)?;
                Ok(size)
            }
            SpotKind::Directory
            | SpotKind::Symlink { .. }
            | SpotKind::Fifo
            | SpotKind::Socket
            | SpotKind::Device { .. }
            | SpotKind::Other => Err(TreeError::NotAFile(path.to_owned())),
        }
    }

    fn pour(&self, content: Content, out: &mut dyn Write) -> Result<(), TreeError> {
        let mut out = Out { out, failed: None };
        let done = match content {
            Content::Change(index) => self.changes.copy(index, &mut out),
            Content::Image(inode) => self
                .image
                .inode(inode)
                .and_then(|inode| io::copy(&mut self.image.content(&inode), &mut out).map(drop)),
        };
        match (done, out.failed) {
            (_, Some(error)) => Err(TreeError::Output(error)),
            (done, None) => done.map_err(TreeError::Broken),
        }
    }

    /// Shows a content without its holes; see [`Changes::read`].
    pub(super) fn read(&self, content: Content, see: See<'_>) -> Result<(), TreeError> {
        let read = match content {
            Content::Change(index) => self.changes.read(index, see),
            Content::Image(inode) => self.read_image(inode, see),
        };
        read.map_err(TreeError::Broken)
    }

    fn read_image(&self, inode: u64, see: See<'_>) -> io::Result<()> {
        let inode = self.image.inode(inode)?;
        let mut content = self.image.content(&inode);
        let (mut at, mut buffer) = (0, vec![0; BUFFER]);
        loop {
            let count = content.read(&mut buffer)?;
            if count == 0 {
                return Ok(());
            }
            see(at, &buffer[..count])?;
            at += count as u64;
        }
    }

    // === Finding ===

    /// The spot at a path of a user, and the path without detours.
    fn find(&self, path: &str, last: LastLink) -> Result<(Spot, Vec<u8>), TreeError> {
        let gone = || TreeError::NoSuchPath(path.to_owned());
        let mut parts: VecDeque<Vec<u8>> = lexical(path)?.into();
        let mut way: Vec<(Spot, Vec<u8>)> = Vec::new();
        let mut links = 0;
        while let Some(part) = parts.pop_front() {
            if part == b".." {
                way.pop();
                continue;
            }
            let dir = way.last().map_or(Spot::ROOT, |(spot, _)| *spot);
            let spot = self.child(dir, &part)?.ok_or_else(gone)?;
            let facts = self.facts(spot)?;
            match facts.kind {
                SpotKind::Symlink { target } if !parts.is_empty() || last == LastLink::Follow => {
                    links += 1;
                    if links > LINKS_MAX || target.len() > PATH_MAX {
                        let path = path.to_owned();
                        return Err(TreeError::BadPath { path, why: "too many links lead there" });
                    }
                    if target.starts_with(b"/") {
                        way.clear();
                    }
                    for part in split(&target).into_iter().rev() {
                        parts.push_front(part);
                    }
                }
                SpotKind::Directory => way.push((spot, part)),
                _ if !parts.is_empty() => return Err(gone()),
                SpotKind::File { .. }
                | SpotKind::Symlink { .. }
                | SpotKind::Fifo
                | SpotKind::Socket
                | SpotKind::Device { .. }
                | SpotKind::Other => way.push((spot, part)),
            }
        }
        let names: Vec<&[u8]> = way.iter().map(|(_, name)| name.as_slice()).collect();
        let spot = way.last().map_or(Spot::ROOT, |(spot, _)| *spot);
        let names = names.join(&b'/');
        Ok((spot, names))
    }

    /// What is called `name` in a directory.
    pub(super) fn child(&self, dir: Spot, name: &[u8]) -> Result<Option<Spot>, TreeError> {
        let node = dir.node.and_then(|node| self.nodes[node].children.get(name).copied());
        let inode = match self.image_dir(dir.inode)? {
            Some(dir) => self.image_names(dir)?.get(name).copied(),
            None => None,
        };
        let Some(node) = node else {
            return Ok(inode.map(|inode| Spot { node: None, inode: Some(inode) }));
        };
        let below = self.image_dir(inode)?;
        let inode = match self.change(node).map(|change| &change.kind) {
            // On the way to something that was changed.
            None if self.brings(node) => below,
            None => match inode {
                Some(inode) => {
                    let node = below.map(|_| node);
                    return Ok(Some(Spot { node, inode: Some(inode) }));
                }
                None => return Ok(None),
            },
            Some(ChangeKind::Removed) => return Ok(None),
            Some(ChangeKind::Directory { opaque: false }) => below,
            Some(
                ChangeKind::Directory { opaque: true }
                | ChangeKind::File { .. }
                | ChangeKind::HardLink { .. }
                | ChangeKind::Symlink { .. }
                | ChangeKind::Fifo
                | ChangeKind::Socket
                | ChangeKind::CharDevice { .. }
                | ChangeKind::BlockDevice { .. },
            ) => None,
        };
        Ok(Some(Spot { node: Some(node), inode }))
    }

    /// Whether there is anything but removed paths at or below a node.
    fn brings(&self, node: usize) -> bool {
        let mut rest = vec![node];
        while let Some(node) = rest.pop() {
            match self.change(node).map(|change| &change.kind) {
                Some(ChangeKind::Removed) => {}
                Some(_) => return true,
                None => rest.extend(self.nodes[node].children.values()),
            }
        }
        false
    }

    /// An inode of the image, if it is a directory.
    fn image_dir(&self, inode: Option<u64>) -> Result<Option<u64>, TreeError> {
        let Some(inode) = inode else { return Ok(None) };
        let found = self.image.inode(inode).map_err(TreeError::Broken)?;
        Ok((found.kind == Kind::Dir).then_some(inode))
    }

    fn image_names(&self, dir: u64) -> Result<Arc<ImageDir>, TreeError> {
        if let Some(names) = self.image_dirs.lock().get(&dir) {
            return Ok(names.clone());
        }
        let names = self.image.inode(dir).and_then(|dir| self.image.names(&dir));
        let names: ImageDir = names.map_err(TreeError::Broken)?.into_iter().collect();
        let names = Arc::new(names);
        self.image_dirs.lock().insert(dir, names.clone());
        Ok(names)
    }

    /// The names in a directory; some of them may be of things that were removed.
    pub(super) fn names(&self, dir: Spot, of: NamesOf) -> Result<BTreeSet<Vec<u8>>, TreeError> {
        let mut names = BTreeSet::new();
        if let Some(node) = dir.node {
            names.extend(self.nodes[node].children.keys().cloned());
        }
        if of == NamesOf::All
            && let Some(inode) = self.image_dir(dir.inode)?
        {
            names.extend(self.image_names(inode)?.keys().cloned());
        }
        if names.contains(OURS) && (dir == Spot::ROOT || self.is_tmp(dir)?) {
            names.remove(OURS);
        }
        Ok(names)
    }

    /// The directory in which [`IN_TMP`] is.
    fn is_tmp(&self, dir: Spot) -> Result<bool, TreeError> {
        let (tmp, _) = IN_TMP.split_once('/').unwrap_or_default();
        Ok(self.child(Spot::ROOT, tmp.as_bytes())? == Some(dir))
    }

    // === Looking ===

    fn change(&self, node: usize) -> Option<&Change> {
        self.nodes[node].change.and_then(|index| self.changes.entries().get(index))
    }

    pub(super) fn facts(&self, spot: Spot) -> Result<Facts, TreeError> {
        if let Some(change) = spot.node.and_then(|node| self.change(node)) {
            let index = spot.node.and_then(|node| self.nodes[node].change).unwrap_or_default();
            return Ok(self.changed_facts(index, change));
        }
        match spot.inode {
            Some(inode) => self.image_facts(inode).map_err(TreeError::Broken),
            None => Ok(Facts::bare_directory()),
        }
    }

    fn changed_facts(&self, index: usize, change: &Change) -> Facts {
        let kind = match &change.kind {
            ChangeKind::File { size } => {
                SpotKind::File { size: *size, content: Content::Change(index) }
            }
            ChangeKind::HardLink { to } => return self.linked_facts(to),
            ChangeKind::Directory { .. } => SpotKind::Directory,
            ChangeKind::Symlink { target } => SpotKind::Symlink { target: target.clone() },
            ChangeKind::Fifo => SpotKind::Fifo,
            ChangeKind::Socket => SpotKind::Socket,
            ChangeKind::CharDevice { major, minor } => {
                SpotKind::Device { block: false, major: *major, minor: *minor }
            }
            ChangeKind::BlockDevice { major, minor } => {
                SpotKind::Device { block: true, major: *major, minor: *minor }
            }
            ChangeKind::Removed => SpotKind::Other,
        };
        Facts {
            kind,
            mode: change.mode & 0o7777,
            uid: change.uid,
            gid: change.gid,
            modified_at_ms: change.modified_at_ms,
        }
    }

    /// A file has one mode and owner, whatever its names are.
    fn linked_facts(&self, to: &[u8]) -> Facts {
        let entries = self.changes.entries();
        let mut node = Some(0);
        for part in to.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
            node = node.and_then(|node: usize| self.nodes[node].children.get(part).copied());
        }
        let index = node.and_then(|node| self.nodes[node].change);
        match index.and_then(|index| Some((index, entries.get(index)?))) {
            Some((index, change)) if !matches!(change.kind, ChangeKind::HardLink { .. }) => {
                self.changed_facts(index, change)
            }
            Some(_) | None => Facts { kind: SpotKind::Other, ..Facts::bare_directory() },
        }
    }

    fn image_facts(&self, nid: u64) -> io::Result<Facts> {
        let inode = self.image.inode(nid)?;
        let kind = match inode.kind {
            Kind::File => SpotKind::File { size: inode.size, content: Content::Image(nid) },
            Kind::Dir => SpotKind::Directory,
            Kind::Symlink => SpotKind::Symlink { target: self.image.small(&inode)? },
            Kind::Other => SpotKind::Other,
        };
        Ok(Facts {
            kind,
            mode: inode.meta.mode,
            uid: inode.meta.uid,
            gid: inode.meta.gid,
            modified_at_ms: inode.meta.mtime.saturating_mul(1000),
        })
    }

    pub(super) fn same_image(&self, other: &Self) -> bool {
        self.image_file == other.image_file
    }

    /// The same image without changes.
    pub(super) fn unchanged(&self) -> Result<Self, TreeError> {
        let image = self.image.again().map_err(TreeError::Broken)?;
        Ok(Self {
            image,
            image_file: self.image_file,
            image_dirs: Mutex::default(),
            changes: Box::new(NoChanges),
            nodes: vec![Node::default()],
        })
    }
}

impl Spot {
    pub(super) const ROOT: Self = Self { node: Some(0), inode: Some(Erofs::ROOT) };
}

/// Whether a link at the end of a path is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LastLink {
    Follow,
    Stay,
}

/// Which names of a directory are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NamesOf {
    All,
    /// Only those that are not as in the image, or lead to such.
    Changes,
}

struct NoChanges;

impl Changes for NoChanges {
    fn entries(&self) -> &[Change] {
        &[]
    }

    fn data(&self, _: usize) -> io::Result<Vec<Range<u64>>> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn read(&self, _: usize, _: See<'_>) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }
}

/// Tells errors of the output from errors of the input.
struct Out<'a> {
    out: &'a mut dyn Write,
    failed: Option<io::Error>,
}

impl Write for Out<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes).map_err(|error| {
            let kind = error.kind();
            // Asked again, so nothing failed yet.
            if kind != io::ErrorKind::Interrupted {
                self.failed = Some(error);
            }
            kind.into()
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

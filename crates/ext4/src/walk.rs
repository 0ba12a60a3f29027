//! The walk through all that is below a directory.
//!
//! It ends, on every disk: a directory is entered once, and names are found only in blocks that the
//! budget has room for. What it holds in memory is what [`Limits`] allow.

use std::collections::HashMap;

use crate::attributes::Marks;
use crate::directory;
use crate::error::{Ext4Error, Result, damaged};
use crate::filesystem::{Budget, Filesystem};
use crate::inode::{Inode, Shape};
use crate::runs;
use crate::source::ReadAt;
use crate::upper::{Entry, Kind, Limits};

/// The inode of the filesystem's root.
const ROOT: u32 = 2;
/// Longest path: no call can name a longer one.
const PATH_MAX: usize = 4096;
/// Longest target of a symbolic link, for the same reason.
const TARGET_MAX: u64 = 4096;
/// Longest target that is in its inode.
const TARGET_INSIDE_MAX: u64 = 59;

/// All entries in order, and their inodes.
pub(crate) fn read<D: ReadAt>(
    filesystem: &Filesystem<D>,
    directory: &str,
    limits: Limits,
) -> Result<(Vec<Entry>, Vec<u32>)> {
    let start = find(filesystem, directory)?;
    let mut walk = Walk {
        filesystem,
        budget: filesystem.budget(),
        start,
        known: HashMap::new(),
        nodes: Vec::new(),
        names: Vec::new(),
        count: Count { limits, entries: 0, text_bytes: 0 },
    };
    walk.all()?;
    walk.sorted()
}

/// The directory to begin with.
fn find<D: ReadAt>(filesystem: &Filesystem<D>, path: &str) -> Result<u32> {
    let missing = || Ext4Error::Missing(path.to_owned());
    let mut at = ROOT;
    for part in path.split('/').filter(|part| !part.is_empty()) {
        let mut found = None;
        let mut see = |name: &[u8], number| {
            if name == part.as_bytes() {
                found = Some(number);
            }
            Ok(())
        };
        let inode = filesystem.inode(at)?;
        if inode.shape != Shape::Directory {
            return Err(missing());
        }
        directory::each(filesystem, &inode, &mut filesystem.budget(), &mut see)?;
        at = found.ok_or_else(missing)?;
    }
    match filesystem.inode(at)?.shape {
        Shape::Directory => Ok(at),
        Shape::File
        | Shape::Symlink
        | Shape::Fifo
        | Shape::Socket
        | Shape::CharDevice
        | Shape::BlockDevice => Err(missing()),
    }
}

/// What was found so far, and may be.
struct Count {
    limits: Limits,
    entries: usize,
    text_bytes: usize,
}

impl Count {
    fn entry(&mut self) -> Result<()> {
        self.entries += 1;
        if self.entries > self.limits.entries {
            return Err(Ext4Error::TooMuch(format!("more than {} files", self.limits.entries)));
        }
        Ok(())
    }

    fn text(&mut self, bytes: usize) -> Result<()> {
        self.text_bytes = self.text_bytes.saturating_add(bytes);
        if self.text_bytes > self.limits.text_bytes {
            return Err(Ext4Error::TooMuch("the names of its files are too long".to_owned()));
        }
        Ok(())
    }
}

/// An inode, once for all of its names.
struct Node {
    number: u32,
    kind: Kind,
    mode: u32,
    uid: u32,
    gid: u32,
    modified_at_ms: i64,
}

/// A directory whose names are yet to be read.
struct Pending {
    number: u32,
    /// Where its path is among the names; of the first one, nowhere.
    name: Option<usize>,
    /// Nothing of what is below is visible here.
    covered: bool,
}

struct Walk<'w, D> {
    filesystem: &'w Filesystem<D>,
    budget: Budget,
    /// The inode of the directory that all is in.
    start: u32,
    /// Where the nodes of inodes are.
    known: HashMap<u32, usize>,
    nodes: Vec<Node>,
    /// Paths and the nodes they lead to.
    names: Vec<(Vec<u8>, usize)>,
    count: Count,
}

impl<D: ReadAt> Walk<'_, D> {
    fn all(&mut self) -> Result<()> {
        let mut pending = vec![Pending { number: self.start, name: None, covered: false }];
        while let Some(directory) = pending.pop() {
            for (path, number) in self.names(&directory)? {
                let index = self.node(number)?;
                let name = Some(self.names.len());
                match self.nodes[index].kind {
                    // What was made and removed where nothing is below.
                    Kind::Removed if directory.covered => continue,
                    Kind::Directory { opaque } => {
                        let covered = directory.covered || opaque;
                        pending.push(Pending { number, name, covered });
                    }
                    Kind::Removed
                    | Kind::File { .. }
                    | Kind::HardLink { .. }
                    | Kind::Symlink { .. }
                    | Kind::Fifo
                    | Kind::Socket
                    | Kind::CharDevice { .. }
                    | Kind::BlockDevice { .. } => {}
                }
                self.names.push((path, index));
            }
        }
        Ok(())
    }

    /// The paths of what is in a directory, and their inodes.
    fn names(&mut self, directory: &Pending) -> Result<Vec<(Vec<u8>, u32)>> {
        let dir = directory.name.map_or(&[][..], |name| &self.names[name].0);
        let slash: &[u8] = if dir.is_empty() { b"" } else { b"/" };
        let mut found = Vec::new();
        let mut see = |name: &[u8], number| {
            let path = [dir, slash, name].concat();
            if path.len() > PATH_MAX {
                let start = path[..80].escape_ascii();
                return Err(Ext4Error::TooMuch(format!("a path is too long: {start}…")));
            }
            self.count.entry()?;
            self.count.text(path.len())?;
            found.push((path, number));
            Ok(())
        };
        let inode = self.filesystem.inode(directory.number)?;
        directory::each(self.filesystem, &inode, &mut self.budget, &mut see)?;
        Ok(found)
    }

    /// Where the node of an inode is; it is read if this is its first name.
    fn node(&mut self, number: u32) -> Result<usize> {
        if let Some(&index) = self.known.get(&number) {
            if matches!(self.nodes[index].kind, Kind::Directory { .. }) {
                return Err(damaged(format!("directory {number} has two names")));
            }
            return Ok(index);
        }
        if number == self.start {
            return Err(damaged(format!("directory {number} is inside of itself")));
        }
        let inode = self.filesystem.inode(number)?;
        let kind = self.kind(&inode)?;
        let index = self.nodes.len();
        self.known.insert(number, index);
        self.nodes.push(Node {
            number,
            kind,
            mode: u32::from(inode.mode),
            uid: inode.uid,
            gid: inode.gid,
            modified_at_ms: inode.modified_at_ms,
        });
        Ok(index)
    }

    fn kind(&mut self, inode: &Inode) -> Result<Kind> {
        let filesystem = self.filesystem;
        Ok(match inode.shape {
            Shape::File => {
                Marks::of(filesystem, inode)?.of_file(inode.number)?;
                let mut see = |_| Ok::<_, Ext4Error>(());
                runs::each(filesystem, inode, &mut self.budget, &mut see)?;
                Kind::File { size: inode.size }
            }
            Shape::Directory => {
                let marks = Marks::of(filesystem, inode)?.of_directory(inode.number)?;
                Kind::Directory { opaque: marks.opaque }
            }
            Shape::Symlink => Kind::Symlink { target: self.target(inode)? },
            Shape::Fifo => Kind::Fifo,
            Shape::Socket => Kind::Socket,
            Shape::CharDevice => match inode.device() {
                (0, 0) => Kind::Removed,
                (major, minor) => Kind::CharDevice { major, minor },
            },
            Shape::BlockDevice => {
                let (major, minor) = inode.device();
                Kind::BlockDevice { major, minor }
            }
        })
    }

    /// Where a symbolic link leads to.
    fn target(&mut self, inode: &Inode) -> Result<Vec<u8>> {
        let bad = || damaged(format!("inode {} leads nowhere", inode.number));
        let length = usize::try_from(inode.size).map_err(|_| bad())?;
        let target = match inode.size {
            1..=TARGET_INSIDE_MAX => inode.blocks()[..length].to_vec(),
            ..=TARGET_MAX => self.long_target(inode, length)?,
            _ => return Err(bad()),
        };
        if target.is_empty() || target.contains(&0) {
            return Err(bad());
        }
        self.count.text(length)?;
        Ok(target)
    }

    /// A target in blocks: in all that Linux writes, in one. What is missing is zeros.
    fn long_target(&mut self, inode: &Inode, length: usize) -> Result<Vec<u8>> {
        let filesystem = self.filesystem;
        let bytes = filesystem.about.block_bytes;
        let mut target = vec![0; length];
        let mut block = filesystem.empty_block();
        let mut see = |run: runs::Run| {
            for (part, number) in target.chunks_mut(bytes).zip(0..) {
                let at = run.at.filter(|_| (run.first..run.first + run.count).contains(&number));
                if let Some(at) = at {
                    filesystem.block(at + number - run.first, &mut block)?;
                    part.copy_from_slice(&block[..part.len()]);
                }
            }
            Ok::<_, Ext4Error>(())
        };
        runs::each(filesystem, inode, &mut self.budget, &mut see)?;
        Ok(target)
    }

    /// All names in order; of an inode with several, the first has it and the others link to it.
    fn sorted(mut self) -> Result<(Vec<Entry>, Vec<u32>)> {
        self.names.sort_unstable();
        let mut entries: Vec<Entry> = Vec::with_capacity(self.names.len());
        let mut inodes = Vec::with_capacity(self.names.len());
        // Of each node, where its first name is.
        let mut firsts: Vec<Option<usize>> = vec![None; self.nodes.len()];
        for (path, index) in self.names {
            let node = &self.nodes[index];
            if entries.last().is_some_and(|last| last.path == path) {
                let path = path[..path.len().min(80)].escape_ascii();
                return Err(damaged(format!("there are two of {path}")));
            }
            let kind = match (firsts[index], &node.kind) {
                // A layer has no sockets, so nothing in it can be a link to one.
                (None, kind) | (Some(_), kind @ (Kind::Removed | Kind::Socket)) => kind.clone(),
                (Some(first), _) => {
                    let to = entries[first].path.clone();
                    self.count.text(to.len())?;
                    Kind::HardLink { to }
                }
            };
            firsts[index].get_or_insert(entries.len());
            inodes.push(node.number);
            entries.push(Entry {
                path,
                kind,
                mode: node.mode,
                uid: node.uid,
                gid: node.gid,
                modified_at_ms: node.modified_at_ms,
            });
        }
        Ok((entries, inodes))
    }
}

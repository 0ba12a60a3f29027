//! The files of a saved machine that are not as in its image.
//!
//! ```text
//!   overlay filesystem ── upper root ─▶ dentry ─▶ inode ── what it is ─▶ directory, file, link, …
//!     lower: the image        │                     │                      │ names ─▶ dentry …
//!                             │                     └ filesystem           └ ranges of data
//!                             └ of a tmpfs with a memory file of its own, the disk, named `…:/`
//! ```
//!
//! The upper layer has everything that was made or touched, and marks what was removed as overlay
//! filesystems do: a character device 0:0 in place of a name, and an attribute on a directory that
//! hides the image's. A name that was made and removed again leaves the same mark, so a removed path
//! need not be in the image. Other filesystems of the machine are not looked at, nor are attributes.

use std::collections::{HashMap, HashSet};

use torpor_lifecycle::engine::{Change, ChangeKind};
use torpor_protocol::Excerpt;

use super::fault::Fault;
use super::graph::{Fields, Graph};
use super::memory::{Extent, Memory};
use super::wire::{Items, Pointer, Value};

const OVERLAY: &str = "pkg/sentry/fsimpl/overlay.filesystem";
const DENTRY: &str = "pkg/sentry/fsimpl/tmpfs.dentry";
/// How the name of the root's memory file ends; before it is the container's name.
const ROOT_DISK: &[u8] = b":/";
const OPAQUE: &[u8] = b"trusted.overlay.opaque";

/// Longest name of a file.
const NAME_MAX: usize = 255;
/// Longest path: no call can name a longer one.
const PATH_MAX: usize = 4096;
/// All paths together: some millions of files.
const PATHS_MAX: usize = 512 << 20;

/// The upper layer of the machine's root.
pub(super) struct Upper<'g, 'a> {
    graph: &'g Graph<'a>,
    root: Fields<'g, 'a>,
    /// Its disk's name among the memory files.
    pub(super) disk: Vec<u8>,
}

/// What was found, in the order of the paths.
#[derive(Default)]
pub(super) struct Found {
    pub(super) changes: Vec<Change>,
    /// Of each change; of files only.
    pub(super) extents: Vec<Vec<Extent>>,
}

/// An inode, once for all of its names.
struct Inode {
    kind: ChangeKind,
    mode: u32,
    uid: u32,
    gid: u32,
    modified_at_ms: i64,
    extents: Vec<Extent>,
}

impl<'g, 'a> Upper<'g, 'a> {
    pub(super) fn find(graph: &'g Graph<'a>) -> Result<Self, Fault> {
        let mut found = None;
        for overlay in graph.instances(OVERLAY)? {
            let upper = overlay?.inner("opts")?.inner("UpperRoot")?;
            // A guest's own overlays have an upper layer elsewhere, or none.
            if upper.is_nil("dentry")? {
                continue;
            }
            let root = upper.inner("dentry")?.inner("impl")?;
            if !root.is(DENTRY) {
                continue;
            }
            let disk = root.inner("inode")?.inner("fs")?.owner("mf")?;
            if disk.ends_with(ROOT_DISK) && found.replace(Self { graph, root, disk }).is_some() {
                return Err(Fault::Shape("the machine has several roots".into()));
            }
        }
        found.ok_or_else(|| Fault::Shape("the machine's root has no disk".into()))
    }

    pub(super) fn read(&self, memory: &Memory) -> Result<Found, Fault> {
        let mut walk = Walk { upper: self, memory, inodes: Vec::new(), names: Vec::new() };
        walk.all()?;
        Ok(walk.sorted())
    }
}

/// A walk through the tree.
struct Walk<'w, 'g, 'a> {
    upper: &'w Upper<'g, 'a>,
    memory: &'w Memory,
    inodes: Vec<Inode>,
    /// Paths and the inodes they lead to.
    names: Vec<(Vec<u8>, usize)>,
}

/// A directory whose names are yet to be read.
struct Pending<'a> {
    path: Vec<u8>,
    names: Items<'a>,
    /// Nothing of the image is visible here.
    covered: bool,
}

impl<'a> Walk<'_, '_, 'a> {
    fn all(&mut self) -> Result<(), Fault> {
        // A name belongs to one directory. One that turns up again would make the walk endless.
        let mut seen = HashSet::new();
        let mut known = HashMap::new();
        let mut paths = 0;
        let root = self.upper.root.inner("inode")?.inner("impl")?;
        let names = root.map("childMap")?.unwrap_or(Items::NONE);
        let mut pending = vec![Pending { path: Vec::new(), names, covered: false }];
        while let Some(dir) = pending.pop() {
            for pair in dir.names.pairs() {
                let (path, inode) = self.name(&dir.path, pair?, &mut seen)?;
                paths += path.len();
                if paths > PATHS_MAX {
                    return Err(Fault::TooMuch("it has too many files".into()));
                }
                let index = match known.get(&inode.object) {
                    Some(&index) => self.another_name(index)?,
                    None => {
                        let below = self.inode(inode, &path, dir.covered)?;
                        pending.extend(below);
                        known.insert(inode.object, self.inodes.len() - 1);
                        self.inodes.len() - 1
                    }
                };
                let removed = self.inodes[index].kind == ChangeKind::Removed;
                // What was made and removed where the image has nothing.
                if !(removed && dir.covered) {
                    self.names.push((path, index));
                }
            }
        }
        Ok(())
    }

    /// Refuses another name of a directory.
    fn another_name(&self, index: usize) -> Result<usize, Fault> {
        if matches!(self.inodes[index].kind, ChangeKind::Directory { .. }) {
            return Err(Fault::Absurd("a directory has two names".into()));
        }
        Ok(index)
    }

    /// A name in a directory: its path, and where its inode is.
    fn name(
        &self,
        dir: &[u8],
        pair: (Value<'a>, Value<'a>),
        seen: &mut HashSet<u64>,
    ) -> Result<(Vec<u8>, Pointer<'a>), Fault> {
        let (Value::Text(name), Value::Pointer(dentry)) = pair else {
            return Err(Fault::Shape("a directory's names are of another type".into()));
        };
        let bad = name.is_empty() || name.len() > NAME_MAX || name == b"." || name == b"..";
        if bad || name.iter().any(|byte| matches!(byte, 0 | b'/')) {
            return Err(Fault::Absurd("a file has an impossible name".into()));
        }
        if !seen.insert(dentry.object) {
            return Err(Fault::Absurd("a name is in two directories".into()));
        }
        let slash: &[u8] = if dir.is_empty() { b"" } else { b"/" };
        let path = [dir, slash, name].concat();
        if path.len() > PATH_MAX {
            let path = Excerpt::of(&path);
            return Err(Fault::TooMuch(format!("a path is too long: {path}")));
        }
        let dentry = self.upper.graph.follow(dentry)?;
        Ok((path, self.upper.graph.fields(dentry)?.pointer("inode")?))
    }

    /// Reads an inode; of a directory, what is yet to be read.
    fn inode(
        &mut self,
        inode: Pointer<'a>,
        path: &[u8],
        covered: bool,
    ) -> Result<Option<Pending<'a>>, Fault> {
        let graph = self.upper.graph;
        let inode = graph.fields(graph.follow(inode)?)?;
        let what = inode.inner("impl")?;
        let mode = narrow(inode.uint("mode")?)?;
        let mut extents = Vec::new();
        let kind = match mode & libc::S_IFMT {
            libc::S_IFDIR => ChangeKind::Directory { opaque: is_opaque(&inode)? },
            libc::S_IFREG => {
                let size = what.uint("size")?;
                self.extents(&what, size, &mut extents)?;
                ChangeKind::File { size }
            }
            libc::S_IFLNK => ChangeKind::Symlink { target: what.text("target")?.to_vec() },
            libc::S_IFIFO => ChangeKind::Fifo,
            libc::S_IFSOCK => ChangeKind::Socket,
            libc::S_IFCHR | libc::S_IFBLK => device(mode, &what)?,
            _ => return Err(Fault::Absurd(format!("a file has the mode {mode:o}"))),
        };
        let covered = covered || kind == ChangeKind::Directory { opaque: true };
        let names = match kind {
            ChangeKind::Directory { .. } => what.map("childMap")?,
            ChangeKind::File { .. }
            | ChangeKind::HardLink { .. }
            | ChangeKind::Symlink { .. }
            | ChangeKind::Fifo
            | ChangeKind::Socket
            | ChangeKind::CharDevice { .. }
            | ChangeKind::BlockDevice { .. }
            | ChangeKind::Removed => None,
        };
        self.inodes.push(Inode {
            kind,
            mode: mode & !libc::S_IFMT,
            uid: narrow(inode.uint("uid")?)?,
            gid: narrow(inode.uint("gid")?)?,
            modified_at_ms: inode.int("mtime")?.div_euclid(1_000_000),
            extents,
        });
        Ok(names.map(|names| Pending { path: path.to_vec(), names, covered }))
    }

    /// Where a file's data is.
    fn extents(
        &self,
        file: &Fields<'_, 'a>,
        size: u64,
        extents: &mut Vec<Extent>,
    ) -> Result<(), Fault> {
        let mut last = 0;
        for range in file.inner("data")?.list("root")? {
            let range = self.upper.graph.fields(range?)?;
            let (start, end) = (range.uint("Start")?, range.uint("End")?);
            if start < last || end <= start {
                return Err(Fault::Absurd("a file's data is not in order".into()));
            }
            last = end;
            // The last page goes beyond the end of the file.
            let end = end.min(size);
            if start < end {
                self.memory.locate(start, end, range.uint("Value")?, extents)?;
            }
        }
        Ok(())
    }

    /// All names in order; of an inode with several, the first has it and the others link to it.
    fn sorted(mut self) -> Found {
        self.names.sort_unstable();
        let mut found = Found::default();
        let mut firsts: HashMap<usize, usize> = HashMap::new();
        for (path, index) in self.names {
            let inode = &mut self.inodes[index];
            let here = found.changes.len();
            let first = *firsts.entry(index).or_insert(here);
            let kind = if first == here || inode.kind == ChangeKind::Removed {
                inode.kind.clone()
            } else {
                ChangeKind::HardLink { to: found.changes[first].path.clone() }
            };
            found.extents.push(std::mem::take(&mut inode.extents));
            found.changes.push(Change {
                path,
                kind,
                mode: inode.mode,
                uid: inode.uid,
                gid: inode.gid,
                modified_at_ms: inode.modified_at_ms,
            });
        }
        found
    }
}

fn device(mode: u32, what: &Fields<'_, '_>) -> Result<ChangeKind, Fault> {
    let (major, minor) = (narrow(what.uint("major")?)?, narrow(what.uint("minor")?)?);
    if mode & libc::S_IFMT == libc::S_IFBLK {
        return Ok(ChangeKind::BlockDevice { major, minor });
    }
    let removed = (major, minor) == (0, 0);
    Ok(if removed { ChangeKind::Removed } else { ChangeKind::CharDevice { major, minor } })
}

fn is_opaque(inode: &Fields<'_, '_>) -> Result<bool, Fault> {
    let Some(attributes) = inode.inner("xattrs")?.map("xattrs")? else { return Ok(false) };
    for pair in attributes.pairs() {
        if let (Value::Text(OPAQUE), Value::Text(value)) = pair? {
            return Ok(value == b"y");
        }
    }
    Ok(false)
}

fn narrow(number: u64) -> Result<u32, Fault> {
    u32::try_from(number).map_err(|_| Fault::Absurd(format!("{number} is too large")))
}

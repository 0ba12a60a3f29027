//! Reads a root file: back into a tree, for giving an image another agent, or one thing in it.
//!
//! Only what [`super::erofs::pack`] writes is understood: no compression, chunks or attributes.
//! (`fsck.erofs --extract` of erofs-utils 1.5 loses setuid and hard links.)
//!
//! ```text
//!  superblock at 1024    inode = metadata start + 32 × nid, 32 or 64 bytes
//!  directory block       [nid u64 · name offset u16 · type u8 · 0]* names
//!  content               whole blocks at a block address; the tail may follow the inode
//! ```

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use torpor_lifecycle::store::StoreError;

use super::limits::Limits;
use super::path::TreePath;
use super::tree::{Meta, Tree, unreadable};

pub(crate) const SUPERBLOCK: u64 = 1024;
pub(crate) const MAGIC: u32 = 0xE0F5_E1E2;
/// Largest directory or link target that is read at once: 2 million entries fit.
const SMALL_MAX: u64 = 256 * 1024 * 1024;

/// Copies the whole filesystem into the tree, without the agent.
pub(crate) fn unpack(file: &Path, tree: &mut Tree) -> Result<(), StoreError> {
    let file = File::open(file).map_err(unreadable)?;
    let erofs = Erofs::open(file).map_err(unreadable)?;
    let root = erofs.inode(erofs.root).map_err(unreadable)?;
    tree.dir(&TreePath::ROOT, root.meta)?;
    erofs.copy_dir(&root, &TreePath::ROOT, tree, &mut HashMap::new())
}

pub(crate) struct Erofs {
    file: File,
    block: u64,
    inodes: u64,
    root: u64,
    build_time: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Dir,
    Symlink,
    Other,
}

pub(crate) struct Inode {
    pub(crate) kind: Kind,
    pub(crate) meta: Meta,
    pub(crate) links: u32,
    pub(crate) size: u64,
    /// Where the whole blocks start.
    body: u64,
    /// Bytes in whole blocks; the rest is at `tail`.
    in_blocks: u64,
    tail: u64,
}

impl Erofs {
    /// Stands for the number of the root directory, which is never so large.
    pub(crate) const ROOT: u64 = u64::MAX;

    pub(crate) fn open(file: File) -> io::Result<Self> {
        let mut sb = [0u8; 128];
        file.read_exact_at(&mut sb, SUPERBLOCK)?;
        let bits = sb[12];
        if u32_at(&sb, 0) != MAGIC || !(9..=16).contains(&bits) {
            return Err(bad("no EROFS superblock"));
        }
        let block = 1u64 << bits;
        Ok(Self {
            block,
            inodes: u64::from(u32_at(&sb, 40)) * block,
            root: u16_at(&sb, 14).into(),
            build_time: i64::try_from(u64_at(&sb, 24)).unwrap_or(0),
            file,
        })
    }

    /// Another reader of the same file.
    pub(crate) fn again(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()?, ..*self })
    }

    pub(crate) fn inode(&self, nid: u64) -> io::Result<Inode> {
        let nid = if nid == Self::ROOT { self.root } else { nid };
        let at = nid.checked_mul(32).and_then(|at| at.checked_add(self.inodes));
        let at = at.ok_or_else(|| bad("an inode out of range"))?;
        let mut raw = [0u8; 64];
        self.file.read_exact_at(&mut raw[..32], at)?;
        let format = u16_at(&raw, 0);
        let extended = format & 1 == 1;
        if extended {
            self.file.read_exact_at(&mut raw, at)?;
        }
        let (size, meta, links) = if extended { self.extended(&raw) } else { self.compact(&raw) };
        let body = u64::from(u32_at(&raw, 16)) * self.block;
        let tail = at + if extended { 64 } else { 32 } + attributes(u16_at(&raw, 2));
        let in_blocks = match (format >> 1) & 7 {
            0 => size,
            2 => size.saturating_sub(1) / self.block * self.block,
            _ => return Err(bad("a compressed or chunked file")),
        };
        Ok(Inode { kind: kind(u16_at(&raw, 4)), meta, links, size, body, in_blocks, tail })
    }

    fn compact(&self, raw: &[u8; 64]) -> (u64, Meta, u32) {
        let meta = Meta {
            mode: u32::from(u16_at(raw, 4)) & 0o7777,
            uid: u16_at(raw, 24).into(),
            gid: u16_at(raw, 26).into(),
            mtime: self.build_time,
        };
        (u32_at(raw, 8).into(), meta, u16_at(raw, 6).into())
    }

    fn extended(&self, raw: &[u8; 64]) -> (u64, Meta, u32) {
        let meta = Meta {
            mode: u32::from(u16_at(raw, 4)) & 0o7777,
            uid: u32_at(raw, 24),
            gid: u32_at(raw, 28),
            mtime: i64::try_from(u64_at(raw, 32)).unwrap_or(0),
        };
        (u64_at(raw, 8), meta, u32_at(raw, 44))
    }

    fn copy_dir(
        &self,
        dir: &Inode,
        path: &TreePath,
        tree: &mut Tree,
        linked: &mut HashMap<u64, TreePath>,
    ) -> Result<(), StoreError> {
        for (name, nid) in self.names(dir).map_err(unreadable)? {
            let child = path.child(OsStr::from_bytes(&name));
            // Also bounds the depth, so a directory that contains itself ends.
            let child = TreePath::parse(child.bytes(), &Limits::default())?;
            if child.is_ignored() {
                continue;
            }
            let inode = self.inode(nid).map_err(unreadable)?;
            self.copy(nid, &inode, &child, tree, linked)?;
        }
        Ok(())
    }

    fn copy(
        &self,
        nid: u64,
        inode: &Inode,
        path: &TreePath,
        tree: &mut Tree,
        linked: &mut HashMap<u64, TreePath>,
    ) -> Result<(), StoreError> {
        if let Some(first) = linked.get(&nid) {
            return tree.hardlink(path, first);
        }
        if inode.kind != Kind::Dir && inode.links > 1 {
            linked.insert(nid, path.clone());
        }
        match inode.kind {
            Kind::Dir => {
                tree.dir(path, inode.meta)?;
                self.copy_dir(inode, path, tree, linked)
            }
            Kind::File => {
                let mut content = Content { erofs: self, inode, at: 0 };
                tree.file(path, inode.meta, &mut content)
            }
            Kind::Symlink => {
                let target = self.small(inode).map_err(unreadable)?;
                tree.symlink(path, &target, inode.meta)
            }
            Kind::Other => Ok(()),
        }
    }

    /// The content of a file.
    pub(crate) fn content<'a>(&'a self, inode: &'a Inode) -> impl Read + 'a {
        Content { erofs: self, inode, at: 0 }
    }

    /// The whole content of a directory or a link.
    pub(crate) fn small(&self, inode: &Inode) -> io::Result<Vec<u8>> {
        if inode.size > SMALL_MAX {
            return Err(bad("a directory or link of impossible size"));
        }
        let mut bytes = Vec::new();
        Content { erofs: self, inode, at: 0 }.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Names and inodes in a directory, without `.` and `..`.
    pub(crate) fn names(&self, dir: &Inode) -> io::Result<Vec<(Vec<u8>, u64)>> {
        let content = self.small(dir)?;
        let mut found = Vec::new();
        for block in content.chunks(usize::try_from(self.block).map_err(io::Error::other)?) {
            names_in(block, &mut found).ok_or_else(|| bad("a broken directory"))?;
        }
        Ok(found)
    }
}

fn names_in(block: &[u8], found: &mut Vec<(Vec<u8>, u64)>) -> Option<()> {
    let offset = |index: usize| {
        let raw = block.get(index * 12 + 8..index * 12 + 10)?;
        Some(usize::from(u16::from_le_bytes([raw[0], raw[1]])))
    };
    let count = offset(0)? / 12;
    for index in 0..count {
        let end = if index + 1 < count { offset(index + 1)? } else { block.len() };
        let name = block.get(offset(index)?..end)?;
        let name = name.split(|b| *b == 0).next().unwrap_or_default();
        if name != b"." && name != b".." {
            found.push((name.to_vec(), u64_at(block.get(index * 12..index * 12 + 8)?, 0)));
        }
    }
    Some(())
}

/// The bytes of a file, a directory or a link.
struct Content<'a> {
    erofs: &'a Erofs,
    inode: &'a Inode,
    at: u64,
}

impl Read for Content<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Inode { size, body, in_blocks, tail, .. } = *self.inode;
        let (from, until) = if self.at < in_blocks {
            (body + self.at, in_blocks)
        } else {
            (tail + self.at - in_blocks, size)
        };
        let most = usize::try_from(until - self.at).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let count = self.erofs.file.read_at(&mut buffer[..most], from)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += count as u64;
        Ok(count)
    }
}

fn kind(mode: u16) -> Kind {
    match mode & 0o170_000 {
        0o100_000 => Kind::File,
        0o040_000 => Kind::Dir,
        0o120_000 => Kind::Symlink,
        _ => Kind::Other,
    }
}

/// Bytes that attributes take after an inode.
fn attributes(count: u16) -> u64 {
    if count == 0 { 0 } else { 12 + 4 * (u64::from(count) - 1) }
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the root file contains {what}"))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

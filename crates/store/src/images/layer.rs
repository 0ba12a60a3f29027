//! A tar archive applied to a tree: as a whole root filesystem, or as one layer on top of others.
//!
//! In a layer, `.wh.NAME` removes NAME of the layers below, and `.wh..wh..opq` everything below in
//! its directory; what the same layer brings stays, in whatever order it comes. A layer of ours says
//! so if it means a file of such a name.

use std::collections::HashSet;
use std::io::Read;

use torpor_lifecycle::store::StoreError;

use super::path::{TreePath, refused};
use super::progress::{OnProgress, Progress, Step};
use super::tarball::{Entry, EntryKind, Tarball};
use super::tree::{Meta, Tree};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Other marks of the same kind, which are not about files.
const MARK: &[u8] = b".wh..wh.";
/// Progress is told this often.
const TELL_BYTES: u64 = 4 * 1024 * 1024;

/// How an archive is to be understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Everything there is.
    Root,
    /// A change to what is there.
    Layer,
}

/// Applies an archive and gives its input back.
pub(crate) fn apply<R: Read>(
    mut tarball: Tarball<R>,
    role: Role,
    tree: &mut Tree,
    progress: &OnProgress,
) -> Result<R, StoreError> {
    let mut layer = Layer { tree, role, brought: HashSet::new() };
    let mut told = layer.tree.budget.bytes();
    let mut empty = true;
    while let Some(entry) = tarball.next_entry()? {
        empty = false;
        layer.take(&entry, &mut tarball)?;
        let bytes = layer.tree.budget.bytes();
        if bytes >= told + TELL_BYTES {
            told = bytes;
            progress(Progress { step: Step::Unpacking, percent: None, bytes });
        }
    }
    if empty && role == Role::Root {
        return Err(StoreError::Invalid("the archive is empty".to_owned()));
    }
    Ok(tarball.into_inner())
}

struct Layer<'a> {
    tree: &'a mut Tree,
    role: Role,
    /// Paths this layer brought, which its own whiteouts spare.
    brought: HashSet<TreePath>,
}

impl Layer<'_> {
    fn take<R: Read>(&mut self, entry: &Entry, tarball: &mut Tarball<R>) -> Result<(), StoreError> {
        let path = TreePath::parse(&entry.path, &self.tree.budget.limits)?;
        if path.is_ignored() {
            return self.tree.budget.spend_entry();
        }
        match self.role {
            Role::Root => {}
            Role::Layer => {
                if !entry.literal && self.white_out(&path)? {
                    return Ok(());
                }
                self.note(&path);
            }
        }
        let meta = Meta { mtime: self.tree.time.unwrap_or(entry.meta.mtime), ..entry.meta };
        match entry.kind {
            EntryKind::File => match &entry.sparse {
                Some(map) => self.tree.sparse_file(&path, meta, map, &mut tarball.body()),
                None => self.tree.file(&path, meta, &mut tarball.body()),
            },
            EntryKind::Dir => self.tree.dir(&path, meta),
            EntryKind::Symlink => self.tree.symlink(&path, &entry.link, meta),
            EntryKind::Hardlink => {
                let target = TreePath::parse(&entry.link, &self.tree.budget.limits)?;
                self.tree.hardlink(&path, &target)
            }
            EntryKind::Special => self.tree.budget.spend_entry(),
        }
    }

    fn note(&mut self, path: &TreePath) {
        let mut path = path.clone();
        while self.brought.insert(path.clone()) {
            let Some((parent, _)) = path.split() else { break };
            path = parent;
        }
    }

    /// Whether this was a mark and no file.
    fn white_out(&mut self, path: &TreePath) -> Result<bool, StoreError> {
        let Some((dir, name)) = path.split() else { return Ok(false) };
        let name = name.as_encoded_bytes();
        let Some(gone) = name.strip_prefix(WHITEOUT) else { return Ok(false) };
        self.tree.budget.spend_entry()?;
        if name == OPAQUE {
            self.spare_brought(&dir)?;
            return Ok(true);
        }
        if name.starts_with(MARK) {
            return Ok(true);
        }
        if gone.is_empty() || gone == b"." || gone == b".." {
            return Err(refused(path.bytes(), "it removes a name that can't exist"));
        }
        let gone = [dir.bytes(), b"/", gone].concat();
        let gone = TreePath::parse(&gone, &self.tree.budget.limits)?;
        if self.brought.contains(&gone) {
            self.spare_brought(&gone)?;
        } else {
            self.tree.remove(&gone)?;
        }
        Ok(true)
    }

    /// Removes what is in a directory, but for what this layer brought.
    fn spare_brought(&mut self, dir: &TreePath) -> Result<(), StoreError> {
        for child in self.tree.children(dir)? {
            if self.brought.contains(&child) {
                self.spare_brought(&child)?;
            } else {
                self.tree.remove(&child)?;
            }
        }
        Ok(())
    }
}

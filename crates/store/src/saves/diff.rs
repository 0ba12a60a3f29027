//! What differs between two saved trees, without time stamps.
//!
//! Both trees are walked side by side. Where they stand on the same directory of the same image, only
//! what one of them changed is looked at.

use torpor_protocol::snapshot::{Difference, FileDifference};

use super::content::{Digest, Form, StreamHasher};
use super::spot::{Content, Facts, SpotKind, TreeError, entry, join};
use super::tree::{NamesOf, SavedTree, Spot};
use crate::images::sparse::SparseMap;

/// Differences of one answer; whoever has more of them compares the trees with a tool inside.
const DIFFERENCES_MAX: usize = 500_000;

impl SavedTree {
    /// What it takes to get from this tree to `other`, in the order of paths.
    pub fn diff(&self, other: &Self) -> Result<Vec<FileDifference>, TreeError> {
        let mut walk = Walk {
            before: self,
            after: other,
            same_image: self.same_image(other),
            found: Vec::new(),
            rest: vec![(Vec::new(), Some(Spot::ROOT), Some(Spot::ROOT))],
        };
        while let Some((path, before, after)) = walk.rest.pop() {
            walk.visit(&path, before, after)?;
        }
        let mut found = walk.found;
        found.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }

    /// What the sandbox made of its image.
    pub fn diff_image(&self) -> Result<Vec<FileDifference>, TreeError> {
        self.unchanged()?.diff(self)
    }
}

struct Walk<'a> {
    before: &'a SavedTree,
    after: &'a SavedTree,
    same_image: bool,
    found: Vec<FileDifference>,
    /// What is still to be looked at: a path, and what is there in both trees.
    rest: Vec<(Vec<u8>, Option<Spot>, Option<Spot>)>,
}

impl Walk<'_> {
    fn visit(
        &mut self,
        path: &[u8],
        before: Option<Spot>,
        after: Option<Spot>,
    ) -> Result<(), TreeError> {
        let old = before.map(|spot| self.before.facts(spot)).transpose()?;
        let new = after.map(|spot| self.after.facts(spot)).transpose()?;
        let change = match (&old, &new) {
            (None, None) => return Ok(()),
            (None, Some(_)) => Some(Difference::Added),
            (Some(_), None) => Some(Difference::Removed),
            (Some(old), Some(new)) => self.differ(old, new)?.then_some(Difference::Modified),
        };
        if let Some(change) = change {
            if self.found.len() == DIFFERENCES_MAX {
                return Err(TreeError::TooMany(DIFFERENCES_MAX));
            }
            let shown = [b"/", path].concat();
            self.found.push(FileDifference {
                path: String::from_utf8_lossy(&shown).into_owned(),
                change,
                before: old.as_ref().map(|facts| entry(&shown, facts)),
                after: new.as_ref().map(|facts| entry(&shown, facts)),
            });
        }
        let dir = |spot: Option<Spot>, facts: &Option<Facts>| {
            spot.filter(|_| facts.as_ref().is_some_and(|facts| facts.kind == SpotKind::Directory))
        };
        self.descend(path, dir(before, &old), dir(after, &new))
    }

    fn descend(
        &mut self,
        path: &[u8],
        before: Option<Spot>,
        after: Option<Spot>,
    ) -> Result<(), TreeError> {
        let shared = match (before, after) {
            (Some(before), Some(after)) => self.same_image && before.inode == after.inode,
            (None, _) | (_, None) => false,
        };
        let of = if shared { NamesOf::Changes } else { NamesOf::All };
        let mut names = std::collections::BTreeSet::new();
        for (tree, spot) in [(self.before, before), (self.after, after)] {
            if let Some(spot) = spot {
                names.extend(tree.names(spot, of)?);
            }
        }
        for name in names {
            let child = |tree: &SavedTree, dir: Option<Spot>| match dir {
                Some(dir) => tree.child(dir, &name),
                None => Ok(None),
            };
            let (old, new) = (child(self.before, before)?, child(self.after, after)?);
            self.rest.push((join(path, &name), old, new));
        }
        Ok(())
    }

    fn differ(&self, old: &Facts, new: &Facts) -> Result<bool, TreeError> {
        let same = |a: &Facts, b: &Facts| (a.mode, a.uid, a.gid) == (b.mode, b.uid, b.gid);
        match (&old.kind, &new.kind) {
            (
                SpotKind::File { size: a, content: old_content },
                SpotKind::File { size: b, content: new_content },
            ) => Ok(!same(old, new)
                || a != b
                || self.contents_differ(*old_content, *new_content, *a)?),
            // The mode of a symbolic link has no meaning.
            (SpotKind::Symlink { target: a }, SpotKind::Symlink { target: b }) => {
                Ok(a != b || (old.uid, old.gid) != (new.uid, new.gid))
            }
            (a, b) => Ok(a != b || !same(old, new)),
        }
    }

    fn contents_differ(&self, old: Content, new: Content, size: u64) -> Result<bool, TreeError> {
        if self.same_image && matches!(old, Content::Image(_)) && old == new {
            return Ok(false);
        }
        Ok(digest(self.before, old, size)? != digest(self.after, new, size)?)
    }
}

/// What a content of so many bytes is; that of a hole and of zeros is the same. Holes are not read.
fn digest(tree: &SavedTree, content: Content, size: u64) -> Result<Digest, TreeError> {
    let mut blocks = Blocks { hasher: StreamHasher::new(Form::Sparse, size), size, part: None };
    tree.read(content, &mut |at, piece| {
        blocks.add(at, piece);
        Ok(())
    })?;
    Ok(blocks.finish())
}

/// Hashes pieces of a content, wherever they begin and end.
struct Blocks {
    hasher: StreamHasher,
    size: u64,
    /// A block that more may belong to, and where it begins.
    part: Option<(u64, Vec<u8>)>,
}

impl Blocks {
    fn add(&mut self, mut at: u64, mut piece: &[u8]) {
        while !piece.is_empty() {
            let start = at - at % SparseMap::ALIGNED;
            let end = start.saturating_add(SparseMap::ALIGNED).min(self.size);
            if self.part.as_ref().is_none_or(|(known, _)| *known != start) {
                self.flush();
                let length = usize::try_from(end.saturating_sub(start)).unwrap_or(0);
                self.part = Some((start, vec![0; length]));
            }
            let Some((_, block)) = &mut self.part else { return };
            let from = usize::try_from(at - start).unwrap_or(usize::MAX);
            let Some(room) = block.get_mut(from..).filter(|room| !room.is_empty()) else { return };
            let length = room.len().min(piece.len());
            room[..length].copy_from_slice(&piece[..length]);
            (at, piece) = (at + length as u64, &piece[length..]);
        }
    }

    fn flush(&mut self) {
        if let Some((at, block)) = self.part.take() {
            self.hasher.feed(at, &block);
        }
    }

    fn finish(mut self) -> Digest {
        self.flush();
        self.hasher.finish()
    }
}

//! Everything at a path of a saved tree, one entry after another, with its content.

use std::io::Write;

use super::super::spot::{SpotKind, TreeError, join};
use super::{LastLink, NamesOf, SavedTree};
use crate::images::tree::Meta;

/// Entries of one walk.
const ENTRIES_MAX: usize = 500_000;

/// Something in a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walked {
    /// From where the walk began; empty for that itself.
    pub path: Vec<u8>,
    pub meta: Meta,
    pub kind: WalkedKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WalkedKind {
    Dir,
    /// Its content was just written, so many bytes.
    File {
        size: u64,
    },
    Link {
        target: Vec<u8>,
    },
}

impl SavedTree {
    /// Shows what is at a path and below it, directories before their content; a link at the end of
    /// the path is followed. The contents of files go to `out`, one after another. Pipes and devices
    /// are left out. Blocks.
    pub fn walk(
        &self,
        path: &str,
        out: &mut dyn Write,
        see: &mut dyn FnMut(Walked) -> Result<(), TreeError>,
    ) -> Result<(), TreeError> {
        let (spot, _) = self.find(path, LastLink::Follow)?;
        let mut rest = vec![(spot, Vec::new())];
        let mut seen = 0;
        while let Some((spot, path)) = rest.pop() {
            seen += 1;
            if seen > ENTRIES_MAX {
                return Err(TreeError::TooMany(ENTRIES_MAX));
            }
            let facts = self.facts(spot)?;
            let kind = match facts.kind {
                SpotKind::Directory => {
                    // The last one pushed comes first.
                    for name in self.names(spot, NamesOf::All)?.into_iter().rev() {
                        if let Some(child) = self.child(spot, &name)? {
                            rest.push((child, join(&path, &name)));
                        }
                    }
                    WalkedKind::Dir
                }
                SpotKind::File { size, content } => {
                    self.pour(content, out)?;
                    WalkedKind::File { size }
                }
                SpotKind::Symlink { target } => WalkedKind::Link { target },
                SpotKind::Fifo | SpotKind::Socket | SpotKind::Device { .. } | SpotKind::Other => {
                    continue;
                }
            };
            let mtime = facts.modified_at_ms.div_euclid(1000);
            let meta = Meta { mode: facts.mode, uid: facts.uid, gid: facts.gid, mtime };
            see(Walked { path, meta, kind })?;
        }
        Ok(())
    }
}

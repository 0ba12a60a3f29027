//! What can be at a path of a saved tree, how a path is written, and why there is nothing.

use std::io;

use torpor_protocol::api::FileEntry;

/// Longest path that is looked up.
pub(super) const PATH_MAX: usize = 64 * 1024;

/// Why the files of a save can't be shown.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    #[error("{0}: there is no such file or directory")]
    NoSuchPath(String),
    #[error("{0} is not a directory")]
    NotADirectory(String),
    #[error("{0} is not a file")]
    NotAFile(String),
    #[error("{path:?} can't be used as a path: {why}")]
    BadPath { path: String, why: &'static str },
    #[error("there are more than {0} entries")]
    TooMany(usize),
    /// Whoever wanted the content does not take it any more.
    #[error("could not write the content")]
    Output(#[source] io::Error),
    #[error("could not read the save or its image")]
    Broken(#[source] io::Error),
}

/// What is known of a spot besides its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) kind: SpotKind,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) modified_at_ms: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SpotKind {
    File {
        size: u64,
        content: Content,
    },
    Directory,
    Symlink {
        target: Vec<u8>,
    },
    Fifo,
    Socket,
    Device {
        block: bool,
        major: u32,
        minor: u32,
    },
    /// Something that images of ours do not contain.
    Other,
}

/// Where the bytes of a file are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Image(u64),
    Change(usize),
}

impl Facts {
    /// A directory of which nobody said anything.
    pub(super) fn bare_directory() -> Self {
        Self { kind: SpotKind::Directory, mode: 0o755, uid: 0, gid: 0, modified_at_ms: 0 }
    }
}

/// A spot as people see it.
pub(super) fn entry(path: &[u8], facts: &Facts) -> FileEntry {
    let (kind, size, target) = match &facts.kind {
        SpotKind::File { size, .. } => ("file", *size, None),
        SpotKind::Directory => ("directory", 0, None),
        SpotKind::Symlink { target } => ("symlink", target.len() as u64, Some(target)),
        SpotKind::Fifo | SpotKind::Socket | SpotKind::Device { .. } | SpotKind::Other => {
            ("other", 0, None)
        }
    };
    FileEntry {
        path: String::from_utf8_lossy(path).into_owned(),
        kind: kind.to_owned(),
        size,
        mode: facts.mode,
        uid: facts.uid,
        gid: facts.gid,
        modified_at_ms: facts.modified_at_ms,
        target: target.map(|target| String::from_utf8_lossy(target).into_owned()),
    }
}

// === Paths ===

/// The parts of a user's path; `..` takes away the part before it.
pub(super) fn lexical(path: &str) -> Result<Vec<Vec<u8>>, TreeError> {
    let bad = |why| TreeError::BadPath { path: path.chars().take(200).collect(), why };
    if !path.starts_with('/') {
        return Err(bad("it is not absolute"));
    }
    if path.len() > PATH_MAX {
        return Err(bad("it is too long"));
    }
    if path.contains('\0') {
        return Err(bad("it contains a NUL"));
    }
    let mut parts = Vec::new();
    for part in split(path.as_bytes()) {
        if part == b".." {
            parts.pop();
        } else {
            parts.push(part);
        }
    }
    Ok(parts)
}

/// The parts of a path, without those that mean nothing.
pub(super) fn split(path: &[u8]) -> Vec<Vec<u8>> {
    let parts = path.split(|byte| *byte == b'/');
    parts.filter(|part| !part.is_empty() && *part != b".").map(<[u8]>::to_vec).collect()
}

pub(super) fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() { name.to_vec() } else { [dir, b"/", name].concat() }
}

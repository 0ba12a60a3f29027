//! A hash as manifests have it, in one of two forms.

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::str::FromStr;

use blake3::{Hash, Hasher};

use super::sparse::SparseHasher;

/// What the text of the sparse form begins with.
const SPARSE: &str = "sparse:";
/// Smaller files are read in less than a millisecond, holes or not.
const SPARSE_MIN: u64 = 1024 * 1024;

/// What is hashed of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Form {
    /// All bytes: BLAKE3 as every tool computes it.
    Plain,
    /// The length, and the blocks that are not all zeros with their places: it takes the time of
    /// what is in a file, and not of what could be.
    Sparse,
}

impl Form {
    /// What suits a file: sparse if a quarter of it or more is not on disk. On a filesystem that
    /// compresses that may be wrong, and costs nothing.
    pub(crate) fn suiting(meta: &Metadata) -> Self {
        let (bytes, stored) = (meta.size(), meta.blocks().saturating_mul(512));
        if bytes >= SPARSE_MIN && stored <= bytes / 4 * 3 { Self::Sparse } else { Self::Plain }
    }
}

/// The hash of a content. As text: 64 hexadecimal digits, after `sparse:` in that form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Digest {
    pub(crate) form: Form,
    pub(crate) hash: Hash,
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let form = match self.form {
            Form::Plain => "",
            Form::Sparse => SPARSE,
        };
        write!(f, "{form}{}", self.hash.to_hex())
    }
}

impl FromStr for Digest {
    type Err = String;

    /// There is one text for a hash: no other spelling is taken.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (form, digits) = match text.strip_prefix(SPARSE) {
            Some(digits) => (Form::Sparse, digits),
            None => (Form::Plain, text),
        };
        let lower = digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        match Hash::from_hex(digits) {
            Ok(hash) if lower => Ok(Self { form, hash }),
            Ok(_) | Err(_) => {
                let shown: String = text.chars().take(80).collect();
                Err(format!("{shown:?} is no hash"))
            }
        }
    }
}

/// The hash of a content that passes by, from its begin to its end.
pub(crate) enum StreamHasher {
    Plain(Box<Hasher>),
    Sparse(Box<SparseHasher>),
}

impl StreamHasher {
    /// Of a content with so many bytes.
    pub(crate) fn new(form: Form, bytes: u64) -> Self {
        match form {
            Form::Plain => Self::Plain(Box::default()),
            Form::Sparse => Self::Sparse(Box::new(SparseHasher::new(bytes))),
        }
    }

    /// The next piece, which begins at the begin of a block. In the sparse form, what is left out
    /// before it is zeros; in the plain one, nothing may be.
    pub(crate) fn feed(&mut self, at: u64, piece: &[u8]) {
        match self {
            Self::Plain(hasher) => drop(hasher.update(piece)),
            Self::Sparse(hasher) => hasher.feed(at, piece),
        }
    }

    pub(crate) fn finish(self) -> Digest {
        match self {
            Self::Plain(hasher) => Digest { form: Form::Plain, hash: hasher.finalize() },
            Self::Sparse(hasher) => Digest { form: Form::Sparse, hash: hasher.finish() },
        }
    }
}

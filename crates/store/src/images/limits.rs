//! How much an import may be. Whoever made an archive decides what is in it, so every number that
//! it could grow without bound has one here.

use torpor_lifecycle::store::StoreError;

/// Bounds of one import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of all files, and of all archives once decompressed.
    pub bytes: u64,
    /// Files, directories and links, each time an archive mentions them.
    pub entries: u64,
    /// How many bytes a compressed byte may become, once [`Limits::RATIO_FLOOR`] is passed.
    pub ratio: u64,
    /// Bytes of a path or of the target of a link.
    pub path: usize,
    /// Directories within directories; each one costs an open file while a tree is walked.
    pub depth: usize,
}

impl Limits {
    /// Small files of zeros compress better than any ratio and do no harm.
    pub const RATIO_FLOOR: u64 = 64 * 1024 * 1024;
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: 20 << 30, entries: 2_000_000, ratio: 200, path: 4096, depth: 256 }
    }
}

/// What an import has used of its limits so far.
#[derive(Debug)]
pub(crate) struct Budget {
    pub(crate) limits: Limits,
    bytes: u64,
    entries: u64,
}

impl Budget {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, bytes: 0, entries: 0 }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// No more than that altogether, even if the limits allow it.
    pub(crate) fn at_most(&mut self, bytes: u64) {
        self.limits.bytes = self.limits.bytes.min(bytes);
    }

    pub(crate) fn spend_bytes(&mut self, bytes: u64) -> Result<(), StoreError> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > self.limits.bytes {
            let limit = self.limits.bytes;
            return Err(StoreError::Invalid(format!(
                "the image has more than {limit} bytes (holes in files count, an image has none)"
            )));
        }
        Ok(())
    }

    pub(crate) fn spend_entry(&mut self) -> Result<(), StoreError> {
        self.entries += 1;
        if self.entries > self.limits.entries {
            let limit = self.limits.entries;
            return Err(StoreError::Invalid(format!("the image has more than {limit} entries")));
        }
        Ok(())
    }
}

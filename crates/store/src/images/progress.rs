//! How far an import or a build is, for progress bars.

use std::sync::Arc;

/// What is being done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Packages are being downloaded.
    Downloading,
    /// Packages are being installed.
    Installing,
    /// The source is being read.
    Unpacking,
    /// The root file is being made and committed.
    Packing,
}

/// A moment of an import or a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub step: Step,
    /// Of this step, if it can be known.
    pub percent: Option<u8>,
    /// Bytes of this step so far.
    pub bytes: u64,
}

/// Called now and then, from any thread; must return quickly.
pub type OnProgress = Arc<dyn Fn(Progress) + Send + Sync>;

impl Progress {
    pub(crate) fn step(step: Step) -> Self {
        Self { step, percent: None, bytes: 0 }
    }
}

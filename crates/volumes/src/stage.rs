//! A directory for work in progress, on the same filesystem as what it becomes.

use std::fs::File;
use std::path::{Path, PathBuf};

use torpor_disk::directory;
use torpor_lifecycle::store::StoreError;

use crate::failed;

/// Goes with this value, unless it was placed.
#[derive(Debug)]
pub(crate) struct Stage {
    path: PathBuf,
}

impl Stage {
    pub(crate) fn new(dir: &Path) -> Result<Self, StoreError> {
        let number = getrandom::u64().map_err(StoreError::failed("get a random number"))?;
        let path = dir.join(format!("stage-{number:016x}"));
        directory::fresh(&path).map_err(failed("make a directory for a volume"))?;
        Ok(Self { path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// It gets its name, durably; its files are so already.
    pub(crate) fn place(self, at: &Path) -> Result<(), StoreError> {
        let placed = || -> std::io::Result<()> {
            File::open(&self.path)?.sync_all()?;
            std::fs::rename(&self.path, at)?;
            match at.parent() {
                Some(dir) => File::open(dir)?.sync_all(),
                None => Ok(()),
            }
        };
        placed().map_err(failed("put a volume into its place"))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Err(error) = directory::absent(std::fs::remove_dir_all(&self.path)) {
            tracing::warn!(path = %self.path.display(), %error, "work on a volume was not cleared");
        }
    }
}

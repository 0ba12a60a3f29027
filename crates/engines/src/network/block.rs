//! Which installation has which block of addresses: one small file per block that holds its tag.
//!
//! A claim is good as long as the installation's parking namespace exists. Both are made and
//! removed under one lock, so that no claim is taken away from an installation that starts.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use tokio::time::Instant;

use super::NetworkError;
use super::names::{Block, Names};
use crate::directory;

const DIRECTORY: &str = "/run/torpor/net";
/// Holders of the lock work for milliseconds.
const LOCK_DEADLINE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(1);

/// Held while namespaces and claims change. All installations of the host share it.
pub(super) struct Claims {
    directory: PathBuf,
    _lock: File,
}

impl Claims {
    /// Waits for its turn; blocks.
    pub(super) fn lock() -> io::Result<Self> {
        Self::lock_in(Path::new(DIRECTORY))
    }

    fn lock_in(directory: &Path) -> io::Result<Self> {
        directory::guarded(directory.parent().unwrap_or(directory))?;
        directory::private(directory)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(directory.join("lock"))?;
        let deadline = Instant::now() + LOCK_DEADLINE;
        while let Err(error) = flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            if error != rustix::io::Errno::WOULDBLOCK || Instant::now() >= deadline {
                return Err(error.into());
            }
            std::thread::sleep(PAUSE);
        }
        Ok(Self { directory: directory.to_owned(), _lock: lock })
    }

    /// The block this installation has already, or else a free one. `alive` says whether the
    /// installation of a tag still exists.
    pub(super) fn claim(
        &self,
        names: &Names,
        alive: impl Fn(&str) -> bool,
    ) -> Result<Block, NetworkError> {
        if let Some(block) = self.of(names).next() {
            return Ok(block);
        }
        let free = |block: &Block| self.owner(*block).is_none_or(|tag| !alive(&tag));
        let block = Block::all().find(free).ok_or(NetworkError::NoBlock)?;
        fs::write(self.file(block), names.tag())
            .map_err(NetworkError::host("claim a block of addresses"))?;
        Ok(block)
    }

    pub(super) fn give_up(&self, names: &Names) {
        for block in self.of(names) {
            let _ = fs::remove_file(self.file(block));
        }
    }

    /// What an installation has: one block, or none.
    pub(super) fn of(&self, names: &Names) -> impl Iterator<Item = Block> {
        Block::all().filter(|block| self.owner(*block).as_deref() == Some(names.tag()))
    }

    fn owner(&self, block: Block) -> Option<String> {
        fs::read_to_string(self.file(block)).ok()
    }

    fn file(&self, block: Block) -> PathBuf {
        self.directory.join(block.0.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(n: u8) -> Names {
        Names::new(&format!("{n:08x}")).expect("a tag")
    }

    #[test]
    fn every_installation_has_its_own_block_and_keeps_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let claims = Claims::lock_in(directory.path()).expect("the lock");
        let first = claims.claim(&names(1), |_| true).expect("a block");
        let second = claims.claim(&names(2), |_| true).expect("a block");
        assert_ne!(first, second);
        assert_eq!(claims.claim(&names(1), |_| true).expect("the same"), first);
        claims.give_up(&names(1));
        assert_eq!(claims.claim(&names(3), |_| true).expect("the free one"), first);
        assert_eq!(claims.claim(&names(2), |_| true).expect("the same"), second);
    }

    #[test]
    fn blocks_of_installations_that_are_gone_are_taken_over() {
        let directory = tempfile::tempdir().expect("a directory");
        let claims = Claims::lock_in(directory.path()).expect("the lock");
        for n in 0..64 {
            claims.claim(&names(n), |_| true).expect("a block");
        }
        assert!(matches!(claims.claim(&names(99), |_| true), Err(NetworkError::NoBlock)));
        let dead = names(7);
        let block = claims.claim(&names(99), |tag| tag != dead.tag()).expect("the dead one's");
        assert_eq!(block, Block(7));
    }
}

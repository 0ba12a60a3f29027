//! The cache of layers: blobs of registries as they came, each stored once, shared by the images they
//! were pulled for.
//!
//! - A file is in its place only when it is whole and was compared with its digest; until then it is
//!   `HEX.part`, and the next attempt goes on with it.
//! - A layer that no image has is garbage, unless somebody works with it ([`PinnedLayer`]).

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use torpor_lifecycle::store::StoreError;

use super::layered::blob_name;
use super::{Images, blocking};
use crate::files;

/// What nobody refers to waits so long for another attempt, then goes.
const KEPT_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// Ends the name of what is not whole.
const PART: &str = "part";

/// Layers on disk. Cloning gives another handle.
#[derive(Clone)]
pub struct Layers {
    dir: PathBuf,
    /// Digits of those that somebody works with.
    pinned: Arc<Mutex<HashMap<String, Pinned>>>,
}

/// How many work with a layer, and the lock for whoever fetches it.
#[derive(Default)]
struct Pinned {
    users: usize,
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// A layer that stays while this lives.
pub struct PinnedLayer {
    layers: Layers,
    hex: String,
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl Layers {
    pub(super) fn new(dir: PathBuf) -> Self {
        Self { dir, pinned: Arc::default() }
    }

    /// Keeps a layer (`sha256:…`) that is there or will be.
    pub fn pin(&self, digest: &str) -> Result<PinnedLayer, StoreError> {
        let name = blob_name(digest)?;
        let hex = name.rsplit('/').next().unwrap_or_default().to_owned();
        let turn = {
            let mut pinned = self.pinned.lock();
            let pinned = pinned.entry(hex.clone()).or_default();
            pinned.users += 1;
            Arc::clone(&pinned.turn)
        };
        Ok(PinnedLayer { layers: self.clone(), hex, turn })
    }

    /// How many bytes of these layers (with their sizes) are not here yet, and how many the disk has left.
    pub fn lacking(&self, layers: &[(&str, u64)]) -> Result<(u64, u64), StoreError> {
        let distinct: HashMap<_, _> = layers.iter().copied().collect();
        let mut lacking = 0u64;
        for (digest, bytes) in distinct {
            let pin = self.pin(digest)?;
            let length = |path| std::fs::metadata(path).map_or(0, |about| about.len());
            let here = length(pin.path()).max(length(pin.part()));
            lacking = lacking.saturating_add(bytes.saturating_sub(here));
        }
        let space = rustix::fs::statvfs(&self.dir).map_err(std::io::Error::from);
        let space = space.map_err(files::failed("look how much space is left"))?;
        Ok((lacking, space.f_bavail.saturating_mul(space.f_frsize)))
    }

    fn place(&self, hex: &str) -> PathBuf {
        self.dir.join(hex)
    }

    /// What is garbage, with its bytes: not in `used`, not pinned, and this old.
    pub(super) fn garbage(
        &self,
        used: &HashSet<String>,
        older_than: Duration,
    ) -> Result<Vec<(PathBuf, u64)>, StoreError> {
        let entries = std::fs::read_dir(&self.dir).map_err(files::failed("list the layers"))?;
        let pinned = self.pinned.lock();
        let mut found = Vec::new();
        for entry in entries.flatten() {
            let path = entry.path();
            let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            if used.contains(&format!("sha256:{stem}")) && path.extension().is_none()
                || pinned.contains_key(stem)
            {
                continue;
            }
            let Ok(about) = entry.metadata() else { continue };
            let age = about.modified().ok().and_then(|at| at.elapsed().ok()).unwrap_or_default();
            if age >= older_than {
                found.push((path, about.len()));
            }
        }
        Ok(found)
    }

    /// Removes garbage; what was pinned since stays. Gives the bytes that went.
    pub(super) fn discard(&self, garbage: Vec<(PathBuf, u64)>) -> Vec<u64> {
        let pinned = self.pinned.lock();
        let is_free = |path: &Path| {
            let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            !pinned.contains_key(stem)
        };
        let gone = garbage.into_iter().filter(|(path, _)| is_free(path));
        gone.filter(|(path, _)| match std::fs::remove_file(path) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a layer was not removed");
                false
            }
        })
        .map(|(_, bytes)| bytes)
        .collect()
    }
}

impl PinnedLayer {
    /// Held while it is fetched: one at a time writes the part.
    pub async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    pub fn path(&self) -> PathBuf {
        self.layers.place(&self.hex)
    }

    /// What is to be fetched into.
    pub fn part(&self) -> PathBuf {
        self.path().with_extension(PART)
    }

    /// Whether it is there with so many bytes; its digest was compared before.
    pub fn is_there(&self, bytes: u64) -> bool {
        std::fs::metadata(self.path()).is_ok_and(|about| about.len() == bytes)
    }

    /// Puts the part in its place: it is whole, and was compared with its digest.
    pub async fn keep(&self) -> Result<(), StoreError> {
        let (part, path, dir) = (self.part(), self.path(), self.layers.dir.clone());
        blocking(move || {
            let moved = std::fs::rename(part, path).and_then(|()| files::sync_dir(&dir));
            moved.map_err(files::failed("move a layer to its place"))
        })
        .await
    }
}

impl Drop for PinnedLayer {
    fn drop(&mut self) {
        let mut pinned = self.layers.pinned.lock();
        if let Some(of_this) = pinned.get_mut(&self.hex) {
            of_this.users = of_this.users.saturating_sub(1);
            if of_this.users == 0 {
                pinned.remove(&self.hex);
            }
        }
    }
}

impl Images {
    /// Removes what failed pulls left long ago.
    pub async fn sweep_layers(&self) -> Result<(), StoreError> {
        // A pull that ends now is recorded before or keeps its layers until after.
        let _turn = self.shared.commit.lock().await;
        let used = self.shared.ledger.layer_uses().await?;
        let used = used.into_iter().map(|(digest, _)| digest).collect();
        let layers = self.shared.layers.clone();
        blocking(move || {
            let garbage = layers.garbage(&used, KEPT_FOR)?;
            layers.discard(garbage);
            Ok(())
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn a_layer_is_free_once_all_who_worked_with_it_let_go_also_at_the_same_moment() {
        let layers = Layers::new(PathBuf::new());
        let digest = format!("sha256:{}", "0".repeat(64));
        for round in 0..2000 {
            let both = Barrier::new(2);
            let pins = [layers.pin(&digest).unwrap(), layers.pin(&digest).unwrap()];
            std::thread::scope(|scope| {
                for pin in pins {
                    scope.spawn(|| {
                        both.wait();
                        drop(pin);
                    });
                }
            });
            assert!(layers.pinned.lock().is_empty(), "round {round}");
        }
    }
}

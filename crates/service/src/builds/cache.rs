//! Steps that need not be done again: filesystem saves under the keys of steps, images under those of
//! whole builds, and the directories of `RUN --mount=type=cache`.
//!
//! Invariants
//! - A row is written when its save or image is durable, and pins it. What a crash leaves is a save
//!   without a row, which the store sweeps.
//! - A save that a build begins from stays until that build lets go of it, also if its row goes.
//! - All saves together, and all cache mounts together, have no more bytes than the operator allows:
//!   what was not used for longest goes first.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use torpor_lifecycle::store::{LocalSave, Saves as _, StoreError};
use torpor_protocol::api::{BuildCache, BuildCacheEntry};
use torpor_store::{CachedStep, Image, Outcome};

use super::key::Key;
use crate::Service;
use crate::error::Result;

/// Longest text of a step that is remembered.
const STEP_MAX: usize = 200;

/// The filesystem after a step that was done before. What is broken counts as not there.
pub(super) async fn find_save(app: &Service, key: &Key) -> Option<Arc<LocalSave>> {
    let Outcome::Save(id) = find(app, key).await? else { return None };
    match app.saves.materialize(&id).await {
        Ok(save) => Some(save),
        Err(error) => {
            tracing::warn!(%error, "a cached step of a build can't be used");
            forget(app, key.as_str(), Some(&id)).await;
            None
        }
    }
}

/// The image of a whole build that was done before.
pub(super) async fn find_image(app: &Service, key: &Key) -> Option<Image> {
    let Outcome::Image(id) = find(app, key).await? else { return None };
    app.images.inspect(id.as_str()).await.ok()
}

async fn find(app: &Service, key: &Key) -> Option<Outcome> {
    let found = app.ledger.use_cached_step(key.as_str(), app.fleet.clock().now_ms()).await;
    match found {
        Ok(found) => found.map(|found| found.outcome),
        Err(error) => {
            tracing::warn!(%error, "the build cache can't be read");
            None
        }
    }
}

/// Remembers what a step came to. A build does not fail for want of it.
pub(super) async fn note(app: &Service, key: &Key, text: &str, outcome: Outcome, bytes: u64) {
    let now_ms = app.fleet.clock().now_ms();
    let step = CachedStep {
        key: key.as_str().to_owned(),
        outcome,
        step: text.chars().take(STEP_MAX).collect(),
        bytes,
        created_at_ms: now_ms,
        used_at_ms: now_ms,
    };
    match app.ledger.record_cached_step(&step).await {
        Ok(Some(before)) => app.saves.release(&before).await,
        Ok(None) => {}
        Err(error) => return tracing::warn!(%error, "a step of a build is not remembered"),
    }
    if let Err(error) = shrink(app, app.settings.build_cache_bytes).await {
        tracing::warn!(%error, "the build cache was not made smaller");
    }
}

/// Forgets what was used longest ago until the rest has at most so many bytes.
async fn shrink(app: &Service, most: u64) -> std::result::Result<(), StoreError> {
    let mut bytes = 0u64;
    for step in app.ledger.cached_steps().await? {
        bytes = bytes.saturating_add(step.bytes);
        if bytes > most || most == 0 {
            forget_step(app, &step).await;
        }
    }
    Ok(())
}

async fn forget_step(app: &Service, step: &CachedStep) {
    let save = match &step.outcome {
        Outcome::Save(save) => Some(save),
        Outcome::Image(_) => None,
    };
    forget(app, &step.key, save).await;
}

async fn forget(app: &Service, key: &str, save: Option<&torpor_protocol::SaveId>) {
    if let Err(error) = app.ledger.forget_cached_step(key).await {
        return tracing::warn!(%error, "a step of a build is not forgotten");
    }
    if let Some(save) = save {
        app.saves.release(save).await;
    }
}

/// What is remembered, used last first.
pub async fn list(app: &Service) -> Result<BuildCache> {
    let steps = app.ledger.cached_steps().await?;
    let entry = |step: CachedStep| BuildCacheEntry {
        key: step.key,
        step: step.step,
        image: match step.outcome {
            Outcome::Image(image) => Some(image),
            Outcome::Save(_) => None,
        },
        size_bytes: step.bytes,
        created_at_ms: step.created_at_ms,
        used_at_ms: step.used_at_ms,
    };
    let entries: Vec<_> = steps.into_iter().map(entry).collect();
    let mounts_bytes = mounts(&app.images.build_mounts()).iter().map(|mount| mount.bytes).sum();
    let size_bytes = entries.iter().map(|entry| entry.size_bytes).sum::<u64>() + mounts_bytes;
    Ok(BuildCache { entries, mounts_bytes, size_bytes })
}

/// Forgets all of it; says what that was. Builds that use some of it now are not disturbed.
pub async fn prune_build_cache(app: &Service) -> Result<BuildCache> {
    let cache = list(app).await?;
    for step in app.ledger.cached_steps().await? {
        forget_step(app, &step).await;
    }
    shrink_mounts(&app.images.build_mounts(), 0);
    Ok(cache)
}

/// Removes an image, or only a name of it. Steps that stand on it are no reason to keep it.
pub async fn remove_image(app: &Service, reference: &str) -> Result<()> {
    let image = app.images.resolve(reference).await?;
    let named = app.images.inspect(image.as_str()).await?.names.len();
    if named < 2 {
        for step in app.ledger.cached_steps().await? {
            let Outcome::Save(save) = &step.outcome else { continue };
            if app.saves.manifest(save).await.is_ok_and(|it| it.about.spec.image_id == image) {
                forget_step(app, &step).await;
            }
        }
    }
    Ok(app.images.remove(reference).await?)
}

// === Cache mounts ===

struct KeptMount {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

/// Where a cache mount is kept between builds: an archive of its directory.
pub(super) fn mount_file(app: &Service, id: &str, target: &str) -> PathBuf {
    // An archive has the last name of what was packed.
    let last = target.rsplit('/').next().unwrap_or_default();
    let name = blake3::hash(format!("{id}\0{last}").as_bytes()).to_hex();
    app.images.build_mounts().join(format!("{name}.tar"))
}

/// Makes room for cache mounts that were used later.
pub(super) fn shrink_mounts(dir: &Path, most: u64) {
    let mut kept = mounts(dir);
    kept.sort_by_key(|mount| std::cmp::Reverse(mount.used));
    let mut bytes = 0u64;
    for mount in kept {
        bytes = bytes.saturating_add(mount.bytes);
        if bytes > most
            && let Err(error) = std::fs::remove_file(&mount.path)
        {
            tracing::warn!(path = %mount.path.display(), %error, "a cache mount stays");
        }
    }
}

fn mounts(dir: &Path) -> Vec<KeptMount> {
    let found = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let about = |entry: std::fs::DirEntry| {
        let about = entry.metadata().ok()?;
        Some(KeptMount { path: entry.path(), bytes: about.len(), used: about.modified().ok()? })
    };
    found.filter_map(about).collect()
}

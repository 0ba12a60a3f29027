//! `RUN --mount`: what a command finds while it runs. Whatever was at the place before is put aside, and
//! put back when the command has ended; what a command leaves in a mount is never part of the image.
//!
//! - The value of a secret is in memory here and in a file inside while the command runs, nowhere else.
//! - A command waits for all its cache mounts before it has any, and takes them in one order: builds never
//!   wait for each other in a circle.
//! - A cache mount is kept as the command left it, also if the command failed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::PathBuf;

use tokio::sync::OwnedMutexGuard;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ErrorCode;
use torpor_store::dockerfile::{Copy, Mount, MountKind, Run};

use super::cache::{mount_file, shrink_mounts};
use super::copy::absolute;
use super::draft::Draft;
use super::key::bound;
use super::plan::Origin;
use super::stages::Build;
use super::workbench::{STEP_DEADLINE, Workbench, within};
use crate::Service;
use crate::error::{Error, Result};

/// The mounts of a command.
#[derive(Default)]
pub(super) struct Mounted(Vec<Place>);

/// One of them.
struct Place {
    target: String,
    /// An archive of what was there.
    before: Option<PathBuf>,
    /// What was not there, from the top.
    missing: Option<String>,
    keep: Option<Keep>,
}

/// A cache mount, which nobody else has meanwhile.
struct Keep {
    file: PathBuf,
    draft: PathBuf,
    _turn: OwnedMutexGuard<()>,
}

impl Build<'_> {
    /// Puts everything in its place; secrets that are variables go to `env`.
    pub(super) async fn mount(
        &mut self,
        run: &Run,
        draft: &Draft,
        origins: &[Option<Origin>],
        bench: &Workbench,
        env: &mut BTreeMap<String, String>,
    ) -> Result<Mounted> {
        let mut mounted = Mounted::default();
        let mut keeps = within(STEP_DEADLINE, self.keeps(run, draft)).await?;
        let mut origins = origins.iter();
        for Mount { target, kind } in &run.mounts {
            let target = absolute(draft.workdir(), target);
            match kind {
                MountKind::Secret { id, owner, mode, env: variable, .. } => {
                    let Some(value) = self.order.secrets.get(id).cloned() else { continue };
                    if let Some(variable) = variable {
                        env.insert(variable.clone(), value.as_str().to_owned());
                    }
                    if target != draft.workdir() {
                        mounted.0.push(self.put_aside(&target, bench).await?);
                        bench.write(&target, value, *mode, owner.clone()).await?;
                    }
                }
                MountKind::Cache { id, owner, mode } => {
                    let keep = keeps.remove(&mount_file(self.app, id, &target));
                    let keep = keep.ok_or_else(twice)?;
                    mounted.0.push(self.put_aside(&target, bench).await?);
                    bench.make_dir_as(&target, *mode, owner.clone()).await?;
                    if keep.file.is_file() {
                        bench.unpack_file(parent(&target), &keep.file).await?;
                    }
                    mounted.keep(keep);
                }
                MountKind::Tmpfs => {
                    mounted.0.push(self.put_aside(&target, bench).await?);
                    bench.make_dir(&target).await?;
                }
                MountKind::Bind { source, .. } => {
                    let copy: Copy = bound(source, &target);
                    let from = self.source(&copy, origins.next()).await?;
                    mounted.0.push(self.put_aside(&target, bench).await?);
                    self.copy(&copy, draft, &from, bench, |_, _| false).await?;
                }
            }
        }
        Ok(mounted)
    }

    /// Takes away what is at a path.
    async fn put_aside(&mut self, target: &str, bench: &Workbench) -> Result<Place> {
        let missing = bench.first_missing(target).await?;
        let mut before = None;
        if missing.is_none() {
            self.spools += 1;
            let file = self.dir.join(format!("aside-{}", self.spools));
            bench.pack_file(target, &file, u64::MAX).await?;
            bench.remove_all(target).await?;
            before = Some(file);
        }
        Ok(Place { target: target.to_owned(), before, missing, keep: None })
    }

    /// The cache mounts of a command by their files, once nobody else has any of them.
    async fn keeps(&mut self, run: &Run, draft: &Draft) -> Result<BTreeMap<PathBuf, Keep>> {
        let mut keeps = BTreeMap::new();
        for file in cache_files(self.app, run, draft)? {
            let turn = self.app.builds.mount_turn(&file).await;
            self.spools += 1;
            let draft = self.dir.join(format!("cache-{}", self.spools));
            keeps.insert(file.clone(), Keep { file, draft, _turn: turn });
        }
        Ok(keeps)
    }
}

/// The files of a command's cache mounts, in the order in which they are waited for.
pub(super) fn cache_files(app: &Service, run: &Run, draft: &Draft) -> Result<BTreeSet<PathBuf>> {
    let mut files = BTreeSet::new();
    for Mount { target, kind } in &run.mounts {
        match kind {
            MountKind::Cache { id, .. } => {
                let target = absolute(draft.workdir(), target);
                if !files.insert(mount_file(app, id, &target)) {
                    return Err(twice());
                }
            }
            MountKind::Secret { .. } | MountKind::Tmpfs | MountKind::Bind { .. } => {}
        }
    }
    Ok(files)
}

fn twice() -> Error {
    let message = "a RUN has the same cache mount twice";
    Error::with_hint(ErrorCode::InvalidRequest, message, "give each an id of its own: id=NAME")
}

impl Mounted {
    fn keep(&mut self, keep: Keep) {
        if let Some(place) = self.0.last_mut() {
            place.keep = Some(keep);
        }
    }

    /// Keeps the caches of a command that failed; nothing else of its sandbox is needed.
    pub(super) async fn keep_caches(self, app: &Service, bench: &Workbench) -> Result<()> {
        for Place { target, keep, .. } in self.0.into_iter().rev() {
            if let Some(keep) = keep {
                store(app, bench, &target, keep).await?;
            }
        }
        Ok(())
    }

    /// Puts everything back as it was; caches are kept for the next build.
    pub(super) async fn take_away(self, app: &Service, bench: &Workbench) -> Result<()> {
        // The last one may be inside an earlier one.
        for Place { target, before, missing, keep } in self.0.into_iter().rev() {
            if let Some(keep) = keep {
                store(app, bench, &target, keep).await?;
            }
            bench.remove_all(missing.as_deref().unwrap_or(&target)).await?;
            if let Some(before) = before {
                bench.unpack_file(parent(&target), &before).await?;
            }
        }
        Ok(())
    }
}

/// Keeps a directory for the next build. One that is too large is not kept; the next build starts anew.
async fn store(app: &Service, bench: &Workbench, target: &str, keep: Keep) -> Result<()> {
    let most = app.settings.build_cache_bytes;
    if bench.stat(target).await?.is_none() {
        return Ok(());
    }
    let whole = bench.pack_file(target, &keep.draft, most).await?;
    tokio::task::spawn_blocking(move || {
        let dir = keep.file.parent().map(PathBuf::from).unwrap_or_default();
        let placed = std::fs::create_dir_all(&dir).and_then(|()| match whole {
            true => {
                File::open(&keep.draft)?.sync_all()?;
                std::fs::rename(&keep.draft, &keep.file)
            }
            false => std::fs::remove_file(&keep.file),
        });
        shrink_mounts(&dir, most);
        match placed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(StoreError::failed("keep a cache mount")(error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    })
    .await
    .map_err(StoreError::failed("keep a cache mount"))??;
    Ok(())
}

fn parent(path: &str) -> &str {
    match path.rsplit_once('/') {
        Some(("", _)) | None => "/",
        Some((parent, _)) => parent,
    }
}

//! `RUN --mount`: what a command finds while it runs. Whatever was at the place before is put aside, and
//! put back when the command has ended; what a command leaves in a mount is never part of the image.
//!
//! The value of a secret is in memory here and in a file inside while the command runs, nowhere else.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;

use tokio::sync::OwnedMutexGuard;
use torpor_lifecycle::store::StoreError;
use torpor_store::dockerfile::{Copy, Mount, MountKind, Run};

use super::cache::{mount_file, shrink_mounts};
use super::copy::absolute;
use super::draft::Draft;
use super::key::bound;
use super::plan::Origin;
use super::stages::Build;
use super::workbench::Workbench;
use crate::Service;
use crate::error::Result;

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
                    let keep = self.keep(id, &target).await?;
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

    /// A cache mount, once nobody else has it.
    async fn keep(&mut self, id: &str, target: &str) -> Result<Keep> {
        let file = mount_file(self.app, id, target);
        let turn = self.app.builds.mount_turn(&file).await;
        self.spools += 1;
        Ok(Keep { file, draft: self.dir.join(format!("cache-{}", self.spools)), _turn: turn })
    }
}

impl Mounted {
    fn keep(&mut self, keep: Keep) {
        if let Some(place) = self.0.last_mut() {
            place.keep = Some(keep);
        }
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

//! The programs of an installation: the one that starts machines, and copies of those before it.
//!
//! ```text
//! builds/<hash>/runsc         the bytes that have this hash
//!               gvisor-bin/   with what it runs beside it, if there is something
//! ```
//!
//! A save can be revived by the build that wrote it and by no other. So the program in use is copied
//! before it is used, and runs from there: whatever becomes of the one that was installed, its saves
//! can be revived while the copy is there, and [`Builds::retain`] removes no copy that is needed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::task::spawn_blocking;

use super::{Build, BuildError, HASH_DIGITS, SIDECARS, parts};
use crate::directory::{self, absent};

const PROGRAM: &str = "runsc";

#[derive(Debug)]
pub(in super::super) struct Builds {
    dir: Option<PathBuf>,
    current: Arc<Build>,
    /// In no order.
    older: Mutex<Vec<Arc<Build>>>,
}

impl Builds {
    /// Takes up `runsc` and what is kept in `dir`; without a directory nothing is kept.
    pub(in super::super) async fn open(
        runsc: &Path,
        dir: Option<PathBuf>,
    ) -> Result<Self, BuildError> {
        let current = Build::of(runsc).await?;
        let Some(dir) = dir else {
            return Ok(Self { dir: None, current: current.into(), older: Mutex::default() });
        };
        let older = Self::read(&dir, &current.hash).await;
        let current = match keep(&current, &dir).await {
            Ok(kept) => kept,
            // A read-only or full disk, or one from which nothing may be executed.
            Err(error) => {
                let consequence = "once it is replaced, what it saved can't be woken";
                tracing::warn!(build = %current, %error, consequence, "this runsc can't be kept");
                current
            }
        };
        Ok(Self { dir: Some(dir), current: current.into(), older: Mutex::new(older) })
    }

    /// What is kept besides `current`.
    async fn read(dir: &Path, current: &str) -> Vec<Arc<Build>> {
        let mut builds = Vec::new();
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name == current || name.len() != HASH_DIGITS {
                continue;
            }
            match Build::of(&entry.path().join(PROGRAM)).await {
                Ok(build) if build.hash == name => builds.push(Arc::new(build)),
                Ok(_) => tracing::warn!(name, "a kept runsc is damaged, and not used"),
                Err(error) => tracing::warn!(name, %error, "a kept runsc can't be used"),
            }
        }
        builds
    }

    pub(in super::super) fn current(&self) -> &Arc<Build> {
        &self.current
    }

    /// The build that a save names, if it is here. One of the same version with other bytes is the next
    /// best: it says itself what it can't revive.
    pub(in super::super) fn find(&self, name: &str) -> Option<Arc<Build>> {
        let all = || std::iter::once(self.current.clone()).chain(self.older.lock().clone());
        let version = name.split_once('+').map_or(name, |(version, _)| version);
        all().find(|build| build.is(name)).or_else(|| all().find(|build| build.is(version)))
    }

    /// The names of all that are here, the current one first.
    pub(in super::super) fn names(&self) -> Vec<String> {
        let older = self.older.lock().iter().map(ToString::to_string).collect::<Vec<_>>();
        std::iter::once(self.current.to_string()).chain(older).collect()
    }

    /// Removes the copies that nothing needs.
    pub(in super::super) fn retain(&self, needed: impl Fn(&str) -> bool) {
        let Some(dir) = &self.dir else { return };
        self.older.lock().retain(|build| {
            let name = build.to_string();
            let keep = needed(&name) || needed(&build.version);
            if !keep {
                match fs::remove_dir_all(dir.join(&build.hash)) {
                    Ok(()) => tracing::info!(build = name, "nothing needs this runsc any more"),
                    Err(error) => tracing::warn!(build = name, %error, "a kept runsc stays"),
                }
            }
            keep
        });
    }
}

/// The same build from a copy that stays.
async fn keep(build: &Build, dir: &Path) -> Result<Build, BuildError> {
    let place = dir.join(&build.hash);
    let program = place.join(PROGRAM);
    // Its bytes are compared with its name, so a copy that was damaged is made again.
    if let Ok(kept) = Build::of(&program).await
        && kept.hash == build.hash
    {
        return Ok(kept);
    }
    let (from, to) = (build.program.clone(), place.clone());
    let missing = |source| BuildError::Missing { path: place.clone(), source };
    let copied = spawn_blocking(move || {
        let fresh = to.with_extension("new");
        let copied = copy(&from, &fresh).and_then(|()| fs::rename(&fresh, &to));
        let copied = copied.and_then(|()| to.parent().map_or(Ok(()), sync));
        if copied.is_err() {
            // A full disk has no room for half of it either.
            let _ = fs::remove_dir_all(fresh);
        }
        copied
    })
    .await;
    copied.map_err(io::Error::other).flatten().map_err(missing)?;
    Build::of(&program).await
}

/// Copies a program and what it runs into a directory.
fn copy(runsc: &Path, fresh: &Path) -> io::Result<()> {
    for old in [fresh, &fresh.with_extension("")] {
        absent(fs::remove_dir_all(old))?;
    }
    directory::private(fresh)?;
    let parts = parts(runsc)?;
    let (program, sidecars) = parts.split_first().expect("a program is a part");
    copy_durably(program, &fresh.join(PROGRAM))?;
    if !sidecars.is_empty() {
        fs::create_dir(fresh.join(SIDECARS))?;
    }
    for sidecar in sidecars {
        let name = sidecar.file_name().expect("it is in a directory");
        copy_durably(sidecar, &fresh.join(SIDECARS).join(name))?;
    }
    if !sidecars.is_empty() {
        sync(&fresh.join(SIDECARS))?;
    }
    sync(fresh)
}

/// After a crash of the host it may be the only one there is.
fn copy_durably(from: &Path, to: &Path) -> io::Result<()> {
    fs::copy(from, to)?;
    sync(to)
}

/// Has a file or the entries of a directory on disk.
fn sync(path: &Path) -> io::Result<()> {
    fs::File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::super::tests::program;
    use super::*;

    async fn open(dir: &Path, version: &str) -> Builds {
        Builds::open(&program(dir, version), Some(dir.join("builds"))).await.unwrap()
    }

    #[tokio::test]
    async fn a_build_is_found_after_another_one_took_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let old = open(dir.path(), "0.0~20240729.0").await.current().to_string();
        let builds = open(dir.path(), "release-20260817.0").await;
        assert_ne!(builds.current().to_string(), old);
        let found = builds.find(&old).expect("it is kept");
        assert_eq!(found.to_string(), old);
        assert!(found.program.starts_with(dir.path().join("builds")), "{found:?}");
        assert!(builds.find("0.0~20240729.0").is_some(), "saves of old daemons name no hash");
        assert!(builds.find("release-20260810.0").is_none());
        assert_eq!(builds.names().len(), 2);
    }

    #[tokio::test]
    async fn a_copy_goes_when_nothing_needs_it_and_the_current_one_never() {
        let dir = tempfile::tempdir().unwrap();
        let old = open(dir.path(), "0.0~20240729.0").await.current().to_string();
        let builds = open(dir.path(), "release-20260817.0").await;
        builds.retain(|name| name == old);
        assert!(builds.find(&old).is_some());
        builds.retain(|_| false);
        assert!(builds.find(&old).is_none());
        let again = open(dir.path(), "release-20260817.0").await;
        assert_eq!(again.names(), [builds.current().to_string()]);
    }

    #[tokio::test]
    async fn a_damaged_copy_is_not_used_and_made_again_while_its_program_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let old = open(dir.path(), "0.0~20240729.0").await;
        let kept = old.current().program.clone();
        fs::write(&kept, "#!/bin/sh\necho runsc version 0.0~20240729.0 # torn\n").unwrap();
        let builds = open(dir.path(), "release-20260817.0").await;
        assert!(builds.find("0.0~20240729.0").is_none(), "its bytes are not those of its name");
        let again = open(dir.path(), "0.0~20240729.0").await;
        assert_eq!(again.current().to_string(), old.current().to_string());
    }

    #[tokio::test]
    async fn what_a_release_has_beside_its_program_is_kept_with_it_and_part_of_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let alone = open(dir.path(), "release-20260817.0").await.current().to_string();
        let sidecar = Path::new(SIDECARS).join("gvisor_sentry");
        fs::create_dir(dir.path().join(SIDECARS)).unwrap();
        fs::write(dir.path().join(&sidecar), "a program").unwrap();
        let builds = open(dir.path(), "release-20260817.0").await;
        let kept = builds.current();
        assert_ne!(kept.to_string(), alone, "it behaves otherwise");
        assert_eq!(fs::read(kept.program.with_file_name(sidecar)).unwrap(), b"a program");
    }

    #[tokio::test]
    async fn where_nothing_can_be_kept_the_installed_program_is_used() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("builds"), "a file").unwrap();
        let builds = open(dir.path(), "release-20260817.0").await;
        assert_eq!(builds.current().program, dir.path().join("runsc"));
    }
}

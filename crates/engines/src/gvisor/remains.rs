//! Removing what belongs to a machine, whatever state it is in: the one way by which a failed boot,
//! a kill, a sweep and a purge end.
//!
//! Everything a machine has on the host is found by the installation's tag and the machine's id, so
//! no memory of what was made is needed. Its record goes first, so that nobody takes the rest for a
//! machine, and its directory last: until then the next sweep finds the rest.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::task::{JoinSet, spawn_blocking};
use torpor_lifecycle::engine::EngineError;

use super::id::MachineId;
use super::layout::Layout;
use super::record::Record;
use crate::disk::ScratchDisk;
use crate::keeper::{Keeper, KeeperError};
use crate::limits::{self, Group, Hierarchy};

/// What it takes to find everything of an installation.
#[derive(Debug)]
pub(super) struct Remains {
    pub(super) layout: Layout,
    pub(super) tag: String,
    pub(super) hierarchy: Hierarchy,
    pub(super) keeper: Keeper,
}

impl Remains {
    pub(super) fn group(&self, id: &MachineId) -> Group {
        Group::open(&self.hierarchy, &self.tag, id.as_str())
    }

    /// Every machine of which something is on this host.
    pub(super) async fn ids(&self) -> BTreeSet<MachineId> {
        let mut ids = BTreeSet::new();
        ids.extend(Layout::ids_in(&self.layout.machines()));
        ids.extend(Layout::ids_in(&self.layout.scratch_dir));
        let groups = limits::list(&self.hierarchy, &self.tag);
        ids.extend(groups.iter().filter_map(|id| id.parse().ok()));
        let held = self.keeper.list().await.unwrap_or_default();
        ids.extend(held.iter().filter_map(|id| id.parse().ok()));
        ids
    }

    /// Whether it was prepared ahead and nobody has it.
    pub(super) fn is_shell(&self, id: &MachineId) -> bool {
        Record::read(&self.layout.machine(id).record).is_some_and(|record| record.sandbox.is_none())
    }

    /// Kills what runs of this machine and removes all it has but its place in the network. Goes on
    /// after a failure; tells the first.
    pub(super) async fn clear(&self, id: &MachineId) -> Result<(), EngineError> {
        // First: from here on nothing new of it is started.
        let forgotten = match self.keeper.forget(id.as_str()).await {
            // Without a keeper there is nothing to forget.
            Err(KeeperError::Connection(_)) | Ok(()) => Ok(()),
            Err(error) => Err(error),
        };
        let (group, dir) = (self.group(id), self.layout.machine(id));
        let removed = spawn_blocking(move || {
            let steps = [
                absent(std::fs::remove_file(&dir.record)),
                group.kill_all(),
                ScratchDisk::open(&dir.disk_image, &dir.disk).remove(),
                group.remove(),
                dir.runsc_files.iter().try_for_each(|file| absent(std::fs::remove_file(file))),
            ];
            steps.into_iter().collect::<io::Result<Vec<()>>>()?;
            absent(std::fs::remove_dir_all(&dir.dir))
        });
        removed
            .await
            .map_err(EngineError::failed("remove a machine"))?
            .map_err(EngineError::failed(format!("remove machine {id}")))?;
        forgotten.map_err(EngineError::failed(format!("let go of machine {id}")))
    }

    /// Clears all of `ids`, side by side.
    pub(super) async fn clear_all(
        self: &Arc<Self>,
        ids: impl IntoIterator<Item = MachineId>,
    ) -> Result<(), EngineError> {
        let mut tasks = JoinSet::new();
        for id in ids {
            let remains = self.clone();
            tasks.spawn(async move { remains.clear(&id).await });
        }
        let mut outcome = Ok(());
        while let Some(done) = tasks.join_next().await {
            let done = done.map_err(EngineError::failed("remove a machine")).flatten();
            outcome = outcome.and(done);
        }
        outcome
    }

    /// Removes what all machines share. Only when none is left.
    pub(super) async fn clear_shared(&self) -> io::Result<()> {
        match self.keeper.stop().await {
            Ok(()) | Err(KeeperError::Connection(_)) => {}
            Err(error) => return Err(io::Error::other(error)),
        }
        limits::remove_root(&self.hierarchy, &self.tag);
        absent(std::fs::remove_file(self.layout.keeper_socket()))?;
        for dir in self.layout.own_dirs() {
            absent(std::fs::remove_dir_all(dir))?;
        }
        remove_if_empty(&self.layout.runtime_dir)?;
        // The parent is shared with other installations.
        self.layout.runtime_dir.parent().map_or(Ok(()), remove_if_empty)?;
        remove_if_empty(&self.layout.scratch_dir)
    }
}

/// Something that is gone already counts as removed.
fn absent(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn remove_if_empty(dir: &Path) -> io::Result<()> {
    match std::fs::remove_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        result => absent(result),
    }
}

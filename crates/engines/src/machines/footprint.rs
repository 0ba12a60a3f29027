//! Removing what belongs to a machine, whatever state it is in: the one way by which a failed boot,
//! a kill, a sweep and a purge end.
//!
//! Everything a machine has on the host is found by the installation's tag and the machine's id, so
//! no memory of what was made is needed. Its record goes first, so that nobody takes the rest for a
//! machine, and its directory last: until then the next sweep finds the rest.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::task::{JoinSet, spawn_blocking};
use torpor_lifecycle::engine::EngineError;

use super::{MachineId, RECORD, Record, ids_in};
use crate::directory::absent;
use crate::keeper::{Keeper, KeeperError};
use crate::limits::{self, Group, Hierarchy};

/// Where an engine has the files of its machines, by their ids alone. What blocks may do so.
pub(crate) trait Files: Clone + Send + Sync + 'static {
    /// The directory of this engine and this installation alone.
    fn runtime(&self) -> &Path;
    /// The directory of all that is large, named after its machine.
    fn scratch(&self) -> &Path;
    /// The directory of the machines' directories.
    fn machines(&self) -> PathBuf {
        self.runtime().join("machines")
    }
    /// The file of a machine's [`Record`].
    fn record(&self, id: &MachineId) -> PathBuf {
        self.machines().join(id.as_str()).join(RECORD)
    }
    fn keeper_socket(&self) -> PathBuf {
        self.runtime().join("keeper.sock")
    }
    /// Makes the directories that are this engine's alone.
    fn make(&self) -> io::Result<()>;
    /// What the machine's disk takes on the host; 0 if it has none.
    fn disk_bytes(&self, id: &MachineId) -> u64;
    /// Removes what a machine has beside its directory. It is dead; what is gone already is fine.
    fn remove(&self, id: &MachineId) -> io::Result<()>;
    /// Removes what all machines share, beside the keeper.
    fn remove_shared(&self) -> io::Result<()>;
}

/// What it takes to find everything that an engine of an installation has.
#[derive(Debug)]
pub(crate) struct Footprint<F> {
    pub(crate) layout: F,
    pub(crate) tag: String,
    pub(crate) hierarchy: Hierarchy,
    pub(crate) keeper: Keeper,
    /// Where the other engines of the installation have the directories of their machines.
    pub(crate) others: Vec<PathBuf>,
}

impl<F: Files> Footprint<F> {
    pub(crate) fn group(&self, id: &MachineId) -> Group {
        Group::open(&self.hierarchy, &self.tag, id.as_str())
    }

    /// Every machine of this engine of which something is on this host, and what is of none.
    pub(crate) async fn ids(&self) -> BTreeSet<MachineId> {
        let mut ids = BTreeSet::new();
        ids.extend(ids_in(self.layout.scratch()));
        let groups = limits::list(&self.hierarchy, &self.tag);
        ids.extend(groups.iter().filter_map(|id| id.parse().ok()));
        // Looked at last: a machine's directory is made first.
        for id in self.others.iter().flat_map(|machines| ids_in(machines)) {
            ids.remove(&id);
        }
        ids.extend(ids_in(&self.layout.machines()));
        let held = self.keeper.list().await.unwrap_or_default();
        ids.extend(held.iter().filter_map(|id| id.parse().ok()));
        ids
    }

    /// What is known of every machine that has a guest, or may have one at once.
    pub(crate) fn records(&self) -> Vec<Record> {
        let ids = ids_in(&self.layout.machines());
        ids.iter().filter_map(|id| Record::read(&self.layout.record(id))).collect()
    }

    /// Whether it was prepared ahead and nobody has it.
    pub(crate) fn is_unowned(&self, id: &MachineId) -> bool {
        let record = Record::read(&self.layout.record(id));
        record.is_some_and(|record| record.sandbox.is_none())
    }

    /// Kills what runs of this machine and removes all it has but its place in the network. Goes on
    /// after a failure; tells the first.
    pub(crate) async fn clear(&self, id: &MachineId) -> Result<(), EngineError> {
        // First: from here on nothing new of it is started.
        let forgotten = match self.keeper.forget(id.as_str()).await {
            // Without a keeper there is nothing to forget.
            Err(KeeperError::Connection(_)) | Ok(()) => Ok(()),
            Err(error) => Err(error),
        };
        let (group, layout, machine) = (self.group(id), self.layout.clone(), id.clone());
        let removed = spawn_blocking(move || {
            let dir = layout.machines().join(machine.as_str());
            let steps = [
                absent(std::fs::remove_file(dir.join(RECORD))),
                group.kill_all(),
                layout.remove(&machine),
                group.remove(),
            ];
            steps.into_iter().collect::<io::Result<Vec<()>>>()?;
            absent(std::fs::remove_dir_all(dir))
        });
        removed
            .await
            .map_err(EngineError::failed("remove a machine"))?
            .map_err(EngineError::failed(format!("remove machine {id}")))?;
        forgotten.map_err(EngineError::failed(format!("let go of machine {id}")))
    }

    /// Clears all of `ids`, side by side.
    pub(crate) async fn clear_all(
        self: &Arc<Self>,
        ids: impl IntoIterator<Item = MachineId>,
    ) -> Result<(), EngineError> {
        let mut tasks = JoinSet::new();
        for id in ids {
            let footprint = self.clone();
            tasks.spawn(async move { footprint.clear(&id).await });
        }
        let mut outcome = Ok(());
        while let Some(done) = tasks.join_next().await {
            let done = done.map_err(EngineError::failed("remove a machine")).flatten();
            outcome = outcome.and(done);
        }
        outcome
    }

    /// Clears all there is; returns how many there were.
    pub(crate) async fn clear_everything(self: &Arc<Self>) -> Result<usize, EngineError> {
        let ids = self.ids().await;
        let count = ids.len();
        self.clear_all(ids).await?;
        Ok(count)
    }

    /// Removes what all machines share. Only when none is left.
    pub(crate) async fn clear_shared(&self) -> io::Result<()> {
        match self.keeper.stop().await {
            Ok(()) | Err(KeeperError::Connection(_)) => {}
            Err(error) => return Err(io::Error::other(error)),
        }
        limits::remove_root(&self.hierarchy, &self.tag);
        absent(std::fs::remove_file(self.layout.keeper_socket()))?;
        self.layout.remove_shared()
    }
}

//! A ledger in memory, with one node.

use std::collections::HashSet;

use async_trait::async_trait;
use torpor_protocol::api::ArchivedSandbox;
use torpor_protocol::{Name, NodeId, SandboxId, SnapshotId, SnapshotRef};

use super::FakeStore;
use super::store::StoreState;
use crate::ledger::{
    Aggregate, ArchiveLedger, Changes, Owner, Place, PoolLedger, SandboxLedger, SnapshotFilter,
    SnapshotLedger,
};
use crate::store::{PoolRecord, Record, SnapshotRecord, StoreError};

fn node() -> NodeId {
    format!("node-{}", "0".repeat(21)).parse().expect("zeros are an id")
}

impl StoreState {
    fn expect_owner(&self, owner: &Owner, id: &SandboxId) -> Result<(), StoreError> {
        let epoch = self.records.get(id).map_or(self.epoch, |(epoch, _)| *epoch);
        if owner.node == node() && owner.epoch == epoch {
            return Ok(());
        }
        Err(StoreError::NotOwner(owner.clone()))
    }

    fn put(&mut self, owner: &Owner, record: &Record) -> Result<(), StoreError> {
        self.check(record.save.as_ref())?;
        if let Some(name) = &record.spec.name {
            let mut others = self.records.values().filter(|(_, other)| other.id != record.id);
            if others.any(|(_, other)| other.spec.name.as_ref() == Some(name)) {
                return Err(StoreError::NameTaken(name.clone()));
            }
        }
        self.check_mounts(record)?;
        self.records.insert(record.id.clone(), (owner.epoch, record.clone()));
        Ok(())
    }
}

#[async_trait]
impl SandboxLedger for FakeStore {
    async fn take_over(&self) -> Result<Owner, StoreError> {
        let mut state = self.state.lock();
        state.epoch += 1;
        let epoch = state.epoch;
        state.records.values_mut().for_each(|(of, _)| *of = epoch);
        Ok(Owner { node: node(), epoch })
    }

    async fn create_sandbox(&self, owner: &Owner, record: &Record) -> Result<(), StoreError> {
        self.write(|state| {
            state.expect_owner(owner, &record.id)?;
            state.put(owner, record)
        })?
    }

    async fn update_sandbox(&self, owner: &Owner, record: &Record) -> Result<(), StoreError> {
        self.write(|state| {
            state.expect_owner(owner, &record.id)?;
            if !state.records.contains_key(&record.id) {
                return Err(StoreError::NotOwner(owner.clone()));
            }
            state.put(owner, record)
        })?
    }

    async fn archive_sandbox(
        &self,
        owner: &Owner,
        ended: &ArchivedSandbox,
    ) -> Result<(), StoreError> {
        self.write(|state| {
            state.expect_owner(owner, &ended.id)?;
            state.records.remove(&ended.id);
            if !state.archive.iter().any(|other| other.id == ended.id) {
                state.archive.push(ended.clone());
                state.archive.sort_by(|a, b| (a.ended_at_ms, &a.id).cmp(&(b.ended_at_ms, &b.id)));
            }
            Ok(())
        })?
    }

    async fn find_sandbox(&self, id: &SandboxId) -> Result<Option<Record>, StoreError> {
        Ok(self.record_of(id))
    }

    async fn sandboxes(
        &self,
        owner: &Owner,
        after: Option<&SandboxId>,
        limit: usize,
    ) -> Result<Vec<Record>, StoreError> {
        let state = self.state.lock();
        let own = state.records.values().filter(|(epoch, _)| *epoch == owner.epoch);
        let own = own.map(|(_, record)| record);
        let rest = own.filter(|record| after.is_none_or(|after| record.id > *after));
        Ok(rest.take(limit).cloned().collect())
    }
}

impl FakeStore {
    fn archive_place(&self, id: &SandboxId) -> Result<usize, StoreError> {
        let place = self.state.lock().archive.iter().position(|ended| ended.id == *id);
        place.ok_or_else(|| StoreError::Invalid(format!("{id} is not in the archive")))
    }
}

#[async_trait]
impl ArchiveLedger for FakeStore {
    async fn find_archived(&self, id: &SandboxId) -> Result<Option<ArchivedSandbox>, StoreError> {
        Ok(self.state.lock().archive.iter().find(|ended| ended.id == *id).cloned())
    }

    async fn find_archived_by_name(
        &self,
        name: &Name,
    ) -> Result<Option<ArchivedSandbox>, StoreError> {
        let state = self.state.lock();
        let mut last = state.archive.iter().rev();
        Ok(last.find(|ended| ended.spec.name.as_ref() == Some(name)).cloned())
    }

    async fn archived(
        &self,
        before: Option<&SandboxId>,
        limit: usize,
    ) -> Result<Vec<ArchivedSandbox>, StoreError> {
        let end = before.map(|before| self.archive_place(before)).transpose()?;
        let archive = &self.state.lock().archive;
        let earlier = archive[..end.unwrap_or(archive.len())].iter().rev();
        Ok(earlier.take(limit).cloned().collect())
    }

    async fn archived_after(
        &self,
        after: Option<&SandboxId>,
        limit: usize,
    ) -> Result<Vec<ArchivedSandbox>, StoreError> {
        let begin = after.map(|after| self.archive_place(after)).transpose()?;
        let archive = &self.state.lock().archive;
        let later = archive[begin.map_or(0, |place| place + 1)..].iter().take(limit);
        Ok(later.rev().cloned().collect())
    }

    async fn archived_ids(&self) -> Result<HashSet<SandboxId>, StoreError> {
        Ok(self.state.lock().archive.iter().map(|ended| ended.id.clone()).collect())
    }
}

#[async_trait]
impl SnapshotLedger for FakeStore {
    async fn record_snapshot(&self, record: &SnapshotRecord) -> Result<(), StoreError> {
        self.write(|state| {
            state.check(record.save.as_ref())?;
            let mut snapshots = state.snapshots.clone();
            snapshots.retain(|other| other.snapshot.id != record.snapshot.id);
            if let Some(name) = &record.snapshot.name
                && snapshots.iter().any(|other| other.snapshot.name.as_ref() == Some(name))
            {
                return Err(StoreError::NameTaken(name.clone()));
            }
            snapshots.push(record.clone());
            snapshots.sort_by_key(place);
            state.snapshots = snapshots;
            Ok(())
        })?
    }

    async fn update_snapshot(&self, record: &SnapshotRecord) -> Result<bool, StoreError> {
        self.write(|state| {
            state.check(record.save.as_ref())?;
            let mut all = state.snapshots.iter_mut();
            let found = all.find(|other| other.snapshot.id == record.snapshot.id);
            Ok(found.map(|found| *found = record.clone()).is_some())
        })?
    }

    async fn erase_snapshot(&self, id: &SnapshotId) -> Result<(), StoreError> {
        self.write(|state| state.snapshots.retain(|record| record.snapshot.id != *id))
    }

    async fn find_snapshot(&self, of: &SnapshotRef) -> Result<Option<SnapshotRecord>, StoreError> {
        let is = |record: &&SnapshotRecord| match of {
            SnapshotRef::Id(id) => record.snapshot.id == *id,
            SnapshotRef::Name(name) => record.snapshot.name.as_ref() == Some(name),
        };
        Ok(self.state.lock().snapshots.iter().find(is).cloned())
    }

    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<&Place<SnapshotId>>,
        limit: usize,
    ) -> Result<Vec<SnapshotRecord>, StoreError> {
        let SnapshotFilter { sandbox, sandbox_name } = filter;
        let wanted = |record: &&SnapshotRecord| {
            let of = &record.snapshot;
            sandbox.is_none() && sandbox_name.is_none()
                || sandbox.as_ref() == Some(&of.sandbox)
                || sandbox_name.is_some() && *sandbox_name == of.sandbox_name
        };
        let later = |record: &&SnapshotRecord| after.is_none_or(|after| place(record) > *after);
        let state = self.state.lock();
        Ok(state.snapshots.iter().filter(wanted).filter(later).take(limit).cloned().collect())
    }

    async fn snapshot_ancestors(
        &self,
        of: &SnapshotId,
        limit: usize,
    ) -> Result<Vec<SnapshotId>, StoreError> {
        let state = self.state.lock();
        let parent = |id: &SnapshotId| {
            let found = state.snapshots.iter().find(|record| record.snapshot.id == *id)?;
            found.snapshot.parent.clone()
        };
        let (mut line, mut next) = (Vec::new(), parent(of));
        while let Some(id) = next.take().filter(|id| id != of && !line.contains(id)) {
            next = parent(&id);
            line.push(id);
        }
        line.truncate(limit);
        Ok(line)
    }
}

fn place(record: &SnapshotRecord) -> Place<SnapshotId> {
    (record.snapshot.created_at_ms, record.snapshot.id.clone())
}

#[async_trait]
impl PoolLedger for FakeStore {
    async fn create_pool(&self, record: &PoolRecord) -> Result<(), StoreError> {
        self.write(|state| {
            if state.pools.contains_key(&record.name) {
                return Err(StoreError::NameTaken(record.name.clone()));
            }
            state.pools.insert(record.name.clone(), record.clone());
            Ok(())
        })?
    }

    async fn update_pool(&self, record: &PoolRecord) -> Result<bool, StoreError> {
        self.write(|state| {
            let known = state.pools.get_mut(&record.name);
            known.map(|known| *known = record.clone()).is_some()
        })
    }

    async fn erase_pool(&self, name: &Name) -> Result<bool, StoreError> {
        self.write(|state| state.pools.remove(name).is_some())
    }

    async fn pools(
        &self,
        after: Option<&Name>,
        limit: usize,
    ) -> Result<Vec<PoolRecord>, StoreError> {
        let state = self.state.lock();
        let rest = state.pools.values().filter(|pool| after.is_none_or(|name| pool.name > *name));
        Ok(rest.take(limit).cloned().collect())
    }
}

#[async_trait]
impl Changes for FakeStore {
    /// There is one node only.
    async fn changed_elsewhere(&self, _what: Aggregate) -> Result<u64, StoreError> {
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use torpor_protocol::SaveId;

    use super::*;
    use crate::ledger::FleetLedger;
    use crate::ledger::contract::Subject;
    use crate::store::Saves as _;

    struct Fake(std::sync::Arc<FakeStore>);

    #[async_trait]
    impl Subject for Fake {
        fn ledger(&self) -> &dyn FleetLedger {
            &*self.0
        }

        fn image(&self) -> torpor_protocol::ImageId {
            FakeStore::image_id()
        }

        async fn save(&self) -> SaveId {
            let about = json!({
                "kind": "memory", "sandbox": SandboxId::random(), "created_at_ms": 7,
                "spec": {
                    "name": null, "image": "x", "image_id": self.image(), "resources": {},
                },
                "engine": "fake", "engine_version": "1", "pause_ms": 1.5, "processes": [],
            });
            let about = serde_json::from_value(about).unwrap();
            let staged = self.0.stage().await.unwrap();
            self.0.commit(staged, about).await.unwrap().id.clone()
        }
    }

    crate::ledger_contract!(Fake(FakeStore::new()));
}

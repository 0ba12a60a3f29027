//! What a ledger in memory knows of volumes: who has which is read from the sandboxes' specifications.

use std::sync::Arc;

use async_trait::async_trait;
use torpor_protocol::guest::HeldPath;
use torpor_protocol::volume::{Attachment, Mount, UpdateVolume};
use torpor_protocol::{GuestPath, SandboxId, VolumeId, VolumeKind, VolumeRef};

use super::FakeStore;
use super::store::StoreState;
use crate::guest::FileServer;
use crate::ledger::{Place, VolumeLedger};
use crate::store::{OpenVolume, Record, SavePin, StoreError, VolumeRecord, Volumes};

impl StoreState {
    /// Refuses a sandbox with a volume that is gone, or that another one writes to.
    pub(super) fn check_mounts(&self, record: &Record) -> Result<(), StoreError> {
        for (at, mount) in record.spec.mounts().iter().enumerate() {
            if !self.volumes.iter().any(|known| known.id == mount.volume) {
                return Err(StoreError::NoSuchVolume(mount.name.to_string()));
            }
            let clash = |other: &&Mount| other.volume == mount.volume && other.is_exclusive();
            let mut others = self.records.values().filter(|(_, other)| other.id != record.id);
            let writer = others.find(|(_, other)| other.spec.mounts().iter().any(|m| clash(&m)));
            let twice = record.spec.mounts()[..at].iter().any(|other| clash(&other));
            if mount.is_exclusive() && (twice || writer.is_some()) {
                let by = writer.map_or(&record.id, |(_, other)| &other.id);
                let what = format!("volume {}", mount.name);
                return Err(StoreError::InUse { what, by: format!("sandbox {by}") });
            }
        }
        Ok(())
    }

    fn attachments_of(&self, id: &VolumeId) -> Vec<Attachment> {
        let mut found = Vec::new();
        for (_, record) in self.records.values() {
            let here = record.spec.mounts().iter().filter(|mount| mount.volume == *id);
            found.extend(here.map(|mount| Attachment {
                sandbox: record.id.clone(),
                sandbox_name: record.spec.name.clone(),
                path: mount.path.clone(),
                subpath: mount.subpath.clone(),
                read_only: mount.read_only,
            }));
        }
        found
    }
}

#[async_trait]
impl VolumeLedger for FakeStore {
    async fn create_volume(&self, record: &VolumeRecord) -> Result<(), StoreError> {
        self.write(|state| {
            if state.volumes.iter().any(|known| known.name == record.name) {
                return Err(StoreError::NameTaken(record.name.clone()));
            }
            state.volumes.push(record.clone());
            state.volumes.sort_by_key(place);
            Ok(())
        })?
    }

    async fn update_volume(
        &self,
        id: &VolumeId,
        changes: &UpdateVolume,
    ) -> Result<VolumeRecord, StoreError> {
        let UpdateVolume { size_mib, labels, permissions } = changes.clone();
        self.write(|state| {
            let known = state.volumes.iter_mut().find(|known| known.id == *id);
            let known = known.ok_or_else(|| StoreError::NoSuchVolume(id.to_string()))?;
            known.size_mib = size_mib.unwrap_or(known.size_mib);
            known.labels = labels.unwrap_or_else(|| known.labels.clone());
            known.permissions = permissions.unwrap_or_else(|| known.permissions.clone());
            Ok(known.clone())
        })?
    }

    async fn erase_volume(&self, id: &VolumeId) -> Result<bool, StoreError> {
        self.write(|state| {
            if let Some(held) = state.attachments_of(id).first() {
                let by = format!("sandbox {}", held.sandbox);
                return Err(StoreError::InUse { what: format!("volume {id}"), by });
            }
            let before = state.volumes.len();
            state.volumes.retain(|known| known.id != *id);
            Ok(state.volumes.len() < before)
        })?
    }

    async fn find_volume(&self, of: &VolumeRef) -> Result<Option<VolumeRecord>, StoreError> {
        let is = |known: &&VolumeRecord| match of {
            VolumeRef::Id(id) => known.id == *id,
            VolumeRef::Name(name) => known.name == *name,
        };
        Ok(self.state.lock().volumes.iter().find(is).cloned())
    }

    async fn volumes(
        &self,
        kind: Option<VolumeKind>,
        after: Option<&Place<VolumeId>>,
        limit: usize,
    ) -> Result<Vec<VolumeRecord>, StoreError> {
        let state = self.state.lock();
        let rest = state.volumes.iter().filter(|known| after.is_none_or(|at| place(known) > *at));
        let rest = rest.filter(|known| kind.is_none_or(|kind| known.kind == kind));
        Ok(rest.take(limit).cloned().collect())
    }

    async fn attachments(&self, id: &VolumeId) -> Result<Vec<Attachment>, StoreError> {
        Ok(self.state.lock().attachments_of(id))
    }

    async fn volumes_made_for(&self, sandbox: &SandboxId) -> Result<Vec<VolumeId>, StoreError> {
        let state = self.state.lock();
        let own = state.volumes.iter().filter(|known| known.made_for.as_ref() == Some(sandbox));
        Ok(own.map(|known| known.id.clone()).collect())
    }

    async fn keep_volumes_of(&self, sandbox: &SandboxId) -> Result<(), StoreError> {
        self.write(|state| {
            for volume in &mut state.volumes {
                volume.made_for.take_if(|of| of == sandbox);
            }
        })
    }
}

fn place(record: &VolumeRecord) -> Place<VolumeId> {
    (record.created_at_ms, record.id.clone())
}

/// Without files: they are opened and copied, and nothing is mounted.
impl FakeStore {
    fn volume(&self, id: &VolumeId) -> Result<VolumeRecord, StoreError> {
        let found = self.state.lock().volumes.iter().find(|volume| volume.id == *id).cloned();
        found.ok_or_else(|| StoreError::NoSuchVolume(id.to_string()))
    }
}

#[async_trait]
impl Volumes for FakeStore {
    async fn open(&self, id: &VolumeId) -> Result<Arc<OpenVolume>, StoreError> {
        let VolumeRecord { id, .. } = self.volume(id)?;
        if self.state.lock().volumes_lost {
            return Err(StoreError::failed("open a volume")("a fake fault"));
        }
        Ok(Arc::new(OpenVolume { id, dir: "/".into(), hold: SavePin::new(|| {}) }))
    }

    async fn copy_for(
        &self,
        id: &VolumeId,
        sandbox: &SandboxId,
    ) -> Result<VolumeRecord, StoreError> {
        let of = self.volume(id)?;
        let id = VolumeId::random();
        let name = format!("copy-{}", &id.as_str()[4..]).parse();
        let name = name.map_err(StoreError::failed("name a copy"))?;
        let (copy_of, made_for) = (Some(of.id.clone()), Some(sandbox.clone()));
        let copy = VolumeRecord { id, name, copy_of, made_for, ..of };
        self.state.lock().volumes.push(copy.clone());
        Ok(copy)
    }

    async fn discard_copies(&self, sandbox: &SandboxId) {
        self.state.lock().volumes.retain(|volume| volume.made_for.as_ref() != Some(sandbox));
    }

    async fn server(
        &self,
        volume: &Arc<OpenVolume>,
        _: &GuestPath,
        _: bool,
    ) -> Result<Arc<dyn FileServer>, StoreError> {
        Err(StoreError::NoSuchVolume(volume.id.to_string()))
    }

    async fn sync(&self, _: &OpenVolume) -> Result<(), StoreError> {
        Ok(())
    }

    async fn put_back(
        &self,
        _: &OpenVolume,
        _: &GuestPath,
        _: Vec<HeldPath>,
    ) -> Result<Vec<String>, StoreError> {
        Ok(Vec::new())
    }
}

//! Images, saves and other bytes in memory; they outlive the daemon that writes them. What is recorded of
//! them: [`super::ledger`].

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use parking_lot::Mutex;
use torpor_protocol::api::ArchivedSandbox;
use torpor_protocol::guest::LogLine;
use torpor_protocol::snapshot::SavedFile;
use torpor_protocol::{ImageId, Name, SandboxId, SaveId, SecretName, SnapshotKind};

use crate::engine::Changes;
use crate::fleet::{MemoryGauge, MemoryReading};
use crate::store::{
    BoundSecret, Images, Journal, LocalSave, Manifest, MemorySave, PinOwner, PoolRecord, Record,
    RootImage, SaveAbout, SavePin, SavedBy, Saves, Search, SnapshotRecord, Staged, StoreError,
    Vault, VolumeRecord,
};

#[derive(Default)]
pub struct FakeStore {
    pub(super) state: Mutex<StoreState>,
}

#[derive(Default)]
pub(super) struct StoreState {
    /// With the epoch of their owner.
    pub(super) records: BTreeMap<SandboxId, (u64, Record)>,
    /// Of the only node.
    pub(super) epoch: u64,
    pub(super) snapshots: Vec<SnapshotRecord>,
    pub(super) pools: BTreeMap<Name, PoolRecord>,
    /// Oldest first.
    pub(super) volumes: Vec<VolumeRecord>,
    /// Last ended last.
    pub(super) archive: Vec<ArchivedSandbox>,
    lines: HashMap<SandboxId, Vec<LogLine>>,
    secrets: BTreeMap<String, String>,
    saves: HashMap<SaveId, (PathBuf, Manifest)>,
    corrupt: HashSet<SaveId>,
    writes: usize,
    renewals: usize,
    failing: bool,
    fail_commits: usize,
    pub(super) volumes_lost: bool,
}

impl FakeStore {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Whether every write of the ledger fails from now on.
    pub fn fail(&self, failing: bool) {
        self.state.lock().failing = failing;
    }

    /// The next `count` saves find the disk full.
    pub fn fail_commits(&self, count: usize) {
        self.state.lock().fail_commits = count;
    }

    /// Whether no volume can be opened from now on.
    pub fn lose_volumes(&self, lost: bool) {
        self.state.lock().volumes_lost = lost;
    }

    /// Gives a secret a value, or takes it away.
    pub fn set_secret(&self, name: &str, value: Option<&str>) {
        let mut state = self.state.lock();
        match value {
            Some(value) => drop(state.secrets.insert(name.to_owned(), value.to_owned())),
            None => drop(state.secrets.remove(name)),
        }
    }

    /// The bytes of this save are not what they were.
    pub fn corrupt(&self, id: &SaveId) {
        self.state.lock().corrupt.insert(id.clone());
    }

    /// Every image gets another root file.
    pub fn renew_images(&self) {
        self.state.lock().renewals += 1;
    }

    /// How often the ledger was written.
    pub fn writes(&self) -> usize {
        self.state.lock().writes
    }

    /// The saves that are there.
    pub fn saves(&self) -> HashSet<SaveId> {
        self.state.lock().saves.keys().cloned().collect()
    }

    /// What is recorded of all sandboxes, by id.
    pub fn records(&self) -> Vec<Record> {
        self.state.lock().records.values().map(|(_, record)| record.clone()).collect()
    }

    pub fn record_of(&self, id: &SandboxId) -> Option<Record> {
        self.state.lock().records.get(id).map(|(_, record)| record.clone())
    }

    /// An id that any image may have.
    pub fn image_id() -> ImageId {
        "0".repeat(64).parse().expect("64 zeros are an image id")
    }

    pub(super) fn write<T>(
        &self,
        change: impl FnOnce(&mut StoreState) -> T,
    ) -> Result<T, StoreError> {
        let mut state = self.state.lock();
        if state.failing {
            return Err(StoreError::failed("write the ledger")("a fake fault"));
        }
        state.writes += 1;
        Ok(change(&mut state))
    }

    fn keep(&self, dir: PathBuf, about: SaveAbout) -> Arc<LocalSave> {
        let file = SavedFile { name: "memory".to_owned(), bytes: 7, hash: String::new() };
        let files = vec![file];
        let manifest = Manifest { format: Manifest::FORMAT, about, files, stored_bytes: None };
        let id = SaveId::random();
        self.state.lock().saves.insert(id.clone(), (dir.clone(), manifest.clone()));
        Arc::new(LocalSave { id, dir, manifest, pin: SavePin::new(|| {}) })
    }
}

impl StoreState {
    fn pins(&self, save: &SaveId) -> Vec<PinOwner> {
        let is = |other: Option<&SaveId>| other == Some(save);
        let sandboxes = self
            .records
            .values()
            .map(|(_, record)| record)
            .filter(|record| is(record.save.as_ref()));
        let snapshots = self.snapshots.iter().filter(|record| is(record.save.as_ref()));
        let pools = self.pools.values();
        let pools = pools.filter(|pool| is(pool.from.as_ref().map(|(_, save)| save)));
        sandboxes
            .map(|record| PinOwner::Sandbox(record.id.clone()))
            .chain(snapshots.map(|record| PinOwner::Snapshot(record.snapshot.id.clone())))
            .chain(pools.map(|pool| PinOwner::Pool(pool.name.clone())))
            .collect()
    }

    pub(super) fn check(&self, save: Option<&SaveId>) -> Result<(), StoreError> {
        match save.filter(|save| !self.saves.contains_key(save)) {
            Some(gone) => Err(StoreError::NoSuchSave(gone.to_string())),
            None => Ok(()),
        }
    }
}

#[async_trait]
impl Images for FakeStore {
    async fn root(&self, id: &ImageId) -> Result<RootImage, StoreError> {
        let renewals = self.state.lock().renewals;
        self.root_file(id, &renewals.to_string()).await
    }

    async fn root_file(&self, _id: &ImageId, file: &str) -> Result<RootImage, StoreError> {
        Ok(RootImage { file: file.to_owned(), path: file.into(), ..RootImage::default() })
    }
}

struct FakeStage(PathBuf);

impl Staged for FakeStage {
    fn path(&self) -> &Path {
        &self.0
    }

    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any> {
        self
    }
}

#[async_trait]
impl Saves for FakeStore {
    async fn stage(&self) -> Result<Box<dyn Staged>, StoreError> {
        Ok(Box::new(FakeStage(Path::new("/nowhere").join(SaveId::random().as_str()))))
    }

    async fn commit(
        &self,
        staged: Box<dyn Staged>,
        about: SaveAbout,
    ) -> Result<Arc<LocalSave>, StoreError> {
        {
            let mut state = self.state.lock();
            if state.fail_commits > 0 {
                state.fail_commits -= 1;
                return Err(StoreError::DiskFull("a fake fault".to_owned()));
            }
        }
        Ok(self.keep(staged.path().to_owned(), about))
    }

    async fn materialize(&self, id: &SaveId) -> Result<Arc<LocalSave>, StoreError> {
        let state = self.state.lock();
        if state.corrupt.contains(id) {
            let (id, file) = (id.to_string(), "memory".to_owned());
            return Err(StoreError::CorruptSave { id, file, detail: "a fake fault".to_owned() });
        }
        let found = state.saves.get(id).cloned();
        let (dir, manifest) = found.ok_or_else(|| StoreError::NoSuchSave(id.to_string()))?;
        Ok(Arc::new(LocalSave { id: id.clone(), dir, manifest, pin: SavePin::new(|| {}) }))
    }

    async fn manifest(&self, id: &SaveId) -> Result<Manifest, StoreError> {
        let found = self.state.lock().saves.get(id).map(|(_, manifest)| manifest.clone());
        found.ok_or_else(|| StoreError::NoSuchSave(id.to_string()))
    }

    async fn memory_saves(&self) -> Result<Vec<MemorySave>, StoreError> {
        let state = self.state.lock();
        let mut found = Vec::new();
        for (id, (_, manifest)) in &state.saves {
            let SaveAbout { kind, engine, engine_version: version, .. } = manifest.about.clone();
            if kind != SnapshotKind::Memory {
                continue;
            }
            let save = MemorySave { id: id.clone(), by: SavedBy { engine, version }, owner: None };
            let pins = state.pins(id).into_iter();
            found.extend(pins.map(|owner| MemorySave { owner: Some(owner), ..save.clone() }));
            found.push(save);
        }
        Ok(found)
    }

    async fn layer(
        &self,
        _save: &LocalSave,
    ) -> Result<Box<dyn tokio::io::AsyncRead + Send + Unpin>, StoreError> {
        Ok(Box::new(tokio::io::empty()))
    }

    async fn pins(&self, id: &SaveId) -> Result<Vec<PinOwner>, StoreError> {
        Ok(self.state.lock().pins(id))
    }

    async fn release(&self, id: &SaveId) {
        let mut state = self.state.lock();
        if state.pins(id).is_empty() {
            state.saves.remove(id);
        }
    }

    async fn files_of(
        &self,
        save: &LocalSave,
        _changes: Box<dyn Changes>,
    ) -> Result<Arc<LocalSave>, StoreError> {
        let about = SaveAbout { kind: SnapshotKind::Filesystem, ..save.manifest.about.clone() };
        Ok(self.keep(save.dir.clone(), about))
    }
}

#[async_trait]
impl Journal for FakeStore {
    async fn last(&self, id: &SandboxId) -> Result<u64, StoreError> {
        let state = self.state.lock();
        let last = state.lines.get(id).and_then(|lines| lines.last());
        Ok(last.map_or(0, |line| line.stamp_us))
    }

    async fn append(&self, id: &SandboxId, lines: &[LogLine]) -> Result<(), StoreError> {
        self.state.lock().lines.entry(id.clone()).or_default().extend_from_slice(lines);
        Ok(())
    }

    async fn close(&self, _id: &SandboxId) -> Result<(), StoreError> {
        Ok(())
    }

    /// Only by stamp and number.
    async fn read(&self, id: &SandboxId, search: &Search) -> Result<Vec<LogLine>, StoreError> {
        let state = self.state.lock();
        let lines = state.lines.get(id).map(Vec::as_slice).unwrap_or_default();
        let after = lines.iter().filter(|line| line.stamp_us > search.after_us);
        Ok(after.take(search.limit).cloned().collect())
    }
}

#[async_trait]
impl Vault for FakeStore {
    async fn reveal(&self, names: &[SecretName]) -> Result<BTreeMap<String, String>, StoreError> {
        let state = self.state.lock();
        let value = |name: &SecretName| {
            let value = state.secrets.get(name.as_str()).cloned();
            let value = value.ok_or_else(|| StoreError::NoSuchSecret(name.to_string()))?;
            Ok((name.to_string(), value))
        };
        names.iter().map(value).collect()
    }

    async fn bound(&self, name: &SecretName) -> Result<Option<BoundSecret>, StoreError> {
        let value = self.state.lock().secrets.get(name.as_str()).cloned();
        Ok(value.map(|value| BoundSecret { value, hosts: Vec::new() }))
    }
}

/// A host whose free memory tests decide about.
pub struct FakeMemory(AtomicU64);

impl FakeMemory {
    pub fn endless() -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(u64::MAX)))
    }

    pub fn set_available_mib(&self, mib: u64) {
        self.0.store(mib, Ordering::Relaxed);
    }
}

impl MemoryGauge for FakeMemory {
    fn read(&self) -> MemoryReading {
        MemoryReading { available_mib: self.0.load(Ordering::Relaxed), stalled_percent: 0.0 }
    }
}

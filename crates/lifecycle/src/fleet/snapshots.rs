//! Snapshots: saves that people know by name, and sandboxes that begin from them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use torpor_protocol::volume::ForkVolumes;
use torpor_protocol::{
    Name, SandboxId, SandboxRef, SandboxSpec, SaveId, Snapshot, SnapshotId, SnapshotKind,
    SnapshotRef, SnapshotState, VolumeId, WorkFailure,
};

use super::capacity::{Reservation, mib};
use super::{Fleet, Plan};
use crate::engine::Changes;
use crate::error::chain;
use crate::ledger::{PAGE, Place, SnapshotFilter, everything};
use crate::sandbox::Sandbox;
use crate::store::{LocalSave, Manifest, SnapshotRecord, StoreError};
use crate::{Error, Refusal, fault};

/// Ancestors of a snapshot that anybody is told.
const ANCESTORS_MAX: usize = 1000;

/// Between two attempts to record that a snapshot failed.
const RECORD_AGAIN: Duration = Duration::from_secs(1);

/// A save to begin from. It stays while this value lives; [`Fleet::let_go`] of it.
#[derive(Debug, Clone)]
pub struct RestorePoint {
    pub save: Arc<LocalSave>,
    pub snapshot: Option<SnapshotId>,
    /// Copies of its volumes as they were then, and under whose name they were made.
    pub(crate) copies: BTreeMap<VolumeId, VolumeId>,
    copies_of: Option<SandboxId>,
}

impl RestorePoint {
    /// What begins there has the volumes of then.
    pub fn new(save: Arc<LocalSave>, snapshot: Option<SnapshotId>) -> Self {
        Self { save, snapshot, copies: BTreeMap::new(), copies_of: None }
    }

    /// The sandbox as it was.
    pub fn spec(&self) -> &SandboxSpec {
        &self.save.manifest.about.spec
    }

    pub fn kind(&self) -> SnapshotKind {
        self.save.manifest.about.kind
    }

    /// What each machine that begins here needs at once.
    pub(super) fn memory_mib(&self) -> u64 {
        match self.kind() {
            SnapshotKind::Memory => mib(self.save.manifest.size_bytes()),
            SnapshotKind::Filesystem => 0,
        }
    }
}

/// A snapshot in the making. It goes on if this is dropped.
pub struct Taking {
    pub snapshot: Snapshot,
    done: oneshot::Receiver<Result<Snapshot, Error>>,
}

impl Taking {
    /// The completed snapshot.
    pub async fn done(self) -> Result<Snapshot, Error> {
        self.done.await.unwrap_or_else(|_| Err(Refusal::Stopping.into()))
    }
}

impl Fleet {
    /// What was being taken when an earlier daemon ended is not complete.
    pub(super) async fn recover_snapshots(&self) -> Result<(), Error> {
        for mut record in self.every_snapshot(&SnapshotFilter::default()).await? {
            if record.snapshot.state == SnapshotState::InProgress {
                record.snapshot.state = SnapshotState::Failed;
                record.snapshot.reason = Some(WorkFailure::Interrupted);
                record.snapshot.message = Some("the daemon ended while it was taken".to_owned());
                self.inner.world.ledger.record_snapshot(&record).await?;
            }
        }
        Ok(())
    }

    /// All of these snapshots, read by pages; oldest first.
    pub async fn every_snapshot(
        &self,
        filter: &SnapshotFilter,
    ) -> Result<Vec<SnapshotRecord>, Error> {
        let page = |after: Option<Place<SnapshotId>>| async move {
            self.snapshots(filter, after.as_ref(), PAGE).await
        };
        everything(page, |record| (record.snapshot.created_at_ms, record.snapshot.id.clone())).await
    }

    /// Begins to save a sandbox as it is now, without waking it. When this returns the snapshot is
    /// recorded as in progress.
    pub async fn take_snapshot(
        &self,
        of: &SandboxRef,
        name: Option<Name>,
        kind: SnapshotKind,
    ) -> Result<Taking, Error> {
        self.take_snapshot_as(SnapshotId::random(), of, name, kind).await
    }

    /// The same, with an id that nobody else has.
    pub async fn take_snapshot_as(
        &self,
        id: SnapshotId,
        of: &SandboxRef,
        name: Option<Name>,
        kind: SnapshotKind,
    ) -> Result<Taking, Error> {
        let sandbox = self.find(of)?;
        let snapshot = Snapshot { id, ..self.unfinished(&sandbox, name, kind) };
        let record = SnapshotRecord { snapshot: snapshot.clone(), save: None };
        self.inner.world.ledger.record_snapshot(&record).await.map_err(named)?;
        fault::point("snapshot.recorded");
        let (reply, done) = oneshot::channel();
        let fleet = self.clone();
        self.inner.tasks.spawn(async move {
            let taken = fleet.finish_snapshot(&sandbox, record).await;
            // Nobody waits: it is in the ledger.
            let _ = reply.send(taken);
        });
        Ok(Taking { snapshot, done })
    }

    fn unfinished(&self, of: &Sandbox, name: Option<Name>, kind: SnapshotKind) -> Snapshot {
        let status = of.status();
        let engine = self.inner.world.engines.of(&status.spec);
        let engine = engine.map_or(self.about(), |engine| engine.about());
        Snapshot {
            id: SnapshotId::random(),
            name,
            kind,
            state: SnapshotState::InProgress,
            reason: None,
            message: None,
            sandbox: status.id,
            sandbox_name: status.spec.name,
            parent: status.parent,
            image: status.spec.image,
            image_id: status.spec.image_id,
            resources: status.spec.resources,
            created_at_ms: self.clock().now_ms(),
            size_bytes: 0,
            pause_ms: 0.0,
            engine: engine.kind.to_owned(),
            engine_version: engine.version.clone(),
        }
    }

    async fn finish_snapshot(
        &self,
        sandbox: &Sandbox,
        record: SnapshotRecord,
    ) -> Result<Snapshot, Error> {
        let ledger = &self.inner.world.ledger;
        let asked_at_ms = record.snapshot.created_at_ms;
        let mut record = record;
        let save = match self.save_as(sandbox, record.snapshot.kind).await {
            Ok(save) => save,
            Err(error) => {
                record.snapshot.state = SnapshotState::Failed;
                record.snapshot.reason = Some(error.as_failure());
                record.snapshot.message = Some(chain(&error));
                self.note_failed(record).await;
                return Err(error);
            }
        };
        fault::point("snapshot.saved");
        record.save = Some(save.id.clone());
        describe(&mut record.snapshot, &save.manifest);
        // The save of a sandbox that slept is older than the wish for it, and nobody stood still.
        if save.manifest.about.created_at_ms < asked_at_ms {
            record.snapshot.pause_ms = 0.0;
        }
        let recorded = async {
            // Copies that the sandbox has for itself are needed by more than it now.
            ledger.keep_volumes_of(&sandbox.id).await?;
            let is_there = ledger.update_snapshot(&record).await?;
            // Who erased it meanwhile does not want it any more.
            let erased = || Refusal::NoSuchSnapshot(SnapshotRef::Id(record.snapshot.id.clone()));
            is_there.then_some(()).ok_or_else(|| Error::from(erased()))
        };
        if let Err(error) = recorded.await {
            self.inner.world.saves.release(&save.id).await;
            return Err(error);
        }
        // The snapshot is there, whatever its sandbox makes of it.
        if let Err(error) = sandbox.note_parent(record.snapshot.id.clone()).await {
            tracing::warn!(sandbox = %sandbox.id, error = chain(&error), "parent not noted");
        }
        Ok(record.snapshot)
    }

    /// Records that a snapshot failed. If the disk is full that may take a while; whoever waits for
    /// the snapshot need not wait for it.
    async fn note_failed(&self, record: SnapshotRecord) {
        let world = Arc::clone(&self.inner.world);
        if world.ledger.update_snapshot(&record).await.is_ok() {
            return;
        }
        self.inner.tasks.spawn(async move {
            let again = async {
                loop {
                    tokio::time::sleep(RECORD_AGAIN).await;
                    match world.ledger.update_snapshot(&record).await {
                        Ok(_) => break,
                        Err(error) => {
                            tracing::error!(snapshot = %record.snapshot.id, error = chain(&error), "could not record");
                        }
                    }
                }
            };
            // The next daemon finds it in progress, and records the same.
            let _ = world.stopping.run_until_cancelled(again).await;
        });
    }

    /// A save of the sandbox of that kind.
    async fn save_as(
        &self,
        sandbox: &Sandbox,
        kind: SnapshotKind,
    ) -> Result<Arc<LocalSave>, Error> {
        let (save, _) = sandbox.save(None).await?;
        match (kind, save.manifest.about.kind) {
            (SnapshotKind::Memory, SnapshotKind::Memory)
            | (SnapshotKind::Filesystem, SnapshotKind::Filesystem) => Ok(save),
            (SnapshotKind::Memory, SnapshotKind::Filesystem) => {
                let why = "it has files only until it wakes: wake it first";
                Err(StoreError::Invalid(why.to_owned()).into())
            }
            (SnapshotKind::Filesystem, SnapshotKind::Memory) => self.files_of(&save).await,
        }
    }

    /// A save of the files alone.
    pub(super) async fn files_of(&self, save: &Arc<LocalSave>) -> Result<Arc<LocalSave>, Error> {
        let (fleet, kept) = (self.clone(), Arc::clone(save));
        let changes = tokio::task::spawn_blocking(move || fleet.changes(&kept)).await;
        let changes = changes.map_err(StoreError::failed("read the files of a save"))??;
        Ok(self.inner.world.saves.files_of(save, changes).await?)
    }

    /// A page of at most `limit` after this place, oldest first.
    pub async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<&Place<SnapshotId>>,
        limit: usize,
    ) -> Result<Vec<SnapshotRecord>, Error> {
        Ok(self.inner.world.ledger.snapshots(filter, after, limit).await?)
    }

    /// The parent of a snapshot, its parent, and so on as far as they are known; the last may be gone.
    pub async fn ancestors(&self, of: &SnapshotId) -> Result<Vec<SnapshotId>, Error> {
        Ok(self.inner.world.ledger.snapshot_ancestors(of, ANCESTORS_MAX).await?)
    }

    pub async fn find_snapshot(&self, of: &SnapshotRef) -> Result<SnapshotRecord, Error> {
        let found = self.inner.world.ledger.find_snapshot(of).await?;
        found.ok_or_else(|| Refusal::NoSuchSnapshot(of.clone()).into())
    }

    /// Forgets a snapshot. What began from it keeps what it needs.
    pub async fn erase_snapshot(&self, of: &SnapshotRef) -> Result<(), Error> {
        let record = self.find_snapshot(of).await?;
        self.inner.world.ledger.erase_snapshot(&record.snapshot.id).await?;
        if let Some(save) = &record.save {
            self.inner.world.saves.release(save).await;
        }
        Ok(())
    }

    /// Takes up a snapshot that came from elsewhere, under a fresh id.
    pub async fn enlist(&self, snapshot: Snapshot, save: &LocalSave) -> Result<Snapshot, Error> {
        let mut snapshot = snapshot;
        snapshot.id = SnapshotId::random();
        snapshot.state = SnapshotState::Completed;
        describe(&mut snapshot, &save.manifest);
        let enlisted = async {
            if snapshot.kind == SnapshotKind::Memory {
                self.inner.world.can_revive(save)?;
            }
            let save = Some(save.id.clone());
            let record = SnapshotRecord { snapshot: snapshot.clone(), save };
            self.inner.world.ledger.record_snapshot(&record).await.map_err(named)
        };
        if let Err(error) = enlisted.await {
            self.inner.world.saves.release(&save.id).await;
            return Err(error);
        }
        Ok(snapshot)
    }

    // === Beginning from a restore point ===

    /// A completed snapshot whose bytes are known to be right.
    pub async fn restore_point(&self, of: &SnapshotRef) -> Result<RestorePoint, Error> {
        let SnapshotRecord { snapshot, save } = self.find_snapshot(of).await?;
        let Some(save) = save.filter(|_| snapshot.state == SnapshotState::Completed) else {
            let why = snapshot.message.unwrap_or_else(|| "it is being taken".to_owned());
            return Err(Refusal::SnapshotNotReady { id: snapshot.id.to_string(), why }.into());
        };
        let save = self.inner.world.saves.materialize(&save).await?;
        Ok(RestorePoint::new(save, Some(snapshot.id)))
    }

    /// A sandbox as it is now, as a snapshot that is in no list. `volumes`: what those who begin there do with its
    /// volumes; copies are of the same moment as its memory.
    pub async fn restore_point_now(
        &self,
        of: &SandboxRef,
        volumes: ForkVolumes,
    ) -> Result<RestorePoint, Error> {
        let sandbox = self.find(of)?;
        // Before the machine is disturbed for forks that can't be.
        let spec = sandbox.status().spec;
        let written = spec.mounts().iter().find(|mount| mount.is_exclusive());
        if let (ForkVolumes::Refuse, Some(mount)) = (volumes, written) {
            return Err(Refusal::WritesToVolume(mount.name.clone()).into());
        }
        // Nobody's: what a crash leaves of it goes at the next start.
        let copies_of = (volumes == ForkVolumes::Copy).then(SandboxId::random);
        let (fleet, (reply, made)) = (self.clone(), oneshot::channel());
        // Also if the caller gives up: what was made for it is let go of.
        self.inner.tasks.spawn(async move {
            let (save, copies) = match sandbox.save(copies_of.clone()).await {
                Ok(saved) => saved,
                Err(error) => {
                    fleet.discard_copies(copies_of).await;
                    let _ = reply.send(Err(error));
                    return;
                }
            };
            let point = RestorePoint::new(save, sandbox.status().parent);
            let point = RestorePoint { copies, copies_of, ..point };
            if let Err(Ok(unwanted)) = reply.send(Ok(point)) {
                fleet.let_go(unwanted).await;
            }
        });
        made.await.unwrap_or_else(|_| Err(Refusal::Stopping.into()))
    }

    async fn discard_copies(&self, of: Option<SandboxId>) {
        if let Some(of) = of {
            self.inner.world.volumes.discard_copies(&of).await;
        }
    }

    /// Room for so many sandboxes that begin at `point`.
    pub async fn reserve_forks(
        &self,
        point: &RestorePoint,
        count: usize,
    ) -> Result<Reservation, Error> {
        Ok(self.reserve(count, point.memory_mib().saturating_mul(count as u64)).await?)
    }

    /// Creates a sandbox that begins at `point`.
    pub async fn begin(&self, point: &RestorePoint, spec: SandboxSpec) -> Result<Sandbox, Error> {
        self.create_from(spec, Some(point), Plan::default()).await
    }

    /// The specification of a sandbox that begins at `point`.
    pub(super) fn fitting(
        &self,
        spec: SandboxSpec,
        point: &RestorePoint,
    ) -> Result<SandboxSpec, Error> {
        let then = point.spec();
        if point.kind() == SnapshotKind::Memory {
            self.inner.world.can_revive(&point.save)?;
            if spec.resources != then.resources {
                let had = format!(
                    "it has {} cpus, {} MiB of memory and {} MiB of disk; take a filesystem snapshot \
                     to change them",
                    then.resources.cpus, then.resources.memory_mib, then.resources.disk_mib
                );
                return Err(Refusal::Locked(had).into());
            }
        }
        let mut spec = spec;
        spec.image.clone_from(&then.image);
        spec.image_id = then.image_id.clone();
        Ok(spec)
    }

    /// Done with a restore point: if nothing needs it, it goes.
    pub async fn let_go(&self, point: RestorePoint) {
        let id: SaveId = point.save.id.clone();
        self.discard_copies(point.copies_of.clone()).await;
        drop(point);
        self.inner.world.saves.release(&id).await;
    }

    /// Brings a sandbox back to a snapshot, memory included; returns when it runs.
    pub async fn restore(&self, sandbox: &SandboxRef, to: &SnapshotRef) -> Result<Sandbox, Error> {
        let sandbox = self.find(sandbox)?;
        let point = self.restore_point(to).await?;
        if point.kind() == SnapshotKind::Memory {
            self.inner.world.can_revive(&point.save)?;
        }
        sandbox.restore(Arc::clone(&point.save), point.snapshot.clone()).await?;
        Ok(sandbox)
    }

    /// What a memory save has on top of its image. Blocks.
    pub fn changes(&self, save: &LocalSave) -> Result<Box<dyn Changes>, Error> {
        Ok(self.inner.world.saved_by(save)?.changes(&save.dir)?)
    }
}

/// A name that is taken is no failure of the store.
fn named(error: StoreError) -> Error {
    error.or_taken(Refusal::SnapshotNameTaken)
}

/// What the manifest knows better than whoever asked for the snapshot.
pub(super) fn describe(snapshot: &mut Snapshot, manifest: &Manifest) {
    let about = &manifest.about;
    snapshot.kind = about.kind;
    snapshot.state = SnapshotState::Completed;
    snapshot.image.clone_from(&about.spec.image);
    snapshot.image_id = about.spec.image_id.clone();
    snapshot.resources = about.spec.resources;
    snapshot.size_bytes = manifest.size_bytes();
    snapshot.pause_ms = about.pause_ms;
    snapshot.engine.clone_from(&about.engine);
    snapshot.engine_version.clone_from(&about.engine_version);
}

//! All sandboxes of this host: create, find, list, and bring back what the ledger knows.

mod awake;
mod builds;
mod capacity;
mod idle_limit;
mod pools;
mod slot;
mod snapshots;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, MutexGuard, Notify, Semaphore, broadcast};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use torpor_protocol::api::UpdateSandbox;
use torpor_protocol::guest::LogLine;
use torpor_protocol::volume::ForkVolumes;
use torpor_protocol::{Name, SandboxId, SandboxRef, SandboxSpec, Status};

use crate::clock::Clock;
use crate::driver::Phase;
use crate::engine::About;
use crate::engines::Engines;
use crate::guest_defaults::GuestDefaults;
use crate::ledger::{Aggregate, CacheVersion, FleetLedger, Owner, PAGE, everything};
use crate::sandbox::Sandbox;
use crate::store::{
    Facts, Images, Journal, PersistedState, Record, Saves, Search, StoreError, Vault, Volumes,
};
use crate::world::{Policy, ShutdownMode, World};
use crate::{Error, Refusal, fault};

pub(crate) use awake::AWAKE_WITHIN;
use awake::Counters;
pub use awake::{Tally, wake_deadline};
use capacity::Capacity;
pub use capacity::{Cause, MemoryGauge, MemoryReading, Observer, Reservation};
use pools::{Pools, Ready};
pub(crate) use slot::{DriverSlot, DriverState};
pub use snapshots::{RestorePoint, Taking};

/// Status changes that a slow watcher of the whole fleet may lag behind before it misses some.
const EVENTS: usize = 1024;

/// What a fleet is made of.
pub struct Parts {
    pub engines: Engines,
    pub ledger: Arc<dyn FleetLedger>,
    pub images: Arc<dyn Images>,
    pub saves: Arc<dyn Saves>,
    pub journal: Arc<dyn Journal>,
    pub vault: Arc<dyn Vault>,
    pub volumes: Arc<dyn Volumes>,
    pub gauge: Arc<dyn MemoryGauge>,
    pub observer: Arc<dyn Observer>,
    /// The interception CA (PEM).
    pub ca: Option<String>,
    pub guest: GuestDefaults,
    pub policy: Policy,
}

#[derive(Clone)]
pub struct Fleet {
    inner: Arc<Inner>,
}

struct Inner {
    world: Arc<World>,
    register: Mutex<Register>,
    pools: Pools,
    pools_version: CacheVersion,
    gauge: Arc<dyn MemoryGauge>,
    observer: Arc<dyn Observer>,
    capacity: Capacity,
    counters: Counters,
    /// Held by who takes a name for a sandbox that has one, or none.
    renaming: AsyncMutex<()>,
    /// Held by who claims a sandbox from a pool, until it counts.
    claiming: AsyncMutex<()>,
    /// Rings when there is one more driver.
    called: Notify,
    events: broadcast::Sender<Status>,
    /// Everything that must end before the daemon does.
    tasks: TaskTracker,
}

/// Who exists. Owned (see [`crate::ledger`]): nobody else writes these sandboxes. A name is taken from the moment it is asked for until its sandbox is gone.
#[derive(Default)]
struct Register {
    by_id: BTreeMap<SandboxId, Sandbox>,
    by_name: HashMap<Name, SandboxId>,
}

/// How a sandbox comes to be.
#[derive(Default)]
pub struct Plan {
    /// Its room on this host, if that was reserved before.
    pub room: Option<Reservation>,
    /// It waits until this host has room for it, or until this time.
    pub queued_until_ms: Option<u64>,
    /// The request that makes it, recorded with it.
    pub request: Option<String>,
    /// What becomes of the volumes of what it is forked from.
    pub volumes: ForkVolumes,
}

impl Fleet {
    /// Everything recorded comes back; whatever else is on the host is swept away first.
    pub async fn recover(parts: Parts) -> Result<Self, Error> {
        let Parts {
            engines,
            ledger,
            images,
            saves,
            journal,
            vault,
            volumes,
            gauge,
            observer,
            ca,
            guest,
            policy,
        } = parts;
        let owner = ledger.take_over().await?;
        let pools_version = CacheVersion::now(Arc::clone(&ledger) as _, Aggregate::Pools).await?;
        let records = recorded(&*ledger, &owner).await?;
        let records = with_engines(records, &engines, &*saves).await?;
        let keep: HashSet<_> =
            records.iter().filter(|r| may_run(&r.state)).map(|r| r.id.clone()).collect();
        let swept = engines.sweep(&keep).await?;
        tracing::info!(recorded = records.len(), swept, "recovering");
        let world = World {
            engines,
            ledger,
            owner,
            images,
            saves,
            journal,
            vault,
            volumes,
            ca,
            guest,
            policy,
            clock: Clock::start(),
            stopping: CancellationToken::new(),
            shutdown_mode: Mutex::new(ShutdownMode::Running),
            wakes: Semaphore::new(policy.wakes_at_once.max(1)),
        };
        let fleet = Self {
            inner: Arc::new(Inner {
                world: Arc::new(world),
                register: Mutex::default(),
                pools: Pools::default(),
                pools_version,
                gauge,
                observer,
                capacity: Capacity::default(),
                counters: Counters::default(),
                renaming: AsyncMutex::default(),
                claiming: AsyncMutex::default(),
                called: Notify::new(),
                events: broadcast::channel(EVENTS).0,
                tasks: TaskTracker::new(),
            }),
        };
        fleet.bring_all_back(records).await?;
        Ok(fleet)
    }

    async fn bring_all_back(&self, records: Vec<Record>) -> Result<(), Error> {
        self.recover_snapshots().await?;
        let sleepers = records.into_iter().filter_map(|record| self.bring_back(record)).collect();
        self.adopt(sleepers).await;
        self.recover_pools().await?;
        self.inner.tasks.spawn(self.clone().enforce_idle_limit());
        self.inner.tasks.spawn(self.clone().follow_pools());
        self.inner.tasks.spawn(self.clone().watch_memory());
        Ok(())
    }

    /// A sandbox that sleeps gets no driver yet, as it may need none: it is returned.
    fn bring_back(&self, record: Record) -> Option<Sandbox> {
        let asleep = record.state == (PersistedState::Standby { interrupted: false });
        let phase = match &record.state {
            PersistedState::Created if record.facts.queued_until_ms.is_some() => {
                Phase::Queued { until_ms: record.facts.queued_until_ms.unwrap_or_default() }
            }
            PersistedState::Created | PersistedState::Running | PersistedState::Standby { .. } => {
                Phase::Adopting
            }
            PersistedState::Failed { reason } => Phase::Failed(reason.clone()),
        };
        if let Some(name) = &record.spec.name {
            self.inner.register.lock().by_name.insert(name.clone(), record.id.clone());
        }
        if asleep {
            return Some(self.admit(record, phase));
        }
        self.launch(record, phase);
        None
    }

    /// Creates a sandbox from its image. When this returns it is recorded; it runs when `awake`
    /// returns.
    pub async fn create(&self, spec: SandboxSpec) -> Result<Sandbox, Error> {
        self.create_from(spec, None, Plan::default()).await
    }

    /// Held by who claims a sandbox from a pool, until it counts.
    async fn begin_claim(&self, spec: &SandboxSpec) -> Result<Option<MutexGuard<'_, ()>>, Error> {
        let Some(pool) = &spec.pool else { return Ok(None) };
        let claiming = self.inner.claiming.lock().await;
        self.may_claim(pool)?;
        Ok(Some(claiming))
    }

    /// Creates a sandbox from its image or from a restore point; out of a pool if one fits.
    pub async fn create_from(
        &self,
        spec: SandboxSpec,
        from: Option<&RestorePoint>,
        Plan { room, queued_until_ms, request, volumes }: Plan,
    ) -> Result<Sandbox, Error> {
        let spec = match from {
            Some(point) => self.fitting(spec, point)?,
            None => spec,
        };
        if self.inner.world.stopping.is_cancelled() {
            return Err(Refusal::Stopping.into());
        }
        let room = match (room, queued_until_ms) {
            (None, None) => Some(self.reserve(1, from.map_or(0, RestorePoint::memory_mib)).await?),
            (room, _) => room,
        };
        let _claiming = self.begin_claim(&spec).await?;
        let spec = self.inner.world.engines.settle(spec, from.map(|point| &*point.save))?;
        let save = from.map(|point| point.save.id.clone());
        let ready = self.inner.pools.take(&spec, save.as_ref());
        let id = ready.as_ref().map_or_else(SandboxId::random, |ready| ready.id.clone());
        if let Err(taken) = self.claim(&id, spec.name.as_ref()) {
            self.inner.pools.put_back(ready);
            return Err(taken.into());
        }
        let now = self.inner.world.clock.now_ms();
        // Once recorded, a machine that was ready runs.
        let state = if ready.is_some() { PersistedState::Running } else { PersistedState::Created };
        let parent = from.and_then(|point| point.snapshot.clone());
        let root = match &ready {
            Some(ready) => Some(ready.root.clone()),
            None => from.and_then(|point| point.save.manifest.about.root.clone()),
        };
        // What is ready has its room already.
        let queued_until_ms = queued_until_ms.filter(|_| ready.is_none());
        let facts = Facts { parent, root, queued_until_ms, request, ..Facts::default() };
        let record =
            Record { id, spec, state, save, facts, created_at_ms: now, last_used_at_ms: now };
        // A caller that gives up now must not leave a name that is taken by nobody.
        let (fleet, point) = (self.clone(), from.cloned());
        let creation = tokio::spawn(async move {
            let mut record = record;
            if let Err(error) = fleet.record_new(&mut record, point.as_ref(), volumes).await {
                fleet.unclaim(&record.id, record.spec.name.as_ref(), ready);
                fleet.inner.world.volumes.discard_copies(&record.id).await;
                return Err(error);
            }
            fault::point("create.recorded");
            let phase = match (ready, queued_until_ms) {
                (Some(ready), _) => Phase::Claiming(ready.machine),
                (None, Some(until_ms)) => Phase::Queued { until_ms },
                (None, None) => Phase::Creating,
            };
            let sandbox = fleet.launch(record, phase);
            // From now on it counts by itself.
            drop(room);
            Ok(sandbox)
        });
        creation.await.unwrap_or_else(|_| Err(Refusal::Stopping.into()))
    }

    /// Records a sandbox, with the volumes of what it begins from. On `Err` copies of them may be left.
    async fn record_new(
        &self,
        record: &mut Record,
        from: Option<&RestorePoint>,
        volumes: ForkVolumes,
    ) -> Result<(), Error> {
        let world = &self.inner.world;
        if let Some(point) = from {
            let Record { id, spec, .. } = &*record;
            record.spec.mounts = world.inherit_mounts(spec, point, volumes, id).await?;
        }
        let recorded = world.ledger.create_sandbox(&world.owner, record).await;
        recorded.map_err(|error| error.or_taken(Refusal::NameTaken))
    }

    fn claim(&self, id: &SandboxId, name: Option<&Name>) -> Result<(), Refusal> {
        let Some(name) = name else { return Ok(()) };
        let mut register = self.inner.register.lock();
        if register.by_name.contains_key(name) {
            return Err(Refusal::NameTaken(name.clone()));
        }
        register.by_name.insert(name.clone(), id.clone());
        Ok(())
    }

    fn unclaim(&self, id: &SandboxId, name: Option<&Name>, ready: Option<Ready>) {
        self.inner.register.lock().forget(id, name);
        self.inner.pools.put_back(ready);
    }

    /// Changes a sandbox while it lives: all that is asked for, or nothing.
    pub async fn update(&self, sandbox: &Sandbox, update: UpdateSandbox) -> Result<(), Error> {
        let Some(name) = update.name.clone() else { return sandbox.update(update).await };
        // To its end also if the caller gives up: a name must not be taken by nobody.
        let (fleet, sandbox) = (self.clone(), sandbox.clone());
        let renaming = tokio::spawn(async move {
            let _one_at_a_time = fleet.inner.renaming.lock().await;
            let before = sandbox.status().spec.name;
            if before.as_ref() == Some(&name) {
                return sandbox.update(update).await;
            }
            fleet.claim(&sandbox.id, Some(&name))?;
            let updated = sandbox.update(update).await;
            let unused = if updated.is_ok() { before } else { Some(name) };
            if let Some(unused) = unused {
                fleet.inner.register.lock().by_name.remove(&unused);
            }
            updated
        });
        renaming.await.unwrap_or_else(|_| Err(Refusal::Stopping.into()))
    }

    /// Lines that the processes of a sandbox said. It is not woken for that; one that is gone is
    /// remembered for a while.
    pub async fn log(&self, id: &SandboxId, search: &Search) -> Result<Vec<LogLine>, Error> {
        if let Err(error) = self.find(&SandboxRef::Id(id.clone()))
            && self.inner.world.ledger.find_archived(id).await?.is_none()
        {
            return Err(error);
        }
        self.journal(id, search).await
    }

    /// The same for who knows by itself that the sandbox was there: none, if nothing is kept of what it said.
    pub async fn journal(&self, id: &SandboxId, search: &Search) -> Result<Vec<LogLine>, Error> {
        if let Ok(sandbox) = self.find(&SandboxRef::Id(id.clone())) {
            // Who can't be asked has nothing new to tell.
            drop(sandbox.note_lines().await);
        }
        Ok(self.inner.world.journal.read(id, search).await?)
    }

    pub fn find(&self, reference: &SandboxRef) -> Result<Sandbox, Error> {
        self.inner.counters.lookups.fetch_add(1, Ordering::Relaxed);
        let register = self.inner.register.lock();
        let id = match reference {
            SandboxRef::Id(id) => Some(id),
            SandboxRef::Name(name) => register.by_name.get(name),
        };
        let sandbox = id.and_then(|id| register.by_id.get(id)).cloned();
        sandbox.ok_or_else(|| Refusal::NoSuchSandbox(reference.clone()).into())
    }

    pub fn contains(&self, id: &SandboxId) -> bool {
        self.inner.register.lock().by_id.contains_key(id)
    }

    /// Sorted by id, which is what pages of a listing go by.
    pub fn list(&self) -> Vec<Status> {
        self.page(None, usize::MAX, |_| true).0
    }

    /// What this sees in each, sorted by id: of thousands, not all of each need be copied.
    pub fn survey<T>(&self, see: impl Fn(&Status) -> T) -> Vec<T> {
        let register = self.inner.register.lock();
        register.by_id.values().map(|sandbox| see(&sandbox.status.borrow())).collect()
    }

    /// At most `limit` of those after this id that are `wanted`, sorted by id; and whether there are
    /// more.
    pub fn page(
        &self,
        after: Option<&SandboxId>,
        limit: usize,
        wanted: impl Fn(&Status) -> bool,
    ) -> (Vec<Status>, bool) {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let register = self.inner.register.lock();
        let rest = register.by_id.range((from, Bound::Unbounded)).map(|(_, sandbox)| sandbox);
        let mut wanted = rest.filter(|sandbox| wanted(&sandbox.status.borrow()));
        let page = wanted.by_ref().take(limit).map(Sandbox::status).collect();
        (page, wanted.next().is_some())
    }

    pub fn sandboxes(&self) -> Vec<Sandbox> {
        self.inner.register.lock().by_id.values().cloned().collect()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.inner.register.lock().by_id.len()
    }

    pub async fn delete(&self, reference: &SandboxRef) -> Result<(), Error> {
        self.find(reference)?.delete().await;
        Ok(())
    }

    /// Status changes of all sandboxes, from now on.
    pub fn events(&self) -> broadcast::Receiver<Status> {
        self.inner.events.subscribe()
    }

    /// Of the default engine.
    pub fn about(&self) -> &About {
        self.inner.world.engines.default_engine().about()
    }

    /// As whom this daemon writes what is its node's.
    pub fn owner(&self) -> &Owner {
        &self.inner.world.owner
    }

    pub fn clock(&self) -> Clock {
        self.inner.world.clock
    }

    /// The daemon stops: nothing new is begun, and sandboxes are left as told.
    pub async fn shutdown(&self, mode: ShutdownMode) {
        *self.inner.world.shutdown_mode.lock() = mode;
        self.inner.world.stopping.cancel();
        // From now on no driver goes before its end.
        self.sandboxes().iter().for_each(|sandbox| sandbox.slot.close());
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
        self.empty_pools().await;
        self.inner.world.engines.close().await;
    }
}

impl Register {
    fn forget(&mut self, id: &SandboxId, name: Option<&Name>) {
        self.by_id.remove(id);
        if let Some(name) = name {
            self.by_name.remove(name);
        }
    }
}

/// Everything that is this owner's, oldest first.
async fn recorded(ledger: &dyn FleetLedger, owner: &Owner) -> Result<Vec<Record>, StoreError> {
    let page = |after: Option<SandboxId>| async move {
        ledger.sandboxes(owner, after.as_ref(), PAGE).await
    };
    let mut all = everything(page, |record| record.id.clone()).await?;
    all.sort_by(|a, b| (a.created_at_ms, &a.id).cmp(&(b.created_at_ms, &b.id)));
    Ok(all)
}

/// Records that are older than the choice of an engine have the one of their save, or the default.
async fn with_engines(
    mut records: Vec<Record>,
    engines: &Engines,
    saves: &dyn Saves,
) -> Result<Vec<Record>, StoreError> {
    if records.iter().all(|record| record.spec.engine.is_some()) {
        return Ok(records);
    }
    let by = saves.memory_saves().await?.into_iter().map(|save| (save.id, save.by.engine));
    let by: HashMap<_, _> = by.collect();
    for record in records.iter_mut().filter(|record| record.spec.engine.is_none()) {
        let saved_by = record.save.as_ref().and_then(|save| by.get(save));
        let default = engines.default_engine().about().kind;
        record.spec.engine = Some(saved_by.map_or(default, |engine| engine).to_owned());
    }
    Ok(records)
}

/// Whether the engine may have a machine that is worth keeping.
fn may_run(state: &PersistedState) -> bool {
    match state {
        PersistedState::Running | PersistedState::Standby { .. } => true,
        PersistedState::Created | PersistedState::Failed { .. } => false,
    }
}

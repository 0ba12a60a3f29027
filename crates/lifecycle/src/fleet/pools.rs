//! Pools: machines that are ready ahead, frozen, until a sandbox takes one.
//!
//! A machine in a pool has an id that no record has: a sandbox that takes it gets that id. So a
//! crash leaves machines that nobody knows, which the next start sweeps away.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::timeout;
use torpor_protocol::snapshot::Pool;
use torpor_protocol::{Name, SandboxId, SandboxSpec, SaveId, WorkFailure};

use super::Fleet;
use super::capacity::{MACHINE_MIB, Reservation, mib};
use crate::engine::Machine;
use crate::error::chain;
use crate::ledger::{PAGE, REFRESH, everything};
use crate::sandbox::Sandbox;
use crate::store::PoolRecord;
use crate::world::{Started, discard};
use crate::{Error, Refusal};

/// First and longest pause after a machine that could not be made ready.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// How long nobody may have taken a machine before it is replaced, unless most are gone: who takes one
/// needs the processors first.
const REFILL_AFTER: Duration = Duration::from_millis(100);

/// Versioned (see [`crate::ledger`]), with the machines that this node has ready.
#[derive(Default)]
pub(super) struct Pools(Mutex<BTreeMap<Name, Stock>>);

/// One pool.
struct Stock {
    record: PoolRecord,
    ready: VecDeque<Ready>,
    hits: u64,
    misses: u64,
    failure: Option<(WorkFailure, String)>,
    /// Rings when a machine was taken or the pool is to go.
    changed: Arc<Notify>,
}

/// A machine that only needs to be told who it is.
pub(super) struct Ready {
    pub(super) id: SandboxId,
    pub(super) machine: Box<dyn Machine>,
    /// The file of the image that it was booted from.
    pub(super) root: String,
    pool: Name,
}

impl Pools {
    /// A machine for a sandbox like this, if one is ready: of the pool that it is claimed from, or of
    /// any.
    pub(super) fn take(&self, spec: &SandboxSpec, save: Option<&SaveId>) -> Option<Ready> {
        let mut pools = self.0.lock();
        let of = |stock: &Stock| spec.pool.as_ref().is_none_or(|pool| stock.record.name == *pool);
        let stock = pools.values_mut().find(|stock| of(stock) && stock.fits(spec, save))?;
        let ready = stock.ready.pop_front();
        match ready {
            Some(_) => stock.hits += 1,
            None => stock.misses += 1,
        }
        stock.changed.notify_one();
        ready
    }

    /// It was not needed after all.
    pub(super) fn put_back(&self, ready: Option<Ready>) {
        let Some(ready) = ready else { return };
        let mut pools = self.0.lock();
        match pools.get_mut(&ready.pool) {
            Some(stock) => stock.ready.push_front(ready),
            None => drop(tokio::spawn(async move { discard(&ready.id, ready.machine).await })),
        }
    }
}

impl Stock {
    fn fits(&self, spec: &SandboxSpec, save: Option<&SaveId>) -> bool {
        let own = &self.record.spec;
        self.record.from.as_ref().map(|(_, save)| save) == save
            && own.image_id == spec.image_id
            && own.resources == spec.resources
            && own.network == spec.network
            && own.engine == spec.engine
    }

    fn show(&self, claimed: Vec<SandboxId>) -> Pool {
        let spec = &self.record.spec;
        Pool {
            name: self.record.name.clone(),
            size: self.record.size,
            ready: self.ready.len(),
            image: spec.image.clone(),
            snapshot: self.record.from.as_ref().map(|(snapshot, _)| snapshot.clone()),
            engine: spec.engine.clone(),
            resources: spec.resources,
            network: spec.network.clone(),
            max: self.record.max,
            claimed,
            ports: spec.ports.clone(),
            entrypoint: spec.entrypoint.clone(),
            lifetime: spec.lifetime,
            standby: spec.standby.clone(),
            created_at_ms: self.record.created_at_ms,
            updated_at_ms: self.record.updated_at_ms,
            hits: self.hits,
            misses: self.misses,
            reason: self.failure.as_ref().map(|(reason, _)| *reason),
            message: self.failure.as_ref().map(|(_, message)| message.clone()),
        }
    }
}

impl Fleet {
    pub(super) async fn recover_pools(&self) -> Result<(), Error> {
        self.recorded_pools().await?.into_iter().for_each(|record| self.open_pool(record));
        Ok(())
    }

    /// Decides which engine its machines have.
    async fn settle_pool(&self, record: PoolRecord) -> Result<PoolRecord, Error> {
        let world = &self.inner.world;
        let save = match &record.from {
            Some((_, save)) => Some(world.saves.materialize(save).await?),
            None => None,
        };
        let spec = world.engines.settle(record.spec.clone(), save.as_deref())?;
        Ok(PoolRecord { spec, ..record })
    }

    /// All pools of the ledger, by name.
    async fn recorded_pools(&self) -> Result<Vec<PoolRecord>, Error> {
        let ledger = &self.inner.world.ledger;
        let page = |after: Option<Name>| async move { ledger.pools(after.as_ref(), PAGE).await };
        let mut recorded = everything(page, |record: &PoolRecord| record.name.clone()).await?;
        // Those that are older than the choice of an engine; what can't be decided says why when it is filled.
        for record in recorded.iter_mut().filter(|record| record.spec.engine.is_none()) {
            if let Ok(settled) = self.settle_pool(record.clone()).await {
                *record = settled;
            }
        }
        Ok(recorded)
    }

    /// Learns what other nodes change, until the daemon stops.
    pub(super) async fn follow_pools(self) {
        let stopping = self.inner.world.stopping.clone();
        while stopping.run_until_cancelled(tokio::time::sleep(REFRESH)).await.is_some() {
            if let Err(error) = self.inner.pools_version.refresh(self.read_pools_again()).await {
                tracing::warn!(error = chain(&error), "pools not read again");
            }
        }
    }

    async fn read_pools_again(&self) -> Result<(), Error> {
        let recorded = self.recorded_pools().await?;
        let known: Vec<Name> = self.inner.pools.0.lock().keys().cloned().collect();
        for gone in known.iter().filter(|name| recorded.iter().all(|pool| pool.name != **name)) {
            self.close_pool(gone).await;
        }
        for record in recorded {
            match self.pool(&record.name) {
                Ok(before) if before == record => {}
                Ok(before) => self.change_pool(&before, record).await?,
                Err(_) => self.open_pool(record),
            }
        }
        Ok(())
    }

    /// When this returns it is recorded; it fills in the background.
    pub async fn create_pool(&self, record: PoolRecord) -> Result<(), Error> {
        let _writing = self.inner.pools_version.writing().await;
        let record = self.settle_pool(record).await?;
        let _room = self.reserve_pool(&record).await?;
        let created = self.inner.world.ledger.create_pool(&record).await;
        created.map_err(|error| error.or_taken(Refusal::PoolNameTaken))?;
        self.open_pool(record);
        Ok(())
    }

    /// Room for the machines that a pool is to have.
    async fn reserve_pool(&self, record: &PoolRecord) -> Result<Reservation, Error> {
        let each_mib = match &record.from {
            Some((_, save)) => mib(self.inner.world.saves.manifest(save).await?.size_bytes()),
            None => MACHINE_MIB,
        };
        Ok(self.reserve(record.size, each_mib.saturating_mul(record.size as u64)).await?)
    }

    fn open_pool(&self, record: PoolRecord) {
        let (name, changed) = (record.name.clone(), Arc::new(Notify::new()));
        let stock = Stock {
            record: record.clone(),
            ready: VecDeque::new(),
            hits: 0,
            misses: 0,
            failure: None,
            changed: Arc::clone(&changed),
        };
        self.inner.pools.0.lock().insert(name.clone(), stock);
        self.inner.tasks.spawn(self.clone().fill(name, changed));
    }

    pub fn pools(&self) -> Vec<Pool> {
        let mut claimed: BTreeMap<Name, Vec<SandboxId>> = BTreeMap::new();
        for sandbox in self.sandboxes() {
            if let Some(pool) = &sandbox.status.borrow().spec.pool {
                claimed.entry(pool.clone()).or_default().push(sandbox.id.clone());
            }
        }
        let pools = self.inner.pools.0.lock();
        let show =
            |(name, stock): (&Name, &Stock)| stock.show(claimed.remove(name).unwrap_or_default());
        pools.iter().map(show).collect()
    }

    /// What sandboxes of a pool are to be.
    pub fn pool(&self, name: &Name) -> Result<PoolRecord, Error> {
        let pools = self.inner.pools.0.lock();
        let stock = pools.get(name).ok_or_else(|| Refusal::NoSuchPool(name.clone()))?;
        Ok(stock.record.clone())
    }

    /// Whether one more sandbox may be claimed from it. Whoever asks holds `claiming`.
    pub(super) fn may_claim(&self, name: &Name) -> Result<(), Error> {
        let Some(max) = self.pool(name)?.max else { return Ok(()) };
        let of = |sandbox: &Sandbox| sandbox.status.borrow().spec.pool.as_ref() == Some(name);
        if self.sandboxes().iter().filter(|sandbox| of(sandbox)).count() < max {
            return Ok(());
        }
        Err(Refusal::PoolFull { pool: name.clone(), max }.into())
    }

    /// Makes a pool another one of the same name. Machines that do not fit any more end; sandboxes
    /// that were claimed from it stay.
    pub async fn update_pool(&self, record: PoolRecord) -> Result<(), Error> {
        let _writing = self.inner.pools_version.writing().await;
        let before = self.pool(&record.name)?;
        let record = self.settle_pool(record).await?;
        let _room = self.reserve_pool(&record).await?;
        if !self.inner.world.ledger.update_pool(&record).await? {
            return Err(Refusal::NoSuchPool(record.name).into());
        }
        self.change_pool(&before, record).await
    }

    async fn change_pool(&self, before: &PoolRecord, record: PoolRecord) -> Result<(), Error> {
        let surplus = {
            let mut pools = self.inner.pools.0.lock();
            let Some(stock) = pools.get_mut(&record.name) else {
                return Err(Refusal::NoSuchPool(record.name).into());
            };
            let save = record.from.as_ref().map(|(_, save)| save);
            let keep = if stock.fits(&record.spec, save) { record.size } else { 0 };
            stock.record = record;
            stock.failure = None;
            stock.changed.notify_one();
            stock.ready.split_off(keep.min(stock.ready.len()))
        };
        for ready in surplus {
            discard(&ready.id, ready.machine).await;
        }
        if let Some((_, save)) = &before.from {
            self.inner.world.saves.release(save).await;
        }
        Ok(())
    }

    /// Forgets the pool and ends its machines.
    pub async fn erase_pool(&self, name: &Name) -> Result<(), Error> {
        let _writing = self.inner.pools_version.writing().await;
        if !self.inner.world.ledger.erase_pool(name).await? {
            return Err(Refusal::NoSuchPool(name.clone()).into());
        }
        self.close_pool(name).await;
        Ok(())
    }

    async fn close_pool(&self, name: &Name) {
        let stock = self.inner.pools.0.lock().remove(name);
        let Some(stock) = stock else { return };
        stock.changed.notify_one();
        for ready in stock.ready {
            discard(&ready.id, ready.machine).await;
        }
        if let Some((_, save)) = &stock.record.from {
            self.inner.world.saves.release(save).await;
        }
    }

    /// Keeps one pool full until it or the daemon goes.
    async fn fill(self, name: Name, changed: Arc<Notify>) {
        let stopping = self.inner.world.stopping.clone();
        let mut again = AGAIN.0;
        while let Ok(record) = self.pool(&name) {
            let missing = self.missing(&name);
            let pause = if missing {
                // To its end also when the daemon stops: what is ready then is emptied with the pool.
                match self.prepare(&record).await {
                    Ok(()) => again = AGAIN.0,
                    Err(error) => self.note_failure(&name, &error),
                }
                self.failing(&name).then_some(again)
            } else {
                None
            };
            again = pause.map_or(again, |pause| (pause * 2).min(AGAIN.1));
            let rest = async {
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None if missing => {}
                    None => self.claimed(&name, &changed).await,
                }
            };
            tokio::select! {
                biased;
                () = stopping.cancelled() => return,
                () = rest => {}
            }
        }
    }

    /// Resolves when it is time to replace what was taken.
    async fn claimed(&self, name: &Name, changed: &Notify) {
        let plenty = || {
            let pools = self.inner.pools.0.lock();
            pools.get(name).is_some_and(|stock| stock.ready.len() * 2 > stock.record.size)
        };
        changed.notified().await;
        while plenty() && timeout(REFILL_AFTER, changed.notified()).await.is_ok() {}
    }

    fn failing(&self, name: &Name) -> bool {
        self.inner.pools.0.lock().get(name).is_some_and(|stock| stock.failure.is_some())
    }

    /// Whether the pool wants a machine.
    fn missing(&self, name: &Name) -> bool {
        let pools = self.inner.pools.0.lock();
        pools.get(name).is_some_and(|stock| stock.ready.len() < stock.record.size)
    }

    fn note_failure(&self, name: &Name, error: &Error) {
        let message = chain(error);
        tracing::warn!(pool = %name, reason = message, "a pool could not be filled");
        if let Some(stock) = self.inner.pools.0.lock().get_mut(name) {
            stock.failure = Some((error.as_failure(), message));
        }
    }

    /// Makes one machine ready and freezes it.
    async fn prepare(&self, record: &PoolRecord) -> Result<(), Error> {
        let world = &self.inner.world;
        let id = SandboxId::random();
        let save = match &record.from {
            Some((_, save)) => Some(world.saves.materialize(save).await?),
            None => None,
        };
        let Started { mut machine, guest, root, .. } =
            world.start(&id, &record.spec, save.as_deref(), true).await?;
        let paused = async {
            world.quiesce(&record.spec, &guest).await?;
            guest.sever().await;
            machine.pause().await?;
            Ok::<_, Error>(())
        };
        if let Err(error) = paused.await {
            discard(&id, machine).await;
            return Err(error);
        }
        let ready = Ready { id, machine, root, pool: record.name.clone() };
        let unwanted = {
            let mut pools = self.inner.pools.0.lock();
            match pools.get_mut(&record.name) {
                // It may have become another one meanwhile.
                Some(stock) if stock.record == *record => {
                    stock.failure = None;
                    stock.ready.push_back(ready);
                    None
                }
                Some(_) | None => Some(ready),
            }
        };
        if let Some(ready) = unwanted {
            discard(&ready.id, ready.machine).await;
        }
        Ok(())
    }

    /// The daemon stops: machines that nobody has end.
    pub(super) async fn empty_pools(&self) {
        let pools = std::mem::take(&mut *self.inner.pools.0.lock());
        for ready in pools.into_values().flat_map(|stock| stock.ready) {
            discard(&ready.id, ready.machine).await;
        }
    }
}

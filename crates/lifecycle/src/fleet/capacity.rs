//! Room for machines on this host. Running sandboxes and those that sleep in memory take some; cold ones
//! take none. When there is none left, whoever sleeps in memory and was unused longest leaves it; only
//! when nobody does, the newcomer is refused. The same happens while memory is scarce.
//!
//! Whoever starts a machine holds a [`Reservation`] until its sandbox counts by itself, so that two never
//! get the same room.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::MissedTickBehavior;
use torpor_protocol::{State, Status, Tier};

use super::{Fleet, Inner};
use crate::Refusal;
use crate::sandbox::{Request, Sandbox};

/// How long a sandbox may take to be saved and leave memory.
const DEMOTE_DEADLINE: Duration = Duration::from_secs(30);
/// Memory does not run out faster than sandboxes can be saved; a look costs two small reads.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// What the smallest machine needs: the engine's own kernel and the agent.
pub(super) const MACHINE_MIB: u64 = 20;

/// What the host says about its memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryReading {
    pub available_mib: u64,
    /// How much of the last ten seconds some process waited for memory; 0 if the kernel is silent.
    pub stalled_percent: f64,
}

/// Where readings come from.
pub trait MemoryGauge: Send + Sync + 'static {
    fn read(&self) -> MemoryReading;
}

impl<F: Fn() -> MemoryReading + Send + Sync + 'static> MemoryGauge for F {
    fn read(&self) -> MemoryReading {
        self()
    }
}

/// Why a sleeping sandbox has to leave memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Free memory is below the floor.
    Memory,
    /// Processes wait for memory.
    Stalls,
    /// Another sandbox needs its place.
    Room,
}

impl Cause {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Stalls => "stalls",
            Self::Room => "room",
        }
    }
}

/// Who counts what the fleet does.
pub trait Observer: Send + Sync + 'static {
    /// A request came to a sleeping sandbox and got in.
    fn waited(&self, from: Tier, took: Duration);
    fn demoted(&self, cause: Cause);
}

/// Counts nothing.
impl Observer for () {
    fn waited(&self, _from: Tier, _took: Duration) {}
    fn demoted(&self, _cause: Cause) {}
}

#[derive(Default)]
pub(super) struct Capacity {
    /// Machines that have their room and do not show in the register yet.
    reserved: Mutex<usize>,
    /// Held by who makes room: what one makes may be enough for the next.
    making: AsyncMutex<()>,
}

/// Room for machines that are about to start.
pub struct Reservation {
    fleet: Arc<Inner>,
    machines: usize,
}

impl Reservation {
    /// A part of it, for one machine.
    pub fn one(&mut self) -> Self {
        let machines = self.machines.min(1);
        self.machines -= machines;
        Self { fleet: Arc::clone(&self.fleet), machines }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        *self.fleet.capacity.reserved.lock() -= self.machines;
    }
}

impl Fleet {
    /// Room for so many machines that need so much memory together.
    pub(crate) async fn reserve(
        &self,
        machines: usize,
        needed_mib: u64,
    ) -> Result<Reservation, Refusal> {
        if machines == 0 {
            return Ok(self.nothing());
        }
        if let Ok(reservation) = self.try_reserve(machines, needed_mib) {
            return Ok(reservation);
        }
        let _one_at_a_time = self.inner.capacity.making.lock().await;
        loop {
            match self.try_reserve(machines, needed_mib) {
                Ok(reservation) => return Ok(reservation),
                Err(lack) => {
                    if !self.demote_least_used(Cause::Room).await {
                        return Err(lack);
                    }
                }
            }
        }
    }

    /// Room for the machine of a sandbox; one that counts already needs no more.
    pub(crate) async fn reserve_for(
        &self,
        status: &Status,
        needed_bytes: u64,
    ) -> Result<Reservation, Refusal> {
        if takes_memory(status) {
            return Ok(self.nothing());
        }
        self.reserve(1, mib(needed_bytes)).await
    }

    fn nothing(&self) -> Reservation {
        Reservation { fleet: Arc::clone(&self.inner), machines: 0 }
    }

    fn try_reserve(&self, machines: usize, needed_mib: u64) -> Result<Reservation, Refusal> {
        let mut reserved = self.inner.capacity.reserved.lock();
        if let Some(lack) = self.lack(*reserved + machines, machines, needed_mib) {
            return Err(lack);
        }
        *reserved += machines;
        Ok(Reservation { fleet: Arc::clone(&self.inner), machines })
    }

    /// What is missing for `starting` machines, `new` of which want this memory.
    fn lack(&self, starting: usize, new: usize, needed_mib: u64) -> Option<Refusal> {
        let allowed = self.inner.world.policy.sandboxes_max;
        // Usually there are so few that nobody has to be looked at.
        if self.count() + starting > allowed && self.present() + starting > allowed {
            return Some(Refusal::HostFull(allowed));
        }
        let free_mib = self.inner.gauge.read().available_mib;
        let asked_mib = needed_mib.max(MACHINE_MIB.saturating_mul(new as u64));
        (free_mib < asked_mib).then_some(Refusal::NoMemory { asked_mib, free_mib })
    }

    /// How many take memory of this host.
    fn present(&self) -> usize {
        self.survey(takes_memory).into_iter().filter(|present| *present).count()
    }

    /// Makes the sandbox that sleeps in memory and was unused longest leave it. `false`: there is none,
    /// or it can't.
    pub(crate) async fn demote_least_used(&self, cause: Cause) -> bool {
        let Some(eldest) = self.least_used() else { return false };
        eldest.tell(Request::Demote).await;
        self.inner.observer.demoted(cause);
        let mut status = eldest.watch();
        let left = status.wait_for(|status| status.tier != Some(Tier::Warm));
        if tokio::time::timeout(DEMOTE_DEADLINE, left).await.is_ok() {
            return true;
        }
        tracing::warn!(sandbox = %eldest.id, "not demoted within {DEMOTE_DEADLINE:?}");
        false
    }

    fn least_used(&self) -> Option<Sandbox> {
        let warm = |sandbox: &Sandbox| sandbox.status.borrow().tier == Some(Tier::Warm);
        let sleepers = self.sandboxes().into_iter().filter(warm);
        // One that could not be saved the last time would stand in the way of all others.
        let stuck = |sandbox: &Sandbox| sandbox.status.borrow().reason.is_some();
        sleepers.min_by_key(|sleeper| (stuck(sleeper), sleeper.gate.last_used_ms()))
    }

    /// Free memory falls before anything waits, so a floor comes first; on hosts whose memory is mostly
    /// file cache, processes may wait for it long before that, which the kernel's stall times tell.
    /// Lives until the daemon stops.
    pub(super) async fn watch_memory(self) {
        let stopping = self.inner.world.stopping.clone();
        let mut looks = tokio::time::interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let watch = async {
            loop {
                looks.tick().await;
                self.relieve().await;
            }
        };
        stopping.run_until_cancelled(watch).await;
    }

    /// One sandbox after another leaves memory, until there is relief or nobody left.
    pub(crate) async fn relieve(&self) {
        while let Some(cause) = self.pressure() {
            let demoted = self.demote_least_used(cause).await;
            match cause {
                Cause::Memory | Cause::Room if demoted => {}
                // The average of ten seconds needs a moment to show what has changed.
                Cause::Memory | Cause::Room | Cause::Stalls => return,
            }
        }
    }

    fn pressure(&self) -> Option<Cause> {
        let policy = &self.inner.world.policy;
        let reading = self.inner.gauge.read();
        if reading.available_mib < policy.memory_floor_mib {
            return Some(Cause::Memory);
        }
        let most = policy.stalled_percent_max.map(f64::from);
        most.is_some_and(|most| reading.stalled_percent > most).then_some(Cause::Stalls)
    }
}

/// Whether a sandbox takes memory of this host.
fn takes_memory(status: &Status) -> bool {
    match status.state {
        State::Creating => status.queued_until_ms.is_none(),
        State::Running => true,
        State::Asleep => status.tier == Some(Tier::Warm),
        State::Failed | State::Terminated => false,
    }
}

pub(super) fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1024 * 1024)
}

//! The task that owns one sandbox: one function per phase, its return value is the next phase.
//!
//! A phase owns what is alive in it, so code without a machine can't talk to one. Requests that come
//! while a transition is under way wait in the inbox, so a thousand callers cause one start. Deletion
//! is a token that every phase watches, so that a stuck start can be deleted.
//!
//! ```text
//!  mod.rs     phases, events, what is published
//!  begin.rs   creating, adopting, failing, deleting
//!  awake.rs   running, falling asleep
//!  asleep.rs  warm, cold, waking
//!  request.rs what becomes of a request
//!  save.rs    making a machine durable
//!  mounts.rs  volumes that come and go while it is awake
//!  change.rs  what can be changed while it lives; what its processes said
//! ```

mod asleep;
mod awake;
pub(crate) mod begin;
mod change;
mod mounts;
pub(crate) mod request;
mod save;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use torpor_protocol::guest::HeldPath;
use torpor_protocol::snapshot::SavedProcess;
use torpor_protocol::{
    EndReason, FailureReason, Lifetime, LossReason, State, Status, StatusReason, Tier,
};

use crate::Error;
use crate::clock::Clock;
use crate::engine::Machine;
use crate::error::chain;
use crate::fleet::{DriverState, Fleet, Reservation};
use crate::lease::Gate;
use crate::mounts::Mounted;
use crate::sandbox::{Request, Sandbox};
use crate::store::{PersistedState, Record};
use crate::world::World;

/// How often the ledger learns when a sandbox was last used: what a crash may forget of it.
const LAST_USE_EVERY: Duration = Duration::from_secs(60);

pub(crate) struct Driver {
    pub(crate) fleet: Fleet,
    pub(crate) world: Arc<World>,
    pub(crate) record: Record,
    pub(crate) inbox: mpsc::Receiver<Request>,
    /// Taken out of the inbox and not answered yet.
    pub(crate) backlog: VecDeque<Request>,
    pub(crate) status: watch::Sender<Status>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) delete: CancellationToken,
    /// When it last began to run with the gate open.
    pub(crate) entered: Instant,
    /// Its agent may not know yet the CA certificates and variables that everybody inside is to have.
    pub(crate) ca_dirty: bool,
    /// The volumes of its machine, mounted on this host.
    pub(crate) mounts: Vec<Mounted>,
}

/// Where the sandbox stands, with what is alive there.
pub(crate) enum Phase {
    Creating,
    /// There was no room for it on this host.
    Queued {
        until_ms: u64,
    },
    /// It gets a machine that was ready ahead and is paused.
    Claiming(Box<dyn Machine>),
    Adopting,
    Running(Box<dyn Machine>),
    /// Frozen in memory.
    Warm(Sleeper),
    /// On disk only, and how it got there if nobody asked for it.
    Cold(Option<StatusReason>),
    /// Cold, and everybody knows.
    Dormant,
    /// Dormant, and nobody wants anything of it.
    Unwanted,
    /// It is brought back from its save; whoever asked for it waits.
    Waking {
        waiters: Vec<Request>,
        /// For its machine, if that was made before.
        room: Option<Reservation>,
    },
    /// Its machine is gone and was not asked to go.
    Lost(LossReason),
    Failed(FailureReason),
    Deleting {
        machine: Option<Box<dyn Machine>>,
        reason: Option<EndReason>,
    },
    Deleted(Option<EndReason>),
    /// The daemon stops; the machine, if any, goes on without it.
    Left,
}

/// A machine that is frozen.
pub(crate) struct Sleeper {
    machine: Box<dyn Machine>,
    /// Its save is all of it.
    durable: bool,
    since: Instant,
    /// Not saved before: after a failure it is tried again later.
    save_at: Instant,
    /// What was stopped inside, if the engine does not know.
    processes: Vec<SavedProcess>,
    /// What they hold of volumes.
    held: Vec<HeldPath>,
}

/// How the work of a driver ends.
pub(crate) enum End {
    /// For the time being: it has nothing to do.
    Unwanted(Box<Driver>),
    /// The sandbox is gone or the daemon stops. The closing of the inbox tells whoever waits for the
    /// deletion that all is done, so it must come last.
    Over(mpsc::Receiver<Request>),
}

/// Everything that can happen to a sandbox that has no transition under way.
enum Event {
    Asked(Request),
    Exited(String),
    AgentGone,
    Expired(EndReason),
    Idle,
    NoteLastUse,
    Delete,
    Stop,
}

impl Phase {
    fn waking(waiters: Vec<Request>) -> Self {
        Self::Waking { waiters, room: None }
    }
}

impl Driver {
    /// Takes a sandbox over, and says in which phase it is.
    pub(crate) fn new(
        fleet: Fleet,
        world: Arc<World>,
        sandbox: &Sandbox,
        state: DriverState,
        inbox: mpsc::Receiver<Request>,
    ) -> (Box<Self>, Phase) {
        let DriverState { record, status, ca_dirty, phase, .. } = state;
        let driver = Self {
            fleet,
            world,
            record,
            inbox,
            backlog: VecDeque::new(),
            status,
            gate: Arc::clone(&sandbox.gate),
            delete: sandbox.delete.clone(),
            entered: Instant::now(),
            ca_dirty,
            mounts: Vec::new(),
        };
        (Box::new(driver), phase)
    }

    /// What the next driver of a dormant sandbox takes over.
    pub(crate) fn into_state(self) -> DriverState {
        let Self { record, status, ca_dirty, .. } = self;
        DriverState { record, status, ca_dirty, phase: Phase::Dormant }
    }

    pub(crate) async fn run(mut self: Box<Self>, mut phase: Phase) -> End {
        loop {
            phase = match phase {
                Phase::Creating => self.creating().await,
                Phase::Queued { until_ms } => self.queued(until_ms).await,
                Phase::Claiming(machine) => self.claiming(machine).await,
                Phase::Adopting => self.adopting().await,
                Phase::Running(machine) => self.running(machine).await,
                Phase::Warm(sleeper) => self.warm(sleeper).await,
                Phase::Cold(reason) => self.cold(reason).await,
                Phase::Dormant => self.dormant().await,
                Phase::Unwanted => return End::Unwanted(self),
                Phase::Waking { waiters, room } => self.waking(waiters, room).await,
                Phase::Lost(loss) => self.lost(loss).await,
                Phase::Failed(reason) => self.failed(reason).await,
                Phase::Deleting { machine, reason } => self.deleting(machine, reason).await,
                Phase::Deleted(reason) => {
                    self.publish(State::Terminated, reason.map(StatusReason::Ended));
                    return End::Over(self.inbox);
                }
                Phase::Left => return End::Over(self.inbox),
            };
        }
    }

    // === What happens next ===

    /// `idle_after`: when want of use is an event.
    async fn next_event(
        &mut self,
        machine: Option<&mut Box<dyn Machine>>,
        idle_after: Option<Duration>,
    ) -> Event {
        let exited = async {
            match machine {
                Some(machine) => machine.exited().await,
                None => std::future::pending().await,
            }
        };
        let agent_gone = async {
            match self.gate.guest() {
                Some(guest) => guest.gone().await,
                None => std::future::pending().await,
            }
        };
        let idle = async {
            match idle_after {
                Some(long) => self.gate.idle_for(long).await,
                None => std::future::pending().await,
            }
        };
        if let Some(request) = self.backlog.pop_front() {
            return Event::Asked(request);
        }
        let expiry = expiry(&self.record, &self.world.clock, &self.gate);
        tokio::select! {
            biased;
            () = self.delete.cancelled() => Event::Delete,
            () = self.world.stopping.cancelled() => Event::Stop,
            reason = exited => Event::Exited(reason),
            () = agent_gone => Event::AgentGone,
            Some(request) = self.inbox.recv() => Event::Asked(request),
            reason = expiry => Event::Expired(reason),
            () = idle => Event::Idle,
            () = tokio::time::sleep(LAST_USE_EVERY) => Event::NoteLastUse,
        }
    }

    /// Whether there is nothing to do for one that is cold. The fleet has a way to the inbox; whoever
    /// else has one is about to ask.
    pub(crate) fn is_unwanted(&self) -> bool {
        let asked = !self.backlog.is_empty()
            || !self.inbox.is_empty()
            || self.inbox.sender_strong_count() > 1;
        let over = self.delete.is_cancelled() || self.world.stopping.is_cancelled();
        !asked && !over && self.time_left().is_none_or(|left| !left.is_zero())
    }

    /// Until it expires, if nobody uses it.
    pub(crate) fn time_left(&self) -> Option<Duration> {
        let Lifetime { max_age_ms, expire_idle_ms, expires_at_ms } = self.record.spec.lifetime;
        let after = |ms: Option<u64>, from_ms: u64| ms.map(|ms| from_ms.saturating_add(ms));
        let ends = [
            after(max_age_ms, self.record.created_at_ms),
            after(expire_idle_ms, self.gate.last_used_ms()),
            expires_at_ms,
        ];
        ends.into_iter().flatten().min().map(|at_ms| self.world.clock.until(at_ms))
    }

    // === What every phase can do ===

    /// Records and remembers; on `Err` nothing changed.
    async fn write(&mut self, record: Record) -> Result<(), Error> {
        self.world.record(&record).await?;
        self.record = record;
        Ok(())
    }

    async fn note_last_use(&mut self) {
        let last_used_at_ms = self.gate.last_used_ms();
        if last_used_at_ms == self.record.last_used_at_ms {
            return;
        }
        let record = Record { last_used_at_ms, ..self.record.clone() };
        if let Err(error) = self.write(record).await {
            tracing::warn!(sandbox = %self.record.id, error = chain(&error), "could not record");
        }
    }

    /// Writes the state to the ledger; a failure is logged, as the caller can do nothing about it.
    async fn record_state(&mut self, state: PersistedState) {
        let record = Record { state, ..self.record.clone() };
        if let Err(error) = self.write(record).await {
            tracing::error!(sandbox = %self.record.id, error = chain(&error), "could not record");
        }
    }

    // === What everybody sees ===

    fn publish(&self, state: State, reason: Option<StatusReason>) {
        self.publish_as(state, None, false, reason);
    }

    fn publish_as(
        &self,
        state: State,
        tier: Option<Tier>,
        durable: bool,
        reason: Option<StatusReason>,
    ) {
        let message = reason.as_ref().map(ToString::to_string);
        let (id, tier_text) = (&self.record.id, tier.map(Tier::as_str));
        tracing::info!(sandbox = %id, state = state.as_str(), tier = tier_text, reason = message, "sandbox status");
        self.status.send_modify(|status| {
            status.state = state;
            status.tier = tier;
            status.durable = durable;
            status.reason = reason.as_ref().map(StatusReason::code);
            status.message = message;
            show(status, &self.record);
        });
    }

    /// The record changed, the state did not.
    fn republish(&self) {
        self.status.send_modify(|status| show(status, &self.record));
    }
}

fn show(status: &mut Status, record: &Record) {
    status.spec = record.spec.clone();
    status.wakes = record.facts.wakes;
    status.recovered_from_ms = record.facts.recovered_from_ms;
    status.parent.clone_from(&record.facts.parent);
    status.queued_until_ms = record.facts.queued_until_ms;
    status.generation += 1;
}

/// Resolves with the reason when the sandbox's time is up.
async fn expiry(record: &Record, clock: &Clock, gate: &Gate) -> EndReason {
    let lifetime = record.spec.lifetime;
    let by_age = lifetime.max_age_ms.map(|ms| record.created_at_ms.saturating_add(ms));
    let at = async |at_ms: Option<u64>| match at_ms {
        Some(at_ms) => tokio::time::sleep(clock.until(at_ms)).await,
        None => std::future::pending().await,
    };
    let idle = async {
        match lifetime.expire_idle_ms {
            Some(ms) => gate.idle_for(Duration::from_millis(ms)).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = at(by_age) => EndReason::MaxAge,
        () = at(lifetime.expires_at_ms) => EndReason::Expired,
        () = idle => EndReason::Idle,
    }
}

/// The first status of a sandbox.
pub(crate) fn first_status(record: &Record) -> Status {
    Status {
        id: record.id.clone(),
        spec: record.spec.clone(),
        state: State::Creating,
        reason: None,
        message: None,
        generation: 0,
        created_at_ms: record.created_at_ms,
        last_used_at_ms: record.last_used_at_ms,
        tier: None,
        durable: false,
        saved_bytes: 0,
        wakes: record.facts.wakes,
        recovered_from_ms: record.facts.recovered_from_ms,
        parent: record.facts.parent.clone(),
        queued_until_ms: record.facts.queued_until_ms,
        start_steps: Vec::new(),
    }
}

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
//!  save.rs    making a machine durable
//!  change.rs  what can be changed while it lives; what its processes said
//! ```

mod asleep;
mod awake;
pub(crate) mod begin;
mod change;
mod save;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use torpor_protocol::snapshot::SavedProcess;
use torpor_protocol::{State, Status, Tier};

use crate::Error;
use crate::clock::Clock;
use crate::engine::Machine;
use crate::error::chain;
use crate::lease::Door;
use crate::sandbox::{Reply, Request};
use crate::store::{Record, Rest};
use crate::world::World;

/// How often the ledger learns when a sandbox was last used: what a crash may forget of it.
const LAST_USE_EVERY: Duration = Duration::from_secs(60);

pub(crate) struct Driver {
    pub(crate) world: Arc<World>,
    pub(crate) record: Record,
    pub(crate) inbox: mpsc::Receiver<Request>,
    /// Taken out of the inbox and not answered yet.
    pub(crate) backlog: VecDeque<Request>,
    pub(crate) status: watch::Sender<Status>,
    pub(crate) door: Arc<Door>,
    pub(crate) delete: CancellationToken,
    /// When it last began to run with the door open.
    pub(crate) entered: Instant,
    /// Its agent may not know yet whom everybody inside is to trust.
    pub(crate) untold: bool,
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
    /// On disk only. `reason`: what people should know of how it got there.
    Cold {
        reason: Option<String>,
    },
    /// It is brought back from its save; whoever asked for it waits.
    Waking(Vec<Waiter>),
    /// Its machine is gone and was not asked to go.
    Lost {
        reason: String,
    },
    Failed {
        reason: String,
    },
    Deleting {
        machine: Option<Box<dyn Machine>>,
        reason: Option<String>,
    },
    Deleted {
        reason: Option<String>,
    },
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
}

/// Somebody who waits until the sandbox runs.
pub(crate) enum Waiter {
    Lease(Reply<crate::Lease>),
    Word(Reply<()>),
}

/// Everything that can happen to a sandbox that has no transition under way.
enum Event {
    Asked(Request),
    Exited(String),
    AgentGone,
    Expired(&'static str),
    Idle,
    NoteLastUse,
    Delete,
    Stop,
}

impl Driver {
    /// Lives until the sandbox is gone or the daemon stops. Gives back the inbox: its closing tells
    /// whoever waits for the deletion that all is done, so it must come last.
    pub(crate) async fn run(mut self, mut phase: Phase) -> mpsc::Receiver<Request> {
        loop {
            phase = match phase {
                Phase::Creating => self.creating().await,
                Phase::Queued { until_ms } => self.queued(until_ms).await,
                Phase::Claiming(machine) => self.claiming(machine).await,
                Phase::Adopting => self.adopting().await,
                Phase::Running(machine) => self.running(machine).await,
                Phase::Warm(sleeper) => self.warm(sleeper).await,
                Phase::Cold { reason } => self.cold(reason).await,
                Phase::Waking(waiters) => self.waking(waiters).await,
                Phase::Lost { reason } => self.lost(reason).await,
                Phase::Failed { reason } => self.failed(reason).await,
                Phase::Deleting { machine, reason } => self.deleting(machine, reason).await,
                Phase::Deleted { reason } => {
                    self.publish(State::Terminated, reason);
                    return self.inbox;
                }
                Phase::Left => return self.inbox,
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
            match self.door.guest() {
                Some(guest) => guest.gone().await,
                None => std::future::pending().await,
            }
        };
        let idle = async {
            match idle_after {
                Some(long) => self.door.idle_for(long).await,
                None => std::future::pending().await,
            }
        };
        if let Some(request) = self.backlog.pop_front() {
            return Event::Asked(request);
        }
        let expiry = expiry(&self.record, &self.world.clock, &self.door);
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

    // === What every phase can do ===

    /// Records and remembers; on `Err` nothing changed.
    async fn write(&mut self, record: Record) -> Result<(), Error> {
        self.world.ledger.record(&record).await?;
        self.record = record;
        Ok(())
    }

    async fn note_last_use(&mut self) {
        let last_used_at_ms = self.door.last_used_ms();
        if last_used_at_ms == self.record.last_used_at_ms {
            return;
        }
        let record = Record { last_used_at_ms, ..self.record.clone() };
        if let Err(error) = self.write(record).await {
            tracing::warn!(sandbox = %self.record.id, error = chain(&error), "could not record");
        }
    }

    /// Notes in the ledger where it rests; a failure is logged, as the caller can do nothing about it.
    async fn rest(&mut self, rest: Rest) {
        let record = Record { rest, ..self.record.clone() };
        if let Err(error) = self.write(record).await {
            tracing::error!(sandbox = %self.record.id, error = chain(&error), "could not record");
        }
    }

    // === What everybody sees ===

    fn publish(&self, state: State, reason: Option<String>) {
        self.publish_as(state, None, false, reason);
    }

    fn publish_as(&self, state: State, tier: Option<Tier>, durable: bool, reason: Option<String>) {
        let id = &self.record.id;
        let tier_text = tier.map(Tier::as_str);
        tracing::info!(sandbox = %id, state = state.as_str(), tier = tier_text, reason, "sandbox status");
        self.status.send_modify(|status| {
            status.state = state;
            status.tier = tier;
            status.durable = durable;
            status.reason = reason;
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
async fn expiry(record: &Record, clock: &Clock, door: &Door) -> &'static str {
    let lifetime = record.spec.lifetime;
    let by_age = lifetime
        .max_age_secs
        .map(|secs| record.created_at_ms.saturating_add(secs.saturating_mul(1000)));
    let at = async |at_ms: Option<u64>| match at_ms {
        Some(at_ms) => tokio::time::sleep(clock.until(at_ms)).await,
        None => std::future::pending().await,
    };
    let idle = async {
        match lifetime.expire_idle_secs {
            Some(secs) => door.idle_for(Duration::from_secs(secs)).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = at(by_age) => "it reached its maximum age",
        () = at(lifetime.expire_at.map(|secs| secs.saturating_mul(1000))) => "it reached its date",
        () = idle => "nobody used it for its idle time",
    }
}

/// The first status of a sandbox.
pub(crate) fn first_status(record: &Record, engine: &str) -> Status {
    Status {
        id: record.id.clone(),
        spec: record.spec.clone(),
        state: State::Creating,
        reason: None,
        generation: 0,
        created_at_ms: record.created_at_ms,
        last_used_at_ms: record.last_used_at_ms,
        engine: engine.to_owned(),
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

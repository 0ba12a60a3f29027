//! While it sleeps, and how it wakes.

use tokio::time::Instant;
use torpor_protocol::{LossReason, State, StatusReason, Tier};

use super::{Driver, Event, Phase, Sleeper, Waiter};
use crate::engine::{BootPlan, Machine};
use crate::error::chain;
use crate::sandbox::{Reply, Request};
use crate::store::{PersistedState, Record, StoreError};
use crate::world::{ShutdownMode, Started, discard, resume, run_hook};
use crate::{Error, Refusal, fault};

/// What a sleeping sandbox wakes up to, besides requests.
enum Alarm {
    Event(Event),
    Save,
    LeaveMemory,
}

impl Driver {
    // === Warm ===

    pub(super) async fn warm(&mut self, mut sleeper: Sleeper) -> Phase {
        self.gate.measure(Some(sleeper.machine.meter()));
        self.publish_as(State::Asleep, Some(Tier::Warm), sleeper.durable, None);
        loop {
            match self.next_alarm(&mut sleeper).await {
                Alarm::Save => {
                    // Logged; it is tried again at the next `save_at`.
                    let _ = self.make_durable(&mut sleeper, false).await;
                }
                Alarm::LeaveMemory => return self.leave_memory(sleeper).await,
                Alarm::Event(Event::Asked(request)) => {
                    match self.asked_warm(sleeper, request).await {
                        Ok(still) => sleeper = still,
                        Err(phase) => return phase,
                    }
                }
                Alarm::Event(Event::Exited(reason)) => {
                    discard(&self.record.id, sleeper.machine).await;
                    if sleeper.durable {
                        tracing::warn!(sandbox = %self.record.id, reason, "lost from memory");
                        return Phase::Cold(None);
                    }
                    return Phase::Lost(LossReason::Exited(reason));
                }
                Alarm::Event(Event::Expired(reason)) => {
                    let (machine, reason) = (Some(sleeper.machine), Some(reason));
                    return Phase::Deleting { machine, reason };
                }
                Alarm::Event(Event::Delete) => {
                    return Phase::Deleting { machine: Some(sleeper.machine), reason: None };
                }
                Alarm::Event(Event::Stop) => return self.stopping_asleep(sleeper, false).await,
                Alarm::Event(Event::AgentGone | Event::Idle | Event::NoteLastUse) => {}
            }
        }
    }

    async fn next_alarm(&mut self, sleeper: &mut Sleeper) -> Alarm {
        let save_at = (!sleeper.durable).then_some(sleeper.save_at);
        let leave_at = sleeper.since.checked_add(self.world.policy.warm_for);
        let at = async |at: Option<Instant>| match at {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        };
        tokio::select! {
            biased;
            event = self.next_event(Some(&mut sleeper.machine), None) => Alarm::Event(event),
            () = at(save_at) => Alarm::Save,
            () = at(leave_at) => Alarm::LeaveMemory,
        }
    }

    /// `Err` is the next phase.
    async fn asked_warm(&mut self, sleeper: Sleeper, asked: Request) -> Result<Sleeper, Phase> {
        let mut sleeper = sleeper;
        match asked {
            Request::Awake(reply) => {
                let Some(waiter) = self.may_wake(reply) else { return Ok(sleeper) };
                return Err(self.thaw(sleeper, vec![waiter]).await);
            }
            Request::Wake(reply) => {
                return Err(self.thaw(sleeper, vec![Waiter::Word(reply)]).await);
            }
            Request::Sleep { cold, reply } => {
                let saved = self.make_durable(&mut sleeper, false).await;
                let saved = saved.map(drop);
                if cold && saved.is_ok() {
                    let phase = self.demote(sleeper).await;
                    let _ = reply.send(saved);
                    return Err(phase);
                }
                let _ = reply.send(saved);
            }
            Request::SuspendEarly => {}
            Request::Demote => return Err(self.leave_memory(sleeper).await),
            Request::Save(reply) => {
                let _ = reply.send(self.make_durable(&mut sleeper, false).await);
            }
            Request::Restore(back) => {
                let phase = self.restore(Some(sleeper.machine), back).await;
                // Not recorded: the machine was not touched.
                return Err(phase.unwrap_or(Phase::Adopting));
            }
            Request::Update(update, reply) => {
                self.update(update, Some(&mut sleeper.machine), reply).await;
            }
            Request::Lines(reply) => {
                let _ = reply.send(Ok(()));
            }
            Request::Replace { reply, .. } => {
                let _ = reply.send(Ok(false));
            }
            Request::Parent(parent, reply) => self.note_parent(parent, reply).await,
        }
        Ok(sleeper)
    }

    /// Memory is wanted, or it slept for long. What can't be saved stays.
    async fn leave_memory(&mut self, mut sleeper: Sleeper) -> Phase {
        match self.make_durable(&mut sleeper, false).await {
            Ok(_) => self.demote(sleeper).await,
            Err(_) => {
                // Anew, or the alarm would ring again at once.
                sleeper.since = Instant::now();
                Phase::Warm(sleeper)
            }
        }
    }

    /// Its save is all of it, so the machine may go.
    pub(super) async fn demote(&mut self, sleeper: Sleeper) -> Phase {
        debug_assert!(sleeper.durable, "commit, then kill");
        fault::point("demote.begun");
        discard(&self.record.id, sleeper.machine).await;
        fault::point("demote.killed");
        // Before anybody who waits for the sleep is told: they look at once.
        self.publish_as(State::Asleep, Some(Tier::Cold), true, None);
        Phase::Cold(None)
    }

    /// The daemon stops. `awake`: it did not sleep, so the next daemon wakes it.
    pub(super) async fn stopping_asleep(&mut self, mut sleeper: Sleeper, awake: bool) -> Phase {
        if *self.world.shutdown_mode.lock() == ShutdownMode::Running {
            return Phase::Left;
        }
        match self.make_durable(&mut sleeper, awake).await {
            Ok(_) => {
                let _ = self.demote(sleeper).await;
            }
            // Only the machine has all of it: it stays, and goes on if it did not sleep.
            Err(_) if awake => {
                if let Ok(guest) = resume(&mut sleeper.machine).await {
                    let _ = self.world.unquiesce(&self.record.spec, &guest).await;
                }
            }
            Err(_) => {}
        }
        Phase::Left
    }

    /// Lets a frozen machine go on. If it does not come back, its save does, if it is all of it.
    pub(super) async fn thaw(&mut self, sleeper: Sleeper, waiters: Vec<Waiter>) -> Phase {
        let Sleeper { mut machine, durable, .. } = sleeper;
        fault::point("thaw.begun");
        let mut running = self.record.clone();
        running.state = PersistedState::Running;
        running.facts.wakes += 1;
        // What it does from now on is not in its save: the ledger must say so before anybody gets in.
        let recorded = async {
            if self.record.state == PersistedState::Running {
                return Ok(());
            }
            self.world.record(&running).await
        };
        let resumed = self.world.in_turn(async {
            let guest = resume(&mut machine).await?;
            self.world.unquiesce(&self.record.spec, &guest).await?;
            Ok(guest)
        });
        let (resumed, recorded) = tokio::join!(resumed, recorded);
        if let Err(error @ StoreError::NotOwner(_)) = recorded {
            return self.let_go(machine, error, waiters).await;
        }
        let woken = recorded.map_err(Error::from).and(resumed);
        match woken {
            Ok(guest) => {
                fault::point("thaw.greeted");
                self.renew_identity(&guest).await;
                self.record = running;
                let hooks = &self.record.spec.standby.hooks;
                let (id, command) = (&self.record.id, &hooks.after_wake);
                run_hook(id, &guest, "after_wake", command, hooks.grace_ms).await;
                self.status.send_modify(|status| status.start_steps.clear());
                let phase = self.enter(machine, guest);
                self.let_in(waiters);
                phase
            }
            Err(error) => self.did_not_thaw(machine, durable, error, waiters).await,
        }
    }

    /// It is somebody else's, machine included: that goes back to how its owner knows it.
    async fn let_go(
        &mut self,
        mut machine: Box<dyn Machine>,
        error: StoreError,
        waiters: Vec<Waiter>,
    ) -> Phase {
        let frozen = machine.pause().await.is_ok();
        tracing::error!(sandbox = %self.record.id, error = chain(&error), frozen, "let go of it");
        self.refuse(waiters, error.into());
        Phase::Left
    }

    async fn did_not_thaw(
        &mut self,
        machine: Box<dyn Machine>,
        durable: bool,
        error: Error,
        waiters: Vec<Waiter>,
    ) -> Phase {
        tracing::error!(sandbox = %self.record.id, error = chain(&error), "resume failed");
        discard(&self.record.id, machine).await;
        if durable {
            self.record_state(PersistedState::Standby { interrupted: false }).await;
            return Phase::Waking(waiters);
        }
        let cause = chain(&error);
        self.turn_away(waiters, &cause);
        Phase::Lost(LossReason::NoAnswer(cause))
    }

    // === Cold ===

    pub(super) async fn cold(&mut self, reason: Option<StatusReason>) -> Phase {
        self.gate.measure(None);
        let told = { self.status.borrow().tier == Some(Tier::Cold) } && reason.is_none();
        if !told {
            self.publish_as(State::Asleep, Some(Tier::Cold), true, reason);
        }
        self.expect_wake().await;
        Phase::Dormant
    }

    /// Until somebody wants something of it, or nobody does.
    pub(super) async fn dormant(&mut self) -> Phase {
        loop {
            if self.is_unwanted() {
                return Phase::Unwanted;
            }
            match self.next_event(None, None).await {
                Event::Asked(Request::Awake(reply)) => {
                    if let Some(waiter) = self.may_wake(reply) {
                        return Phase::Waking(vec![waiter]);
                    }
                }
                Event::Asked(Request::Wake(reply)) => {
                    return Phase::Waking(vec![Waiter::Word(reply)]);
                }
                Event::Asked(Request::Sleep { reply, .. }) => {
                    let _ = reply.send(Ok(()));
                }
                Event::Asked(Request::Save(reply)) => {
                    let _ = reply.send(self.saved().await);
                }
                Event::Asked(Request::Restore(back)) => {
                    if let Some(phase) = self.restore(None, back).await {
                        return phase;
                    }
                }
                Event::Asked(Request::Replace { of, with, reply }) => {
                    let _ = reply.send(self.replace_save(&of, &with).await);
                }
                Event::Asked(Request::Update(update, reply)) => {
                    self.update(update, None, reply).await;
                }
                Event::Asked(Request::Lines(reply)) => {
                    let _ = reply.send(Ok(()));
                }
                Event::Asked(Request::Parent(parent, reply)) => {
                    self.note_parent(parent, reply).await;
                }
                Event::Expired(reason) => {
                    return Phase::Deleting { machine: None, reason: Some(reason) };
                }
                Event::Delete => return Phase::Deleting { machine: None, reason: None },
                Event::Stop => return Phase::Left,
                Event::Asked(Request::SuspendEarly | Request::Demote)
                | Event::NoteLastUse
                | Event::Exited(_)
                | Event::AgentGone
                | Event::Idle => {}
            }
        }
    }

    /// Lets the engine prepare for a machine like its last.
    async fn expect_wake(&self) {
        let Record { id, spec, facts, .. } = self.record.clone();
        let (images, image) = (&self.world.images, &spec.image_id);
        let root = match &facts.root {
            Some(file) => images.root_file(image, file).await,
            None => images.root(image).await,
        };
        // Whoever wakes it hears what is wrong with the image.
        if let (Ok(root), Ok(engine)) = (root, self.world.engines.of(&self.record.spec)) {
            engine.expect(&BootPlan { id, spec, root: root.path });
        }
    }

    /// Brings it back from its save. If that fails it sleeps on: nothing is lost.
    pub(super) async fn waking(&mut self, waiters: Vec<Waiter>) -> Phase {
        let (delete, stopping) = (self.delete.clone(), self.world.stopping.clone());
        let started = tokio::select! {
            biased;
            () = delete.cancelled() => None,
            () = stopping.cancelled() => None,
            started = self.revive() => Some(started),
        };
        match started {
            None => self.give_up_start().await,
            Some(Ok(started)) => {
                let phase = self.opened(started).await;
                self.let_in(waiters);
                phase
            }
            Some(Err(error)) => {
                let cause = chain(&error);
                tracing::warn!(sandbox = %self.record.id, cause, "could not wake");
                // Also if it failed after the ledger said that it runs.
                if self.record.state != (PersistedState::Standby { interrupted: false }) {
                    self.record_state(PersistedState::Standby { interrupted: false }).await;
                }
                self.refuse(waiters, error);
                Phase::Cold(Some(StatusReason::WakeFailed { cause }))
            }
        }
    }

    async fn revive(&mut self) -> Result<Started, Error> {
        let save = self.open_save().await?;
        let (world, Record { id, spec, .. }) = (self.world.clone(), self.record.clone());
        // Unborn: it was restored to a snapshot, which may be somebody else's.
        let afresh = self.record.state == PersistedState::Created;
        let started = world.start(&id, &spec, save.as_deref(), afresh).await?;
        self.record.facts.wakes += 1;
        self.note_running(started).await
    }

    // === Who waits ===

    /// Refuses unless requests may wake it.
    fn may_wake(&self, reply: Reply<crate::Lease>) -> Option<Waiter> {
        if self.record.spec.standby.auto_wake {
            return Some(Waiter::Lease(reply));
        }
        let _ = reply.send(Err(Refusal::Asleep(self.record.id.to_string()).into()));
        None
    }

    fn let_in(&self, waiters: Vec<Waiter>) {
        let over = || Error::from(Refusal::Terminated(self.record.id.to_string()));
        for waiter in waiters {
            match waiter {
                Waiter::Lease(reply) => {
                    let _ = reply.send(self.gate.enter().ok_or_else(over));
                }
                Waiter::Word(reply) => {
                    let _ = reply.send(Ok(()));
                }
            }
        }
    }

    /// The first who waits gets the error itself; all others, also those in the inbox, its text:
    /// they asked for the wake that failed.
    fn refuse(&mut self, mut waiters: Vec<Waiter>, error: Error) {
        let cause = chain(&error);
        while let Ok(request) = self.inbox.try_recv() {
            match request {
                Request::Awake(reply) => waiters.push(Waiter::Lease(reply)),
                Request::Wake(reply) => waiters.push(Waiter::Word(reply)),
                other @ (Request::Sleep { .. }
                | Request::SuspendEarly
                | Request::Demote
                | Request::Update(..)
                | Request::Save(_)
                | Request::Restore(_)
                | Request::Replace { .. }
                | Request::Lines(_)
                | Request::Parent(..)) => self.backlog.push_back(other),
            }
        }
        if !waiters.is_empty() {
            match waiters.remove(0) {
                Waiter::Lease(reply) => drop(reply.send(Err(error))),
                Waiter::Word(reply) => drop(reply.send(Err(error))),
            }
        }
        self.turn_away(waiters, &cause);
    }

    fn turn_away(&self, waiters: Vec<Waiter>, cause: &str) {
        let id = self.record.id.to_string();
        let refusal = || Error::from(Refusal::CantWake { id: id.clone(), cause: cause.to_owned() });
        for waiter in waiters {
            match waiter {
                Waiter::Lease(reply) => drop(reply.send(Err(refusal()))),
                Waiter::Word(reply) => drop(reply.send(Err(refusal()))),
            }
        }
    }
}

//! While it sleeps, and how it wakes.

use tokio::time::Instant;
use torpor_protocol::{LossReason, State, StatusReason, Tier};

use super::request::{Body, Decision, Standing, admit};
use super::{Driver, Event, Phase, Sleeper};
use crate::engine::{BootPlan, Machine};
use crate::error::chain;
use crate::fleet::Reservation;
use crate::sandbox::Request;
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
                    match self.serve(Standing::Warm, Body::Frozen(sleeper), request).await {
                        Ok(Body::Frozen(still)) => sleeper = still,
                        Ok(body) => return body.into_phase(),
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

    /// Memory is wanted, or it slept for long. What can't be saved stays.
    pub(super) async fn leave_memory(&mut self, mut sleeper: Sleeper) -> Phase {
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
    pub(super) async fn thaw(&mut self, sleeper: Sleeper, waiters: Vec<Request>) -> Phase {
        let Sleeper { mut machine, durable, .. } = sleeper;
        fault::point("thaw.begun");
        let mut mounts = self.take_mounts().await;
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
            let served = self.world.serve_again(&self.record.spec, &guest, &mut mounts).await;
            if let Err(error) = served {
                tracing::error!(sandbox = %self.record.id, error = chain(&error), "volumes not served");
            }
            self.world.unquiesce(&self.record.spec, &guest).await?;
            Ok(guest)
        });
        let (resumed, recorded) = tokio::join!(resumed, recorded);
        self.mounts = mounts;
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
                waiters.into_iter().for_each(|waiter| self.let_in(waiter));
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
        waiters: Vec<Request>,
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
        waiters: Vec<Request>,
    ) -> Phase {
        tracing::error!(sandbox = %self.record.id, error = chain(&error), "resume failed");
        discard(&self.record.id, machine).await;
        if durable {
            self.record_state(PersistedState::Standby { interrupted: false }).await;
            return Phase::waking(waiters);
        }
        let cause = chain(&error);
        for waiter in waiters {
            waiter.answer(Err(self.cant_wake(cause.clone()).into()));
        }
        Phase::Lost(LossReason::NoAnswer(cause))
    }

    // === Cold ===

    pub(super) async fn cold(&mut self, reason: Option<StatusReason>) -> Phase {
        self.gate.measure(None);
        self.mounts.clear();
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
            if let Some(phase) = self.next_without_machine(Standing::Cold).await {
                return phase;
            }
        }
    }

    /// What comes next for one that has no machine. `None`: it stays where it is.
    pub(super) async fn next_without_machine(&mut self, standing: Standing<'_>) -> Option<Phase> {
        match self.next_event(None, None).await {
            Event::Asked(request) => self.serve(standing, Body::Nothing, request).await.err(),
            Event::Expired(reason) => Some(Phase::Deleting { machine: None, reason: Some(reason) }),
            Event::Delete => Some(Phase::Deleting { machine: None, reason: None }),
            Event::Stop => Some(Phase::Left),
            Event::NoteLastUse | Event::Exited(_) | Event::AgentGone | Event::Idle => None,
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
            engine.expect(&BootPlan { id, spec, root: root.path, mounts: Vec::new() });
        }
    }

    /// Brings it back from its save. If that fails it sleeps on: nothing is lost.
    pub(super) async fn waking(
        &mut self,
        waiters: Vec<Request>,
        room: Option<Reservation>,
    ) -> Phase {
        let (delete, stopping) = (self.delete.clone(), self.world.stopping.clone());
        let started = tokio::select! {
            biased;
            () = delete.cancelled() => None,
            () = stopping.cancelled() => None,
            revived = self.revive(room) => Some(revived),
        };
        match started {
            None => self.give_up_start().await,
            Some(Ok((started, room))) => {
                let phase = self.opened(started).await;
                // Before anybody is let in: it counts by itself.
                drop(room);
                waiters.into_iter().for_each(|waiter| self.let_in(waiter));
                phase
            }
            Some(Err(Error::Refused(lack @ (Refusal::HostFull(_) | Refusal::NoMemory { .. })))) => {
                self.refuse(waiters, lack.into());
                Phase::Dormant
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

    async fn revive(&mut self, room: Option<Reservation>) -> Result<(Started, Reservation), Error> {
        let room = match room {
            Some(room) => room,
            None => self.reserve().await?,
        };
        let save = self.open_save().await?;
        // Unborn: it was restored to a snapshot, which may be somebody else's.
        let afresh = self.record.state == PersistedState::Created;
        let started = self.start(save.as_deref(), afresh).await?;
        self.record.facts.wakes += 1;
        Ok((self.note_running(started).await?, room))
    }

    /// Room for its machine.
    async fn reserve(&self) -> Result<Reservation, Refusal> {
        let status = self.status.borrow().clone();
        self.fleet.reserve_for(&status, status.saved_bytes).await
    }

    // === Who waits ===

    /// It runs, which is what whoever waits wanted.
    pub(super) fn let_in(&self, waiter: Request) {
        let Request::Awake(reply) = waiter else { return waiter.answer(Ok(())) };
        let over = || Refusal::Terminated(self.record.id.to_string()).into();
        let _ = reply.send(self.gate.enter().ok_or_else(over));
    }

    /// A refusal is for all; of another error the first who waits gets the error itself, all others, also
    /// those in the inbox, its text: they asked for the wake that failed.
    fn refuse(&mut self, mut waiters: Vec<Request>, error: Error) {
        while let Ok(request) = self.inbox.try_recv() {
            match admit(Standing::Unwoken, &request, true) {
                Decision::Refuse => waiters.push(request),
                Decision::Defer | Decision::Act | Decision::Wake | Decision::Settle => {
                    self.backlog.push_back(request);
                }
            }
        }
        let refusal = match &error {
            Error::Refused(refusal) => refusal.clone(),
            Error::Engine(_) | Error::Store(_) | Error::Guest(_) => self.cant_wake(chain(&error)),
        };
        let mut waiters = waiters.into_iter();
        if let Some(first) = waiters.next() {
            first.answer(Err(error));
        }
        waiters.for_each(|waiter| waiter.answer(Err(refusal.clone().into())));
    }

    fn cant_wake(&self, cause: String) -> Refusal {
        Refusal::CantWake { id: self.record.id.to_string(), cause }
    }
}

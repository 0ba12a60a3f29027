//! How a sandbox begins and ends: creating, claiming, adopting; failing, being lost, being deleted.

use std::time::Duration;

use tokio::time::Instant;
use torpor_protocol::guest::{Identity, ProcessSpec};
use torpor_protocol::{EndReason, FailureReason, LossReason, State, StatusReason};

use super::request::{Body, Standing};
use super::{Driver, Phase, Sleeper};
use crate::engine::{EngineError, Machine};
use crate::error::chain;
use crate::fleet::{AWAKE_WITHIN, Cause};
use crate::guest::Guest;
use crate::store::{LocalSave, PersistedState, Record, StoreError};
use crate::world::{HELLO_DEADLINE, Started, discard, resume, run_hook};
use crate::{Error, fault};

/// Between two attempts to forget a sandbox that is being deleted.
const ERASE_AGAIN: Duration = Duration::from_secs(1);
/// Between two looks for room by somebody who waits for it.
const ROOM_AGAIN: Duration = Duration::from_millis(250);

impl Driver {
    pub(super) async fn creating(&mut self) -> Phase {
        self.publish(State::Creating, None);
        let (delete, stopping) = (self.delete.clone(), self.world.stopping.clone());
        let started = tokio::select! {
            biased;
            () = delete.cancelled() => None,
            () = stopping.cancelled() => None,
            started = self.first_start() => Some(started),
        };
        match started {
            Some(Ok(started)) => self.opened(started).await,
            Some(Err(error)) => self.start_failed(&error).await,
            None => self.give_up_start().await,
        }
    }

    /// Waits until there is room for it.
    pub(super) async fn queued(&mut self, until_ms: u64) -> Phase {
        self.publish(State::Creating, Some(StatusReason::Queued));
        let needed_mib = match &self.record.save {
            Some(save) => match self.world.saves.manifest(save).await {
                Ok(manifest) => manifest.size_bytes().div_ceil(1024 * 1024),
                Err(error) => return self.start_failed(&error).await,
            },
            None => 0,
        };
        let (delete, stopping) = (self.delete.clone(), self.world.stopping.clone());
        loop {
            if let Ok(room) = self.fleet.reserve(1, needed_mib).await {
                self.status.send_modify(|status| status.queued_until_ms = None);
                // From now on it counts by itself.
                drop(room);
                break;
            }
            let ended = |reason| Phase::Deleting { machine: None, reason: Some(reason) };
            tokio::select! {
                biased;
                () = delete.cancelled() => return ended(EndReason::Cancelled),
                () = stopping.cancelled() => return Phase::Left,
                Some(request) = self.inbox.recv() => {
                    if let Err(phase) = self.serve(Standing::Queued, Body::Nothing, request).await {
                        return phase;
                    }
                }
                () = tokio::time::sleep(self.world.clock.until(until_ms)) => {
                    return ended(EndReason::NoCapacity);
                }
                () = tokio::time::sleep(ROOM_AGAIN) => {}
            }
        }
        let mut admitted = self.record.clone();
        admitted.facts.queued_until_ms = None;
        match self.write(admitted).await {
            Ok(()) => Phase::Creating,
            Err(error) => self.start_failed(&error).await,
        }
    }

    /// Removes what a start that was broken off may have left. The ledger does not say yet that it
    /// runs, or nobody was let in, so nothing is lost.
    pub(super) async fn give_up_start(&mut self) -> Phase {
        if let Ok(Some(machine)) = self.world.adopt(&self.record).await {
            discard(&self.record.id, machine).await;
        }
        if self.delete.is_cancelled() {
            return Phase::Deleting { machine: None, reason: None };
        }
        Phase::Left
    }

    async fn first_start(&mut self) -> Result<Started, Error> {
        let save = self.open_save().await?;
        let started = self.start(save.as_deref(), true).await?;
        // From now on it may be written to, so the ledger must not call it unborn.
        self.note_running(started).await
    }

    /// Starts a machine. If the engine lacks something, addresses for one, those who sleep in memory give
    /// theirs back, one after another.
    pub(super) async fn start(
        &self,
        save: Option<&LocalSave>,
        afresh: bool,
    ) -> Result<Started, Error> {
        let Record { id, spec, .. } = &self.record;
        let give_up = Instant::now() + AWAKE_WITHIN;
        loop {
            let started = self.world.start(id, spec, save, afresh).await;
            let lacks = matches!(started, Err(Error::Engine(EngineError::Capacity { .. })));
            let again = lacks && Instant::now() < give_up;
            if !again || !self.fleet.demote_least_used(Cause::Room).await {
                return started;
            }
        }
    }

    /// The save it begins from, if any, known to be whole.
    pub(super) async fn open_save(&mut self) -> Result<Option<std::sync::Arc<LocalSave>>, Error> {
        let Some(id) = &self.record.save else { return Ok(None) };
        let save = self.world.saves.materialize(id).await?;
        self.show_saved(&save);
        Ok(Some(save))
    }

    /// Nobody gets in before the ledger says that it runs.
    pub(super) async fn note_running(&mut self, started: Started) -> Result<Started, Error> {
        let mut running = Record { state: PersistedState::Running, ..self.record.clone() };
        running.facts.root = Some(started.root.clone());
        if let Err(error) = self.write(running).await {
            discard(&self.record.id, started.machine).await;
            return Err(error);
        }
        Ok(started)
    }

    /// Becomes who it is in a machine that was ready ahead. The ledger says that it runs.
    pub(super) async fn claiming(&mut self, machine: Box<dyn Machine>) -> Phase {
        self.publish(State::Creating, None);
        let mut machine = machine;
        let greeted = async {
            let image = self.world.images.root(&self.record.spec.image_id).await?;
            let Record { id, spec, .. } = &self.record;
            let identity = self.world.identity(id, spec, &image, true).await?;
            let guest = resume(&mut machine).await?;
            // Its boot has had a name of its own since it was made ready, and nobody knew it.
            guest.identify(Identity { boot_id: None, ..identity }).await?;
            let mut mounts = self.world.open_volumes(spec).await?;
            self.world.bring_mounts(spec, &mut machine, &guest, &mut mounts).await?;
            self.world.unquiesce(spec, &guest).await?;
            Ok::<_, Error>((guest, image.file, mounts))
        };
        match greeted.await {
            Ok((guest, root, mounts)) => {
                let booted = self.record.save.is_none();
                let steps = Vec::new();
                self.opened(Started { machine, guest, root, mounts, steps, booted }).await
            }
            Err(error) => {
                discard(&self.record.id, machine).await;
                self.start_failed(&error).await
            }
        }
    }

    /// Takes over what an earlier daemon left.
    pub(super) async fn adopting(&mut self) -> Phase {
        let adopted = match self.world.adopt(&self.record).await {
            Ok(adopted) => adopted,
            Err(error) => return self.start_failed(&error).await,
        };
        self.look_up_saved().await;
        // The daemon before may have had other certificates and variables, or no time to tell of them.
        self.ca_dirty = true;
        let adopted = match adopted {
            Some(machine) => Some(self.brought_up_to_date(machine).await),
            None => None,
        };
        match (adopted, self.record.state.clone()) {
            // Nobody was ever let into that machine.
            (Some(machine), PersistedState::Created) => {
                discard(&self.record.id, machine).await;
                Phase::Creating
            }
            (None, PersistedState::Created) => Phase::Creating,
            (Some(machine), _) if machine.paused() => self.found_asleep(machine).await,
            (Some(machine), _) => self.found_awake(machine).await,
            (None, PersistedState::Standby { interrupted: true }) => Phase::waking(Vec::new()),
            (None, PersistedState::Standby { interrupted: false }) => Phase::Cold(None),
            (None, PersistedState::Running | PersistedState::Failed { .. }) => {
                Phase::Lost(LossReason::DaemonAway)
            }
        }
    }

    /// The daemon before may have ended between the engine and the ledger.
    async fn brought_up_to_date(&self, machine: Box<dyn Machine>) -> Box<dyn Machine> {
        let mut machine = machine;
        if let Err(error) = machine.set_network(&self.record.spec.network).await {
            tracing::error!(sandbox = %self.record.id, error = chain(&error), "network not set");
        }
        machine
    }

    async fn found_asleep(&mut self, machine: Box<dyn Machine>) -> Phase {
        let durable = matches!(self.record.state, PersistedState::Standby { .. });
        let now = Instant::now();
        let save_at = now + self.world.policy.persist_after;
        let (processes, held) = (Vec::new(), Vec::new());
        let sleeper = Sleeper { machine, durable, since: now, save_at, processes, held };
        let spec = &self.record.spec;
        // A save says what is held of volumes, which only the guest knows: it goes on, and falls asleep again.
        if !durable && !spec.mounts().is_empty() && self.world.abilities(spec).binds {
            return self.thaw(sleeper, Vec::new()).await;
        }
        self.mounts = self.take_mounts().await;
        Phase::Warm(sleeper)
    }

    async fn found_awake(&mut self, machine: Box<dyn Machine>) -> Phase {
        let mut machine = machine;
        let channel = machine.channel();
        let greeted = async {
            let guest = Guest::connect(channel, HELLO_DEADLINE).await?;
            // The daemon before may have ended between the ledger and the machine.
            self.bring_again(&mut machine, &guest).await;
            // Or while it saved it.
            self.world.unquiesce(&self.record.spec, &guest).await?;
            Ok::<_, Error>(guest)
        };
        match greeted.await {
            Ok(guest) => {
                if self.ca_dirty {
                    self.renew_identity(&guest).await;
                }
                // It may have been woken in the last instant of the daemon before.
                if self.record.state != PersistedState::Running {
                    self.record_state(PersistedState::Running).await;
                }
                self.enter(machine, guest)
            }
            Err(error) => {
                discard(&self.record.id, machine).await;
                Phase::Lost(LossReason::NoAnswer(chain(&error)))
            }
        }
    }

    /// The machine answered: after its hook everybody may come in.
    pub(super) async fn opened(&mut self, started: Started) -> Phase {
        let Started { machine, guest, mounts, steps, booted, .. } = started;
        self.mounts = mounts;
        self.ca_dirty = false;
        let hooks = &self.record.spec.standby.hooks;
        // An image that boots did not wake.
        if self.record.save.is_some() {
            let (id, command) = (&self.record.id, &hooks.after_wake);
            run_hook(id, &guest, "after_wake", command, hooks.grace_ms).await;
        }
        if booted && let Err(error) = self.start_entrypoint(&guest).await {
            discard(&self.record.id, machine).await;
            return self.fail(FailureReason::BadEntrypoint { cause: chain(&error) }).await;
        }
        self.status.send_modify(|status| status.start_steps = steps);
        self.enter(machine, guest)
    }

    async fn start_entrypoint(&self, guest: &Guest) -> Result<(), Error> {
        let command = self.record.spec.entrypoint.clone();
        if command.is_empty() {
            return Ok(());
        }
        guest
            .start(ProcessSpec { command, survives_detach: true, ..ProcessSpec::default() })
            .await?;
        Ok(())
    }

    pub(super) fn enter(&mut self, machine: Box<dyn Machine>, guest: Guest) -> Phase {
        self.gate.open(guest, machine.meter());
        self.entered = Instant::now();
        self.publish(State::Running, None);
        Phase::Running(machine)
    }

    // === Ends ===

    /// Goes back to its last restore point and says so; without one it failed.
    pub(super) async fn lost(&mut self, loss: LossReason) -> Phase {
        self.gate.close();
        self.gate.measure(None);
        let Some(save) = self.record.save.clone() else {
            return self.fail(FailureReason::MachineLost { cause: loss.to_string() }).await;
        };
        let saved_at_ms = match self.world.saves.manifest(&save).await {
            Ok(manifest) => manifest.about.created_at_ms,
            Err(error) => {
                let cause = format!("{loss}; {}", chain(&error));
                return self.fail(FailureReason::SaveUnusable { cause }).await;
            }
        };
        tracing::warn!(sandbox = %self.record.id, reason = %loss, saved_at_ms, "back to the last save");
        let mut record = self.record.clone();
        record.state = PersistedState::Standby { interrupted: false };
        record.facts.recovered_from_ms = Some(saved_at_ms);
        if let Err(error) = self.write(record.clone()).await {
            tracing::error!(sandbox = %self.record.id, error = chain(&error), "could not record");
            self.record = record;
        }
        Phase::Cold(Some(StatusReason::Recovered(loss)))
    }

    async fn start_failed(&mut self, error: &(dyn std::error::Error + Send + Sync)) -> Phase {
        self.fail(FailureReason::StartFailed { cause: chain(error) }).await
    }

    async fn fail(&mut self, reason: FailureReason) -> Phase {
        tracing::warn!(sandbox = %self.record.id, %reason, "sandbox failed");
        // Locks of its guest with them.
        self.mounts.clear();
        self.record_state(PersistedState::Failed { reason: reason.clone() }).await;
        Phase::Failed(reason)
    }

    pub(super) async fn failed(&mut self, reason: FailureReason) -> Phase {
        self.publish(State::Failed, Some(StatusReason::Failed(reason.clone())));
        loop {
            if let Some(phase) = self.next_without_machine(Standing::Failed(&reason)).await {
                return phase;
            }
        }
    }

    /// Forget, then kill: a crash in between leaves a machine that nobody knows, which the next
    /// start sweeps away.
    pub(super) async fn deleting(
        &mut self,
        machine: Option<Box<dyn Machine>>,
        why: Option<EndReason>,
    ) -> Phase {
        self.note_last_lines().await;
        self.gate.close();
        let ended = self.record.ended(self.world.clock.now_ms(), why);
        while let Err(error) = self.world.ledger.archive_sandbox(&self.world.owner, &ended).await {
            tracing::error!(sandbox = %self.record.id, error = chain(&error), "could not erase");
            if let StoreError::NotOwner(_) = error {
                return Phase::Left;
            }
            tokio::time::sleep(ERASE_AGAIN).await;
            if self.world.stopping.is_cancelled() {
                return Phase::Left;
            }
        }
        fault::point("delete.erased");
        if let Some(machine) = machine {
            discard(&self.record.id, machine).await;
        }
        self.gate.measure(None);
        fault::point("delete.killed");
        self.mounts.clear();
        self.world.volumes.discard_copies(&self.record.id).await;
        self.close_journal().await;
        if let Some(save) = &self.record.save {
            self.world.saves.release(save).await;
        }
        Phase::Deleted(why)
    }
}

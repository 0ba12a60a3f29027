//! Making a machine durable: stage, write, commit, record; then, and only then, the save before it
//! may go.

use std::path::Path;
use std::sync::Arc;

use tokio::time::Instant;
use torpor_protocol::guest::HeldPath;
use torpor_protocol::{SandboxId, SaveId, SnapshotId, SnapshotKind, State, StatusReason, Tier};

use super::{Driver, Phase, Sleeper};
use crate::engine::{Machine, Saved};
use crate::error::chain;
use crate::guest::Guest;
use crate::sandbox::{Back, Copies, Reply, Request};
use crate::store::{LocalSave, PersistedState, Record, SaveAbout, Staged, StoreError};
use crate::world::discard;
use crate::{Error, Refusal, fault};

impl Driver {
    /// Saves a machine that runs, and makes copies of its volumes of the same moment.
    pub(super) async fn persist_running(
        &mut self,
        machine: &mut Box<dyn Machine>,
        copies_for: Option<&SandboxId>,
    ) -> Result<(Arc<LocalSave>, Copies), Error> {
        let staged = self.world.saves.stage().await?;
        fault::point("save.staged");
        let guest = self.gate.guest().ok_or(Refusal::Stopping)?;
        let held = self.held(&guest).await;
        let version = machine.version().map(str::to_owned);
        let (saved, copies) = self.save_awake(machine, &guest, staged.path(), copies_for).await?;
        let save = self.commit(version, staged, saved, held, PersistedState::Running).await?;
        Ok((save, copies))
    }

    /// Saves a machine that sleeps.
    async fn persist_asleep(
        &mut self,
        sleeper: &mut Sleeper,
        interrupted: bool,
    ) -> Result<Arc<LocalSave>, Error> {
        let staged = self.world.saves.stage().await?;
        fault::point("save.staged");
        let mut saved = sleeper.machine.save(staged.path()).await?;
        if saved.processes.is_empty() {
            saved.processes = sleeper.processes.clone();
        }
        let version = sleeper.machine.version().map(str::to_owned);
        let (held, state) = (sleeper.held.clone(), PersistedState::Standby { interrupted });
        self.commit(version, staged, saved, held, state).await
    }

    /// Records what was saved as its last restore point, with `state`.
    async fn commit(
        &mut self,
        version: Option<String>,
        staged: Box<dyn Staged>,
        saved: Saved,
        held: Vec<HeldPath>,
        state: PersistedState,
    ) -> Result<Arc<LocalSave>, Error> {
        let saves = Arc::clone(&self.world.saves);
        self.sync_volumes().await?;
        fault::point("save.written");
        let engine = self.world.engines.of(&self.record.spec)?.about();
        let about = SaveAbout {
            kind: SnapshotKind::Memory,
            sandbox: self.record.id.clone(),
            spec: self.record.spec.clone(),
            root: self.record.facts.root.clone(),
            engine: engine.kind.to_owned(),
            engine_version: version.unwrap_or_else(|| engine.version.clone()),
            created_at_ms: self.world.clock.now_ms(),
            pause_ms: saved.pause.as_secs_f64() * 1e3,
            processes: saved.processes,
            held,
        };
        let save = saves.commit(staged, about).await?;
        fault::point("save.committed");
        let last_used_at_ms = self.gate.last_used_ms();
        let record =
            Record { save: Some(save.id.clone()), state, last_used_at_ms, ..self.record.clone() };
        let before = self.record.save.clone();
        if let Err(error) = self.write(record).await {
            saves.release(&save.id).await;
            return Err(error);
        }
        fault::point("save.recorded");
        if let Some(before) = before {
            saves.release(&before).await;
        }
        self.show_saved(&save);
        Ok(save)
    }

    /// Saves a machine that runs; it goes on before anybody waits for a disk, but for copies of volumes.
    async fn save_awake(
        &self,
        machine: &mut Box<dyn Machine>,
        guest: &Guest,
        into: &Path,
        copies_for: Option<&SandboxId>,
    ) -> Result<(Saved, Copies), Error> {
        let quiesces = self.world.abilities(&self.record.spec).quiesces;
        let Some(made_for) = copies_for.filter(|_| !self.record.spec.mounts().is_empty()) else {
            if !quiesces {
                return Ok((machine.save(into).await?, Copies::new()));
            }
            let saved = self.save_quiesced(machine, guest, into).await;
            // Also after a failure, wherever it was.
            guest.unquiesce().await?;
            return Ok((saved?, Copies::new()));
        };
        let begun = Instant::now();
        let both = async {
            let saved = if quiesces {
                self.save_quiesced(machine, guest, into).await?
            } else {
                machine.pause().await?;
                machine.save(into).await?
            };
            Ok::<_, Error>((saved, self.copy_volumes(made_for).await?))
        };
        let both = both.await;
        if quiesces {
            guest.unquiesce().await?;
        } else {
            machine.resume().await?;
        }
        both.map(|(saved, copies)| (Saved { pause: begun.elapsed(), ..saved }, copies))
    }

    /// Its processes stand still afterwards.
    async fn save_quiesced(
        &self,
        machine: &mut Box<dyn Machine>,
        guest: &Guest,
        into: &Path,
    ) -> Result<Saved, Error> {
        let begun = Instant::now();
        let processes = guest.quiesce().await?;
        machine.save(into).await?;
        Ok(Saved { processes, pause: begun.elapsed() })
    }

    /// The save that is all of a frozen machine, made now if there is none yet.
    pub(super) async fn make_durable(
        &mut self,
        sleeper: &mut Sleeper,
        interrupted: bool,
    ) -> Result<Arc<LocalSave>, Error> {
        if sleeper.durable {
            return self.saved().await;
        }
        match self.persist_asleep(sleeper, interrupted).await {
            Ok(save) => {
                sleeper.durable = true;
                sleeper.machine.page_out();
                self.publish_as(State::Asleep, Some(Tier::Warm), true, None);
                Ok(save)
            }
            Err(error) => {
                let cause = chain(&error);
                tracing::error!(sandbox = %self.record.id, cause, "persist failed, keeping sandbox warm");
                sleeper.save_at = Instant::now() + self.world.policy.persist_after;
                let reason = Some(StatusReason::SaveFailed { cause });
                self.publish_as(State::Asleep, Some(Tier::Warm), false, reason);
                Err(error)
            }
        }
    }

    /// The save of a sandbox that sleeps.
    pub(super) async fn saved(&self) -> Result<Arc<LocalSave>, Error> {
        let Some(id) = &self.record.save else {
            return Err(StoreError::NoSuchSave("of a sleeping sandbox".to_owned()).into());
        };
        Ok(self.world.saves.materialize(id).await?)
    }

    /// Has it begin from `with` instead of `of` when it wakes; only while it sleeps on disk.
    pub(super) async fn replace_save(
        &mut self,
        of: &SaveId,
        with: &LocalSave,
    ) -> Result<bool, Error> {
        if self.record.save.as_ref() != Some(of) {
            return Ok(false);
        }
        let mut record = Record { save: Some(with.id.clone()), ..self.record.clone() };
        record.facts.root.clone_from(&with.manifest.about.root);
        self.write(record).await?;
        self.world.saves.release(of).await;
        self.show_saved(with);
        Ok(true)
    }

    pub(super) fn show_saved(&self, save: &LocalSave) {
        let bytes = save.manifest.size_bytes();
        self.status.send_modify(|status| status.saved_bytes = bytes);
    }

    /// The size of a save that an earlier daemon made.
    pub(super) async fn look_up_saved(&self) {
        let Some(save) = &self.record.save else { return };
        // Whoever wakes it hears what is wrong with the save.
        if let Ok(manifest) = self.world.saves.manifest(save).await {
            self.status.send_modify(|status| status.saved_bytes = manifest.size_bytes());
        }
    }

    /// The snapshot that was last taken of it.
    pub(super) async fn note_parent(&mut self, parent: SnapshotId, reply: Reply<()>) {
        let mut record = self.record.clone();
        record.facts.parent = Some(parent);
        let recorded = self.write(record).await;
        if recorded.is_ok() {
            self.republish();
        }
        let _ = reply.send(recorded);
    }

    /// Goes back to a snapshot. Until that is recorded nothing happens to the machine: `None`.
    pub(super) async fn restore(
        &mut self,
        machine: Option<Box<dyn Machine>>,
        back: Back,
    ) -> Option<Phase> {
        let Back { save, snapshot, reply } = back;
        let status = self.status.borrow().clone();
        let room = match self.fleet.reserve_for(&status, save.manifest.size_bytes()).await {
            Ok(room) => room,
            Err(lack) => {
                let _ = reply.send(Err(lack.into()));
                return None;
            }
        };
        let then = &save.manifest.about.spec;
        let mut record = self.record.clone();
        record.spec.image.clone_from(&then.image);
        record.spec.image_id = then.image_id.clone();
        record.spec.resources = then.resources;
        record.spec.mounts.clone_from(&then.mounts);
        if save.manifest.about.kind == SnapshotKind::Memory {
            record.spec.engine = Some(save.manifest.about.engine.clone());
        }
        // Whatever machine the engine has is not it any more.
        record.state = PersistedState::Created;
        record.facts.parent = snapshot;
        record.facts.root.clone_from(&save.manifest.about.root);
        let before = record.save.replace(save.id.clone());
        self.gate.close();
        if let Err(error) = self.write(record).await {
            let _ = reply.send(Err(error));
            return None;
        }
        fault::point("restore.recorded");
        if let Some(machine) = machine {
            discard(&self.record.id, machine).await;
        }
        self.mounts.clear();
        if let Some(before) = before.filter(|before| *before != save.id) {
            self.world.saves.release(&before).await;
        }
        Some(Phase::Waking { waiters: vec![Request::Wake(reply)], room: Some(room) })
    }
}

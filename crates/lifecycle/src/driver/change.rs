//! What can be changed of a sandbox while it lives, and what its processes said, which is noted before
//! it sleeps or goes.

use std::time::Duration;

use torpor_protocol::SandboxSpec;
use torpor_protocol::api::{Resize, UpdateSandbox};

use super::Driver;
use crate::engine::{EngineError, Machine};
use crate::error::chain;
use crate::guest::Guest;
use crate::sandbox::Reply;
use crate::store::Record;
use crate::{BUILD_LABEL, Error, Refusal};

/// How long the agent may take to tell what its processes said: nobody's sleep waits longer for it.
const LINES_MAX: Duration = Duration::from_secs(1);

impl Driver {
    /// All of it, or nothing. `machine`: what it has of one, running or paused.
    pub(super) async fn update(
        &mut self,
        update: Box<UpdateSandbox>,
        machine: Option<&mut Box<dyn Machine>>,
        reply: Reply<()>,
    ) {
        let changed = self.change(*update, machine).await;
        if changed.is_ok() {
            self.republish();
        }
        let _ = reply.send(changed);
    }

    async fn change(
        &mut self,
        update: UpdateSandbox,
        machine: Option<&mut Box<dyn Machine>>,
    ) -> Result<(), Error> {
        let (before, after) = (self.record.spec.clone(), changed(&self.record.spec, update));
        let record = Record { spec: after.clone(), ..self.record.clone() };
        let Some(machine) = machine else {
            if before.resources != after.resources {
                return Err(Refusal::ResizeAsleep(self.record.id.to_string()).into());
            }
            return self.write(record).await;
        };
        self.carry_out(machine, &before, &after).await?;
        if let Err(error) = self.write(record).await {
            let back = self.carry_out(machine, &after, &before).await;
            self.was_set_back(back);
            return Err(error);
        }
        Ok(())
    }

    /// Makes the machine, and who is inside, what its specification says now. On `Err` it is as it
    /// was. Who reads its requests is trusted before the first is read and until the last was.
    async fn carry_out(
        &mut self,
        machine: &mut Box<dyn Machine>,
        from: &SandboxSpec,
        to: &SandboxSpec,
    ) -> Result<(), Error> {
        let trusts = |spec| self.world.trusted_ca(spec).is_some();
        let (trusted, trusts) = (trusts(from), trusts(to));
        if trusts && !trusted {
            self.tell(to).await?;
        }
        if let Err(error) = apply(machine, from, to).await {
            if trusts && !trusted {
                let back = self.tell(from).await;
                self.was_set_back(back);
            }
            return Err(error.into());
        }
        if trusted
            && !trusts
            && let Err(error) = self.tell(to).await
        {
            let back = apply(machine, to, from).await;
            self.was_set_back(back.map_err(Error::from));
            return Err(error);
        }
        Ok(())
    }

    pub(super) fn was_set_back(&self, back: Result<(), Error>) {
        if let Err(error) = back {
            tracing::error!(sandbox = %self.record.id, error = chain(&error), "could not be set back");
        }
    }

    // === Who it is ===

    /// Tells its agent anew who it is, as this specification says; one that sleeps hears it when it
    /// wakes.
    async fn tell(&mut self, spec: &SandboxSpec) -> Result<(), Error> {
        // Until it is known that it was heard.
        self.ca_dirty = true;
        let Some(guest) = self.gate.guest() else { return Ok(()) };
        self.identify(&guest, spec).await?;
        self.ca_dirty = false;
        Ok(())
    }

    /// Secrets may have new values since it fell asleep, and it may have to trust somebody else. What
    /// can't be told is no reason not to wake.
    pub(super) async fn renew_identity(&mut self, guest: &Guest) {
        let Record { id, spec, .. } = &self.record;
        if spec.secrets.is_empty() && !self.ca_dirty {
            return;
        }
        match self.identify(guest, spec).await {
            Ok(()) => self.ca_dirty = false,
            Err(error) => {
                tracing::warn!(sandbox = %id, error = chain(&error), "cannot renew identity, keeping the old one");
            }
        }
    }

    async fn identify(&self, guest: &Guest, spec: &SandboxSpec) -> Result<(), Error> {
        let image = self.world.images.root(&spec.image_id).await?;
        let identity = self.world.identity(&self.record.id, spec, &image, false).await?;
        Ok(guest.identify(identity).await?)
    }

    // === What its processes said ===

    /// Brings what its processes said since the last time into the journal. What can't be had now is
    /// had later, or is lost with the machine: nobody was promised a log line.
    pub(super) async fn note_lines(&self, guest: &Guest) {
        let noted = tokio::time::timeout(LINES_MAX, self.lines_to_journal(guest)).await;
        let error = match noted {
            Ok(Ok(())) => return,
            Ok(Err(error)) => chain(&error),
            Err(_) => "the agent did not answer in time".to_owned(),
        };
        tracing::debug!(sandbox = %self.record.id, error, "lines were not noted");
    }

    /// It is gone for good.
    pub(super) async fn close_journal(&self) {
        if let Err(error) = self.world.journal.close(&self.record.id).await {
            tracing::warn!(sandbox = %self.record.id, error = chain(&error), "journal not closed");
        }
    }

    /// As far as somebody can be asked.
    pub(super) async fn note_last_lines(&self) {
        if let Some(guest) = self.gate.guest() {
            self.note_lines(&guest).await;
        }
    }

    async fn lines_to_journal(&self, guest: &Guest) -> Result<(), Error> {
        // It goes to whoever builds, and may tell secrets.
        if self.record.spec.labels.contains_key(BUILD_LABEL) {
            return Ok(());
        }
        let (journal, id) = (&self.world.journal, &self.record.id);
        let lines = guest.lines(journal.last(id).await?).await?;
        if !lines.is_empty() {
            journal.append(id, &lines).await?;
        }
        Ok(())
    }
}

/// What the sandbox is to be.
fn changed(now: &SandboxSpec, update: UpdateSandbox) -> SandboxSpec {
    let UpdateSandbox { name, labels, lifetime, standby, network, ports, resources } = update;
    let mut spec = now.clone();
    spec.name = name.or(spec.name);
    spec.labels = labels.unwrap_or(spec.labels);
    spec.lifetime = lifetime.unwrap_or(spec.lifetime);
    spec.standby = standby.unwrap_or_default().over(spec.standby);
    spec.network = network.unwrap_or(spec.network);
    spec.ports = ports.or(spec.ports);
    let Resize { cpus, memory_mib, disk_mib } = resources.unwrap_or_default();
    spec.resources.cpus = cpus.unwrap_or(spec.resources.cpus);
    spec.resources.memory_mib = memory_mib.unwrap_or(spec.resources.memory_mib);
    spec.resources.disk_mib = disk_mib.unwrap_or(spec.resources.disk_mib);
    spec
}

/// Makes a machine what its specification says now. On `Err` it is as it was.
async fn apply(
    machine: &mut Box<dyn Machine>,
    from: &SandboxSpec,
    to: &SandboxSpec,
) -> Result<(), EngineError> {
    if from.network != to.network {
        machine.set_network(&to.network).await?;
    }
    if from.resources == to.resources {
        return Ok(());
    }
    let resized = machine.set_resources(&to.resources).await;
    if resized.is_err() && from.network != to.network {
        machine.set_network(&from.network).await?;
    }
    resized
}

//! Volumes and drives of a sandbox that is awake: recorded, then mounted; unmounted, then forgotten.

use torpor_protocol::guest::{HeldPath, Request};
use torpor_protocol::{GuestPath, Mount, SandboxId, SnapshotKind};

use super::Driver;
use crate::engine::Machine;
use crate::error::chain;
use crate::guest::{Guest, GuestError, stop_files};
use crate::mounts::Mounted;
use crate::sandbox::Copies;
use crate::store::{Manifest, Record};
use crate::{Error, Refusal, fault, mounts};

impl Driver {
    /// Gives it a volume; one that it has there already is fine. On `Err` it is as it was.
    pub(super) async fn mount(
        &mut self,
        machine: &mut Box<dyn Machine>,
        mount: Mount,
    ) -> Result<(), Error> {
        let Some(now) = self.record.spec.mounts.clone() else {
            return Err(Refusal::NotMountable(format!("sandbox {}", self.record.id)).into());
        };
        let guest = self.gate.guest().ok_or(Refusal::Stopping)?;
        for other in &now {
            let same = Mount { slot: other.slot, ..mount.clone() } == *other;
            if same {
                return Ok(());
            }
            if other.path.holds(&mount.path) || mount.path.holds(&other.path) {
                return Err(Refusal::PathTaken(other.path.clone()).into());
            }
        }
        let mount = mounts::in_free_slot(&now, mount)?;
        let opened = self.world.open_volume(&mount).await?;
        let before = self.record.clone();
        let mut record = self.record.clone();
        record.spec.mounts = Some(now.into_iter().chain([mount.clone()]).collect());
        self.write(record).await?;
        fault::point("mount.recorded");
        self.mounts.push(opened);
        let brought = self.bring(machine, &guest).await;
        fault::point("mount.mounted");
        if let Err(error) = brought {
            self.mounts.pop();
            self.take_out(machine, &guest, mount.slot).await;
            // It may have got so far, or not.
            let _ = self.let_loose(&guest, mount.slot, before.spec.mounts()).await;
            self.set_back(before).await;
            return Err(error);
        }
        self.republish();
        Ok(())
    }

    /// Takes a volume from it, unless a process uses it. On `Err` it is as it was.
    pub(super) async fn unmount(
        &mut self,
        machine: &mut Box<dyn Machine>,
        path: &GuestPath,
    ) -> Result<(), Error> {
        let guest = self.gate.guest().ok_or(Refusal::Stopping)?;
        let now = self.record.spec.mounts().to_vec();
        let (gone, left): (Vec<_>, Vec<_>) = now.into_iter().partition(|it| it.path == *path);
        let Some(gone) = gone.into_iter().next() else {
            return Err(Refusal::NotMounted(path.clone()).into());
        };
        let mut record = self.record.clone();
        record.spec.mounts = Some(left.clone());
        self.let_loose(&guest, gone.slot, &left).await?;
        fault::point("unmount.unmounted");
        self.take_out(machine, &guest, gone.slot).await;
        fault::point("unmount.unbound");
        if let Err(error) = self.forget_mount(machine, record, gone.slot).await {
            let back = self.bring(machine, &guest).await;
            self.was_set_back(back);
            return Err(error);
        }
        fault::point("unmount.recorded");
        self.mounts.retain(|mounted| mounted.host.slot != gone.slot);
        self.republish();
        Ok(())
    }

    /// Records that a volume is taken from it. If its last save knows the volume it is saved anew in the same step:
    /// memory that expects a volume must not come back without it, or to another one in its place.
    async fn forget_mount(
        &mut self,
        machine: &mut Box<dyn Machine>,
        record: Record,
        slot: u16,
    ) -> Result<(), Error> {
        if !self.is_saved_with(slot).await {
            return self.write(record).await;
        }
        let before = std::mem::replace(&mut self.record, record);
        let saved = self.persist_running(machine, None).await;
        if saved.is_err() {
            self.record = before;
        }
        saved.map(|_| ())
    }

    /// Whether it would go back to memory that has a volume in this slot.
    async fn is_saved_with(&self, slot: u16) -> bool {
        let Some(save) = &self.record.save else { return false };
        match self.world.saves.manifest(save).await {
            Ok(Manifest { about, .. }) => {
                about.kind == SnapshotKind::Memory
                    && about.spec.mounts().iter().any(|mount| mount.slot == slot)
            }
            // Not known: a new save is right in any case.
            Err(_) => true,
        }
    }

    /// Brings the machine to what its specification says.
    async fn bring(&mut self, machine: &mut Box<dyn Machine>, guest: &Guest) -> Result<(), Error> {
        self.world.bring_mounts(&self.record.spec, machine, guest, &mut self.mounts).await
    }

    /// Has the guest let go of one volume, and keep the others.
    async fn let_loose(&self, guest: &Guest, slot: u16, left: &[Mount]) -> Result<(), GuestError> {
        if self.world.abilities(&self.record.spec).binds {
            return guest.set_mounts(left).await;
        }
        stop_files(guest, slot, false).await
    }

    /// The volumes of a machine that is about to go on, also of one that an earlier daemon put to sleep. Without them it
    /// goes on, and whoever uses one waits.
    pub(super) async fn take_mounts(&mut self) -> Vec<Mounted> {
        let mounts = std::mem::take(&mut self.mounts);
        if mounts.len() == self.record.spec.mounts().len() {
            return mounts;
        }
        let opened = self.world.open_volumes(&self.record.spec).await;
        opened.unwrap_or_else(|error| {
            tracing::error!(sandbox = %self.record.id, error = chain(&error), "no volumes");
            mounts
        })
    }

    /// The same, brought to a machine that an earlier daemon left running.
    pub(super) async fn bring_again(&mut self, machine: &mut Box<dyn Machine>, guest: &Guest) {
        self.mounts = self.take_mounts().await;
        if let Err(error) = self.bring(machine, guest).await {
            tracing::error!(sandbox = %self.record.id, error = chain(&error), "volumes not brought");
        }
    }

    /// All that was written to its volumes is on the disk: what is saved of it does not know of less.
    pub(super) async fn sync_volumes(&self) -> Result<(), Error> {
        for mounted in &self.mounts {
            self.world.volumes.sync(&mounted.host.volume).await?;
        }
        Ok(())
    }

    /// Nobody inside uses it any more. What can't be taken out is out of sight, and goes with the machine.
    async fn take_out(&self, machine: &mut Box<dyn Machine>, guest: &Guest, slot: u16) {
        if !self.world.abilities(&self.record.spec).binds {
            return;
        }
        let taken = async {
            machine.unbind(slot).await?;
            Ok::<_, Error>(guest.done(&Request::FlushMounts).await?)
        };
        if let Err(error) = taken.await {
            tracing::warn!(sandbox = %self.record.id, error = chain(&error), "a volume is still held");
        }
    }

    async fn set_back(&mut self, before: Record) {
        let back = self.write(before).await;
        self.was_set_back(back);
    }

    /// What its processes hold of its volumes, where it can't be revived without. What can't be had is left out.
    pub(super) async fn held(&self, guest: &Guest) -> Vec<HeldPath> {
        let spec = &self.record.spec;
        if spec.mounts().is_empty() || !self.world.abilities(spec).binds {
            return Vec::new();
        }
        guest.held().await.unwrap_or_else(|error| {
            tracing::warn!(sandbox = %self.record.id, error = chain(&error), "held files not known");
            Vec::new()
        })
    }

    /// Copies of the volumes that it alone writes; nothing of it runs meanwhile.
    pub(super) async fn copy_volumes(&self, made_for: &SandboxId) -> Result<Copies, Error> {
        let mut copies = Copies::new();
        for mount in self.record.spec.mounts().iter().filter(|mount| mount.is_exclusive()) {
            let copy = self.world.volumes.copy_for(&mount.volume, made_for).await?;
            copies.insert(mount.volume.clone(), copy.id);
        }
        Ok(copies)
    }
}

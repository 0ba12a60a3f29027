//! Volumes and drives of sandboxes: from a specification to what is mounted in a machine.
//!
//! What a sandbox has is in its specification, which is written before anything is mounted and after the last was
//! unmounted. A machine is brought to what its specification says as a whole, so that doing it again after a
//! crash, or to a machine that was adopted or revived, is right.

use torpor_protocol::guest::{BoundMount, HeldPath, Reply, Request};
use torpor_protocol::volume::{ForkVolumes, SLOTS};
use torpor_protocol::{GuestPath, Mount, SandboxId, SandboxSpec};

use std::sync::Arc;

use crate::engine::{HostMount, Machine};
use crate::fleet::RestorePoint;
use crate::guest::{FileServer, FilesMount, Guest, GuestError, ServedFiles};
use crate::guest::{serve_files, unexpected};
use crate::store::{LocalSave, StoreError};
use crate::world::World;
use crate::{Error, Refusal};

/// A volume of a machine, mounted on this host.
pub(crate) struct Mounted {
    pub(crate) host: HostMount,
    /// What answers its guest, where the engine does not bind it. It outlives sessions with the guest: locks are its.
    server: Option<Arc<dyn FileServer>>,
    /// Of this session.
    served: Option<ServedFiles>,
}

impl World {
    /// The volumes of a specification, mounted on this host.
    pub(crate) async fn open_volumes(
        &self,
        spec: &SandboxSpec,
    ) -> Result<Vec<Mounted>, StoreError> {
        let mut mounts = Vec::with_capacity(spec.mounts().len());
        for mount in spec.mounts() {
            mounts.push(self.open_volume(mount).await?);
        }
        Ok(mounts)
    }

    pub(crate) async fn open_volume(&self, mount: &Mount) -> Result<Mounted, StoreError> {
        let Mount { slot, subpath, read_only, .. } = mount.clone();
        let volume = self.volumes.open(&mount.volume).await?;
        if subpath.as_str() != "/" {
            // Others may have removed the folder since it was mounted last.
            let (path, whole) = (subpath.to_string(), GuestPath::root());
            let folder = HeldPath { slot, path, directory: true };
            self.volumes.put_back(&volume, &whole, vec![folder]).await?;
        }
        let host = HostMount { slot, volume, subpath, read_only };
        Ok(Mounted { host, server: None, served: None })
    }

    /// Makes what processes of a saved machine hold, where it was deleted meanwhile: without it the machine can't
    /// be revived.
    pub(crate) async fn put_back_held(
        &self,
        id: &SandboxId,
        mounts: &[Mounted],
        save: &LocalSave,
    ) -> Result<(), StoreError> {
        for mount in mounts.iter().map(|mounted| &mounted.host) {
            let held = save.manifest.about.held.iter().filter(|held| held.slot == mount.slot);
            let held: Vec<HeldPath> = held.cloned().collect();
            if held.is_empty() {
                continue;
            }
            let made = self.volumes.put_back(&mount.volume, &mount.subpath, held).await?;
            for path in made {
                tracing::warn!(sandbox = %id, volume = %mount.volume.id, path,
                    "deleted while the sandbox slept and still open in it: put back empty");
            }
        }
        Ok(())
    }

    /// Brings a machine that runs to what its specification says, whose volumes `mounts` are.
    pub(crate) async fn bring_mounts(
        &self,
        spec: &SandboxSpec,
        machine: &mut Box<dyn Machine>,
        guest: &Guest,
        mounts: &mut [Mounted],
    ) -> Result<(), Error> {
        if spec.mounts.is_none() {
            return Ok(());
        }
        if !self.abilities(spec).binds {
            return self.serve_mounts(spec, guest, mounts).await;
        }
        for mounted in mounts {
            machine.bind(&mounted.host).await?;
        }
        Ok(guest.set_mounts(spec.mounts()).await?)
    }

    /// To a machine that was frozen with them: what its engine bound is there.
    pub(crate) async fn serve_again(
        &self,
        spec: &SandboxSpec,
        guest: &Guest,
        mounts: &mut [Mounted],
    ) -> Result<(), Error> {
        if self.abilities(spec).binds {
            return Ok(());
        }
        self.serve_mounts(spec, guest, mounts).await
    }

    /// Has the guest mount what it has not, and serves all of it in this session.
    async fn serve_mounts(
        &self,
        spec: &SandboxSpec,
        guest: &Guest,
        mounts: &mut [Mounted],
    ) -> Result<(), Error> {
        for (mounted, mount) in mounts.iter_mut().zip(spec.mounts()) {
            if mounted.served.as_ref().is_some_and(ServedFiles::is_served) {
                continue;
            }
            let server = match &mounted.server {
                Some(server) => Arc::clone(server),
                None => {
                    let HostMount { volume, subpath, read_only, .. } = &mounted.host;
                    let server = self.volumes.server(volume, subpath, *read_only).await?;
                    Arc::clone(mounted.server.insert(server))
                }
            };
            mounted.served = Some(serve_files(guest, served(mount), server).await?);
        }
        Ok(())
    }
}

/// How a guest that is served has a mount. Who only reads a volume shares it with the one who writes.
fn served(mount: &Mount) -> FilesMount {
    FilesMount {
        number: mount.slot,
        path: mount.path.to_string(),
        read_only: mount.read_only,
        shared: !mount.is_exclusive(),
    }
}

impl Guest {
    /// Has the agent mount what was bound, and unmount what was taken away.
    pub(crate) async fn set_mounts(&self, mounts: &[Mount]) -> Result<(), GuestError> {
        let bound = |mount: &Mount| BoundMount { slot: mount.slot, path: mount.path.to_string() };
        self.done(&Request::SetMounts { mounts: mounts.iter().map(bound).collect() }).await
    }

    /// What processes hold of the volumes.
    pub(crate) async fn held(&self) -> Result<Vec<HeldPath>, GuestError> {
        let Reply::Held { paths } = self.call(&Request::HeldPaths).await? else {
            return Err(unexpected(&Request::HeldPaths));
        };
        Ok(paths)
    }
}

/// `mount` with the first number that none of these has.
pub(crate) fn in_free_slot(mounts: &[Mount], mount: Mount) -> Result<Mount, Refusal> {
    let free = (0..SLOTS).find(|slot| mounts.iter().all(|mount| mount.slot != *slot));
    free.map(|slot| Mount { slot, ..mount }).ok_or(Refusal::NoSlot(SLOTS))
}

impl World {
    /// The volumes of a sandbox that begins from a restore point: those of then, as `how` says, and its own. Copies
    /// that were made belong to `id`.
    pub(crate) async fn inherit_mounts(
        &self,
        spec: &SandboxSpec,
        point: &RestorePoint,
        how: ForkVolumes,
        id: &SandboxId,
    ) -> Result<Option<Vec<Mount>>, Error> {
        let own = spec.mounts();
        let Some(then) = &point.spec().mounts else {
            if own.is_empty() {
                return Ok(None);
            }
            return Err(Refusal::NotMountable(point.save.id.to_string()).into());
        };
        let mut mounts = Vec::with_capacity(then.len() + own.len());
        for mount in then {
            mounts.push(match how {
                ForkVolumes::ShareRo => {
                    Mount { read_only: mount.read_only || mount.is_exclusive(), ..mount.clone() }
                }
                ForkVolumes::Copy if mount.is_exclusive() => {
                    let source = point.copies.get(&mount.volume).unwrap_or(&mount.volume);
                    let copy = self.volumes.copy_for(source, id).await?;
                    Mount { volume: copy.id, name: copy.name, ..mount.clone() }
                }
                ForkVolumes::Copy | ForkVolumes::Refuse => mount.clone(),
            });
        }
        for mount in own {
            mounts.push(in_free_slot(&mounts, mount.clone())?);
        }
        Ok(Some(mounts))
    }
}

#[cfg(test)]
mod tests {
    use torpor_protocol::{VolumeId, VolumeKind};

    use super::*;

    #[test]
    fn only_the_writer_of_a_volume_believes_what_it_knows() {
        for (kind, read_only, shared) in [
            (VolumeKind::Volume, false, false),
            (VolumeKind::Volume, true, true),
            (VolumeKind::Drive, false, true),
            (VolumeKind::Drive, true, true),
        ] {
            let [subpath, path] = ["/", "/data"].map(|path| path.parse().unwrap());
            let (volume, name) = (VolumeId::random(), "data".parse().unwrap());
            let mount = Mount { slot: 3, volume, name, kind, subpath, path, read_only };
            assert_eq!(served(&mount).shared, shared, "{kind:?}, reads only: {read_only}");
        }
    }
}

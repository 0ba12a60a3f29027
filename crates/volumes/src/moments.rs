//! Copies of a volume as it is at a moment, and its growth.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use torpor_disk::VolumeImage;
use torpor_lifecycle::fault;
use torpor_lifecycle::store::{StoreError, VolumeRecord};
use torpor_protocol::id::NAME_MAX;
use torpor_protocol::volume::UpdateVolume;
use torpor_protocol::{Name, SandboxId, VolumeId, VolumeRef};

use crate::serve;
use crate::stage::Stage;
use crate::{IMAGE, VolumeStore, blocking};

/// Who writes to a volume waits while it is copied, for at most this long; then it goes on, and there is no copy.
const COPY_DEADLINE: Duration = Duration::from_secs(60);
/// Characters of a sandbox's id in the name of a copy that is its own: two of the same volume never meet.
const SUFFIX: usize = 12;

impl VolumeStore {
    /// Makes a volume with the files that `of` has at this moment, and at least its size.
    pub async fn copy(&self, of: &VolumeId, record: &VolumeRecord) -> Result<(), StoreError> {
        self.check_new(record).await?;
        let stage = Stage::new(&self.inner.dirs.images)?;
        let staged = stage.path().join(IMAGE);
        let used = self.used(of);
        let turn = used.turn.lock().await;
        let size_mib = self.find(&VolumeRef::Id(of.clone())).await?.size_mib;
        if record.size_mib < size_mib {
            return Err(StoreError::Invalid(format!(
                "a copy of a volume of {size_mib} MiB can't have {}",
                record.size_mib
            )));
        }
        let held = self.mount(of, &used).await?;
        let (image, to) = (self.image(of), staged.clone());
        let (from, beside) = (self.directory(of), stage.path().to_owned());
        blocking("copy a volume", move || {
            image.copy(&to, COPY_DEADLINE, || fault::point("volume.frozen"))?;
            serve::copy_key(&from, &beside)
        })
        .await?;
        drop(held);
        drop(turn);
        fault::point("volume.copied");
        let (copy, wanted) = (VolumeImage::at(&staged, stage.path()), record.size_mib);
        let size_mib = blocking("check the copy of a volume", move || match wanted > size_mib {
            true => copy.grow_unmounted(wanted),
            false => copy.check().map(|()| wanted),
        })
        .await?;
        self.place(stage, &VolumeRecord { size_mib, ..record.clone() }).await
    }

    /// Gives a volume more room: while it is used if the kernel does that, else when nobody uses it.
    pub async fn grow(&self, id: &VolumeId, size_mib: u64) -> Result<VolumeRecord, StoreError> {
        let used = self.used(id);
        let _turn = used.turn.lock().await;
        let record = self.find(&VolumeRef::Id(id.clone())).await?;
        if size_mib < record.size_mib {
            return Err(StoreError::Invalid(format!(
                "a volume only grows: {} has {} MiB",
                record.name, record.size_mib
            )));
        }
        self.check_size(size_mib, record.size_mib)?;
        let was_held = used.is_held();
        let held = self.mount(id, &used).await?;
        let image = self.image(id);
        let grown = blocking("grow a volume", move || {
            image.lengthen(size_mib)?;
            fault::point("volume.lengthened");
            image.grow_device()?;
            fault::point("volume.device_grown");
            image.grow_mounted(size_mib)
        });
        let grown = grown.await;
        drop(held);
        let size_mib = match grown {
            Ok(()) => size_mib,
            Err(why) => {
                tracing::debug!(volume = %id, %why, "it does not grow while it is mounted");
                self.grow_unused(&record, was_held, size_mib).await?
            }
        };
        fault::point("volume.grown");
        let grown = UpdateVolume { size_mib: Some(size_mib), ..UpdateVolume::default() };
        self.inner.ledger.update_volume(id, &grown).await
    }

    async fn grow_unused(
        &self,
        record: &VolumeRecord,
        held: bool,
        size_mib: u64,
    ) -> Result<u64, StoreError> {
        let image = self.image(&record.id);
        let free = !held
            && blocking("unmount a volume", move || {
                image.unmount()?;
                image.released()
            })
            .await?;
        if !free {
            let what =
                format!("volume {}, which can't grow on this host while it is used,", record.name);
            let users = self.attachments(&record.id).await?;
            let users: Vec<_> = users
                .into_iter()
                .map(|one| {
                    one.sandbox_name.map_or(one.sandbox.to_string(), |name| name.to_string())
                })
                .collect();
            let by = match users.is_empty() {
                true => "somebody who reads or writes its files".to_owned(),
                false => format!("{}: put to sleep who is awake, with --cold", users.join(", ")),
            };
            return Err(StoreError::InUse { what, by });
        }
        fault::point("volume.unmounted");
        let image = self.image(&record.id);
        let size_mib = blocking("grow a volume", move || image.grow_unmounted(size_mib)).await?;
        fault::point("volume.filesystem_grown");
        Ok(size_mib)
    }
}

/// What a sandbox's own copy of a volume is called.
pub(crate) fn name_for(of: &Name, sandbox: &SandboxId) -> Name {
    let base: String = of.as_str().chars().take(NAME_MAX - SUFFIX - 1).collect();
    let suffix = &sandbox.as_str()[..SUFFIX];
    let name = format!("{}-{suffix}", base.trim_end_matches('-'));
    name.parse().unwrap_or_else(|_| of.clone())
}

pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

//! Who holds which volume, and when one is unmounted.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use torpor_lifecycle::store::{OpenVolume, StoreError, VolumeHold};
use torpor_protocol::{VolumeId, VolumeRef};

use crate::{VolumeStore, blocking};

/// A volume that nobody holds stays mounted for so long: sandboxes that fall asleep wake, and whoever reads one file
/// reads another.
const GRACE: Duration = Duration::from_secs(5);
/// Of a volume that is unmounted, until the kernel has let go of it.
const RELEASE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(50);

/// One volume since somebody asked for it first.
#[derive(Debug, Default)]
pub(crate) struct Use {
    /// Held by who mounts, unmounts, copies, grows or removes it.
    pub(crate) turn: tokio::sync::Mutex<()>,
    holds: AtomicUsize,
    /// How often somebody took hold of it.
    taken: AtomicUsize,
    /// Its files, if a guest is served.
    pub(crate) files: Mutex<Weak<torpor_files::Volume>>,
}

impl Use {
    pub(crate) fn is_held(&self) -> bool {
        self.holds.load(Ordering::Acquire) > 0
    }
}

impl VolumeStore {
    pub(crate) fn used(&self, id: &VolumeId) -> Arc<Use> {
        Arc::clone(self.inner.uses.lock().entry(id.clone()).or_default())
    }

    /// Mounts it, if it is not, and holds it.
    pub(crate) async fn mounted(&self, id: &VolumeId) -> Result<Arc<OpenVolume>, StoreError> {
        // Also so that nothing is kept for what nobody knows.
        self.find(&VolumeRef::Id(id.clone())).await?;
        let used = self.used(id);
        let _turn = used.turn.lock().await;
        // It may have been removed while this waited.
        self.find(&VolumeRef::Id(id.clone())).await?;
        self.mount(id, &used).await
    }

    /// The same for who has the turn.
    pub(crate) async fn mount(
        &self,
        id: &VolumeId,
        used: &Arc<Use>,
    ) -> Result<Arc<OpenVolume>, StoreError> {
        let image = self.image(id);
        let dir = image.mountpoint().to_owned();
        let unattached = !used.is_held() && self.attachments(id).await?.is_empty();
        blocking("mount a volume", move || {
            let fresh = !image.mounted()?;
            image.mount()?;
            if fresh && unattached {
                // Whoever had a removed file open, or uploaded one, is gone.
                torpor_files::Volume::open(image.mountpoint())?.empty_removed()?;
            }
            Ok(())
        })
        .await?;
        used.holds.fetch_add(1, Ordering::AcqRel);
        used.taken.fetch_add(1, Ordering::AcqRel);
        let (store, used, of) = (self.clone(), Arc::clone(used), id.clone());
        let runtime = tokio::runtime::Handle::current();
        let hold = VolumeHold::new(move || {
            if used.holds.fetch_sub(1, Ordering::AcqRel) == 1 {
                let taken = used.taken.load(Ordering::Acquire);
                // Without a runtime the daemon has ended: the next one sweeps.
                runtime.spawn(async move {
                    tokio::time::sleep(GRACE).await;
                    let unwanted = used.taken.load(Ordering::Acquire) == taken;
                    if unwanted
                        && !store.inner.closed.load(Ordering::Acquire)
                        && store.unmount(&of, &used).await
                    {
                        store.expect_released(&of, &used).await;
                    }
                });
            }
        });
        Ok(Arc::new(OpenVolume { id: id.clone(), dir, hold }))
    }

    /// Unmounts it, unless somebody holds it. Whether it is so.
    async fn unmount(&self, id: &VolumeId, used: &Use) -> bool {
        let _turn = used.turn.lock().await;
        if used.is_held() {
            return false;
        }
        let image = self.image(id);
        let unmounted = blocking("unmount a volume", move || image.unmount()).await;
        if let Err(error) = &unmounted {
            tracing::warn!(volume = %id, %error, "a volume that nobody uses stays mounted");
        }
        unmounted.is_ok()
    }

    /// Says so if the kernel keeps it although nobody holds it: somebody still writes to files that are out of
    /// sight.
    async fn expect_released(&self, id: &VolumeId, used: &Use) {
        let deadline = Instant::now() + RELEASE;
        while !used.is_held() {
            let image = self.image(id);
            match blocking("look at a volume", move || image.in_use()).await {
                Ok(true) if Instant::now() < deadline => tokio::time::sleep(PAUSE).await,
                Ok(true) => {
                    tracing::warn!(volume = %id, "a volume that nobody has is still open");
                    return;
                }
                Ok(false) | Err(_) => return,
            }
        }
    }

    /// The daemon stops: what nobody holds is unmounted now.
    pub async fn close(&self) {
        let all: Vec<_> = self
            .inner
            .uses
            .lock()
            .iter()
            .map(|(id, used)| (id.clone(), Arc::clone(used)))
            .collect();
        for (id, used) in all {
            self.unmount(&id, &used).await;
        }
        // The next daemon's mounts are at the same places.
        self.inner.closed.store(true, Ordering::Release);
    }
}

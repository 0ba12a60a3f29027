//! Who reads a save in this daemon, and what waits for the last of them.

use std::sync::Arc;

use parking_lot::Mutex;
use torpor_lifecycle::store::SavePin;
use torpor_protocol::SaveId;

use super::Shared;
use super::manifest::Known;

/// One save, as this daemon uses it.
#[derive(Default)]
pub(super) struct Slot {
    /// Held while it is read or removed, so that one caller does it and the others wait.
    pub(super) known: tokio::sync::Mutex<Option<Arc<Known>>>,
    usage: Mutex<Usage>,
}

#[derive(Default)]
struct Usage {
    readers: usize,
    /// Somebody let go of it while it was read.
    released: bool,
}

impl Slot {
    /// Whether it can't be removed now; the last reader does it then. While `known` is locked.
    pub(super) fn is_read(&self) -> bool {
        let mut usage = self.usage.lock();
        usage.released |= usage.readers > 0;
        usage.readers > 0
    }

    pub(super) fn readers(&self) -> usize {
        self.usage.lock().readers
    }
}

/// Keeps a save on disk. While `slot.known` is locked, so that a removal does not miss it.
pub(super) fn pin(shared: &Arc<Shared>, id: &SaveId, slot: &Arc<Slot>) -> SavePin {
    slot.usage.lock().readers += 1;
    let (shared, id, slot) = (shared.clone(), id.clone(), slot.clone());
    SavePin::new(move || {
        let mut usage = slot.usage.lock();
        usage.readers -= 1;
        if usage.readers == 0 && std::mem::take(&mut usage.released) {
            let runtime = shared.runtime.clone();
            runtime.spawn(async move { shared.remove(&id).await });
        }
    })
}

//! One at a time per sandbox: a boot waits until what is left of the machine before it is gone.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Mutex as Lock, OwnedMutexGuard};
use torpor_protocol::SandboxId;

/// Holds a sandbox's turn until dropped.
pub(crate) type Turn = OwnedMutexGuard<()>;

#[derive(Debug, Default)]
pub(crate) struct Turns(Mutex<HashMap<SandboxId, Arc<Lock<()>>>>);

impl Turns {
    pub(crate) async fn take(&self, id: &SandboxId) -> Turn {
        let lock = {
            let mut locks = self.0.lock();
            // Locks that nobody holds or waits for are only in the map.
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            locks.entry(id.clone()).or_default().clone()
        };
        lock.lock_owned().await
    }
}

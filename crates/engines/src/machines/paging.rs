//! Giving the memory of a paused machine to the host's swap takes a while, and may become unwanted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tells the thread that pages out to leave off.
#[derive(Debug, Default)]
pub(crate) struct PagingOut(parking_lot::Mutex<Arc<AtomicBool>>);

impl PagingOut {
    /// True while it is wanted.
    pub(crate) fn begin(&self) -> Arc<AtomicBool> {
        self.stop();
        let wanted = Arc::new(AtomicBool::new(true));
        *self.0.lock() = wanted.clone();
        wanted
    }

    pub(crate) fn stop(&self) {
        self.0.lock().store(false, Ordering::Relaxed);
    }
}

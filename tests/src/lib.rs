//! The vocabulary of the end-to-end tests: a [`World`] is a real daemon with a real engine on a free
//! port, in a data directory of its own.
//!
//! Worlds live side by side. When one ends, also by a failed test, its daemon is killed and its
//! installation purged, so nothing is left on the host.

mod counter;
mod daemon;
mod guest;
mod http;
mod internet;
mod microvm;
pub mod registry;
mod small_disk;
mod template;
mod tidiness;
mod toll;
mod traces;
mod world;

pub use counter::Count;
pub use daemon::{runsc, torpor_binary};
pub use guest::{GUEST, TIERS};
pub use http::{Answer, raw, request};
pub use internet::{ECHO_PORT, Internet, TLS_PORT};
pub use toll::Toll;
pub use traces::{Machine, Traces};
pub use world::{Outcome, World};

use std::time::{Duration, SystemTime};

/// Longer than anything here takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Asks until the answer is `Some`, or fails the test.
#[track_caller]
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = SystemTime::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        let waited = start.elapsed().unwrap_or_default();
        assert!(waited < PATIENCE, "waited {waited:?} in vain for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

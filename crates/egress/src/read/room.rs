//! Room for bodies that are kept whole: each sandbox has some, whatever its connections do, so that none
//! fills the memory of the host.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use torpor_protocol::SandboxId;

use super::body::CHANGED_MAX;

/// What the bodies of one sandbox may take at the same time: a few dozen of the largest.
const ROOM: usize = 32 * CHANGED_MAX;
/// Room is given out in pieces of this many bytes.
const PIECE: usize = 1024;

/// The rooms of all sandboxes that have connections.
#[derive(Debug, Default)]
pub(super) struct Rooms {
    by_sandbox: Mutex<HashMap<SandboxId, Weak<Semaphore>>>,
}

/// The room of one sandbox.
#[derive(Debug, Clone)]
pub(super) struct Room(Arc<Semaphore>);

/// Some room, until it is dropped.
pub(super) type Place = OwnedSemaphorePermit;

impl Rooms {
    pub(super) fn of(&self, sandbox: &SandboxId) -> Room {
        let mut rooms = self.by_sandbox.lock();
        if let Some(room) = rooms.get(sandbox).and_then(Weak::upgrade) {
            return Room(room);
        }
        rooms.retain(|_, room| room.strong_count() > 0);
        let room = Arc::new(Semaphore::new(ROOM / PIECE));
        rooms.insert(sandbox.clone(), Arc::downgrade(&room));
        Room(room)
    }
}

impl Room {
    /// Room for a body of this length, if there is some left.
    pub(super) fn take(&self, length: usize) -> Option<Place> {
        let pieces = u32::try_from(length.div_ceil(PIECE).max(1)).ok()?;
        self.0.clone().try_acquire_many_owned(pieces).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_that_uses_all_of_its_room_leaves_others_theirs() {
        let rooms = Rooms::default();
        let (one, other) = (SandboxId::random(), SandboxId::random());
        let room = rooms.of(&one);
        let places: Vec<_> = (0..32).map(|_| room.take(CHANGED_MAX).unwrap()).collect();
        assert!(rooms.of(&one).take(1).is_none());
        assert!(rooms.of(&other).take(CHANGED_MAX).is_some());
        drop(places);
        assert!(rooms.of(&one).take(CHANGED_MAX).is_some());
    }

    #[test]
    fn a_sandbox_that_left_is_forgotten() {
        let rooms = Rooms::default();
        for _ in 0..10 {
            rooms.of(&SandboxId::random());
        }
        assert_eq!(rooms.by_sandbox.lock().len(), 1);
    }
}

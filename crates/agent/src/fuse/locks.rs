//! Locks that processes hold, so that they can be asserted again; and those that they wait for.

use std::collections::HashMap;

use torpor_protocol::guest::files::{Lock, Locking};

/// Processes that may wait for locks at once.
const WAITING_MAX: usize = 4096;

/// A file by its number, an owner, and which of the two kinds of locks.
type Key = (u64, u64, bool);

#[derive(Default)]
pub(super) struct Locks {
    held: HashMap<Key, Vec<Lock>>,
    waiting: Vec<Waiting>,
}

/// A process that waits for a lock.
pub(super) struct Waiting {
    pub(super) unique: u64,
    pub(super) pid: u32,
    pub(super) node: u64,
    pub(super) lock: Lock,
}

impl Locks {
    pub(super) fn holds(&self, node: u64, owner: u64, flock: bool) -> bool {
        self.held.contains_key(&(node, owner, flock))
    }

    /// All that are held, with the numbers of their files.
    pub(super) fn all(&self) -> Vec<(u64, Lock)> {
        let each = self.held.iter();
        each.flat_map(|(key, locks)| locks.iter().map(|lock| (key.0, *lock))).collect()
    }

    /// A lock was set: it takes the place of what the owner had there.
    pub(super) fn set(&mut self, node: u64, lock: Lock) {
        let key = (node, lock.owner, lock.flock);
        let mut locks = Vec::new();
        for held in self.held.remove(&key).unwrap_or_default() {
            if lock.flock || held.end < lock.start || held.start > lock.end {
                if !lock.flock {
                    locks.push(held);
                }
                continue;
            }
            if held.start < lock.start {
                locks.push(Lock { end: lock.start - 1, ..held });
            }
            if held.end > lock.end {
                locks.push(Lock { start: lock.end + 1, ..held });
            }
        }
        if lock.kind != Locking::Unlocked {
            locks.push(lock);
        }
        if !locks.is_empty() {
            self.held.insert(key, locks);
        }
    }

    /// `false`: too many wait already.
    pub(super) fn wait(&mut self, waiting: Waiting) -> bool {
        let room = self.waiting.len() < WAITING_MAX;
        if room {
            self.waiting.push(waiting);
        }
        room
    }

    pub(super) fn anybody_waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// All who wait, to try once more.
    pub(super) fn take_waiting(&mut self) -> Vec<Waiting> {
        std::mem::take(&mut self.waiting)
    }

    /// Whether one waited that does not want to any more.
    pub(super) fn interrupt(&mut self, unique: u64) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|waiting| waiting.unique != unique);
        self.waiting.len() < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_takes_the_place_of_what_its_owner_had_there() {
        let lock = |kind, start, end| Lock { owner: 1, flock: false, kind, start, end };
        let mut locks = Locks::default();
        locks.set(7, lock(Locking::Shared, 0, 99));
        locks.set(7, lock(Locking::Exclusive, 10, 19));
        locks.set(7, lock(Locking::Unlocked, 50, 59));
        let mut held: Vec<_> =
            locks.all().into_iter().map(|(_, it)| (it.start, it.end, it.kind)).collect();
        held.sort_unstable_by_key(|it| it.0);
        let (shared, exclusive) = (Locking::Shared, Locking::Exclusive);
        assert_eq!(held, [(0, 9, shared), (10, 19, exclusive), (20, 49, shared), (60, 99, shared)]);
        assert!(locks.holds(7, 1, false) && !locks.holds(7, 1, true));
        locks.set(7, lock(Locking::Unlocked, 0, u64::MAX));
        assert!(!locks.holds(7, 1, false));
        for kind in [shared, exclusive] {
            locks.set(7, Lock { flock: true, ..lock(kind, 0, 0) });
        }
        assert_eq!(locks.all().len(), 1, "one of this kind");
    }
}

//! Locks that processes hold, so that they can be asserted again; and those that they wait for.

use std::collections::{HashMap, HashSet};

use torpor_protocol::guest::files::Lock;

/// Processes that may wait for locks at once.
const WAITING_MAX: usize = 4096;

/// A file by its number, an owner, and which of the two kinds of locks.
type Key = (u64, u64, bool);

#[derive(Default)]
pub(super) struct Locks {
    held: HashMap<Key, Vec<Lock>>,
    /// Those of which somebody else took one meanwhile. They stay so until their owners give all of them back.
    lost: HashSet<Key>,
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
        let mut locks = self.held.remove(&key).unwrap_or_default();
        lock.set(&mut locks);
        if locks.is_empty() {
            self.lost.remove(&key);
        } else {
            self.held.insert(key, locks);
        }
    }

    /// A lock could not be held again.
    pub(super) fn lose(&mut self, node: u64, lock: Lock) {
        let key = (node, lock.owner, lock.flock);
        if self.held.contains_key(&key) {
            self.lost.insert(key);
        }
    }

    /// Whether somebody works with a file in the belief that it is locked.
    pub(super) fn any_lost(&self, node: u64) -> bool {
        self.lost.iter().any(|key| key.0 == node)
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
    use torpor_protocol::guest::files::Locking;

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

    #[test]
    fn a_lost_lock_is_remembered_until_its_owner_gives_all_back() {
        let lock = |kind, start, end| Lock { owner: 1, flock: false, kind, start, end };
        let mut locks = Locks::default();
        locks.lose(7, lock(Locking::Shared, 0, 9));
        assert!(!locks.any_lost(7), "it was given back before");
        locks.set(7, lock(Locking::Shared, 0, 9));
        locks.lose(7, lock(Locking::Shared, 0, 9));
        assert!(locks.any_lost(7) && !locks.any_lost(8));
        locks.set(7, lock(Locking::Exclusive, 20, 29));
        locks.set(7, lock(Locking::Unlocked, 0, 9));
        assert!(locks.any_lost(7));
        locks.set(7, lock(Locking::Unlocked, 0, u64::MAX));
        assert!(!locks.any_lost(7));
    }
}

//! Who has which slot.
//!
//! ```text
//!   Making ─▶ Ready ─▶ Taken ─▶ Doubtful ─▶ Ready
//!                         ▲         │  ▲
//!                         └─ adopt ─┘  └── found after a restart
//! ```
//!
//! A doubtful slot becomes ready when the kernel says that no packet socket is on it and that nobody
//! has its network card open, never before: two machines can't have the same slot, whatever the daemon believes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::NetworkError;
use super::names::SLOTS;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Making,
    Ready(u32),
    Taken(u32),
    Doubtful(u32),
    /// Of a machine that an earlier daemon left, with a guest or without.
    Left(u32),
}

/// The state of every slot that exists; numbers in the variants are those of their host ends.
#[derive(Debug, Default)]
pub(super) struct Pool {
    slots: BTreeMap<u16, State>,
    /// Longest unused first, so that what the world still sends to a former guest has died down.
    ready: VecDeque<u16>,
    /// How many wait in `take`.
    pub(super) waiting: usize,
    /// Why the last slot could not be made.
    pub(super) failure: Option<Arc<NetworkError>>,
}

impl Pool {
    pub(super) fn take(&mut self) -> Option<(u16, u32)> {
        let number = self.ready.pop_front()?;
        self.seize(number).ok().map(|index| (number, index))
    }

    /// Takes this very slot, if it exists and nobody has it.
    pub(super) fn adopt(&mut self, number: u16) -> Result<u32, NetworkError> {
        self.ready.retain(|ready| *ready != number);
        self.seize(number)
    }

    fn seize(&mut self, number: u16) -> Result<u32, NetworkError> {
        match self.slots.get(&number).copied() {
            Some(State::Ready(index) | State::Doubtful(index) | State::Left(index)) => {
                self.slots.insert(number, State::Taken(index));
                Ok(index)
            }
            Some(State::Taken(_)) => Err(NetworkError::InUse(number)),
            Some(State::Making) | None => Err(NetworkError::Missing(number)),
        }
    }

    /// True if there is something to look after now.
    pub(super) fn give_back(&mut self, number: u16) -> bool {
        match self.slots.get(&number).copied() {
            Some(State::Taken(index)) => {
                self.slots.insert(number, State::Doubtful(index));
                true
            }
            Some(State::Making | State::Ready(_) | State::Doubtful(_) | State::Left(_)) | None => {
                false
            }
        }
    }

    /// A slot of an earlier daemon; `left`: a machine of it lives.
    pub(super) fn found(&mut self, number: u16, index: u32, left: bool) {
        let state = if left { State::Left(index) } else { State::Doubtful(index) };
        self.slots.insert(number, state);
    }

    /// Machines that an earlier daemon left here are known to whoever wants them, and all others are gone.
    pub(super) fn swept(&mut self, numbers: &[u16]) {
        for number in numbers {
            if let Some(State::Left(index)) = self.slots.get(number).copied() {
                self.slots.insert(*number, State::Doubtful(index));
            }
        }
    }

    pub(super) fn doubtful(&self) -> Vec<(u16, u32)> {
        let doubtful = |(number, state): (&u16, &State)| match state {
            State::Doubtful(index) => Some((*number, *index)),
            State::Making | State::Ready(_) | State::Taken(_) | State::Left(_) => None,
        };
        self.slots.iter().filter_map(doubtful).collect()
    }

    /// Nobody is on it any more; unless it was adopted in the meantime it can be handed on.
    pub(super) fn cleared(&mut self, number: u16) {
        if let Some(State::Doubtful(index)) = self.slots.get(&number).copied() {
            self.slots.insert(number, State::Ready(index));
            self.ready.push_back(number);
        }
    }

    /// A number for a new slot if fewer than `spare` are ready beyond those that are waited for.
    pub(super) fn wanted(&mut self, spare: usize) -> Option<u16> {
        if self.ready.len() >= spare + self.waiting {
            return None;
        }
        let Some(number) = (1..=SLOTS).find(|number| !self.slots.contains_key(number)) else {
            if self.ready.is_empty() && self.waiting > 0 {
                self.failure = Some(Arc::new(NetworkError::Full));
            }
            return None;
        };
        self.slots.insert(number, State::Making);
        Some(number)
    }

    pub(super) fn made(&mut self, number: u16, index: u32) {
        self.slots.insert(number, State::Ready(index));
        self.ready.push_back(number);
        self.failure = None;
    }

    pub(super) fn not_made(&mut self, number: u16, why: NetworkError) {
        self.slots.remove(&number);
        self.failure = Some(Arc::new(why));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_slots(count: u16) -> Pool {
        let mut pool = Pool::default();
        for _ in 0..count {
            let number = pool.wanted(usize::from(count)).expect("there is room");
            pool.made(number, u32::from(number) + 100);
        }
        pool
    }

    #[test]
    fn a_slot_has_one_owner_at_a_time() {
        let mut pool = with_slots(2);
        assert_eq!(pool.take(), Some((1, 101)));
        assert!(matches!(pool.adopt(1), Err(NetworkError::InUse(1))));
        assert!(matches!(pool.adopt(9), Err(NetworkError::Missing(9))));
        assert_eq!(pool.adopt(2).expect("free"), 102);
        assert_eq!(pool.take(), None);
    }

    #[test]
    fn a_slot_given_back_is_handed_on_only_when_cleared() {
        let mut pool = with_slots(1);
        pool.take().expect("a slot");
        assert!(pool.give_back(1));
        assert!(!pool.give_back(1), "twice is once");
        assert_eq!(pool.take(), None);
        assert_eq!(pool.doubtful(), [(1, 101)]);
        pool.cleared(1);
        pool.cleared(1);
        assert_eq!(pool.take(), Some((1, 101)));
        assert_eq!(pool.take(), None, "clearing twice does not give it out twice");
    }

    #[test]
    fn a_found_slot_that_is_adopted_is_not_cleared_under_its_owner() {
        let mut pool = Pool::default();
        pool.found(5, 105, false);
        assert_eq!(pool.take(), None);
        assert_eq!(pool.adopt(5).expect("found"), 105);
        pool.cleared(5);
        assert_eq!(pool.take(), None);
        assert_eq!(pool.wanted(1), Some(1), "new ones get other numbers");
    }

    #[test]
    fn nobody_comes_into_the_place_of_a_machine_that_was_left_before_it_is_swept() {
        let mut pool = Pool::default();
        pool.found(5, 105, true);
        pool.found(6, 106, true);
        pool.found(7, 107, true);
        pool.cleared(5);
        assert_eq!((pool.take(), pool.doubtful()), (None, vec![]));
        assert_eq!(pool.adopt(6).expect("it is its own"), 106);
        pool.swept(&[5, 6]);
        assert_eq!(pool.doubtful(), [(5, 105)], "7 is of an engine that was not swept");
    }

    #[test]
    fn at_the_last_slot_the_waiting_are_told() {
        let mut pool = with_slots(SLOTS);
        while pool.take().is_some() {}
        pool.waiting = 1;
        assert_eq!(pool.wanted(4), None);
        assert!(matches!(pool.failure.as_deref(), Some(NetworkError::Full)));
    }
}

//! Connections that outlive a session, because the machine sleeps in between.
//!
//! Whoever sends keeps what it sent until the other side granted it again; whoever receives counts.
//! When a session ends nobody knows what was on its way, so the first thing that is said on the next
//! stream of the connection is, both ways, how far each is ([`Reached`]). The sender sends what the
//! other did not get, and no byte is lost or comes twice. Where the two do not fit together (the
//! machine is back at an older moment) the connection is over.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// Kept connections that one sandbox may have.
pub const KEPT_MAX: usize = 256;
/// Bytes that may be under way on a kept connection in one direction. Both sides hold so many of each
/// for as long as the other is silent: less than the window of other streams, and enough for their
/// speed, as consumed bytes are granted again at once.
pub const KEPT_WINDOW: u32 = 256 * 1024;

/// What an empty log may keep of the memory it had.
const SPARE: usize = 4 * 1024;

/// How far the receiving side of one direction is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reached {
    /// Bytes that came since the connection was made.
    pub received: u64,
    /// How many of them, the last ones, were not granted again.
    pub waiting: u64,
}

/// What was sent in one direction and not granted again.
#[derive(Debug, Default)]
pub struct Unconfirmed {
    confirmed: u64,
    bytes: VecDeque<u8>,
}

impl Unconfirmed {
    /// It is about to be sent.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    /// The other side granted so many bytes; more than it got are no bytes.
    pub fn confirm(&mut self, count: usize) {
        let count = count.min(self.bytes.len());
        self.bytes.drain(..count);
        self.confirmed += count as u64;
        if self.bytes.is_empty() {
            self.bytes.shrink_to(SPARE);
        }
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The other side is there: what it did not get, to be sent again. `None`, and nothing changed: it
    /// speaks of another past.
    pub fn go_on(&mut self, reached: Reached) -> Option<Vec<u8>> {
        let granted = reached.received.checked_sub(reached.waiting)?;
        let confirmed = usize::try_from(granted.checked_sub(self.confirmed)?).ok()?;
        let waiting = usize::try_from(reached.waiting).ok()?;
        if confirmed.checked_add(waiting)? > self.bytes.len() {
            return None;
        }
        self.confirm(confirmed);
        Some(self.bytes.iter().skip(waiting).copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn reached(received: u64, waiting: u64) -> Reached {
        Reached { received, waiting }
    }

    #[test]
    fn what_did_not_arrive_is_sent_again() {
        let mut log = Unconfirmed::default();
        log.push(b"abcdef");
        log.confirm(2);
        assert_eq!(log.go_on(reached(4, 1)).as_deref(), Some(&b"ef"[..]));
        assert_eq!(log.len(), 3, "the one that waits and the two that are sent again");
        assert_eq!(log.go_on(reached(6, 0)).as_deref(), Some(&b""[..]));
        assert!(log.is_empty());
    }

    #[test]
    fn another_past_is_noticed() {
        let mut log = Unconfirmed::default();
        log.push(b"abcdef");
        log.confirm(2);
        for (received, waiting) in [(1, 0), (2, 1), (7, 0), (7, 5), (3, 4), (u64::MAX, 0), (0, 0)] {
            assert_eq!(log.go_on(reached(received, waiting)), None, "{received}, {waiting}");
        }
        assert_eq!(log.len(), 4, "nothing changed");
    }

    proptest! {
        /// Bytes are sent, lost with their session, and sent again, in any order.
        #[test]
        fn every_byte_arrives_once(steps in prop::collection::vec((0..3_u8, 0..50_usize), 0..60)) {
            let mut log = Unconfirmed::default();
            let (mut sent, mut under_way, mut got, mut waiting) = (0_usize, vec![], vec![], 0);
            for (kind, count) in steps {
                match kind {
                    0 => {
                        let bytes: Vec<u8> = (sent..sent + count).map(|at| at as u8).collect();
                        sent += count;
                        log.push(&bytes);
                        under_way.extend(bytes);
                    }
                    1 => {
                        let arrived = count.min(under_way.len());
                        got.extend(under_way.drain(..arrived));
                        waiting += arrived;
                        let granted = count.min(waiting);
                        waiting -= granted;
                        // Every other grant is lost with the session.
                        if count % 2 == 0 {
                            log.confirm(granted);
                        } else {
                            under_way = log.go_on(reached(got.len() as u64, waiting as u64)).unwrap();
                        }
                    }
                    _ => under_way = log.go_on(reached(got.len() as u64, waiting as u64)).unwrap(),
                }
            }
            got.extend(under_way);
            let all: Vec<u8> = (0..sent).map(|at| at as u8).collect();
            prop_assert_eq!(got, all);
        }
    }
}

//! Answers lately given to calls that can't be done twice.
//!
//! A guest whose stream broke sends what was not answered again. While the service lives, such a call finds the
//! answer of the first time here, or waits for whoever is at it. The first may also be late, behind what was sent
//! again: then it is not done any more. A sequence number alone does not say that it is the same call: a guest that
//! is revived from an older save counts from there again.
//!
//! After a restart of the daemon nothing is here. Then a call that is sent again and finds its effect already there
//! counts as done (`names.rs`, `content.rs`). What remains: it may have been somebody else's effect; an exchange of two
//! names fails, for nobody can tell; and a file that was removed while open may stay hidden until nobody is attached.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use blake3::Hash;
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use torpor_protocol::guest::files::{Call, Wire};

use crate::service::Answered;

/// Answers that are kept: many times what an agent has under way at once.
const KEPT_MAX: usize = 2048;
/// How long a call that is sent again waits for the first one.
const WAIT_MAX: Duration = Duration::from_secs(60);

type Key = (u64, Hash);

#[derive(Default)]
pub(crate) struct Done {
    table: Mutex<Table>,
    changed: Condvar,
}

#[derive(Default)]
struct Table {
    calls: HashMap<Key, Known>,
    /// Those that are done, the oldest first.
    order: VecDeque<Key>,
}

struct Known {
    /// None: it is being done.
    answer: Option<Answered>,
    /// Whether what was sent again is what is done.
    again: bool,
}

impl Done {
    /// Does it, unless it was done.
    pub(crate) fn once(
        &self,
        sequence: u64,
        again: bool,
        call: &Call<'_>,
        act: impl FnOnce() -> Answered,
    ) -> Answered {
        let key = (sequence, digest(call));
        if let Some(answered) = self.begin(key, again) {
            return answered;
        }
        let answered = act();
        let mut table = self.table.lock();
        table.calls.insert(key, Known { answer: Some(answered.clone()), again });
        table.order.push_back(key);
        if table.order.len() > KEPT_MAX
            && let Some(oldest) = table.order.pop_front()
        {
            table.calls.remove(&oldest);
        }
        self.changed.notify_all();
        answered
    }

    /// What was answered the other time, if there was one; else it is being done from now on.
    fn begin(&self, key: Key, again: bool) -> Option<Answered> {
        let mut table = self.table.lock();
        // A call that is sent for the first time was done before only if that was the second time.
        while let Some(known) = table.calls.get(&key).filter(|known| again || known.again) {
            if let Some(answer) = &known.answer {
                return Some(answer.clone());
            }
            if self.changed.wait_for(&mut table, WAIT_MAX).timed_out() {
                return Some(Err(Errno::IO));
            }
        }
        table.calls.insert(key, Known { answer: None, again });
        None
    }
}

fn digest(call: &Call<'_>) -> Hash {
    let mut bytes = Vec::new();
    call.put(&mut bytes);
    blake3::hash(&bytes)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use torpor_protocol::guest::files::Answer;

    use super::*;

    #[test]
    fn a_first_send_that_comes_behind_its_second_is_not_done() {
        let (done, times) = (Done::default(), Cell::new(0));
        let call = Call::Statfs {};
        let send = |again| {
            let act = || {
                times.set(times.get() + 1);
                Ok(Answer::Length { length: times.get() })
            };
            done.once(7, again, &call, act)
        };
        assert_eq!(send(true), Ok(Answer::Length { length: 1 }));
        assert_eq!(send(false), Ok(Answer::Length { length: 1 }), "it is the same call");
        assert_eq!(send(true), Ok(Answer::Length { length: 1 }));
        assert_eq!(times.get(), 1);
    }

    #[test]
    fn a_guest_that_counts_from_an_older_save_is_not_taken_for_the_one_before() {
        let done = Done::default();
        let send = |length| done.once(7, false, &Call::Statfs {}, || Ok(Answer::Length { length }));
        assert_eq!(send(1), Ok(Answer::Length { length: 1 }));
        assert_eq!(send(2), Ok(Answer::Length { length: 2 }));
    }
}

//! Answers lately given to calls that can't be done twice.
//!
//! A guest whose stream broke sends what was not answered again. While the service lives, such a call finds the
//! answer of the first time here, or waits for whoever is at it. A sequence number alone does not say that it is
//! the same call: a guest that is revived from an older save counts from there again.
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
    /// None: it is being done.
    answers: HashMap<Key, Option<Answered>>,
    /// Those that are done, the oldest first.
    order: VecDeque<Key>,
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
        if again && let Some(answered) = self.earlier(key) {
            return answered;
        }
        self.table.lock().answers.insert(key, None);
        let answered = act();
        let mut table = self.table.lock();
        table.answers.insert(key, Some(answered.clone()));
        table.order.push_back(key);
        if table.order.len() > KEPT_MAX
            && let Some(oldest) = table.order.pop_front()
        {
            table.answers.remove(&oldest);
        }
        self.changed.notify_all();
        answered
    }

    /// What was answered the first time, if there was one.
    fn earlier(&self, key: Key) -> Option<Answered> {
        let mut table = self.table.lock();
        loop {
            if let Some(answered) = table.answers.get(&key)? {
                return Some(answered.clone());
            }
            if self.changed.wait_for(&mut table, WAIT_MAX).timed_out() {
                return Some(Err(Errno::IO));
            }
        }
    }
}

fn digest(call: &Call<'_>) -> Hash {
    let mut bytes = Vec::new();
    call.put(&mut bytes);
    blake3::hash(&bytes)
}

//! A lease: proof that the machine runs, promise that it stays so, and the gate to its agent.
//!
//! The driver opens the gate when the machine answered and closes it before it takes the machine
//! away or puts it to sleep. Taking a lease through an open gate is a lock and a counter, and never
//! waits.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use torpor_protocol::guest::KEPT_MAX;

use crate::clock::Clock;
use crate::engine::Meter;
use crate::guest::Guest;

/// How long an answer on a kept connection may take before its sandbox falls asleep because many are
/// awake. Its own `idle_after` is not concerned.
const KEPT_ANSWER_MS: u64 = 10_000;

/// Counts the leases of one sandbox and knows when it was last used.
pub(crate) struct Gate {
    state: Mutex<GateState>,
    /// Rings when the last lease was given back.
    vacated: Notify,
    /// Rings when it was opened.
    opened: Notify,
    clock: Clock,
}

struct GateState {
    /// Whom a lease leads to, while the gate is open.
    guest: Option<Guest>,
    /// Of the machine, also while it sleeps in memory.
    meter: Option<Arc<dyn Meter>>,
    leases: usize,
    /// Kept connections: no leases, so it may fall asleep under them.
    kept: usize,
    last_used_ms: u64,
}

impl Gate {
    pub(crate) fn closed(clock: Clock, last_used_ms: u64) -> Self {
        let state = GateState { guest: None, meter: None, leases: 0, kept: 0, last_used_ms };
        Self { state: Mutex::new(state), vacated: Notify::new(), opened: Notify::new(), clock }
    }

    pub(crate) fn open(&self, guest: Guest, meter: Arc<dyn Meter>) {
        let mut state = self.state.lock();
        state.guest = Some(guest);
        state.meter = Some(meter);
        state.last_used_ms = self.clock.now_ms();
        drop(state);
        self.opened.notify_waiters();
    }

    /// Nobody gets in any more; who is inside keeps a lease on something that is gone.
    pub(crate) fn close(&self) {
        self.state.lock().guest = None;
    }

    /// Closes it unless somebody is inside.
    pub(crate) fn close_if_vacant(&self) -> bool {
        let mut state = self.state.lock();
        if state.leases == 0 {
            state.guest = None;
        }
        state.leases == 0
    }

    /// The machine that is asleep behind the closed gate, or none.
    pub(crate) fn measure(&self, meter: Option<Arc<dyn Meter>>) {
        self.state.lock().meter = meter;
    }

    /// A lease, if the gate is open.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Lease> {
        let mut state = self.state.lock();
        let (guest, meter) = (state.guest.clone()?, Arc::clone(state.meter.as_ref()?));
        state.leases += 1;
        Some(Lease { guest, meter, gate: Arc::clone(self) })
    }

    /// A lease, as soon as the gate is open. Cancel-safe.
    pub(crate) async fn enter_when_open(self: &Arc<Self>) -> Lease {
        loop {
            let mut opened = pin!(self.opened.notified());
            // Registered before the look, so that an opening in between is not missed.
            opened.as_mut().enable();
            if let Some(lease) = self.enter() {
                return lease;
            }
            opened.await;
        }
    }

    /// Counts a kept connection, unless there are too many.
    pub(crate) fn keep(&self) -> bool {
        let mut state = self.state.lock();
        let room = state.kept < KEPT_MAX;
        state.kept += usize::from(room);
        room
    }

    /// A kept connection is over.
    pub(crate) fn let_go(&self) {
        self.state.lock().kept -= 1;
    }

    /// When somebody last used it: now, while somebody does.
    pub(crate) fn last_used_ms(&self) -> u64 {
        let state = self.state.lock();
        if state.leases > 0 { self.clock.now_ms() } else { state.last_used_ms }
    }

    /// It was used just now.
    pub(crate) fn touch(&self) {
        self.state.lock().last_used_ms = self.clock.now_ms();
    }

    /// Who is behind the open gate; not a lease.
    pub(crate) fn guest(&self) -> Option<Guest> {
        self.state.lock().guest.clone()
    }

    pub(crate) fn meter(&self) -> Option<Arc<dyn Meter>> {
        self.state.lock().meter.clone()
    }

    /// Since when nobody is inside, if the gate is open. On a kept connection somebody may wait for an
    /// answer: it is no use, but for a while it is as good as one.
    pub(crate) fn unused_since_ms(&self) -> Option<u64> {
        let state = self.state.lock();
        let answering = state.kept > 0
            && self.clock.now_ms() < state.last_used_ms.saturating_add(KEPT_ANSWER_MS);
        (state.guest.is_some() && state.leases == 0 && !answering).then_some(state.last_used_ms)
    }

    /// Resolves when nobody was inside for `long`. Cancel-safe.
    pub(crate) async fn idle_for(&self, long: Duration) {
        loop {
            // Registered before the look, so that a lease given back in between is not missed.
            let vacated = self.vacated.notified();
            let (leases, last_used_ms) = {
                let state = self.state.lock();
                (state.leases, state.last_used_ms)
            };
            if leases > 0 {
                vacated.await;
                continue;
            }
            let long_ms = u64::try_from(long.as_millis()).unwrap_or(u64::MAX);
            let left = self.clock.until(last_used_ms.saturating_add(long_ms));
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left).await;
        }
    }

    fn leave(&self) {
        let mut state = self.state.lock();
        state.leases -= 1;
        state.last_used_ms = self.clock.now_ms();
        if state.leases == 0 {
            // Both the idle and the expiry timer may be waiting.
            self.vacated.notify_waiters();
            self.vacated.notify_one();
        }
    }
}

/// Proof that the sandbox's machine runs and stays so. Dropping it lets go.
pub struct Lease {
    guest: Guest,
    meter: Arc<dyn Meter>,
    gate: Arc<Gate>,
}

impl Lease {
    pub fn guest(&self) -> &Guest {
        &self.guest
    }

    pub fn meter(&self) -> &dyn Meter {
        &*self.meter
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.gate.leave();
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Lease")
    }
}

//! The one way to a running machine: every request, tunnel, preview, kept connection, build and dialect
//! comes through here. Room, demotion and another try when the engine lacks something are the driver's
//! business, so that all who wait for a wake wait for the same one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::Fleet;
use crate::lease::Lease;
use crate::sandbox::Sandbox;
use crate::{Error, Refusal};

/// How long a sandbox may take to be awake; its driver gives up a start before.
pub(crate) const AWAKE_WITHIN: Duration = Duration::from_secs(180);

/// The deadline of whoever has no reason for another one.
pub fn wake_deadline() -> Instant {
    Instant::now() + AWAKE_WITHIN
}

/// How often the fleet was asked for somebody.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) lookups: AtomicU64,
    leases: AtomicU64,
}

/// How often a sandbox was looked up, and how often one was entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tally {
    pub lookups: u64,
    pub leases: u64,
}

impl Fleet {
    /// A lease: at once if it runs, else when it does. It is woken if requests may wake it and there is
    /// room for its machine. A wake goes on when nobody waits for it any more.
    pub async fn awake(&self, sandbox: &Sandbox, deadline: Instant) -> Result<Lease, Error> {
        self.inner.counters.leases.fetch_add(1, Ordering::Relaxed);
        match sandbox.if_awake() {
            Some(lease) => Ok(lease),
            None => self.waited(sandbox, deadline, sandbox.awake()).await,
        }
    }

    /// Wakes it, also if requests do not; returns when it runs.
    pub async fn wake(&self, sandbox: &Sandbox, deadline: Instant) -> Result<(), Error> {
        self.waited(sandbox, deadline, sandbox.wake()).await
    }

    async fn waited<T>(
        &self,
        sandbox: &Sandbox,
        deadline: Instant,
        woken: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let (begun, tier) = (Instant::now(), sandbox.status.borrow().tier);
        let woken = tokio::time::timeout_at(deadline, woken).await;
        let woken = woken.map_err(|_| Refusal::StillWaking(sandbox.id.to_string()))??;
        if let Some(tier) = tier {
            self.inner.observer.waited(tier, begun.elapsed());
        }
        Ok(woken)
    }

    pub fn tally(&self) -> Tally {
        let Counters { lookups, leases } = &self.inner.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Tally { lookups: read(lookups), leases: read(leases) }
    }
}

//! Certificates that are got when they are needed, and got anew before they are over.
//!
//! Invariants
//! - A name comes in here only if it is ours: see [`super::claim`].
//! - One order at a time for each name, and [`ORDERS_MAX`] in all. It goes on when whoever began it
//!   does not wait any more.
//! - After a failure nobody is asked again before its time, also not after a restart.
//! - A certificate that is valid is served, whatever becomes of the order for its successor.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use torpor_lifecycle::chain;
use torpor_lifecycle::store::StoreError;
use torpor_store::{CertificateFile, Certificates};

use super::acme::{Authority, Issued, OrderError};
use super::held::Held;

/// Orders at the same time; more only make a directory impatient.
const ORDERS_MAX: usize = 4;
/// After the first failure; each further one makes it four times as long. Let's Encrypt allows five
/// failures for a name in an hour: these are four.
const WAIT_MIN_MS: u64 = 60_000;
const WAIT_MAX_MS: u64 = 12 * 3600 * 1000;
/// A directory that has had enough of us is left alone for so long at least.
const RATE_WAIT_MS: u64 = 3600 * 1000;
/// It is looked for certificates to renew so often at most, and at least, because clocks are set.
const LOOK_MIN: Duration = Duration::from_secs(1);
const LOOK_MAX: Duration = Duration::from_secs(3600);

/// Unix milliseconds. Certificates are about the time of the world, not about ours, so it is read
/// each time; tests have their own.
pub(super) type WallClock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// How the orders for a name went since the last one that succeeded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Failures {
    count: u32,
    last_at_ms: u64,
    rate_limited: bool,
    why: String,
}

impl Failures {
    /// How much longer to wait.
    fn wait_ms(&self, now_ms: u64) -> u64 {
        if self.count == 0 || now_ms < self.last_at_ms {
            // A failure in the future is of a clock that was wrong.
            return 0;
        }
        let factor = 4u64.saturating_pow(self.count - 1);
        let least = if self.rate_limited { RATE_WAIT_MS } else { 0 };
        let wait = WAIT_MIN_MS.saturating_mul(factor).min(WAIT_MAX_MS).max(least);
        (self.last_at_ms + wait).saturating_sub(now_ms)
    }
}

/// What is known of a name.
#[derive(Default)]
struct Entry {
    held: Option<Held>,
    failures: Failures,
    /// The order that is under way; it closes at its end.
    order: Option<watch::Receiver<()>>,
}

/// Why a client gets no certificate.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoCertificate {
    #[error("the last order failed; the next one is tried in {} s: {why}", wait_ms / 1000)]
    Waiting { wait_ms: u64, why: String },
    #[error("the order failed: {0}")]
    Failed(String),
}

pub(super) struct Issuer {
    authority: Arc<dyn Authority>,
    store: Certificates,
    now: WallClock,
    entries: Mutex<HashMap<String, Entry>>,
    places: Arc<Semaphore>,
    /// Orders end with the daemon.
    orders: Mutex<JoinSet<()>>,
}

impl Issuer {
    /// Reads what is kept. A file that can't be used is complained about and as good as none.
    pub(super) fn open(
        authority: Arc<dyn Authority>,
        store: Certificates,
        now: WallClock,
    ) -> Result<Arc<Self>, StoreError> {
        let mut entries: HashMap<String, Entry> = HashMap::new();
        for name in store.names(CertificateFile::Certificate)? {
            let held = store.get(CertificateFile::Certificate, &name).ok().flatten();
            match held.as_ref().map(|pem| Held::parse(pem, pem)) {
                Some(Ok(held)) => entries.entry(name).or_default().held = Some(held),
                Some(Err(error)) => {
                    tracing::warn!(name, error = chain(&error), "a certificate can't be used");
                }
                None => tracing::warn!(name, "a certificate can't be read"),
            }
        }
        for name in store.names(CertificateFile::Attempt)? {
            let failures = store.get(CertificateFile::Attempt, &name).ok().flatten();
            let failures = failures.and_then(|bytes| serde_json::from_slice(&bytes).ok());
            // Without it, the name is tried at once, which does no harm once.
            entries.entry(name).or_default().failures = failures.unwrap_or_default();
        }
        Ok(Arc::new(Self {
            authority,
            store,
            now,
            entries: Mutex::new(entries),
            places: Arc::new(Semaphore::new(ORDERS_MAX)),
            orders: Mutex::new(JoinSet::new()),
        }))
    }

    /// The certificate for a name that is ours; orders it if there is none, and waits.
    pub(super) async fn get(self: &Arc<Self>, name: &str) -> Result<Held, NoCertificate> {
        let mut order = match self.held_or_order(name)? {
            Found::Held(held) => return Ok(held),
            Found::Order(order) => order,
        };
        // It closes at the end of the order, however that ends.
        while order.changed().await.is_ok() {}
        let entries = self.entries.lock();
        let entry = entries.get(name);
        let held = entry.and_then(|entry| entry.held.clone());
        held.filter(|held| !held.is_over((self.now)())).ok_or_else(|| {
            let why = entry.map(|entry| entry.failures.why.clone()).unwrap_or_default();
            NoCertificate::Failed(why)
        })
    }

    fn held_or_order(self: &Arc<Self>, name: &str) -> Result<Found, NoCertificate> {
        let now_ms = (self.now)();
        let mut entries = self.entries.lock();
        let entry = entries.entry(name.to_owned()).or_default();
        if let Some(held) = entry.held.as_ref().filter(|held| !held.is_over(now_ms)) {
            return Ok(Found::Held(held.clone()));
        }
        // One that is closed and still here did not come to an end: as good as none.
        if let Some(order) = entry.order.as_ref().filter(|order| order.has_changed().is_ok()) {
            return Ok(Found::Order(order.clone()));
        }
        let wait_ms = entry.failures.wait_ms(now_ms);
        if wait_ms > 0 {
            let why = entry.failures.why.clone();
            return Err(NoCertificate::Waiting { wait_ms, why });
        }
        Ok(Found::Order(self.begin(name, entry)))
    }

    /// Orders what is sure to be needed, unless it is there or was refused lately.
    pub(super) fn prepare(self: &Arc<Self>, name: &str) {
        // Whoever needs it is told why there is none.
        let _ = self.held_or_order(name);
    }

    /// The only place where an order begins.
    fn begin(self: &Arc<Self>, name: &str, entry: &mut Entry) -> watch::Receiver<()> {
        let (running, order) = watch::channel(());
        entry.order = Some(order.clone());
        let (issuer, name) = (Arc::clone(self), name.to_owned());
        let mut orders = self.orders.lock();
        while orders.try_join_next().is_some() {}
        orders.spawn(async move {
            let place = issuer.places.acquire().await.expect("the semaphore is never closed");
            let ended = issuer.obtain(&name).await;
            drop(place);
            issuer.end(&name, ended);
            drop(running);
        });
        order
    }

    async fn obtain(&self, name: &str) -> Result<(Issued, Held), OrderError> {
        tracing::info!(name, "ordering a certificate");
        let issued = self.authority.obtain(name).await?;
        let held = Held::parse(issued.chain.as_bytes(), issued.key.as_bytes())?;
        // Else every connection would order another one.
        if held.is_over((self.now)()) {
            return Err(OrderError::Over);
        }
        Ok((issued, held))
    }

    /// Keeps what came of an order: on disk first.
    fn end(&self, name: &str, ended: Result<(Issued, Held), OrderError>) {
        let held = match ended {
            Ok((issued, held)) => {
                let pem = format!("{}{}", issued.key, issued.chain);
                if let Err(error) =
                    self.store.put(CertificateFile::Certificate, name, pem.as_bytes())
                {
                    tracing::warn!(name, error = chain(&error), "a certificate was not kept");
                }
                if let Err(error) = self.store.remove(CertificateFile::Attempt, name) {
                    tracing::warn!(name, error = chain(&error), "an old failure was not forgotten");
                }
                tracing::info!(name, "got a certificate");
                Ok(held)
            }
            Err(error) => Err(self.failed(name, &error)),
        };
        let mut entries = self.entries.lock();
        let entry = entries.entry(name.to_owned()).or_default();
        entry.order = None;
        match held {
            Ok(held) => (entry.held, entry.failures) = (Some(held), Failures::default()),
            Err(failures) => entry.failures = failures,
        }
    }

    fn failed(&self, name: &str, error: &OrderError) -> Failures {
        let before = self.entries.lock().get(name).map_or(0, |entry| entry.failures.count);
        let failures = Failures {
            count: before.saturating_add(1),
            last_at_ms: (self.now)(),
            rate_limited: error.is_rate_limit(),
            why: chain(error),
        };
        let again_in_secs = failures.wait_ms(failures.last_at_ms) / 1000;
        tracing::warn!(
            name,
            error = failures.why,
            again_in_secs,
            "an order for a certificate failed"
        );
        let bytes = serde_json::to_vec(&failures).expect("it has text keys only");
        if let Err(error) = self.store.put(CertificateFile::Attempt, name, &bytes) {
            tracing::warn!(name, error = chain(&error), "a failure was not kept");
        }
        failures
    }

    /// Begins the orders that are due, of names that are still ours, and forgets what is over and
    /// not ours any more. Gives how long nothing will be due.
    pub(super) fn renew(self: &Arc<Self>, is_ours: impl Fn(&str) -> bool) -> Duration {
        let now_ms = (self.now)();
        let mut next_ms = u64::MAX;
        let mut gone = Vec::new();
        let mut entries = self.entries.lock();
        for (name, entry) in entries.iter_mut() {
            let Some(held) = &entry.held else {
                if entry.order.is_none() && !is_ours(name) {
                    gone.push(name.clone());
                }
                continue;
            };
            if !is_ours(name) {
                if held.is_over(now_ms) && entry.order.is_none() {
                    gone.push(name.clone());
                }
                continue;
            }
            let due_ms = held.renew_at_ms().max(now_ms + entry.failures.wait_ms(now_ms));
            if entry.order.is_some() {
                continue;
            }
            if due_ms <= now_ms {
                self.begin(name, entry);
            } else {
                next_ms = next_ms.min(due_ms - now_ms);
            }
        }
        for name in gone {
            entries.remove(&name);
            for kind in [CertificateFile::Certificate, CertificateFile::Attempt] {
                if let Err(error) = self.store.remove(kind, &name) {
                    tracing::warn!(
                        name,
                        error = chain(&error),
                        "an old certificate was not removed"
                    );
                }
            }
        }
        Duration::from_millis(next_ms).clamp(LOOK_MIN, LOOK_MAX)
    }

    /// Names with a certificate that is valid, for the metrics.
    pub(super) fn valid(&self) -> usize {
        let now_ms = (self.now)();
        let entries = self.entries.lock();
        let held = entries.values().filter_map(|entry| entry.held.as_ref());
        held.filter(|held| !held.is_over(now_ms)).count()
    }

    /// Ends the orders that are under way.
    pub(super) fn stop(&self) {
        self.orders.lock().abort_all();
    }
}

enum Found {
    Held(Held),
    Order(watch::Receiver<()>),
}

#[cfg(test)]
mod tests;

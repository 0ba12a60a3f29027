//! When certificates are ordered, renewed and kept, with a directory and a clock that are played.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use async_trait::async_trait;
use tokio::sync::Notify;

use super::*;
use crate::tls::held::tests::made;
use crate::tls::validity::Validity;

const START: u64 = 1_700_000_000_000;
const MINUTE: u64 = 60_000;
const DAY: u64 = 24 * 60 * MINUTE;
const NAME: &str = "a.example.org";

/// Gives certificates for 90 days, or none.
struct Fake {
    orders: AtomicUsize,
    fails: AtomicBool,
    /// Nobody is answered until it is told.
    held_back: Option<Notify>,
    now: Arc<AtomicU64>,
    lifetime_ms: u64,
}

#[async_trait]
impl Authority for Fake {
    async fn obtain(&self, name: &str) -> Result<Issued, OrderError> {
        self.orders.fetch_add(1, Ordering::SeqCst);
        if let Some(held_back) = &self.held_back {
            held_back.notified().await;
        }
        if self.fails.load(Ordering::SeqCst) {
            return Err(OrderError::Disbelieved("nobody is there".to_owned()));
        }
        let from_ms = self.now.load(Ordering::SeqCst);
        let (chain, key) =
            made(&[name], Validity { from_ms, until_ms: from_ms + self.lifetime_ms });
        Ok(Issued { chain, key })
    }
}

struct World {
    fake: Arc<Fake>,
    issuer: Arc<Issuer>,
    now: Arc<AtomicU64>,
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        Self::with(90 * DAY, None)
    }

    fn with(lifetime_ms: u64, held_back: Option<Notify>) -> Self {
        let now = Arc::new(AtomicU64::new(START));
        let fake = Arc::new(Fake {
            orders: AtomicUsize::new(0),
            fails: AtomicBool::new(false),
            held_back,
            now: Arc::clone(&now),
            lifetime_ms,
        });
        let dir = tempfile::tempdir().unwrap();
        let issuer = open(&fake, &now, dir.path());
        Self { fake, issuer, now, dir }
    }

    /// Another daemon on the same directory.
    fn restart(&mut self) {
        self.issuer = open(&self.fake, &self.now, self.dir.path());
    }

    fn pass(&self, ms: u64) {
        self.now.fetch_add(ms, Ordering::SeqCst);
    }

    fn orders(&self) -> usize {
        self.fake.orders.load(Ordering::SeqCst)
    }

    fn fail(&self, fails: bool) {
        self.fake.fails.store(fails, Ordering::SeqCst);
    }

    /// Waits until no order is under way.
    async fn settled(&self) {
        loop {
            let order = self.issuer.entries.lock().values().find_map(|entry| entry.order.clone());
            let Some(mut order) = order else { return };
            while order.changed().await.is_ok() {}
        }
    }
}

fn open(fake: &Arc<Fake>, now: &Arc<AtomicU64>, dir: &std::path::Path) -> Arc<Issuer> {
    let now = Arc::clone(now);
    let clock: WallClock = Arc::new(move || now.load(Ordering::SeqCst));
    let fake: Arc<dyn Authority> = Arc::<Fake>::clone(fake);
    Issuer::open(fake, Certificates::open(dir).unwrap(), clock).unwrap()
}

#[tokio::test]
async fn a_certificate_is_ordered_once_and_survives_a_restart() {
    let mut world = World::new();
    let first = world.issuer.get(NAME).await.unwrap();
    assert!(first.covers(NAME));
    world.issuer.get(NAME).await.unwrap();
    world.restart();
    let again = world.issuer.get(NAME).await.unwrap();
    assert_eq!((again.validity, world.orders()), (first.validity, 1));
}

#[tokio::test]
async fn a_crowd_at_one_name_makes_one_order() {
    let world = World::with(90 * DAY, Some(Notify::new()));
    let visitors: Vec<_> = (0..50)
        .map(|_| {
            let issuer = Arc::clone(&world.issuer);
            tokio::spawn(async move { issuer.get(NAME).await.is_ok() })
        })
        .collect();
    while world.orders() == 0 {
        tokio::task::yield_now().await;
    }
    world.fake.held_back.as_ref().unwrap().notify_one();
    for visitor in visitors {
        assert!(visitor.await.unwrap());
    }
    assert_eq!(world.orders(), 1);
}

#[tokio::test]
async fn an_order_goes_on_when_nobody_waits_any_more() {
    let world = World::with(90 * DAY, Some(Notify::new()));
    let issuer = Arc::clone(&world.issuer);
    let visitor = tokio::spawn(async move { issuer.get(NAME).await.is_ok() });
    while world.orders() == 0 {
        tokio::task::yield_now().await;
    }
    visitor.abort();
    assert!(visitor.await.is_err());
    world.fake.held_back.as_ref().unwrap().notify_one();
    world.settled().await;
    world.issuer.get(NAME).await.unwrap();
    assert_eq!(world.orders(), 1);
}

#[tokio::test]
async fn after_a_failure_nobody_is_asked_before_its_time_not_even_after_a_restart() {
    let mut world = World::new();
    world.fail(true);
    let error = world.issuer.get(NAME).await.unwrap_err().to_string();
    assert!(error.contains("nobody is there"), "{error}");
    world.restart();
    let error = world.issuer.get(NAME).await.unwrap_err();
    assert!(matches!(error, NoCertificate::Waiting { .. }), "{error}");
    assert!(error.to_string().contains("nobody is there"), "{error}");
    world.pass(WAIT_MIN_MS - 1);
    assert!(world.issuer.get(NAME).await.is_err());
    assert_eq!(world.orders(), 1);
    world.pass(1);
    assert!(world.issuer.get(NAME).await.is_err());
    assert_eq!(world.orders(), 2);
    // The second failure makes the wait longer; a success ends it.
    world.pass(WAIT_MIN_MS);
    assert!(world.issuer.get(NAME).await.is_err());
    assert_eq!(world.orders(), 2);
    world.fail(false);
    world.pass(3 * WAIT_MIN_MS);
    world.issuer.get(NAME).await.unwrap();
    world.restart();
    assert_eq!(world.issuer.entries.lock()[NAME].failures, Failures::default());
}

#[test]
fn waits_grow_to_half_a_day_and_a_rate_limit_is_an_hour_at_least() {
    let failures = |count, rate_limited| Failures {
        count,
        last_at_ms: START,
        rate_limited,
        why: String::new(),
    };
    let minutes = |count, limited| failures(count, limited).wait_ms(START) / MINUTE;
    assert_eq!([1, 2, 3, 4, 5].map(|count| minutes(count, false)), [1, 4, 16, 64, 256]);
    assert_eq!([6, 30, u32::MAX].map(|count| minutes(count, false)), [720; 3]);
    assert_eq!([1, 4].map(|count| minutes(count, true)), [60, 64]);
    // A failure in the future is of a clock that was wrong.
    assert_eq!(failures(6, false).wait_ms(START - 1), 0);
}

#[tokio::test]
async fn a_certificate_is_renewed_with_a_third_of_its_time_left() {
    let world = World::new();
    let first = world.issuer.get(NAME).await.unwrap();
    world.pass(60 * DAY - 1);
    assert_eq!(world.issuer.renew(|_| true), LOOK_MIN);
    assert_eq!(world.orders(), 1);
    world.pass(1);
    world.issuer.renew(|_| true);
    world.settled().await;
    assert_eq!(world.orders(), 2);
    let second = world.issuer.get(NAME).await.unwrap();
    assert!(second.validity.until_ms > first.validity.until_ms);
    assert_eq!(world.issuer.renew(|_| true), LOOK_MAX);
    assert_eq!(world.issuer.valid(), 1);
}

#[tokio::test]
async fn a_renewal_that_fails_keeps_the_old_certificate_until_it_is_over() {
    let mut world = World::new();
    let first = world.issuer.get(NAME).await.unwrap();
    world.fail(true);
    world.pass(60 * DAY);
    world.issuer.renew(|_| true);
    world.settled().await;
    assert_eq!(world.orders(), 2);
    assert_eq!(world.issuer.get(NAME).await.unwrap().validity, first.validity);
    // Not at once again.
    world.issuer.renew(|_| true);
    world.settled().await;
    assert_eq!(world.orders(), 2);
    world.restart();
    assert_eq!(world.issuer.get(NAME).await.unwrap().validity, first.validity);
    world.pass(30 * DAY);
    assert!(world.issuer.get(NAME).await.is_err());
    assert_eq!(world.issuer.valid(), 0);
}

#[tokio::test]
async fn a_name_that_is_not_ours_any_more_is_not_renewed_and_forgotten_when_it_is_over() {
    let world = World::new();
    world.issuer.get(NAME).await.unwrap();
    world.pass(89 * DAY);
    world.issuer.renew(|_| false);
    world.settled().await;
    assert_eq!((world.orders(), world.issuer.entries.lock().len()), (1, 1));
    world.pass(DAY);
    world.issuer.renew(|_| false);
    assert!(world.issuer.entries.lock().is_empty());
    let kept = Certificates::open(world.dir.path()).unwrap();
    assert!(kept.names(CertificateFile::Certificate).unwrap().is_empty());
}

#[tokio::test]
async fn a_clock_that_makes_every_certificate_look_old_orders_one_and_then_waits() {
    let world = World::with(0, None);
    let error = world.issuer.get(NAME).await.unwrap_err().to_string();
    assert!(error.contains("clock"), "{error}");
    for _ in 0..5 {
        assert!(world.issuer.get(NAME).await.is_err());
    }
    assert_eq!(world.orders(), 1);
}

#[tokio::test]
async fn torn_files_are_as_good_as_none() {
    let mut world = World::new();
    world.issuer.get(NAME).await.unwrap();
    let kept = Certificates::open(world.dir.path()).unwrap();
    let whole = kept.get(CertificateFile::Certificate, NAME).unwrap().unwrap();
    kept.put(CertificateFile::Certificate, NAME, &whole[..whole.len() / 2]).unwrap();
    kept.put(CertificateFile::Attempt, NAME, b"{\"count\":").unwrap();
    kept.put(CertificateFile::Certificate, "b.example.org", b"").unwrap();
    world.restart();
    world.issuer.get(NAME).await.unwrap();
    assert_eq!(world.orders(), 2);
}

#[tokio::test]
async fn no_more_orders_than_allowed_go_on_at_once() {
    let world = World::with(90 * DAY, Some(Notify::new()));
    for number in 0..3 * ORDERS_MAX {
        world.issuer.prepare(&format!("n{number}.example.org"));
    }
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(world.orders(), ORDERS_MAX);
    while world.orders() < 3 * ORDERS_MAX {
        world.fake.held_back.as_ref().unwrap().notify_waiters();
        tokio::task::yield_now().await;
    }
    world.issuer.stop();
}

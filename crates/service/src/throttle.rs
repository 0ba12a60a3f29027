//! How often each key may ask: a token bucket per key, in memory.
//!
//! - A bucket fills at the configured rate and holds two seconds of it; a request takes one token.
//! - Only keys that are known have a bucket, and all who need none share one. What was full again by
//!   now says nothing, so it is forgotten first when there are too many.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Seconds of the rate that may be asked for at once: a page that loads, a script that begins.
const BURST_SECS: f64 = 2.0;
/// Buckets at the same time. Above it those that are full are forgotten; more keys than this that all
/// ask at once are not there.
const BUCKETS_MAX: usize = 4096;

/// Counts the requests of each `K`.
pub struct Throttle<K> {
    /// Tokens in a second; none: nobody is counted.
    rate: Option<f64>,
    buckets: Mutex<HashMap<K, Bucket>>,
}

/// What was left at an instant.
struct Bucket {
    tokens: f64,
    at: Instant,
}

impl Bucket {
    fn tokens(&self, rate: f64, now: Instant) -> f64 {
        let since = now.saturating_duration_since(self.at).as_secs_f64();
        since.mul_add(rate, self.tokens).min(rate * BURST_SECS)
    }
}

impl<K: Hash + Eq> Throttle<K> {
    /// 0: as often as one likes.
    pub fn new(requests_per_sec: u32) -> Self {
        let rate = (requests_per_sec > 0).then_some(f64::from(requests_per_sec));
        Self { rate, buckets: Mutex::default() }
    }

    /// Counts a request; `Err`: it is one too many, and the next one is not after so long.
    pub fn take(&self, who: K) -> Result<(), Duration> {
        let Some(rate) = self.rate else { return Ok(()) };
        let now = Instant::now();
        let full = rate * BURST_SECS;
        let mut buckets = self.buckets.lock();
        if buckets.len() >= BUCKETS_MAX && !buckets.contains_key(&who) {
            buckets.retain(|_, bucket| bucket.tokens(rate, now) < full);
            if buckets.len() >= BUCKETS_MAX {
                buckets.clear();
            }
        }
        let bucket = buckets.entry(who).or_insert(Bucket { tokens: full, at: now });
        let tokens = bucket.tokens(rate, now);
        if tokens < 1.0 {
            return Err(Duration::from_secs_f64((1.0 - tokens) / rate));
        }
        *bucket = Bucket { tokens: tokens - 1.0, at: now };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(throttle: &Throttle<usize>, who: usize, tries: usize) -> usize {
        (0..tries).filter(|_| throttle.take(who).is_ok()).count()
    }

    #[tokio::test(start_paused = true)]
    async fn two_seconds_may_be_asked_for_at_once_and_then_the_rate() {
        let throttle = Throttle::new(10);
        assert_eq!(taken(&throttle, 1, 100), 20);
        tokio::time::advance(Duration::from_millis(250)).await;
        assert_eq!(taken(&throttle, 1, 100), 2);
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!(taken(&throttle, 1, 100), 20);
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_too_often_is_told_when_it_may_again() {
        let throttle = Throttle::new(4);
        assert_eq!(taken(&throttle, 1, 8), 8);
        let wait = throttle.take(1).unwrap_err();
        assert_eq!(wait, Duration::from_millis(250));
        tokio::time::advance(wait).await;
        assert_eq!(taken(&throttle, 1, 2), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn one_key_takes_nothing_from_another() {
        let throttle = Throttle::new(1);
        assert_eq!(taken(&throttle, 1, 5), 2);
        assert_eq!(taken(&throttle, 2, 5), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_rate_nobody_is_counted() {
        let throttle = Throttle::new(0);
        assert_eq!(taken(&throttle, 1, 1000), 1000);
        assert!(throttle.buckets.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn buckets_that_are_full_again_are_forgotten_first() {
        let throttle = Throttle::new(1);
        for who in 0..BUCKETS_MAX - 1 {
            throttle.take(who).unwrap();
        }
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(taken(&throttle, BUCKETS_MAX - 1, 5), 2);
        throttle.take(BUCKETS_MAX).unwrap();
        assert_eq!(throttle.buckets.lock().len(), 2);
        assert_eq!(taken(&throttle, BUCKETS_MAX - 1, 5), 0, "who asks too often is remembered");
    }
}

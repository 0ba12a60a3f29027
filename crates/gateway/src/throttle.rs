//! How often a client may call a tool: a token bucket for each, in memory.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Buckets at the same time; one more forgets those that are full again, or all.
const BUCKETS_MAX: usize = 16_384;

/// Client, number of the rule (or none that there is, for what is not there), and tool.
type Who = (String, usize, String);

#[derive(Debug, Default)]
pub(crate) struct Throttles {
    buckets: Mutex<HashMap<Who, (f64, Instant)>>,
}

impl Throttles {
    /// Counts a call; `Err`: it is one too many, and the next may be made after so long.
    pub(crate) fn take(&self, who: Who, per_minute: u32) -> Result<(), Duration> {
        let (rate, full) = (f64::from(per_minute) / 60.0, f64::from(per_minute));
        let now = Instant::now();
        let filled = |(tokens, at): (f64, Instant)| {
            now.saturating_duration_since(at).as_secs_f64().mul_add(rate, tokens).min(full)
        };
        let mut buckets = self.buckets.lock();
        if buckets.len() >= BUCKETS_MAX && !buckets.contains_key(&who) {
            buckets
                .retain(|_, (_, at)| now.saturating_duration_since(*at) < Duration::from_secs(60));
            if buckets.len() >= BUCKETS_MAX {
                buckets.clear();
            }
        }
        let tokens = buckets.get(&who).copied().map_or(full, filled);
        if tokens < 1.0 {
            return Err(Duration::from_secs_f64((1.0 - tokens) / rate));
        }
        buckets.insert(who, (tokens - 1.0, now));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_calls_too_often_is_told_when_it_may_again() {
        let throttles = Throttles::default();
        let take = |tool: &str| throttles.take(("k".to_owned(), 0, tool.to_owned()), 2);
        assert!(take("a").is_ok() && take("a").is_ok() && take("b").is_ok());
        let wait = take("a").unwrap_err();
        assert_eq!(wait, Duration::from_secs(30));
        tokio::time::advance(wait).await;
        assert!(take("a").is_ok() && take("a").is_err());
    }
}

//! The wall clock as the lifecycle sees it: read once, then advanced by the monotonic clock, so that
//! a host whose clock is stepped neither expires everything nor lets everything live for ever, and
//! tests control it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

#[derive(Debug, Clone, Copy)]
pub struct Clock {
    wall_ms: u64,
    since: Instant,
}

impl Clock {
    pub fn start() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { wall_ms: millis(wall), since: Instant::now() }
    }

    /// Unix milliseconds.
    pub fn now_ms(&self) -> u64 {
        self.wall_ms.saturating_add(millis(self.since.elapsed()))
    }

    /// How long until that time; zero if it has passed.
    pub fn until(&self, at_ms: u64) -> Duration {
        Duration::from_millis(at_ms.saturating_sub(self.now_ms()))
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

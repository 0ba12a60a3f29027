//! Where the time of a longer operation goes, step by step.

use std::time::Duration;

use tokio::time::Instant;
use torpor_protocol::status::Step;

pub(crate) struct Steps {
    since: Instant,
    pub(crate) done: Vec<Step>,
}

impl Steps {
    pub(crate) fn start() -> Self {
        Self { since: Instant::now(), done: Vec::new() }
    }

    pub(crate) fn end(&mut self, name: &str) {
        let time = std::mem::replace(&mut self.since, Instant::now()).elapsed();
        self.done.push(step(name, time));
    }

    /// A step that tells its own parts; what they leave over is its own.
    pub(crate) fn extend(&mut self, name: &str, parts: Vec<(&str, Duration)>) {
        let time = std::mem::replace(&mut self.since, Instant::now()).elapsed();
        let rest = time.saturating_sub(parts.iter().map(|(_, time)| *time).sum());
        self.done.extend(parts.into_iter().map(|(name, time)| step(name, time)));
        self.done.push(step(name, rest));
    }
}

fn step(name: &str, time: Duration) -> Step {
    // Microseconds are precise enough to be read.
    Step { name: name.to_owned(), ms: (time.as_secs_f64() * 1e6).round() / 1e3 }
}

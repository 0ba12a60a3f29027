//! When a process that ended is started again; pure.

use std::time::Duration;

use torpor_protocol::guest::{Failure, FailureCode, RestartPolicy, Supervision};

use super::health;
use crate::failure::failure;

/// The shortest pause before a restart: a process that can't run must not take the whole machine.
const MIN_BACKOFF: Duration = Duration::from_millis(10);
/// Longest name: a status shows it whole and fits into a packet.
const NAME_MAX: usize = 256;

/// Refuses what can't be done.
pub(crate) fn validate(supervision: &Supervision) -> Result<(), Failure> {
    if supervision.name.as_ref().is_some_and(|name| name.len() > NAME_MAX) {
        let message = format!("the name of a process has at most {NAME_MAX} bytes");
        return Err(failure(FailureCode::Invalid, message));
    }
    supervision.health.as_ref().map_or(Ok(()), health::validate)
}

/// How often it was started again by itself.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Restarts {
    /// Ever.
    pub(crate) automatic: u32,
    /// Without having run for a while in between.
    pub(crate) in_a_row: u32,
}

impl Restarts {
    /// How long to wait before the next start; none: it stays ended.
    pub(crate) fn pause(&self, supervision: &Supervision, failed: bool) -> Option<Duration> {
        let again = match supervision.restart {
            RestartPolicy::Never => false,
            RestartPolicy::OnFailure => failed,
            RestartPolicy::Always => true,
        };
        if !again || supervision.max_restarts.is_some_and(|max| self.automatic >= max) {
            return None;
        }
        let initial = Duration::from_millis(supervision.initial_backoff_ms).max(MIN_BACKOFF);
        let most = Duration::from_millis(supervision.max_backoff_ms).max(initial);
        let doubled = initial.saturating_mul(2_u32.saturating_pow(self.in_a_row));
        Some(doubled.min(most))
    }

    /// It is being started again, having run for so long.
    pub(crate) fn count(&mut self, supervision: &Supervision, ran: Duration) {
        self.automatic = self.automatic.saturating_add(1);
        // Whoever ran for longer than the longest pause was well.
        let well = ran > Duration::from_millis(supervision.max_backoff_ms).max(MIN_BACKOFF);
        self.in_a_row = if well { 1 } else { self.in_a_row.saturating_add(1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn supervision(restart: RestartPolicy, max_restarts: Option<u32>) -> Supervision {
        let (initial_backoff_ms, max_backoff_ms) = (100, 1000);
        Supervision {
            name: None,
            restart,
            max_restarts,
            initial_backoff_ms,
            max_backoff_ms,
            health: None,
        }
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let always = supervision(RestartPolicy::Always, None);
        let mut restarts = Restarts::default();
        let mut pauses = Vec::new();
        for _ in 0..6 {
            let pause = restarts.pause(&always, true).unwrap();
            pauses.push(pause.as_millis());
            restarts.count(&always, Duration::ZERO);
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1000, 1000]);
        restarts.count(&always, Duration::from_secs(2));
        assert_eq!(restarts.pause(&always, false).unwrap().as_millis(), 200);
    }

    #[test]
    fn success_is_no_reason_to_restart_on_failure() {
        let on_failure = supervision(RestartPolicy::OnFailure, Some(1));
        let mut restarts = Restarts::default();
        assert_eq!(restarts.pause(&on_failure, false), None);
        assert!(restarts.pause(&on_failure, true).is_some());
        restarts.count(&on_failure, Duration::ZERO);
        assert_eq!(restarts.pause(&on_failure, true), None);
    }
}

//! What an answer means, and when a delivery is tried again. Pure.

use std::time::Duration;

use jiff::fmt::rfc2822;
use torpor_egress::outgoing::SendError;
use torpor_protocol::event::DisabledReason;
use torpor_store::Next;

/// The longest wait before the second attempt; it doubles with every further one.
const BACKOFF: Duration = Duration::from_secs(4);
/// Longest wait between two attempts, also if the receiver asks for more.
pub(super) const BACKOFF_MAX: Duration = Duration::from_secs(60 * 60);
/// Shortest wait: a receiver that fails at once is not asked in a circle.
const BACKOFF_MIN: Duration = Duration::from_millis(500);

/// What a receiver said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) status: u16,
    /// The header of that name.
    pub(super) retry_after: Option<String>,
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unsent {
    /// Its secret can't be opened. Perhaps later: the daemon was started with another key by mistake.
    #[error("it can't be signed: {0}")]
    Unsigned(String),
    #[error(transparent)]
    Send(#[from] SendError),
}

/// An attempt that has ended.
pub(super) struct Tried<'a> {
    pub(super) answer: &'a Result<Answer, Unsent>,
    /// Which one it was, from 1.
    pub(super) attempt: u32,
    pub(super) now_ms: u64,
    pub(super) expires_at_ms: u64,
    /// From 0 to 1: all who wait for the same receiver must not ask at the same time.
    pub(super) chance: f64,
}

impl Tried<'_> {
    pub(super) fn next(&self) -> Next {
        match self.answer {
            Ok(Answer { status: 200..=299, .. }) => Next::Delivered,
            Ok(Answer { status: 410, .. }) => Next::Disabled(DisabledReason::Gone),
            Ok(Answer { retry_after, .. }) => self.again(retry_after.as_deref()),
            Err(Unsent::Send(SendError::BadUrl(_))) => Next::Failed,
            Err(
                Unsent::Unsigned(_)
                | Unsent::Send(
                    SendError::Closed { .. }
                    | SendError::Unreachable { .. }
                    | SendError::Slow { .. }
                    | SendError::BadAnswer { .. }
                    | SendError::TooLong { .. },
                ),
            ) => self.again(None),
        }
    }

    fn again(&self, asked: Option<&str>) -> Next {
        let doubled = BACKOFF.saturating_mul(1 << self.attempt.saturating_sub(1).min(20));
        let wait = doubled.min(BACKOFF_MAX).mul_f64(self.chance).max(BACKOFF_MIN);
        let asked = asked.and_then(|text| retry_after(text, self.now_ms)).unwrap_or_default();
        let wait = wait.max(asked.min(BACKOFF_MAX));
        let at_ms = self.now_ms.saturating_add(wait.as_millis() as u64);
        if at_ms > self.expires_at_ms { Next::Failed } else { Next::Again { at_ms } }
    }
}

/// Why it counts as not delivered.
pub(super) fn complaint(answer: &Result<Answer, Unsent>) -> Option<String> {
    match answer {
        Ok(Answer { status: 200..=299, .. }) => None,
        Ok(Answer { status: status @ 300..=399, .. }) => {
            Some(format!("it answered {status}, and redirects are not followed"))
        }
        Ok(Answer { status, .. }) => Some(format!("it answered {status}")),
        Err(error) => Some(error.to_string()),
    }
}

/// Seconds, or a date.
fn retry_after(text: &str, now_ms: u64) -> Option<Duration> {
    if let Ok(seconds) = text.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let at = rfc2822::DateTimeParser::new().parse_timestamp(text.trim()).ok()?;
    let at_ms = u64::try_from(at.as_millisecond()).ok()?;
    Some(Duration::from_millis(at_ms.saturating_sub(now_ms)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000_000;
    const DAY: u64 = 24 * 60 * 60 * 1000;

    fn answered(status: u16, retry_after: Option<&str>) -> Result<Answer, Unsent> {
        Ok(Answer { status, retry_after: retry_after.map(str::to_owned) })
    }

    fn next(answer: &Result<Answer, Unsent>, attempt: u32, chance: f64) -> Next {
        Tried { answer, attempt, now_ms: NOW, expires_at_ms: NOW + DAY, chance }.next()
    }

    fn after(ms: u64) -> Next {
        Next::Again { at_ms: NOW + ms }
    }

    #[test]
    fn only_2xx_is_delivered_and_410_is_the_last_word() {
        assert_eq!(next(&answered(204, None), 1, 1.0), Next::Delivered);
        assert_eq!(next(&answered(410, None), 1, 1.0), Next::Disabled(DisabledReason::Gone));
        for status in [100, 302, 404, 429, 500] {
            assert_eq!(next(&answered(status, None), 1, 1.0), after(4_000), "{status}");
        }
        let slow = SendError::Slow { host: "a".to_owned(), limit: Duration::from_secs(1) };
        assert_eq!(next(&Err(slow.into()), 1, 1.0), after(4_000));
        assert_eq!(next(&Err(SendError::BadUrl("no".to_owned()).into()), 1, 1.0), Next::Failed);
        let unsigned = Unsent::Unsigned("another secret key".to_owned());
        assert_eq!(next(&Err(unsigned), 1, 1.0), after(4_000));
    }

    #[test]
    fn waits_double_up_to_an_hour_and_are_spread() {
        let failed = answered(500, None);
        assert_eq!(next(&failed, 3, 1.0), after(16_000));
        assert_eq!(next(&failed, 3, 0.5), after(8_000));
        assert_eq!(next(&failed, 1, 0.0), after(500));
        assert_eq!(next(&failed, 99, 1.0), after(3_600_000));
    }

    #[test]
    fn a_receiver_says_when_to_come_again_within_bounds() {
        assert_eq!(next(&answered(503, Some("120")), 1, 1.0), after(120_000));
        assert_eq!(next(&answered(503, Some("999999")), 1, 1.0), after(3_600_000));
        let date = "Fri, 15 Jan 2027 08:01:00 GMT";
        assert_eq!(next(&answered(429, Some(date)), 1, 1.0), after(60_000));
        assert_eq!(next(&answered(429, Some("soon")), 1, 1.0), after(4_000));
    }

    #[test]
    fn what_would_be_tried_after_its_time_is_given_up() {
        let answer = answered(500, None);
        let late =
            Tried { answer: &answer, attempt: 1, now_ms: NOW, expires_at_ms: NOW, chance: 1.0 };
        assert_eq!(late.next(), Next::Failed);
        assert!(complaint(&answered(307, None)).unwrap().contains("redirects are not followed"));
    }
}

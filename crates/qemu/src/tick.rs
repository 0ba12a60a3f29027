//! How fast the processor's time stamp counter ticks.
//!
//! An emulated guest reads the host's counter, and QEMU's small machine has no timer that the guest's
//! kernel could measure it with: without being told it hangs or counts jiffies.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::time::sleep;

/// How long to count. Reading the clock costs some 50 ns, so the result is right to 10 in a million.
const COUNT_FOR: Duration = Duration::from_millis(10);
/// Readings of one moment, of which the quickest counts: the others were interrupted.
const READINGS: usize = 8;

/// Thousand ticks a second; `None` on processors without such a counter.
pub(crate) async fn khz() -> Option<u64> {
    let (before, ticks_before) = moment()?;
    sleep(COUNT_FOR).await;
    let (after, ticks_after) = moment()?;
    let nanos = after.checked_sub(before)?.as_nanos();
    let ticks = u128::from(ticks_after.checked_sub(ticks_before)?);
    let khz = (ticks * 1_000_000).checked_div(nanos)?;
    u64::try_from(khz).ok().filter(|khz| *khz > 0)
}

/// Clock and counter of the same moment.
fn moment() -> Option<(Duration, u64)> {
    let mut best: Option<(Duration, (Duration, u64))> = None;
    for _ in 0..READINGS {
        let before = now();
        let ticks = counter()?;
        let after = now();
        let took = after.saturating_sub(before);
        if best.is_none_or(|(least, _)| took < least) {
            best = Some((took, (before + took / 2, ticks)));
        }
    }
    best.map(|(_, moment)| moment)
}

fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "the counter has no other reader")]
fn counter() -> Option<u64> {
    // SAFETY: the instruction reads a counter that every processor of this kind has.
    Some(unsafe { core::arch::x86_64::_rdtsc() })
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn two_measurements_agree() {
        let (Some(one), Some(other)) = (khz().await, khz().await) else {
            torpor_testkit::not_here("this processor has no time stamp counter");
            return;
        };
        // The guest's clock would be off by so much: far less than what a wrong unit would give.
        assert!(one.abs_diff(other) < one / 1000, "{one} and {other} kHz");
        assert!((100_000..100_000_000).contains(&one), "{one} kHz");
    }
}

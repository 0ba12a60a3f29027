//! When a schedule fires. Pure: whoever asks says what time it is.
//!
//! - Times follow from the schedule alone: of `every` they are counted from when it was made, so neither a slow
//!   firing nor a daemon that was down moves them.
//! - Cron is read in a time zone. A time that a clock skips in spring is done right after the gap; one that it shows
//!   twice in autumn is done once.
//! - The jitter of a time is always the same, whoever works it out.

use std::str::FromStr as _;

use croner::Cron;
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use torpor_protocol::ScheduleId;
use torpor_protocol::schedule::{CreateSchedule, EVERY_MIN_MS, Schedule, When};
use torpor_store::NextTime;

/// Longest time between two firings, and longest jitter: ten years is a mistake.
const LONGEST_MS: u64 = 10 * 365 * 24 * 60 * 60 * 1000;
/// Bytes of a cron expression.
const CRON_MAX: usize = 256;

/// When a schedule fires.
#[derive(Debug)]
pub(super) struct Times {
    rule: Rule,
    id: ScheduleId,
    jitter_ms: u64,
}

#[derive(Debug)]
enum Rule {
    Cron(Box<Cron>, TimeZone),
    Every { ms: u64, from_ms: u64 },
    Once(u64),
}

impl Times {
    pub(super) fn of(schedule: &Schedule) -> Result<Self, String> {
        let Schedule { id, spec, created_at_ms, .. } = schedule;
        let CreateSchedule { when, timezone, jitter_ms, .. } = spec;
        if *jitter_ms > LONGEST_MS {
            return Err("jitter_ms is longer than ten years".to_owned());
        }
        let rule = match when {
            When::Cron(text) => Rule::Cron(Box::new(cron(text)?), zone(timezone.as_deref())?),
            When::EveryMs(ms) if (EVERY_MIN_MS..=LONGEST_MS).contains(ms) => {
                Rule::Every { ms: *ms, from_ms: *created_at_ms }
            }
            When::EveryMs(_) => {
                return Err(format!("every_ms is from {EVERY_MIN_MS} to ten years"));
            }
            When::At(at) => Rule::Once(at.0),
            When::AfterMs(ms) if *ms <= LONGEST_MS => Rule::Once(created_at_ms.saturating_add(*ms)),
            When::AfterMs(_) => return Err("after_ms is longer than ten years".to_owned()),
        };
        if timezone.is_some() && !matches!(rule, Rule::Cron(..)) {
            return Err("timezone is for cron; other times need none".to_owned());
        }
        Ok(Self { rule, id: id.clone(), jitter_ms: *jitter_ms })
    }

    /// The first time after this one.
    pub(super) fn after(&self, after_ms: u64) -> Option<u64> {
        match &self.rule {
            Rule::Cron(cron, zone) => {
                let next = cron.find_next_occurrence(&zoned(after_ms, zone)?, false).ok()?;
                millis(&next).filter(|next| *next > after_ms)
            }
            Rule::Every { ms, from_ms } => {
                let passed = after_ms.checked_sub(*from_ms).map_or(0, |since| since / ms);
                from_ms.checked_add(passed.checked_add(1)?.checked_mul(*ms)?)
            }
            Rule::Once(at_ms) => (*at_ms > after_ms).then_some(*at_ms),
        }
    }

    /// The last time before this one.
    pub(super) fn before(&self, before_ms: u64) -> Option<u64> {
        match &self.rule {
            Rule::Cron(cron, zone) => {
                let last = cron.find_previous_occurrence(&zoned(before_ms, zone)?, false).ok()?;
                millis(&last).filter(|last| *last < before_ms)
            }
            Rule::Every { ms, from_ms } => {
                let passed = before_ms.checked_sub(from_ms.saturating_add(1))? / ms;
                (passed > 0).then(|| from_ms + passed * ms)
            }
            Rule::Once(at_ms) => (*at_ms < before_ms).then_some(*at_ms),
        }
    }

    /// When this time is begun.
    pub(super) fn due(&self, at_ms: u64) -> u64 {
        if self.jitter_ms == 0 {
            return at_ms;
        }
        let hash = blake3::hash(format!("{} {at_ms}", self.id).as_bytes());
        let bytes = hash.as_bytes().first_chunk().copied().unwrap_or_default();
        at_ms.saturating_add(u64::from_le_bytes(bytes) % self.jitter_ms)
    }

    /// The first time after this one, and when it is begun.
    pub(super) fn next(&self, after_ms: u64) -> Option<NextTime> {
        let at_ms = self.after(after_ms)?;
        Some(NextTime { at_ms, due_ms: self.due(at_ms) })
    }
}

fn cron(text: &str) -> Result<Cron, String> {
    let bad = |why: &str| {
        format!("cron: {text:.80?} is not understood: {why}; \"0 3 * * *\" is daily at 3:00")
    };
    if text.len() > CRON_MAX {
        return Err(bad("it is too long"));
    }
    Cron::from_str(text).map_err(|error| bad(&error.to_string()))
}

fn zone(name: Option<&str>) -> Result<TimeZone, String> {
    let Some(name) = name else { return Ok(TimeZone::UTC) };
    TimeZone::get(name)
        .map_err(|_| format!("timezone: there is no {name:.80?}; Europe/Berlin and UTC are some"))
}

fn zoned(at_ms: u64, zone: &TimeZone) -> Option<Zoned> {
    let at = Timestamp::from_millisecond(i64::try_from(at_ms).ok()?).ok()?;
    Some(at.to_zoned(zone.clone()))
}

fn millis(at: &Zoned) -> Option<u64> {
    u64::try_from(at.timestamp().as_millisecond()).ok()
}

#[cfg(test)]
mod tests {
    use super::super::tests::schedule;
    use super::*;

    fn at(text: &str) -> u64 {
        torpor_protocol::time::parse(text).unwrap()
    }

    fn times(when: When, zone: Option<&str>) -> Times {
        let mut schedule = schedule(when);
        schedule.spec.timezone = zone.map(str::to_owned);
        Times::of(&schedule).unwrap()
    }

    /// The times that follow, as people read them.
    fn following(times: &Times, after: &str, count: usize) -> Vec<String> {
        let next = |now: &u64| times.after(*now);
        let found = std::iter::successors(Some(at(after)), next).skip(1).take(count);
        found.map(|at_ms| torpor_protocol::time::text(at_ms).replace(".000Z", "Z")).collect()
    }

    #[test]
    fn cron_is_read_in_its_time_zone_summer_and_winter() {
        let daily = times(When::Cron("30 8 * * *".to_owned()), Some("Europe/Berlin"));
        assert_eq!(
            following(&daily, "2027-03-26T12:00:00Z", 3),
            ["2027-03-27T07:30:00Z", "2027-03-28T06:30:00Z", "2027-03-29T06:30:00Z"]
        );
        let utc = times(When::Cron("30 8 * * *".to_owned()), None);
        assert_eq!(following(&utc, "2027-03-28T08:30:00Z", 1), ["2027-03-29T08:30:00Z"]);
    }

    #[test]
    fn a_time_that_the_clock_skips_is_done_right_after_and_one_that_it_shows_twice_once() {
        let nightly = times(When::Cron("30 2 * * *".to_owned()), Some("Europe/Berlin"));
        // On 28 March there is no 2:30: it is 3:00 when it would be 2:00.
        assert_eq!(
            following(&nightly, "2027-03-27T12:00:00Z", 2),
            ["2027-03-28T01:00:00Z", "2027-03-29T00:30:00Z"]
        );
        // On 31 October 2:30 comes twice, an hour apart.
        let autumn = following(&nightly, "2027-10-30T12:00:00Z", 2);
        assert_eq!(autumn, ["2027-10-31T00:30:00Z", "2027-11-01T01:30:00Z"]);
        // What is hourly happens in each of the two hours.
        let hourly = times(When::Cron("30 * * * *".to_owned()), Some("Europe/Berlin"));
        assert_eq!(
            following(&hourly, "2027-10-30T23:40:00Z", 3),
            ["2027-10-31T00:30:00Z", "2027-10-31T01:30:00Z", "2027-10-31T02:30:00Z"]
        );
    }

    #[test]
    fn every_counts_from_when_it_was_made() {
        let minutes = times(When::EveryMs(60_000), None);
        assert_eq!(minutes.after(0), Some(1_060_000));
        assert_eq!(minutes.after(1_000_000), Some(1_060_000));
        assert_eq!(minutes.after(1_060_000), Some(1_120_000));
        assert_eq!(minutes.after(1_060_001), Some(1_120_000));
        assert_eq!(minutes.before(1_120_000), Some(1_060_000));
        assert_eq!(minutes.before(1_120_001), Some(1_120_000));
        assert_eq!(minutes.before(1_060_000), None);
        assert_eq!(minutes.after(u64::MAX - 1), None);
    }

    #[test]
    fn once_is_once() {
        let once = times(When::AfterMs(500), None);
        assert_eq!((once.after(7), once.after(1_000_500)), (Some(1_000_500), None));
        assert_eq!((once.before(1_000_501), once.before(1_000_500)), (Some(1_000_500), None));
    }

    #[test]
    fn the_jitter_of_a_time_stays_the_same_and_in_its_bounds() {
        let mut schedule = schedule(When::EveryMs(60_000));
        schedule.spec.jitter_ms = 1_000;
        let times = Times::of(&schedule).unwrap();
        let due: Vec<_> = (0..50).map(|n| times.due(n * 60_000) - n * 60_000).collect();
        assert!(due.iter().all(|late| *late < 1_000));
        assert!(due.iter().max() > due.iter().min());
        let again: Vec<_> = (0..50).map(|n| times.due(n * 60_000) - n * 60_000).collect();
        assert_eq!(due, again);
    }

    #[test]
    fn what_makes_no_sense_is_refused_in_words() {
        let refused = |when, zone: Option<&str>| {
            let mut schedule = schedule(when);
            schedule.spec.timezone = zone.map(str::to_owned);
            Times::of(&schedule).unwrap_err()
        };
        let cron = |text: &str| When::Cron(text.to_owned());
        for text in ["", "often", "61 * * * *", "* * * *", "* * * * * * * *"] {
            assert!(refused(cron(text), None).contains("0 3 * * *"), "{text}");
        }
        assert!(refused(cron("* * * * *"), Some("Mars/Olympus")).contains("Europe/Berlin"));
        assert!(refused(When::EveryMs(1), None).contains("1000"));
        assert!(refused(When::AfterMs(5), Some("UTC")).contains("cron"));
        // The 31st of February never comes.
        assert_eq!(times(cron("0 0 31 2 *"), None).after(0), None);
    }
}

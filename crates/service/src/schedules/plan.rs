//! What a schedule does at a moment: which of its times fire, and which are missed. Pure.

use torpor_protocol::FiringId;
use torpor_protocol::schedule::{Firing, FiringState, Missed, Outcome, Overlap, Schedule};
use torpor_store::NextTime;

use super::times::Times;

/// What begins later than this begins late: no daemon ran, or it had too much to do.
const LATE_MS: u64 = 10_000;
/// Times that may have passed and not be due by their jitter; of more the oldest is taken first.
const PUT_OFF_MAX: usize = 1_000;
/// Times that are caught up with, one after the other.
pub(super) const CATCH_UP_MAX: usize = 100;

/// What is to be recorded.
#[derive(Debug, PartialEq)]
pub(super) struct Plan {
    /// In their order.
    pub(super) firings: Vec<Firing>,
    pub(super) next: Option<NextTime>,
}

/// None: it waits until what it does now is done.
pub(super) fn plan(schedule: &Schedule, times: &Times, now_ms: u64, busy: bool) -> Option<Plan> {
    let expected = schedule.next_at_ms?;
    if schedule.spec.missed == Missed::All {
        return one_by_one(schedule, times, expected, now_ms, busy);
    }
    let last = last_passed(times, expected, now_ms);
    let mut passed = Passed { schedule, times, now_ms, firings: Vec::new() };
    if last > expected {
        let between =
            if times.after(expected) == Some(last) { "" } else { ", and those until the next one" };
        passed.missed(expected, format!("this time passed{between}"));
    }
    let late = now_ms.saturating_sub(times.due(last)) > LATE_MS;
    if late && schedule.spec.missed == Missed::None {
        passed.missed(last, "this time passed".to_owned());
    } else {
        passed.fire(last);
    }
    Some(Plan { firings: passed.firings, next: times.next(last) })
}

/// The oldest time that passed; the next round has the one after it.
fn one_by_one(
    schedule: &Schedule,
    times: &Times,
    expected: u64,
    now_ms: u64,
    busy: bool,
) -> Option<Plan> {
    let mut passed = Passed { schedule, times, now_ms, firings: Vec::new() };
    let first = first_to_catch_up(times, expected, now_ms);
    if first > expected {
        passed.missed(
            expected,
            format!("more than {CATCH_UP_MAX} times passed, the first are left out"),
        );
    }
    let late = now_ms.saturating_sub(times.due(first)) > LATE_MS;
    if busy && late && schedule.spec.overlap != Overlap::Allow {
        return None;
    }
    passed.fire(first);
    Some(Plan { firings: passed.firings, next: times.next(first) })
}

/// The last time that is due; the expected one at least.
fn last_passed(times: &Times, expected: u64, now_ms: u64) -> u64 {
    let mut last = times.before(now_ms.saturating_add(1)).unwrap_or(expected);
    // It may not be due yet, by its jitter.
    for _ in 0..PUT_OFF_MAX {
        if last <= expected || times.due(last) <= now_ms {
            return last.max(expected);
        }
        last = times.before(last).unwrap_or(expected);
    }
    expected
}

fn first_to_catch_up(times: &Times, expected: u64, now_ms: u64) -> u64 {
    let mut first = last_passed(times, expected, now_ms);
    for _ in 1..CATCH_UP_MAX {
        match times.before(first) {
            Some(before) if before >= expected => first = before,
            Some(_) | None => return expected,
        }
    }
    first
}

struct Passed<'a> {
    schedule: &'a Schedule,
    times: &'a Times,
    now_ms: u64,
    firings: Vec<Firing>,
}

impl Passed<'_> {
    /// Unless it is too late for it.
    fn fire(&mut self, at_ms: u64) {
        let late = self.now_ms.saturating_sub(self.times.due(at_ms));
        match self.schedule.spec.start_within_ms {
            Some(within) if late > within => {
                self.missed(at_ms, format!("it could not begin within {within} ms"));
            }
            Some(_) | None => self.firings.push(firing(at_ms, self.now_ms, false)),
        }
    }

    fn missed(&mut self, at_ms: u64, why: String) {
        let outcome = Outcome { message: Some(why), ..Outcome::default() };
        let (state, ended_at_ms) = (FiringState::Missed, Some(self.now_ms));
        let firing = firing(at_ms, self.now_ms, false);
        self.firings.push(Firing { state, ended_at_ms, outcome, ..firing });
    }
}

/// One that begins now.
pub(super) fn firing(fire_at_ms: u64, now_ms: u64, manual: bool) -> Firing {
    Firing {
        id: FiringId::random(),
        fire_at_ms,
        manual,
        state: FiringState::Running,
        started_at_ms: now_ms,
        ended_at_ms: None,
        outcome: Outcome::default(),
    }
}

#[cfg(test)]
mod tests {
    use torpor_protocol::schedule::When;

    use super::super::tests::schedule;
    use super::*;

    const MINUTE: u64 = 60_000;
    const BEGIN: u64 = 1_000_000;

    /// Every minute; due since its first time.
    fn minutely(missed: Missed) -> Schedule {
        let mut schedule = schedule(When::EveryMs(MINUTE));
        schedule.spec.missed = missed;
        schedule.next_at_ms = Some(BEGIN + MINUTE);
        schedule
    }

    /// Which minutes fire and are missed, and the next one.
    fn decide(schedule: &Schedule, now_ms: u64, busy: bool) -> Option<(Vec<u64>, Vec<u64>, u64)> {
        let times = Times::of(schedule).unwrap();
        let plan = plan(schedule, &times, now_ms, busy)?;
        let of = |state| {
            let fits = plan.firings.iter().filter(|firing| firing.state == state);
            fits.map(|firing| (firing.fire_at_ms - BEGIN) / MINUTE).collect()
        };
        let next = (plan.next.unwrap().at_ms - BEGIN) / MINUTE;
        Some((of(FiringState::Running), of(FiringState::Missed), next))
    }

    #[test]
    fn on_time_it_fires_whatever_is_to_become_of_missed_times() {
        for missed in [Missed::One, Missed::None, Missed::All] {
            let now = BEGIN + MINUTE + 20;
            assert_eq!(decide(&minutely(missed), now, false), Some((vec![1], vec![], 2)));
        }
    }

    #[test]
    fn after_downtime_one_none_or_all_are_done() {
        let now = BEGIN + 7 * MINUTE + 30_000;
        assert_eq!(decide(&minutely(Missed::One), now, false), Some((vec![7], vec![1], 8)));
        assert_eq!(decide(&minutely(Missed::None), now, false), Some((vec![], vec![1, 7], 8)));
        assert_eq!(decide(&minutely(Missed::All), now, false), Some((vec![1], vec![], 2)));
        // One after the other.
        assert_eq!(decide(&minutely(Missed::All), now, true), None);
        let mut further = minutely(Missed::All);
        further.next_at_ms = Some(BEGIN + 2 * MINUTE);
        assert_eq!(decide(&further, now, false), Some((vec![2], vec![], 3)));
    }

    #[test]
    fn no_more_than_a_hundred_are_caught_up_with() {
        let now = BEGIN + 1_000 * MINUTE + 5;
        assert_eq!(decide(&minutely(Missed::All), now, false), Some((vec![901], vec![1], 902)));
    }

    #[test]
    fn what_comes_too_late_is_missed() {
        let mut schedule = minutely(Missed::One);
        schedule.spec.start_within_ms = Some(1_000);
        assert_eq!(decide(&schedule, BEGIN + MINUTE + 900, false), Some((vec![1], vec![], 2)));
        assert_eq!(decide(&schedule, BEGIN + MINUTE + 1_100, false), Some((vec![], vec![1], 2)));
    }

    #[test]
    fn a_clock_that_went_back_fires_nothing_again() {
        // The time after the last one that fired is expected, and is not due: nobody asks. If somebody does, it is
        // that one and no earlier one.
        let mut schedule = minutely(Missed::One);
        schedule.next_at_ms = Some(BEGIN + 9 * MINUTE);
        assert_eq!(decide(&schedule, BEGIN + 2 * MINUTE, false), Some((vec![9], vec![], 10)));
    }

    #[test]
    fn a_jitter_of_years_costs_no_search_of_years() {
        let mut schedule = minutely(Missed::One);
        schedule.spec.when = When::EveryMs(1_000);
        schedule.spec.jitter_ms = 365 * 24 * 60 * MINUTE;
        schedule.next_at_ms = Some(BEGIN + 1_000);
        let times = Times::of(&schedule).unwrap();
        let now = times.due(BEGIN + 1_000);
        let plan = plan(&schedule, &times, now, false).unwrap();
        let fired: Vec<_> = plan.firings.iter().map(|firing| firing.fire_at_ms - BEGIN).collect();
        assert_eq!((fired, plan.next.unwrap().at_ms - BEGIN), (vec![1_000], 2_000));
    }

    #[test]
    fn once_has_no_next_time() {
        let mut schedule = schedule(When::AfterMs(500));
        schedule.next_at_ms = Some(BEGIN + 500);
        let times = Times::of(&schedule).unwrap();
        let plan = plan(&schedule, &times, BEGIN + 501, false).unwrap();
        assert_eq!((plan.firings.len(), plan.next), (1, None));
    }
}

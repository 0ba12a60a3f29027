//! Fires what is due, and goes on with what an earlier daemon began.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use torpor_lifecycle::chain;
use torpor_lifecycle::ledger::PAGE;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::schedule::{Firing, FiringState, Overlap, Schedule};
use torpor_store::{Fire, NextTime};

use super::act::{Ended, act};
use super::now_ms;
use super::places::{OPEN_MAX, Place};
use super::plan::plan;
use super::times::Times;
use crate::Service;

/// How often schedules are looked at without a reason: clocks jump, and other nodes change them.
const LOOK: Duration = Duration::from_secs(1);
/// How often it is looked for schedules that wait for a time that the clock is far from.
const MEND_EVERY: Duration = Duration::from_secs(60 * 60);
/// A time that is so much later than the next one was set by a clock that was ahead. One that is less may have been
/// fired before a clock went back.
const FAR_MS: u64 = 24 * 60 * 60 * 1000;

/// Keeps to the schedules until the daemon stops.
pub async fn keep(service: Arc<Service>) {
    while let Err(error) = go_on(&service).await {
        tracing::warn!(
            error = chain(&error),
            "cannot read what schedules were doing, trying again"
        );
        tokio::time::sleep(LOOK).await;
    }
    let mut mend_at = Instant::now();
    loop {
        if mend_at <= Instant::now() {
            mend_at = Instant::now() + MEND_EVERY;
            if let Err(error) = mend(&service).await {
                tracing::warn!(error = chain(&error), "cannot look for schedules that are far off");
            }
        }
        let next = match fire_due(&service).await {
            Ok(next) => next,
            Err(error) => {
                tracing::warn!(error = chain(&error), "cannot fire what is due, trying again");
                None
            }
        };
        let until = next.map(|due_ms| Duration::from_millis(due_ms.saturating_sub(now_ms())));
        let wait = until.unwrap_or(LOOK).clamp(Duration::from_millis(5), LOOK);
        tokio::select! {
            () = service.schedules.changed.notified() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// What this node was doing when its daemon ended.
async fn go_on(service: &Arc<Service>) -> Result<(), StoreError> {
    for (schedule, firing) in service.ledger.firings_under_way().await? {
        let place = service.schedules.open.take_back(&schedule.id, &firing.id, &service.stopping);
        if let Some(place) = place {
            begin(service, schedule, firing, place, true);
        }
    }
    Ok(())
}

/// A clock that was once far ahead would keep them silent for as long.
async fn mend(service: &Service) -> Result<(), StoreError> {
    let (now_ms, mut after) = (now_ms(), None);
    loop {
        let later_than_ms = now_ms.saturating_add(FAR_MS);
        let ledger = &service.ledger;
        let some = ledger.distant_schedules(later_than_ms, after.as_ref(), PAGE).await?;
        let Some(last) = some.last() else { return Ok(()) };
        after = Some(last.spec.name.clone());
        for schedule in some {
            let (Some(expected_at_ms), Some(next)) =
                (schedule.next_at_ms, sooner(&schedule, now_ms))
            else {
                continue;
            };
            tracing::warn!(schedule = %schedule.id, "its next time was set by a clock far ahead");
            ledger.bring_forward(&schedule.id, expected_at_ms, next).await?;
        }
    }
}

/// The next time from now on, if the one that is expected is far behind it.
fn sooner(schedule: &Schedule, now_ms: u64) -> Option<NextTime> {
    // A clock that is behind, as that of a host that has just begun may be, says nothing.
    if now_ms < schedule.created_at_ms {
        return None;
    }
    let next = Times::of(schedule).ok()?.next(now_ms)?;
    (next.at_ms.saturating_add(FAR_MS) < schedule.next_at_ms?).then_some(next)
}

/// Fires what is due; when there is something again, as far as that is known.
async fn fire_due(service: &Arc<Service>) -> Result<Option<u64>, StoreError> {
    let mut waits = false;
    // Those that wait until they have done what they do have it under way: they are not all that is seen.
    for schedule in service.ledger.due_schedules(now_ms(), OPEN_MAX).await? {
        waits |= !fire(service, schedule).await?;
    }
    if waits { Ok(None) } else { service.ledger.next_firing().await }
}

/// Whether it could be fired now.
async fn fire(service: &Arc<Service>, schedule: Schedule) -> Result<bool, StoreError> {
    let (id, overlap) = (&schedule.id, schedule.spec.overlap);
    let times = match Times::of(&schedule) {
        Ok(times) => times,
        Err(why) => {
            // Only a time zone that is gone from the database of a newer program.
            tracing::error!(schedule = %id, why, "schedule is not understood any more, paused");
            service.ledger.pause_schedule(id, true, None).await?;
            return Ok(true);
        }
    };
    let busy = service.ledger.count_under_way(id).await? > 0;
    let Some(plan) = plan(&schedule, &times, now_ms(), busy) else { return Ok(false) };
    let Some(expected_at_ms) = schedule.next_at_ms else { return Ok(true) };
    let running = plan.firings.iter().find(|firing| firing.state == FiringState::Running);
    let mut place = None;
    if let Some(firing) = running {
        place = service.schedules.open.take(id, &firing.id, &service.stopping);
        if place.is_none() {
            return Ok(false);
        }
    }
    let fire = Fire {
        schedule: id,
        expected_at_ms,
        next: plan.next,
        firings: &plan.firings,
        together: overlap != Overlap::Skip,
    };
    for firing in service.ledger.fire(&fire).await?.unwrap_or_default() {
        if firing.state == FiringState::Running
            && let Some(place) = place.take()
        {
            begin(service, schedule.clone(), firing, place, false);
        }
    }
    Ok(true)
}

/// Does what is recorded, and records how it ended; what it replaces ends before it begins. `again`: an earlier daemon
/// began it.
pub(super) fn begin(
    service: &Arc<Service>,
    schedule: Schedule,
    firing: Firing,
    place: Place,
    again: bool,
) {
    let tasks = service.tasks.clone();
    let service = Arc::clone(service);
    tasks.spawn(async move {
        match schedule.spec.overlap {
            Overlap::Replace => place.replace().await,
            Overlap::Skip | Overlap::Allow => {}
        }
        let ended = act(&service, &schedule, firing, again, &place.end).await;
        if let Some(ended) = ended {
            record(&service, ended).await;
        }
        drop(place);
        service.schedules.changed.notify_one();
    });
}

/// Until the ledger knows it: nothing else of its schedule may begin before. The next daemon finds that it was running.
async fn record(service: &Service, ended: Ended) {
    let Ended { mut firing, state } = ended;
    (firing.state, firing.ended_at_ms) = (state, Some(now_ms()));
    while let Err(error) = service.ledger.update_firing(&firing).await {
        tracing::warn!(firing = %firing.id, error = chain(&error), "cannot record how it ended");
        if service.stopping.run_until_cancelled(tokio::time::sleep(LOOK)).await.is_none() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use torpor_protocol::schedule::When;

    use super::super::tests::schedule;
    use super::*;

    #[test]
    fn a_time_that_a_clock_far_ahead_has_set_is_not_waited_for() {
        let mut hourly = schedule(When::EveryMs(3_600_000));
        let now_ms = hourly.created_at_ms + 5_000;
        let next_ms = hourly.created_at_ms + 3_600_000;
        let found = |schedule: &Schedule| sooner(schedule, now_ms).map(|next| next.at_ms);
        hourly.next_at_ms = Some(next_ms);
        assert_eq!(found(&hourly), None);
        // A clock that went back some hours: those before may have fired.
        hourly.next_at_ms = Some(next_ms + FAR_MS);
        assert_eq!(found(&hourly), None);
        hourly.next_at_ms = Some(next_ms + FAR_MS + 1);
        assert_eq!(found(&hourly), Some(next_ms));
        assert_eq!(sooner(&hourly, 0), None);
    }
}

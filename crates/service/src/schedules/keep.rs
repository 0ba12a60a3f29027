//! Fires what is due, and goes on with what an earlier daemon began.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use torpor_lifecycle::chain;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::schedule::{Firing, FiringState, Overlap, Schedule};
use torpor_store::Fire;

use super::act::{Ended, act};
use super::plan::plan;
use super::times::Times;
use super::{Open, now_ms};
use crate::Service;

/// How often schedules are looked at without a reason: clocks jump, and other nodes change them.
const LOOK: Duration = Duration::from_secs(1);
/// Firings under way of this daemon. More wait, and who asks for one is refused.
pub(super) const OPEN_MAX: usize = 64;
/// How often the end of a firing is tried to be recorded: a full disk gets room, or the next daemon finds it.
const RECORD_TRIES: u32 = 60;

/// Keeps to the schedules until the daemon stops.
pub async fn keep(service: Arc<Service>) {
    while let Err(error) = go_on(&service).await {
        tracing::warn!(
            error = chain(&error),
            "cannot read what schedules were doing, trying again"
        );
        tokio::time::sleep(LOOK).await;
    }
    loop {
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
        begin(service, schedule, firing, true);
    }
    Ok(())
}

/// Fires what is due; when there is something again, as far as that is known.
async fn fire_due(service: &Arc<Service>) -> Result<Option<u64>, StoreError> {
    let mut waits = false;
    // Those that wait until they have done what they do have it under way: they are not all that is seen.
    for schedule in service.ledger.due_schedules(now_ms(), OPEN_MAX).await? {
        if service.schedules.is_full() {
            return Ok(None);
        }
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
    let fire = Fire {
        schedule: id,
        expected_at_ms,
        next: plan.next,
        firings: &plan.firings,
        together: overlap != Overlap::Skip,
    };
    for firing in service.ledger.fire(&fire).await?.unwrap_or_default() {
        if firing.state == FiringState::Running {
            begin(service, schedule.clone(), firing, false);
        }
    }
    Ok(true)
}

/// Does what is recorded, and records how it ended; what it replaces ends before it begins. `again`: an earlier daemon
/// began it.
pub(super) fn begin(service: &Arc<Service>, schedule: Schedule, firing: Firing, again: bool) {
    let before = match schedule.spec.overlap {
        Overlap::Replace => service.schedules.end(&schedule.id),
        Overlap::Skip | Overlap::Allow => Vec::new(),
    };
    let (end, over) = (service.stopping.child_token(), CancellationToken::new());
    let open = Open { schedule: schedule.id.clone(), end: end.clone(), over: over.clone() };
    service.schedules.open.lock().insert(firing.id.clone(), open);
    let tasks = service.tasks.clone();
    let service = Arc::clone(service);
    tasks.spawn(async move {
        let _over = over.drop_guard();
        for one in before {
            one.cancelled().await;
        }
        let id = firing.id.clone();
        let ended = act(&service, &schedule, firing, again, &end).await;
        if let Some(ended) = ended {
            record(&service, ended).await;
        }
        service.schedules.open.lock().remove(&id);
        service.schedules.changed.notify_one();
    });
}

async fn record(service: &Service, ended: Ended) {
    let Ended { mut firing, state } = ended;
    (firing.state, firing.ended_at_ms) = (state, Some(now_ms()));
    for _ in 0..RECORD_TRIES {
        match service.ledger.update_firing(&firing).await {
            Ok(_) => return,
            Err(error) => {
                tracing::warn!(firing = %firing.id, error = chain(&error), "cannot record how it ended");
            }
        }
        // The next daemon finds that it was running.
        if service.stopping.run_until_cancelled(tokio::time::sleep(LOOK)).await.is_none() {
            return;
        }
    }
}

//! Schedules: what is done again and again, or once, at a time.
//!
//! - A firing is one transaction: its row, which is the only one of its time, and the schedule's next time. What is
//!   recorded as running is then done; so nothing fires twice, and nothing is done that is not recorded.
//! - Times follow the wall clock, which may jump: a time that fired is never expected again.
//! - A daemon that ends leaves what it does. The next one goes on with it where that is possible: a process that
//!   still runs is waited for, a snapshot is taken anew. Otherwise it is interrupted, and says so.

mod act;
mod keep;
mod places;
mod plan;
#[cfg(test)]
mod tests;
mod times;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::Notify;
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::schedule::{
    Action, CreateSchedule, Firing, FiringState, KEEP_MAX, Overlap, Schedule, When,
};
use torpor_protocol::time::Instant;
use torpor_protocol::{ErrorCode, FiringId, Name, SandboxRef, ScheduleId, ScheduleRef};

use crate::Service;
use crate::error::{Error, Result};
pub use keep::keep;
use places::{OPEN_MAX, OPEN_OF_ONE_MAX, Places};
use times::Times;

/// Bytes of a schedule as JSON: a page of a thousand is read at once.
const SPEC_MAX: usize = 64 * 1024;

/// What is under way in this daemon. One per daemon.
#[derive(Debug, Default)]
pub struct Schedules {
    open: Places,
    changed: Notify,
}

pub async fn create(app: &Service, spec: CreateSchedule) -> Result<Schedule> {
    let now_ms = now_ms();
    check(&spec)?;
    let mut schedule = Schedule {
        id: ScheduleId::random(),
        spec,
        next_at_ms: None,
        created_at_ms: now_ms,
        last: None,
    };
    let times = Times::of(&schedule).map_err(Error::invalid)?;
    if let When::AfterMs(ms) = schedule.spec.when {
        schedule.spec.when = When::At(Instant(now_ms.saturating_add(ms)));
    }
    // Now is still to come.
    let next = times.next(now_ms.saturating_sub(1));
    if next.is_none() {
        return Err(Error::invalid("when: that time never comes, or has passed"));
    }
    let next = next.filter(|_| !schedule.spec.paused);
    app.ledger.create_schedule(&schedule, next).await.map_err(refused)?;
    app.schedules.changed.notify_one();
    schedule.next_at_ms = next.map(|next| next.at_ms);
    Ok(schedule)
}

/// At most `limit` after this name, by name.
pub async fn list(app: &Service, after: Option<&Name>, limit: usize) -> Result<Vec<Schedule>> {
    Ok(app.ledger.schedules(after, limit).await?)
}

pub async fn find(app: &Service, of: &ScheduleRef) -> Result<Schedule> {
    app.ledger.find_schedule(of).await?.ok_or_else(|| {
        let text = format!("there is no schedule {of}");
        Error::with_hint(ErrorCode::NotFound, text, "`torpor schedule ls` lists them")
    })
}

/// Forgets it, and ends what it does. Snapshots that it took stay.
pub async fn remove(app: &Service, of: &ScheduleRef) -> Result<()> {
    let schedule = find(app, of).await?;
    app.ledger.erase_schedule(&schedule.id).await?;
    app.schedules.open.end(&schedule.id);
    Ok(())
}

/// It fires no more until it is resumed. What it does goes on.
pub async fn pause(app: &Service, of: &ScheduleRef) -> Result<Schedule> {
    let schedule = find(app, of).await?;
    app.ledger.pause_schedule(&schedule.id, true, None).await?;
    find(app, of).await
}

/// It fires again, from now on: times that passed are not missed.
pub async fn resume(app: &Service, of: &ScheduleRef) -> Result<Schedule> {
    let schedule = find(app, of).await?;
    if schedule.spec.paused {
        let next = Times::of(&schedule).map_err(Error::invalid)?.next(now_ms());
        app.ledger.pause_schedule(&schedule.id, false, next).await?;
        app.schedules.changed.notify_one();
    }
    find(app, of).await
}

/// Fires it now, besides its times.
pub async fn run(app: &Arc<Service>, of: &ScheduleRef) -> Result<Firing> {
    let schedule = find(app, of).await?;
    let now_ms = now_ms();
    let firing = plan::firing(now_ms, now_ms, true);
    let place = app.schedules.open.take(&schedule.id, &firing.id, &app.stopping);
    let place = place.ok_or_else(|| {
        let text =
            format!("{OPEN_MAX} firings are under way, or {OPEN_OF_ONE_MAX} of this schedule");
        let hint = "ask again when one has ended; `torpor schedule ls` shows which are running";
        Error::with_hint(ErrorCode::CapacityReached, text, hint)
    })?;
    let together = schedule.spec.overlap != Overlap::Skip;
    let service = Arc::clone(app);
    // What is recorded is begun, also when nobody waits for the answer any more.
    let recording = app.tasks.spawn(async move {
        let recorded = service.ledger.record_firing(&schedule.id, &firing, together).await?;
        if recorded.state == FiringState::Running {
            keep::begin(&service, schedule, recorded.clone(), place, false);
        }
        Ok(recorded)
    });
    let stopping = || Err(Error::new(ErrorCode::ShuttingDown, "the daemon is stopping"));
    recording.await.map_or_else(|_| stopping(), |recorded| recorded.map_err(refused))
}

/// At most `limit` before this place, newest first.
pub async fn firings(
    app: &Service,
    of: &ScheduleRef,
    before: Option<&Place<FiringId>>,
    limit: usize,
) -> Result<Vec<Firing>> {
    let schedule = find(app, of).await?;
    Ok(app.ledger.firings(&schedule.id, before, limit).await?)
}

fn check(spec: &CreateSchedule) -> Result<()> {
    if serde_json::to_vec(spec).map_or(usize::MAX, |json| json.len()) > SPEC_MAX {
        return Err(Error::invalid(format!(
            "a schedule has at most {SPEC_MAX} bytes as JSON: put long inputs into files, and what is said about \
             tasks into a job"
        )));
    }
    let sandbox = match &spec.action {
        Action::Run(run) => {
            let command = &run.command;
            if command.command.is_empty() {
                return Err(Error::invalid("do.run.command.command: it is empty"));
            }
            let fields = [
                ("stdin", command.stdin.is_some()),
                ("keep_stdin", command.keep_stdin),
                ("terminal", command.terminal.is_some()),
                ("detachable", command.detachable),
                ("supervise", command.supervise.is_some()),
            ];
            if let Some((field, _)) = fields.into_iter().find(|(_, given)| *given) {
                return Err(Error::invalid(format!(
                    "do.run.command: {field} is not for schedules"
                )));
            }
            &run.sandbox
        }
        Action::Snapshot(snapshot) => {
            if snapshot.keep.is_some_and(|keep| !(1..=KEEP_MAX).contains(&keep)) {
                return Err(Error::invalid(format!("do.snapshot.keep is from 1 to {KEEP_MAX}")));
            }
            &snapshot.sandbox
        }
        // What is wrong with it is said in the history: the job may change until then.
        Action::Job(_) => return Ok(()),
    };
    sandbox_ref(sandbox).map(drop)
}

/// How an action names its sandbox.
fn sandbox_ref(text: &str) -> Result<SandboxRef> {
    text.parse().map_err(|error| Error::invalid(format!("sandbox: {error}")))
}

fn refused(error: StoreError) -> Error {
    match error {
        StoreError::NameTaken(name) => {
            let text = format!("there is a schedule {name} already");
            Error::with_hint(
                ErrorCode::AlreadyExists,
                text,
                "choose another name, or remove that one",
            )
        }
        StoreError::Invalid(text) => Error::new(ErrorCode::LimitReached, text),
        StoreError::NoSuchImage(_)
        | StoreError::CorruptImage { .. }
        | StoreError::NoSuchSave(_)
        | StoreError::NoSuchSecret(_)
        | StoreError::NoSuchVolume(_)
        | StoreError::VolumeElsewhere { .. }
        | StoreError::CorruptSave { .. }
        | StoreError::InUse { .. }
        | StoreError::NotOwner(_)
        | StoreError::DiskFull(_)
        | StoreError::Failed { .. } => error.into(),
    }
}

/// The wall clock: people mean that one, also when it is set anew.
fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

//! Works on the queue: claims tasks while there is room, and says what becomes of them.
//!
//! - What an earlier daemon of this node worked on is gone on with first; then what belongs to no attempt is removed.
//! - Commit, then delete: the sandbox of a task that is over goes when the ledger knows how it ended. If it is to be
//!   tried again its sandbox goes before, so that its name is free.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use torpor_lifecycle::{chain, fault};
use torpor_protocol::SandboxRef;
use torpor_protocol::job::{CancelReason, Interruption, TaskFailure, TaskState};
use torpor_store::{AttemptEnd, Settled, Settlement, TaskClaim};

use super::attempt::{Attempt, Trouble, jitter};
use super::environment::{Mark, title};
use super::erase;
use crate::Service;
use crate::error::Result;

/// How often it is looked what other nodes did, and what is due is looked for again.
const LOOK: Duration = Duration::from_secs(5);
/// After so long what failed is tried again.
const PAUSE: Duration = Duration::from_secs(1);
/// A task that found no room waits so long at most; some room comes and goes within seconds.
const ROOM_PAUSE: Duration = Duration::from_secs(3);
/// A task whose sandbox was lost more often loses it by itself.
const INTERRUPTIONS_MAX: u32 = 10;
/// For so long nothing is begun after one found no room, unless some comes: others would find none, either.
const CROWDED: Duration = Duration::from_secs(1);
/// How often it is looked for executions that need not be remembered.
const FORGET_EVERY: Duration = Duration::from_secs(60);

/// Works until the daemon stops.
pub async fn look_after(app: Arc<Service>) {
    let mut workers = JoinSet::new();
    let taken = patiently("tasks of an earlier daemon wait", || take_over(&app)).await;
    for claim in taken {
        tracing::info!(task = title(&claim, None), "a task is gone on with");
        begin(&app, &mut workers, claim);
    }
    patiently("sandboxes of tasks are not swept", || sweep_sandboxes(&app)).await;
    patiently("results of tasks are not swept", || sweep_results(&app)).await;
    let mut forget_at = Instant::now();
    loop {
        let wait = match turn(&app, &mut workers, &mut forget_at).await {
            Ok(wait) => wait,
            Err(error) => {
                tracing::warn!(error = chain(&error), "the queue can't be read");
                PAUSE
            }
        };
        tokio::select! {
            () = app.jobs.woken.notified() => {}
            () = tokio::time::sleep(wait) => {}
            Some(_) = workers.join_next() => {}
        }
        while workers.try_join_next().is_some() {}
    }
}

/// Until it works: nothing is begun before.
async fn patiently<T, F: Future<Output = Result<T>>>(fails: &str, work: impl Fn() -> F) -> T {
    loop {
        match work().await {
            Ok(done) => return done,
            Err(error) => tracing::warn!(error = chain(&error), "{fails}"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// What an earlier daemon left.
async fn take_over(app: &Service) -> Result<Vec<TaskClaim>> {
    Ok(app.ledger.take_over_tasks(app.fleet.owner()).await?)
}

/// Removes sandboxes whose attempt is over.
async fn sweep_sandboxes(app: &Service) -> Result<()> {
    let read = |status: &torpor_protocol::Status| {
        Some((status.id.clone(), Mark::read(&status.spec.labels)?))
    };
    for (id, mark) in app.fleet.survey(read).into_iter().flatten() {
        // Anybody may write such a label; who made a sandbox nobody can.
        let ours = app.ledger.made_by(&mark.key()).await? == Some(id.clone());
        if !ours || is_wanted(app, &mark).await? {
            continue;
        }
        tracing::info!(sandbox = %id, "the sandbox of a task that is over is removed");
        if let Ok(sandbox) = app.fleet.find(&SandboxRef::Id(id)) {
            sandbox.delete().await;
        }
    }
    Ok(())
}

/// Whether its attempt goes on, or it is to stay.
async fn is_wanted(app: &Service, mark: &Mark) -> Result<bool> {
    let Mark { execution, index, attempt, keep } = mark;
    if app.ledger.attempt_runs(execution, *index, *attempt).await? {
        return Ok(true);
    }
    if !keep {
        return Ok(false);
    }
    let task = app.ledger.find_task(execution, *index).await?;
    Ok(task.is_none_or(|task| task.attempt == *attempt && task.state != TaskState::Queued))
}

async fn sweep_results(app: &Service) -> Result<()> {
    let there = app.jobs.results.executions().await?;
    let known = app.ledger.known_executions(&there).await?;
    let known: HashSet<_> = known.into_iter().collect();
    for gone in there.iter().filter(|execution| !known.contains(execution)) {
        app.jobs.results.erase(gone).await?;
    }
    Ok(())
}

/// Does what is due; how long to wait for more.
async fn turn(
    app: &Arc<Service>,
    workers: &mut JoinSet<()>,
    forget_at: &mut Instant,
) -> Result<Duration> {
    let clock = app.fleet.clock();
    for late in app.ledger.late_executions(clock.now_ms()).await? {
        app.ledger.cancel_execution(&late, CancelReason::TimedOut, clock.now_ms()).await?;
        app.jobs.changed();
    }
    for task in app.ledger.tasks_to_stop(app.fleet.owner()).await? {
        if let Some(stop) = app.jobs.attempts.lock().get(&task) {
            stop.cancel();
        }
    }
    if *forget_at <= Instant::now() {
        forget(app).await?;
        *forget_at = Instant::now() + FORGET_EVERY;
    }
    // It would get none: not asked.
    while workers.len() < app.jobs.bounds.at_once {
        let crowded = app.jobs.crowded();
        if !crowded.is_zero() {
            return Ok(crowded);
        }
        let (owner, now_ms) = (app.fleet.owner(), clock.now_ms());
        match app.ledger.claim_task(owner, app.jobs.bounds.at_once, now_ms).await? {
            Some(claim) => begin(app, workers, claim),
            None => break,
        }
    }
    let due = app.ledger.next_due(clock.now_ms()).await?;
    Ok(due.map_or(LOOK, |at_ms| clock.until(at_ms).min(LOOK)))
}

async fn forget(app: &Service) -> Result<()> {
    loop {
        // Some at a time; those that are begun meanwhile are fewer.
        let stale = app.ledger.stale_executions(app.fleet.clock().now_ms()).await?;
        if stale.is_empty() {
            return Ok(());
        }
        for one in stale {
            erase(app, &one).await?;
        }
    }
}

fn begin(app: &Arc<Service>, workers: &mut JoinSet<()>, claim: TaskClaim) {
    let task = (claim.lease.execution.clone(), claim.lease.index);
    let stop = CancellationToken::new();
    app.jobs.attempts.lock().insert(task.clone(), stop.clone());
    app.jobs.changed();
    let app = Arc::clone(app);
    workers.spawn(async move {
        let claim = Arc::new(claim);
        let (shared, with) = (Arc::clone(&app), Arc::clone(&claim));
        // On its own: if it panics the task must not be forgotten.
        let attempt =
            tokio::spawn(
                async move { Attempt { app: &shared, claim: &with, stop: &stop }.run().await },
            );
        let ended = AbortOnDropHandle::new(attempt).await.unwrap_or(Err(Trouble::Lost));
        // Before it may be claimed again: what is there then stops the next attempt.
        app.jobs.attempts.lock().remove(&task);
        Box::pin(finish(&app, &claim, ended)).await;
        app.jobs.changed();
    });
}

/// Says what becomes of the task, and removes what is not needed any more.
async fn finish(app: &Arc<Service>, claim: &TaskClaim, ended: super::attempt::Result<AttemptEnd>) {
    // Others may have room.
    let pool_full = matches!(ended, Err(Trouble::Full { of_pool: true, .. }));
    let Some(settled) = settled(app, claim, ended) else { return };
    let (over, end) = match &settled {
        Settled::Over(_, end) => (true, Some(end)),
        Settled::Again { end, .. } | Settled::Later { end, .. } => (false, Some(end)),
        Settled::Interrupted { .. } => (false, None),
    };
    if !over {
        remove(app, claim).await;
    }
    // Before the next attempt may leave some.
    if end.is_none_or(|end| end.results_bytes.is_none()) {
        drop_results(app, claim).await;
    }
    let settlement = settle(app, claim, &settled).await;
    fault::point("task.settled");
    // The last one is an event.
    app.events.hint();
    app.metrics.task(outcome(&settled));
    let kept = claim.spec.keep && settlement != Settlement::Lost;
    // By now what is to be tried again may have another sandbox, under the same name if it had found no room.
    if over && !kept {
        remove(app, claim).await;
    }
    if !pool_full {
        app.jobs.crowded_until(match settled {
            Settled::Later { .. } => Some(Instant::now() + CROWDED),
            Settled::Over(..) | Settled::Again { .. } | Settled::Interrupted { .. } => None,
        });
    }
    fault::point("task.deleted");
}

/// Until the ledger knows it: nobody else does.
async fn settle(app: &Service, claim: &TaskClaim, settled: &Settled) -> Settlement {
    loop {
        let now_ms = app.fleet.clock().now_ms();
        match app.ledger.settle_task(&claim.lease, settled, now_ms).await {
            Ok(settlement) => return settlement,
            Err(error) => {
                let task = title(claim, None);
                tracing::error!(task, error = chain(&error), "the end of a task is not recorded");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// What an earlier attempt left is not what this one did.
async fn drop_results(app: &Service, claim: &TaskClaim) {
    let (execution, index) = (&claim.lease.execution, claim.lease.index);
    if let Err(error) = app.jobs.results.erase_task(execution, index).await {
        let task = title(claim, None);
        tracing::warn!(task, error = chain(&error), "results of an earlier attempt stay");
    }
}

/// Whatever sandbox was made for the attempt.
async fn remove(app: &Service, claim: &TaskClaim) {
    loop {
        match app.ledger.made_by(&Mark::of(claim).key()).await {
            Ok(made) => {
                let made = made.and_then(|id| app.fleet.find(&SandboxRef::Id(id)).ok());
                if let Some(sandbox) = made {
                    sandbox.delete().await;
                }
                return;
            }
            Err(error) => {
                let task = title(claim, None);
                tracing::error!(
                    task,
                    error = chain(&error),
                    "the sandbox of a task is not removed"
                );
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// What is next for the task. None: it is not for us to say.
fn settled(
    app: &Service,
    claim: &TaskClaim,
    ended: super::attempt::Result<AttemptEnd>,
) -> Option<Settled> {
    let now_ms = app.fleet.clock().now_ms();
    Some(match ended {
        Ok(end) if end.reason.is_none() => Settled::Over(TaskState::Succeeded, end),
        Ok(end) => after_failure(claim, now_ms, end),
        Err(Trouble::Failed(reason, message)) => {
            let (reason, message) = (Some(reason), Some(message));
            after_failure(claim, now_ms, AttemptEnd { reason, message, ..AttemptEnd::default() })
        }
        Err(Trouble::Full { told, .. }) => {
            let end = AttemptEnd { message: Some(told), ..AttemptEnd::default() };
            Settled::Later { not_before_ms: now_ms + 1 + jitter(ROOM_PAUSE), end }
        }
        Err(Trouble::Lost) => after_loss(claim, now_ms),
        Err(Trouble::Cancelled) => Settled::Over(TaskState::Cancelled, AttemptEnd::default()),
        // Not ours: what was made for the attempt is its owner's, or swept.
        Err(Trouble::Stopping | Trouble::NotOurs) => return None,
    })
}

fn after_failure(claim: &TaskClaim, now_ms: u64, end: AttemptEnd) -> Settled {
    let spec = &claim.spec;
    let code = end.exit.and_then(|exit| exit.exit_code);
    let is_final = code.is_some_and(|code| spec.final_exit_codes.contains(&code))
        || end.reason == Some(TaskFailure::BadResults);
    let failures = claim.failures.saturating_add(1);
    if is_final || failures > spec.retries {
        return Settled::Over(TaskState::Failed, end);
    }
    let longest = Duration::from_millis(spec.backoff.longest_ms(failures));
    Settled::Again { not_before_ms: now_ms + jitter(longest), end }
}

fn after_loss(claim: &TaskClaim, now_ms: u64) -> Settled {
    if claim.interruptions >= INTERRUPTIONS_MAX {
        let message = format!("its sandbox was lost {} times", claim.interruptions + 1);
        let (reason, message) = (Some(TaskFailure::Interrupted), Some(message));
        let end = AttemptEnd { reason, message, ..AttemptEnd::default() };
        return Settled::Over(TaskState::Failed, end);
    }
    let by = match claim.taken_over {
        true => Interruption::DaemonRestarted,
        false => Interruption::SandboxLost,
    };
    Settled::Interrupted { by, not_before_ms: now_ms }
}

/// For the metrics.
fn outcome(settled: &Settled) -> &'static str {
    match settled {
        Settled::Over(state, _) => state.as_str(),
        Settled::Again { .. } => "again",
        Settled::Later { .. } => "no_room",
        Settled::Interrupted { .. } => "interrupted",
    }
}

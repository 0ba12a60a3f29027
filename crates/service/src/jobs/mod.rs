//! Jobs: the same command for many inputs, each in a sandbox of its own.
//!
//! ```text
//!  begin ──▶ tasks in the ledger ──▶ work: claim ──▶ attempt: sandbox, command, results ──▶ settle
//!                    ▲                                                                       │
//!                    └──────────────── again: after a failure, for want of room, if it was lost
//! ```
//!
//! Invariants
//! - The queue is in the ledger. In memory is only which attempts this daemon works on, to stop them.
//! - An execution that was acknowledged is run to its end, whatever is killed: each task is done at least once.
//! - A sandbox of a task says so in a label, and in its row by which attempt it was made: the same attempt never
//!   makes a second one, and one whose attempt is over is removed.

mod admission;
mod attempt;
mod environment;
mod last_line;
mod results;
mod watch;
mod work;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch as changes};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use torpor_lifecycle::fault;
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::{Search, StoreError};
use torpor_protocol::guest::LogLine;
use torpor_protocol::job::{
    BeginExecution, CancelReason, CreateJob, Execution, IfFull, Job, JobSpec, TASKS_MAX, Task,
    TaskState,
};
use torpor_protocol::{ErrorCode, ExecutionId, Name};
use torpor_store::{Admitted, ExecutionFilter, NewExecution, QueueBounds, TaskPage, TaskResults};

use crate::error::{Error, Result};
use crate::{Service, journals};
use admission::check;
pub use watch::watch;
pub use work::look_after;

/// Jobs with a name: more than anybody writes by hand.
const JOBS_MAX: u64 = 10_000;
/// Executions that are not over; each is looked at when a task is claimed.
const OPEN_MAX: usize = 1_000;
/// Tasks that are not over: some hundred megabytes in the ledger if all have large inputs.
const QUEUE_MAX: usize = 100_000;

/// What is shared by who asks for jobs and who works on them.
pub struct Jobs {
    results: TaskResults,
    bounds: Bounds,
    /// Rings when there may be something to begin or to stop.
    woken: Notify,
    /// Grows whenever something became of a task here.
    changed: changes::Sender<u64>,
    /// Stops attempts that are under way.
    attempts: Mutex<HashMap<(ExecutionId, u32), CancellationToken>>,
    /// The last task found no room: until then no other is begun.
    crowded_until: Mutex<Option<Instant>>,
}

/// What the operator allows.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Tasks that may run on this node at the same time.
    pub at_once: usize,
    /// Of the files that all tasks left.
    pub results_bytes: u64,
}

impl Jobs {
    pub fn open(results: TaskResults, bounds: Bounds) -> Self {
        Self {
            results,
            bounds,
            woken: Notify::new(),
            changed: changes::Sender::default(),
            attempts: Mutex::default(),
            crowded_until: Mutex::default(),
        }
    }

    /// How long it is to be waited before another task is begun.
    fn crowded(&self) -> Duration {
        let until = *self.crowded_until.lock();
        until.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()))
    }

    fn crowded_until(&self, until: Option<Instant>) {
        *self.crowded_until.lock() = until;
    }

    fn changed(&self) {
        self.changed.send_modify(|count| *count += 1);
    }
}

// === Jobs ===

pub async fn create(app: &Service, request: CreateJob) -> Result<Job> {
    let CreateJob { name, spec } = request;
    check(app, &spec).await?;
    if app.ledger.count_jobs().await? >= JOBS_MAX {
        let message = format!("there are {JOBS_MAX} jobs");
        return Err(Error::with_hint(ErrorCode::LimitReached, message, "delete one"));
    }
    let now_ms = app.fleet.clock().now_ms();
    let job = Job { name, spec, created_at_ms: now_ms, updated_at_ms: now_ms };
    match app.ledger.create_job(&job).await {
        Ok(()) => Ok(job),
        Err(StoreError::NameTaken(name)) => Err(Error::with_hint(
            ErrorCode::AlreadyExists,
            format!("another job is called {name}"),
            "choose another name, or change or delete that one",
        )),
        Err(error) => Err(error.into()),
    }
}

/// Executions that were begun before go on as they are.
pub async fn replace(app: &Service, name: &Name, spec: JobSpec) -> Result<Job> {
    check(app, &spec).await?;
    let before = job(app, name).await?;
    let job = Job { spec, updated_at_ms: app.fleet.clock().now_ms(), ..before };
    if app.ledger.update_job(&job).await? { Ok(job) } else { Err(no_job(name)) }
}

/// At most `limit` after this name, by name.
pub async fn jobs(app: &Service, after: Option<&Name>, limit: usize) -> Result<Vec<Job>> {
    Ok(app.ledger.jobs(after, limit).await?)
}

pub async fn job(app: &Service, name: &Name) -> Result<Job> {
    app.ledger.find_job(name).await?.ok_or_else(|| no_job(name))
}

/// Its executions stay.
pub async fn delete(app: &Service, name: &Name) -> Result<()> {
    if app.ledger.erase_job(name).await? { Ok(()) } else { Err(no_job(name)) }
}

fn no_job(name: &Name) -> Error {
    let message = format!("there is no job {name}");
    Error::with_hint(ErrorCode::NotFound, message, "`torpor job ls` shows those that there are")
}

// === Executions ===

/// Records an execution, which is worked on from now on. Whoever asks again with the same key (`by`) gets the same one.
pub async fn begin(
    app: &Arc<Service>,
    request: BeginExecution,
    by: Option<&str>,
) -> Result<Execution> {
    let seeded = |by: &str| ExecutionId::of_seed(blake3::hash(by.as_bytes()).as_bytes());
    let id = by.map_or_else(ExecutionId::random, seeded);
    let asked = by.map(|_| fingerprint(&request)).transpose()?;
    if by.is_some()
        && let Some(known) = app.ledger.find_execution(&id).await?
    {
        return same(app, known, asked).await;
    }
    let if_full = request.if_full;
    let new = NewExecution { asked, ..admitted(app, id, request).await? };
    let at_once = match if_full {
        IfFull::Queue => None,
        IfFull::Refuse => Some(app.jobs.bounds.at_once),
    };
    let bounds = QueueBounds { executions: OPEN_MAX, tasks: QUEUE_MAX, at_once };
    match app.ledger.begin_execution(&new, bounds).await? {
        Admitted::Recorded => {
            fault::point("execution.recorded");
            app.jobs.woken.notify_one();
        }
        Admitted::Known => {}
        Admitted::Full => return Err(full(if_full)),
    }
    same(app, find(app, &new.id).await?, new.asked).await
}

fn fingerprint(request: &BeginExecution) -> Result<String> {
    let text = serde_json::to_vec(request).map_err(|error| Error::invalid(error.to_string()))?;
    Ok(blake3::hash(&text).to_hex().to_string())
}

/// The execution, if it is the one that was asked for: a key may be known for longer than the request with it.
async fn same(app: &Service, known: Execution, asked: Option<String>) -> Result<Execution> {
    let before = app.ledger.execution_asked(&known.id).await?;
    if before.is_some() && before != asked {
        return Err(Error::with_hint(
            ErrorCode::IdempotencyKeyReused,
            format!(
                "execution {} was begun with this Idempotency-Key by another request",
                known.id
            ),
            "every request has a key of its own",
        ));
    }
    Ok(known)
}

fn full(if_full: IfFull) -> Error {
    let (message, hint) = match if_full {
        IfFull::Queue => (
            format!("the queue has its {QUEUE_MAX} tasks or {OPEN_MAX} executions"),
            "wait until some are over, or cancel one (`torpor job cancel`)",
        ),
        IfFull::Refuse => (
            "its tasks could not all begin at once".to_owned(),
            "let it wait for its turn (`if_full: queue`), ask for fewer tasks at the same time (`parallel`), or \
             raise limits.tasks in the configuration",
        ),
    };
    Error::with_hint(ErrorCode::CapacityReached, message, hint)
}

async fn admitted(app: &Service, id: ExecutionId, request: BeginExecution) -> Result<NewExecution> {
    let BeginExecution { job: name, spec, tasks, count, parallel, timeout_ms, if_full: _ } =
        request;
    let mut spec = match (&name, spec) {
        (Some(name), None) => job(app, name).await?.spec,
        (None, Some(spec)) => spec,
        (Some(_), Some(_)) | (None, None) => {
            return Err(Error::invalid("name a job, or say in `spec` what to run: one of both"));
        }
    };
    // One execution may be given more than its job has.
    let of_job = spec.parallel.filter(|_| name.is_some());
    let job_parallel = of_job.map(|most| parallel.map_or(most, |own| own.max(most)));
    spec.parallel = parallel.or(spec.parallel);
    check(app, &spec).await?;
    let inputs = match (tasks, count) {
        (Some(tasks), None) => tasks.into_iter().map(Some).collect(),
        (None, Some(count)) if count <= TASKS_MAX => vec![None; count],
        (None, Some(_)) => Vec::new(),
        (Some(_), Some(_)) | (None, None) => {
            return Err(Error::invalid(
                "give `tasks`, a list of inputs, or a `count`: one of both",
            ));
        }
    };
    if !(1..=TASKS_MAX).contains(&inputs.len()) {
        return Err(Error::invalid(format!("an execution has 1 to {TASKS_MAX} tasks")));
    }
    admission::check_names(&spec, inputs.len())?;
    let now_ms = app.fleet.clock().now_ms();
    let deadline_ms = timeout_ms.map(admission::deadline).transpose()?.map(|ms| now_ms + ms);
    let parallel = spec.parallel.map_or(TASKS_MAX, |most| most as usize);
    Ok(NewExecution {
        id,
        job: name,
        spec,
        parallel,
        job_parallel,
        asked: None,
        deadline_ms,
        created_at_ms: now_ms,
        inputs,
    })
}

pub async fn find(app: &Service, id: &ExecutionId) -> Result<Execution> {
    app.ledger.find_execution(id).await?.ok_or_else(|| {
        let message = format!("there is no execution {id}");
        let hint = "it was never begun, or is forgotten: `torpor job executions` shows those that are known";
        Error::with_hint(ErrorCode::NotFound, message, hint)
    })
}

/// At most `limit` before this place, newest first.
pub async fn list(
    app: &Service,
    filter: &ExecutionFilter,
    before: Option<&Place<ExecutionId>>,
    limit: usize,
) -> Result<Vec<Execution>> {
    Ok(app.ledger.executions(filter, before, limit).await?)
}

/// Ends an execution before its time: nothing of it begins any more, and what runs is stopped. Of one that is over
/// nothing changes.
pub async fn cancel(app: &Service, id: &ExecutionId) -> Result<Execution> {
    let now_ms = app.fleet.clock().now_ms();
    app.ledger.cancel_execution(id, CancelReason::Requested, now_ms).await?;
    app.jobs.changed();
    app.jobs.woken.notify_one();
    find(app, id).await
}

/// Forgets an execution that is over, with its results and logs.
pub async fn forget(app: &Service, id: &ExecutionId) -> Result<()> {
    find(app, id).await?;
    if !erase(app, id).await? {
        let message = format!("execution {id} is not over");
        return Err(Error::with_hint(ErrorCode::InUse, message, "cancel it first, or wait for it"));
    }
    Ok(())
}

/// Whether it was over, and is forgotten.
async fn erase(app: &Service, id: &ExecutionId) -> Result<bool> {
    let Some(sandboxes) = app.ledger.erase_execution(id).await? else { return Ok(false) };
    app.jobs.results.erase(id).await?;
    journals::forget(app, sandboxes).await?;
    Ok(true)
}

// === Tasks ===

/// At most `limit` after this index.
pub async fn tasks(
    app: &Service,
    id: &ExecutionId,
    state: Option<TaskState>,
    after: Option<u32>,
    limit: usize,
) -> Result<TaskPage> {
    find(app, id).await?;
    Ok(app.ledger.tasks(id, state, after, limit).await?)
}

/// With its input.
pub async fn task(app: &Service, id: &ExecutionId, index: u32) -> Result<Task> {
    let missing = || {
        let message = format!("there is no task {index} of execution {id}");
        Error::with_hint(ErrorCode::NotFound, message, "tasks are counted from 0")
    };
    app.ledger.find_task(id, index).await?.ok_or_else(missing)
}

/// What the command of its last attempt said; nothing before it began.
pub async fn log(
    app: &Service,
    id: &ExecutionId,
    index: u32,
    search: Search,
) -> Result<Vec<LogLine>> {
    task(app, id, index).await?;
    let Some(process) = app.ledger.find_process(id, index).await? else { return Ok(Vec::new()) };
    let processes = vec![(process.pid, process.started_at_ms)];
    Ok(app.fleet.journal(&process.sandbox, &Search { processes, ..search }).await?)
}

/// The archive of its results, and its length.
pub async fn results(
    app: &Service,
    id: &ExecutionId,
    index: u32,
) -> Result<(tokio::fs::File, u64)> {
    let task = task(app, id, index).await?;
    let kept = match task.results_bytes {
        Some(_) => app.jobs.results.read(id, index).await?,
        None => None,
    };
    kept.ok_or_else(|| {
        let message = format!("there are no files of task {index} of execution {id}");
        Error::with_hint(
            ErrorCode::NotFound,
            message,
            "what its command puts into its directory of results is kept when it ends, until newer results need \
             the room",
        )
    })
}

//! Jobs: what is to be run, the queue of tasks, and what became of them.
//!
//! - A task is worked on by who claimed it, and its row says who: node, epoch and attempt. What one writes who is not
//!   that any more changes nothing, and it is told so.
//! - How many tasks run is counted where they are claimed, in the same statement, and nowhere else.
//! - An execution ends in the instant in which its last task does.

use async_trait::async_trait;
use serde_json::Value;
use torpor_lifecycle::ledger::{Owner, Place};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::api::ExitReport;
use torpor_protocol::job::{
    CancelReason, Execution, ExecutionState, Interruption, Job, JobSpec, Task, TaskFailure,
    TaskState,
};
use torpor_protocol::{ExecutionId, JsonText, Name, SandboxId};

/// An execution that is to be recorded, with a task for each of its inputs.
#[derive(Debug, Clone)]
pub struct NewExecution {
    pub id: ExecutionId,
    pub job: Option<Name>,
    pub spec: JobSpec,
    /// Tasks that may run at the same time.
    pub parallel: usize,
    /// The same of all executions of its job together.
    pub job_parallel: Option<u32>,
    /// What was asked for, as a hash, if whoever asks again gets this one.
    pub asked: Option<String>,
    pub deadline_ms: Option<u64>,
    pub created_at_ms: u64,
    pub inputs: Vec<Option<Value>>,
}

/// How much of the queue there may be.
#[derive(Debug, Clone, Copy)]
pub struct QueueBounds {
    /// Executions that are not over.
    pub executions: usize,
    /// Tasks that are not over, of all executions.
    pub tasks: usize,
    /// Who can't run at once is refused: so many tasks may run here.
    pub at_once: Option<usize>,
}

/// What became of a new execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admitted {
    Recorded,
    /// It was recorded before.
    Known,
    /// One of the bounds would be passed.
    Full,
}

/// Which executions.
#[derive(Debug, Clone, Default)]
pub struct ExecutionFilter {
    pub job: Option<Name>,
    pub state: Option<ExecutionState>,
}

/// The right to write about an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskLease {
    pub execution: ExecutionId,
    pub index: u32,
    pub attempt: u32,
    pub owner: Owner,
}

/// A task to be worked on.
#[derive(Debug, Clone)]
pub struct TaskClaim {
    pub lease: TaskLease,
    pub spec: JobSpec,
    pub job: Option<Name>,
    /// Tasks of the execution.
    pub total: u32,
    pub input: Option<Value>,
    pub failures: u32,
    pub interruptions: u32,
    /// What an earlier daemon started.
    pub process: Option<TaskProcess>,
    /// An earlier daemon claimed it.
    pub taken_over: bool,
}

/// The process of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskProcess {
    pub sandbox: SandboxId,
    pub pid: u32,
    pub started_at_ms: u64,
    /// When it will have taken too long.
    pub timeout_at_ms: u64,
}

/// How an attempt ended.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AttemptEnd {
    pub exit: Option<ExitReport>,
    pub ran_ms: Option<u64>,
    pub output: Option<JsonText>,
    pub reason: Option<TaskFailure>,
    pub message: Option<String>,
    pub results_bytes: Option<u64>,
}

/// What is next for a task whose attempt is over.
#[derive(Debug, Clone, PartialEq)]
pub enum Settled {
    /// Nothing: it succeeded, failed for good, or was cancelled.
    Over(TaskState, AttemptEnd),
    /// It failed, and is tried again.
    Again { not_before_ms: u64, end: AttemptEnd },
    /// There was no room for it: as if it had not been begun. Nothing else of its execution is begun before that.
    Later { not_before_ms: u64, end: AttemptEnd },
    /// What it ran in was lost.
    Interrupted { by: Interruption, not_before_ms: u64 },
}

/// What became of what somebody wrote about an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settlement {
    /// The task has this state now, which is `Cancelled` if its execution is being cancelled and it would be queued.
    Task(TaskState),
    /// The attempt is not theirs any more.
    Lost,
}

/// Some tasks of an execution: as many as were asked for, or as fit into a page.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TaskPage {
    pub tasks: Vec<Task>,
    /// There are others after them.
    pub more: bool,
}

/// Tasks of all executions that are not over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueLength {
    pub queued: u64,
    pub running: u64,
}

#[async_trait]
pub trait JobLedger: Send + Sync + 'static {
    /// [`StoreError::NameTaken`] if there is one of that name.
    async fn create_job(&self, job: &Job) -> Result<(), StoreError>;
    /// Whether there is one of that name; it has this specification now.
    async fn update_job(&self, job: &Job) -> Result<bool, StoreError>;
    /// Whether there was one. Its executions stay.
    async fn erase_job(&self, name: &Name) -> Result<bool, StoreError>;
    async fn find_job(&self, name: &Name) -> Result<Option<Job>, StoreError>;
    async fn count_jobs(&self) -> Result<u64, StoreError>;
    /// At most `limit` after this name, by name.
    async fn jobs(&self, after: Option<&Name>, limit: usize) -> Result<Vec<Job>, StoreError>;

    /// Records an execution with all its tasks, in one instant, unless that would pass a bound.
    async fn begin_execution(
        &self,
        new: &NewExecution,
        bounds: QueueBounds,
    ) -> Result<Admitted, StoreError>;
    async fn find_execution(&self, id: &ExecutionId) -> Result<Option<Execution>, StoreError>;
    /// At most `limit` before this place, newest first.
    async fn executions(
        &self,
        filter: &ExecutionFilter,
        before: Option<&Place<ExecutionId>>,
        limit: usize,
    ) -> Result<Vec<Execution>, StoreError>;
    /// No task of it is begun any more; those that run are to be stopped. Of one that is over nothing changes.
    async fn cancel_execution(
        &self,
        id: &ExecutionId,
        reason: CancelReason,
        now_ms: u64,
    ) -> Result<(), StoreError>;
    /// Forgets it with its tasks and what is remembered of their sandboxes, if it is over. Which sandboxes they had.
    async fn erase_execution(&self, id: &ExecutionId)
    -> Result<Option<Vec<SandboxId>>, StoreError>;
    /// What was asked for with the key of this execution, as a hash.
    async fn execution_asked(&self, id: &ExecutionId) -> Result<Option<String>, StoreError>;
    /// Bytes of the results of all tasks.
    async fn results_bytes(&self) -> Result<u64, StoreError>;
    /// The execution that is over for longest and whose tasks have results.
    async fn oldest_results(&self) -> Result<Option<ExecutionId>, StoreError>;
    /// Its tasks have no results any more, and say so.
    async fn forget_results(&self, id: &ExecutionId) -> Result<(), StoreError>;
    /// Those whose time is up and that go on.
    async fn late_executions(&self, now_ms: u64) -> Result<Vec<ExecutionId>, StoreError>;
    /// Some of those that need not be remembered any more.
    async fn stale_executions(&self, now_ms: u64) -> Result<Vec<ExecutionId>, StoreError>;
    /// Which of these there are.
    async fn known_executions(&self, of: &[ExecutionId]) -> Result<Vec<ExecutionId>, StoreError>;
}

/// The label of a sandbox of a task: `EXECUTION/INDEX/ATTEMPT`, and what else is to be known of it.
pub const TASK_LABEL: &str = "torpor.task";

/// The queue.
#[async_trait]
pub trait TaskLedger: Send + Sync + 'static {
    /// Claims the task that is next, if there is one and not `at_once` of them run on this node. It is next in the
    /// execution of which fewest run, of those that may begin one.
    async fn claim_task(
        &self,
        owner: &Owner,
        at_once: usize,
        now_ms: u64,
    ) -> Result<Option<TaskClaim>, StoreError>;
    /// What earlier daemons of this node worked on is this one's.
    async fn take_over_tasks(&self, owner: &Owner) -> Result<Vec<TaskClaim>, StoreError>;
    /// Those of this owner whose execution is being cancelled.
    async fn tasks_to_stop(&self, owner: &Owner) -> Result<Vec<(ExecutionId, u32)>, StoreError>;
    /// Its command was started. Whether the attempt is theirs.
    async fn note_process(
        &self,
        lease: &TaskLease,
        process: &TaskProcess,
    ) -> Result<bool, StoreError>;
    /// The attempt is over.
    async fn settle_task(
        &self,
        lease: &TaskLease,
        settled: &Settled,
        now_ms: u64,
    ) -> Result<Settlement, StoreError>;
    /// Whether somebody works on that attempt.
    async fn attempt_runs(
        &self,
        execution: &ExecutionId,
        index: u32,
        attempt: u32,
    ) -> Result<bool, StoreError>;
    /// When the next task may be begun or the next execution is late, after `now_ms`.
    async fn next_due(&self, now_ms: u64) -> Result<Option<u64>, StoreError>;
    async fn queue_length(&self) -> Result<QueueLength, StoreError>;

    /// With its input.
    async fn find_task(
        &self,
        execution: &ExecutionId,
        index: u32,
    ) -> Result<Option<Task>, StoreError>;
    /// The process of its last attempt.
    async fn find_process(
        &self,
        execution: &ExecutionId,
        index: u32,
    ) -> Result<Option<TaskProcess>, StoreError>;
    /// At most `limit` after this index, by index.
    async fn tasks(
        &self,
        execution: &ExecutionId,
        state: Option<TaskState>,
        after: Option<u32>,
        limit: usize,
    ) -> Result<TaskPage, StoreError>;
    /// At most `limit` of those that are over after this place, as they became so, with their places.
    async fn tasks_over(
        &self,
        execution: &ExecutionId,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, Task)>, StoreError>;
    /// Sandboxes of tasks that are remembered: at most `limit` after this one, by id.
    async fn task_sandboxes(
        &self,
        after: Option<&SandboxId>,
        limit: usize,
    ) -> Result<Vec<SandboxId>, StoreError>;
}

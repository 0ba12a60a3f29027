//! Jobs: the same command for many inputs, each in a sandbox of its own. A job is a specification with a name, an
//! execution is one run of one, and has tasks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::api::{CreateSandbox, ExitReport};
use crate::id::{ExecutionId, Name, SandboxId};
use crate::json::JsonText;
use crate::named::named;
use crate::page::page;
use crate::time;
use crate::volume::GuestPath;

/// Tasks of one execution.
pub const TASKS_MAX: usize = 10_000;
/// What a task prints on its last line, in bytes, if that is to be its output.
pub const OUTPUT_MAX: usize = 64 * 1024;

/// What the tasks of a job are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct JobSpec {
    /// The sandbox of each task. It says where that begins: exactly one of `image`, `pool` and `snapshot`. `name` and
    /// `queue_ms` can't be asked for.
    pub sandbox: CreateSandbox,
    /// What to call the sandboxes; `{n}` in it is the number of the task, from 1.
    pub sandbox_name: Option<String>,
    /// Program and arguments; no shell is involved.
    pub command: Vec<String>,
    /// Variables of the command, besides those of its sandbox.
    pub env: BTreeMap<String, String>,
    /// Default: the image's working directory.
    pub cwd: Option<String>,
    /// Name, uid, `name:group` or `uid:gid`. Default: the image's user, else root.
    pub user: Option<String>,
    /// `{n}` in the command and its variables is the number of the task, from 1.
    pub numbered: bool,
    /// How often a task that failed is tried again.
    pub retries: u32,
    /// How long it waits before that.
    pub backoff: Backoff,
    /// Exit codes that are the last word: such a task is not tried again.
    pub final_exit_codes: Vec<i32>,
    /// Longest time of one attempt, from the start of the command.
    pub timeout_ms: u64,
    /// How many tasks may run at the same time; default: as many as the host lets.
    pub parallel: Option<u32>,
    /// The file inside that has the input of a task, as JSON.
    pub input_file: GuestPath,
    /// The directory inside whose files are kept as results.
    pub results: GuestPath,
    /// Leave the sandboxes when their tasks are over.
    pub keep: bool,
}

impl JobSpec {
    /// An hour: what does not end must not hold its place for ever.
    pub const TIMEOUT_MS: u64 = 60 * 60 * 1000;
    pub const INPUT_FILE: &str = "/task/input.json";
    pub const RESULTS: &str = "/results";
}

impl Default for JobSpec {
    fn default() -> Self {
        let path = |text: &str| text.parse().unwrap_or_else(|_| GuestPath::root());
        Self {
            sandbox: CreateSandbox::default(),
            sandbox_name: None,
            command: Vec::new(),
            env: BTreeMap::new(),
            cwd: None,
            user: None,
            numbered: false,
            retries: 0,
            backoff: Backoff::default(),
            final_exit_codes: Vec::new(),
            timeout_ms: Self::TIMEOUT_MS,
            parallel: None,
            input_file: path(Self::INPUT_FILE),
            results: path(Self::RESULTS),
            keep: false,
        }
    }
}

/// The longest pause before an attempt doubles with each failure, up to `max_ms`; how much of it is waited is random.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Backoff {
    pub initial_ms: u64,
    pub max_ms: u64,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { initial_ms: 1_000, max_ms: 60_000 }
    }
}

impl Backoff {
    /// The longest pause after so many failures.
    pub fn longest_ms(&self, failures: u32) -> u64 {
        let doubled = 2_u64.saturating_pow(failures.saturating_sub(1));
        self.initial_ms.saturating_mul(doubled).min(self.max_ms)
    }
}

/// `POST /v1/jobs`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateJob {
    pub name: Name,
    pub spec: JobSpec,
}

/// A specification with a name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Job {
    pub name: Name,
    pub spec: JobSpec,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    #[serde(rename = "updated_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub updated_at_ms: u64,
}

page! {
    /// `GET /v1/jobs`
    JobList { jobs: Job }
}

/// `POST /v1/executions`: runs a job, or a specification that has no name.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct BeginExecution {
    /// The job to run. It may change or go meanwhile: the execution has a copy.
    pub job: Option<Name>,
    /// Or what to run, instead.
    pub spec: Option<JobSpec>,
    /// One task for each of these inputs, or
    pub tasks: Option<Vec<Value>>,
    /// so many tasks without input.
    pub count: Option<usize>,
    /// How many tasks may run at the same time, instead of what the job says.
    pub parallel: Option<u32>,
    /// After so long, what has not ended is cancelled.
    pub timeout_ms: Option<u64>,
    pub if_full: IfFull,
}

/// What becomes of an execution that can't begin at once because the host has its tasks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum IfFull {
    /// It waits for its turn.
    #[default]
    Queue,
    /// It is refused (`capacity_reached`).
    Refuse,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ExecutionState {
    /// Tasks run, or wait to.
    Running,
    /// It is to end before its time: tasks that run are being stopped.
    Cancelling,
    /// All tasks succeeded.
    Succeeded,
    /// All tasks are over, and some failed.
    Failed,
    Cancelled,
}

named!(ExecutionState {
    Running = "running",
    Cancelling = "cancelling",
    Succeeded = "succeeded",
    Failed = "failed",
    Cancelled = "cancelled",
});

impl ExecutionState {
    pub fn is_over(self) -> bool {
        match self {
            Self::Running | Self::Cancelling => false,
            Self::Succeeded | Self::Failed | Self::Cancelled => true,
        }
    }
}

/// Why an execution was cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum CancelReason {
    /// Somebody asked for it.
    Requested,
    /// Its time was up.
    TimedOut,
}

named!(CancelReason { Requested = "requested", TimedOut = "timed_out" });

/// How many tasks of an execution are in each state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TaskCounts {
    pub queued: u64,
    pub running: u64,
    pub succeeded: u64,
    pub failed: u64,
    pub cancelled: u64,
}

impl TaskCounts {
    pub fn total(&self) -> u64 {
        self.queued + self.running + self.over()
    }

    /// Tasks that nothing will become of any more.
    pub fn over(&self) -> u64 {
        self.succeeded + self.failed + self.cancelled
    }

    pub fn of(&mut self, state: TaskState) -> &mut u64 {
        match state {
            TaskState::Queued => &mut self.queued,
            TaskState::Running => &mut self.running,
            TaskState::Succeeded => &mut self.succeeded,
            TaskState::Failed => &mut self.failed,
            TaskState::Cancelled => &mut self.cancelled,
        }
    }
}

/// One run of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Execution {
    pub id: ExecutionId,
    /// The job that it was begun as, if it had a name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<Name>,
    pub spec: JobSpec,
    pub state: ExecutionState,
    /// Why it was cancelled, or is being.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<CancelReason>,
    pub counts: TaskCounts,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    /// When it is cancelled if it has not ended.
    #[serde(default, rename = "deadline_at", with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub deadline_ms: Option<u64>,
    #[serde(default, rename = "ended_at", with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub ended_at_ms: Option<u64>,
}

page! {
    /// `GET /v1/executions`
    ExecutionList { executions: Execution }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    /// It waits for its turn, for room, or before another attempt.
    Queued,
    Running,
    Succeeded,
    Failed,
    Cancelled,
}

named!(TaskState {
    Queued = "queued",
    Running = "running",
    Succeeded = "succeeded",
    Failed = "failed",
    Cancelled = "cancelled",
});

/// Why the last attempt of a task failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum TaskFailure {
    /// Its command ended with another code than 0, or by a signal.
    Exit,
    /// An attempt took too long.
    TimedOut,
    /// It used up the memory of its sandbox.
    OutOfMemory,
    /// Its command can't be started (not found, not executable, no such directory or user), or its input not written.
    CannotStart,
    /// Its sandbox could not be made.
    NoSandbox,
    /// Its sandbox was lost too often while it ran.
    Interrupted,
    /// Its results are too large, or can't be read.
    BadResults,
    /// The host has no room for its results.
    NoSpace,
}

named!(TaskFailure {
    Exit = "exit",
    TimedOut = "timed_out",
    OutOfMemory = "out_of_memory",
    CannotStart = "cannot_start",
    NoSandbox = "no_sandbox",
    Interrupted = "interrupted",
    BadResults = "bad_results",
    NoSpace = "no_space",
});

/// Why a task was run again though it had not failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Interruption {
    /// Its sandbox was deleted, or its machine died.
    SandboxLost,
    /// The daemon ended, or its host did, and what ran did not outlive that.
    DaemonRestarted,
}

named!(Interruption {
    SandboxLost = "sandbox_lost",
    DaemonRestarted = "daemon_restarted",
});

/// One task of an execution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Task {
    pub execution: ExecutionId,
    /// From 0, in the order of the inputs.
    pub index: u32,
    pub state: TaskState,
    /// How often it was begun.
    pub attempt: u32,
    /// How many of these failed: what `retries` is about.
    pub failures: u32,
    /// How many of these were lost through no fault of its own.
    pub interruptions: u32,
    /// Why the last of those was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interrupted_by: Option<Interruption>,
    /// When it may be begun again.
    #[serde(default, rename = "not_before", with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub not_before_ms: Option<u64>,
    /// The sandbox of its last attempt, which may be gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxId>,
    #[serde(default, rename = "started_at", with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub started_at_ms: Option<u64>,
    #[serde(default, rename = "ended_at", with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub ended_at_ms: Option<u64>,
    /// How the command of its last attempt ran, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ran_ms: Option<u64>,
    /// How its last attempt ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<ExitReport>,
    /// The last line that it printed on standard output, if that is JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Value>))]
    pub output: Option<JsonText>,
    /// Why its last attempt failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<TaskFailure>,
    /// The same for people, or what else is worth knowing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Bytes of the archive of its results, if it left any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub results_bytes: Option<u64>,
    /// What it was given; not in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<Value>,
}

page! {
    /// `GET /v1/executions/{execution}/tasks`
    TaskList { tasks: Task }
}

/// A line of `GET /v1/executions/{execution}/watch`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum JobEvent {
    /// How many tasks are in each state now.
    Progress { counts: TaskCounts },
    /// A task is over. `next` is what `after` takes to go on behind it.
    Task { next: u64, task: Box<Task> },
    /// All are over: the last line.
    Ended { execution: Box<Execution> },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_with_each_failure_up_to_the_longest() {
        let backoff = Backoff { initial_ms: 100, max_ms: 1_000 };
        let pauses: Vec<_> = (1..=6).map(|failures| backoff.longest_ms(failures)).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1_000, 1_000]);
        assert_eq!(backoff.longest_ms(u32::MAX), 1_000);
    }

    #[test]
    fn what_is_not_said_has_a_default_and_what_is_not_known_is_refused() {
        let spec: JobSpec = serde_json::from_str(r#"{"command": ["true"]}"#).unwrap();
        assert_eq!(spec.results.to_string(), "/results");
        assert_eq!((spec.retries, spec.timeout_ms), (0, JobSpec::TIMEOUT_MS));
        assert!(serde_json::from_str::<JobSpec>(r#"{"comand": ["true"]}"#).is_err());
        assert!(serde_json::from_str::<JobSpec>(r#"{"results": "../x"}"#).is_err());
    }

    #[test]
    fn states_are_written_as_they_are_on_the_wire() {
        for state in TaskState::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
            assert_eq!(state.as_str().parse::<TaskState>().as_ref(), Ok(state));
        }
        for reason in TaskFailure::ALL {
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.as_str());
        }
        assert!("done".parse::<ExecutionState>().unwrap_err().contains("cancelling"));
    }
}

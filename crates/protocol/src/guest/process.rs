//! Processes inside: what is to be started, how it is kept alive, what became of it and what it said.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A process to be started.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessSpec {
    /// Program and arguments; the program is looked up in its PATH.
    pub command: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub cwd: Option<String>,
    /// Name, uid, name:group or uid:gid.
    pub user: Option<String>,
    /// Whether it has a stdin that can be written; otherwise it reads nothing.
    pub stdin: bool,
    /// A terminal of this size instead of pipes.
    pub terminal: Option<TerminalSize>,
    /// Killed with everything it started after so long, counting the time the machine sleeps.
    pub timeout_ms: Option<u64>,
    /// What `Run` does to the process when its stream is reset: `false` kills it.
    pub survives_detach: bool,
    /// The sandbox does not fall asleep while it runs.
    pub keep_awake: bool,
    /// Keep it alive. Only for `Start`.
    pub supervise: Option<Supervision>,
    /// What it says is read and not kept. Only for `Start`.
    pub discard_stdout: bool,
    pub discard_stderr: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TerminalSize {
    pub cols: u16,
    pub rows: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Supervision {
    /// Unique in the sandbox.
    pub name: Option<String>,
    pub restart: RestartPolicy,
    pub max_restarts: Option<u32>,
    pub initial_backoff_ms: u64,
    pub max_backoff_ms: u64,
    /// How to find out whether it is well; one that is not counts as ended.
    pub health: Option<HealthCheck>,
}

impl Default for Supervision {
    fn default() -> Self {
        Self {
            name: None,
            restart: RestartPolicy::OnFailure,
            max_restarts: None,
            initial_backoff_ms: 500,
            max_backoff_ms: 30_000,
            health: None,
        }
    }
}

/// A look at a process from time to time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct HealthCheck {
    /// On loopback inside.
    pub port: u16,
    /// With a path it must answer HTTP with a status below 400; without one a connection is enough.
    #[serde(default)]
    pub path: Option<String>,
    #[serde(default = "HealthCheck::initial_delay_ms")]
    pub initial_delay_ms: u64,
    #[serde(default = "HealthCheck::interval_ms")]
    pub interval_ms: u64,
    #[serde(default = "HealthCheck::timeout_ms")]
    pub timeout_ms: u64,
    /// So many looks in a row must fail.
    #[serde(default = "HealthCheck::failure_threshold")]
    pub failure_threshold: u32,
}

impl HealthCheck {
    fn initial_delay_ms() -> u64 {
        5_000
    }

    fn interval_ms() -> u64 {
        1_000
    }

    fn timeout_ms() -> u64 {
        500
    }

    fn failure_threshold() -> u32 {
        3
    }
}

/// What health checks say of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HealthReport {
    pub state: HealthState,
    /// Looks in a row that failed.
    pub failures: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum HealthState {
    /// Not looked at yet.
    Starting,
    Healthy,
    Unhealthy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum RestartPolicy {
    Never,
    OnFailure,
    Always,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessStatus {
    pub pid: u32,
    pub command: Vec<String>,
    /// The name of a supervised process.
    pub name: Option<String>,
    pub terminal: bool,
    /// Of its terminal, as it was last told.
    #[serde(default)]
    pub terminal_size: Option<TerminalSize>,
    pub stdin_open: bool,
    /// Unix milliseconds.
    pub started_at_ms: u64,
    pub ended_at_ms: Option<u64>,
    /// None while it runs.
    pub exit: Option<Exit>,
    pub restarts: u32,
    /// When it will be started again, Unix milliseconds.
    pub next_start_at_ms: Option<u64>,
    /// Bytes of output so far, and how many of them are no longer kept.
    pub output_bytes: u64,
    pub output_dropped: u64,
    /// How it is kept alive, if it is.
    #[serde(default)]
    pub supervision: Option<Box<Supervision>>,
    #[serde(default)]
    pub health: Option<HealthReport>,
    /// How it ended before it was started again.
    #[serde(default)]
    pub last_exit: Option<LastExit>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastExit {
    pub exit: Exit,
    /// Unix milliseconds.
    pub at_ms: u64,
}

/// A line that a process said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LogLine {
    /// When, Unix microseconds; no two lines of a sandbox have the same.
    pub stamp_us: u64,
    pub pid: u32,
    /// Of the process, Unix milliseconds: tells it from another that had the same pid.
    pub started_at_ms: u64,
    /// Its program, and its name if it is supervised.
    pub command: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// On standard error.
    #[serde(default)]
    pub stderr: bool,
    /// Without its end of line. Bytes that are not UTF-8 show as U+FFFD, and long lines are cut.
    pub text: String,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "how", rename_all = "snake_case")]
pub enum Exit {
    Code {
        code: i32,
    },
    Signal {
        signal: i32,
    },
    /// It was killed because its time was up.
    TimedOut,
}

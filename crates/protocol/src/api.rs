//! Bodies of the native HTTP API, `/v1`.
//!
//! Byte streams (files, tars, stdin) are raw bodies and not described here. The output of a running
//! command is NDJSON: one [`RunEvent`] a line. WebSockets carry [`ExecInput`] and [`ExecOutput`] as
//! text messages, and bytes as binary messages (see [`ExecOutput`]).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use crate::file::{ChangeMode, FileEntry, FileList, MakeDirectory, MoveFile, WatchEvent};
use crate::guest::{Exit, HealthReport, ProcessStatus, Supervision, TerminalSize};
use crate::id::{Name, SecretName};
use crate::network::Network;
use crate::page::page;
pub use crate::records::{
    ArchiveList, ArchivedSandbox, Build, BuildCache, BuildCacheEntry, BuildKind, BuildList,
    BuildState, Image, ImageConfig, ImageEvent, ImageList, Log, LogEntry, Secret, SecretList,
    SetSecret,
};
pub use crate::registry::{
    PruneImages, PrunedImages, PullImage, PullPolicy, PushImage, RegistryList, RegistryLogin,
    SetRegistryLogin,
};
use crate::spec::{Hooks, Lifetime, PortAccess, StandbyPolicy};
use crate::status::Status;
use crate::time;
use crate::volume::MountRequest;

/// The image of a sandbox that names none.
pub const DEFAULT_IMAGE: &str = "torpor/base";
/// Carries the request id, both ways.
pub const REQUEST_ID_HEADER: &str = "x-request-id";
/// Chosen by a client for one request, so that it may be repeated.
pub const IDEMPOTENCY_HEADER: &str = "idempotency-key";
/// An answer that was given before carries it.
pub const REPLAYED_HEADER: &str = "idempotency-replayed";
/// Routes a request to a port of a sandbox, instead of the `Host` label: `<port>-<name-or-id>`.
pub const PREVIEW_HEADER: &str = "x-torpor-preview";

/// `POST /v1/sandboxes`. All fields may be left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct CreateSandbox {
    pub name: Option<Name>,
    /// Name or id of an image; one that is not here is pulled from its registry.
    pub image: Option<String>,
    /// When it is pulled; default: as the daemon is configured, `missing` if nobody said otherwise.
    pub pull: Option<PullPolicy>,
    /// Name or id of a snapshot to begin from, instead of an image. Of a memory snapshot the
    /// resources can't be changed.
    pub snapshot: Option<String>,
    /// What isolates it: `gvisor`, `microvm`, or `auto`, which leaves it to the daemon and is the default. A
    /// memory snapshot goes on in the engine that took it.
    pub engine: Option<String>,
    pub cpus: Option<f64>,
    pub memory_mib: Option<u64>,
    pub disk_mib: Option<u64>,
    pub pids: Option<u32>,
    pub env: BTreeMap<String, String>,
    pub labels: BTreeMap<String, String>,
    pub network: Network,
    pub lifetime: Lifetime,
    pub standby: Standby,
    /// Program and arguments to start when it boots.
    pub entrypoint: Vec<String>,
    /// Secrets that every process gets as variables.
    pub secrets: Vec<SecretName>,
    /// Who may reach its ports from outside; default: all of them, with a key if there are keys.
    pub ports: Option<PortAccess>,
    /// Claim it from this pool: it is what the pool says, and nothing else may be asked for but a
    /// name, labels, variables and mounts.
    pub pool: Option<Name>,
    /// Volumes and drives that it begins with.
    pub mounts: Vec<MountRequest>,
    /// If this host has no room for it, wait so long instead of being refused.
    pub queue_ms: Option<u64>,
}

/// How a sandbox sleeps; what is absent is the server's default, or stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Standby {
    /// Falls asleep when nobody talked to it for so long; null: never by itself.
    #[serde(deserialize_with = "time::given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub idle_after_ms: Option<Option<u64>>,
    pub auto_wake: Option<bool>,
    pub hooks: Option<Hooks>,
}

impl Standby {
    /// `policy` with what is given here instead.
    pub fn over(self, policy: StandbyPolicy) -> StandbyPolicy {
        StandbyPolicy {
            idle_after_ms: self
                .idle_after_ms
                .map_or(policy.idle_after_ms, Option::unwrap_or_default),
            auto_wake: self.auto_wake.unwrap_or(policy.auto_wake),
            hooks: self.hooks.unwrap_or(policy.hooks),
        }
    }
}

/// `PATCH /v1/sandboxes/{sandbox}`: what is given is replaced.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct UpdateSandbox {
    /// An unnamed sandbox becomes a named one.
    pub name: Option<Name>,
    pub labels: Option<BTreeMap<String, String>>,
    pub lifetime: Option<Lifetime>,
    pub standby: Option<Standby>,
    /// At once, also for connections that are open.
    pub network: Option<Network>,
    pub ports: Option<PortAccess>,
    /// At once, if the engine can.
    pub resources: Option<Resize>,
}

/// What is absent stays as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Resize {
    pub cpus: Option<f64>,
    pub memory_mib: Option<u64>,
    pub disk_mib: Option<u64>,
}

page! {
    /// `GET /v1/sandboxes`
    SandboxList { sandboxes: Status }
}

/// `GET /v1/sandboxes/{sandbox}/usage`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UsageReport {
    pub memory_bytes: u64,
    /// Processor time.
    pub cpu_ms: u64,
    pub disk_bytes: u64,
    pub oom_kills: u64,
}

/// `POST /v1/sandboxes/{sandbox}/run` and `…/processes`, and the first message of `…/exec`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Command {
    /// Program and arguments; no shell is involved.
    pub command: Vec<String>,
    pub env: BTreeMap<String, String>,
    /// Default: the image's working directory.
    pub cwd: Option<String>,
    /// Name, uid, `name:group` or `uid:gid`. Default: the image's user, else root.
    pub user: Option<String>,
    /// `run`: text for its standard input. Otherwise it reads nothing.
    pub stdin: Option<String>,
    /// `processes`: keep its standard input open for `PUT …/stdin`.
    pub keep_stdin: bool,
    /// Killed with everything it started after so long.
    pub timeout_ms: Option<u64>,
    /// `exec`, `processes`: a terminal of this size instead of pipes.
    pub terminal: Option<TerminalSize>,
    /// `exec`: go on when the client goes away.
    pub detachable: bool,
    /// The sandbox does not fall asleep while it runs.
    pub keep_awake: bool,
    /// `processes`: start it again when it ends.
    pub supervise: Option<Supervision>,
    /// `processes`: what it says on standard output is not kept.
    pub discard_stdout: bool,
    /// `processes`: what it says on standard error is not kept.
    pub discard_stderr: bool,
}

/// `POST …/run` without `?stream=true`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RunResult {
    #[serde(flatten)]
    pub exit: ExitReport,
    /// Bytes that are not UTF-8 show as U+FFFD.
    pub stdout: String,
    pub stderr: String,
    /// Output beyond the limit was cut.
    pub truncated: bool,
    pub duration_ms: u64,
}

/// How a command ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExitReport {
    /// None if a signal ended it.
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub timed_out: bool,
    /// The host killed something in the sandbox for want of memory while it ran.
    pub oom_killed: bool,
}

impl ExitReport {
    pub fn new(exit: Exit, oom_killed: bool) -> Self {
        match exit {
            Exit::Code { code } => Self { exit_code: Some(code), oom_killed, ..Self::default() },
            Exit::Signal { signal } => Self { signal: Some(signal), oom_killed, ..Self::default() },
            Exit::TimedOut => Self { timed_out: true, oom_killed, ..Self::default() },
        }
    }
}

/// A line of `POST …/run?stream=true` and of `GET …/processes/{pid}/output`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum RunEvent {
    Started {
        pid: u32,
        #[serde(rename = "started_at", with = "time::instant")]
        #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
        started_at_ms: u64,
    },
    /// `text`, or `base64` if the bytes are not UTF-8.
    Output {
        stream: OutputStream,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        text: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        base64: Option<String>,
    },
    /// So many bytes of output were lost because nobody read them in time.
    Skipped { bytes: u64 },
    Exited {
        #[serde(flatten)]
        exit: ExitReport,
    },
    /// The stream broke off.
    Error { message: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OutputStream {
    Stdout,
    Stderr,
}

/// A text message of the client on `…/exec` and `…/attach`; bytes for stdin are binary messages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum ExecInput {
    /// The first message on `…/exec`.
    Start(Box<Command>),
    Resize(TerminalSize),
    Signal {
        signal: i32,
    },
    /// No more stdin.
    Eof,
}

/// A text message of the daemon on `…/exec` and `…/attach`; output is binary messages whose first
/// byte is 1 (stdout, terminal) or 2 (stderr).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ExecOutput {
    Started { pid: u32 },
    Skipped { bytes: u64 },
    Exited(ExitReport),
    Error(crate::ErrorBody),
}

/// First byte of binary messages that carry output.
pub const STDOUT_BYTE: u8 = 1;
/// First byte of binary messages that carry standard error.
pub const STDERR_BYTE: u8 = 2;

page! {
    ProcessList { processes: Process }
}

/// A process that was started through the API.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Process {
    pub pid: u32,
    pub command: Vec<String>,
    pub name: Option<String>,
    pub terminal: bool,
    pub stdin_open: bool,
    pub running: bool,
    #[serde(rename = "started_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub started_at_ms: u64,
    #[serde(rename = "ended_at", default, with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub ended_at_ms: Option<u64>,
    /// None while it runs.
    pub exit: Option<ExitReport>,
    pub restarts: u32,
    #[serde(rename = "next_start_at", default, with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub next_start_at_ms: Option<u64>,
    pub output_bytes: u64,
    pub output_dropped: u64,
    /// How it is kept alive, if it is.
    pub supervise: Option<Supervision>,
    /// What its health check says, if it has one.
    pub health: Option<HealthReport>,
    /// How it ended before it was started again.
    pub last_exit: Option<ExitReport>,
    #[serde(rename = "last_exit_at", default, with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub last_exit_at_ms: Option<u64>,
}

impl From<ProcessStatus> for Process {
    fn from(status: ProcessStatus) -> Self {
        Self {
            pid: status.pid,
            command: status.command,
            name: status.name,
            terminal: status.terminal,
            stdin_open: status.stdin_open,
            running: status.exit.is_none(),
            started_at_ms: status.started_at_ms,
            ended_at_ms: status.ended_at_ms,
            exit: status.exit.map(|exit| ExitReport::new(exit, false)),
            restarts: status.restarts,
            next_start_at_ms: status.next_start_at_ms,
            output_bytes: status.output_bytes,
            output_dropped: status.output_dropped,
            supervise: status.supervision.map(|supervision| *supervision),
            health: status.health,
            last_exit: status.last_exit.map(|last| ExitReport::new(last.exit, false)),
            last_exit_at_ms: status.last_exit.map(|last| last.at_ms),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SendSignal {
    /// A number, 1 to 64.
    pub signal: i32,
}

/// `GET /v1/info`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Info {
    pub version: String,
    /// The short name of this data directory on its host: in the names of its cgroups, links and
    /// firewall table.
    pub installation: String,
    pub engine: String,
    pub engine_version: String,
    pub sandboxes: usize,
    pub uptime_ms: u64,
}

/// `POST /v1/keys`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateKey {
    pub label: String,
}

/// An API key. Its secret is shown once, when it is made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ApiKey {
    pub id: String,
    pub label: String,
    /// The first characters, to tell keys apart.
    pub prefix: String,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
}

page! {
    KeyList { keys: ApiKey }
}

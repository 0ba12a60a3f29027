//! Schedules: something that is done again and again, or once, at a time.

use serde::{Deserialize, Serialize};

use crate::api::Command;
use crate::id::{FiringId, Name, ScheduleId};
use crate::job::BeginExecution;
use crate::named::named;
use crate::page::page;
use crate::snapshot::SnapshotKind;
use crate::time::{self, Instant};

/// Most schedules of an installation.
pub const SCHEDULES_MAX: usize = 10_000;
/// Shortest time between two firings: what is to happen more often is a program in the sandbox.
pub const EVERY_MIN_MS: u64 = 1_000;
/// Most snapshots that a schedule keeps.
pub const KEEP_MAX: u32 = 1_000;

/// When a schedule fires: one of these.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum When {
    /// A cron expression of five fields, or six with seconds first; `L`, `#` and `W` are known.
    Cron(String),
    /// So many milliseconds after the time before.
    EveryMs(u64),
    /// Once, at this time.
    At(Instant),
    /// Once, so many milliseconds after it is made. It is kept as `at`.
    AfterMs(u64),
}

/// What is done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[expect(clippy::large_enum_variant, reason = "one for each schedule, and never many in memory")]
pub enum Action {
    /// Run a command in a sandbox, which is woken and stays awake while it runs.
    Run(ScheduledRun),
    /// Take a snapshot of a sandbox.
    Snapshot(ScheduledSnapshot),
    /// Begin an execution of a job, and wait for its end.
    Job(Box<BeginExecution>),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ScheduledRun {
    /// Id or name; a name is looked up whenever it fires.
    pub sandbox: String,
    /// As for `processes`. Without `timeout_ms` it may take an hour.
    pub command: Command,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ScheduledSnapshot {
    /// Id or name; a name is looked up whenever it fires.
    pub sandbox: String,
    #[serde(default)]
    pub kind: SnapshotKind,
    /// Of those that this schedule took the newest so many stay. None: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<u32>,
}

/// What happens if it fires while the time before is still being done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Overlap {
    /// This time is skipped.
    #[default]
    Skip,
    /// Both go on.
    Allow,
    /// The one before is ended.
    Replace,
}

/// What happens to times that passed while no daemon ran.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Missed {
    /// The last of them is done now.
    #[default]
    One,
    /// They are noted as missed.
    None,
    /// Each is done, one after the other, at most a hundred.
    All,
}

/// `POST /v1/schedules`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateSchedule {
    pub name: Name,
    pub when: When,
    /// Of `cron`: such as Europe/Berlin. Default: UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timezone: Option<String>,
    #[serde(rename = "do")]
    pub action: Action,
    #[serde(default)]
    pub overlap: Overlap,
    #[serde(default)]
    pub missed: Missed,
    /// A time that is later than this is missed. None: however late.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_within_ms: Option<u64>,
    /// Every time is put off by a random part of this, so that not all begin at once.
    #[serde(default)]
    pub jitter_ms: u64,
    /// It fires only when it is resumed.
    #[serde(default)]
    pub paused: bool,
}

/// Something that is done at its times.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Schedule {
    pub id: ScheduleId,
    #[serde(flatten)]
    pub spec: CreateSchedule,
    /// When it fires next, without the jitter; none: never again, or not while it is paused.
    #[serde(rename = "next_at", with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub next_at_ms: Option<u64>,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    /// The last time that it fired, or should have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<Firing>,
}

page! {
    /// `GET /v1/schedules`
    ScheduleList { /// By name.
        schedules: Schedule }
}

/// How a firing stands, or ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum FiringState {
    /// It is being done.
    Running,
    /// It was done: a command exited with 0, a snapshot is complete.
    Succeeded,
    /// `message` says why, or `exit`.
    Failed,
    /// The time before was still being done.
    Skipped,
    /// It was too late for it.
    Missed,
    /// The next time came and ended it.
    Replaced,
    /// The daemon ended meanwhile, and nothing can be said of how it went on.
    Interrupted,
}

named!(FiringState {
    Running = "running",
    Succeeded = "succeeded",
    Failed = "failed",
    Skipped = "skipped",
    Missed = "missed",
    Replaced = "replaced",
    Interrupted = "interrupted",
});

/// One time that a schedule fired, or should have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Firing {
    pub id: FiringId,
    /// The time it is for.
    #[serde(rename = "fire_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub fire_at_ms: u64,
    /// Somebody asked for it, and it is for no time of the schedule.
    #[serde(default)]
    pub manual: bool,
    pub state: FiringState,
    #[serde(rename = "started_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub started_at_ms: u64,
    #[serde(
        rename = "ended_at",
        default,
        with = "time::maybe",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub ended_at_ms: Option<u64>,
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What is known of what a firing did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct Outcome {
    /// What it made: the id of a snapshot or of an execution.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result: Option<String>,
    /// The process of a command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessMark>,
    /// How a command ended: its exit code, or 128 and the signal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit: Option<i32>,
    /// The end of what it said, 16 KiB at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    /// What else there is to say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// A process, told from later ones of the same number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProcessMark {
    pub sandbox: crate::SandboxId,
    pub pid: u32,
    #[serde(rename = "started_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub started_at_ms: u64,
}

page! {
    /// `GET /v1/schedules/{schedule}/firings`
    FiringList { /// Newest first.
        firings: Firing }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_is_written_as_people_would() {
        let text = r#"{"name": "backup", "when": {"cron": "0 3 * * *"}, "timezone": "Europe/Berlin",
            "do": {"run": {"sandbox": "web", "command": {"command": ["./backup"]}}}}"#;
        let parsed: CreateSchedule = serde_json::from_str(text).unwrap();
        assert_eq!((parsed.overlap, parsed.missed), (Overlap::Skip, Missed::One));
        let again: CreateSchedule =
            serde_json::from_str(&serde_json::to_string(&parsed).unwrap()).unwrap();
        assert_eq!(again, parsed);
        let once: When = serde_json::from_str(r#"{"at": "2027-01-15T08:00:00Z"}"#).unwrap();
        assert_eq!(once, When::At(Instant(1_800_000_000_000)));
        let schedule = Schedule {
            id: ScheduleId::random(),
            spec: parsed,
            next_at_ms: Some(1_800_000_000_000),
            created_at_ms: 1,
            last: None,
        };
        let json = serde_json::to_value(&schedule).unwrap();
        assert_eq!(
            (&json["name"], &json["next_at"]),
            (&"backup".into(), &"2027-01-15T08:00:00.000Z".into())
        );
        assert_eq!(serde_json::from_value::<Schedule>(json).unwrap(), schedule);
        let both = r#"{"every_ms": 1000, "cron": "* * * * *"}"#;
        assert!(serde_json::from_str::<When>(both).is_err());
    }

    #[test]
    fn a_state_is_written_the_same_in_text_and_json() {
        for state in FiringState::ALL {
            assert_eq!(state.as_str().parse().as_ref(), Ok(state));
            assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
        }
    }
}

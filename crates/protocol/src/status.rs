//! What everybody may know of a sandbox.

use serde::{Deserialize, Serialize};

use crate::id::{SandboxId, SnapshotId};
use crate::reason::ReasonCode;
use crate::spec::SandboxSpec;
use crate::time;

/// Where a sandbox stands in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Its machine is being started for the first time.
    Creating,
    /// Its machine runs and its agent answered.
    Running,
    /// It sleeps; `tier` says how deeply. The next request wakes it.
    Asleep,
    /// It has no machine and can't get one by itself; `reason` and `message` say why.
    Failed,
    /// It is gone.
    Terminated,
}

impl State {
    /// All states, for metrics and tests.
    pub const ALL: [Self; 5] =
        [Self::Creating, Self::Running, Self::Asleep, Self::Failed, Self::Terminated];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Asleep => "asleep",
            Self::Failed => "failed",
            Self::Terminated => "terminated",
        }
    }
}

/// How deeply a sandbox sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// Frozen in memory.
    Warm,
    /// On disk, without a process.
    Cold,
}

impl Tier {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Cold => "cold",
        }
    }
}

/// The public view of a sandbox, at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Status {
    pub id: SandboxId,
    #[serde(flatten)]
    pub spec: SandboxSpec,
    pub state: State,
    /// Why it is in this state, if it did not get there by being asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<ReasonCode>,
    /// The same for people, with what is known of the cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Grows with every change of this status; a watcher asks for "after generation N".
    pub generation: u64,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    /// When somebody last talked to it; the present while somebody does.
    #[serde(rename = "last_used_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub last_used_at_ms: u64,
    /// Asleep: how deeply it sleeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<Tier>,
    /// Asleep: whether all of it is on disk, so that not even the loss of the host loses any.
    #[serde(default)]
    pub durable: bool,
    /// Size of its last save on disk; 0 if it has none.
    #[serde(default)]
    pub saved_bytes: u64,
    /// How often it woke.
    #[serde(default)]
    pub wakes: u64,
    /// Its machine was lost and it came back as it was at this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "recovered_from", with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub recovered_from_ms: Option<u64>,
    /// The snapshot it was last forked from, restored to or saved as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<SnapshotId>,
    /// It waits for room on its host until this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "queued_until", with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub queued_until_ms: Option<u64>,
    /// Where the time of its machine's last start or wake went.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub start_steps: Vec<Step>,
}

/// A part of a longer operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Step {
    pub name: String,
    pub ms: f64,
}

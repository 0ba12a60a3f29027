//! What everybody may know of a sandbox.

use serde::{Deserialize, Serialize};

use crate::id::SandboxId;
use crate::spec::SandboxSpec;

/// Where a sandbox stands in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Its machine is being started for the first time.
    Creating,
    /// Its machine runs and its agent answered.
    Running,
    /// It has no machine and can't get one by itself; `reason` says why.
    Failed,
    /// It is gone.
    Terminated,
}

impl State {
    /// All states, for metrics and tests.
    pub const ALL: [Self; 4] = [Self::Creating, Self::Running, Self::Failed, Self::Terminated];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Failed => "failed",
            Self::Terminated => "terminated",
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
    pub reason: Option<String>,
    /// Grows with every change of this status; a watcher asks for "after generation N".
    pub generation: u64,
    /// Unix milliseconds.
    pub created_at_ms: u64,
    /// When somebody last talked to it, Unix milliseconds; the present while somebody does.
    pub last_used_at_ms: u64,
    /// The engine that runs it.
    pub engine: String,
    /// Where the time of its machine's start went.
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

//! Saved moments, forks of them, and pools of machines that are ready ahead.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ErrorBody;
use crate::api::{FileEntry, Standby};
use crate::id::{ImageId, Name, SandboxId, SnapshotId};
use crate::network::Network;
use crate::page::page;
use crate::reason::WorkFailure;
use crate::spec::{Lifetime, PortAccess, Resources, StandbyPolicy};
use crate::status::{State, Status, Tier};
use crate::time;
use crate::volume::ForkVolumes;

/// Most forks of one request.
pub const FORKS_MAX: usize = 1000;

/// What a snapshot holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SnapshotKind {
    /// Files, memory and processes. Resources are part of it.
    #[default]
    Memory,
    /// Files only: what begins from it boots, with any resources.
    Filesystem,
}

impl SnapshotKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Filesystem => "filesystem",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SnapshotState {
    InProgress,
    Completed,
    /// `reason` says why; there is nothing to begin from.
    Failed,
}

impl SnapshotState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Failed => "failed",
        }
    }
}

/// A saved moment of a sandbox that outlives it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Snapshot {
    pub id: SnapshotId,
    pub name: Option<Name>,
    pub kind: SnapshotKind,
    pub state: SnapshotState,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<WorkFailure>,
    /// The same for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The sandbox it was taken of.
    pub sandbox: SandboxId,
    pub sandbox_name: Option<Name>,
    /// The snapshot before it in the life of that sandbox.
    pub parent: Option<SnapshotId>,
    /// The image below it.
    pub image: String,
    pub image_id: ImageId,
    pub resources: Resources,
    #[serde(rename = "created_at", alias = "created_at_ms", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    /// Bytes on disk; shared with whatever else was saved at the same moment.
    pub size_bytes: u64,
    /// For how long the sandbox stood still; 0 if it slept.
    pub pause_ms: f64,
    pub engine: String,
    /// A memory snapshot can be revived by this version only.
    pub engine_version: String,
}

/// A process as it was when the snapshot was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SavedProcess {
    pub pid: u32,
    pub parent: u32,
    pub command: String,
    pub user: u32,
    pub threads: u32,
}

/// `POST /v1/sandboxes/{sandbox}/sleep`: answered when it is durable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Sleep {
    /// Keep nothing of it in memory.
    pub cold: bool,
}

/// `POST /v1/sandboxes/{sandbox}/snapshots`
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct TakeSnapshot {
    pub name: Option<Name>,
    pub kind: SnapshotKind,
}

/// `POST /v1/sandboxes/{sandbox}/restore`: back to a snapshot, memory included.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RestoreSandbox {
    /// Name or id.
    pub snapshot: String,
}

page! {
    /// `GET /v1/snapshots`
    SnapshotList { snapshots: Snapshot }
}

/// `GET /v1/snapshots/{snapshot}`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SnapshotDetails {
    #[serde(flatten)]
    pub snapshot: Snapshot,
    /// The files it consists of on disk.
    pub files: Vec<SavedFile>,
    /// Nearest first.
    pub ancestors: Vec<SnapshotId>,
    /// What ran when it was taken; empty for a filesystem snapshot.
    pub processes: Vec<SavedProcess>,
    /// Sandboxes whose last durable moment this is.
    pub needed_by: Vec<SandboxId>,
}

/// A file of a save.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SavedFile {
    pub name: String,
    pub bytes: u64,
    /// BLAKE3, hexadecimal. With `sparse:` before it: of the length and of what is not zeros, for
    /// files that are mostly holes.
    pub hash: String,
}

/// `GET /v1/snapshots/{snapshot}/diff?to=`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileDiff {
    pub changes: Vec<FileDifference>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileDifference {
    pub path: String,
    pub change: Difference,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<FileEntry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<FileEntry>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Difference {
    Added,
    /// Content, kind, owner or permissions.
    Modified,
    Removed,
}

/// `POST /v1/snapshots/{snapshot}/verify`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Verified {
    pub files: usize,
    pub bytes: u64,
}

/// `POST /v1/snapshots/{snapshot}/fork` and `POST /v1/sandboxes/{sandbox}/fork`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Fork {
    pub count: usize,
    /// `{n}` in it is the number of the fork, from 1. Several named forks need it.
    pub name: Option<String>,
    /// On top of the snapshot's environment, for processes started later.
    pub env: BTreeMap<String, String>,
    pub labels: BTreeMap<String, String>,
    pub network: Option<Network>,
    pub lifetime: Lifetime,
    pub standby: Standby,
    /// Filesystem snapshots only.
    pub cpus: Option<f64>,
    pub memory_mib: Option<u64>,
    pub disk_mib: Option<u64>,
    /// What becomes of its volumes. Drives are shared.
    pub volumes: ForkVolumes,
}

impl Default for Fork {
    fn default() -> Self {
        Self {
            count: 1,
            name: None,
            env: BTreeMap::new(),
            labels: BTreeMap::new(),
            network: None,
            lifetime: Lifetime::default(),
            standby: Standby::default(),
            cpus: None,
            memory_mib: None,
            disk_mib: None,
            volumes: ForkVolumes::default(),
        }
    }
}

/// What became of the forks, in their order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ForkList {
    pub forks: Vec<ForkOutcome>,
}

/// A sandbox that runs, or why there is none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ForkOutcome {
    /// The HTTP status that it would have been answered with alone: 201, or that of `error`.
    pub status: u16,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Box<Status>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
}

/// `POST /v1/pools` and `PUT /v1/pools/{pool}`: machines that are ready ahead, frozen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreatePool {
    pub name: Name,
    /// How many are kept ready.
    pub size: usize,
    /// How many sandboxes may be claimed from it at the same time.
    #[serde(default)]
    pub max: Option<usize>,
    /// Name or id of an image; default: the default image.
    #[serde(default)]
    pub image: Option<String>,
    /// Name or id of a memory snapshot, instead of an image.
    #[serde(default)]
    pub snapshot: Option<String>,
    /// What isolates its sandboxes: `gvisor`, `microvm`, or `auto`, which leaves it to the daemon and is the
    /// default.
    #[serde(default)]
    pub engine: Option<String>,
    #[serde(default)]
    pub cpus: Option<f64>,
    #[serde(default)]
    pub memory_mib: Option<u64>,
    #[serde(default)]
    pub disk_mib: Option<u64>,
    #[serde(default)]
    pub network: Network,
    /// Of sandboxes that are claimed from it.
    #[serde(default)]
    pub ports: Option<PortAccess>,
    #[serde(default)]
    pub entrypoint: Vec<String>,
    #[serde(default)]
    pub lifetime: Lifetime,
    #[serde(default)]
    pub standby: Standby,
}

/// A pool. Sandboxes with the same image or snapshot, resources and network are taken from it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Pool {
    pub name: Name,
    pub size: usize,
    pub ready: usize,
    pub image: String,
    pub snapshot: Option<SnapshotId>,
    #[serde(default)]
    pub engine: Option<String>,
    pub resources: Resources,
    pub network: Network,
    /// How many sandboxes may be claimed from it at the same time, and which ones are.
    pub max: Option<usize>,
    pub claimed: Vec<SandboxId>,
    /// Of sandboxes that are claimed from it.
    pub ports: Option<PortAccess>,
    pub entrypoint: Vec<String>,
    pub lifetime: Lifetime,
    pub standby: StandbyPolicy,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    #[serde(rename = "updated_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub updated_at_ms: u64,
    /// Sandboxes that were taken from it, and that found it empty.
    pub hits: u64,
    pub misses: u64,
    /// Why the last refill failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<WorkFailure>,
    /// The same for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

page! {
    /// `GET /v1/pools`
    PoolList { pools: Pool }
}

page! {
    /// `GET /v1/usage`: a line of `torpor top` for every sandbox.
    UsageList { sandboxes: SandboxUsage }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxUsage {
    pub id: SandboxId,
    pub name: Option<Name>,
    pub state: State,
    pub tier: Option<Tier>,
    pub memory_bytes: u64,
    pub memory_limit_bytes: u64,
    /// Processor time.
    pub cpu_ms: u64,
    /// What its machine wrote on top of its image.
    pub disk_bytes: u64,
    /// Its last save on disk.
    pub saved_bytes: u64,
    #[serde(rename = "last_used_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub last_used_at_ms: u64,
    pub wakes: u64,
}

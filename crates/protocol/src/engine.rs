//! Builds of an isolation engine, and what needs them.

use serde::{Deserialize, Serialize};

use crate::page::page;

page! {
    /// `GET /v1/engine/builds`
    EngineBuildList {
        /// Those that are here, the current one first, then those that are missed.
        builds: EngineBuild
    }
}

/// A build of the engine's program, and what needs it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EngineBuild {
    pub engine: String,
    pub version: String,
    /// New machines are started with it.
    pub current: bool,
    /// It, or a copy of it, is on this host.
    pub present: bool,
    /// Machines that run on it now.
    pub machines: usize,
    /// Sandboxes whose last save only it can revive.
    pub sandboxes: usize,
    /// The same of memory snapshots.
    pub snapshots: usize,
    /// The same of pools.
    pub pools: usize,
}

/// `POST /v1/engine/migrate`: goes on with the files alone of what needs a build, so that any build can
/// boot it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct MigrateEngine {
    /// What needs this version; default: whatever can't be revived on this host.
    pub version: Option<String>,
    /// Only tell.
    pub dry_run: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Migration {
    pub items: Vec<Migrated>,
}

/// Something that needs a build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Migrated {
    pub kind: MigratedKind,
    pub id: String,
    pub name: Option<String>,
    /// The build it needs, or needed.
    pub version: String,
    /// It has its files alone now.
    pub done: bool,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum MigratedKind {
    Sandbox,
    Snapshot,
    Pool,
}

impl MigratedKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sandbox => "sandbox",
            Self::Snapshot => "snapshot",
            Self::Pool => "pool",
        }
    }
}

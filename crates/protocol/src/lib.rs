//! Every type that crosses a process boundary: between a client and the daemon ([`api`], [`spec`],
//! [`status`], [`snapshot`], [`error`]) and between the daemon and the agent inside a machine ([`guest`]).
//!
//! Invariants
//! - no I/O, no clock, no tokio: data and its checks only;
//! - a value that parsed is valid: ids and names can't be built from bad text;
//! - nothing else in the workspace describes what is on the wire.

pub mod api;
pub mod domain;
pub mod egress;
pub mod engine;
pub mod error;
pub mod event;
pub mod excerpt;
pub mod file;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod guest;
pub mod hosting;
pub mod id;
pub mod invocation;
pub mod job;
pub mod json;
pub mod mcp_gateway;
mod named;
pub mod network;
pub mod page;
pub mod pattern;
pub mod preview;
pub mod reason;
pub mod records;
pub mod registry;
pub mod schedule;
pub mod snapshot;
pub mod spec;
pub mod status;
pub mod time;
pub mod volume;

pub use domain::{DomainName, PreviewOwner, PreviewPath};
pub use error::{ErrorBody, ErrorCode};
pub use event::{Event, EventKind};
pub use excerpt::Excerpt;
pub use id::{
    BuildId, DeliveryId, EventId, ExecutionId, FiringId, ImageId, InvocationId, JobRef, Name,
    NodeId, PreviewId, SandboxId, SandboxRef, SaveId, ScheduleId, ScheduleRef, SecretName,
    ServiceId, SnapshotId, SnapshotRef, TokenId, VolumeId, WebhookId,
};
pub use json::JsonText;
pub use network::{
    AddressRange, Destination, HostBinding, HostPattern, Network, NetworkLimits, Route, WebRule,
};
pub use preview::{PreviewLabel, PreviewTarget};
pub use reason::{EndReason, FailureReason, LossReason, ReasonCode, StatusReason, WorkFailure};
pub use snapshot::{Snapshot, SnapshotKind, SnapshotState};
pub use spec::{Hooks, Lifetime, PortAccess, Resources, SandboxSpec, StandbyPolicy};
pub use status::{State, Status, Tier};
pub use volume::{GuestPath, Mount, VolumeKind, VolumeRef};

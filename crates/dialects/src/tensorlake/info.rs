//! Sandboxes as Tensorlake's clients see them.
//!
//! - States are lowercase, numbers of bytes and milliseconds are whole, a disk is always there: the
//!   clients' parser is strict.
//! - `sandbox_url` is there whenever a client may connect: running or asleep.

use serde::Serialize;
use serde_json::{Value, json};
use torpor_protocol::api::ArchivedSandbox;
use torpor_protocol::{
    EndReason, Name, ReasonCode, Resources, SandboxId, SandboxSpec, State, Status,
};

use super::NAMESPACE;
use super::extract::Address;
use super::file_systems::FileSystem;
use super::request::{NetworkPolicy, shown_image, timeout_secs};

pub(super) const PENDING: &str = "pending";
pub(super) const RUNNING: &str = "running";
pub(super) const SUSPENDED: &str = "suspended";
pub(super) const TERMINATED: &str = "terminated";

#[derive(Debug, Serialize)]
pub(super) struct SandboxInfo {
    id: SandboxId,
    namespace: &'static str,
    status: &'static str,
    name: Option<Name>,
    image: String,
    resources: ResourcesInfo,
    timeout_secs: u64,
    entrypoint: Option<Vec<String>>,
    created_at: u64,
    terminated_at: Option<u64>,
    network_policy: NetworkPolicy,
    allow_unauthenticated_access: bool,
    exposed_ports: Option<Vec<u16>>,
    auto_resume: bool,
    runtime: String,
    pool_id: Option<Name>,
    outcome: Option<String>,
    termination_reason: Option<&'static str>,
    error_details: Option<Value>,
    pending_reason: Option<&'static str>,
    sandbox_url: Option<String>,
    ingress_endpoint: Option<String>,
    routing_hint: Option<String>,
    file_systems: Vec<FileSystem>,
    resource_resize: Option<ResizeInfo>,
    #[serde(skip_serializing_if = "Option::is_none")]
    archived_at: Option<u64>,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct ResourcesInfo {
    cpus: f64,
    memory_mb: u64,
    disk_mb: u64,
    /// Older packages read this one.
    ephemeral_disk_mb: u64,
}

impl From<&Resources> for ResourcesInfo {
    fn from(resources: &Resources) -> Self {
        Self {
            cpus: resources.cpus,
            memory_mb: resources.memory_mib,
            disk_mb: resources.disk_mib,
            ephemeral_disk_mb: resources.disk_mib,
        }
    }
}

/// The last change of resources. Ours are done when they are answered, so there is nothing to
/// remember: the generation names the resources that the sandbox has.
#[derive(Debug, Serialize)]
struct ResizeInfo {
    generation: u64,
    requested: ResourcesInfo,
    status: &'static str,
    error_message: Option<String>,
}

impl From<&Resources> for ResizeInfo {
    fn from(resources: &Resources) -> Self {
        Self {
            generation: generation(resources),
            requested: resources.into(),
            status: "succeeded",
            error_message: None,
        }
    }
}

/// Another number for other resources, the same for the same; never 0, which clients refuse.
fn generation(resources: &Resources) -> u64 {
    let Resources { cpus, memory_mib, disk_mib, pids: _ } = *resources;
    let parts = [cpus.to_bits(), memory_mib, disk_mib];
    // Numbers above this are not exact everywhere.
    (fnv(parts.iter().flat_map(|part| part.to_le_bytes())) & ((1 << 53) - 1)).max(1)
}

/// FNV-1a: the same number in every version of us.
pub(super) fn fnv(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// What a state is called.
pub(super) fn word(state: State) -> &'static str {
    match state {
        State::Creating => PENDING,
        State::Running => RUNNING,
        State::Asleep => SUSPENDED,
        State::Failed | State::Terminated => TERMINATED,
    }
}

pub(super) fn pending_reason(status: &Status) -> Option<&'static str> {
    match (status.state, status.queued_until_ms) {
        (State::Creating, Some(_)) => Some("no_resources_available"),
        (State::Creating, None) => Some("scheduling"),
        (State::Running | State::Asleep | State::Failed | State::Terminated, _) => None,
    }
}

/// Where a sandbox is reached, if it is.
pub(super) fn sandbox_url(state: State, Address(address): &Address) -> Option<String> {
    match state {
        State::Running | State::Asleep => address.clone(),
        State::Creating | State::Failed | State::Terminated => None,
    }
}

/// Why a sandbox never ran, or runs no more. A wrong entrypoint is the one failure that is the
/// creator's.
pub(super) fn failure(reason: ReasonCode) -> &'static str {
    match reason {
        ReasonCode::BadEntrypoint => "ConfigurationError",
        ReasonCode::StartFailed
        | ReasonCode::MachineLost
        | ReasonCode::SaveUnusable
        | ReasonCode::Queued
        | ReasonCode::Recovered
        | ReasonCode::WakeFailed
        | ReasonCode::SaveFailed
        | ReasonCode::MaxAge
        | ReasonCode::Expired
        | ReasonCode::Idle
        | ReasonCode::NoCapacity
        | ReasonCode::Cancelled => "StartupFailedInternalError",
    }
}

/// Why a sandbox that waited for room ended; for all others there is no word.
pub(super) fn termination(reason: Option<EndReason>) -> Option<&'static str> {
    match reason {
        Some(EndReason::NoCapacity) => Some("no_capacity"),
        Some(EndReason::Cancelled) => Some("cancelled"),
        Some(EndReason::MaxAge | EndReason::Expired | EndReason::Idle) | None => None,
    }
}

impl SandboxInfo {
    pub(super) fn of(status: Status, address: &Address) -> Self {
        let failed = status.state == State::Failed;
        let message = status.message.clone().filter(|_| failed);
        let url = sandbox_url(status.state, address);
        let resized = url.is_some() || status.state == State::Running;
        Self {
            status: word(status.state),
            created_at: status.created_at_ms,
            error_details: message.as_ref().map(|message| json!({"message": message})),
            outcome: message,
            termination_reason: status.reason.filter(|_| failed).map(failure),
            pending_reason: pending_reason(&status),
            sandbox_url: url.clone(),
            ingress_endpoint: url,
            resource_resize: resized.then(|| (&status.spec.resources).into()),
            ..Self::plain(status.id, status.spec)
        }
    }

    pub(super) fn archived(ended: ArchivedSandbox) -> Self {
        Self {
            status: TERMINATED,
            created_at: ended.created_at_ms,
            terminated_at: Some(ended.ended_at_ms),
            archived_at: Some(ended.ended_at_ms),
            termination_reason: termination(ended.reason),
            outcome: ended.reason.map(|reason| reason.to_string()),
            ..Self::plain(ended.id, ended.spec)
        }
    }

    /// What the specification says.
    fn plain(id: SandboxId, spec: SandboxSpec) -> Self {
        Self {
            id,
            namespace: NAMESPACE,
            status: TERMINATED,
            image: shown_image(&spec.image),
            resources: (&spec.resources).into(),
            timeout_secs: timeout_secs(&spec),
            file_systems: spec.mounts().iter().map(FileSystem::from).collect(),
            name: spec.name,
            entrypoint: Some(spec.entrypoint).filter(|words| !words.is_empty()),
            created_at: 0,
            terminated_at: None,
            network_policy: (&spec.network).into(),
            allow_unauthenticated_access: spec.ports.as_ref().is_some_and(|ports| ports.public),
            exposed_ports: spec.ports.map(|ports| ports.exposed),
            auto_resume: spec.standby.auto_wake,
            runtime: spec.engine.unwrap_or_default(),
            pool_id: spec.pool,
            outcome: None,
            termination_reason: None,
            error_details: None,
            pending_reason: None,
            sandbox_url: None,
            ingress_endpoint: None,
            routing_hint: None,
            resource_resize: None,
            archived_at: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_names_the_resources() {
        let small = Resources::default();
        let large = Resources { cpus: 2.0, ..small };
        assert_eq!(generation(&small), generation(&Resources::default()));
        assert_ne!(generation(&small), generation(&large));
        assert!((1..1 << 53).contains(&generation(&large)));
    }

    #[test]
    fn a_sandbox_that_waited_for_room_says_why_it_ended() {
        assert_eq!(termination(Some(EndReason::NoCapacity)), Some("no_capacity"));
        assert_eq!(termination(Some(EndReason::Cancelled)), Some("cancelled"));
        assert_eq!(termination(Some(EndReason::Expired)), None);
        assert_eq!(termination(None), None);
    }
}

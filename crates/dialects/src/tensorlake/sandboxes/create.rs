//! From nothing to running.
//!
//! - Lack of room is no error: the sandbox waits, and is `pending` meanwhile.
//! - Whoever asks is answered before it gives up, and the sandbox goes on. One without a name whose
//!   creator went away before it was answered ends: nobody would ever ask for it.
//! - What failed to start is told and gone.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::Instant;
use torpor_protocol::api::CreateSandbox;
use torpor_protocol::{
    Name, Network, ReasonCode, SandboxId, SandboxRef, SecretName, SnapshotKind,
    State as SandboxState,
};
use torpor_service::calls::{self, Unanswered};
use torpor_service::error::{Error, Refusal};
use torpor_service::pinned_save::PinnedSave;
use torpor_service::{Sandbox, Service};
use torpor_web::error::{ApiError, Result};

use super::super::extract::{Address, Body, Patience};
use super::super::file_systems::{FileSystem, to_mounts};
use super::super::info::{
    RUNNING, TERMINATED, failure, pending_reason, sandbox_url, termination, word,
};
use super::super::request::{
    NetworkPolicy, ResourcesRequest, TIMEOUT_SECS, idle, image, ports, unsupported,
};
use super::super::snapshots::reference;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct CreateRequest {
    name: Option<Name>,
    image: Option<String>,
    resources: Option<ResourcesRequest>,
    timeout_secs: Option<u64>,
    entrypoint: Option<Vec<String>>,
    network: Option<NetworkPolicy>,
    snapshot_id: Option<String>,
    #[serde(alias = "allow_unauthenticated_proxy_access")]
    allow_unauthenticated_access: Option<bool>,
    exposed_ports: Option<Vec<u16>>,
    file_systems: Option<Vec<FileSystem>>,
    auto_resume: Option<bool>,
    max_pending_secs: Option<u64>,
    wait: Option<bool>,
    /// Of packages up to 0.5.31.
    secret_names: Option<Vec<SecretName>>,
    cloud_init_base64: Option<String>,
}

pub(super) async fn create(
    State(service): State<Arc<Service>>,
    address: Address,
    Patience(patience): Patience,
    Body(asked): Body<CreateRequest>,
) -> Result<Response> {
    let begun = Instant::now();
    let waits = asked.wait != Some(false);
    let request = asked.into_spec(&service).await?;
    // A name is free when its sandbox is terminated, which includes those that failed.
    let sandbox = calls::create_anew(&service, request).await?;
    if !waits {
        return Ok((StatusCode::ACCEPTED, Json(Queued::of(&sandbox, &address))).into_response());
    }
    Ok(match settled(&service, &sandbox, begun, patience).await {
        Ok(()) => Json(Begun::of(&sandbox, &address)).into_response(),
        Err(response) => response,
    })
}

impl CreateRequest {
    async fn into_spec(self, service: &Service) -> Result<CreateSandbox> {
        let mounts = to_mounts(self.file_systems)?;
        if self.cloud_init_base64.is_some() {
            let text = "cloud_init_base64: cloud-init is not run in this version; start commands \
                        with an entrypoint or after the sandbox runs";
            return Err(unsupported(text));
        }
        if self.auto_resume == Some(false) && self.name.is_none() {
            let text = "auto_resume: false needs a name; a sandbox without one is never suspended";
            return Err(ApiError::invalid(text));
        }
        let origin = match &self.snapshot_id {
            Some(id) => Some(PinnedSave::of(service, &reference(id)?).await?),
            None => None,
        };
        let origin = origin.as_ref().map(PinnedSave::about);
        let saved = origin.map(|about| &about.spec);
        let entrypoint = self.entrypoint.unwrap_or_default();
        let running = origin.is_some_and(|about| match about.kind {
            SnapshotKind::Memory => true,
            SnapshotKind::Filesystem => false,
        });
        if !entrypoint.is_empty() && running {
            let text =
                "entrypoint: what runs in a memory snapshot goes on; nothing else is started";
            return Err(ApiError::invalid(text));
        }
        let resources = self.resources.unwrap_or_default().to_resize()?;
        let network = match (&self.network, saved) {
            (Some(network), _) => network.to_network()?,
            (None, Some(saved)) => saved.network.clone(),
            (None, None) => Network::default(),
        };
        let access = saved.and_then(|saved| saved.ports.clone()).unwrap_or_default();
        let access = ports(&access, self.exposed_ports, self.allow_unauthenticated_access)?;
        let secs = self.timeout_secs.unwrap_or(TIMEOUT_SECS);
        let (lifetime, mut standby) = idle(self.name.is_some(), secs);
        standby.auto_wake = self.auto_resume;
        Ok(CreateSandbox {
            name: self.name,
            image: image(service, self.image).await?,
            snapshot: self.snapshot_id,
            cpus: resources.cpus,
            memory_mib: resources.memory_mib,
            disk_mib: resources.disk_mib,
            network,
            lifetime,
            standby,
            entrypoint,
            secrets: self.secret_names.unwrap_or_default(),
            ports: Some(access),
            mounts,
            queue_ms: Some(queue_ms(self.max_pending_secs)),
            ..CreateSandbox::default()
        })
    }
}

/// For ever, unless it is said.
fn queue_ms(max_pending: Option<u64>) -> u64 {
    max_pending.map_or(u64::MAX, |secs| secs.saturating_mul(1000))
}

// === Answers ===

/// A sandbox that its creator waited for.
#[derive(Debug, Serialize)]
pub(in super::super) struct Begun {
    sandbox_id: SandboxId,
    status: &'static str,
    name: Option<Name>,
    sandbox_url: Option<String>,
    ingress_endpoint: Option<String>,
    routing_hint: Option<String>,
}

impl Begun {
    /// It ran a moment ago: that it fell asleep since is nobody's business yet.
    pub(in super::super) fn of(sandbox: &Sandbox, address: &Address) -> Self {
        let url = sandbox_url(SandboxState::Running, address);
        Self {
            sandbox_id: sandbox.id().clone(),
            status: RUNNING,
            name: sandbox.status().spec.name,
            sandbox_url: url.clone(),
            ingress_endpoint: url,
            routing_hint: None,
        }
    }
}

/// A sandbox that its creator did not wait for. The state has another name here.
#[derive(Debug, Serialize)]
struct Queued {
    sandbox_id: SandboxId,
    name: Option<Name>,
    state: &'static str,
    pending_reason: Option<&'static str>,
    sandbox_url: Option<String>,
    ingress_endpoint: Option<String>,
}

impl Queued {
    fn of(sandbox: &Sandbox, address: &Address) -> Self {
        let status = sandbox.status();
        let url = sandbox_url(status.state, address);
        Self {
            state: word(status.state),
            pending_reason: pending_reason(&status),
            sandbox_id: status.id,
            name: status.spec.name,
            sandbox_url: url.clone(),
            ingress_endpoint: url,
        }
    }
}

/// Returns when it runs; otherwise with what its creator is told.
pub(in super::super) async fn settled(
    service: &Service,
    sandbox: &Sandbox,
    begun: Instant,
    patience: Duration,
) -> std::result::Result<(), Response> {
    let unanswered = Unanswered::new(sandbox);
    let left = patience.saturating_sub(begun.elapsed());
    let started = service.stopping.run_until_cancelled(calls::started(service, sandbox, begun));
    let outcome = match tokio::time::timeout(left, started).await {
        Ok(Some(Ok(()))) => Ok(()),
        // If the daemon stops, the next one goes on with it.
        Err(_) | Ok(None) => Err(not_yet(sandbox.id())),
        Ok(Some(Err(error))) => Err(did_not_start(service, sandbox.id(), &error).await),
    };
    unanswered.answered();
    outcome
}

/// The client looks for itself from now on.
fn not_yet(id: &SandboxId) -> Response {
    let body = json!({"sandbox_id": id, "status": "timeout"});
    (StatusCode::GATEWAY_TIMEOUT, Json(body)).into_response()
}

async fn did_not_start(service: &Service, id: &SandboxId, error: &Error) -> Response {
    let (status, reason, message) = match error.refusal() {
        Some(Refusal::Stopping) => return not_yet(id),
        Some(Refusal::Failed { reason, .. }) => {
            ("failed", failure(reason.code()), reason.to_string())
        }
        Some(Refusal::Terminated(_)) => {
            let ended =
                calls::archive::find(service, &SandboxRef::Id(id.clone())).await.ok().flatten();
            let why = ended.and_then(|ended| ended.reason);
            let reason = termination(why).unwrap_or("cancelled");
            let message = why.map_or_else(|| "it was deleted".to_owned(), |why| why.to_string());
            (TERMINATED, reason, message)
        }
        Some(_) | None => {
            if let Some(error) = error.internal() {
                tracing::error!(sandbox = %id, error, "it did not start");
            }
            ("failed", failure(ReasonCode::StartFailed), error.to_body("").message)
        }
    };
    let body = json!({
        "sandbox_id": id, "status": status, "reason": reason, "termination_reason": reason,
        "error_details": {"message": message},
    });
    (StatusCode::UNPROCESSABLE_ENTITY, Json(body)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_for_ever_who_did_not_want_to() {
        assert_eq!(queue_ms(None), u64::MAX);
        assert_eq!(queue_ms(Some(0)), 0);
        assert_eq!(queue_ms(Some(60)), 60_000);
    }
}

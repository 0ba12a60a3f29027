//! Suspend and resume. 200: it is there; 202: it is on its way, also if nobody waits; 409: it is not.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::Deserialize;
use serde_json::json;
use tokio::task::JoinHandle;
use torpor_protocol::{ErrorCode, State as SandboxState, Status};
use torpor_service::error::Refusal;
use torpor_service::{Sandbox, Service, calls};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Query, RequestId};

use super::super::error::refuse;
use super::super::gate::Named;
use super::super::info::{RUNNING, SUSPENDED};
use super::refuse_unborn;

/// Longer than this no request is held; the client asks again.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// How long a sandbox that sleeps may take to say so.
const SAY_SO: Duration = Duration::from_secs(1);

#[derive(Debug, Deserialize)]
pub(super) struct WaitQuery {
    wait_ms: Option<u64>,
}

pub(super) async fn suspend(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    id: RequestId,
    Query(query): Query<WaitQuery>,
) -> Result<Response> {
    refuse_unborn(&sandbox, "suspended")?;
    let status = sandbox.status();
    if status.spec.name.is_none() {
        let text = format!("sandbox {} has no name: only one that has can be suspended", status.id);
        return Err(ApiError::invalid(text));
    }
    // One that fell asleep by itself may not be on disk yet.
    if status.state == SandboxState::Asleep && status.durable {
        return Ok(answer(StatusCode::OK, &sandbox, SUSPENDED));
    }
    let task = service.tasks.spawn(fall_asleep(Arc::clone(&service), sandbox.clone(), status));
    outcome(&service, task, &sandbox, query, SUSPENDED, &id).await
}

pub(super) async fn resume(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    id: RequestId,
    Query(query): Query<WaitQuery>,
) -> Result<Response> {
    refuse_unborn(&sandbox, "resumed")?;
    let runs = sandbox.status().state == SandboxState::Running;
    // Also of one that runs: it may be about to fall asleep.
    let task = service.tasks.spawn(wake(Arc::clone(&service), sandbox.clone()));
    if runs && query.wait_ms.is_none() {
        return Ok(answer(StatusCode::OK, &sandbox, RUNNING));
    }
    outcome(&service, task, &sandbox, query, RUNNING, &id).await
}

/// Returns when everybody sees it asleep.
async fn fall_asleep(service: Arc<Service>, sandbox: Sandbox, before: Status) -> Result<()> {
    calls::sleep(&service, &sandbox, false).await.inspect_err(|error| note(&sandbox, error))?;
    let mut status = sandbox.watch();
    // Somebody may have woken it already.
    let slept = |now: &Status| now.state != SandboxState::Running || now.wakes > before.wakes;
    // It sleeps in any case: whoever looks too early looks again.
    let _ = tokio::time::timeout(SAY_SO, status.wait_for(slept)).await;
    Ok(())
}

async fn wake(service: Arc<Service>, sandbox: Sandbox) -> Result<()> {
    Ok(calls::wake(&service, &sandbox).await.inspect_err(|error| note(&sandbox, error))?)
}

/// Perhaps nobody waits who could be told.
fn note(sandbox: &Sandbox, error: &torpor_service::Error) {
    let error = error.internal().unwrap_or_else(|| error.to_string());
    tracing::warn!(sandbox = %sandbox.id(), error, "could not suspend or resume");
}

/// Waits as long as the client wants to.
async fn outcome(
    service: &Service,
    task: JoinHandle<Result<()>>,
    sandbox: &Sandbox,
    query: WaitQuery,
    target: &str,
    RequestId(id): &RequestId,
) -> Result<Response> {
    let on_its_way = || Ok(answer(StatusCode::ACCEPTED, sandbox, target));
    let Some(wait_ms) = query.wait_ms else { return on_its_way() };
    let wait = Duration::from_millis(wait_ms).min(WAIT_MAX);
    let done = service.stopping.run_until_cancelled(task);
    let refused = match tokio::time::timeout(wait, done).await {
        Err(_) | Ok(None) => return on_its_way(),
        Ok(Some(Ok(Ok(())))) => return Ok(answer(StatusCode::OK, sandbox, target)),
        Ok(Some(Ok(Err(error)))) => error,
        Ok(Some(Err(_))) => Refusal::Stopping.into(),
    };
    let body = refused.0.to_body(id);
    let gone = matches!(
        body.code,
        ErrorCode::SandboxTerminated | ErrorCode::SandboxNotFound | ErrorCode::ShuttingDown
    );
    if gone {
        return Err(refused);
    }
    Ok(refuse(StatusCode::CONFLICT, "SANDBOX_NOT_CHANGED", body.message))
}

fn answer(status: StatusCode, sandbox: &Sandbox, target: &str) -> Response {
    (status, Json(json!({"sandbox_id": sandbox.id(), "status": target}))).into_response()
}

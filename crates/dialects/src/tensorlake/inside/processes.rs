//! Processes that live on their own: start, look, signal, feed. What they say: [`super::output`].
//!
//! A process with a terminal is none of them: it is a session of [`super::pty`].

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use torpor_protocol::guest::{Exit, FailureCode, HealthState, ProcessStatus, Request, Supervision};
use torpor_service::error::{Error, GuestError};
use torpor_service::processes::ProcessRef;
use torpor_service::{Guest, Service, files};
use torpor_web::extract::{Path, pieces};

use super::command::{Check, Command, Restart, without_default_user};
use super::{Refused, Result};
use crate::tensorlake::extract::Body;
use crate::tensorlake::gate::Inside;

/// How long a managed process has to end by itself, as Tensorlake's does.
const STOP_GRACE_MS: u64 = 10_000;
/// What a process that ran out of time was killed with.
const SIGKILL: i32 = 9;

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/processes", post(start).get(list))
        .route("/processes/{process}", get(look).delete(kill))
        .route("/processes/{process}/restart", post(restart))
        .route("/processes/{process}/signal", post(signal))
        .route("/processes/{process}/stdin", post(write_stdin))
        .route("/processes/{process}/stdin/close", post(close_stdin))
}

/// The process of this number, or the managed one of this name.
pub(super) async fn find(guest: &Guest, text: &str) -> Result<ProcessStatus> {
    let request = match text.parse() {
        Ok(pid) => Request::Process { pid },
        Err(_) => Request::ProcessNamed { name: text.to_owned() },
    };
    let process = guest.process(&request).await?;
    if process.terminal {
        let message = format!("process {text} has a terminal: it is a PTY session").into();
        let code = FailureCode::NoSuchProcess;
        return Err(GuestError::Refused { code, message }.into());
    }
    Ok(process)
}

async fn start(Inside(awake): Inside, Body(command): Body<Command>) -> Result<Response> {
    let spec = command.background()?;
    let guest = awake.lease.guest();
    let started = match guest.start(spec.clone()).await {
        Err(error) => match without_default_user(&spec, &error) {
            Some(instead) => guest.start(instead).await?,
            None => return Err(error.into()),
        },
        Ok(started) => started,
    };
    Ok((StatusCode::CREATED, Json(info(&started))).into_response())
}

async fn list(Inside(awake): Inside) -> Result<Json<Value>> {
    let all = awake.lease.guest().processes().await?;
    let shown: Vec<_> = all.iter().filter(|process| !process.terminal).map(info).collect();
    Ok(Json(json!({"processes": shown})))
}

async fn look(Path(process): Path<String>, Inside(awake): Inside) -> Result<Json<Value>> {
    Ok(Json(info(&find(awake.lease.guest(), &process).await?)))
}

/// A managed process is asked to end first; any other is killed with all that it started.
async fn kill(Path(process): Path<String>, Inside(awake): Inside) -> Result<StatusCode> {
    let guest = awake.lease.guest();
    let ProcessStatus { pid, supervision, .. } = find(guest, &process).await?;
    let grace_ms = supervision.map(|_| STOP_GRACE_MS);
    guest.done(&Request::Kill { pid, grace_ms }).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn restart(Path(process): Path<String>, Inside(awake): Inside) -> Result<Json<Value>> {
    let guest = awake.lease.guest();
    let pid = find(guest, &process).await?.pid;
    Ok(Json(info(&guest.process(&Request::Restart { pid }).await?)))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Signal {
    /// 0 is none, and refused by the agent.
    signal: i32,
}

async fn signal(
    Path(process): Path<String>,
    Inside(awake): Inside,
    Body(Signal { signal }): Body<Signal>,
) -> Result<Json<Value>> {
    let guest = awake.lease.guest();
    let pid = find(guest, &process).await?.pid;
    guest.done(&Request::Signal { pid, signal }).await?;
    Ok(Json(json!({"success": true})))
}

// === Standard input ===

async fn write_stdin(
    State(service): State<Arc<Service>>,
    Path(process): Path<String>,
    Inside(awake): Inside,
    body: axum::body::Body,
) -> Result<Response> {
    let ProcessStatus { pid, stdin_open, .. } = find(awake.lease.guest(), &process).await?;
    if !stdin_open {
        files::discard(pieces(body)).await;
        return Err(not_writable(pid));
    }
    let process = ProcessRef::Pid(pid);
    match files::write_stdin(&service, &awake, &process, false, pieces(body)).await {
        // It was there: it has just closed its end, or ended.
        Err(Error::Guest(GuestError::Refused {
            code: FailureCode::Invalid | FailureCode::NoSuchProcess,
            ..
        })) => Err(not_writable(pid)),
        written => {
            written?;
            Ok(StatusCode::NO_CONTENT.into_response())
        }
    }
}

/// Also if it is closed already: clients may ask twice.
async fn close_stdin(
    State(service): State<Arc<Service>>,
    Path(process): Path<String>,
    Inside(awake): Inside,
) -> Result<Response> {
    let ProcessStatus { pid, stdin_open, .. } = find(awake.lease.guest(), &process).await?;
    if stdin_open {
        let nothing = pieces(axum::body::Body::empty());
        files::write_stdin(&service, &awake, &ProcessRef::Pid(pid), true, nothing).await?;
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

fn not_writable(pid: u32) -> Refused {
    let text = format!("the standard input of process {pid} is closed");
    Refused::Here(StatusCode::BAD_REQUEST, "STDIN_NOT_WRITABLE", text)
}

// === Shapes ===

/// Code and signal.
pub(super) fn parts(exit: Exit) -> (Option<i32>, Option<i32>) {
    match exit {
        Exit::Code { code } => (Some(code), None),
        Exit::Signal { signal } => (None, Some(signal)),
        Exit::TimedOut => (None, Some(SIGKILL)),
    }
}

fn info(process: &ProcessStatus) -> Value {
    let (exit_code, signal) = process.exit.map(parts).unwrap_or_default();
    let status = match (exit_code, signal) {
        (_, Some(_)) => "signaled",
        (Some(_), None) => "exited",
        (None, None) => "running",
    };
    json!({
        "handle": process.pid,
        "pid": process.pid,
        "status": status,
        "exit_code": exit_code,
        "signal": signal,
        // The agent does not see whom the host killed.
        "oom_killed": false,
        "stdin_writable": process.stdin_open,
        "command": process.command.first(),
        "args": process.command.get(1..).unwrap_or_default(),
        "started_at": process.started_at_ms,
        "ended_at": process.ended_at_ms,
        "managed": process.supervision.as_ref().map(|it| managed(process, it)),
    })
}

fn managed(process: &ProcessStatus, supervision: &Supervision) -> Value {
    let status = match (process.exit, process.next_start_at_ms) {
        (None, _) => "running",
        (Some(_), Some(_)) => "backing_off",
        (Some(_), None) => "stopped",
    };
    let health_status = match process.health.map(|health| health.state) {
        None => "disabled",
        Some(HealthState::Starting) => "starting",
        Some(HealthState::Healthy) => "healthy",
        Some(HealthState::Unhealthy) => "unhealthy",
    };
    let last = process.exit.zip(process.ended_at_ms);
    let last = last.or_else(|| process.last_exit.map(|last| (last.exit, last.at_ms)));
    let last_exit = last.map(|(exit, ended_at)| {
        let (exit_code, signal) = parts(exit);
        json!({"exit_code": exit_code, "signal": signal, "oom_killed": false, "ended_at": ended_at})
    });
    json!({
        "id": process.name.clone().unwrap_or_else(|| process.pid.to_string()),
        "name": process.name,
        "status": status,
        "restart_count": process.restarts,
        "restart": Restart::from(supervision),
        "health_check": supervision.health.as_ref().map(Check::from),
        "health_status": health_status,
        "consecutive_health_failures": process.health.map_or(0, |health| health.failures),
        "last_exit": last_exit,
        "last_error": null,
        "next_restart_at": process.next_start_at_ms,
    })
}

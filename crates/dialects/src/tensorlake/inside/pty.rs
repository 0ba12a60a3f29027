//! Terminals: a session is a process of the agent with a terminal, under an id that says which one.
//!
//! - Its token is a seal of sandbox and id: nobody has to remember it, it outlives the daemon, and it
//!   is worth nothing for another session or for a fork.
//! - A session without a client lives on, like any process.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use torpor_protocol::guest::{FailureCode, ProcessSpec, ProcessStatus, Request, TerminalSize};
use torpor_service::error::GuestError;
use torpor_service::processes::Output;
use torpor_service::{Guest, Service};
use torpor_web::extract::{Path, Query, RequestId, Upgrade};
use torpor_web::socket::upgraded;

use super::command::program;
use super::{Refused, Result, terminal};
use crate::tensorlake::extract::Body;
use crate::tensorlake::gate::Inside;

/// Live sessions of one sandbox, as in Tensorlake's daemon.
const SESSIONS_MAX: usize = 64;
/// As in Tensorlake's daemon; programs do not expect more.
pub(super) const ROWS_MAX: u16 = 500;
pub(super) const COLS_MAX: u16 = 1000;
/// How long a session that is hung up has to end by itself, as in Tensorlake's daemon.
const GRACE_MS: u64 = 5_000;
const SIGHUP: i32 = 1;
/// What a token is good for.
const CONTEXT: &str = "tensorlake pty";
/// Another way to send a token than the query.
const TOKEN_HEADER: &str = "x-pty-token";

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/pty", post(start).get(list))
        .route("/pty/{session}", get(look).delete(hang_up))
        .route("/pty/{session}/resize", post(resize))
        .route("/pty/{session}/ws", get(attach))
}

#[derive(Debug, Deserialize)]
#[serde(default)]
struct Start {
    command: String,
    args: Option<Vec<String>>,
    env: Option<BTreeMap<String, String>>,
    working_dir: Option<String>,
    rows: u16,
    cols: u16,
}

impl Default for Start {
    fn default() -> Self {
        let command = String::new();
        Self { command, args: None, env: None, working_dir: None, rows: 24, cols: 80 }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Size {
    rows: u16,
    cols: u16,
}

impl Size {
    fn checked(self) -> Result<TerminalSize> {
        let Self { rows, cols } = self;
        if !(1..=ROWS_MAX).contains(&rows) || !(1..=COLS_MAX).contains(&cols) {
            let text = format!("rows must be from 1 to {ROWS_MAX}, cols from 1 to {COLS_MAX}");
            return Err(Refused::invalid(text));
        }
        Ok(TerminalSize { cols, rows })
    }
}

// === Sessions ===

/// Which terminal, and which of those that had its process id.
fn id_of(process: &ProcessStatus) -> String {
    format!("{}-{}", process.pid, process.started_at_ms)
}

async fn find(guest: &Guest, session: &str) -> Result<ProcessStatus> {
    let unknown = || GuestError::Refused {
        code: FailureCode::NoSuchProcess,
        message: format!("there is no PTY session {session}").into(),
    };
    let pid = session.split_once('-').and_then(|(pid, _)| pid.parse().ok());
    let Some(pid) = pid else { return Err(unknown().into()) };
    match guest.process(&Request::Process { pid }).await {
        Ok(process) if process.terminal && id_of(&process) == session => Ok(process),
        Ok(_) | Err(GuestError::Refused { .. }) => Err(unknown().into()),
        Err(error) => Err(error.into()),
    }
}

fn shown(process: &ProcessStatus) -> Value {
    let exit_code = process.exit.map(terminal::code);
    json!({
        "session_id": id_of(process),
        "pid": process.pid,
        "command": process.command.first(),
        "args": process.command.get(1..).unwrap_or_default(),
        "rows": process.terminal_size.map(|size| size.rows),
        "cols": process.terminal_size.map(|size| size.cols),
        "created_at": process.started_at_ms,
        "ended_at": process.ended_at_ms,
        "exit_code": exit_code,
        "is_alive": process.exit.is_none(),
        "status": if process.exit.is_none() { "running" } else { "exited" },
    })
}

async fn start(
    State(service): State<Arc<Service>>,
    Inside(awake): Inside,
    Body(start): Body<Start>,
) -> Result<Response> {
    let Start { command, args, env, working_dir, rows, cols } = start;
    let size = Size { rows, cols }.checked()?;
    let guest = awake.lease.guest();
    let all = guest.processes().await?;
    if all.iter().filter(|it| it.terminal && it.exit.is_none()).count() >= SESSIONS_MAX {
        let text = format!("there are {SESSIONS_MAX} PTY sessions already");
        return Err(Refused::Here(StatusCode::TOO_MANY_REQUESTS, "TOO_MANY_SESSIONS", text));
    }
    let started = guest
        .start(ProcessSpec {
            terminal: Some(size),
            stdin: true,
            survives_detach: true,
            ..program(command, args, env, working_dir)?
        })
        .await?;
    let session = id_of(&started);
    let token = service.vault.seal(CONTEXT, &[awake.sandbox.id().as_str(), &session]);
    let body = json!({"session_id": session, "token": token});
    Ok((StatusCode::CREATED, Json(body)).into_response())
}

async fn list(Inside(awake): Inside) -> Result<Json<Value>> {
    let all = awake.lease.guest().processes().await?;
    let sessions: Vec<_> = all.iter().filter(|process| process.terminal).map(shown).collect();
    Ok(Json(json!({"sessions": sessions})))
}

async fn look(Path(session): Path<String>, Inside(awake): Inside) -> Result<Json<Value>> {
    Ok(Json(shown(&find(awake.lease.guest(), &session).await?)))
}

async fn resize(
    Path(session): Path<String>,
    Inside(awake): Inside,
    Body(size): Body<Size>,
) -> Result<StatusCode> {
    let TerminalSize { cols, rows } = size.checked()?;
    let guest = awake.lease.guest();
    let pid = find(guest, &session).await?.pid;
    guest.done(&Request::Resize { pid, cols, rows }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Also if it has ended: then what it left behind is killed.
async fn hang_up(Path(session): Path<String>, Inside(awake): Inside) -> Result<StatusCode> {
    let guest = awake.lease.guest();
    let pid = find(guest, &session).await?.pid;
    match guest.done(&Request::Signal { pid, signal: SIGHUP }).await {
        Ok(()) | Err(GuestError::Refused { code: FailureCode::NoSuchProcess, .. }) => {}
        Err(error) => return Err(error.into()),
    }
    guest.done(&Request::Kill { pid, grace_ms: Some(GRACE_MS) }).await?;
    Ok(StatusCode::NO_CONTENT)
}

// === The terminal itself ===

#[derive(Debug, Deserialize)]
struct TokenQuery {
    token: Option<String>,
}

async fn attach(
    State(service): State<Arc<Service>>,
    id: RequestId,
    Path(session): Path<String>,
    Query(query): Query<TokenQuery>,
    headers: HeaderMap,
    Inside(awake): Inside,
    Upgrade(upgrade): Upgrade,
) -> Result<Response> {
    let header = headers.get(TOKEN_HEADER).and_then(|value| value.to_str().ok());
    let sealed = [awake.sandbox.id().as_str(), &*session];
    let mut tokens = query.token.as_deref().into_iter().chain(header);
    if !tokens.any(|token| service.vault.sealed(CONTEXT, &sealed, token)) {
        let text = "the token is not that of this PTY session".to_owned();
        return Err(Refused::Here(StatusCode::FORBIDDEN, "INVALID_TOKEN", text));
    }
    let pid = find(awake.lease.guest(), &session).await?.pid;
    // Nothing is read of it until the client is ready; meanwhile the agent keeps what is said.
    let request = Request::Attach { pid, replay: true, follow: true, stamps: false };
    let output = Output::open(awake, &request, None).await?;
    Ok(upgraded(service, id, upgrade, async move |socket, service, _| {
        terminal::talk(&service, socket, output).await;
    }))
}

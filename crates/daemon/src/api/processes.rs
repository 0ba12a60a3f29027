//! Processes that live on their own: start, look, signal, feed, follow.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_protocol::api::{Command, Process, ProcessList, RunEvent, SendSignal};
use torpor_protocol::guest::Request;
use torpor_service::Service;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::command::{self, ProcessPath};
use super::error::Result;
use super::extract::{Awake, Json, Path, Query};
use super::output::Output;
use super::page::{Cut, PageQuery, dated};
use super::transfer::deliver;
use super::{Answer, no_content, with_status};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(start, list))
        .routes(routes!(get, kill))
        .routes(routes!(signal))
        .routes(routes!(restart))
        .routes(routes!(stdin))
        .routes(routes!(output))
}

/// Start a process in the background.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/processes",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = Command,
    responses((status = 201, description = "It runs.", body = Process))
)]
async fn start(awake: Awake, Json(command): Json<Command>) -> Result<Response> {
    let spec = command::background(command)?;
    let status = awake.lease.guest().start(spec).await?;
    Ok(with_status(StatusCode::CREATED, Process::from(status)))
}

/// List the processes that were started through the API.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/processes",
    params(("sandbox" = String, Path, description = "Id or name"), PageQuery),
    responses((status = 200, description = "Running ones, and those that ended lately.",
        body = ProcessList))
)]
async fn list(Query(query): Query<PageQuery>, awake: Awake) -> Answer<ProcessList> {
    let cut = Cut::try_from(query)?;
    let processes = awake.lease.guest().processes().await?.into_iter().map(Process::from).collect();
    Ok(Json(cut.of(processes, |process: &Process| dated(process.started_at_ms, &process.pid))))
}

/// Get a process.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/processes/{pid}",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("pid" = String, Path, description = "Process id, or name of a supervised process"),
    ),
    responses((status = 200, description = "The process.", body = Process))
)]
async fn get(Path(path): Path<ProcessPath>, awake: Awake) -> Answer<Process> {
    Ok(Json(awake.lease.guest().process(&path.pid.request()).await?.into()))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct KillQuery {
    /// Ask it to end (SIGTERM) and wait so long before it is killed.
    grace_ms: Option<u64>,
}

/// Kill a process and everything it started.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{sandbox}/processes/{pid}",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("pid" = String, Path, description = "Process id, or name of a supervised process"),
        KillQuery,
    ),
    responses((status = 204, description = "It is gone, and is not started again."))
)]
async fn kill(
    Path(path): Path<ProcessPath>,
    Query(query): Query<KillQuery>,
    awake: Awake,
) -> Result<Response> {
    let guest = awake.lease.guest();
    let pid = path.pid.pid(guest).await?;
    guest.done(&Request::Kill { pid, grace_ms: query.grace_ms }).await?;
    Ok(no_content())
}

/// Send a signal to a process and its group.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/processes/{pid}/signal",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("pid" = String, Path, description = "Process id, or name of a supervised process"),
    ),
    request_body = SendSignal,
    responses((status = 204, description = "It was sent."))
)]
async fn signal(
    Path(path): Path<ProcessPath>,
    awake: Awake,
    Json(SendSignal { signal }): Json<SendSignal>,
) -> Result<Response> {
    let guest = awake.lease.guest();
    let pid = path.pid.pid(guest).await?;
    guest.done(&Request::Signal { pid, signal }).await?;
    Ok(no_content())
}

/// Stop a supervised process and start it anew.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/processes/{pid}/restart",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("pid" = String, Path, description = "Process id, or name of a supervised process"),
    ),
    responses((status = 200, description = "The new process.", body = Process))
)]
async fn restart(Path(path): Path<ProcessPath>, awake: Awake) -> Answer<Process> {
    let guest = awake.lease.guest();
    let pid = path.pid.pid(guest).await?;
    Ok(Json(guest.process(&Request::Restart { pid }).await?.into()))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct StdinQuery {
    /// There is no more to come.
    #[serde(default)]
    close: bool,
}

/// Write to the standard input of a process.
#[utoipa::path(
    put, path = "/v1/sandboxes/{sandbox}/processes/{pid}/stdin",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("pid" = String, Path, description = "Process id, or name of a supervised process"),
        StdinQuery,
    ),
    request_body(content = String, content_type = "application/octet-stream"),
    responses((status = 204, description = "All of it was written."))
)]
async fn stdin(
    State(app): State<Arc<Service>>,
    Path(path): Path<ProcessPath>,
    Query(query): Query<StdinQuery>,
    awake: Awake,
    body: Body,
) -> Result<Response> {
    let pid = path.pid.pid(awake.lease.guest()).await?;
    deliver(&app, &awake, &Request::WriteStdin { pid, close: query.close }, body).await
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct OutputQuery {
    /// Go on until it ends.
    #[serde(default)]
    follow: bool,
}

/// Get the output of a process.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/processes/{pid}/output",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("pid" = String, Path, description = "Process id, or name of a supervised process"),
        OutputQuery,
    ),
    responses((
        status = 200, description = "What was kept, one event a line.", body = RunEvent,
        content_type = "application/x-ndjson",
    ))
)]
async fn output(
    State(app): State<Arc<Service>>,
    Path(path): Path<ProcessPath>,
    Query(query): Query<OutputQuery>,
    awake: Awake,
) -> Result<Response> {
    let pid = path.pid.pid(awake.lease.guest()).await?;
    let request = Request::Attach { pid, replay: true, follow: query.follow, stamps: false };
    let output = Output::open(awake, &request, None).await?;
    Ok(output.into_response(app.stopping.clone()))
}

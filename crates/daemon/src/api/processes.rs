//! Processes that live on their own: start, look, signal, feed, follow.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_protocol::api::{Command, Process, ProcessList, RunEvent, SendSignal};
use torpor_service::processes::{self, ProcessRef};
use torpor_service::{Service, files};
use torpor_web::error::Result;
use torpor_web::extract::{Awake, Json, Path, Query, pieces};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::ndjson::ndjson;
use super::page::{Cut, PageQuery, dated};
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

/// `{pid}` in a path: the number of a process, or the name of a supervised one.
#[derive(Debug, Deserialize)]
pub(super) struct ProcessPath {
    pub(super) pid: ProcessRef,
}

/// Start a process in the background.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/processes",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = Command,
    responses((status = 201, description = "It runs.", body = Process))
)]
async fn start(Awake(awake): Awake, Json(command): Json<Command>) -> Result<Response> {
    Ok(with_status(StatusCode::CREATED, processes::start(&awake, command).await?))
}

/// List the processes that were started through the API.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/processes",
    params(("sandbox" = String, Path, description = "Id or name"), PageQuery),
    responses((status = 200, description = "Running ones, and those that ended lately.",
        body = ProcessList))
)]
async fn list(Query(query): Query<PageQuery>, Awake(awake): Awake) -> Answer<ProcessList> {
    let cut = Cut::try_from(query)?;
    let processes = processes::list(&awake).await?;
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
async fn get(Path(path): Path<ProcessPath>, Awake(awake): Awake) -> Answer<Process> {
    Ok(Json(processes::find(&awake, &path.pid).await?))
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
    Awake(awake): Awake,
) -> Result<Response> {
    processes::kill(&awake, &path.pid, query.grace_ms).await?;
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
    Awake(awake): Awake,
    Json(SendSignal { signal }): Json<SendSignal>,
) -> Result<Response> {
    processes::signal(&awake, &path.pid, signal).await?;
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
async fn restart(Path(path): Path<ProcessPath>, Awake(awake): Awake) -> Answer<Process> {
    Ok(Json(processes::restart(&awake, &path.pid).await?))
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
    State(service): State<Arc<Service>>,
    Path(path): Path<ProcessPath>,
    Query(query): Query<StdinQuery>,
    Awake(awake): Awake,
    body: Body,
) -> Result<Response> {
    files::write_stdin(&service, &awake, &path.pid, query.close, pieces(body)).await?;
    Ok(no_content())
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
    State(service): State<Arc<Service>>,
    Path(path): Path<ProcessPath>,
    Query(query): Query<OutputQuery>,
    Awake(awake): Awake,
) -> Result<Response> {
    let output = processes::attach(awake, &path.pid, true, query.follow).await?;
    Ok(ndjson(output.into_events(service.stopping.clone())))
}

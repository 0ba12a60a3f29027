//! Executions of jobs, and their tasks: begin, look, follow, cancel, what they said and left.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use serde::Deserialize;
use tokio_util::io::ReaderStream;
use torpor_protocol::api::{Log, LogEntry, OutputStream};
use torpor_protocol::job::{
    BeginExecution, Execution, ExecutionList, ExecutionState, JobEvent, Task, TaskList, TaskState,
};
use torpor_protocol::{ExecutionId, Name};
use torpor_service::{Search, Service, jobs};
use torpor_store::ExecutionFilter;
use torpor_web::error::Result;
use torpor_web::extract::{Json, Path, Query};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::idempotency::RepeatKey;
use super::ndjson::ndjson;
use super::page::{Cut, dated};
use super::{Answer, no_content, with_status};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(begin, list))
        .routes(routes!(get, forget))
        .routes(routes!(cancel))
        .routes(routes!(watch))
        .routes(routes!(tasks))
        .routes(routes!(task))
        .routes(routes!(log))
        .routes(routes!(files))
}

#[derive(Debug, Deserialize)]
struct ExecutionPath {
    execution: ExecutionId,
}

#[derive(Debug, Deserialize)]
struct TaskPath {
    execution: ExecutionId,
    index: u32,
}

/// Run a job, or a specification without a name: one task for each input.
#[utoipa::path(
    post, path = "/v1/executions", request_body = BeginExecution,
    responses((
        status = 201, body = Execution,
        description = "It is recorded, and will be run to its end. With an Idempotency-Key it is begun once.",
    ))
)]
async fn begin(
    State(service): State<Arc<Service>>,
    RepeatKey(by): RepeatKey,
    Json(request): Json<BeginExecution>,
) -> Result<Response> {
    let begun = jobs::begin(&service, request, by.as_deref()).await?;
    Ok(with_status(StatusCode::CREATED, begun))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// Only those of this job.
    #[param(value_type = Option<String>)]
    job: Option<Name>,
    /// Only those in this state.
    #[param(inline)]
    state: Option<ExecutionState>,
    /// 1 to 1000; default 1000.
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// List executions.
#[utoipa::path(
    get, path = "/v1/executions", params(ListQuery),
    responses((status = 200, description = "Newest first.", body = ExecutionList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<ListQuery>,
) -> Answer<ExecutionList> {
    let ListQuery { job, state, limit, cursor } = query;
    let cut = Cut::new(limit, cursor)?;
    let filter = ExecutionFilter { job, state };
    let before = cut.parsed_date()?;
    let found = jobs::list(&service, &filter, before.as_ref(), cut.rows()).await?;
    Ok(Json(cut.page(found, |execution| dated(execution.created_at_ms, &execution.id))))
}

/// Get an execution.
#[utoipa::path(
    get, path = "/v1/executions/{execution}",
    params(("execution" = String, Path, description = "Id of the execution")),
    responses((status = 200, description = "The execution, with its tasks counted.", body = Execution))
)]
async fn get(
    State(service): State<Arc<Service>>,
    Path(ExecutionPath { execution }): Path<ExecutionPath>,
) -> Answer<Execution> {
    Ok(Json(jobs::find(&service, &execution).await?))
}

/// Forget an execution that is over, with its results and logs.
#[utoipa::path(
    delete, path = "/v1/executions/{execution}",
    params(("execution" = String, Path, description = "Id of the execution")),
    responses((status = 204, description = "It is forgotten."))
)]
async fn forget(
    State(service): State<Arc<Service>>,
    Path(ExecutionPath { execution }): Path<ExecutionPath>,
) -> Result<Response> {
    jobs::forget(&service, &execution).await?;
    Ok(no_content())
}

/// End an execution before its time. Tasks that run are told to end, and killed after ten seconds.
#[utoipa::path(
    post, path = "/v1/executions/{execution}/cancel",
    params(("execution" = String, Path, description = "Id of the execution")),
    responses((status = 200, description = "How it stands now. One that is over stays as it is.", body = Execution))
)]
async fn cancel(
    State(service): State<Arc<Service>>,
    Path(ExecutionPath { execution }): Path<ExecutionPath>,
) -> Answer<Execution> {
    Ok(Json(jobs::cancel(&service, &execution).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WatchQuery {
    /// `next` of the last task that is known; default: from the first.
    #[serde(default)]
    after: u64,
}

/// Watch an execution until it is over.
#[utoipa::path(
    get, path = "/v1/executions/{execution}/watch",
    params(("execution" = String, Path, description = "Id of the execution"), WatchQuery),
    responses((
        status = 200, body = JobEvent, content_type = "application/x-ndjson",
        description = "One JobEvent a line: tasks as they end, counts as they change, last the execution.",
    ))
)]
async fn watch(
    State(service): State<Arc<Service>>,
    Path(ExecutionPath { execution }): Path<ExecutionPath>,
    Query(query): Query<WatchQuery>,
) -> Result<Response> {
    Ok(ndjson(jobs::watch(&service, &execution, query.after).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TasksQuery {
    /// Only those in this state.
    #[param(inline)]
    state: Option<TaskState>,
    /// 1 to 1000; default 1000.
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// List the tasks of an execution.
#[utoipa::path(
    get, path = "/v1/executions/{execution}/tasks",
    params(("execution" = String, Path, description = "Id of the execution"), TasksQuery),
    responses((status = 200, description = "In their order, without their inputs: fewer than `limit` where they are long.", body = TaskList))
)]
async fn tasks(
    State(service): State<Arc<Service>>,
    Path(ExecutionPath { execution }): Path<ExecutionPath>,
    Query(query): Query<TasksQuery>,
) -> Answer<TaskList> {
    let cut = Cut::new(query.limit, query.cursor)?;
    let after = cut.parsed()?;
    let page = jobs::tasks(&service, &execution, query.state, after, cut.limit).await?;
    let last = page.tasks.last().filter(|_| page.more);
    let next_cursor = last.map(|task| task.index.to_string());
    Ok(Json(TaskList { tasks: page.tasks, next_cursor }))
}

/// Get a task, with its input.
#[utoipa::path(
    get, path = "/v1/executions/{execution}/tasks/{index}",
    params(
        ("execution" = String, Path, description = "Id of the execution"),
        ("index" = u32, Path, description = "Its place among the inputs, from 0"),
    ),
    responses((status = 200, description = "The task.", body = Task))
)]
async fn task(
    State(service): State<Arc<Service>>,
    Path(TaskPath { execution, index }): Path<TaskPath>,
) -> Answer<Task> {
    Ok(Json(jobs::task(&service, &execution, index).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct LogQuery {
    /// 1 to 1000; default 1000.
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// The newest lines instead of the oldest.
    #[serde(default)]
    newest: bool,
    /// Only lines with this text in them.
    contains: Option<String>,
    #[param(inline)]
    stream: Option<OutputStream>,
}

/// Get what the command of a task said in its last attempt, also when its sandbox is gone.
#[utoipa::path(
    get, path = "/v1/executions/{execution}/tasks/{index}/log",
    params(
        ("execution" = String, Path, description = "Id of the execution"),
        ("index" = u32, Path, description = "Its place among the inputs, from 0"),
        LogQuery,
    ),
    responses((status = 200, description = "Lines, oldest first.", body = Log))
)]
async fn log(
    State(service): State<Arc<Service>>,
    Path(TaskPath { execution, index }): Path<TaskPath>,
    Query(query): Query<LogQuery>,
) -> Answer<Log> {
    let cut = Cut::new(query.limit, query.cursor)?;
    let search = Search {
        after_us: cut.parsed()?.unwrap_or_default(),
        limit: cut.limit,
        newest: query.newest,
        text: query.contains,
        stderr: query.stream.map(|stream| stream == OutputStream::Stderr),
        processes: Vec::new(),
    };
    let lines = jobs::log(&service, &execution, index, search).await?;
    let full = lines.len() == cut.limit && !query.newest;
    let next_cursor = lines.last().filter(|_| full).map(|line| line.stamp_us.to_string());
    Ok(Json(Log { lines: lines.into_iter().map(LogEntry::from).collect(), next_cursor }))
}

/// Download the files that a task left in its directory of results, as a tar archive.
#[utoipa::path(
    get, path = "/v1/executions/{execution}/tasks/{index}/files",
    params(
        ("execution" = String, Path, description = "Id of the execution"),
        ("index" = u32, Path, description = "Its place among the inputs, from 0"),
    ),
    responses((
        status = 200, content_type = "application/x-tar",
        description = "The archive as the sandbox made it: unpack it as one of a stranger.",
    ))
)]
async fn files(
    State(service): State<Arc<Service>>,
    Path(TaskPath { execution, index }): Path<TaskPath>,
) -> Result<Response> {
    let (file, length) = jobs::results(&service, &execution, index).await?;
    let headers =
        [(CONTENT_TYPE, "application/x-tar".to_owned()), (CONTENT_LENGTH, length.to_string())];
    Ok((headers, Body::from_stream(ReaderStream::new(file))).into_response())
}

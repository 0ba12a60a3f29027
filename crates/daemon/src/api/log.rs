//! What processes of a sandbox said: kept on the host, so nobody is woken for it.

use std::sync::Arc;

use axum::extract::State;
use serde::Deserialize;
use torpor_lifecycle::store::Search;
use torpor_protocol::SandboxRef;
use torpor_protocol::api::{Log, OutputStream};
use torpor_service::Service;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use super::extract::{Json, Path, Query};

/// Lines in one page, unless the client asks for another number up to the other.
const PAGE: usize = 1000;
const PAGE_MAX: usize = 10_000;

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(log))
}

#[derive(Debug, Deserialize)]
struct LogPath {
    sandbox: SandboxRef,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct LogQuery {
    /// Only lines after this stamp: `next` of the page before.
    #[serde(default)]
    after: u64,
    /// Default 1000, at most 10000.
    limit: Option<usize>,
    /// The newest lines instead of the oldest.
    #[serde(default)]
    newest: bool,
    /// Only lines with this text in them.
    contains: Option<String>,
    #[param(inline)]
    stream: Option<OutputStream>,
}

/// Get what the processes of a sandbox said, also of one that is gone (by its id).
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/log",
    params(("sandbox" = String, Path, description = "Id or name"), LogQuery),
    responses((status = 200, description = "Lines, oldest first. Terminals are not in it.", body = Log))
)]
async fn log(
    State(app): State<Arc<Service>>,
    Path(LogPath { sandbox }): Path<LogPath>,
    Query(query): Query<LogQuery>,
) -> Answer<Log> {
    let id = match sandbox {
        SandboxRef::Id(id) => id,
        named @ SandboxRef::Name(_) => app.fleet.find(&named)?.id().clone(),
    };
    let limit = query.limit.unwrap_or(PAGE).clamp(1, PAGE_MAX);
    let search = Search {
        after_us: query.after,
        limit,
        newest: query.newest,
        text: query.contains,
        stderr: query.stream.map(|stream| stream == OutputStream::Stderr),
        processes: Vec::new(),
    };
    let lines = app.fleet.log(&id, &search).await?;
    let full = lines.len() == limit && !query.newest;
    let next = lines.last().filter(|_| full).map(|line| line.stamp_us);
    Ok(Json(Log { lines, next }))
}

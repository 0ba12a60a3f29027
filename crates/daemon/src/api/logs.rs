//! What processes of a sandbox said: kept on the host, so nobody is woken for it.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt};
use serde::Deserialize;
use torpor_lifecycle::store::Search;
use torpor_protocol::api::{Log, LogEntry, OutputStream};
use torpor_protocol::{SandboxId, SandboxRef};
use torpor_service::Service;
use torpor_web::error::Result;
use torpor_web::extract::{Json, Path, Query};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::ndjson::ndjson;
use super::page::Cut;

/// How often it is looked for new lines.
const LOOK: Duration = Duration::from_millis(250);

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(logs))
}

#[derive(Debug, Deserialize)]
struct LogPath {
    sandbox: SandboxRef,
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
    /// Go on with what is said from now on: one LogEntry a line (NDJSON).
    #[serde(default)]
    follow: bool,
}

/// Get what the processes of a sandbox said, also of one that is gone (by its id). Nobody is woken for it.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/logs",
    params(("sandbox" = String, Path, description = "Id or name"), LogQuery),
    responses((
        status = 200,
        description = "Lines, oldest first. Terminals are not in it. With `follow`, until the sandbox ends.",
        content((Log = "application/json"), (LogEntry = "application/x-ndjson")),
    ))
)]
async fn logs(
    State(service): State<Arc<Service>>,
    Path(LogPath { sandbox }): Path<LogPath>,
    Query(query): Query<LogQuery>,
) -> Result<Response> {
    let id = match sandbox {
        SandboxRef::Id(id) => id,
        named @ SandboxRef::Name(_) => service.fleet.find(&named)?.id().clone(),
    };
    let cut = Cut::new(query.limit, query.cursor)?;
    let search = Search {
        after_us: cut.parsed()?.unwrap_or_default(),
        limit: cut.limit,
        newest: query.newest,
        text: query.contains,
        stderr: query.stream.map(|stream| stream == OutputStream::Stderr),
        processes: Vec::new(),
    };
    if query.follow {
        return Ok(ndjson(follow(service, id, search)));
    }
    let lines = service.fleet.log(&id, &search).await?;
    let full = lines.len() == cut.limit && !query.newest;
    let next_cursor = lines.last().filter(|_| full).map(|line| line.stamp_us.to_string());
    let lines = lines.into_iter().map(LogEntry::from).collect();
    Ok(Json(Log { lines, next_cursor }).into_response())
}

/// What was said, and what is said until the sandbox or the daemon ends.
fn follow(service: Arc<Service>, id: SandboxId, search: Search) -> impl Stream<Item = LogEntry> {
    let stopping = service.stopping.clone();
    let pages =
        futures_util::stream::unfold((service, id, search), async |(service, id, mut search)| {
            loop {
                // Looked at first: what it said last is read after it ended.
                let lives = service.fleet.find(&SandboxRef::Id(id.clone())).is_ok();
                // A log that can't be read any more ends.
                let lines = service.fleet.log(&id, &search).await.ok()?;
                search.newest = false;
                if let Some(last) = lines.last() {
                    search.after_us = last.stamp_us;
                    return Some((futures_util::stream::iter(lines), (service, id, search)));
                }
                if !lives {
                    return None;
                }
                tokio::time::sleep(LOOK).await;
            }
        });
    pages.flatten().map(LogEntry::from).take_until(async move { stopping.cancelled().await })
}

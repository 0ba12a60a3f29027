//! What the instances of a service said.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use torpor_lifecycle::store::Search;
use torpor_protocol::api::OutputStream;
use torpor_protocol::hosting::{ServiceLog, ServiceLogEntry};
use torpor_service::Service;
use torpor_service::hosting::{self, Lines};
use torpor_web::error::Result;
use torpor_web::extract::{Json, Path, Query};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::super::ndjson::ndjson;
use super::super::page::Cut;
use super::ServicePath;

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(logs))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct LogQuery {
    /// Only of this revision.
    revision: Option<u32>,
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
    /// Go on with what is said from now on: one ServiceLogEntry a line (NDJSON).
    #[serde(default)]
    follow: bool,
}

/// Get what the instances of a service said, also those that are gone. Nobody is woken for it.
#[utoipa::path(
    get, path = "/v1/services/{service}/logs",
    params(("service" = String, Path, description = "Name"), LogQuery),
    responses((
        status = 200,
        description = "Lines, oldest first. With `follow`, until the service ends.",
        content((ServiceLog = "application/json"), (ServiceLogEntry = "application/x-ndjson")),
    ))
)]
async fn logs(
    State(service): State<Arc<Service>>,
    Path(path): Path<ServicePath>,
    Query(query): Query<LogQuery>,
) -> Result<Response> {
    let hosted = service.hosting.find(&path.service)?;
    let cut = Cut::new(query.limit, query.cursor)?;
    let search = Search {
        after_us: cut.parsed()?.unwrap_or_default(),
        limit: cut.limit,
        newest: query.newest,
        text: query.contains,
        stderr: query.stream.map(|stream| stream == OutputStream::Stderr),
        processes: Vec::new(),
    };
    let wanted = Lines { revision: query.revision, search };
    if query.follow {
        return Ok(ndjson(hosting::follow(service, hosted, wanted)));
    }
    let lines = wanted.read(&service, &hosted).await?;
    let full = lines.len() == cut.limit && !query.newest;
    let next_cursor = lines.last().filter(|_| full).map(|entry| entry.line.at_us.to_string());
    Ok(Json(ServiceLog { lines, next_cursor }).into_response())
}

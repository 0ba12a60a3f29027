//! Run a command and give back what it said, at once or as it comes. The process is killed when the
//! client goes away.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use tokio_util::sync::CancellationToken;
use torpor_protocol::api::{Command, RunEvent, RunResult};
use torpor_service::{Service, processes};
use torpor_web::error::Result;
use torpor_web::extract::{Awake, Json, Query};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::ndjson::ndjson;

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(run))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RunQuery {
    /// Send output as it comes, one RunEvent a line.
    #[serde(default)]
    stream: bool,
}

/// Run a command until it ends.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/run",
    params(("sandbox" = String, Path, description = "Id or name"), RunQuery),
    request_body = Command,
    responses((
        status = 200, description = "It ended (with `stream`: it began).",
        content((RunResult = "application/json"), (RunEvent = "application/x-ndjson")),
    ))
)]
async fn run(
    State(service): State<Arc<Service>>,
    Query(query): Query<RunQuery>,
    Awake(awake): Awake,
    Json(command): Json<Command>,
) -> Result<Response> {
    if query.stream {
        let output = processes::begin(awake, command).await?;
        // A running command may end within the grace of a shutdown.
        return Ok(ndjson(output.into_events(CancellationToken::new())));
    }
    let result = processes::run(&service, awake, command).await?;
    Ok(Json(result).into_response())
}

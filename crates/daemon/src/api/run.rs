//! Run a command and give back what it said, at once or as it comes. The process is killed when the
//! client goes away.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::Deserialize;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use torpor_protocol::ErrorCode;
use torpor_protocol::api::{Command, OutputStream, RunEvent, RunResult};
use torpor_protocol::guest::Request;
use torpor_service::Service;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::command;
use super::error::{ApiError, Result};
use super::extract::{Awake, Json, Query};
use super::output::{Output, Said};

/// Bytes of output in one answer; more is read and cut, so that the process is not stopped by it.
const OUTPUT_MAX: usize = 16 * 1024 * 1024;

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
    State(app): State<Arc<Service>>,
    Query(query): Query<RunQuery>,
    awake: Awake,
    Json(command): Json<Command>,
) -> Result<Response> {
    let begun = Instant::now();
    let (spec, stdin) = command::attached(command)?;
    let output = Output::open(awake, &Request::Run(spec), stdin.as_deref()).await?;
    if query.stream {
        // A running command may end within the grace of a shutdown.
        return Ok(output.into_response(CancellationToken::new()));
    }
    let result = collect(output, begun).await?;
    app.metrics.ran(begun.elapsed());
    Ok(Json(result).into_response())
}

async fn collect(mut output: Output, begun: Instant) -> Result<RunResult> {
    let mut said = Collected::default();
    let mut exit = None;
    while let Some(next) = output.next().await? {
        match next {
            Said::Bytes(OutputStream::Stdout, bytes) => said.stdout(&bytes),
            Said::Bytes(OutputStream::Stderr, bytes) => said.stderr(&bytes),
            Said::Skipped(_) => said.truncated = true,
            Said::At(_) => {}
            Said::Exited(report) => exit = Some(report),
        }
    }
    let Some(exit) = exit else {
        return Err(ApiError::new(ErrorCode::SandboxFailed, "the agent did not say how it ended"));
    };
    Ok(RunResult {
        exit,
        stdout: text(said.stdout),
        stderr: text(said.stderr),
        truncated: said.truncated,
        duration_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
    })
}

#[derive(Default)]
struct Collected {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    truncated: bool,
}

impl Collected {
    fn stdout(&mut self, bytes: &Bytes) {
        let fitting = self.fitting(bytes);
        self.stdout.extend_from_slice(fitting);
    }

    fn stderr(&mut self, bytes: &Bytes) {
        let fitting = self.fitting(bytes);
        self.stderr.extend_from_slice(fitting);
    }

    fn fitting<'a>(&mut self, bytes: &'a Bytes) -> &'a [u8] {
        let room = OUTPUT_MAX - self.stdout.len() - self.stderr.len();
        self.truncated |= bytes.len() > room;
        &bytes[..bytes.len().min(room)]
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

//! A process on a WebSocket: with a terminal or pipes, started here (`exec`) or found running
//! (`attach`).
//!
//! Input and output are two loops that never wait for each other, so a process that echoes what it
//! reads can't stand still because both sides are full.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::extract::ws::WebSocket;
use axum::response::Response;
use futures_util::FutureExt;
use serde::Deserialize;
use torpor_lifecycle::Refusal;
use torpor_lifecycle::guest::{Guest, GuestError, Sender};
use torpor_protocol::api::{ExecInput, ExecOutput, OutputStream, STDERR_BYTE, STDOUT_BYTE};
use torpor_protocol::guest::{FailureCode, Request, TerminalSize};
use torpor_service::Service;
use torpor_service::processes::{self, Output, Said};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Awake, Path, Query, RequestId, Upgrade};
use torpor_web::socket::{self, Left, Reader, Received, Writer, upgraded};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::processes::ProcessPath;

/// How long a client may take to say what it wants to run.
const FIRST_MESSAGE: Duration = Duration::from_secs(30);
/// Packets of output that are sent together if they are there together.
const BATCH: usize = 16;

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(exec)).routes(routes!(attach))
}

/// Start a process on a WebSocket.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/exec",
    params(("sandbox" = String, Path, description = "Id or name")),
    responses((
        status = 101,
        description = "A WebSocket. The client's first text message is {\"do\":\"start\", …Command}; \
            then {\"do\":\"resize\",\"cols\":…,\"rows\":…}, {\"do\":\"signal\",\"signal\":…} and \
            {\"do\":\"eof\"}; binary messages go to standard input. The daemon's text messages are \
            {\"event\":\"started\",\"pid\":…}, {\"event\":\"skipped\",\"bytes\":…}, \
            {\"event\":\"exited\", …ExitReport} and {\"event\":\"error\", …ErrorBody}; binary \
            messages are output, after a first byte 1 (standard output) or 2 (standard error).",
    ))
)]
async fn exec(
    State(service): State<Arc<Service>>,
    id: RequestId,
    Awake(awake): Awake,
    Upgrade(upgrade): Upgrade,
) -> Response {
    let talk = async |socket: WebSocket, service, id| {
        let (mut reader, mut writer) = socket::split(socket);
        let begun = begin(&mut reader, awake).await;
        converse(service, id, reader, &mut writer, begun).await;
    };
    upgraded(service, id, upgrade, talk)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AttachQuery {
    /// Send the output that was kept, too.
    #[serde(default)]
    replay: bool,
}

/// Attach a WebSocket to a process that runs.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/processes/{pid}/attach",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("pid" = String, Path, description = "Process id, or name of a supervised process"),
        AttachQuery,
    ),
    responses((status = 101, description = "A WebSocket as in `exec`, without `start`."))
)]
async fn attach(
    State(service): State<Arc<Service>>,
    id: RequestId,
    Path(path): Path<ProcessPath>,
    Query(query): Query<AttachQuery>,
    Awake(awake): Awake,
    Upgrade(upgrade): Upgrade,
) -> Result<Response> {
    let output = processes::attach(awake, &path.pid, query.replay, true).await?;
    let talk = async |socket: WebSocket, service, id| {
        let (reader, mut writer) = socket::split(socket);
        converse(service, id, reader, &mut writer, Ok(output)).await;
    };
    Ok(upgraded(service, id, upgrade, talk))
}

/// Waits for the first message and starts what it says.
async fn begin(reader: &mut Reader, awake: processes::Awake) -> Result<Output> {
    let first = tokio::time::timeout(FIRST_MESSAGE, reader.recv()).await.ok().flatten();
    let Some(Received::Text(text)) = first else {
        return Err(ApiError::invalid("the first message must be a text that says `start`"));
    };
    let ExecInput::Start(command) = parse(&text)? else {
        return Err(ApiError::invalid("the first message must say `start`"));
    };
    let spec = processes::interactive(*command)?;
    Ok(Output::open(awake, &Request::Run(spec), None).await?)
}

fn parse(text: &str) -> Result<ExecInput> {
    serde_json::from_str(text).map_err(|error| ApiError::invalid(error.to_string()))
}

/// Until the process ended, the client left, or the daemon stops.
async fn converse(
    service: Arc<Service>,
    id: RequestId,
    mut reader: Reader,
    writer: &mut Writer,
    begun: Result<Output>,
) {
    let ended = match begun {
        Ok(mut output) => {
            let sender = output.stream.sender();
            let guest = output.awake().lease.guest().clone();
            let pid = output.started.pid;
            tokio::select! {
                ended = send_output(&mut output, writer) => ended,
                ended = receive_input(&mut reader, &sender, &guest, pid) => ended,
                () = service.stopping.cancelled() => Err(Refusal::Stopping.into()),
            }
        }
        Err(error) => Err(error),
    };
    match ended {
        Ok(End::Exited) => {
            writer.close(socket::NORMAL, "").await;
            reader.wait_for_close().await;
        }
        Ok(End::Left) => tracing::debug!("the client left"),
        Err(error) => {
            if let Some(blame) = error.0.internal() {
                tracing::error!(error = blame, "a conversation failed");
            }
            let _ = writer.send(&ExecOutput::Error(error.0.to_body(&id.0))).await;
            writer.close(socket::ERROR, "").await;
            reader.wait_for_close().await;
        }
    }
}

enum End {
    Exited,
    Left,
}

impl From<Left> for End {
    fn from(_: Left) -> Self {
        Self::Left
    }
}

/// What the process says goes to the client.
async fn send_output(output: &mut Output, writer: &mut Writer) -> Result<End> {
    if writer.send(&ExecOutput::Started { pid: output.started.pid }).await.is_err() {
        return Ok(End::Left);
    }
    loop {
        let mut next = tokio::select! {
            next = output.next() => Some(next?),
            left = writer.keep_alive() => return Ok(left.into()),
        };
        for _ in 0..BATCH {
            let said = match next {
                Some(Some(said)) => said,
                Some(None) => return Ok(End::Exited),
                None => break,
            };
            if pass_on(said, writer).await.is_err() {
                return Ok(End::Left);
            }
            next = output.next().now_or_never().transpose()?;
        }
        if let Some(Some(said)) = next
            && pass_on(said, writer).await.is_err()
        {
            return Ok(End::Left);
        }
        if writer.flush().await.is_err() {
            return Ok(End::Left);
        }
    }
}

async fn pass_on(said: Said, writer: &mut Writer) -> std::result::Result<(), Left> {
    match said {
        Said::Bytes(OutputStream::Stdout, bytes) => {
            writer.feed(socket::marked(STDOUT_BYTE, &bytes)).await
        }
        Said::Bytes(OutputStream::Stderr, bytes) => {
            writer.feed(socket::marked(STDERR_BYTE, &bytes)).await
        }
        Said::At(_) => Ok(()),
        Said::Skipped(bytes) => writer.send(&ExecOutput::Skipped { bytes }).await,
        Said::Exited(report) => writer.send(&ExecOutput::Exited(report)).await,
    }
}

/// What the client says goes to the process.
async fn receive_input(
    reader: &mut Reader,
    sender: &Sender,
    guest: &Guest,
    pid: u32,
) -> Result<End> {
    while let Some(received) = reader.recv().await {
        let passed = match received {
            Received::Bytes(bytes) => sender.send(&bytes).await,
            Received::Text(text) => obey(parse(&text)?, sender, guest, pid).await?,
        };
        match passed {
            Ok(()) => {}
            // It has just ended: its exit is on the way to the client.
            Err(GuestError::Refused { code: FailureCode::NoSuchProcess, .. }) => {}
            // The other loop sees the same, and knows better why.
            Err(GuestError::Gone | GuestError::Asleep) => {
                return std::future::pending().await;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(End::Left)
}

async fn obey(
    input: ExecInput,
    sender: &Sender,
    guest: &Guest,
    pid: u32,
) -> Result<std::result::Result<(), GuestError>> {
    Ok(match input {
        ExecInput::Start(_) => return Err(ApiError::invalid("it was started already")),
        ExecInput::Resize(TerminalSize { cols, rows }) => {
            guest.done(&Request::Resize { pid, cols, rows }).await
        }
        ExecInput::Signal { signal } => guest.done(&Request::Signal { pid, signal }).await,
        ExecInput::Eof => sender.finish().await,
    })
}

//! Bytes in and out of a sandbox, of any size: files, archives, standard input.
//!
//! - Nothing is kept but what is under way: the agent's window slows a fast client down, and a slow
//!   client the agent.
//! - The lease lives as long as the body. A client that goes away drops the stream, which tells the
//!   agent to give up: a file is then what it was before.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::HeaderValue;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http_body_util::BodyExt;
use serde::Deserialize;
use torpor_lifecycle::guest::{GuestError, Sender, Stream, unexpected};
use torpor_protocol::api::FileEntry;
use torpor_protocol::guest::{FileStat, Reply, Request};
use torpor_service::Service;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::{ApiError, Result};
use super::extract::{Awake, Json, Query};
use super::files::{Mode, PathText};
use super::{Answer, no_content};

/// How long the agent may take for its answer after the last byte, or before the first.
const ANSWER_DEADLINE: Duration = Duration::from_secs(120);
/// What is read of a body nobody wants any more, so that its sender comes to read why.
const DISCARD_MAX: usize = 64 * 1024 * 1024;
const DISCARD_DEADLINE: Duration = Duration::from_secs(5);
/// Permission bits of a downloaded file, in octal.
const MODE_HEADER: &str = "x-torpor-mode";

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(read, write)).routes(routes!(pack, unpack))
}

// === Up ===

/// Opens a request, sends the body on its stream and waits for the agent's answer.
pub async fn upload(
    app: &Service,
    awake: &Awake,
    request: &Request,
    mut body: Body,
) -> Result<Reply> {
    let mut stream = awake.lease.guest().open(request).await?;
    let sender = stream.sender();
    let early = tokio::select! {
        biased;
        // The agent may refuse at any moment: a full disk need not wait for the last byte.
        reply = stream.reply() => Some(reply),
        fed = feed(app, &sender, &mut body) => { fed?; None }
    };
    if let Some(reply) = early {
        discard(body).await;
        return Ok(reply?);
    }
    let reply = tokio::time::timeout(ANSWER_DEADLINE, stream.reply()).await;
    Ok(reply.map_err(|_| GuestError::Timeout(ANSWER_DEADLINE))??)
}

async fn feed(app: &Service, sender: &Sender, body: &mut Body) -> Result<()> {
    while let Some(bytes) = next_bytes(body).await? {
        sender.send(&bytes).await?;
        app.metrics.uploaded(bytes.len());
    }
    Ok(sender.finish().await?)
}

pub async fn next_bytes(body: &mut Body) -> Result<Option<Bytes>> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ApiError::invalid("the body broke off"))?;
        if let Ok(bytes) = frame.into_data() {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

/// Reads what nobody wants, within limits, so that its sender comes to read why.
pub async fn discard(mut body: Body) {
    let mut room = DISCARD_MAX;
    let reading = async {
        while let Ok(Some(bytes)) = next_bytes(&mut body).await {
            room = room.saturating_sub(bytes.len());
            if room == 0 {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(DISCARD_DEADLINE, reading).await;
}

fn stat_of(reply: Reply, request: &Request) -> Result<FileStat> {
    let Reply::Stat(stat) = reply else { return Err(unexpected(request).into()) };
    Ok(stat)
}

/// [`upload`] for requests that are only done.
pub async fn deliver(
    app: &Service,
    awake: &Awake,
    request: &Request,
    body: Body,
) -> Result<Response> {
    let reply = upload(app, awake, request, body).await?;
    let Reply::Done = reply else { return Err(unexpected(request).into()) };
    Ok(no_content())
}

// === Down ===

/// Bytes of a stream as a body.
struct Download {
    app: Arc<Service>,
    stream: Stream,
    /// Never more than was announced: what grew meanwhile is cut.
    left: u64,
    first: Option<Bytes>,
    _awake: Awake,
}

impl Download {
    async fn next(&mut self) -> Option<std::result::Result<Bytes, GuestError>> {
        if self.left == 0 {
            return None;
        }
        let data = match self.first.take() {
            Some(bytes) => Ok(Some(bytes)),
            None => self.stream.data().await,
        };
        let mut bytes = match data.transpose()? {
            Ok(bytes) => bytes,
            Err(error) => return Some(Err(error)),
        };
        let fitting = usize::try_from(self.left).map_or(bytes.len(), |left| left.min(bytes.len()));
        bytes.truncate(fitting);
        self.left -= fitting as u64;
        self.app.metrics.downloaded(fitting);
        Some(Ok(bytes))
    }

    fn into_body(self) -> Body {
        Body::from_stream(futures_util::stream::unfold(self, async |mut download| {
            let bytes = download.next().await?;
            Some((bytes, download))
        }))
    }
}

/// Opens a request that is answered with a description and then bytes.
async fn open(awake: &Awake, request: &Request) -> Result<(Stream, FileStat)> {
    let opened = async {
        let mut stream = awake.lease.guest().open(request).await?;
        let reply = stream.reply().await?;
        Ok::<_, GuestError>((stream, reply))
    };
    let opened = tokio::time::timeout(ANSWER_DEADLINE, opened).await;
    let (stream, reply) = opened.map_err(|_| GuestError::Timeout(ANSWER_DEADLINE))??;
    Ok((stream, stat_of(reply, request)?))
}

// === Handlers ===

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ReadQuery {
    #[param(value_type = String)]
    pub path: PathText,
    /// Begin here.
    #[serde(default)]
    pub offset: u64,
    /// At most so many bytes.
    pub length: Option<u64>,
}

/// Download a file.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/files/content",
    params(("sandbox" = String, Path, description = "Id or name"), ReadQuery),
    responses((
        status = 200, body = String, content_type = "application/octet-stream",
        description = "The bytes. The header x-torpor-mode has its permission bits in octal.",
    ))
)]
pub async fn read(
    State(app): State<Arc<Service>>,
    Query(query): Query<ReadQuery>,
    awake: Awake,
) -> Result<Response> {
    let ReadQuery { path, offset, length } = query;
    let request = Request::ReadFile { path: path.0, offset, length };
    let (mut stream, stat) = open(&awake, &request).await?;
    let announced = stat.size.saturating_sub(offset).min(length.unwrap_or(u64::MAX));
    // Files of /proc say that they are empty and are not.
    let first = if stat.size == 0 { stream.data().await? } else { None };
    let known = first.is_none();
    let left = if known { announced } else { length.unwrap_or(u64::MAX) };
    let download = Download { app, stream, left, first, _awake: awake };
    let mut response = download.into_body().into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    let mode = HeaderValue::from_str(&format!("{:04o}", stat.mode & 0o7777));
    headers.insert(MODE_HEADER, mode.expect("digits are a header value"));
    if known {
        headers.insert(CONTENT_LENGTH, announced.into());
    }
    Ok(response)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WriteQuery {
    #[param(value_type = String)]
    path: PathText,
    /// Add to the end instead of replacing it.
    #[serde(default)]
    append: bool,
    /// Permission bits, in octal.
    #[param(value_type = Option<String>)]
    mode: Option<Mode>,
    /// `user`, `user:group` or numbers.
    owner: Option<String>,
}

/// Upload a file. It is replaced when the last byte is there, or stays as it was.
#[utoipa::path(
    put, path = "/v1/sandboxes/{sandbox}/files/content",
    params(("sandbox" = String, Path, description = "Id or name"), WriteQuery),
    request_body(content = String, content_type = "application/octet-stream"),
    responses((status = 200, description = "The file as it is now.", body = FileEntry))
)]
async fn write(
    State(app): State<Arc<Service>>,
    Query(query): Query<WriteQuery>,
    awake: Awake,
    body: Body,
) -> Answer<FileEntry> {
    let WriteQuery { path, append, mode, owner } = query;
    let mode = mode.map(|mode| mode.0);
    let request = Request::WriteFile { path: path.0, mode, append, owner };
    let stat = stat_of(upload(&app, &awake, &request, body).await?, &request)?;
    Ok(Json(stat.into()))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PackQuery {
    #[param(value_type = String)]
    path: PathText,
}

/// Download a file or directory as a tar archive.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/files/archive",
    params(("sandbox" = String, Path, description = "Id or name"), PackQuery),
    responses((
        status = 200, body = String, content_type = "application/x-tar",
        description = "Names in it are relative to the parent of `path`.",
    ))
)]
async fn pack(
    State(app): State<Arc<Service>>,
    Query(PackQuery { path }): Query<PackQuery>,
    awake: Awake,
) -> Result<Response> {
    let (stream, _) = open(&awake, &Request::Pack { path: path.0 }).await?;
    let download = Download { app, stream, left: u64::MAX, first: None, _awake: awake };
    Ok(([(CONTENT_TYPE, "application/x-tar")], download.into_body()).into_response())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct UnpackQuery {
    #[param(value_type = String)]
    path: PathText,
    /// Who owns what is unpacked, instead of what the archive says.
    owner: Option<String>,
}

/// Unpack a tar archive below a directory.
#[utoipa::path(
    put, path = "/v1/sandboxes/{sandbox}/files/archive",
    params(("sandbox" = String, Path, description = "Id or name"), UnpackQuery),
    request_body(content = String, content_type = "application/x-tar"),
    responses((status = 204, description = "All of it is there."))
)]
async fn unpack(
    State(app): State<Arc<Service>>,
    Query(UnpackQuery { path, owner }): Query<UnpackQuery>,
    awake: Awake,
    body: Body,
) -> Result<Response> {
    let request = Request::Unpack { path: path.0, owner, layer: false };
    deliver(&app, &awake, &request, body).await
}

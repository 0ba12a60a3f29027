//! Requests that a client may repeat: with the same `Idempotency-Key` the same request is done once and
//! answered alike every time, for a day, also by the next daemon.
//!
//! - Recorded, then done, then its answer recorded. A key belongs to the API key that sent it.
//! - What is sent with a key goes on when its client goes away, so that its answer is there when it asks again.
//! - Whoever asks while it is done waits for it.
//! - What makes sandboxes and snapshots notes with each by which request it was made ([`RepeatKey`]), so that a daemon
//!   that finds a request begun and not answered goes on with it. Of anything else it can't know.
//! - A stream is repeated as its last line, which says how it ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use axum::extract::{FromRequestParts, MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::StreamExt;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use torpor_lifecycle::chain;
use torpor_protocol::ErrorCode;
use torpor_protocol::api::{IDEMPOTENCY_HEADER, REPLAYED_HEADER};
use torpor_service::keys::Caller;
use torpor_service::{Error, Service};
use torpor_store::{KeptAnswer, Repeated, RequestKey};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{RequestId, is_json, whole_body};

/// Longest key.
const KEY_MAX: usize = 255;
/// How long somebody waits for the same request that is under way.
const WAIT: Duration = Duration::from_secs(60);
/// Pieces of a stream on their way to a slow client.
const PIECES: usize = 16;
/// Longest last line of a stream that is kept.
const LINE_MAX: usize = 64 * 1024;
const NDJSON: &str = "application/x-ndjson";
/// What can be gone on with: each thing it makes says by which request it was made.
const RESUMED: [&str; 5] = [
    "/v1/executions",
    "/v1/sandboxes",
    "/v1/sandboxes/{sandbox}/fork",
    "/v1/sandboxes/{sandbox}/snapshots",
    "/v1/snapshots/{snapshot}/fork",
];

/// Requests that are under way, until their answer is recorded.
#[derive(Default)]
pub(super) struct Underway(Mutex<HashMap<String, watch::Receiver<()>>>);

impl Underway {
    /// Takes the turn of a request, or says whom to wait for.
    fn enter(self: &Arc<Self>, id: &str) -> std::result::Result<Turn, watch::Receiver<()>> {
        let mut open = self.0.lock();
        if let Some(other) = open.get(id) {
            return Err(other.clone());
        }
        let (ended, receiver) = watch::channel(());
        open.insert(id.to_owned(), receiver);
        Ok(Turn { underway: Arc::clone(self), id: id.to_owned(), _ended: ended })
    }
}

/// Held while a request is under way.
struct Turn {
    underway: Arc<Underway>,
    id: String,
    _ended: watch::Sender<()>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.underway.0.lock().remove(&self.id);
    }
}

/// By which request something is made, if that may be repeated.
#[derive(Debug, Clone, Default)]
pub(super) struct RepeatKey(pub(super) Option<String>);

impl<S: Send + Sync> FromRequestParts<S> for RepeatKey {
    type Rejection = std::convert::Infallible;
    async fn from_request_parts(
        parts: &mut Parts,
        _: &S,
    ) -> std::result::Result<Self, Self::Rejection> {
        Ok(parts.extensions.get().cloned().unwrap_or_default())
    }
}

/// A layer of our own API, inside authentication.
pub(super) async fn once(
    State((service, underway)): State<(Arc<Service>, Arc<Underway>)>,
    request: Request,
    next: Next,
) -> Result<Response> {
    // Every other method may be repeated anyway.
    if request.method() != Method::POST {
        return Ok(next.run(request).await);
    }
    let Some(key) = key(request.headers())? else { return Ok(next.run(request).await) };
    let (request, sent) = identify(&service, &key, request).await?;
    let turn = wait_for_turn(&underway, &sent).await?;
    let known = service.vault.begin_request(&sent, service.fleet.clock().now_ms()).await?;
    match known {
        Repeated::New => {}
        Repeated::Unanswered if resumes(&request) => {}
        Repeated::Unanswered => return Err(unknown()),
        Repeated::Answered(answer) => return Ok(replay(answer)),
        Repeated::Other => return Err(reused()),
    }
    Ok(carry_out(service, request, sent, turn, next).await)
}

fn key(headers: &HeaderMap) -> Result<Option<String>> {
    let Some(value) = headers.get(IDEMPOTENCY_HEADER) else { return Ok(None) };
    let plain = |key: &&str| {
        (1..=KEY_MAX).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic())
    };
    let key = value.to_str().ok().filter(plain);
    let bad = || {
        ApiError::invalid(format!(
            "{IDEMPOTENCY_HEADER} has 1 to {KEY_MAX} letters, digits and signs"
        ))
    };
    key.map(|key| Some(key.to_owned())).ok_or_else(bad)
}

/// What a request is: who sends it and what it asks. Of an upload, how long it is.
async fn identify(
    service: &Arc<Service>,
    key: &str,
    request: Request,
) -> Result<(Request, RequestKey)> {
    let caller = request.extensions().get::<Caller>().map(Caller::name);
    let path = request.uri().path_and_query().map(ToString::to_string).unwrap_or_default();
    let length = request.headers().get(CONTENT_LENGTH).cloned();
    let (mut head, body) = request.into_parts();
    let (body, content) = if is_json(&head.headers) || body.is_end_stream() {
        let whole = whole_body(Request::from_parts(head.clone(), body), service).await?;
        let content = String::from_utf8_lossy(&whole).into_owned();
        (Body::from(whole), content)
    } else {
        let length = length.as_ref().and_then(|length| length.to_str().ok());
        (body, length.unwrap_or_default().to_owned())
    };
    let asked = [&*path, &*content];
    let sent = service.vault.request_key(&caller.unwrap_or_default(), key, &asked);
    head.extensions.insert(RepeatKey(Some(sent.id.clone())));
    Ok((Request::from_parts(head, body), sent))
}

async fn wait_for_turn(underway: &Arc<Underway>, sent: &RequestKey) -> Result<Turn> {
    let deadline = Instant::now() + WAIT;
    loop {
        let mut other = match underway.enter(&sent.id) {
            Ok(turn) => return Ok(turn),
            Err(other) => other,
        };
        // It ends when its sender is gone, which is an error.
        let ended = tokio::time::timeout_at(deadline, async { drop(other.changed().await) }).await;
        if ended.is_err() {
            return Err(ApiError::with_hint(
                ErrorCode::IdempotencyInProgress,
                "the request with this Idempotency-Key is still under way",
                "send it again, with the same key",
            ));
        }
    }
}

fn resumes(request: &Request) -> bool {
    let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    route.is_some_and(|route| RESUMED.contains(&route))
}

fn unknown() -> ApiError {
    ApiError::with_hint(
        ErrorCode::IdempotencyOutcomeUnknown,
        "a request with this Idempotency-Key was begun, and how it ended was not kept: the daemon ended \
         meanwhile, or its answer was too large",
        "look whether it was done; to do it again, send it with another key",
    )
}

fn reused() -> ApiError {
    ApiError::with_hint(
        ErrorCode::IdempotencyKeyReused,
        "this Idempotency-Key was sent with another request",
        "every request has a key of its own; a repeated one is the same to the byte",
    )
}

/// As it was answered before.
fn replay(answer: KeptAnswer) -> Response {
    let status = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::OK);
    let mut response = (status, answer.body).into_response();
    let headers = response.headers_mut();
    headers.remove(CONTENT_TYPE);
    if let Some(kind) = answer.content_type.and_then(|kind| HeaderValue::from_str(&kind).ok()) {
        headers.insert(CONTENT_TYPE, kind);
    }
    headers.insert(REPLAYED_HEADER, HeaderValue::from_static("true"));
    response
}

/// Does it, whoever waits, and remembers its answer.
async fn carry_out(
    service: Arc<Service>,
    request: Request,
    sent: RequestKey,
    turn: Turn,
    next: Next,
) -> Response {
    let id = request.extensions().get::<RequestId>().cloned();
    let id = id.unwrap_or_else(|| RequestId("unknown".into()));
    let span = tracing::Span::current();
    let tasks = service.tasks.clone();
    let done = tasks.spawn(tracing::Instrument::instrument(
        async move {
            let response = next.run(request).await;
            Kept { service, sent, _turn: turn }.keep(response, &id).await
        },
        span,
    ));
    done.await.unwrap_or_else(|_| {
        ApiError::new(ErrorCode::Internal, "a handler panicked").into_response()
    })
}

/// A request whose answer is to be remembered.
struct Kept {
    service: Arc<Service>,
    sent: RequestKey,
    _turn: Turn,
}

impl Kept {
    async fn keep(self, response: Response, RequestId(id): &RequestId) -> Response {
        let status = response.status();
        if let Some(error) = response.extensions().get::<Arc<Error>>() {
            let body = serde_json::to_string(&error.to_body(id)).unwrap_or_default();
            self.note(status, Some("application/json"), body).await;
            return response;
        }
        let (head, body) = response.into_parts();
        let kind = head.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        if kind == Some(NDJSON) {
            let (sender, pieces) = mpsc::channel(PIECES);
            let tasks = self.service.tasks.clone();
            tasks.spawn(self.drain(status, body, sender));
            return Response::from_parts(head, Body::from_stream(ReceiverStream::new(pieces)));
        }
        // What is to be answered is in memory already.
        let whole = axum::body::to_bytes(body, usize::MAX).await.unwrap_or_default();
        let text = String::from_utf8_lossy(&whole).into_owned();
        self.note(status, kind, text).await;
        Response::from_parts(head, Body::from(whole))
    }

    /// Reads a stream to its end, also if nobody listens any more, and remembers its last line.
    async fn drain(
        self,
        status: StatusCode,
        body: Body,
        listener: mpsc::Sender<std::result::Result<Bytes, axum::Error>>,
    ) {
        let mut pieces = body.into_data_stream();
        let mut last = LastLine::default();
        while let Some(piece) = pieces.next().await {
            match &piece {
                Ok(bytes) => last.feed(bytes),
                // Broken off: nobody knows how it ended.
                Err(_) => return drop(listener.send(piece).await),
            }
            // Who is gone is not waited for.
            let _ = listener.send(piece).await;
        }
        if let Some(line) = last.text() {
            self.note(status, Some(NDJSON), line).await;
        }
    }

    /// An answer that says "later" is none: nothing was done.
    async fn note(&self, status: StatusCode, content_type: Option<&str>, body: String) {
        let later = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
        let noted = if later.contains(&status) {
            self.service.ledger.forget_request(&self.sent.id).await
        } else {
            let content_type = content_type.map(str::to_owned);
            let answer = KeptAnswer { status: status.as_u16(), content_type, body };
            self.service.vault.keep_answer(&self.sent, &answer).await
        };
        if let Err(error) = noted {
            tracing::warn!(error = chain(&error), "the answer to a request was not kept");
        }
    }
}

/// The last line of what is fed, if it is not too long.
#[derive(Default)]
struct LastLine {
    line: Vec<u8>,
    ended: bool,
}

impl LastLine {
    fn feed(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            if std::mem::replace(&mut self.ended, part.ends_with(b"\n")) {
                self.line.clear();
            }
            if self.line.len() <= LINE_MAX {
                self.line.extend_from_slice(part);
            }
        }
    }

    fn text(self) -> Option<String> {
        let fits = self.ended && self.line.len() <= LINE_MAX;
        fits.then(|| String::from_utf8_lossy(&self.line).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_a_stream_is_kept_however_it_comes_in_pieces() {
        let mut last = LastLine::default();
        for piece in ["{\"a\":1}\n{\"b\"", ":2}\n", "{\"c", "\":3}", "\n"] {
            last.feed(piece.as_bytes());
        }
        assert_eq!(last.text().as_deref(), Some("{\"c\":3}\n"));
        let mut cut = LastLine::default();
        cut.feed(b"{\"a\":1}\n{\"b");
        assert_eq!(cut.text(), None);
    }

    #[test]
    fn a_key_is_short_and_plain() {
        let parse = |value: &str| {
            let name = http::HeaderName::from_static(IDEMPOTENCY_HEADER);
            key(&HeaderMap::from_iter([(name, value.parse().unwrap())]))
        };
        assert_eq!(parse("a-1").unwrap().as_deref(), Some("a-1"));
        assert_eq!(key(&HeaderMap::new()).unwrap(), None);
        for bad in ["", "a b", &"x".repeat(256)] {
            assert!(parse(bad).is_err(), "{bad:.10}");
        }
    }
}

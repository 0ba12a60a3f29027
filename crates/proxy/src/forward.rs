//! One request: in through a lease, out through a stream.

use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Body as HttpBody, Incoming};
use hyper::client::conn::{http1, http2};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::task::AbortOnDropHandle;
use torpor_lifecycle::guest::Stream;
use torpor_lifecycle::{Fleet, Keep, Lease, Sandbox, wake_deadline};
use torpor_protocol::api::REQUEST_ID_HEADER;

use crate::connect::Connector;
use crate::error::Error;
use crate::extensions::{Held, Unsent, Until};
use crate::headers;
use crate::kept::{Kept, is_too_old};
use crate::limiter::{Limiter, Permit};
use crate::wire::Wire;

/// How long an application may think before it answers. The client may give up much earlier, and
/// then nobody waits; this only ends waits that everybody forgot.
const ANSWER_DEADLINE: Duration = Duration::from_secs(3600);
/// How long both sides may take to leave HTTP after they agreed to.
const UPGRADE_DEADLINE: Duration = Duration::from_secs(30);
/// How long one direction of an upgraded connection may go on when the other has ended.
pub(crate) const LINGER: Duration = Duration::from_secs(60);

type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// The body of an answer.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Passes requests on to ports of sandboxes.
#[derive(Clone)]
pub struct Proxy {
    fleet: Fleet,
    limiter: Arc<Limiter>,
}

/// Where a request goes.
pub struct Destination {
    pub sandbox: Sandbox,
    pub port: NonZeroU16,
    /// Of whoever had one before.
    pub lease: Option<Lease>,
}

/// How a request is treated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Manner {
    /// An upgraded connection (a WebSocket) does not keep the sandbox awake. While it sleeps the
    /// client's side stays open, and the next byte of the client wakes it.
    pub keep_open: bool,
}

/// What one request holds while it lasts. Dropping it closes the connection inside.
struct InFlight {
    _connection: AbortOnDropHandle<()>,
    lease: Lease,
    _permit: Permit,
    /// How an upgraded connection goes on while the sandbox sleeps, if it does.
    keep: Option<(Fleet, Keep)>,
    /// When an upgraded connection is cut off.
    until: Option<Until>,
    _held: Option<Held>,
}

impl Proxy {
    pub fn new(fleet: Fleet) -> Self {
        Self { fleet, limiter: Arc::default() }
    }

    /// Answers in any case. Dropping the future, or the body of the answer, ends the request inside.
    /// `peer` is who connected to us. A request without an `x-request-id` gets one, which the
    /// application sees too.
    pub async fn handle<B>(
        &self,
        to: Destination,
        request: Request<B>,
        peer: Option<SocketAddr>,
        manner: Manner,
    ) -> Response<Body>
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let mut request = request.map(|body| body.map_err(Into::into).boxed_unsync());
        let id = headers::request_id(request.headers_mut());
        let asked = request.headers().clone();
        let mut unsent = None;
        let passed = Box::pin(self.forward(to, request, peer, manner, &mut unsent)).await;
        let mut response = match passed {
            Ok(response) => response,
            Err(error) => {
                let mut response = answer(&error, &asked);
                if let Some(request) = unsent {
                    response.extensions_mut().insert(Unsent::new(request));
                }
                response
            }
        };
        response.headers_mut().entry(REQUEST_ID_HEADER).or_insert(id);
        response
    }

    async fn forward(
        &self,
        to: Destination,
        mut request: Request<Body>,
        peer: Option<SocketAddr>,
        manner: Manner,
        unsent: &mut Option<Request<Body>>,
    ) -> Result<Response<Body>, Error> {
        torpor_headers::check(&request)?;
        let Destination { sandbox, port, lease } = to;
        let permit = self.limiter.acquire(sandbox.id())?;
        let inside = Connector { fleet: &self.fleet, sandbox: &sandbox, port };
        let grpc = headers::is_grpc(&request);
        let protocol = torpor_headers::upgrade(&request);
        let keep = manner.keep_open && protocol.is_some();
        let (mut lease, mut wire, keep) = match enter(&inside, lease, keep).await {
            Ok(entered) => entered,
            Err(error) => {
                *unsent = Some(request);
                return Err(error);
            }
        };
        let client = protocol.as_ref().map(|_| hyper::upgrade::on(&mut request));
        let until = request.extensions_mut().remove::<Until>();
        let held = request.extensions_mut().remove::<Held>();
        headers::prepare(&mut request, port.get(), peer);

        let give_up = Instant::now() + ANSWER_DEADLINE;
        let (response, connection) = loop {
            let copy = if grpc || protocol.is_some() { None } else { copy(&request) };
            let asked = async {
                if grpc {
                    ask_http2(wire, request).await
                } else {
                    ask(wire, request, protocol.clone()).await
                }
            };
            let answered = timeout_at(give_up, asked).await;
            let slow = |_| Error::Slow { what: "an answer", limit: ANSWER_DEADLINE };
            let error = match answered.map_err(slow)? {
                Ok(answered) => break answered,
                Err(error) => error,
            };
            let lost = lost(&lease).await;
            let Some(copy) = copy.filter(|_| lost) else {
                return Err(Error::BadAnswer { port, source: error.into() });
            };
            request = copy;
            drop(lease);
            (lease, wire) = inside.connect(None, None, give_up.min(wake_deadline())).await?;
        };
        let keep = keep.map(|keep| (self.fleet.clone(), keep));
        let held =
            InFlight { _connection: connection, lease, _permit: permit, keep, until, _held: held };
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return switch(response, client, held, port);
        }
        Ok(stream(response, held))
    }
}

/// The answer to a request for a sandbox that is not there.
pub fn refuse<B>(error: torpor_lifecycle::Error, request: &mut Request<B>) -> Response<Body> {
    let id = headers::request_id(request.headers_mut());
    let mut response = answer(&error.into(), request.headers());
    response.headers_mut().entry(REQUEST_ID_HEADER).or_insert(id);
    response
}

fn answer(error: &Error, asked: &HeaderMap) -> Response<Body> {
    error.answer(asked).map(|body| body.map_err(|never| match never {}).boxed_unsync())
}

/// A connection to the port. With `keep` one that can be kept, unless the agent is too old for that.
async fn enter(
    inside: &Connector<'_>,
    lease: Option<Lease>,
    keep: bool,
) -> Result<(Lease, Wire, Option<Keep>), Error> {
    let (mut lease, deadline) = (lease, wake_deadline());
    if keep {
        let keep = inside.sandbox.keep().ok_or(Error::KeptFull)?;
        match inside.connect(lease.take(), Some(&keep), deadline).await {
            Ok((lease, wire)) => return Ok((lease, wire, Some(keep))),
            Err(Error::Lifecycle(torpor_lifecycle::Error::Guest(error))) if is_too_old(&error) => {}
            Err(error) => return Err(error),
        }
    }
    let (lease, wire) = inside.connect(lease, None, deadline).await?;
    Ok((lease, wire, None))
}

/// The same request once more, if it only asks and has no body.
fn copy(request: &Request<Body>) -> Option<Request<Body>> {
    let asks = matches!(*request.method(), Method::GET | Method::HEAD);
    if !asks || !request.body().is_end_stream() {
        return None;
    }
    let mut copy = Request::new(empty());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    Some(copy)
}

/// Whether the machine was taken away under a request: put to sleep, or dead.
async fn lost(lease: &Lease) -> bool {
    timeout(Duration::ZERO, lease.guest().gone()).await.is_ok()
}

fn empty() -> Body {
    http_body_util::Empty::new().map_err(|never| match never {}).boxed_unsync()
}

/// HTTP/1.1 inside, whatever the client speaks.
async fn ask(
    wire: Wire,
    mut request: Request<Body>,
    protocol: Option<HeaderValue>,
) -> hyper::Result<(Response<Incoming>, AbortOnDropHandle<()>)> {
    *request.version_mut() = Version::HTTP_11;
    *request.uri_mut() = Uri::from(path(request.uri()));
    let unknown_size =
        !request.body().is_end_stream() && request.body().size_hint().exact().is_none();
    let headers = request.headers_mut();
    if unknown_size && !headers.contains_key(header::CONTENT_LENGTH) {
        // Said here, because for GET it would not be assumed, and the body would be lost.
        headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    let connection = match &protocol {
        Some(_) => "upgrade",
        None if headers.contains_key(header::TE) => "close, te",
        None => "close",
    };
    headers.insert(header::CONNECTION, HeaderValue::from_static(connection));
    if let Some(protocol) = protocol {
        headers.insert(header::UPGRADE, protocol);
    }
    let (mut sender, connection) = http1::handshake(TokioIo::new(wire)).await?;
    let connection = drive(connection.with_upgrades());
    Ok((sender.send_request(request).await?, connection))
}

/// HTTP/2 with prior knowledge, for gRPC.
async fn ask_http2(
    wire: Wire,
    mut request: Request<Body>,
) -> hyper::Result<(Response<Incoming>, AbortOnDropHandle<()>)> {
    // `:authority` says what Host says.
    let host = request.headers_mut().remove(header::HOST);
    let authority = host.as_ref().and_then(|host| host.to_str().ok()).unwrap_or("localhost");
    let target =
        Uri::builder().scheme("http").authority(authority).path_and_query(path(request.uri()));
    *request.uri_mut() = target.build().unwrap_or_else(|_| Uri::from(path(request.uri())));
    *request.version_mut() = Version::HTTP_2;
    let (mut sender, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(wire)).await?;
    let connection = drive(connection);
    Ok((sender.send_request(request).await?, connection))
}

fn path(uri: &Uri) -> PathAndQuery {
    uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"))
}

fn drive(
    connection: impl Future<Output = hyper::Result<()>> + Send + 'static,
) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(async move {
        // Whoever reads the response gets the error too.
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection inside broke");
        }
    }))
}

/// An ordinary answer.
fn stream(mut response: Response<Incoming>, held: InFlight) -> Response<Body> {
    torpor_headers::prepare_answer(response.headers_mut());
    *response.version_mut() = Version::HTTP_11;
    // The sandbox stays awake until the last byte: what keeps it so goes with the body.
    let pass = move |error: hyper::Error| {
        let _held = &held;
        error.into()
    };
    response.map(|body| body.map_err(pass).boxed_unsync())
}

/// An answer that ends HTTP on this connection: from now on bytes go both ways as they are.
fn switch(
    mut response: Response<Incoming>,
    client: Option<OnUpgrade>,
    held: InFlight,
    port: NonZeroU16,
) -> Result<Response<Body>, Error> {
    let Some(client) = client else {
        let source = "it switched protocols without being asked to".into();
        return Err(Error::BadAnswer { port, source });
    };
    let inside = hyper::upgrade::on(&mut response);
    tokio::spawn(async move {
        let both = async { tokio::try_join!(client, inside) };
        match timeout(UPGRADE_DEADLINE, both).await {
            Ok(Ok((client, inside))) => carry(client, inside, held).await,
            Ok(Err(error)) => tracing::debug!(%error, "an upgrade did not happen"),
            Err(_) => tracing::debug!("an upgrade took too long"),
        }
    });
    let protocol = response.headers_mut().remove(header::UPGRADE);
    let headers = response.headers_mut();
    torpor_headers::prepare_answer(headers);
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    if let Some(protocol) = protocol {
        headers.insert(header::UPGRADE, protocol);
    }
    Ok(response.map(|_| empty()))
}

/// Until both sides are done, or its time is up.
async fn carry(client: Upgraded, inside: Upgraded, held: InFlight) {
    let InFlight { _connection, lease, _permit, keep, until, _held } = held;
    let both = async {
        match keep {
            Some((fleet, keep)) => {
                let Some((stream, first)) = stream_of(inside).await else { return };
                // From now on the sandbox may fall asleep.
                drop(lease);
                let kept = Kept::new(fleet, keep, stream).after(first);
                kept.carry(TokioIo::new(client)).await;
            }
            None => {
                tunnel(client, inside).await;
                drop(lease);
            }
        }
    };
    Until::limit(until, both).await;
}

/// What is below an upgraded connection, with what came on it and was not read.
async fn stream_of(inside: Upgraded) -> Option<(Stream, Bytes)> {
    let parts = inside.downcast::<TokioIo<Wire>>().ok()?;
    let mut wire = parts.io.into_inner();
    wire.flush().await.ok()?;
    let (stream, unread) = wire.into_stream();
    Some((stream, parts.read_buf.into_iter().chain(unread).collect()))
}

async fn tunnel(client: Upgraded, inside: Upgraded) {
    let (from_client, to_client) = tokio::io::split(TokioIo::new(client));
    let (from_inside, to_inside) = tokio::io::split(TokioIo::new(inside));
    let mut inward = std::pin::pin!(pass(from_client, to_inside));
    let mut outward = std::pin::pin!(pass(from_inside, to_client));
    // Half-open connections are fine for a while, but not for ever: they hold a lease.
    let _ = tokio::select! {
        () = &mut inward => timeout(LINGER, outward).await,
        () = &mut outward => timeout(LINGER, inward).await,
    };
}

/// One direction. When it breaks, its other end learns by the end.
async fn pass(mut from: ReadHalf<TokioIo<Upgraded>>, mut to: WriteHalf<TokioIo<Upgraded>>) {
    if let Err(error) = tokio::io::copy(&mut from, &mut to).await {
        tracing::trace!(%error, "an upgraded connection broke");
    }
    let _ = to.shutdown().await;
}

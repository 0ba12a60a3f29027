//! The connection to the server that requests of one connection of a guest are passed on to: one at a
//! time, made anew when it is gone.

use std::sync::Arc;
use std::time::Duration;

use http::header::{self, HeaderValue};
use http::uri::{Authority as UriAuthority, Scheme};
use http::{Method, Request, Response, Uri, Version};
use hyper::body::{Body as HttpBody, Incoming};
use hyper::client::conn::{http1, http2};
use hyper::rt::Executor;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use torpor_lifecycle::chain;

use super::RequestContext;
use super::body::{Body, empty};
use super::refusal::Refusal;
use super::tasks::Tasks;
use crate::dialer::DialError;

/// How long a server may take for a TLS handshake.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(15);
/// How long a connection may take to be ready for the next request when the answer to the last one
/// has been read. It is otherwise made anew.
const READY_DEADLINE: Duration = Duration::from_secs(1);
/// How long a server may think before it answers. The guest may give up much earlier, and then nobody
/// waits; this only ends waits that everybody forgot.
const ANSWER_DEADLINE: Duration = Duration::from_secs(3600);

/// How both sides speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HttpVersion {
    Http1,
    Http2,
}

impl HttpVersion {
    /// What it is called in a TLS handshake.
    pub(super) fn token(self) -> &'static [u8] {
        match self {
            Self::Http1 => b"http/1.1",
            Self::Http2 => b"h2",
        }
    }
}

/// Where the requests go.
pub(super) struct Client {
    context: Arc<dyn RequestContext>,
    /// None: without TLS.
    tls: Option<ClientConfig>,
    tasks: Tasks,
    state: Mutex<State>,
}

/// Where the connection to a server stands.
enum State {
    /// There is none yet, or it is gone.
    None,
    /// It was tried ahead, in vain. The next request is told why, and the one after it tries again.
    Failed(Refusal),
    Open(Sender),
}

/// What became of a request that got no answer.
struct Lost {
    error: hyper::Error,
    /// It did not leave.
    unsent: Option<Request<Body>>,
    /// The connection was made for it.
    fresh: bool,
}

enum Sender {
    Http1(http1::SendRequest<Body>),
    Http2(http2::SendRequest<Body>),
}

impl Client {
    pub(super) fn new(
        context: Arc<dyn RequestContext>,
        tls: Option<ClientConfig>,
        tasks: Tasks,
    ) -> Self {
        Self { context, tls, tasks, state: Mutex::new(State::None) }
    }

    /// Whether what is sent there is encrypted.
    pub(super) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Connects already now, as one that speaks one of these; none if it can't be reached.
    pub(super) async fn connect(&mut self, offered: &[HttpVersion]) -> Option<HttpVersion> {
        let (state, version) = match self.open(offered).await {
            Ok((sender, version)) => (State::Open(sender), Some(version)),
            Err(refusal) => (State::Failed(refusal), None),
        };
        *self.state.get_mut() = state;
        version
    }

    /// Passes a request on, whose target has no host, and waits for the answer.
    pub(super) async fn ask(
        &self,
        mut request: Request<Body>,
        version: HttpVersion,
        authority: &HeaderValue,
        protocol: Option<&HeaderValue>,
    ) -> Result<Response<Incoming>, Refusal> {
        match version {
            HttpVersion::Http1 => fit_http1(&mut request, authority, protocol),
            HttpVersion::Http2 => fit_http2(&mut request, authority)?,
        }
        let asked = timeout(ANSWER_DEADLINE, self.ask_twice(request, version)).await;
        let host = || self.context.host().to_owned();
        asked.map_err(|_| Refusal::Slow { host: host(), limit: ANSWER_DEADLINE })?
    }

    /// A connection that lay idle may end in the very moment it is used. So what did not leave, and
    /// what only asks, is sent once more on a fresh one.
    async fn ask_twice(
        &self,
        request: Request<Body>,
        version: HttpVersion,
    ) -> Result<Response<Incoming>, Refusal> {
        let copy = copy(&request);
        let lost = match self.ask_once(request, version).await? {
            Ok(answer) => return Ok(answer),
            Err(lost) => lost,
        };
        let again = lost.unsent.or(copy.filter(|_| !lost.fresh));
        let Some(again) = again else { return Err(self.bad_answer(&lost.error)) };
        let asked = self.ask_once(again, version).await?;
        asked.map_err(|lost| self.bad_answer(&lost.error))
    }

    async fn ask_once(
        &self,
        request: Request<Body>,
        version: HttpVersion,
    ) -> Result<Result<Response<Incoming>, Lost>, Refusal> {
        let mut state = self.state.lock().await;
        let kept = match std::mem::replace(&mut *state, State::None) {
            State::Failed(refusal) => return Err(refusal),
            State::Open(sender) => sender.usable().await,
            State::None => None,
        };
        let fresh = kept.is_none();
        let mut sender = match kept {
            Some(sender) => sender,
            None => self.open(&[version]).await?.0,
        };
        let asked = match &mut sender {
            Sender::Http1(http1) => {
                // The next request comes when this one is answered: nobody waits for the lock.
                let asked = http1.try_send_request(request).await;
                *state = State::Open(sender);
                asked
            }
            Sender::Http2(http2) => {
                let mut http2 = http2.clone();
                *state = State::Open(sender);
                drop(state);
                http2.try_send_request(request).await
            }
        };
        Ok(asked.map_err(|mut lost| {
            let unsent = lost.take_message();
            Lost { error: lost.into_error(), unsent, fresh }
        }))
    }

    async fn open(&self, offered: &[HttpVersion]) -> Result<(Sender, HttpVersion), Refusal> {
        let (host, port) = (self.context.host(), self.context.port());
        let dialed = self.context.dial(host, port).await;
        let stream = dialed.map_err(|error| match error {
            DialError::Denied { rule } => {
                Refusal::Denied { what: format!("connections to {host}"), rule }
            }
            DialError::Unresolved(_)
            | DialError::Unreachable { .. }
            | DialError::Gateway { .. }
            | DialError::Cut => self.unreachable(&chain(&error)),
        })?;
        let Some(config) = &self.tls else {
            return Ok((self.speak(stream, HttpVersion::Http1).await?, HttpVersion::Http1));
        };
        let mut config = config.clone();
        config.alpn_protocols = offered.iter().map(|version| version.token().to_vec()).collect();
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|_| self.unreachable("its name is none of a server"))?;
        let shaking = TlsConnector::from(Arc::new(config)).connect(name, stream);
        let shaken = timeout(HANDSHAKE_DEADLINE, shaking).await;
        let stream = shaken
            .map_err(|_| self.unreachable("its TLS handshake takes too long"))?
            .map_err(|error| self.unreachable(&chain(&error)))?;
        let version = match stream.get_ref().1.alpn_protocol() {
            Some(token) if token == HttpVersion::Http2.token() => HttpVersion::Http2,
            Some(_) | None => HttpVersion::Http1,
        };
        if !offered.contains(&version) {
            return Err(
                self.unreachable("it does not speak the version of HTTP that was asked for")
            );
        }
        Ok((self.speak(stream, version).await?, version))
    }

    async fn speak<S>(&self, stream: S, version: HttpVersion) -> Result<Sender, Refusal>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let stream = TokioIo::new(stream);
        match version {
            HttpVersion::Http1 => {
                let (sender, connection) =
                    http1::handshake(stream).await.map_err(|error| self.bad_answer(&error))?;
                // Whoever waits for an answer gets the error too.
                self.tasks.execute(connection.with_upgrades());
                Ok(Sender::Http1(sender))
            }
            HttpVersion::Http2 => {
                let (sender, connection) = http2::handshake(self.tasks.clone(), stream)
                    .await
                    .map_err(|error| self.bad_answer(&error))?;
                self.tasks.execute(connection);
                Ok(Sender::Http2(sender))
            }
        }
    }

    fn unreachable(&self, why: &str) -> Refusal {
        Refusal::Unreachable { host: self.context.host().to_owned(), why: why.to_owned() }
    }

    fn bad_answer(&self, error: &hyper::Error) -> Refusal {
        Refusal::BadAnswer { host: self.context.host().to_owned(), why: chain(error) }
    }
}

impl Sender {
    /// Itself, if the next request can be sent on it.
    async fn usable(mut self) -> Option<Self> {
        let usable = match &mut self {
            Self::Http1(sender) => {
                matches!(timeout(READY_DEADLINE, sender.ready()).await, Ok(Ok(())))
            }
            Self::Http2(sender) => sender.ready().await.is_ok(),
        };
        usable.then_some(self)
    }
}

fn fit_http1(request: &mut Request<Body>, authority: &HeaderValue, protocol: Option<&HeaderValue>) {
    *request.version_mut() = Version::HTTP_11;
    let unknown_size =
        !request.body().is_end_stream() && request.body().size_hint().exact().is_none();
    let headers = request.headers_mut();
    headers.insert(header::HOST, authority.clone());
    if unknown_size && !headers.contains_key(header::CONTENT_LENGTH) {
        // Said here, because for GET it would not be assumed, and the body would be lost.
        headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    if let Some(protocol) = protocol {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol.clone());
    } else if headers.contains_key(header::TE) {
        headers.insert(header::CONNECTION, HeaderValue::from_static("te"));
    }
}

fn fit_http2(request: &mut Request<Body>, authority: &HeaderValue) -> Result<(), Refusal> {
    *request.version_mut() = Version::HTTP_2;
    let wrong = || Refusal::Malformed("it names no host");
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    parts.scheme = Some(Scheme::HTTPS);
    parts.authority = Some(UriAuthority::try_from(authority.as_bytes()).map_err(|_| wrong())?);
    *request.uri_mut() = Uri::from_parts(parts).map_err(|_| wrong())?;
    Ok(())
}

/// The same request once more, if it only asks and has no body.
fn copy(request: &Request<Body>) -> Option<Request<Body>> {
    let asks = matches!(*request.method(), Method::GET | Method::HEAD);
    if !asks || !request.body().is_end_stream() || request.headers().contains_key(header::UPGRADE) {
        return None;
    }
    let mut copy = Request::new(empty());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    Some(copy)
}

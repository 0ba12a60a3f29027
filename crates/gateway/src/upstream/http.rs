//! MCP over HTTP, from the side of a client: the streamable transport in both eras, and the old one with a
//! stream of events beside posted messages.
//!
//! - A redirect is not followed: whatever is behind it was not chosen by the operator.
//! - The modern era is tried first; a server that does not know it is asked to initialize.

mod headers;
mod old;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::http::header::{ACCEPT, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use serde_json::Value;
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::time::timeout;
use torpor_egress::outgoing::{self, SendError};
use torpor_protocol::mcp_gateway::McpHttpServer;
use torpor_service::{Error, Result, Service};

use super::oauth::Tokens;
use super::rpc::{self, Era, Message};
use super::sse::Parser;
use super::{Bounds, Hello, Pinned, UpstreamError, secrets};

const SESSION: &str = "mcp-session-id";
/// Bytes of an answer to a greeting.
const HELLO: Bounds = Bounds { bytes: 256 * 1024, within: Duration::from_secs(30) };
/// How long a server may take for a word that nobody waits for.
const WORD: Duration = Duration::from_secs(5);
/// Requests of a server in one stream that are answered: a sign of life now and then.
const ASKED_MAX: usize = 64;
/// Headers of one server.
const HEADERS_MAX: usize = 32;

pub(super) struct Http {
    service: Arc<Service>,
    spec: McpHttpServer,
    tokens: Tokens,
    session: Mutex<Option<Arc<Session>>>,
    generation: Arc<AtomicU64>,
    next_id: AtomicU64,
}

/// How a server is spoken to since it was greeted.
struct Session {
    era: Era,
    id: Option<HeaderValue>,
    hello: Hello,
}

/// A message, and what it is sent with.
struct Posted<'a> {
    message: &'a Value,
    /// Of the arguments, those that stand in headers as well.
    promoted: HeaderMap,
    session: Option<&'a Arc<Session>>,
}

impl<'a> Posted<'a> {
    fn of(message: &'a Value) -> Self {
        Self { message, promoted: HeaderMap::new(), session: None }
    }
}

/// Says so when nobody waits for the answer to a request any more.
struct Waiting<'a> {
    http: &'a Arc<Http>,
    session: &'a Arc<Session>,
    id: Option<u64>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.http.say(self.session, rpc::cancelled(id));
        }
    }
}

/// What of an answer's head says how to go on.
enum Answered {
    Message(std::result::Result<Value, UpstreamError>, Option<HeaderValue>),
    /// It does not understand the request as such.
    Status(StatusCode),
}

pub(super) fn check(service: &Service, spec: &McpHttpServer) -> Result<()> {
    let checked = service.egress.outgoing().check(&spec.url);
    checked.map_err(|error| Error::invalid(format!("url: {error}")))?;
    check_headers(&spec.headers)?;
    if let Some(oauth) = &spec.oauth {
        let checked = service.egress.outgoing().check(&oauth.token_url);
        checked.map_err(|error| Error::invalid(format!("oauth.token_url: {error}")))?;
        secrets::check(&oauth.client_secret)
            .map_err(|why| Error::invalid(format!("oauth.client_secret: {why}")))?;
    }
    Ok(())
}

pub(super) fn check_headers(headers: &torpor_protocol::spec::Pairs) -> Result<()> {
    if headers.len() > HEADERS_MAX {
        return Err(Error::invalid(format!("headers: at most {HEADERS_MAX}")));
    }
    for (name, value) in headers {
        let wrong = |why: &str| Error::invalid(format!("headers.{name}: {why}"));
        HeaderName::try_from(name).map_err(|_| wrong("that is no name of a header"))?;
        secrets::check(value).map_err(|why| wrong(&why))?;
    }
    Ok(())
}

impl Http {
    pub(super) fn new(
        service: &Arc<Service>,
        spec: McpHttpServer,
        generation: Arc<AtomicU64>,
    ) -> Self {
        Self {
            service: Arc::clone(service),
            tokens: Tokens::new(spec.oauth.clone(), spec.url.clone()),
            spec,
            session: Mutex::default(),
            generation,
            next_id: AtomicU64::new(1),
        }
    }

    pub(super) async fn hello(self: &Arc<Self>) -> std::result::Result<Hello, UpstreamError> {
        if self.spec.sse {
            let mut stream = self.open_stream().await?;
            return stream.greet(self).await;
        }
        // Without a session it is asked for anew with each list.
        self.session.lock().await.take_if(|session| session.id.is_none());
        Ok(self.session().await?.hello.clone())
    }

    pub(super) async fn ask(
        self: &Arc<Self>,
        method: &str,
        params: Value,
        bounds: Bounds,
        pinned: Option<Pinned<'_>>,
    ) -> std::result::Result<Value, UpstreamError> {
        if self.spec.sse {
            let mut stream = self.open_stream().await?;
            stream.greet(self).await?;
            return stream
                .ask(self, &rpc::request(2, method, params, &stream.era.clone()), 2, bounds)
                .await;
        }
        let session = self.session().await?;
        let generation = self.generation.load(Ordering::Acquire);
        if pinned.is_some_and(|pinned| pinned.generation != generation) {
            return Err(UpstreamError::Reconnected);
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let schema = pinned.and_then(|pinned| pinned.schema);
        let promoted = match session.era {
            Era::Modern => headers::promoted(schema, &params["arguments"]),
            Era::Legacy(_) => HeaderMap::new(),
        };
        let request = rpc::request(id, method, params, &session.era);
        let asked = Posted { message: &request, promoted, session: Some(&session) };
        let mut waiting = Waiting { http: self, session: &session, id: Some(id) };
        let answered = self.post(&asked, id, bounds).await;
        // Told, or failed: it is not taken back any more.
        waiting.id = waiting.id.filter(|_| matches!(answered, Err(UpstreamError::Timeout(_))));
        match answered? {
            Answered::Message(outcome, _) => outcome,
            Answered::Status(StatusCode::NOT_FOUND) if session.id.is_some() => {
                *self.session.lock().await = None;
                Err(UpstreamError::Reconnected)
            }
            Answered::Status(status) => Err(refused(status)),
        }
    }

    async fn session(self: &Arc<Self>) -> std::result::Result<Arc<Session>, UpstreamError> {
        let mut held = self.session.lock().await;
        if let Some(session) = &*held {
            return Ok(Arc::clone(session));
        }
        let session = self.greet().await?;
        *held = Some(Arc::clone(&session));
        Ok(session)
    }

    async fn greet(self: &Arc<Self>) -> std::result::Result<Arc<Session>, UpstreamError> {
        let discover = rpc::request(0, "server/discover", serde_json::json!({}), &Era::Modern);
        match self.post(&Posted::of(&discover), 0, HELLO).await? {
            Answered::Message(Ok(result), _) => {
                let hello = rpc::hello(&result, &Era::Modern);
                return Ok(self.begun(Era::Modern, None, hello));
            }
            Answered::Message(
                Err(UpstreamError::Refused { .. } | UpstreamError::BadAnswer(_)),
                _,
            ) => {}
            Answered::Message(Err(error), _) => return Err(error),
            Answered::Status(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
                return Err(refused(StatusCode::UNAUTHORIZED));
            }
            Answered::Status(status) if status.is_redirection() || status.is_server_error() => {
                return Err(refused(status));
            }
            Answered::Status(_) => {}
        }
        let (result, id) = match self.post(&Posted::of(&rpc::initialize(0)), 0, HELLO).await? {
            Answered::Message(result, id) => (result?, id),
            Answered::Status(status) => return Err(refused(status)),
        };
        let era = rpc::agreed(&result);
        let session = self.begun(era.clone(), id, rpc::hello(&result, &era));
        let initialized = rpc::initialized();
        self.post_only(&Posted { session: Some(&session), ..Posted::of(&initialized) }).await?;
        Ok(session)
    }

    fn begun(&self, era: Era, id: Option<HeaderValue>, hello: Hello) -> Arc<Session> {
        // Without a session there is nothing that could be made anew.
        if id.is_some() {
            self.changed();
        }
        Arc::new(Session { era, id, hello })
    }

    /// Posts a message and reads what is answered to this id.
    async fn post(
        self: &Arc<Self>,
        asked: &Posted<'_>,
        id: u64,
        bounds: Bounds,
    ) -> std::result::Result<Answered, UpstreamError> {
        let mut response = self.send(asked, bounds.within).await?;
        if response.status() == StatusCode::UNAUTHORIZED && self.tokens.forget().await {
            response = self.send(asked, bounds.within).await?;
        }
        let kind = response
            .headers()
            .get(CONTENT_TYPE)
            .and_then(|kind| kind.to_str().ok())
            .unwrap_or_default();
        let (streamed, json) =
            (kind.starts_with("text/event-stream"), kind.starts_with("application/json"));
        let (status, session_id) = (response.status(), response.headers().get(SESSION).cloned());
        if streamed && status.is_success() {
            let outcome = self.read_events(response.into_body(), id, bounds, asked.session).await;
            return Ok(Answered::Message(outcome, session_id));
        }
        if !json {
            return Ok(Answered::Status(status));
        }
        let body = self.whole(response.into_body(), bounds).await?;
        let Ok(mut message) = serde_json::from_slice::<Value>(&body) else {
            let wrong = UpstreamError::BadAnswer("the server's answer is no JSON".to_owned());
            return Ok(Answered::Message(Err(wrong), session_id));
        };
        // An error of HTTP with a JSON body that is none of JSON-RPC.
        if !status.is_success() && message.get("error").is_none_or(|error| !error.is_object()) {
            return Ok(Answered::Status(status));
        }
        let in_session = asked.session.is_some_and(|session| session.id.is_some());
        if status == StatusCode::NOT_FOUND && in_session {
            return Ok(Answered::Status(status));
        }
        Ok(Answered::Message(rpc::outcome(&mut message), session_id))
    }

    async fn post_only(&self, asked: &Posted<'_>) -> std::result::Result<(), UpstreamError> {
        let response = self.send(asked, HELLO.within).await?;
        match response.status() {
            status if status.is_success() => Ok(()),
            status => Err(refused(status)),
        }
    }

    async fn send(
        &self,
        asked: &Posted<'_>,
        within: Duration,
    ) -> std::result::Result<Response<Incoming>, UpstreamError> {
        let method = asked.message["method"].as_str().unwrap_or_default();
        let mut headers = asked.promoted.clone();
        let era = match asked.session {
            Some(session) => Some(&session.era),
            None if method == "initialize" => None,
            None => Some(&Era::Modern),
        };
        if let Some(era) = era {
            headers.insert("mcp-protocol-version", headers::value(era.version()));
            if *era == Era::Modern {
                headers.insert("mcp-method", headers::value(method));
                if let Some(name) = asked.message["params"]["name"].as_str() {
                    headers.insert("mcp-name", headers::value(name));
                }
            }
        }
        if let Some(id) = asked.session.and_then(|session| session.id.as_ref()) {
            headers.insert(SESSION, id.clone());
        }
        self.send_to(&self.spec.url, asked.message, headers, within).await
    }

    async fn send_to(
        &self,
        url: &str,
        message: &Value,
        more: HeaderMap,
        within: Duration,
    ) -> std::result::Result<Response<Incoming>, UpstreamError> {
        let mut request = self.request(Method::POST, url, Bytes::from(message.to_string())).await?;
        let headers = request.headers_mut();
        headers.extend(more);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
        self.service.egress.outgoing().send(request, within).await.map_err(unsent)
    }

    /// With the operator's headers, and nothing of any client.
    async fn request(
        &self,
        method: Method,
        url: &str,
        body: Bytes,
    ) -> std::result::Result<Request<Bytes>, UpstreamError> {
        let wrong = |what: &str| UpstreamError::Unreachable(format!("{what} can't be sent"));
        let uri: Uri = url.parse().map_err(|_| wrong("this URL"))?;
        let mut request = Request::new(body);
        *request.method_mut() = method;
        let mut all = Vec::new();
        for (name, text) in &self.spec.headers {
            all.push((name.as_str(), secrets::revealed(&self.service, text, &uri).await?));
        }
        // As it is: who gives tokens names no secrets of ours.
        if let Some(token) = self.tokens.get(&self.service).await? {
            all.push(("authorization", format!("Bearer {token}")));
        }
        for (name, value) in all {
            let mut value =
                HeaderValue::try_from(value).map_err(|_| wrong("the value of a header"))?;
            value.set_sensitive(true);
            let name = HeaderName::try_from(name).map_err(|_| wrong("the name of a header"))?;
            request.headers_mut().insert(name, value);
        }
        *request.uri_mut() = uri;
        Ok(request)
    }

    async fn whole(
        &self,
        body: Incoming,
        bounds: Bounds,
    ) -> std::result::Result<Bytes, UpstreamError> {
        outgoing::whole(&self.spec.url, body, bounds.bytes, bounds.within).await.map_err(unsent)
    }

    /// What a stream answers to this id; what else it says is heard on the way.
    async fn read_events(
        self: &Arc<Self>,
        mut body: Incoming,
        id: u64,
        bounds: Bounds,
        session: Option<&Arc<Session>>,
    ) -> std::result::Result<Value, UpstreamError> {
        let (mut parser, mut bytes, mut asked) = (Parser::new(bounds.bytes), 0, 0);
        let too_long = || UpstreamError::TooLong(bounds.bytes);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| UpstreamError::BadAnswer(error.to_string()))?;
            let Ok(data) = frame.into_data() else { continue };
            bytes += data.len();
            if bytes > bounds.bytes.saturating_mul(2) {
                return Err(too_long());
            }
            for event in parser.push(&data).map_err(|_| too_long())? {
                let Ok(message) = serde_json::from_str(&event.data) else { continue };
                match rpc::understand(message) {
                    Message::Answer(answered, outcome) if answered == id => return outcome,
                    Message::ListChanged => self.changed(),
                    // Whoever is asked in a stream answers by a post of its own.
                    Message::Asked(answer) if asked < ASKED_MAX => {
                        asked += 1;
                        session.inspect(|session| self.say(session, answer));
                    }
                    Message::Asked(_) | Message::Answer(..) | Message::Other => {}
                }
            }
        }
        Err(UpstreamError::BadAnswer("the server ended its stream without an answer".to_owned()))
    }

    /// A word that nobody waits for. The newest revision has none: there, closing a request says enough.
    fn say(self: &Arc<Self>, session: &Arc<Session>, word: Value) {
        let (Era::Legacy(_), Ok(runtime)) = (&session.era, Handle::try_current()) else { return };
        let (http, session) = (Arc::clone(self), Arc::clone(session));
        runtime.spawn(async move {
            let posted = Posted { session: Some(&session), ..Posted::of(&word) };
            let _ = timeout(WORD, http.post_only(&posted)).await;
        });
    }

    fn changed(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }
}

fn refused(status: StatusCode) -> UpstreamError {
    let why = match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            ": it does not let the gateway in; see the headers and secrets of the server"
        }
        status if status.is_redirection() => ", a redirect, which is not followed",
        _ => "",
    };
    UpstreamError::Unreachable(format!(
        "the server answered with HTTP status {}{why}",
        status.as_u16()
    ))
}

pub(super) fn unsent(error: SendError) -> UpstreamError {
    match error {
        SendError::Slow { limit, .. } => UpstreamError::Timeout(limit),
        SendError::TooLong { limit } => UpstreamError::TooLong(limit),
        SendError::BadAnswer { .. } => UpstreamError::BadAnswer(error.to_string()),
        SendError::BadUrl(_) | SendError::Closed { .. } | SendError::Unreachable { .. } => {
            UpstreamError::Unreachable(error.to_string())
        }
    }
}

//! MCP over HTTP, from the side of a client: the streamable transport in both eras, and the old one with a
//! stream of events beside posted messages.
//!
//! - A redirect is not followed: whatever is behind it was not chosen by the operator.
//! - The modern era is tried first; a server that does not know it is asked to initialize.

mod old;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::http::header::{ACCEPT, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::http::{Method, Request, Response, StatusCode, Uri};
use serde_json::Value;
use tokio::sync::Mutex;
use torpor_egress::outgoing::{self, SendError};
use torpor_protocol::mcp_gateway::McpHttpServer;
use torpor_service::{Error, Result, Service};

use super::oauth::Tokens;
use super::rpc::{self, Era, Message};
use super::sse::Parser;
use super::{Bounds, Hello, UpstreamError, secrets};

const SESSION: &str = "mcp-session-id";
/// Bytes of an answer to a greeting.
const HELLO: Bounds = Bounds { bytes: 256 * 1024, within: Duration::from_secs(30) };
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

    pub(super) async fn hello(&self) -> std::result::Result<Hello, UpstreamError> {
        if self.spec.sse {
            let mut stream = self.open_stream().await?;
            return stream.greet(self).await;
        }
        // Without a session it is asked for anew with each list.
        self.session.lock().await.take_if(|session| session.id.is_none());
        Ok(self.session().await?.hello.clone())
    }

    pub(super) async fn ask(
        &self,
        method: &str,
        params: Value,
        bounds: Bounds,
        generation: Option<u64>,
    ) -> std::result::Result<Value, UpstreamError> {
        if self.spec.sse {
            let mut stream = self.open_stream().await?;
            stream.greet(self).await?;
            return stream
                .ask(self, &rpc::request(2, method, params, &stream.era.clone()), 2, bounds)
                .await;
        }
        let session = self.session().await?;
        if generation.is_some_and(|wanted| wanted != self.generation.load(Ordering::Acquire)) {
            return Err(UpstreamError::Reconnected);
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let request = rpc::request(id, method, params, &session.era);
        match self.post(&request, id, Some(&session), bounds).await? {
            Answered::Message(outcome, _) => outcome,
            Answered::Status(StatusCode::NOT_FOUND) if session.id.is_some() => {
                *self.session.lock().await = None;
                Err(UpstreamError::Reconnected)
            }
            Answered::Status(status) => Err(refused(status)),
        }
    }

    async fn session(&self) -> std::result::Result<Arc<Session>, UpstreamError> {
        let mut held = self.session.lock().await;
        if let Some(session) = &*held {
            return Ok(Arc::clone(session));
        }
        let session = Arc::new(self.greet().await?);
        *held = Some(Arc::clone(&session));
        Ok(session)
    }

    async fn greet(&self) -> std::result::Result<Session, UpstreamError> {
        let discover = rpc::request(0, "server/discover", serde_json::json!({}), &Era::Modern);
        match self.post(&discover, 0, None, HELLO).await? {
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
        let (result, id) = match self.post(&rpc::initialize(0), 0, None, HELLO).await? {
            Answered::Message(result, id) => (result?, id),
            Answered::Status(status) => return Err(refused(status)),
        };
        let era = rpc::agreed(&result);
        let session = self.begun(era.clone(), id, rpc::hello(&result, &era));
        self.post_only(&rpc::initialized(), Some(&session)).await?;
        Ok(session)
    }

    fn begun(&self, era: Era, id: Option<HeaderValue>, hello: Hello) -> Session {
        // Without a session there is nothing that could be made anew.
        if id.is_some() {
            self.changed();
        }
        Session { era, id, hello }
    }

    /// Posts a message and reads what is answered to this id.
    async fn post(
        &self,
        message: &Value,
        id: u64,
        session: Option<&Session>,
        bounds: Bounds,
    ) -> std::result::Result<Answered, UpstreamError> {
        let mut response = self.send(message, session, bounds.within).await?;
        if response.status() == StatusCode::UNAUTHORIZED && self.tokens.forget().await {
            response = self.send(message, session, bounds.within).await?;
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
            let outcome = self.read_events(response.into_body(), id, bounds).await;
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
        if status == StatusCode::NOT_FOUND && session.is_some_and(|session| session.id.is_some()) {
            return Ok(Answered::Status(status));
        }
        Ok(Answered::Message(rpc::outcome(&mut message), session_id))
    }

    async fn post_only(
        &self,
        message: &Value,
        session: Option<&Session>,
    ) -> std::result::Result<(), UpstreamError> {
        let response = self.send(message, session, HELLO.within).await?;
        match response.status() {
            status if status.is_success() => Ok(()),
            status => Err(refused(status)),
        }
    }

    async fn send(
        &self,
        message: &Value,
        session: Option<&Session>,
        within: Duration,
    ) -> std::result::Result<Response<Incoming>, UpstreamError> {
        self.send_to(&self.spec.url, message, session.map(|it| (&it.era, it.id.as_ref())), within)
            .await
    }

    async fn send_to(
        &self,
        url: &str,
        message: &Value,
        session: Option<(&Era, Option<&HeaderValue>)>,
        within: Duration,
    ) -> std::result::Result<Response<Incoming>, UpstreamError> {
        let mut request = self.request(Method::POST, url, Bytes::from(message.to_string())).await?;
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
        let method = message["method"].as_str().unwrap_or_default();
        let era = match session {
            Some((era, _)) => Some(era),
            None if method == "initialize" => None,
            None => Some(&Era::Modern),
        };
        if let Some(era) = era {
            put(headers, "mcp-protocol-version", era.version());
            if *era == Era::Modern {
                put(headers, "mcp-method", method);
                if let Some(name) = message["params"]["name"].as_str() {
                    put(headers, "mcp-name", name);
                }
            }
        }
        if let Some((_, Some(id))) = session {
            headers.insert(SESSION, id.clone());
        }
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
        &self,
        mut body: Incoming,
        id: u64,
        bounds: Bounds,
    ) -> std::result::Result<Value, UpstreamError> {
        let (mut parser, mut bytes) = (Parser::new(bounds.bytes), 0);
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
                    // Whoever is asked in a stream answers by a post of its own, which nobody waits for.
                    Message::Asked(_) | Message::Answer(..) | Message::Other => {}
                }
            }
        }
        Err(UpstreamError::BadAnswer("the server ended its stream without an answer".to_owned()))
    }

    fn changed(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }
}

pub(super) fn put(headers: &mut hyper::HeaderMap, name: &'static str, value: &str) {
    use base64::Engine as _;
    let value = HeaderValue::try_from(value).unwrap_or_else(|_| {
        let encoded = base64::engine::general_purpose::STANDARD.encode(value);
        HeaderValue::try_from(format!("=?base64?{encoded}?="))
            .unwrap_or(HeaderValue::from_static(""))
    });
    headers.insert(name, value);
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

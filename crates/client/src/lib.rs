//! The client of the HTTP API: for the command line, and for any program that uses sandboxes. It shows
//! nothing to anybody.
//!
//! HTTP/1.1 over TCP or TLS with connections kept for the next request. Bodies are streamed, answers that
//! are no success become [`Error::Refused`], and a WebSocket is an upgraded request, so that a
//! refusal before the upgrade is an ordinary error with its body.

pub mod body;
mod error;
mod lines;
mod mcp;
mod route;
mod sandboxes;
mod wire;

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::request::Builder;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::{client::generate_key, derive_accept_key};
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};
use torpor_protocol::api::{IDEMPOTENCY_HEADER, PREVIEW_HEADER};
use torpor_protocol::page::Page;
use torpor_protocol::{ErrorBody, ErrorCode};

use body::Body;
use wire::{Connector, Distrusted};

pub use error::{Error, Result, Subject};
pub use lines::Lines;
pub use mcp::Messages;
pub use route::{Route, Server};

/// A daemon that does not take a connection in this time is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an answer that is not a stream may take: longer than anything the daemon waits for.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// Finds out that the other computer is gone while a stream is quiet.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Largest JSON answer: a list of all sandboxes of a large host fits many times.
const ANSWER_MAX: usize = 256 * 1024 * 1024;
/// Largest WebSocket message: output comes in pieces of 128 KiB.
const MESSAGE_MAX: usize = 4 * 1024 * 1024;
/// Characters that are kept of an answer that is none of ours.
const STRANGE_MAX: usize = 1000;

const JSON: &str = "application/json";

/// A WebSocket to the daemon.
pub type Socket = WebSocketStream<TokioIo<hyper::upgrade::Upgraded>>;

type Http = hyper_util::client::legacy::Client<Connector, Body>;

/// Speaks to one daemon. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Client {
    http: Http,
    server: Server,
    key: Option<HeaderValue>,
}

impl Client {
    pub fn new(server: Server, api_key: Option<&str>) -> Result<Self> {
        Self::believing(server, api_key, None)
    }

    /// Believes the certificates in a file (PEM), besides those of this computer.
    pub fn believing(
        server: Server,
        api_key: Option<&str>,
        authorities: Option<&Path>,
    ) -> Result<Self> {
        let key = api_key.map(|key| HeaderValue::try_from(format!("Bearer {key}"))).transpose();
        let key = key.map_err(|_| Error::BadKey)?;
        let connector = Connector::new(server.is_encrypted(), authorities)?;
        let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .build(connector);
        Ok(Self { http, server, key })
    }

    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Whether it shows a key.
    pub fn has_key(&self) -> bool {
        self.key.is_some()
    }

    pub async fn get<T: DeserializeOwned>(&self, route: &Route) -> Result<T> {
        within(async { read_json(self.send(Method::GET, route, body::empty()).await?).await }).await
    }

    /// As [`Self::get`]; none if the daemon says that this is `missing`.
    pub async fn find<T: DeserializeOwned>(
        &self,
        route: &Route,
        missing: ErrorCode,
    ) -> Result<Option<T>> {
        match self.get(route).await {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.code() == Some(missing) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All pages of a list.
    pub async fn list<T: Page + DeserializeOwned>(&self, route: &Route) -> Result<T> {
        let (mut all, mut cursor) = self.get::<T>(route).await?.into_parts();
        while let Some(next) = cursor {
            let page: T = self.get(&route.clone().query("cursor", &next)).await?;
            let (more, after) = page.into_parts();
            all.extend(more);
            cursor = after;
        }
        Ok(T::new(all, None))
    }

    pub async fn post<T: DeserializeOwned>(
        &self,
        route: &Route,
        value: &impl Serialize,
    ) -> Result<T> {
        within(self.ask(Method::POST, route, value)).await
    }

    /// As [`Self::post`], once: asked again with the same key it gives the same answer.
    pub async fn post_once<T: DeserializeOwned>(
        &self,
        route: &Route,
        key: &str,
        value: &impl Serialize,
    ) -> Result<T> {
        let request = self.request(Method::POST, route).header(header::CONTENT_TYPE, JSON);
        let request = request.header(IDEMPOTENCY_HEADER, key);
        within(async { read_json(self.exchange(request, route, encode(value)).await?).await }).await
    }

    pub async fn patch<T: DeserializeOwned>(
        &self,
        route: &Route,
        value: &impl Serialize,
    ) -> Result<T> {
        within(self.ask(Method::PATCH, route, value)).await
    }

    pub async fn put<T: DeserializeOwned>(
        &self,
        route: &Route,
        value: &impl Serialize,
    ) -> Result<T> {
        within(self.ask(Method::PUT, route, value)).await
    }

    /// JSON both ways, however long the answer takes: a user's command decides that.
    pub async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        route: &Route,
        value: &impl Serialize,
    ) -> Result<T> {
        read_json(self.dispatch(method, route, JSON, encode(value)).await?).await
    }

    /// Sends a JSON body and expects no answer but success.
    pub async fn command(
        &self,
        method: Method,
        route: &Route,
        value: &impl Serialize,
    ) -> Result<()> {
        within(async { self.dispatch(method, route, JSON, encode(value)).await.map(drop) }).await
    }

    pub async fn delete(&self, route: &Route) -> Result<()> {
        within(async { self.send(Method::DELETE, route, body::empty()).await.map(drop) }).await
    }

    /// Sends bytes, however long that takes, and reads the answer as JSON.
    pub async fn upload<T: DeserializeOwned>(
        &self,
        method: Method,
        route: &Route,
        body: Body,
    ) -> Result<T> {
        read_json(self.send(method, route, body).await?).await
    }

    /// A request whose answer is NDJSON.
    pub async fn lines<T: DeserializeOwned>(
        &self,
        method: Method,
        route: &Route,
        body: Body,
    ) -> Result<Lines<T>> {
        Ok(Lines::new(self.send(method, route, body).await?.into_body()))
    }

    /// What follows at this place, as server-sent events.
    pub async fn events<T: DeserializeOwned>(&self, route: &Route) -> Result<Lines<T>> {
        let answer = self.send(Method::GET, route, body::empty()).await?;
        Ok(Lines::events(answer.into_body()))
    }

    /// A request with a JSON body whose answer is NDJSON.
    pub async fn follow<T: DeserializeOwned>(
        &self,
        route: &Route,
        value: &impl Serialize,
    ) -> Result<Lines<T>> {
        let answer = self.dispatch(Method::POST, route, JSON, encode(value)).await?;
        Ok(Lines::new(answer.into_body()))
    }

    /// Sends bytes; the answer is a success and its body has yet to be read.
    pub async fn send(
        &self,
        method: Method,
        route: &Route,
        body: Body,
    ) -> Result<Response<Incoming>> {
        self.dispatch(method, route, "application/octet-stream", body).await
    }

    async fn dispatch(
        &self,
        method: Method,
        route: &Route,
        content_type: &'static str,
        body: Body,
    ) -> Result<Response<Incoming>> {
        let request = self.request(method, route).header(header::CONTENT_TYPE, content_type);
        self.exchange(request, route, body).await
    }

    /// The head of an answer that is a success, or an upgrade. Boxed: HTTP is compiled in this crate and
    /// not again in those that use it.
    fn exchange<'a>(
        &'a self,
        request: Builder,
        route: &'a Route,
        body: Body,
    ) -> BoxFuture<'a, Result<Response<Incoming>>> {
        let answered = async move {
            let request = request.body(body).map_err(bad_request)?;
            let response = self.http.request(request).await.map_err(|error| self.broken(&error))?;
            let status = response.status();
            if status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS {
                return Ok(response);
            }
            Err(refused(route, response).await)
        };
        answered.boxed()
    }

    /// What a port of a sandbox (`3000-web`) answers to `GET /`, as a browser would ask it.
    pub async fn preview(&self, address: &str) -> Result<Bytes> {
        let route = Route::new("/");
        let request = self.request(Method::GET, &route).header(PREVIEW_HEADER, address);
        let response = self.exchange(request, &route, body::empty()).await?;
        let body = response.into_body().collect().await;
        Ok(body.map_err(|error| Error::garbled("the answer broke off", error))?.to_bytes())
    }

    /// A WebSocket.
    pub async fn socket(&self, route: &Route) -> Result<Socket> {
        let key = generate_key();
        let request = self
            .request(Method::GET, route)
            .header(header::CONNECTION, "Upgrade")
            .header(header::UPGRADE, "websocket")
            .header(header::SEC_WEBSOCKET_VERSION, "13")
            .header(header::SEC_WEBSOCKET_KEY, &key);
        let response = within(self.exchange(request, route, body::empty())).await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(refused(route, response).await);
        }
        let accepted = response.headers().get(header::SEC_WEBSOCKET_ACCEPT);
        let expected = derive_accept_key(key.as_bytes());
        if accepted.is_none_or(|accepted| accepted.as_bytes() != expected.as_bytes()) {
            return Err(Error::garbled("the daemon's WebSocket is none", "wrong accept key"));
        }
        let upgraded = hyper::upgrade::on(response)
            .await
            .map_err(|error| Error::garbled("the WebSocket broke off", error))?;
        let config = WebSocketConfig::default()
            .max_message_size(Some(MESSAGE_MAX))
            .max_frame_size(Some(MESSAGE_MAX));
        Ok(Socket::from_raw_socket(TokioIo::new(upgraded), Role::Client, Some(config)).await)
    }

    fn request(&self, method: Method, route: &Route) -> Builder {
        let agent = concat!("torpor/", env!("CARGO_PKG_VERSION"));
        let request = Request::builder()
            .method(method)
            .uri(route.uri(&self.server))
            .header(header::USER_AGENT, agent);
        match &self.key {
            Some(key) => request.header(header::AUTHORIZATION, key),
            None => request,
        }
    }

    fn broken(&self, error: &hyper_util::client::legacy::Error) -> Error {
        let (server, why) = (self.server.to_string(), deepest(error));
        if let Some(distrusted) = distrusted(error) {
            return Error::Distrusted { server, why: distrusted.to_string() };
        }
        if error.is_connect() {
            return Error::Unreachable { server, why };
        }
        // Our own file or tar could not be read: that is what the user has to know.
        Error::BrokenOff { why }
    }
}

fn distrusted<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Distrusted> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(distrusted) = error.downcast_ref() {
            return Some(distrusted);
        }
        next = error.source();
    }
    None
}

/// The innermost error says why; those around it only say that something was.
fn deepest(error: &dyn std::error::Error) -> String {
    let mut inner = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}

fn bad_request(error: http::Error) -> Error {
    Error::Internal { what: "can't build the request".to_owned(), why: error.to_string() }
}

fn encode(value: &impl Serialize) -> Body {
    body::full(serde_json::to_vec(value).expect("API bodies have text keys only"))
}

async fn within<T>(answer: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(ANSWER_TIMEOUT, answer).await {
        Ok(result) => result,
        Err(_) => Err(Error::TimedOut),
    }
}

async fn read_json<T: DeserializeOwned>(response: Response<Incoming>) -> Result<T> {
    let bytes = read_all(response.into_body()).await?;
    serde_json::from_slice(&bytes)
        .map_err(|error| Error::garbled("can't read the daemon's answer", error))
}

async fn read_all(
    body: impl hyper::body::Body<Data = Bytes, Error = hyper::Error>,
) -> Result<Bytes> {
    let collected = Limited::new(body, ANSWER_MAX).collect().await;
    collected
        .map(http_body_util::Collected::to_bytes)
        .map_err(|error| Error::garbled("the daemon broke off its answer", error))
}

/// Turns an answer that is no success into an error.
async fn refused(route: &Route, response: Response<Incoming>) -> Error {
    let status = response.status();
    let body = match read_all(response.into_body()).await {
        Ok(body) => body,
        Err(error) => return error,
    };
    match serde_json::from_slice::<ErrorBody>(&body) {
        Ok(body) => Error::Refused { body: Box::new(body), about: route.about.clone() },
        Err(_) => {
            let text = String::from_utf8_lossy(&body);
            let text: String = text.trim().chars().take(STRANGE_MAX).collect();
            Error::Garbled {
                what: format!("what answers there gave {status} and no reason we know"),
                why: (!text.is_empty()).then_some(text),
            }
        }
    }
}

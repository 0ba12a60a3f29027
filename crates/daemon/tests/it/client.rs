//! A small HTTP client: one connection per request, closed when its answer is dropped.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::{SinkExt, StreamExt};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_util::task::AbortOnDropHandle;

/// Longer than anything here takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?}", self.text()))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// The body, if it has this status.
    #[track_caller]
    pub(crate) fn expect(self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text());
        if self.body.is_empty() { Value::Null } else { self.json() }
    }

    /// Checks that it is an error of this kind, in the form that all errors have.
    #[track_caller]
    pub(crate) fn expect_error(self, status: u16, code: &str) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text());
        let body = self.json();
        assert_eq!(body["code"], code, "{body}");
        assert!(!body["message"].as_str().unwrap().is_empty(), "{body}");
        assert_eq!(body["request_id"], self.header("x-request-id"), "{body}");
        assert_eq!(self.header("content-type"), "application/json");
        body
    }
}

/// An answer whose body is still coming. Dropping it cuts the connection.
pub(crate) struct Open {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    body: Incoming,
    rest: BytesMut,
    _connection: AbortOnDropHandle<()>,
}

impl Open {
    /// The next part of the body; `None` at its end.
    pub(crate) async fn part(&mut self) -> Option<Bytes> {
        let frame = timeout(PATIENCE, self.body.frame()).await.expect("the body goes on");
        Some(frame?.expect("the body is whole").into_data().expect("no trailers"))
    }

    pub(crate) async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line = self.rest.split_to(end + 1);
                return Some(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            let part = self.part().await?;
            self.rest.extend_from_slice(&part);
        }
    }

    /// The next line, as JSON.
    pub(crate) async fn event(&mut self) -> Option<Value> {
        self.line().await.map(|line| serde_json::from_str(&line).unwrap())
    }

    pub(crate) async fn events(mut self) -> Vec<Value> {
        let mut events = Vec::new();
        while let Some(event) = self.event().await {
            events.push(event);
        }
        events
    }

    async fn whole(mut self) -> Answer {
        let mut body = BytesMut::new();
        while let Some(part) = self.part().await {
            body.extend_from_slice(&part);
        }
        Answer { status: self.status, headers: self.headers, body: body.freeze() }
    }
}

/// Sends a request and gives back its answer as soon as its head is there.
pub(crate) async fn open<B>(address: SocketAddr, mut request: Request<B>) -> Open
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: std::error::Error + Send + Sync,
{
    let stream = TcpStream::connect(address).await.expect("the daemon listens");
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    let connection = AbortOnDropHandle::new(tokio::spawn(async move {
        let _ = connection.await;
    }));
    let host = address.to_string();
    request.headers_mut().entry("host").or_insert_with(|| host.parse().unwrap());
    let response = timeout(PATIENCE, sender.send_request(request)).await;
    let (head, body) = response.expect("an answer in time").expect("an answer").into_parts();
    let rest = BytesMut::new();
    Open { status: head.status, headers: head.headers, body, rest, _connection: connection }
}

pub(crate) async fn send<B>(address: SocketAddr, request: Request<B>) -> Answer
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: std::error::Error + Send + Sync,
{
    open(address, request).await.whole().await
}

pub(crate) fn request(method: Method, path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    Request::builder().method(method).uri(path).body(Full::new(body.into())).unwrap()
}

pub(crate) fn with_json(method: Method, path: &str, body: &Value) -> Request<Full<Bytes>> {
    let mut request = request(method, path, body.to_string());
    request.headers_mut().insert("content-type", "application/json".parse().unwrap());
    request
}

/// `a b/ä` as it stands in a query.
pub(crate) fn encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'/' => {
                char::from(byte).to_string()
            }
            byte => format!("%{byte:02X}"),
        })
        .collect()
}

/// A WebSocket to the daemon.
pub(crate) struct Socket(WebSocketStream<TcpStream>);

/// What came on a WebSocket.
#[derive(Debug, PartialEq)]
pub(crate) enum Received {
    Json(Value),
    Bytes(Bytes),
    Closed,
}

impl Socket {
    /// The answer instead, if it is not the upgrade.
    pub(crate) async fn open(address: SocketAddr, path: &str) -> Result<Self, (StatusCode, Value)> {
        let stream = TcpStream::connect(address).await.unwrap();
        let url = format!("ws://{address}{path}");
        match tokio_tungstenite::client_async(url, stream).await {
            Ok((socket, _)) => Ok(Self(socket)),
            Err(tokio_tungstenite::tungstenite::Error::Http(response)) => {
                let body = response.body().as_deref().unwrap_or_default();
                Err((response.status(), serde_json::from_slice(body).unwrap_or_default()))
            }
            Err(error) => panic!("{error}"),
        }
    }

    pub(crate) async fn send_json(&mut self, value: Value) {
        self.0.send(Message::text(value.to_string())).await.unwrap();
    }

    pub(crate) async fn send(&mut self, bytes: impl Into<Bytes>) {
        self.0.send(Message::Binary(bytes.into())).await.unwrap();
    }

    pub(crate) async fn recv(&mut self) -> Received {
        loop {
            let message = timeout(PATIENCE, self.0.next()).await.expect("a message in time");
            match message {
                Some(Ok(Message::Text(text))) => {
                    return Received::Json(serde_json::from_str(&text).unwrap());
                }
                Some(Ok(Message::Binary(bytes))) => return Received::Bytes(bytes),
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                Some(Ok(Message::Close(_)) | Err(_)) | None => return Received::Closed,
            }
        }
    }

    /// The next text message; output before it is put aside.
    pub(crate) async fn event(&mut self) -> Value {
        loop {
            match self.recv().await {
                Received::Json(value) => return value,
                Received::Bytes(_) => {}
                Received::Closed => panic!("closed"),
            }
        }
    }

    /// Collects output of one mark until it contains `text`.
    pub(crate) async fn wait_for(&mut self, mark: u8, text: &str) -> String {
        let mut seen = String::new();
        while !seen.contains(text) {
            match self.recv().await {
                Received::Bytes(bytes) if bytes[0] == mark => {
                    seen.push_str(&String::from_utf8_lossy(&bytes[1..]));
                }
                Received::Bytes(_) => {}
                Received::Json(event) => panic!("{event} before {text:?}, after {seen:?}"),
                Received::Closed => panic!("closed before {text:?}, after {seen:?}"),
            }
        }
        seen
    }
}

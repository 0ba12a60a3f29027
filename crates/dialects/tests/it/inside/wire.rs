//! What comes bit by bit: server-sent events and WebSockets.

use std::net::SocketAddr;

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{Error, Message};

use crate::client::{Open, PATIENCE};

/// Server-sent events. Dropping them hangs up.
pub(crate) struct Events {
    open: Open,
    unread: String,
}

impl Events {
    pub(crate) fn new(open: Open) -> Self {
        assert_eq!(open.status, 200);
        let kind = open.headers.iter().find(|(name, _)| name == "content-type");
        assert_eq!(kind.unwrap().1, "text/event-stream");
        Self { open, unread: String::new() }
    }

    /// The next event as it was written, without the empty line after it; comments are left out.
    pub(crate) async fn event(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.unread.find("\n\n") {
                let event: String = self.unread.drain(..end + 2).collect();
                if event.starts_with(':') {
                    continue;
                }
                return Some(event.trim_end().to_owned());
            }
            let part = self.open.part().await?;
            self.unread.push_str(std::str::from_utf8(&part).expect("a part is whole events"));
        }
    }

    /// What the next event carries.
    pub(crate) async fn data(&mut self) -> Option<Value> {
        let event = self.event().await?;
        let data = event.lines().find_map(|line| line.strip_prefix("data: "));
        Some(serde_json::from_str(data.expect("an event has data")).unwrap())
    }

    pub(crate) async fn all(mut self) -> Vec<Value> {
        let mut all = Vec::new();
        while let Some(data) = self.data().await {
            all.push(data);
        }
        all
    }
}

/// A WebSocket.
pub(crate) struct Socket(WebSocketStream<TcpStream>);

/// What came on it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Received {
    Bytes(Bytes),
    Closed(u16, String),
    /// Without a word.
    Gone,
}

impl Socket {
    /// To the sandbox that `host` names; the answer's status and code instead, if it is refused.
    pub(crate) async fn open(
        address: SocketAddr,
        host: &str,
        path: &str,
        headers: &[(&'static str, &str)],
    ) -> Result<Self, (u16, Value)> {
        let mut request = format!("ws://{host}{path}").into_client_request().unwrap();
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        let stream = TcpStream::connect(address).await.unwrap();
        let opened = tokio_tungstenite::client_async(request, stream);
        match timeout(PATIENCE, opened).await.expect("an answer in time") {
            Ok((socket, _)) => Ok(Self(socket)),
            Err(Error::Http(response)) => {
                let body = response.body().as_deref().unwrap_or_default();
                let body: Value = serde_json::from_slice(body).unwrap_or_default();
                Err((response.status().as_u16(), body["code"].clone()))
            }
            Err(error) => panic!("{error}"),
        }
    }

    pub(crate) async fn send(&mut self, bytes: impl Into<Bytes>) {
        self.0.send(Message::Binary(bytes.into())).await.unwrap();
    }

    pub(crate) async fn send_text(&mut self, text: &str) {
        self.0.send(Message::text(text)).await.unwrap();
    }

    pub(crate) async fn close(&mut self) {
        self.0.close(None).await.unwrap();
    }

    pub(crate) async fn recv(&mut self) -> Received {
        loop {
            let message = timeout(PATIENCE, self.0.next()).await.expect("a message in time");
            match message {
                Some(Ok(Message::Binary(bytes))) => return Received::Bytes(bytes),
                Some(Ok(Message::Close(Some(frame)))) => {
                    return Received::Closed(frame.code.into(), frame.reason.to_string());
                }
                Some(Ok(Message::Text(text))) => panic!("a text: {text}"),
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                Some(Ok(Message::Close(None)) | Err(_)) | None => return Received::Gone,
            }
        }
    }

    /// What is shown in a terminal, until it contains `text`.
    pub(crate) async fn wait_for(&mut self, text: &str) -> String {
        let mut seen = String::new();
        while !seen.contains(text) {
            match self.recv().await {
                Received::Bytes(bytes) => {
                    assert_eq!(bytes[0], 0, "{bytes:?} before {text:?}, after {seen:?}");
                    seen.push_str(&String::from_utf8_lossy(&bytes[1..]));
                }
                over @ (Received::Closed(..) | Received::Gone) => {
                    panic!("{over:?} before {text:?}, after {seen:?}")
                }
            }
        }
        seen
    }

    /// The first that is not shown in the terminal.
    pub(crate) async fn wait_for_end(&mut self) -> Received {
        loop {
            match self.recv().await {
                Received::Bytes(bytes) if bytes[0] == 0 => {}
                received @ (Received::Bytes(_) | Received::Closed(..) | Received::Gone) => {
                    return received;
                }
            }
        }
    }
}

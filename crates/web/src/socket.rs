//! WebSockets: what all of ours have in common.
//!
//! - A peer that answers no ping is gone, unless it is us who are not reading.
//! - Sending waits for the peer, so a slow client slows down what it reads from.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::{Instant, Interval, MissedTickBehavior};
use torpor_service::Service;
use tracing::Instrument;

use crate::extract::RequestId;

/// Largest message of a client.
const MESSAGE_MAX: usize = 1024 * 1024;
/// Bytes that wait for a slow client before we stop reading from the sandbox.
const UNSENT_MAX: usize = 2 * 1024 * 1024;
const PING_EVERY: Duration = Duration::from_secs(15);
/// Three pings without an answer.
const SILENCE_MAX: Duration = Duration::from_secs(45);
/// How long a peer may take to agree that the conversation is over.
const CLOSING: Duration = Duration::from_secs(2);

/// The limits of every socket.
fn limited(upgrade: WebSocketUpgrade) -> WebSocketUpgrade {
    upgrade
        .max_message_size(MESSAGE_MAX)
        .max_frame_size(MESSAGE_MAX)
        .write_buffer_size(0)
        .max_write_buffer_size(UNSENT_MAX)
}

/// Talks on the upgraded connection in a task that a shutdown waits for.
pub fn upgraded<F>(
    service: Arc<Service>,
    id: RequestId,
    upgrade: WebSocketUpgrade,
    talk: impl FnOnce(WebSocket, Arc<Service>, RequestId) -> F + Send + 'static,
) -> Response
where
    F: Future<Output = ()> + Send,
{
    let token = service.tasks.token();
    let span = tracing::Span::current();
    limited(upgrade).on_upgrade(move |socket| {
        async move {
            talk(socket, service, id).await;
            drop(token);
        }
        .instrument(span)
    })
}

/// The peer is not there any more.
#[derive(Debug)]
pub struct Left;

/// One half receives, the other sends; both at the same time.
pub fn split(socket: WebSocket) -> (Reader, Writer) {
    let (sink, stream) = socket.split();
    let listening = Arc::new(Mutex::new(None));
    let mut ping = tokio::time::interval(PING_EVERY);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let reader = Reader { stream, listening: Arc::clone(&listening) };
    (reader, Writer { sink, ping, listening })
}

/// Since when we wait for the peer to say something; none while we are busy with what it said.
type Listening = Arc<Mutex<Option<Instant>>>;

pub struct Reader {
    stream: SplitStream<WebSocket>,
    listening: Listening,
}

/// A message of the peer.
pub enum Received {
    Text(String),
    Bytes(Bytes),
}

impl Reader {
    /// `None` when the peer is gone or said goodbye.
    pub async fn recv(&mut self) -> Option<Received> {
        loop {
            *self.listening.lock() = Some(Instant::now());
            let message = self.stream.next().await;
            *self.listening.lock() = None;
            match message?.ok()? {
                Message::Text(text) => return Some(Received::Text(text.to_string())),
                Message::Binary(bytes) => return Some(Received::Bytes(bytes)),
                Message::Ping(_) | Message::Pong(_) => {}
                Message::Close(_) => return None,
            }
        }
    }

    /// Waits until the peer agrees that it is over, so that it gets what was sent last.
    pub async fn wait_for_close(&mut self) {
        let closed = async { while self.recv().await.is_some() {} };
        let _ = tokio::time::timeout(CLOSING, closed).await;
    }
}

pub struct Writer {
    sink: SplitSink<WebSocket, Message>,
    ping: Interval,
    listening: Listening,
}

impl Writer {
    pub async fn send<T: Serialize>(&mut self, value: &T) -> Result<(), Left> {
        let text = serde_json::to_string(value).map_err(|_| Left)?;
        self.sink.send(Message::text(text)).await.map_err(|_| Left)
    }

    /// Goes with the next [`Writer::flush`] at the latest.
    pub async fn feed(&mut self, bytes: Bytes) -> Result<(), Left> {
        self.sink.feed(Message::Binary(bytes)).await.map_err(|_| Left)
    }

    pub async fn flush(&mut self) -> Result<(), Left> {
        self.sink.flush().await.map_err(|_| Left)
    }

    /// Resolves only when the peer is gone. Cancel-safe between pings.
    pub async fn keep_alive(&mut self) -> Left {
        loop {
            self.ping.tick().await;
            let silent = self.listening.lock().is_some_and(|since| since.elapsed() > SILENCE_MAX);
            if silent || self.sink.send(Message::Ping(Bytes::new())).await.is_err() {
                return Left;
            }
        }
    }

    pub async fn close(&mut self, code: u16, reason: &str) {
        let reason = reason.to_owned().into();
        let goodbye = Message::Close(Some(CloseFrame { code, reason }));
        let _ = tokio::time::timeout(CLOSING, self.sink.send(goodbye)).await;
    }
}

/// Bytes after a first one that says what they are.
pub fn marked(mark: u8, bytes: &[u8]) -> Bytes {
    let mut message = BytesMut::with_capacity(1 + bytes.len());
    message.put_u8(mark);
    message.put_slice(bytes);
    message.freeze()
}

/// It ended as it should.
pub const NORMAL: u16 = close_code::NORMAL;
/// It ended because of an error.
pub const ERROR: u16 = close_code::ERROR;

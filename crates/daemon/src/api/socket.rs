//! WebSockets: what all of ours have in common.
//!
//! - A peer that answers no ping is gone, unless it is us who are not reading.
//! - Sending waits for the peer, so a slow client slows down what it reads from.

use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::{Instant, Interval, MissedTickBehavior};

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
pub fn limited(upgrade: WebSocketUpgrade) -> WebSocketUpgrade {
    upgrade
        .max_message_size(MESSAGE_MAX)
        .max_frame_size(MESSAGE_MAX)
        .write_buffer_size(0)
        .max_write_buffer_size(UNSENT_MAX)
}

/// The peer is not there any more.
#[derive(Debug)]
pub struct Left;

/// One half receives, the other sends; both at the same time.
pub fn split(socket: WebSocket) -> (Ear, Mouth) {
    let (sink, stream) = socket.split();
    let listening = std::sync::Arc::new(Mutex::new(None));
    let mut ping = tokio::time::interval(PING_EVERY);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let ear = Ear { stream, listening: std::sync::Arc::clone(&listening) };
    (ear, Mouth { sink, ping, listening })
}

/// Since when we wait for the peer to say something; none while we are busy with what it said.
type Listening = std::sync::Arc<Mutex<Option<Instant>>>;

pub struct Ear {
    stream: SplitStream<WebSocket>,
    listening: Listening,
}

/// What a peer says.
pub enum Heard {
    Text(String),
    Bytes(Bytes),
}

impl Ear {
    /// `None` when the peer is gone or said goodbye.
    pub async fn hear(&mut self) -> Option<Heard> {
        loop {
            *self.listening.lock() = Some(Instant::now());
            let message = self.stream.next().await;
            *self.listening.lock() = None;
            match message?.ok()? {
                Message::Text(text) => return Some(Heard::Text(text.to_string())),
                Message::Binary(bytes) => return Some(Heard::Bytes(bytes)),
                Message::Ping(_) | Message::Pong(_) => {}
                Message::Close(_) => return None,
            }
        }
    }

    /// Waits until the peer agrees that it is over, so that it gets what was sent last.
    pub async fn wait_for_close(&mut self) {
        let closed = async { while self.hear().await.is_some() {} };
        let _ = tokio::time::timeout(CLOSING, closed).await;
    }
}

pub struct Mouth {
    sink: SplitSink<WebSocket, Message>,
    ping: Interval,
    listening: Listening,
}

impl Mouth {
    pub async fn say<T: Serialize>(&mut self, value: &T) -> Result<(), Left> {
        let text = serde_json::to_string(value).map_err(|_| Left)?;
        self.sink.send(Message::text(text)).await.map_err(|_| Left)
    }

    /// Goes with the next [`Mouth::flush`] at the latest.
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

/// It ended as it should.
pub const NORMAL: u16 = close_code::NORMAL;
/// It ended because of an error.
pub const ERROR: u16 = close_code::ERROR;

//! What becomes of a guest that says what it should not.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::{Mutex, mpsc};
use torpor_protocol::excerpt::EXCERPT_MAX;
use torpor_protocol::guest::{
    self, Failure, FailureCode, Frame, HEADER, Hello, Kind, MAX_PAYLOAD, Reply, Request,
};

use super::{Guest, GuestError};
use crate::engine::Channel;

const WAIT: Duration = Duration::from_secs(5);

/// A channel whose other end answers a hello, and each request with one frame.
struct Liar {
    says: mpsc::UnboundedSender<Bytes>,
    said: Mutex<mpsc::UnboundedReceiver<Bytes>>,
    answer: (Kind, Vec<u8>),
}

#[async_trait]
impl Channel for Liar {
    async fn send(&self, packet: Bytes) -> io::Result<()> {
        let frame = Frame::parse(&packet).unwrap();
        match frame.kind {
            Kind::Hello => {
                let hello: Hello = frame.json().unwrap();
                self.say(guest::json_packet(0, Kind::Hello, &hello));
            }
            Kind::Open => self.say(guest::packet(frame.stream, self.answer.0, &self.answer.1)),
            Kind::Reply | Kind::Data | Kind::DataErr | Kind::Credit | Kind::End | Kind::Reset => {}
        }
        Ok(())
    }

    async fn recv(&self) -> io::Result<Bytes> {
        Ok(self.said.lock().await.recv().await.unwrap_or_default())
    }
}

impl Liar {
    fn say(&self, packet: Vec<u8>) {
        self.says.send(packet.into()).unwrap();
    }
}

async fn liar(answer: (Kind, Vec<u8>)) -> (Arc<Liar>, Guest) {
    let (says, said) = mpsc::unbounded_channel();
    let liar = Arc::new(Liar { says, said: Mutex::new(said), answer });
    let guest = Guest::connect(liar.clone(), WAIT).await.unwrap();
    (liar, guest)
}

fn json(reply: &Reply) -> Vec<u8> {
    guest::json_packet(0, Kind::Reply, reply).split_off(HEADER)
}

fn done() -> (Kind, Vec<u8>) {
    (Kind::Reply, json(&Reply::Done))
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_says_hello_unasked_loses_its_channel() {
    let (liar, guest) = liar(done()).await;
    let hello = Hello { version: guest::GUEST_VERSION, session: 1 };
    liar.say(guest::json_packet(0, Kind::Hello, &hello));
    tokio::time::timeout(WAIT, guest.gone()).await.unwrap();
    assert!(matches!(guest.health().await, Err(GuestError::Gone)));
}

#[tokio::test(start_paused = true)]
async fn only_the_daemon_opens_streams_and_nobody_uses_the_one_of_the_channel() {
    for (stream, kind) in [(7, Kind::Open), (7, Kind::Hello), (0, Kind::Data), (0, Kind::Reset)] {
        let (liar, guest) = liar(done()).await;
        liar.say(guest::packet(stream, kind, b"{}"));
        let gone = tokio::time::timeout(WAIT, guest.gone()).await;
        assert!(gone.is_ok(), "{kind:?} on stream {stream}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_on_its_way_to_a_stream_that_was_given_up_harms_nobody() {
    let (liar, guest) = liar(done()).await;
    drop(guest.open(&Request::Health).await.unwrap());
    for kind in [Kind::Reply, Kind::Data, Kind::DataErr, Kind::Credit, Kind::End, Kind::Reset] {
        liar.say(guest::packet(1, kind, b"late"));
    }
    guest.done(&Request::Health).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_error_shows_little_of_what_a_guest_sent_and_nothing_that_acts() {
    let flood = "\u{1b}[2J\n".repeat(MAX_PAYLOAD / 5 - 20);
    let failure = Failure { code: FailureCode::Io, message: flood[..MAX_PAYLOAD / 10].to_owned() };
    let failed = json(&Reply::Failed(failure));
    let bytes = vec![0x1b; MAX_PAYLOAD];
    for answer in [(Kind::Data, bytes), (Kind::DataErr, flood.into_bytes()), (Kind::Reply, failed)]
    {
        let kind = answer.0;
        let (_liar, guest) = liar(answer).await;
        let error = guest.call(&Request::Health).await.unwrap_err();
        for text in [error.to_string(), format!("{error:?}")] {
            assert!(text.len() < 2 * EXCERPT_MAX, "{kind:?}: {} bytes", text.len());
            assert!(!text.chars().any(char::is_control), "{kind:?}: {text:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_does_not_belong_shows_nothing_of_what_was_asked() {
    let (_liar, guest) = liar(done()).await;
    let token = "only-we-know-this".to_owned();
    let error = guest.stat(&Request::ConnectKept { port: 1, token }).await.unwrap_err();
    let told = "the agent broke the protocol: an answer that does not belong to ConnectKept";
    assert_eq!(error.to_string(), told);
}

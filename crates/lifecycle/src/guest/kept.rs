//! Connections inside that outlive the session, because the sandbox sleeps in between.
//!
//! ```text
//!   Guest::connect_kept ──▶ Stream ── the session ends ──▶ Parked ── Guest::resume ──▶ Stream ──▶ …
//! ```
//!
//! Between two sessions neither side knows what of the other's was on its way. Both count what they
//! received and hold what they sent until it was granted again ([`Unconfirmed`]); with the first
//! words on the next stream no byte is lost and none comes twice.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use torpor_protocol::guest::{
    KEPT_WINDOW, Kind, MAX_PAYLOAD, Reached, Reply, Request, Unconfirmed, packet,
};

use super::stream::Stream;
use super::{CALL_DEADLINE, Guest, GuestError, mux, unexpected};

/// What a packet takes of the room at least, so that many small ones are not many bytes more.
const PACKET_ROOM: u32 = 1024;

/// What was sent on one stream of a kept connection.
#[derive(Debug)]
pub(super) struct Log {
    state: Mutex<State>,
    /// For what is on its way to the road: a guest that grants without reading gets no more.
    room: Arc<Semaphore>,
}

#[derive(Debug)]
enum State {
    Sent(Unconfirmed),
    /// Taken over from the stream before as soon as the agent says how far it is; it granted so much
    /// since.
    Waiting(usize),
    Parked,
}

impl Log {
    fn new(state: State) -> Arc<Self> {
        let room = Arc::new(Semaphore::new(KEPT_WINDOW as usize));
        Arc::new(Self { state: Mutex::new(state), room })
    }

    /// Room for a packet. Cancel-safe.
    pub(super) async fn room(&self, bytes: u32) -> OwnedSemaphorePermit {
        let room = Arc::clone(&self.room).acquire_many_owned(bytes.max(PACKET_ROOM));
        room.await.expect("it is never closed")
    }

    pub(super) fn push(&self, bytes: &[u8]) {
        match &mut *self.state.lock() {
            State::Sent(sent) => sent.push(bytes),
            // Nobody has a sender before it was resumed, or after it was parked.
            State::Waiting(_) | State::Parked => {}
        }
    }

    /// Returns how many bytes may be under way.
    pub(super) fn confirm(&self, count: usize) -> u32 {
        match &mut *self.state.lock() {
            State::Sent(sent) => sent.confirm(count),
            State::Waiting(early) => *early = early.saturating_add(count),
            State::Parked => {}
        }
        KEPT_WINDOW
    }

    pub(super) fn take(&self) -> Option<Unconfirmed> {
        match std::mem::replace(&mut *self.state.lock(), State::Parked) {
            State::Sent(sent) => Some(sent),
            State::Waiting(_) | State::Parked => None,
        }
    }

    /// Goes on with what was sent before; what the agent granted meanwhile counts.
    fn go_on(&self, mut sent: Unconfirmed) {
        let mut state = self.state.lock();
        if let State::Waiting(early) = *state {
            sent.confirm(early);
        }
        *state = State::Sent(sent);
    }
}

/// A kept connection between two sessions.
#[derive(Debug)]
pub struct Parked {
    pub(super) received: u64,
    pub(super) leftover: VecDeque<Bytes>,
    pub(super) ended: bool,
    pub(super) finished: bool,
    pub(super) log: Unconfirmed,
}

impl Parked {
    /// The next bytes that came before the session ended.
    pub fn take(&mut self) -> Option<Bytes> {
        self.leftover.pop_front()
    }

    /// The server inside has said everything.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Something that was sent may not have reached the server.
    pub fn is_unconfirmed(&self) -> bool {
        !self.log.is_empty()
    }
}

impl Guest {
    /// A connection to a port inside that can be parked. The token must be known to nobody else.
    pub async fn connect_kept(&self, port: u16, token: &str) -> Result<Stream, GuestError> {
        let request = Request::ConnectKept { port, token: token.to_owned() };
        let log = Log::new(State::Sent(Unconfirmed::default()));
        mux::open(&self.shared, &request, KEPT_WINDOW, Some(log)).await
    }

    /// Goes on with a connection. After [`GuestError::Asleep`] and [`GuestError::Gone`] it can be
    /// tried again in another session; after any other error the connection is over.
    pub async fn resume(&self, token: &str, parked: &mut Parked) -> Result<Stream, GuestError> {
        let waiting = parked.leftover.iter().map(Bytes::len).sum::<usize>() as u64;
        let reached = Reached { received: parked.received, waiting };
        let request = Request::Resume { token: token.to_owned(), reached };
        let log = Log::new(State::Waiting(0));
        let answer = async {
            let mut stream = mux::open(&self.shared, &request, 0, Some(log)).await?;
            let reply = stream.reply().await?;
            Ok((stream, reply))
        };
        let answered = tokio::time::timeout(CALL_DEADLINE, answer).await;
        let (stream, reply) = answered.map_err(|_| GuestError::Timeout(CALL_DEADLINE))??;
        let Reply::Resumed(there) = reply else { return Err(unexpected(&request)) };
        go_on(stream, parked, there)
    }
}

/// Sends what the agent, which is `there`, did not get.
fn go_on(mut stream: Stream, parked: &mut Parked, there: Reached) -> Result<Stream, GuestError> {
    let Some(again) = parked.log.go_on(there) else {
        return Err(GuestError::protocol("the machine is not what it was"));
    };
    stream.received = parked.received;
    stream.leftover = std::mem::take(&mut parked.leftover);
    let sender = &stream.sender;
    for chunk in again.chunks(MAX_PAYLOAD) {
        sender.shared.send_parting(packet(sender.id, Kind::Data, chunk));
    }
    let room = (KEPT_WINDOW as usize).saturating_sub(parked.log.len());
    sender.credit.add_permits(room);
    if let Some(log) = &sender.log {
        log.go_on(std::mem::take(&mut parked.log));
    }
    if parked.finished {
        sender.finish_again();
    }
    Ok(stream)
}

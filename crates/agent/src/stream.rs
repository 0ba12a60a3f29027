//! One stream: what has arrived and was not consumed, what may still be sent, whether it is closed.
//!
//! The session puts frames in, the stream's task takes them out. A closed stream sends nothing: its
//! task is dropped at its next await.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::rc::Rc;

use tokio::sync::Notify;
use torpor_protocol::guest::{
    Failure, FailureCode, KEPT_WINDOW, Kind, MAX_PAYLOAD, Reached, Reply, Unconfirmed, WINDOW,
};

use crate::channel::Channel;
use crate::failure::failure;

/// Consumed bytes are granted again in lumps, so that credits do not double the packets.
const CREDIT_LUMP: usize = 256 * 1024;
/// Packets up to this size are put together, so that many tiny ones take no more room than they say.
const SMALL: usize = 4 * 1024;

/// Why a stream was closed before its answer was complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Closed {
    /// The daemon is not interested any more.
    Reset,
    /// Another session began.
    Forgotten,
}

pub(crate) struct Stream {
    id: u32,
    channel: Rc<Channel>,
    inbox: RefCell<Inbox>,
    arrived: Notify,
    credit: Cell<u32>,
    granted: Notify,
    /// Bytes taken from the inbox that the daemon was not granted again.
    consumed: Cell<usize>,
    closed: Cell<Option<Closed>>,
    closing: Notify,
    end_sent: Cell<bool>,
    /// Bytes that arrived, on the streams before this one too.
    arrived_bytes: Cell<u64>,
    /// Of a kept connection: what was sent and not granted again.
    unconfirmed: RefCell<Option<Unconfirmed>>,
    /// The last of it, which the daemon did not get on the stream before.
    again: RefCell<Vec<u8>>,
}

#[derive(Default)]
struct Inbox {
    chunks: VecDeque<Vec<u8>>,
    bytes: usize,
    ended: bool,
}

/// What comes in on a stream.
#[derive(Debug)]
pub(crate) enum Input {
    Bytes(Vec<u8>),
    /// The daemon sends no more.
    End,
    /// The stream was closed before its end.
    Closed,
}

/// The daemon sent more than it was granted.
#[derive(Debug)]
pub(crate) struct Overrun;

impl Stream {
    pub(crate) fn new(id: u32, channel: Rc<Channel>) -> Self {
        Self {
            id,
            channel,
            inbox: RefCell::default(),
            arrived: Notify::new(),
            credit: Cell::new(WINDOW),
            granted: Notify::new(),
            consumed: Cell::new(0),
            closed: Cell::new(None),
            closing: Notify::new(),
            end_sent: Cell::new(false),
            arrived_bytes: Cell::new(0),
            unconfirmed: RefCell::new(None),
            again: RefCell::default(),
        }
    }

    // === What the session puts in ===

    pub(crate) fn deliver(&self, payload: &[u8]) -> Result<(), Overrun> {
        let mut inbox = self.inbox.borrow_mut();
        if inbox.ended || payload.is_empty() {
            return Ok(());
        }
        if inbox.bytes + self.consumed.get() + payload.len() > WINDOW as usize {
            return Err(Overrun);
        }
        inbox.bytes += payload.len();
        self.arrived_bytes.set(self.arrived_bytes.get() + payload.len() as u64);
        match inbox.chunks.back_mut() {
            Some(last) if last.len() + payload.len() <= SMALL => last.extend_from_slice(payload),
            Some(_) | None => inbox.chunks.push_back(payload.to_vec()),
        }
        self.arrived.notify_waiters();
        Ok(())
    }

    pub(crate) fn deliver_end(&self) {
        self.inbox.borrow_mut().ended = true;
        self.arrived.notify_waiters();
    }

    pub(crate) fn grant(&self, bytes: u32) {
        self.credit.set(self.credit.get().saturating_add(bytes));
        if let Some(unconfirmed) = &mut *self.unconfirmed.borrow_mut() {
            unconfirmed.confirm(bytes as usize);
        }
        self.granted.notify_waiters();
    }

    pub(crate) fn close(&self, why: Closed) {
        self.closed.set(Some(why));
        self.closing.notify_waiters();
    }

    // === What the stream's task does ===

    pub(crate) fn closed_because(&self) -> Option<Closed> {
        self.closed.get()
    }

    /// Waits until the stream is closed.
    pub(crate) async fn closed(&self) {
        while self.closed.get().is_none() {
            self.closing.notified().await;
        }
    }

    /// The next bytes from the daemon, none after its `End`. Taking them tells the daemon that the
    /// bytes before were consumed.
    pub(crate) async fn receive(&self) -> Option<Vec<u8>> {
        self.grant_consumed().await;
        loop {
            if let Some(chunk) = self.take_arrived() {
                return Some(chunk);
            }
            if self.inbox.borrow().ended {
                return None;
            }
            self.arrived.notified().await;
        }
    }

    /// The next bytes that are here already, of a closed stream too.
    fn take_arrived(&self) -> Option<Vec<u8>> {
        let mut inbox = self.inbox.borrow_mut();
        let chunk = inbox.chunks.pop_front()?;
        inbox.bytes -= chunk.len();
        self.consumed.set(self.consumed.get() + chunk.len());
        Some(chunk)
    }

    /// `receive`, and of a stream that was closed what had arrived before.
    pub(crate) async fn receive_to_the_last(&self) -> Input {
        // Closed first: a closed stream grants nothing, its number may be another's by now.
        let received = tokio::select! {
            biased;
            () = self.closed() => self.take_arrived(),
            received = self.receive() => received,
        };
        match received {
            Some(bytes) => Input::Bytes(bytes),
            None if self.inbox.borrow().ended => Input::End,
            None => Input::Closed,
        }
    }

    async fn grant_consumed(&self) {
        // Of a kept connection at once: what is not granted again may have to be sent again.
        let lump = if self.unconfirmed.borrow().is_some() { 1 } else { CREDIT_LUMP };
        if self.consumed.get() < lump {
            return;
        }
        let mut turn = self.channel.turn().await;
        let bytes = u32::try_from(self.consumed.replace(0)).expect("at most a window is consumed");
        turn.payload()[..4].copy_from_slice(&bytes.to_le_bytes());
        turn.send(self.id, Kind::Credit, 4).await;
    }

    pub(crate) async fn reply(&self, reply: &Reply) {
        let turn = self.channel.turn().await;
        if turn.send_json(self.id, Kind::Reply, reply).await.is_err() {
            let failed = failure(FailureCode::Limit, "the answer does not fit into one packet");
            self.refuse(failed).await;
        }
    }

    async fn refuse(&self, failed: Failure) {
        let turn = self.channel.turn().await;
        let sent = turn.send_json(self.id, Kind::Reply, &Reply::Failed(failed)).await;
        debug_assert!(sent.is_ok(), "failures are short");
    }

    /// Sends one packet of data that `fill` writes, no more than the daemon granted. `fill` is called
    /// when it is this stream's turn; `None` sends nothing.
    pub(crate) async fn send_data<E>(
        &self,
        fill: impl FnOnce(&mut [u8]) -> Result<Option<(Kind, usize)>, E>,
    ) -> Result<usize, E> {
        while self.credit.get() == 0 {
            self.granted.notified().await;
        }
        let mut turn = self.channel.turn().await;
        let room = MAX_PAYLOAD.min(self.credit.get() as usize);
        let Some((kind, length)) = fill(&mut turn.payload()[..room])? else { return Ok(0) };
        self.credit.set(self.credit.get() - u32::try_from(length).expect("less than the credit"));
        if let Some(unconfirmed) = &mut *self.unconfirmed.borrow_mut() {
            unconfirmed.push(&turn.payload()[..length]);
        }
        turn.send(self.id, kind, length).await;
        Ok(length)
    }

    /// Sends everything that can be read from `source`.
    pub(crate) async fn send_all(&self, source: &mut impl io::Read) -> io::Result<()> {
        loop {
            let fill = |room: &mut [u8]| {
                let length = source.read(room)?;
                Ok::<_, io::Error>((length > 0).then_some((Kind::Data, length)))
            };
            if self.send_data(fill).await? == 0 {
                return Ok(());
            }
            tokio::task::yield_now().await;
        }
    }

    // === What streams of a kept connection do ===

    /// It is the first stream of a kept connection.
    pub(crate) fn keep(&self) {
        self.credit.set(KEPT_WINDOW);
        self.unconfirmed.replace(Some(Unconfirmed::default()));
    }

    /// Goes on where `before`, which is closed, stopped, and says so. Nothing is sent on this stream
    /// before that, as it is this stream's turn. `false`, and nothing changed: the daemon, which is at
    /// `there`, speaks of another past.
    pub(crate) async fn take_over(
        &self,
        before: &Self,
        there: Reached,
        then: impl FnOnce(),
    ) -> bool {
        let turn = self.channel.turn().await;
        let Some(again) = before.unconfirmed.borrow_mut().as_mut().and_then(|it| it.go_on(there))
        else {
            return false;
        };
        let open = u64::from(KEPT_WINDOW).saturating_sub(there.waiting + again.len() as u64);
        self.credit.set(u32::try_from(open).expect("it is a part of the window"));
        self.unconfirmed.replace(before.unconfirmed.take());
        self.again.replace(again);
        self.inbox.replace(before.inbox.take());
        self.consumed.set(before.consumed.replace(0));
        self.arrived_bytes.set(before.arrived_bytes.get());
        let waiting = (self.inbox.borrow().bytes + self.consumed.get()) as u64;
        let here = Reached { received: self.arrived_bytes.get(), waiting };
        then();
        let sent = turn.send_json(self.id, Kind::Reply, &Reply::Resumed(here)).await;
        debug_assert!(sent.is_ok(), "two numbers are short");
        true
    }

    /// Sends what the daemon did not get on the stream before; its room is set aside.
    pub(crate) async fn send_again(&self) {
        let again = self.again.take();
        for chunk in again.chunks(MAX_PAYLOAD) {
            let mut turn = self.channel.turn().await;
            turn.payload()[..chunk.len()].copy_from_slice(chunk);
            turn.send(self.id, Kind::Data, chunk.len()).await;
        }
    }

    /// Waits until the daemon granted everything again.
    pub(crate) async fn confirmed(&self) {
        while self.unconfirmed.borrow().as_ref().is_some_and(|it| !it.is_empty()) {
            self.granted.notified().await;
        }
    }

    /// No more data from here; once.
    pub(crate) async fn end(&self) {
        if !self.end_sent.replace(true) {
            self.channel.turn().await.send(self.id, Kind::End, 0).await;
        }
    }

    /// Tells the daemon that the stream broke.
    pub(crate) async fn abort(&self) {
        if !self.end_sent.replace(true) {
            self.channel.turn().await.send(self.id, Kind::Reset, 0).await;
        }
    }

    /// The whole answer to a request that failed.
    pub(crate) async fn fail(&self, failed: Failure) {
        self.refuse(failed).await;
        self.end().await;
    }
}

/// The streams whose answer is not complete.
#[derive(Default)]
pub(crate) struct Streams {
    open: RefCell<HashMap<u32, Rc<Stream>>>,
}

impl Streams {
    pub(crate) fn find(&self, id: u32) -> Option<Rc<Stream>> {
        self.open.borrow().get(&id).cloned()
    }

    pub(crate) fn len(&self) -> usize {
        self.open.borrow().len()
    }

    pub(crate) fn insert(&self, stream: &Rc<Stream>) {
        self.open.borrow_mut().insert(stream.id, stream.clone());
    }

    /// Takes the stream out, unless its number was given to another one meanwhile.
    pub(crate) fn remove(&self, stream: &Rc<Stream>) {
        let mut open = self.open.borrow_mut();
        if open.get(&stream.id).is_some_and(|found| Rc::ptr_eq(found, stream)) {
            open.remove(&stream.id);
        }
    }

    pub(crate) fn close(&self, id: u32, why: Closed) {
        if let Some(stream) = self.open.borrow_mut().remove(&id) {
            stream.close(why);
        }
    }

    pub(crate) fn close_all(&self, why: Closed) {
        for (_, stream) in self.open.borrow_mut().drain() {
            stream.close(why);
        }
    }
}

//! One request and its answer: replies and bytes in, bytes out, with flow control.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use bytes::Bytes;
use tokio::sync::{AcquireError, Semaphore, mpsc};
use torpor_protocol::guest::{self, HEADER, KEPT_WINDOW, Kind, MAX_PAYLOAD, Reply, WINDOW};

use super::GuestError;
use super::kept::{Log, Parked};
use super::mux::Shared;

/// Consumed bytes that are worth a `Credit` packet.
const CREDIT_BATCH: usize = WINDOW as usize / 4;

/// What comes on a stream.
#[derive(Debug)]
pub enum Item {
    Reply(Reply),
    /// Standard output, file content, TCP bytes.
    Data(Bytes),
    /// Standard error.
    DataErr(Bytes),
    /// The agent has said everything.
    End,
    /// The agent gave up.
    Reset,
}

/// An open request. Dropping it before the agent's `End` resets it.
#[derive(Debug)]
pub struct Stream {
    pub(super) sender: Sender,
    inbox: mpsc::UnboundedReceiver<(Item, usize)>,
    consumed: usize,
    /// Consumed, and about to be granted again.
    owed: Arc<AtomicU32>,
    over: bool,
    /// The agent has said everything.
    ended: bool,
    /// Of a kept connection: bytes that came on it, on the streams before this one too, and those of
    /// them that nobody took yet.
    pub(super) received: u64,
    pub(super) leftover: VecDeque<Bytes>,
}

/// The sending half: bytes for stdin, a file, a port.
#[derive(Debug, Clone)]
pub struct Sender {
    pub(super) id: u32,
    pub(super) shared: Arc<Shared>,
    pub(super) credit: Arc<Semaphore>,
    finished: Arc<AtomicBool>,
    /// What was sent on a kept connection.
    pub(super) log: Option<Arc<Log>>,
}

impl Stream {
    pub(super) fn new(
        id: u32,
        shared: Arc<Shared>,
        inbox: mpsc::UnboundedReceiver<(Item, usize)>,
        credit: Arc<Semaphore>,
        log: Option<Arc<Log>>,
    ) -> Self {
        let sender = Sender { id, shared, credit, finished: Arc::default(), log };
        Self {
            sender,
            inbox,
            consumed: 0,
            owed: Arc::default(),
            over: false,
            ended: false,
            received: 0,
            leftover: VecDeque::new(),
        }
    }

    /// A handle to send with while this one receives.
    pub fn sender(&self) -> Sender {
        self.sender.clone()
    }

    /// The next thing the agent said; `Err(Gone)` if the machine died, `Ok(None)` after the end.
    /// Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<Item>, GuestError> {
        if let Some(bytes) = self.leftover.pop_front() {
            self.consumed += bytes.len();
            self.grant();
            return Ok(Some(Item::Data(bytes)));
        }
        if self.over {
            return Ok(None);
        }
        let Some((item, size)) = self.inbox.recv().await else {
            self.over = true;
            return Err(self.sender.shared.why());
        };
        self.account(&item, size);
        match item {
            Item::End => {
                self.over = true;
                self.ended = true;
                Ok(None)
            }
            Item::Reset => {
                self.over = true;
                Err(GuestError::protocol("the agent gave up the request"))
            }
            Item::Reply(Reply::Failed(failure)) => {
                Err(GuestError::Refused { code: failure.code(), message: failure.message.into() })
            }
            Item::Reply(_) | Item::Data(_) | Item::DataErr(_) => Ok(Some(item)),
        }
    }

    /// The next reply; bytes before it are not expected.
    pub async fn reply(&mut self) -> Result<Reply, GuestError> {
        match self.next().await? {
            Some(Item::Reply(reply)) => Ok(reply),
            Some(other) => Err(GuestError::protocol(format!("expected an answer, not {other:?}"))),
            None => Err(GuestError::protocol("the agent ended without an answer")),
        }
    }

    /// The next bytes, whichever kind; `None` at the end.
    pub async fn data(&mut self) -> Result<Option<Bytes>, GuestError> {
        match self.next().await? {
            Some(Item::Data(bytes) | Item::DataErr(bytes)) => Ok(Some(bytes)),
            Some(other) => Err(GuestError::protocol(format!("expected bytes, not {other:?}"))),
            None => Ok(None),
        }
    }

    /// Tells the agent how much was consumed, so that it may send more.
    fn account(&mut self, item: &Item, size: usize) {
        self.sender.shared.unread.fetch_sub(size, Ordering::Relaxed);
        match item {
            Item::Data(bytes) | Item::DataErr(bytes) => {
                self.consumed += bytes.len();
                self.received += bytes.len() as u64;
            }
            Item::Reply(_) | Item::End | Item::Reset => {}
        }
        self.grant();
    }

    fn grant(&mut self) {
        // Of a kept connection at once: the agent holds what is not granted.
        let batch = if self.sender.log.is_some() { 1 } else { CREDIT_BATCH };
        if self.consumed >= batch {
            let bytes = std::mem::take(&mut self.consumed);
            self.sender.shared.send_credit(self.sender.id, &self.owed, bytes);
        }
    }
}

impl Stream {
    /// Of a kept connection: what is needed to go on with it in another session, when this one is
    /// over, which this waits for.
    pub async fn park(mut self) -> Result<Parked, GuestError> {
        self.sender.shared.gone().await;
        let mut ended = self.ended;
        let (mut leftover, mut waiting) = (std::mem::take(&mut self.leftover), 0);
        waiting += leftover.iter().map(Bytes::len).sum::<usize>();
        while let Some((item, size)) = self.inbox.recv().await {
            self.sender.shared.unread.fetch_sub(size, Ordering::Relaxed);
            match item {
                Item::Data(bytes) => {
                    self.received += bytes.len() as u64;
                    waiting += bytes.len();
                    leftover.push_back(bytes);
                }
                Item::End => ended = true,
                Item::Reset | Item::Reply(_) | Item::DataErr(_) => {
                    return Err(GuestError::protocol("the agent gave up the connection"));
                }
            }
            if waiting > KEPT_WINDOW as usize {
                return Err(GuestError::protocol("more bytes than were granted"));
            }
        }
        let finished = self.sender.finished.load(Ordering::Relaxed);
        let log = self.sender.log.as_ref().and_then(|log| log.take());
        let log = log.ok_or_else(|| GuestError::protocol("it is not kept"))?;
        Ok(Parked { received: self.received, leftover, ended, finished, log })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let shared = &self.sender.shared;
        shared.forget(self.sender.id);
        self.inbox.close();
        while let Ok((_, size)) = self.inbox.try_recv() {
            shared.unread.fetch_sub(size, Ordering::Relaxed);
        }
        // Nobody may wait for credit of a stream that is over.
        self.sender.credit.close();
        if self.over && self.sender.finished.swap(true, Ordering::Relaxed) {
            return;
        }
        // A session that is over takes its streams with it, and a connection that is kept must not hear
        // that it is not.
        if shared.is_closed() {
            return;
        }
        let kind = if self.over { Kind::End } else { Kind::Reset };
        shared.send_parting(guest::packet(self.sender.id, kind, &[]));
    }
}

/// Bytes wrapped for the road: copied once, owned, so that a poll-based writer can keep them.
#[derive(Debug)]
pub struct Parcel {
    packet: Vec<u8>,
}

impl Parcel {
    /// How many bytes it carries.
    pub fn len(&self) -> usize {
        self.packet.len() - HEADER
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Sender {
    /// Wraps the first of these bytes: as many as one packet holds.
    pub fn wrap(&self, slices: &[IoSlice<'_>]) -> Parcel {
        let all: usize = slices.iter().map(|slice| slice.len()).sum();
        let mut packet = Vec::with_capacity(HEADER + all.min(MAX_PAYLOAD));
        packet.extend_from_slice(&guest::packet(self.id, Kind::Data, &[]));
        for slice in slices {
            let room = HEADER + MAX_PAYLOAD - packet.len();
            packet.extend_from_slice(&slice[..slice.len().min(room)]);
        }
        Parcel { packet }
    }

    /// Sends what was wrapped, waiting while the agent has not consumed what it got. On a kept
    /// connection it is noted and on its way at the same moment: whoever stops waiting for this finds
    /// neither or both.
    pub async fn ship(&self, parcel: Parcel) -> Result<(), GuestError> {
        let needed = u32::try_from(parcel.len()).expect("a parcel is smaller than the window");
        let granted = async {
            let room = match &self.log {
                Some(log) => Some(log.room(needed).await),
                None => None,
            };
            Ok::<_, AcquireError>((room, self.credit.acquire_many(needed).await?))
        };
        let granted = tokio::select! {
            // What has room is noted, also when the session is over: then it is sent in the next.
            biased;
            granted = granted => granted,
            () = self.shared.gone() => return Err(self.shared.why()),
        };
        // Closed credit: the stream was dropped, so nobody wants these bytes.
        let (room, credit) = granted.map_err(|_| GuestError::Gone)?;
        credit.forget();
        let (Some(log), Some(room)) = (&self.log, room) else {
            return self.shared.send(parcel.packet.into()).await;
        };
        log.push(&parcel.packet[HEADER..]);
        self.shared.send_data(parcel.packet, room);
        Ok(())
    }

    /// Resolves when the session is over.
    pub async fn gone(&self) {
        self.shared.gone().await;
    }

    /// Sends bytes, waiting while the agent has not consumed what it got.
    pub async fn send(&self, bytes: &[u8]) -> Result<(), GuestError> {
        for chunk in bytes.chunks(MAX_PAYLOAD) {
            self.ship(self.wrap(&[IoSlice::new(chunk)])).await?;
        }
        Ok(())
    }

    /// The end was sent in an earlier session: the agent may not have heard of it.
    pub(super) fn finish_again(&self) {
        self.finished.store(true, Ordering::Relaxed);
        self.shared.send_parting(guest::packet(self.id, Kind::End, &[]));
    }

    /// There is no more to send.
    pub async fn finish(&self) -> Result<(), GuestError> {
        if self.finished.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let end = guest::packet(self.id, Kind::End, &[]);
        if self.log.is_some() {
            // Behind what went this way.
            self.shared.send_parting(end);
            return Ok(());
        }
        self.shared.send(end.into()).await
    }
}

//! One request and its answer: replies and bytes in, bytes out, with flow control.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use tokio::sync::{Semaphore, mpsc};
use torpor_protocol::guest::{self, HEADER, Kind, MAX_PAYLOAD, Reply, WINDOW};

use super::GuestError;
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
    sender: Sender,
    inbox: mpsc::UnboundedReceiver<(Item, usize)>,
    consumed: usize,
    over: bool,
}

/// The sending half: bytes for stdin, a file, a port.
#[derive(Debug, Clone)]
pub struct Sender {
    id: u32,
    shared: Arc<Shared>,
    credit: Arc<Semaphore>,
    finished: Arc<AtomicBool>,
}

impl Stream {
    pub(super) fn new(
        id: u32,
        shared: Arc<Shared>,
        inbox: mpsc::UnboundedReceiver<(Item, usize)>,
        credit: Arc<Semaphore>,
    ) -> Self {
        let sender = Sender { id, shared, credit, finished: Arc::default() };
        Self { sender, inbox, consumed: 0, over: false }
    }

    /// A handle to send with while this one receives.
    pub fn sender(&self) -> Sender {
        self.sender.clone()
    }

    /// The next thing the agent said; `Err(Gone)` if the machine died, `Ok(None)` after the end.
    /// Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<Item>, GuestError> {
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
                Ok(None)
            }
            Item::Reset => {
                self.over = true;
                Err(GuestError::Protocol("the agent gave up the request".to_owned()))
            }
            Item::Reply(Reply::Failed(failure)) => {
                Err(GuestError::Refused { code: failure.code, message: failure.message })
            }
            Item::Reply(_) | Item::Data(_) | Item::DataErr(_) => Ok(Some(item)),
        }
    }

    /// The next reply; bytes before it are not expected.
    pub async fn reply(&mut self) -> Result<Reply, GuestError> {
        match self.next().await? {
            Some(Item::Reply(reply)) => Ok(reply),
            Some(other) => Err(GuestError::Protocol(format!("expected an answer, not {other:?}"))),
            None => Err(GuestError::Protocol("the agent ended without an answer".to_owned())),
        }
    }

    /// The next bytes, whichever kind; `None` at the end.
    pub async fn data(&mut self) -> Result<Option<Bytes>, GuestError> {
        match self.next().await? {
            Some(Item::Data(bytes) | Item::DataErr(bytes)) => Ok(Some(bytes)),
            Some(other) => Err(GuestError::Protocol(format!("expected bytes, not {other:?}"))),
            None => Ok(None),
        }
    }

    /// Tells the agent how much was consumed, so that it may send more.
    fn account(&mut self, item: &Item, size: usize) {
        self.sender.shared.unread.fetch_sub(size, Ordering::Relaxed);
        match item {
            Item::Data(bytes) | Item::DataErr(bytes) => self.consumed += bytes.len(),
            Item::Reply(_) | Item::End | Item::Reset => {}
        }
        if self.consumed >= CREDIT_BATCH {
            let bytes = u32::try_from(self.consumed).unwrap_or(u32::MAX);
            self.consumed = 0;
            let packet = guest::packet(self.sender.id, Kind::Credit, &bytes.to_le_bytes());
            self.sender.shared.send_parting(packet);
        }
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

    /// Sends what was wrapped, waiting while the agent has not consumed what it got.
    pub async fn ship(&self, parcel: Parcel) -> Result<(), GuestError> {
        let needed = u32::try_from(parcel.len()).expect("a parcel is smaller than the window");
        let granted = tokio::select! {
            granted = self.credit.acquire_many(needed) => granted,
            () = self.shared.gone() => return Err(self.shared.why()),
        };
        // Closed credit: the stream was dropped, so nobody wants these bytes.
        granted.map_err(|_| GuestError::Gone)?.forget();
        self.shared.send(parcel.packet.into()).await
    }

    /// Sends bytes, waiting while the agent has not consumed what it got.
    pub async fn send(&self, bytes: &[u8]) -> Result<(), GuestError> {
        for chunk in bytes.chunks(MAX_PAYLOAD) {
            self.ship(self.wrap(&[IoSlice::new(chunk)])).await?;
        }
        Ok(())
    }

    /// There is no more to send.
    pub async fn finish(&self) -> Result<(), GuestError> {
        if self.finished.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        self.shared.send(guest::packet(self.id, Kind::End, &[]).into()).await
    }
}

//! Streams over one channel: who is open, what came for whom, how much is unread.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;
use torpor_protocol::guest::{
    self, FILES_STREAM, Frame, GUEST_VERSION, HEADER, Hello, Kind, MAX_STREAMS, Reply, Request,
    WINDOW,
};

use super::GuestError;
use super::kept::Log;
use super::stream::{Item, Stream};
use crate::engine::Channel;

/// Unread bytes of one machine that the daemon keeps at most. An honest agent stays far below it:
/// data is bounded by the window of each stream, answers are small.
pub const UNREAD_MAX: usize = 128 * 1024 * 1024;

/// What all streams of one channel have in common.
pub(super) struct Shared {
    pub(super) channel: Arc<dyn Channel>,
    streams: Mutex<Streams>,
    pub(super) unread: AtomicUsize,
    closed: CancellationToken,
    /// Nothing of ours receives or sends any more.
    ended: CancellationToken,
    asleep: AtomicBool,
    /// Packets that are being sent right now.
    sending: watch::Sender<usize>,
    /// Packets from places that can't wait (Drop).
    parting: mpsc::UnboundedSender<Parting>,
}

/// What is sent from places that can't wait. A guest that does not read can't make it many: a stream
/// has one credit in it at most, and what it has of data takes room.
enum Parting {
    Packet(Bytes, Option<OwnedSemaphorePermit>),
    /// As much as is owed to the stream when it is sent.
    Credit(u32, Arc<AtomicU32>),
}

struct Streams {
    next: u32,
    /// For files, whose numbers are used in one session only: it begins anywhere.
    next_files: u32,
    open: HashMap<u32, Inbox>,
}

/// Where the frames of one stream go.
struct Inbox {
    items: mpsc::UnboundedSender<(Item, usize)>,
    credit: Arc<Semaphore>,
    log: Option<Arc<Log>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("closed", &self.closed.is_cancelled()).finish()
    }
}

/// Starts a session: everything that was on the way before its answer belongs to another one.
pub(super) async fn hello(channel: &dyn Channel) -> Result<(), GuestError> {
    static SESSION: AtomicU64 = AtomicU64::new(0);
    // Two daemons after each other must not choose the same number.
    let mut random = [0u8; 4];
    getrandom::fill(&mut random).map_err(|error| GuestError::protocol(error.to_string()))?;
    let number = SESSION.fetch_add(1, Ordering::Relaxed) & 0xffff_ffff;
    let session = (u64::from(u32::from_le_bytes(random)) << 32) | number;

    let packet = guest::json_packet(0, Kind::Hello, &Hello { version: GUEST_VERSION, session });
    channel.send(packet.into()).await.map_err(|_| GuestError::Gone)?;
    loop {
        let packet = channel.recv().await.map_err(|_| GuestError::Gone)?;
        if packet.is_empty() {
            return Err(GuestError::Gone);
        }
        let Ok(frame) = Frame::parse(&packet) else { continue };
        if frame.kind != Kind::Hello {
            continue;
        }
        let answer: Hello = frame.json().map_err(|bad| GuestError::protocol(bad.to_string()))?;
        if answer.version != GUEST_VERSION {
            let text = format!("it speaks version {}, not {GUEST_VERSION}", answer.version);
            return Err(GuestError::protocol(text));
        }
        if answer.session == session {
            return Ok(());
        }
    }
}

/// A number that another session hardly begins with.
fn anywhere() -> u32 {
    let mut random = [0; 4];
    // Without randomness there is no session either.
    let _ = getrandom::fill(&mut random);
    u32::from_le_bytes(random)
}

/// Starts the tasks that serve the channel.
pub(super) fn serve(channel: Arc<dyn Channel>) -> Arc<Shared> {
    let (parting, partings) = mpsc::unbounded_channel::<Parting>();
    let shared = Arc::new(Shared {
        channel: Arc::clone(&channel),
        streams: Mutex::new(Streams { next: 0, next_files: anywhere(), open: HashMap::new() }),
        unread: AtomicUsize::new(0),
        closed: CancellationToken::new(),
        ended: CancellationToken::new(),
        asleep: AtomicBool::new(false),
        sending: watch::channel(0).0,
        parting,
    });
    let (closed, ended) = (shared.closed.clone(), shared.ended.clone());
    let parting = tokio::spawn(part(Arc::clone(&channel), partings, closed.clone()));
    let receiving = receive(channel, Arc::downgrade(&shared), closed);
    tokio::spawn(async move {
        receiving.await;
        // It never panics, and what it leaves unsent nobody wants.
        let _ = parting.await;
        ended.cancel();
    });
    shared
}

/// Sends packets from places that can't wait. Ends with the last handle, as `parting` is dropped
/// with it, or when the channel is closed.
async fn part(
    channel: Arc<dyn Channel>,
    mut partings: mpsc::UnboundedReceiver<Parting>,
    closed: CancellationToken,
) {
    let unsent = async {
        while let Some(parting) = partings.recv().await {
            let (packet, _room) = match parting {
                Parting::Packet(packet, room) => (packet, room),
                Parting::Credit(id, owed) => {
                    let bytes = owed.swap(0, Ordering::Relaxed);
                    (guest::packet(id, Kind::Credit, &bytes.to_le_bytes()).into(), None)
                }
            };
            if channel.send(packet).await.is_err() {
                break;
            }
        }
    };
    // A guest that stopped reading must not hold us.
    tokio::select! {
        biased;
        () = closed.cancelled() => {}
        () = unsent => {}
    }
    closed.cancel();
}

async fn receive(
    channel: Arc<dyn Channel>,
    weak: std::sync::Weak<Shared>,
    closed: CancellationToken,
) {
    loop {
        let received = tokio::select! {
            // First: what comes after the channel was given up is for somebody else.
            biased;
            () = closed.cancelled() => break,
            received = channel.recv() => received,
        };
        let Ok(packet) = received else { break };
        if packet.is_empty() {
            break;
        }
        let Some(shared) = weak.upgrade() else { break };
        if let Err(bad) = shared.deliver(packet) {
            tracing::warn!(error = %bad, "an agent broke the protocol; its channel is closed");
            break;
        }
    }
    closed.cancel();
    if let Some(shared) = weak.upgrade() {
        shared.close();
    }
}

/// Opens a stream with `request`, on which `window` bytes may be sent. `log`: it is of a kept
/// connection.
pub(super) async fn open(
    shared: &Arc<Shared>,
    request: &Request,
    window: u32,
    log: Option<Arc<Log>>,
) -> Result<Stream, GuestError> {
    let (items, inbox) = mpsc::unbounded_channel();
    let credit = Arc::new(Semaphore::new(window as usize));
    let files = matches!(request, Request::ServeFiles { .. } | Request::StopFiles { .. });
    let id = shared.admit(Inbox { items, credit: Arc::clone(&credit), log: log.clone() }, files)?;
    let stream = Stream::new(id, Arc::clone(shared), inbox, credit, log);
    let packet = guest::json_packet(id, Kind::Open, request);
    if packet.len() > HEADER + guest::MAX_PAYLOAD {
        let message = format!("a request of {} bytes is too large", packet.len());
        return Err(GuestError::Refused {
            code: guest::FailureCode::Invalid,
            message: message.into(),
        });
    }
    shared.send(packet.into()).await?;
    Ok(stream)
}

impl Shared {
    fn admit(&self, inbox: Inbox, files: bool) -> Result<u32, GuestError> {
        let mut streams = self.streams.lock();
        if self.closed.is_cancelled() {
            return Err(self.why());
        }
        if streams.open.len() >= MAX_STREAMS {
            let message = format!("{MAX_STREAMS} requests to this sandbox are under way");
            return Err(GuestError::Refused {
                code: guest::FailureCode::Limit,
                message: message.into(),
            });
        }
        loop {
            let id = if files {
                streams.next_files = streams.next_files.wrapping_add(1);
                streams.next_files | FILES_STREAM
            } else {
                streams.next = streams.next.wrapping_add(1) & !FILES_STREAM;
                streams.next
            };
            if id != 0 && !streams.open.contains_key(&id) {
                streams.open.insert(id, inbox);
                return Ok(id);
            }
        }
    }

    pub(super) async fn send(&self, packet: Bytes) -> Result<(), GuestError> {
        let _sending = Sending::new(&self.sending);
        tokio::select! {
            biased;
            () = self.closed.cancelled() => Err(self.why()),
            sent = self.channel.send(packet) => sent.map_err(|_| GuestError::Gone),
        }
    }

    /// Sends from a place that can't wait.
    pub(super) fn send_parting(&self, packet: Vec<u8>) {
        // An error means that the channel is closed: then there is nobody to tell.
        let _ = self.parting.send(Parting::Packet(packet.into(), None));
    }

    /// The same for data, which takes `room` until it is sent.
    pub(super) fn send_data(&self, packet: Vec<u8>, room: OwnedSemaphorePermit) {
        let _ = self.parting.send(Parting::Packet(packet.into(), Some(room)));
    }

    /// Grants so many bytes more to a stream, with what is owed to it already.
    pub(super) fn send_credit(&self, id: u32, owed: &Arc<AtomicU32>, bytes: usize) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        if owed.fetch_add(bytes, Ordering::Relaxed) == 0 {
            let _ = self.parting.send(Parting::Credit(id, Arc::clone(owed)));
        }
    }

    pub(super) fn forget(&self, id: u32) {
        self.streams.lock().open.remove(&id);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    pub(super) async fn gone(&self) {
        self.closed.cancelled().await;
    }

    /// Waits until nothing of ours touches the channel.
    pub(super) async fn sever(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        self.close();
        self.ended.cancelled().await;
        // Cannot fail: we hold the sender.
        let _ = self.sending.subscribe().wait_for(|sending| *sending == 0).await;
    }

    /// Why a stream broke off.
    pub(super) fn why(&self) -> GuestError {
        if self.asleep.load(Ordering::Relaxed) { GuestError::Asleep } else { GuestError::Gone }
    }

    /// Every stream ends with "gone": its sender is dropped.
    fn close(&self) {
        self.closed.cancel();
        self.streams.lock().open.clear();
    }

    fn deliver(&self, packet: Bytes) -> Result<(), GuestError> {
        let frame = Frame::parse(&packet).map_err(|bad| GuestError::protocol(bad.to_string()))?;
        let streams = self.streams.lock();
        let Some(inbox) = streams.open.get(&frame.stream) else { return stray(&frame) };
        let item = match frame.kind {
            Kind::Data => Item::Data(packet.slice(HEADER..)),
            Kind::DataErr => Item::DataErr(packet.slice(HEADER..)),
            Kind::Reply => {
                let reply = frame.json::<Reply>();
                Item::Reply(reply.map_err(|bad| GuestError::protocol(bad.to_string()))?)
            }
            Kind::Credit => {
                let bytes = frame.credit().map_err(|bad| GuestError::protocol(bad.to_string()))?;
                let window = match &inbox.log {
                    Some(log) => log.confirm(bytes as usize),
                    None => WINDOW,
                };
                // A lying guest can't make the window larger than it is.
                let room = (window as usize).saturating_sub(inbox.credit.available_permits());
                inbox.credit.add_permits(room.min(bytes as usize));
                return Ok(());
            }
            Kind::End => Item::End,
            Kind::Reset => Item::Reset,
            Kind::Hello | Kind::Open => return stray(&frame),
        };
        let unread = self.unread.fetch_add(packet.len(), Ordering::Relaxed) + packet.len();
        if unread > UNREAD_MAX {
            return Err(GuestError::protocol(format!("{unread} bytes that nobody asked for")));
        }
        if inbox.items.send((item, packet.len())).is_err() {
            self.unread.fetch_sub(packet.len(), Ordering::Relaxed);
        }
        Ok(())
    }
}

/// A frame that belongs to no stream. Those of a stream that was given up are still on the way; the
/// answer to our own `Hello` was taken before the first frame came here.
fn stray(frame: &Frame<'_>) -> Result<(), GuestError> {
    let expected = match frame.kind {
        Kind::Hello | Kind::Open => false,
        Kind::Reply | Kind::Data | Kind::DataErr | Kind::Credit | Kind::End | Kind::Reset => {
            frame.stream != 0
        }
    };
    if expected {
        return Ok(());
    }
    let (kind, stream) = (frame.kind, frame.stream);
    Err(GuestError::protocol(format!("unexpected {kind:?} frame on stream {stream}")))
}

/// Counts a packet while it is being sent, so that none goes out after the channel was given up.
struct Sending<'a>(&'a watch::Sender<usize>);

impl<'a> Sending<'a> {
    fn new(count: &'a watch::Sender<usize>) -> Self {
        count.send_modify(|count| *count += 1);
        Self(count)
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

//! A connection that stays open while its sandbox sleeps.
//!
//! ```text
//!           ┌── attached ◀── resume ◀── a lease ◀─┐
//!   client ─┤       │ the session ends            │ the client's next byte or its end, or
//!           └── asleep, parked ───────────────────┘ somebody else woke it
//! ```
//!
//! Invariants
//! - It holds no lease while bytes go; they are use, so `idle_after` runs from the last one.
//! - No byte is lost and none comes twice, in either direction: what was read from one side stays here
//!   until it is in the log of the other, or written to it.
//! - A client's byte that may not have reached the server wakes the sandbox, also one that was on its
//!   way when the sandbox fell asleep.
//! - If the connection inside is not there any more, the client's is closed.

use std::io;
use std::pin::pin;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::time::{Instant, sleep, timeout};
use torpor_lifecycle::guest::{GuestError, Item, Parked, Sender, Stream};
use torpor_lifecycle::{Fleet, Keep, Lease, wake_deadline};
use torpor_protocol::guest::FailureCode;

use crate::connect::AGAIN;
use crate::forward::LINGER;

/// How long a client may be silent while the sandbox sleeps; then its connection is closed.
pub const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);
/// Bytes that are taken from the client at once; while the sandbox sleeps, also the most. A quiet
/// connection has so much memory.
const CHUNK: usize = 16 * 1024;

/// A connection to a port inside that outlives sleep.
pub struct Kept {
    fleet: Fleet,
    keep: Keep,
    stream: Stream,
    /// What came from inside before it was made.
    first: Bytes,
}

impl Kept {
    /// Of a stream that [`torpor_lifecycle::guest::Guest::connect_kept`] opened with the token of
    /// `keep`, and that was answered.
    pub fn new(fleet: Fleet, keep: Keep, stream: Stream) -> Self {
        Self { fleet, keep, stream, first: Bytes::new() }
    }

    /// These bytes came from inside already.
    pub(crate) fn after(self, first: Bytes) -> Self {
        Self { first, ..self }
    }

    /// Until both sides have said everything or one of them is gone. What is dropped before is closed
    /// inside, at the latest when the sandbox is awake for a while.
    pub async fn carry<C: AsyncRead + AsyncWrite>(self, client: C) {
        let Self { fleet, keep, mut stream, first } = self;
        let (from, to) = tokio::io::split(client);
        let (unsent, unwritten) = (BytesMut::new(), first);
        let mut ends =
            Ends { from, to, unsent, client_ended: false, unwritten, inside_ended: false };
        while let Still::Asleep = ends.attached(&keep, &mut stream).await {
            let resumed = match stream.park().await {
                Ok(parked) => ends.asleep(&fleet, &keep, parked).await,
                Err(error) => Err(error.to_string()),
            };
            match resumed {
                Ok(resumed) => stream = resumed,
                Err(reason) => {
                    tracing::debug!(sandbox = %keep.sandbox().id(), reason, "not kept any longer");
                    let _ = timeout(LINGER, ends.close()).await;
                    return;
                }
            }
        }
    }
}

/// Whether an agent does not know how to keep a connection: it is of a save that an older daemon made.
pub fn is_too_old(error: &GuestError) -> bool {
    matches!(error, GuestError::Refused { code: FailureCode::Invalid, .. })
}

/// What becomes of a connection whose sandbox was awake.
#[derive(Debug, PartialEq, Eq)]
enum Still {
    Asleep,
    Over,
}

/// The client's side, with what was taken from either side and not given to the other.
struct Ends<C> {
    from: ReadHalf<C>,
    to: WriteHalf<C>,
    unsent: BytesMut,
    client_ended: bool,
    unwritten: Bytes,
    inside_ended: bool,
}

impl<C: AsyncRead + AsyncWrite> Ends<C> {
    /// While the sandbox is awake. Whatever is dropped here in the middle has left nothing half done.
    async fn attached(&mut self, keep: &Keep, stream: &mut Stream) -> Still {
        let sender = stream.sender();
        let Self { from, to, unsent, client_ended, unwritten, inside_ended } = self;
        let mut inward = pin!(inward(from, unsent, client_ended, &sender, keep));
        let mut outward = pin!(outward(to, unwritten, inside_ended, stream, keep));
        // Half-open connections are fine for a while, but not for ever.
        let both = async {
            let (first, second) = tokio::select! {
                first = &mut inward => (first, timeout(LINGER, outward).await),
                first = &mut outward => (first, timeout(LINGER, inward).await),
            };
            first.and(second.unwrap_or(Err(Broke)))
        };
        tokio::select! {
            biased;
            _ = both => Still::Over,
            () = sender.gone() => Still::Asleep,
        }
    }

    /// While it sleeps, until it is awake and the connection goes on; or why it does not.
    async fn asleep(
        &mut self,
        fleet: &Fleet,
        keep: &Keep,
        mut parked: Parked,
    ) -> Result<Stream, String> {
        let mut give_up: Option<Instant> = None;
        while give_up.is_none_or(|deadline| Instant::now() < deadline) {
            let half_open = self.client_ended || self.inside_ended;
            let patience = if half_open { LINGER } else { KEPT_FOR };
            let roused = timeout(patience, self.roused(fleet, keep, &mut parked)).await;
            let roused = roused.map_err(|_| "the client was silent for too long".to_owned())??;
            let Some(lease) = roused else { continue };
            give_up.get_or_insert_with(wake_deadline);
            match lease.guest().resume(keep.token(), &mut parked).await {
                Ok(stream) => return Ok(stream),
                // It fell asleep again, or its machine is just being taken away.
                Err(GuestError::Asleep | GuestError::Gone) => {}
                Err(error) => return Err(error.to_string()),
            }
            drop(lease);
            sleep(AGAIN).await;
        }
        Err("the sandbox did not stay awake".to_owned())
    }

    /// A lease: at once if there is something for the server, else when there is or when somebody else
    /// wakes the sandbox. `None`: the client was told that the server said everything before.
    /// Cancel-safe.
    async fn roused(
        &mut self,
        fleet: &Fleet,
        keep: &Keep,
        parked: &mut Parked,
    ) -> Result<Option<Lease>, String> {
        loop {
            if parked.is_unconfirmed() || !self.unsent.is_empty() || self.client_ended {
                let lease = fleet.awake(keep.sandbox(), wake_deadline()).await;
                return lease.map(Some).map_err(|error| error.to_string());
            }
            self.unsent.reserve(CHUNK);
            tokio::select! {
                biased;
                lease = keep.when_awake() => {
                    return lease.map(Some).ok_or_else(|| "the sandbox is gone".to_owned());
                }
                read = self.from.read_buf(&mut self.unsent) => {
                    self.client_ended = read.map_err(|error| error.to_string())? == 0;
                }
                written = write_leftover(&mut self.to, &mut self.unwritten, parked),
                    if !self.inside_ended =>
                {
                    written.map_err(|error| error.to_string())?;
                    self.inside_ended = true;
                    return Ok(None);
                }
            }
        }
    }

    /// What came from inside goes to the client before the end.
    async fn close(&mut self) -> io::Result<()> {
        write(&mut self.to, &mut self.unwritten).await?;
        self.to.shutdown().await
    }
}

/// A side is gone.
#[derive(Debug)]
struct Broke;

/// From the client, until its end.
async fn inward<C: AsyncRead>(
    from: &mut ReadHalf<C>,
    unsent: &mut BytesMut,
    ended: &mut bool,
    sender: &Sender,
    keep: &Keep,
) -> Result<(), Broke> {
    loop {
        while !unsent.is_empty() {
            let parcel = sender.wrap(&[io::IoSlice::new(unsent)]);
            let length = parcel.len();
            if sender.ship(parcel).await.is_err() {
                // The session is over, which is seen elsewhere.
                return std::future::pending().await;
            }
            unsent.advance(length);
            keep.used();
        }
        if *ended {
            let _ = sender.finish().await;
            return Ok(());
        }
        unsent.reserve(CHUNK);
        *ended = from.read_buf(unsent).await.map_err(|_| Broke)? == 0;
    }
}

/// To the client, until the server's end.
async fn outward<C: AsyncWrite>(
    to: &mut WriteHalf<C>,
    unwritten: &mut Bytes,
    ended: &mut bool,
    stream: &mut Stream,
    keep: &Keep,
) -> Result<(), Broke> {
    loop {
        write(to, unwritten).await.map_err(|_| Broke)?;
        if *ended {
            return to.shutdown().await.map_err(|_| Broke);
        }
        match stream.next().await {
            Ok(Some(Item::Data(bytes))) => {
                *unwritten = bytes;
                keep.used();
            }
            Ok(None) => *ended = true,
            // The session is over, which is seen elsewhere.
            Err(GuestError::Asleep | GuestError::Gone) => return std::future::pending().await,
            Ok(Some(_)) | Err(_) => return Err(Broke),
        }
    }
}

/// What came before the session ended; resolves after the server's end, if that came too. Cancel-safe.
async fn write_leftover<C: AsyncWrite>(
    to: &mut WriteHalf<C>,
    unwritten: &mut Bytes,
    parked: &mut Parked,
) -> io::Result<()> {
    loop {
        write(to, unwritten).await?;
        match parked.take() {
            Some(bytes) => *unwritten = bytes,
            None if parked.ended() => return to.shutdown().await,
            None => return std::future::pending().await,
        }
    }
}

/// All of it. Cancel-safe: what was written is not there any more.
async fn write<C: AsyncWrite>(to: &mut WriteHalf<C>, bytes: &mut Bytes) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.write(bytes).await? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => bytes.advance(written),
        }
    }
    to.flush().await
}

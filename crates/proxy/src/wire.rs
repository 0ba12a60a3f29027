//! A TCP connection inside a sandbox, as bytes to read and write.
//!
//! Written bytes are copied once, into the packet that carries them; at most one packet waits for the
//! agent's credit. `flush` hands it over, `shutdown` is the end of our direction, a read of nothing is
//! the end of theirs. Dropping it closes the connection inside.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use torpor_lifecycle::guest::{GuestError, Item, Sender, Stream};
use torpor_protocol::guest::Reply;

type Sending = Pin<Box<dyn Future<Output = Result<(), GuestError>> + Send>>;

pub struct Wire {
    stream: Stream,
    sender: Sender,
    unread: Bytes,
    sending: Option<Sending>,
    finished: bool,
}

impl Wire {
    /// From a `Connect` request; waits for the agent to say that the connection stands.
    pub async fn open(mut stream: Stream) -> Result<Self, GuestError> {
        let reply = stream.reply().await?;
        if reply != Reply::Done {
            return Err(GuestError::protocol(format!("{reply:?} to a connect")));
        }
        let sender = stream.sender();
        Ok(Self { stream, sender, unread: Bytes::new(), sending: None, finished: false })
    }

    /// The stream, and what came on it and was not read. What waits to be sent must have been flushed.
    pub(crate) fn into_stream(self) -> (Stream, Bytes) {
        (self.stream, self.unread)
    }

    /// Until nothing waits to be sent.
    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(sending) = &mut self.sending else { return Poll::Ready(Ok(())) };
        let sent = ready!(sending.as_mut().poll(cx));
        self.sending = None;
        Poll::Ready(sent.map_err(broken))
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.unread.is_empty() {
            // `next` is cancel-safe and waits for one thing only, so polling a fresh one is the same
            // as polling it on.
            let next = ready!(pin!(self.stream.next()).poll(cx));
            match next {
                Ok(Some(Item::Data(bytes))) => self.unread = bytes,
                Ok(None) => return Poll::Ready(Ok(())),
                Ok(Some(item)) => {
                    let text = format!("{item:?} on a connection");
                    return Poll::Ready(Err(broken(GuestError::protocol(text))));
                }
                Err(error) => return Poll::Ready(Err(broken(error))),
            }
        }
        let size = buffer.remaining().min(self.unread.len());
        buffer.put_slice(&self.unread[..size]);
        self.unread.advance(size);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_sent(cx))?;
        if self.finished {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let parcel = self.sender.wrap(slices);
        let size = parcel.len();
        if size == 0 {
            return Poll::Ready(Ok(0));
        }
        let sender = self.sender.clone();
        self.sending = Some(Box::pin(async move { sender.ship(parcel).await }));
        // Mostly the road is free, and then nothing waits.
        if let Poll::Ready(sent) = self.poll_sent(cx) {
            sent?;
        }
        Poll::Ready(Ok(size))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_sent(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_sent(cx))?;
        if !self.finished {
            self.finished = true;
            let sender = self.sender.clone();
            self.sending = Some(Box::pin(async move { sender.finish().await }));
        }
        self.poll_sent(cx)
    }
}

fn broken(error: GuestError) -> io::Error {
    let kind = match error {
        GuestError::Gone | GuestError::Asleep => io::ErrorKind::ConnectionReset,
        GuestError::Timeout(_) => io::ErrorKind::TimedOut,
        GuestError::Refused { .. } | GuestError::Protocol(_) => io::ErrorKind::ConnectionAborted,
    };
    io::Error::new(kind, error)
}

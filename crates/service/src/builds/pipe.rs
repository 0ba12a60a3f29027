//! Bytes between code that waits and code that blocks. A few pieces may be under way; an end must be
//! said, so that a sender that vanishes is not taken for one that is done.

use std::io::{self, Read, Write};
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::StreamExt;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::upload::Pieces;

/// Pieces under way: one being made, one being used, and some slack.
const PIECES: usize = 4;
/// How long a blocking writer, which holds a thread, waits for somebody who reads slowly.
const STALL: Duration = Duration::from_secs(600);
/// Bytes a blocking writer gathers before it hands them on.
const GATHER: usize = 128 * 1024;

pub type Piece = io::Result<Bytes>;

/// Where code that waits puts bytes for code that blocks.
pub struct Inlet(mpsc::Sender<Piece>);

/// Where code that blocks reads them.
pub struct Outlet {
    pieces: mpsc::Receiver<Piece>,
    rest: Bytes,
    over: bool,
}

/// From code that waits to code that blocks.
pub fn inward() -> (Inlet, Outlet) {
    let (sender, pieces) = mpsc::channel(PIECES);
    (Inlet(sender), Outlet { pieces, rest: Bytes::new(), over: false })
}

impl Inlet {
    /// Whether the other side still wants it.
    pub async fn send(&self, bytes: Bytes) -> bool {
        // An empty piece is the end, which is said by `finish`.
        bytes.is_empty() || self.0.send(Ok(bytes)).await.is_ok()
    }

    pub async fn finish(self) {
        let _ = self.0.send(Ok(Bytes::new())).await;
    }

    pub async fn fail(self, error: io::Error) {
        let _ = self.0.send(Err(error)).await;
    }
}

impl Read for Outlet {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.rest.is_empty() && !self.over {
            self.rest = match self.pieces.blocking_recv() {
                Some(piece) => piece?,
                None => return Err(io::Error::other("its sender went away")),
            };
            self.over = self.rest.is_empty();
        }
        let count = self.rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&self.rest[..count]);
        self.rest.advance(count);
        Ok(count)
    }
}

/// Where code that blocks, on a thread of the runtime's, writes bytes for code that waits.
pub struct Spout {
    pieces: mpsc::Sender<Piece>,
    gathered: Vec<u8>,
}

/// From code that blocks to code that waits. The pieces end with an empty one.
pub fn outward() -> (Spout, mpsc::Receiver<Piece>) {
    let (pieces, receiver) = mpsc::channel(PIECES);
    (Spout { pieces, gathered: Vec::with_capacity(GATHER) }, receiver)
}

impl Spout {
    /// For who gives the spout away and knows when it was used.
    pub fn lid(&self) -> Lid {
        Lid(self.pieces.clone())
    }

    /// Says how it ended.
    pub fn close(mut self, result: io::Result<()>) {
        let ended = result.and_then(|()| self.flush()).map(|()| Bytes::new());
        let _ = self.pieces.blocking_send(ended);
    }
}

/// Closes a spout that was given away; nothing may be left in it.
pub struct Lid(mpsc::Sender<Piece>);

impl Lid {
    /// Says how it ended.
    pub async fn close(self, result: io::Result<()>) {
        let _ = self.0.send(result.map(|()| Bytes::new())).await;
    }
}

impl Write for Spout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.gathered.extend_from_slice(bytes);
        if self.gathered.len() >= GATHER {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.gathered.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.gathered, Vec::with_capacity(GATHER));
        let sending = tokio::time::timeout(STALL, self.pieces.send(Ok(piece.into())));
        let sent = Handle::current().block_on(sending).map_err(|_| io::ErrorKind::TimedOut)?;
        sent.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Pieces as a stream, until the empty one; if they end otherwise, so does the stream.
pub fn poured(first: Option<Bytes>, pieces: mpsc::Receiver<Piece>) -> Pieces {
    let state = (first, Some(pieces));
    let pieces = futures_util::stream::unfold(state, async |(first, pieces)| {
        if let Some(first) = first {
            return Some((Ok(first), (None, pieces)));
        }
        let mut pieces = pieces?;
        let broken = match pieces.recv().await {
            Some(Ok(bytes)) if bytes.is_empty() => return None,
            Some(Ok(bytes)) => return Some((Ok(bytes), (None, Some(pieces)))),
            Some(Err(error)) => error,
            None => io::ErrorKind::UnexpectedEof.into(),
        };
        tracing::warn!(error = %broken, "an answer breaks off");
        Some((Err(broken), (None, None)))
    });
    pieces.boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bytes_arrive_whole_in_both_directions() {
        let bytes: Vec<u8> = (0..1_000_000u32).map(|n| (n % 251) as u8).collect();
        let (mut spout, mut pieces) = outward();
        let (inlet, mut outlet) = inward();
        let expected = bytes.clone();
        let writer = tokio::task::spawn_blocking(move || {
            let written = bytes.chunks(777).try_for_each(|chunk| spout.write_all(chunk));
            spout.close(written);
        });
        let reader = tokio::task::spawn_blocking(move || {
            let mut read = Vec::new();
            outlet.read_to_end(&mut read).map(|_| read)
        });
        while let Some(piece) = pieces.recv().await {
            assert!(inlet.send(piece.unwrap()).await);
        }
        inlet.finish().await;
        writer.await.unwrap();
        assert_eq!(reader.await.unwrap().unwrap(), expected);
    }

    #[tokio::test]
    async fn a_sender_that_vanishes_is_not_done() {
        let (inlet, mut outlet) = inward();
        assert!(inlet.send(Bytes::from_static(b"half")).await);
        drop(inlet);
        let read = tokio::task::spawn_blocking(move || outlet.read_to_end(&mut Vec::new()));
        assert!(read.await.unwrap().is_err());
    }
}

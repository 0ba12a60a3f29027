//! A connection of a guest of which some bytes were looked at: they are read once more, as if nobody
//! had looked.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Gives back the bytes that were looked at, and then what follows them.
#[derive(Debug)]
pub(crate) struct Rewind {
    first: Bytes,
    stream: TcpStream,
}

impl Rewind {
    pub(crate) fn new(first: impl Into<Bytes>, stream: TcpStream) -> Self {
        Self { first: first.into(), stream }
    }

    /// The connection itself.
    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The connection itself, and what of the bytes that were looked at is not read yet.
    pub(crate) fn into_parts(self) -> (Bytes, TcpStream) {
        (self.first, self.stream)
    }
}

impl AsyncRead for Rewind {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.first.is_empty() {
            return Pin::new(&mut self.stream).poll_read(context, into);
        }
        let count = self.first.len().min(into.remaining());
        into.put_slice(&self.first[..count]);
        self.first.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Rewind {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

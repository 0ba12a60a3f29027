//! Bodies that are streamed both ways, and the bridge between them and blocking code (tar, files).
//!
//! A body is never held in memory as a whole: chunks of [`CHUNK`] bytes travel through channels of
//! [`DEPTH`], so whoever is slower slows the other one down.

use std::io::{self, Read, Write};

use bytes::{Buf, Bytes, BytesMut};
use futures_util::{StreamExt, TryStreamExt, stream};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc;

/// The body of a request.
pub type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Large enough for full speed, small enough to be felt as a stream.
const CHUNK: usize = 256 * 1024;
/// Chunks between two threads.
const DEPTH: usize = 8;

pub fn empty() -> Body {
    full(Bytes::new())
}

pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// What a reader gives; `count` is told how many bytes went.
pub fn reader(
    reader: impl AsyncRead + Unpin + Send + 'static,
    count: impl Fn(usize) + Send + 'static,
) -> Body {
    let chunks = stream::unfold((reader, count), |(mut reader, count)| async move {
        let mut chunk = BytesMut::with_capacity(CHUNK);
        match reader.read_buf(&mut chunk).await {
            Ok(0) => None,
            Ok(read) => {
                count(read);
                Some((Ok(chunk.freeze()), (reader, count)))
            }
            Err(error) => Some((Err(error), (reader, count))),
        }
    });
    StreamBody::new(chunks.map_ok(Frame::data)).boxed_unsync()
}

/// A body that blocking code writes: pass the [`ChunkWriter`] to its thread. An error that is sent
/// instead of [`ChunkWriter::finish`] breaks the request off, so a half body never looks whole.
pub fn written(count: impl Fn(usize) + Send + 'static) -> (ChunkWriter, Body) {
    let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(DEPTH);
    let chunks = stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|chunk| (chunk, receiver))
    });
    let counted = chunks.inspect(move |chunk| {
        if let Ok(chunk) = chunk {
            count(chunk.len());
        }
    });
    let body = StreamBody::new(counted.map_ok(Frame::data)).boxed_unsync();
    (ChunkWriter { sender, chunk: BytesMut::with_capacity(CHUNK) }, body)
}

/// The blocking end of [`written`].
#[derive(Debug)]
pub struct ChunkWriter {
    sender: mpsc::Sender<io::Result<Bytes>>,
    chunk: BytesMut,
}

impl ChunkWriter {
    /// Ends the body well, or breaks it off with this error.
    pub fn finish(mut self, result: io::Result<()>) -> io::Result<()> {
        match result {
            Ok(()) => self.flush(),
            Err(error) => {
                let _ = self.sender.blocking_send(Err(io::Error::other(error.to_string())));
                Err(error)
            }
        }
    }
}

impl Write for ChunkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(CHUNK - self.chunk.len());
        self.chunk.extend_from_slice(&bytes[..taken]);
        if self.chunk.len() >= CHUNK {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        let full = std::mem::replace(&mut self.chunk, BytesMut::with_capacity(CHUNK)).freeze();
        // The request is over before its body: its answer says why.
        self.sender
            .blocking_send(Ok(full))
            .map_err(|_| io::Error::new(io::ErrorKind::ConnectionAborted, "the request ended"))
    }
}

/// Feeds an answer to blocking code: run the future, pass the [`ChunkReader`] to a thread. The
/// future ends when the body does, or when the reader was dropped.
pub fn read(mut body: Incoming, count: impl Fn(usize)) -> (ChunkReader, impl Future<Output = ()>) {
    let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(DEPTH);
    let pump = async move {
        loop {
            let chunk = match body.frame().await {
                None => break,
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => Ok(data),
                    Err(_trailers) => continue,
                },
                Some(Err(error)) => Err(io::Error::other(error)),
            };
            let broken = chunk.is_err();
            if let Ok(chunk) = &chunk {
                count(chunk.len());
            }
            if sender.send(chunk).await.is_err() || broken {
                return;
            }
        }
        let _ = sender.send(Ok(Bytes::new())).await;
    };
    (ChunkReader { receiver, chunk: Bytes::new(), ended: false }, pump)
}

/// The blocking end of [`read`]. A body that broke off is an error, never an early end.
#[derive(Debug)]
pub struct ChunkReader {
    receiver: mpsc::Receiver<io::Result<Bytes>>,
    chunk: Bytes,
    ended: bool,
}

impl Read for ChunkReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.chunk.is_empty() && !self.ended {
            let broken = || io::Error::new(io::ErrorKind::UnexpectedEof, "the answer broke off");
            self.chunk = self.receiver.blocking_recv().ok_or_else(broken)??;
            // An empty chunk is the mark of a good end.
            self.ended = self.chunk.is_empty();
        }
        let taken = buffer.len().min(self.chunk.len());
        buffer[..taken].copy_from_slice(&self.chunk[..taken]);
        self.chunk.advance(taken);
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_written_is_the_body() {
        let (mut writer, body) = written(|_| {});
        let thread = std::thread::spawn(move || {
            for _ in 0..1000 {
                writer.write_all(&[7; 1000]).unwrap();
            }
            writer.finish(Ok(())).unwrap();
        });
        let bytes = body.collect().await.unwrap().to_bytes();
        thread.join().unwrap();
        assert_eq!(bytes.len(), 1_000_000);
    }

    #[tokio::test]
    async fn a_failed_writer_breaks_the_body_off() {
        let (writer, body) = written(|_| {});
        let failed = Err(io::Error::other("the disk is gone"));
        let thread = std::thread::spawn(move || writer.finish(failed));
        let error = body.collect().await.unwrap_err();
        assert_eq!(error.to_string(), "the disk is gone");
        assert!(thread.join().unwrap().is_err());
    }

    #[test]
    fn a_reader_without_end_mark_reports_a_broken_answer() {
        let (sender, receiver) = mpsc::channel(1);
        sender.blocking_send(Ok(Bytes::from_static(b"ab"))).unwrap();
        drop(sender);
        let mut reader = ChunkReader { receiver, chunk: Bytes::new(), ended: false };
        let error = reader.read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}

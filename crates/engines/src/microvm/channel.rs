//! The road to the agent over a serial port: packets on a line of bytes (`protocol::guest::line`).
//!
//! QEMU holds the other end as a socket and takes one client at a time. Bytes that were under way when
//! a machine was saved are lost on both sides; whoever connects finds the next packet by its flag.
//!
//! Both directions are cancel-safe: what of a packet was sent before its sender went away is finished
//! by the next one, and what of a packet has arrived waits for the next who asks.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::path::Path;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Mutex;
use torpor_lifecycle::engine::Channel;
use torpor_protocol::guest::line::{Decoder, encode};

/// What is read at once: some packets of usual size, or half of a large one.
const READ_SIZE: usize = 64 * 1024;

pub(super) struct LineChannel {
    outgoing: Mutex<Outgoing>,
    incoming: Mutex<Incoming>,
}

struct Outgoing {
    socket: OwnedWriteHalf,
    /// What was begun and not sent to its end.
    rest: VecDeque<u8>,
    line: Vec<u8>,
}

struct Incoming {
    socket: OwnedReadHalf,
    decoder: Decoder,
    buffer: Box<[u8]>,
    /// What of the buffer has arrived and was not looked at.
    unread: Range<usize>,
}

impl LineChannel {
    pub(super) async fn connect(socket: &Path) -> io::Result<Self> {
        let (read, write) = UnixStream::connect(socket).await?.into_split();
        let outgoing = Outgoing { socket: write, rest: VecDeque::new(), line: Vec::new() };
        let buffer = vec![0; READ_SIZE].into_boxed_slice();
        let incoming = Incoming { socket: read, decoder: Decoder::new(), buffer, unread: 0..0 };
        Ok(Self { outgoing: Mutex::new(outgoing), incoming: Mutex::new(incoming) })
    }
}

#[async_trait]
impl Channel for LineChannel {
    async fn send(&self, packet: Bytes) -> io::Result<()> {
        let mut outgoing = self.outgoing.lock().await;
        // Of somebody who went away in the middle of it.
        outgoing.finish().await?;
        let Outgoing { rest, line, .. } = &mut *outgoing;
        line.clear();
        encode(&packet, line);
        rest.extend(line.iter());
        outgoing.finish().await
    }

    async fn recv(&self) -> io::Result<Bytes> {
        let mut incoming = self.incoming.lock().await;
        let Incoming { socket, decoder, buffer, unread } = &mut *incoming;
        loop {
            let mut line = &buffer[unread.clone()];
            let packet = decoder.next(&mut line).map(Bytes::copy_from_slice);
            unread.start = unread.end - line.len();
            if let Some(packet) = packet {
                return Ok(packet);
            }
            socket.readable().await?;
            match socket.try_read(buffer) {
                Ok(0) => return Ok(Bytes::new()),
                Ok(count) => *unread = 0..count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Ok(Bytes::new());
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl Outgoing {
    /// Sends what was begun. Cancelled, the rest waits for the next.
    async fn finish(&mut self) -> io::Result<()> {
        while !self.rest.is_empty() {
            self.socket.writable().await?;
            let (front, _) = self.rest.as_slices();
            match self.socket.try_write(front) {
                Ok(count) => drop(self.rest.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

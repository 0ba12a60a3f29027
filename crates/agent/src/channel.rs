//! The packet socket to the daemon.
//!
//! There is one outgoing packet buffer. Whoever wants to send waits for a [`Turn`], in order of
//! asking, fills the buffer and sends it; so memory does not grow with the number of streams, and no
//! stream can crowd out the others.
//!
//! The socket is watched for writing only while it is full. Otherwise each packet that the daemon
//! takes would wake the machine once more, for nothing.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use serde::Serialize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, MutexGuard};
use torpor_protocol::guest::{HEADER, Kind, MAX_PAYLOAD};

use crate::descriptor::{Descriptor, watched, watched_for_good};

/// Packets that may wait in the socket: enough to keep both sides busy.
const SOCKET_BUFFER: usize = 8 * (HEADER + MAX_PAYLOAD);
/// When to try again after the kernel had no memory for a packet.
const NO_BUFFERS_PAUSE: Duration = Duration::from_millis(10);

/// How long a packet may lie in the socket unnoticed. gVisor, when it revives a machine that was
/// saved in the middle of things, may never again tell of a descriptor that has something to read.
const UNTOLD_MAX: Duration = Duration::from_millis(100);

pub(crate) struct Channel {
    socket: AsyncFd<OwnedFd>,
    /// The same socket, watched anew because the kernel did not tell of a packet. What was watched
    /// before stays so: the runtime can't let go of it safely.
    anew: RefCell<Option<Rc<Descriptor>>>,
    /// The same socket once more, watched by itself.
    outgoing: Descriptor,
    packet: Mutex<Vec<u8>>,
}

impl Channel {
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Self> {
        // An engine whose sockets can't be resized works with the size they have.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER);
        Ok(Self {
            outgoing: watched(socket.try_clone()?, Interest::WRITABLE)?,
            anew: RefCell::new(None),
            socket: watched_for_good(socket, Interest::READABLE)?,
            packet: Mutex::new(vec![0; HEADER + MAX_PAYLOAD]),
        })
    }

    /// Packets come from one socket and go out at another, which somebody else uses too.
    pub(crate) fn apart(packets: OwnedFd, outgoing: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            outgoing: watched(outgoing, Interest::WRITABLE)?,
            anew: RefCell::new(None),
            socket: watched_for_good(packets, Interest::READABLE)?,
            packet: Mutex::new(vec![0; HEADER + MAX_PAYLOAD]),
        })
    }

    /// The next packet; 0 bytes when the other side is gone.
    pub(crate) async fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut told = true;
        loop {
            match rustix::net::recv(&self.socket, &mut *buffer, RecvFlags::empty()) {
                Ok((length, _)) => {
                    if !told {
                        let socket = self.socket.get_ref().try_clone()?;
                        self.anew.replace(Some(Rc::new(watched(socket, Interest::READABLE)?)));
                    }
                    return Ok(length);
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(0),
                Err(errno) => return Err(errno.into()),
            }
            told = match tokio::time::timeout(UNTOLD_MAX, self.readable()).await {
                Ok(told) => told.map(|()| true)?,
                Err(_) => false,
            };
        }
    }

    /// Waits until it is worth trying.
    async fn readable(&self) -> io::Result<()> {
        let anew = self.anew.borrow().clone();
        let anew = async {
            match anew {
                Some(anew) => anew.next(Interest::READABLE).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ready = self.socket.readable() => ready?.clear_ready(),
            ready = anew => ready?,
        }
        Ok(())
    }

    pub(crate) async fn turn(&self) -> Turn<'_> {
        Turn { socket: &self.outgoing, packet: self.packet.lock().await }
    }
}

/// The right to send the next packet.
pub(crate) struct Turn<'a> {
    socket: &'a Descriptor,
    packet: MutexGuard<'a, Vec<u8>>,
}

impl Turn<'_> {
    pub(crate) fn payload(&mut self) -> &mut [u8] {
        &mut self.packet[HEADER..]
    }

    /// Sends the first `length` bytes of the payload. Never returns once the other side is gone: the
    /// session sees that too, and ends.
    pub(crate) async fn send(mut self, stream: u32, kind: Kind, length: usize) {
        let packet = &mut self.packet[..HEADER + length];
        packet[..4].copy_from_slice(&stream.to_le_bytes());
        packet[4] = kind as u8;
        loop {
            let sent = self.socket.async_io(Interest::WRITABLE, |socket| {
                Ok(rustix::net::send(socket, packet, SendFlags::NOSIGNAL)?)
            });
            match sent.await.map_err(|error| Errno::from_io_error(&error)) {
                Ok(_) => return,
                Err(Some(Errno::NOBUFS | Errno::NOMEM)) => {
                    tokio::time::sleep(NO_BUFFERS_PAUSE).await;
                }
                Err(_) => std::future::pending().await,
            }
        }
    }

    /// Sends `value`, or says that it does not fit into one packet.
    pub(crate) async fn send_json<T: Serialize>(
        mut self,
        stream: u32,
        kind: Kind,
        value: &T,
    ) -> Result<(), TooLarge> {
        let mut rest = self.payload();
        serde_json::to_writer(&mut rest, value).map_err(|_| TooLarge)?;
        let length = MAX_PAYLOAD - rest.len();
        self.send(stream, kind, length).await;
        Ok(())
    }
}

/// The message does not fit into one packet.
#[derive(Debug)]
pub(crate) struct TooLarge;

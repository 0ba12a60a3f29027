//! A channel over a SEQPACKET socket: the kernel keeps packets whole.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Mutex;
use torpor_lifecycle::engine::Channel;
use torpor_protocol::guest::{HEADER, MAX_PAYLOAD};

use crate::watch::watch;

/// When to try again after the kernel had no memory for a packet.
const NO_BUFFERS_PAUSE: Duration = Duration::from_millis(10);

pub(crate) struct SeqPacket {
    socket: AsyncFd<OwnedFd>,
    /// Where packets arrive, before a copy of their size is handed on.
    arrival: Mutex<Vec<u8>>,
}

impl SeqPacket {
    /// Must be called inside a tokio runtime.
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let arrival = Mutex::new(vec![0; HEADER + MAX_PAYLOAD]);
        let socket = watch(socket, Interest::READABLE | Interest::WRITABLE)?;
        Ok(Self { socket, arrival })
    }
}

#[async_trait]
impl Channel for SeqPacket {
    async fn send(&self, packet: Bytes) -> io::Result<()> {
        loop {
            let sent = self.socket.async_io(Interest::WRITABLE, |socket| {
                Ok(rustix::net::send(socket, &packet, SendFlags::NOSIGNAL)?)
            });
            match sent.await {
                Ok(_) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => {
                    tokio::time::sleep(NO_BUFFERS_PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn recv(&self) -> io::Result<Bytes> {
        let mut arrival = self.arrival.lock().await;
        let received = self.socket.async_io(Interest::READABLE, |socket| {
            Ok(rustix::net::recv(socket, &mut arrival[..], RecvFlags::TRUNC)?)
        });
        match received.await {
            Ok((kept, length)) if length > kept => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "a packet is too large"))
            }
            Ok((kept, _)) => Ok(Bytes::copy_from_slice(&arrival[..kept])),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(Bytes::new()),
            Err(error) => Err(error),
        }
    }
}

//! TCP connections to servers inside the machine.
//!
//! Both directions end on their own, as TCP's do.
//!
//! gVisor forgets, when it revives a machine, where it was with its sequence numbers and source ports, but
//! not the connections that ended a minute ago (TIME-WAIT). A new connection with the ports of such a one
//! is swallowed, however often its first packet is sent again, if its number happens to be the lower. So
//! the agent chooses source ports itself, in turn, and goes on where it was after a revival; and a
//! connection that is not there soon is tried again from the next port: others inside leave such
//! connections, too.

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, sockopt};
use tokio::io::Interest;
use tokio::time::timeout;
use torpor_protocol::guest::{Failure, FailureCode, Kind, Reply};

use crate::descriptor::{Descriptor, watched};
use crate::failure::{failure, reason};
use crate::listeners;
use crate::stream::Stream;

/// Loopback answers at once, unless the server's queue is full.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// How long the first attempt may take; each further one twice as long as the one before, as a busy host
/// may be slow, or a server's queue full.
const FIRST_ATTEMPT: Duration = Duration::from_millis(250);
/// What kernels take by themselves where nobody chooses, so that no server counts on one of them.
const SOURCE_PORTS: RangeInclusive<u16> = 32_768..=60_999;
/// Ports in use that are passed over until the kernel is left to choose.
const SOURCE_TRIES: usize = 64;

thread_local! {
    static LAST_SOURCE: Cell<Option<u16>> = const { Cell::new(None) };
}

pub(crate) async fn connect(stream: &Stream, port: u16) -> Result<(), Failure> {
    let connection = reach(port).await?;
    stream.reply(&Reply::Done).await;
    let both = async { tokio::try_join!(bring(stream, &connection), carry(stream, &connection)) };
    if both.await.is_err() {
        stream.abort().await;
    }
    Ok(())
}

/// A connection to whoever listens on that port.
pub(crate) async fn reach(port: u16) -> Result<Descriptor, Failure> {
    let connection = dial(port).await.map_err(|error| {
        let message = format!("nothing listens on port {port}: {}", reason(&error));
        failure(FailureCode::NotListening, message)
    })?;
    // Small messages go at once: latency matters more than packets on loopback.
    let _ = sockopt::set_tcp_nodelay(connection.get_ref(), true);
    Ok(connection)
}

/// By the newer loopback address only if nobody answers at the older one, and by others only if somebody
/// listens there.
pub(crate) async fn dial(port: u16) -> io::Result<Descriptor> {
    let dial = async {
        let error = match dial_at(Ipv4Addr::LOCALHOST.into(), port).await {
            Ok(connection) => return Ok(connection),
            Err(error) => error,
        };
        if let Ok(connection) = dial_at(Ipv6Addr::LOCALHOST.into(), port).await {
            return Ok(connection);
        }
        for address in listeners::addresses(port) {
            if let Ok(connection) = dial_at(address, port).await {
                return Ok(connection);
            }
        }
        Err(error)
    };
    timeout(CONNECT_DEADLINE, dial).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

async fn dial_at(address: IpAddr, port: u16) -> io::Result<Descriptor> {
    let mut patience = FIRST_ATTEMPT;
    loop {
        match timeout(patience, attempt(address, port)).await {
            Ok(done) => return done,
            Err(_) => patience *= 2,
        }
    }
}

async fn attempt(address: IpAddr, port: u16) -> io::Result<Descriptor> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    bind_source(&socket, address);
    match rustix::net::connect(&socket, &SocketAddr::from((address, port))) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    let connection = watched(socket, Interest::READABLE | Interest::WRITABLE)?;
    connection.ready(Interest::WRITABLE).await?;
    sockopt::socket_error(connection.get_ref())??;
    // Where nobody listens the kernel may choose the same port for us, and then we would meet ourselves.
    let ends = (rustix::net::getsockname(&connection), rustix::net::getpeername(&connection));
    if let (Ok(own), Ok(Some(other))) = ends
        && own == other
    {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(connection)
}

/// Gives the socket the next source port that is free. If none is found the kernel chooses one.
fn bind_source(socket: &OwnedFd, to: IpAddr) {
    let any: IpAddr =
        if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    for _ in 0..SOURCE_TRIES {
        let source = next_source();
        if rustix::net::bind(socket, &SocketAddr::from((any, source))) != Err(Errno::ADDRINUSE) {
            return;
        }
    }
}

/// The port after the last one.
fn next_source() -> u16 {
    let next = match LAST_SOURCE.get() {
        Some(last) if last < *SOURCE_PORTS.end() => last + 1,
        Some(_) => *SOURCE_PORTS.start(),
        // Agents of tests share a host.
        None => {
            let span = u32::from(SOURCE_PORTS.end() - SOURCE_PORTS.start());
            let offset = u16::try_from(std::process::id() % span).unwrap_or(0);
            SOURCE_PORTS.start() + offset
        }
    };
    LAST_SOURCE.set(Some(next));
    next
}

/// From the server to the daemon.
pub(crate) async fn bring(stream: &Stream, connection: &Descriptor) -> io::Result<()> {
    loop {
        connection.ready(Interest::READABLE).await?;
        let mut ended = false;
        let fill = |room: &mut [u8]| {
            let read =
                connection.try_io(Interest::READABLE, |socket| Ok(rustix::io::read(socket, room)?));
            match read {
                Ok(0) => {
                    ended = true;
                    Ok(None)
                }
                Ok(length) => Ok(Some((Kind::Data, length))),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                Err(error) => Err(error),
            }
        };
        stream.send_data(fill).await?;
        if ended {
            stream.end().await;
            return Ok(());
        }
    }
}

/// From the daemon to the server.
async fn carry(stream: &Stream, connection: &Descriptor) -> io::Result<()> {
    while let Some(bytes) = stream.receive().await {
        connection.write_all(&bytes).await?;
    }
    Ok(rustix::net::shutdown(connection.get_ref(), Shutdown::Write)?)
}

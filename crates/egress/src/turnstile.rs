//! Where connections of guests arrive.
//!
//! Invariants
//! - Who is not a member is cut at once, and so is who connects to the turnstile itself.
//! - Dropping [`Listening`] ends everything that came through it.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;
use tokio_util::sync::{CancellationToken, DropGuard};
use torpor_lifecycle::engine::Turnstile;
use torpor_protocol::egress::{EgressEvent, EgressKind, Verdict};

use crate::attend::{Arrival, attend};
use crate::house::House;
use crate::names;
use crate::policy::word;
use crate::roster::Member;

/// Connections of all members together: each has two descriptors and some buffers.
const CONNECTIONS_MAX: usize = 16 * 1024;
/// Connections that wait to be accepted: a burst of a thousand is not lost.
const BACKLOG: u32 = 4096;
/// Pause after the kernel could not give a connection: it has no descriptors, and needs some time.
const PAUSE: Duration = Duration::from_millis(50);

/// Who says where a connection wanted to go.
pub type Original = Arc<dyn Fn(&TcpStream) -> io::Result<SocketAddrV4> + Send + Sync>;

/// The kernel, which led it here.
pub(crate) fn original() -> Original {
    Arc::new(|stream| Ok(rustix::net::sockopt::ip_original_dst(stream)?))
}

/// Guests are let in while this lives.
pub struct Listening {
    connections: SocketAddr,
    names: SocketAddr,
    _stop: DropGuard,
}

impl fmt::Debug for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listening")
            .field("connections", &self.connections)
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl Listening {
    /// Where connections arrive.
    pub fn connections(&self) -> SocketAddr {
        self.connections
    }

    /// Where names are asked for.
    pub fn names(&self) -> SocketAddr {
        self.names
    }

    pub(crate) fn open(
        house: &Arc<House>,
        turnstile: Turnstile,
        original: Original,
    ) -> io::Result<Self> {
        let connections = tcp(turnstile.address, turnstile.connections)?;
        let asked = tcp(turnstile.address, turnstile.names)?;
        let names = asked.local_addr()?;
        let udp = std::net::UdpSocket::bind(names)?;
        udp.set_nonblocking(true)?;
        let udp = UdpSocket::from_std(udp)?;
        house.ways.mark(&turnstile);
        let stop = CancellationToken::new();
        names::serve(house, udp, asked, &stop);
        let here = connections.local_addr()?;
        let door = Door { house: Arc::clone(house), original, stop: stop.clone() };
        tokio::spawn(stop.clone().run_until_cancelled_owned(door.keep(connections)));
        Ok(Self { connections: here, names, _stop: stop.drop_guard() })
    }
}

fn tcp(address: Ipv4Addr, port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind((address, port).into())?;
    socket.listen(BACKLOG)
}

/// What it takes to let connections in.
struct Door {
    house: Arc<House>,
    original: Original,
    stop: CancellationToken,
}

impl Door {
    async fn keep(self, listener: TcpListener) {
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            // While there is no place, guests wait to be accepted.
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, from)) => self.enter(stream, from, place),
                Err(error) => {
                    tracing::warn!(%error, "could not accept a connection of a guest");
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// Lets one in, or cuts it.
    fn enter(&self, stream: TcpStream, from: SocketAddr, place: OwnedSemaphorePermit) {
        let Some((member, to)) = self.known(&stream, from) else { return reset(&stream) };
        let Some(seat) = member.seat() else {
            self.tell_full(&member, to);
            return reset(&stream);
        };
        // Small messages go at once, as they came.
        let _ = stream.set_nodelay(true);
        let arrival = Arrival { house: Arc::clone(&self.house), member, seat, stream, to };
        let attending = async move {
            Box::pin(attend(arrival)).await;
            drop(place);
        };
        tokio::spawn(self.stop.clone().run_until_cancelled_owned(attending));
    }

    /// Who it is and where it wants to go; none if it is nobody, or has nowhere to go.
    fn known(&self, stream: &TcpStream, from: SocketAddr) -> Option<(Arc<Member>, SocketAddrV4)> {
        let IpAddr::V4(guest) = from.ip() else { return None };
        let member = self.house.roster.find(guest)?;
        let to = (self.original)(stream).ok()?;
        let direct = stream.local_addr().is_ok_and(|here| here == SocketAddr::V4(to));
        (!direct && to.port() != 0).then_some((member, to))
    }

    fn tell_full(&self, member: &Member, to: SocketAddrV4) {
        self.house.audit.record(EgressEvent {
            at_ms: self.house.clock.now_ms(),
            sandbox: member.id.clone(),
            what: EgressKind::Tcp,
            verdict: Verdict::Denied,
            rule: word::CONNECTIONS.to_owned(),
            host: None,
            address: Some(*to.ip()),
            port: Some(to.port()),
            method: None,
            path: None,
            secrets: Vec::new(),
            gateway: None,
        });
    }
}

/// From now on closing this connection resets it, so that the guest sees at once that it is refused.
pub(crate) fn reset(stream: &TcpStream) {
    // It closes less abruptly otherwise.
    let _ = stream.set_zero_linger();
}

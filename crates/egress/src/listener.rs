//! Where connections of guests arrive.
//!
//! Invariants
//! - Who is not registered is cut at once, and so is who connects to the proxy's own address.
//! - Dropping [`Listener`] ends everything that came through it.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;
use tokio_util::sync::{CancellationToken, DropGuard};
use torpor_lifecycle::engine::EgressProxy;
use torpor_protocol::egress::{EgressEvent, EgressKind, Verdict};

use crate::handle::{Accepted, handle};
use crate::names;
use crate::policy::word;
use crate::registry::Guest;
use crate::shared::Shared;

/// Connections of all guests together: each has two descriptors and some buffers.
const CONNECTIONS_MAX: usize = 16 * 1024;
/// Connections that wait to be accepted: a burst of a thousand is not lost.
const BACKLOG: u32 = 4096;
/// Pause after the kernel could not give a connection: it has no descriptors, and needs some time.
const PAUSE: Duration = Duration::from_millis(50);

/// Who says where a connection wanted to go.
pub type OriginalDestination = Arc<dyn Fn(&TcpStream) -> io::Result<SocketAddrV4> + Send + Sync>;

/// The kernel, which led it here.
pub(crate) fn original_destination() -> OriginalDestination {
    Arc::new(|stream| Ok(rustix::net::sockopt::ip_original_dst(stream)?))
}

/// Guests are let in while this lives.
pub struct Listener {
    connections: SocketAddr,
    names: SocketAddr,
    _stop: DropGuard,
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("connections", &self.connections)
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl Listener {
    /// Where connections arrive.
    pub fn connections(&self) -> SocketAddr {
        self.connections
    }

    /// Where names are asked for.
    pub fn names(&self) -> SocketAddr {
        self.names
    }

    pub(crate) fn open(
        shared: &Arc<Shared>,
        proxy: EgressProxy,
        original_destination: OriginalDestination,
    ) -> io::Result<Self> {
        let connections = tcp(proxy.address, proxy.connections)?;
        let asked = tcp(proxy.address, proxy.names)?;
        let names = asked.local_addr()?;
        let udp = std::net::UdpSocket::bind(names)?;
        udp.set_nonblocking(true)?;
        let udp = UdpSocket::from_std(udp)?;
        shared.dialer.mark(&proxy);
        let stop = CancellationToken::new();
        names::serve(shared, udp, asked, &stop);
        let here = connections.local_addr()?;
        let acceptor =
            Acceptor { shared: Arc::clone(shared), original_destination, stop: stop.clone() };
        tokio::spawn(stop.clone().run_until_cancelled_owned(acceptor.run(connections)));
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
struct Acceptor {
    shared: Arc<Shared>,
    original_destination: OriginalDestination,
    stop: CancellationToken,
}

impl Acceptor {
    async fn run(self, listener: TcpListener) {
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            // While there is no place, guests wait to be accepted.
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, from)) => self.admit(stream, from, place),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a guest's connection, retrying");
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// Lets one in, or cuts it.
    fn admit(&self, stream: TcpStream, from: SocketAddr, place: OwnedSemaphorePermit) {
        let Some((guest, to)) = self.identify(&stream, from) else { return reset(&stream) };
        let Some(permit) = guest.permit() else {
            self.record_full(&guest, to);
            return reset(&stream);
        };
        // Small messages go at once, as they came.
        let _ = stream.set_nodelay(true);
        let accepted = Accepted { shared: Arc::clone(&self.shared), guest, permit, stream, to };
        let handling = async move {
            Box::pin(handle(accepted)).await;
            drop(place);
        };
        tokio::spawn(self.stop.clone().run_until_cancelled_owned(handling));
    }

    /// Who it is and where it wants to go; none if it is nobody, or has nowhere to go.
    fn identify(&self, stream: &TcpStream, from: SocketAddr) -> Option<(Arc<Guest>, SocketAddrV4)> {
        let IpAddr::V4(address) = from.ip() else { return None };
        let guest = self.shared.registry.find(address)?;
        let to = (self.original_destination)(stream).ok()?;
        let direct = stream.local_addr().is_ok_and(|here| here == SocketAddr::V4(to));
        (!direct && to.port() != 0).then_some((guest, to))
    }

    fn record_full(&self, guest: &Guest, to: SocketAddrV4) {
        self.shared.audit.record(EgressEvent {
            address: Some(*to.ip()),
            port: Some(to.port()),
            ..self.shared.event(guest, EgressKind::Tcp, Verdict::Denied, word::CONNECTIONS)
        });
    }
}

/// From now on closing this connection resets it, so that the guest sees at once that it is refused.
pub(crate) fn reset(stream: &TcpStream) {
    // It closes less abruptly otherwise.
    let _ = stream.set_zero_linger();
}

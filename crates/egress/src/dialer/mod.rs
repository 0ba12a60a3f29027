//! Ways out of this host: directly, from a chosen address, or through somebody else's proxy.
//!
//! Invariants
//! - Only addresses that the policy lets through are dialed, and what is sent to a proxy is the address,
//!   never the name: nobody resolves it a second time.
//! - A direct connection carries the mark by which the kernel refuses what the policy did not open.
//! - A policy whose gateway is not there has no way out; never a direct one instead.

mod mark;
mod proxy;
mod upstream;

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use torpor_lifecycle::engine::EgressProxy;
use torpor_protocol::Name;
use torpor_protocol::egress::Gateway;

use crate::names::{Resolver, Unresolved};
use crate::outgoing::Way;
use crate::policy::{Policy, Reach, host_of};

pub use upstream::{BadGateway, Upstream};

/// How long one address has to accept a connection, and a proxy to say that it has one.
const CONNECT: Duration = Duration::from_secs(10);
/// Addresses of one host that are tried: more only make the guest wait.
const TRIES: usize = 3;

pub(crate) struct Dialer {
    gateways: BTreeMap<Name, Upstream>,
    pub(crate) resolver: Resolver,
    /// `SO_MARK` of connections to public addresses; 0: none.
    public_mark: AtomicU32,
    /// And to private ones.
    private_mark: AtomicU32,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    /// The policy does not let it through; by this rule.
    #[error("denied by {rule}")]
    Denied { rule: String },
    #[error(transparent)]
    Unresolved(#[from] Unresolved),
    #[error("could not connect to {address}")]
    Unreachable { address: SocketAddr, source: io::Error },
    /// Guests may read this: nothing of the operator's proxy is in it.
    #[error("the gateway {name} has no connection for it")]
    Gateway { name: Name },
    /// The connection of the guest ended meanwhile: the guest is gone, or a new policy refuses it.
    #[error("the connection was cut")]
    Cut,
}

impl Dialer {
    pub(crate) fn new(gateways: BTreeMap<Name, Upstream>, resolver: Resolver) -> Self {
        let (public_mark, private_mark) = (AtomicU32::new(0), AtomicU32::new(0));
        Self { gateways, resolver, public_mark, private_mark }
    }

    /// From now on connections carry the marks of this proxy.
    pub(crate) fn mark(&self, proxy: &EgressProxy) {
        self.public_mark.store(proxy.public_mark, Ordering::Relaxed);
        self.private_mark.store(proxy.private_mark, Ordering::Relaxed);
    }

    pub(crate) fn knows(&self, gateway: &Name) -> bool {
        self.gateways.contains_key(gateway)
    }

    pub(crate) fn gateways(&self) -> Vec<Gateway> {
        let told = |(name, upstream): (&Name, &Upstream)| Gateway {
            name: name.clone(),
            through: upstream.to_string(),
        };
        self.gateways.iter().map(told).collect()
    }

    /// Connects with what this host resolves to, as far as the policy lets it through; with `wanted`
    /// rather than with another address of it.
    pub(crate) async fn dial_host(
        &self,
        policy: &Policy,
        host: &str,
        wanted: Ipv4Addr,
        port: u16,
    ) -> Result<TcpStream, DialError> {
        let host = host_of(host).ok_or_else(|| Unresolved::UnknownName(host.to_owned()))?;
        let mut addresses = self.resolver.addresses(&host).await?;
        if let Some(at) = addresses.iter().position(|address| *address == wanted) {
            addresses.swap(0, at);
        }
        let (mut refused, mut open) = (None, Vec::new());
        for address in addresses {
            match policy.address(Some(&host), address) {
                Ok(reach) => open.push((address, reach)),
                Err(rule) => refused = Some(DialError::Denied { rule }),
            }
        }
        let mut last = refused.unwrap_or_else(|| Unresolved::Addressless(host.clone()).into());
        for (address, reach) in open.into_iter().take(TRIES) {
            match self.connect(policy, SocketAddrV4::new(address, port), reach).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Connects with this very address, if the policy lets it through.
    pub(crate) async fn dial_address(
        &self,
        policy: &Policy,
        to: SocketAddrV4,
    ) -> Result<TcpStream, DialError> {
        let reach = policy.address(None, *to.ip()).map_err(|rule| DialError::Denied { rule })?;
        self.connect(policy, to, reach).await
    }

    async fn connect(
        &self,
        policy: &Policy,
        to: SocketAddrV4,
        reach: Reach,
    ) -> Result<TcpStream, DialError> {
        let Some(name) = &policy.network().gateway else {
            return self.connect_directly(to, self.mark_of(reach), Ipv4Addr::UNSPECIFIED).await;
        };
        let failed = |why: &str| {
            tracing::debug!(gateway = %name, %to, why, "gateway cannot connect, connection refused");
            DialError::Gateway { name: name.clone() }
        };
        let gateway = self.gateways.get(name).ok_or_else(|| failed("it is not there"))?;
        let connecting = async {
            match gateway {
                Upstream::Source(source) => {
                    return self.connect_directly(to, self.mark_of(reach), *source).await;
                }
                Upstream::Http(proxy) => proxy::http(proxy, to).await,
                Upstream::Socks5(proxy) => proxy::socks5(proxy, to).await,
            }
            .map_err(|error| failed(&error.to_string()))
        };
        let late = |_| failed("it does not answer in time");
        timeout(CONNECT, connecting).await.map_err(late)?
    }

    /// Connects for the daemon itself, with the first of these that answers.
    pub(crate) async fn dial_outgoing(
        &self,
        addresses: &[(Ipv4Addr, Way)],
        port: u16,
    ) -> Result<TcpStream, DialError> {
        let mut last = DialError::Cut;
        for (address, way) in addresses.iter().take(TRIES) {
            let mark = match way {
                Way::Public => self.mark_of(Reach::Public),
                Way::Opened => 0,
            };
            let to = SocketAddrV4::new(*address, port);
            match self.connect_directly(to, mark, Ipv4Addr::UNSPECIFIED).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn mark_of(&self, reach: Reach) -> u32 {
        let mark = match reach {
            Reach::Public => &self.public_mark,
            Reach::Private => &self.private_mark,
        };
        mark.load(Ordering::Relaxed)
    }

    async fn connect_directly(
        &self,
        to: SocketAddrV4,
        mark: u32,
        source: Ipv4Addr,
    ) -> Result<TcpStream, DialError> {
        let address = SocketAddr::V4(to);
        let unreachable = |source| DialError::Unreachable { address, source };
        let socket = TcpSocket::new_v4().map_err(unreachable)?;
        // A server that is gone without a word is noticed, some day.
        socket.set_keepalive(true).map_err(unreachable)?;
        mark::set(&socket, mark).map_err(unreachable)?;
        if !source.is_unspecified() {
            socket.bind(SocketAddr::from((source, 0))).map_err(unreachable)?;
        }
        let late = |_| unreachable(io::Error::from(io::ErrorKind::TimedOut));
        let stream = timeout(CONNECT, socket.connect(address)).await.map_err(late)?;
        stream.and_then(|stream| stream.set_nodelay(true).map(|()| stream)).map_err(unreachable)
    }
}

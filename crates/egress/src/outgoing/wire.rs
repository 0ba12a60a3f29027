//! Connections for outgoing requests: dialed by our rules, encrypted where the URL says so.

use std::io;
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use torpor_protocol::AddressRange;

use super::{SendError, host_in};
use crate::dialer::DialError;
use crate::policy::closed;
use crate::shared::Shared;

/// How long a server may take for a TLS handshake.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);
const ALPN: &[u8] = b"http/1.1";

/// Where outgoing requests may go.
pub(crate) struct Open {
    /// Closed addresses that the operator opened for them.
    pub(crate) opened: Vec<AddressRange>,
    /// Public networks that this host is part of, and its own addresses.
    pub(crate) near: Vec<AddressRange>,
}

/// How one is dialed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// With the mark of public addresses.
    Public,
    /// Without one: the operator says that it may be.
    Opened,
}

impl Open {
    pub(crate) fn reach(&self, host: &str, address: Ipv4Addr) -> Result<Way, SendError> {
        let among = |ranges: &[AddressRange]| ranges.iter().any(|range| range.contains(address));
        if among(&self.opened) {
            return Ok(Way::Opened);
        }
        if closed(address) || among(&self.near) {
            return Err(SendError::Closed { host: host.to_owned(), address });
        }
        Ok(Way::Public)
    }
}

/// Connects. Cheap to clone.
#[derive(Clone)]
pub(super) struct Connector {
    shared: Arc<Shared>,
    tls: TlsConnector,
}

impl Connector {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let mut config = shared.interceptor.tls().clone();
        config.alpn_protocols = vec![ALPN.to_vec()];
        Self { shared, tls: TlsConnector::from(Arc::new(config)) }
    }

    async fn connect(self, uri: Uri) -> Result<TokioIo<Wire>, SendError> {
        let host = host_in(&uri)?;
        let encrypted = uri.scheme_str() == Some("https");
        let port = uri.port_u16().unwrap_or(if encrypted { 443 } else { 80 });
        let stream = self.dial(&host, port).await?;
        if !encrypted {
            return Ok(TokioIo::new(Wire::Plain(stream)));
        }
        let unreachable = |why: String| SendError::Unreachable { host: host.clone(), why };
        let name = ServerName::try_from(host.clone());
        let name = name.map_err(|_| unreachable("its name is none of a server".to_owned()))?;
        let shaken = timeout(HANDSHAKE_DEADLINE, self.tls.connect(name, stream)).await;
        let stream = shaken
            .map_err(|_| unreachable("its TLS handshake takes too long".to_owned()))?
            .map_err(|error| unreachable(torpor_lifecycle::chain(&error)))?;
        Ok(TokioIo::new(Wire::Encrypted(Box::new(stream))))
    }

    async fn dial(&self, host: &str, port: u16) -> Result<TcpStream, SendError> {
        let Shared { dialer, open, .. } = &*self.shared;
        let unreachable = |error: DialError| SendError::Unreachable {
            host: host.to_owned(),
            why: torpor_lifecycle::chain(&error),
        };
        let addresses = match host.parse() {
            Ok(address) => vec![address],
            Err(_) => {
                let found = dialer.resolver.addresses(host).await;
                found.map_err(|error| unreachable(error.into()))?
            }
        };
        // All of them are looked at before one is dialed: a name that is partly inside is not half open.
        let ways = addresses.iter().map(|address| Ok((*address, open.reach(host, *address)?)));
        let ways = ways.collect::<Result<Vec<_>, SendError>>()?;
        dialer.dial_outgoing(&ways, port).await.map_err(unreachable)
    }
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<Wire>;
    type Error = SendError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, SendError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

/// A connection.
pub(super) enum Wire {
    Plain(TcpStream),
    Encrypted(Box<TlsStream<TcpStream>>),
}

impl Connection for Wire {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Encrypted(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Encrypted(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Encrypted(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Encrypted(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

//! Connections to the daemon: plain, or encrypted and believed by the roots of this computer and those
//! of a file.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::{CONNECT_TIMEOUT, Error, KEEPALIVE, Result};

/// WebSockets begin as HTTP/1.1.
const ALPN: &[u8] = b"http/1.1";

/// Connects. Cheap to clone.
#[derive(Clone)]
pub(super) struct Connector {
    http: HttpConnector,
    /// None: nobody asks for encryption.
    tls: Option<TlsConnector>,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connector").field("encrypted", &self.tls.is_some()).finish()
    }
}

impl Connector {
    /// `authorities`: a file of certificates (PEM) that are believed, too.
    pub(super) fn new(encrypted: bool, authorities: Option<&Path>) -> Result<Self> {
        let mut http = HttpConnector::new();
        http.set_nodelay(true);
        http.set_connect_timeout(Some(CONNECT_TIMEOUT));
        http.set_keepalive(Some(KEEPALIVE));
        http.enforce_http(false);
        let tls = if encrypted { Some(tls(authorities)?) } else { None };
        Ok(Self { http, tls })
    }
}

fn tls(authorities: Option<&Path>) -> Result<TlsConnector> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(path) = authorities {
        let bad = || Error::NoCertificates { path: path.to_owned() };
        let found = CertificateDer::pem_file_iter(path).map_err(|_| bad())?;
        let found: Vec<_> = found.collect::<Result<_, _>>().map_err(|_| bad())?;
        if roots.add_parsable_certificates(found).0 == 0 {
            return Err(bad());
        }
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(|error| Error::Internal {
        what: "can't set up encryption".to_owned(),
        why: error.to_string(),
    })?;
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
}

/// Somebody answers there who can't show that they are who they should be.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Distrusted(rustls::Error);

type Failure = Box<dyn std::error::Error + Send + Sync>;

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<Wire>;
    type Error = Failure;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Failure>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        self.http.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let encrypted = uri.scheme_str() == Some("https");
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let tls = self.tls.clone();
        let connecting = self.http.call(uri);
        Box::pin(async move {
            let stream = connecting.await?.into_inner();
            let Some(tls) = tls.filter(|_| encrypted) else {
                return Ok(TokioIo::new(Wire::Plain(stream)));
            };
            let handshake = tls.connect(ServerName::try_from(host)?, stream);
            match tokio::time::timeout(CONNECT_TIMEOUT, handshake).await {
                Ok(Ok(stream)) => Ok(TokioIo::new(Wire::Encrypted(Box::new(stream)))),
                Ok(Err(error)) => Err(explain(error)),
                Err(_) => Err("the handshake took too long".into()),
            }
        })
    }
}

fn explain(error: io::Error) -> Failure {
    let cause = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match cause {
        Some(cause @ rustls::Error::InvalidCertificate(_)) => Box::new(Distrusted(cause.clone())),
        Some(_) | None => error.into(),
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

//! Connections whose requests are read: TLS ends here, every request is decided about, secrets go in.
//!
//! ```text
//!  guest ═TLS (our authority)═▶ exchange ═TLS (verified)═▶ server
//!                                  │ check, decide, inject ─▶ ask
//!                                  └ redact ◀─ answer
//! ```
//!
//! Invariants
//! - The guest is offered what the server chose: both sides of a connection speak the same version of
//!   HTTP. There is one connection to the server at a time, and it ends with the guest's.
//! - A request names the host that its connection was decided about, or it is refused (421).
//! - Bodies stream. Only what has to be changed is kept whole, up to [`body::CHANGED_MAX`].
//! - Values of secrets are in no event, log, error or `Debug`; and in no answer of a host that they could have
//!   been sent to, whichever request it answers ([`redact`]). Such an answer comes whole and unpacked, or
//!   not at all.
//! - A secret leaves by TLS on port 443, or where its binding says ([`purse`]).
//!
//! Not done: placeholders in trailers, multipart forms, compressed bodies and WebSocket messages stay as
//! they are; so does a signature over what a placeholder changed. What [`redact`] can't see is told there.

mod authority;
mod body;
mod decode;
mod exchange;
mod forms;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod headers;
mod inject;
mod placeholder;
mod purse;
mod redact;
mod refusal;
mod room;
#[cfg(test)]
mod tests;
mod tunnel;
mod upstream;
mod within;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::{Acceptor, ClientHello, NoServerSessionStorage};
use rustls::sign::SingleCertAndKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use torpor_lifecycle::store::Vault;
use torpor_protocol::SandboxId;
use torpor_protocol::egress::{EgressKind, Verdict};

pub use authority::{Authority, AuthorityError};
pub(crate) use purse::secrets_of;

use crate::EgressError;
use crate::policy::{Decision, Policy, host_of, word};
use crate::visit::{Told, Visit};
use crate::ways::DialError;
use authority::provider;
use exchange::{Exchange, serve};
use room::Rooms;
use upstream::{Speech, Upstream};
use within::Within;

/// How long a guest may take for its part of a TLS handshake.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(30);

/// What is known of the connection that is read, and done for it outside. A [`Visit`]; in tests
/// something that reaches what they started.
#[async_trait]
pub(crate) trait Errand: Send + Sync + 'static {
    /// Whose connection it is.
    fn sandbox(&self) -> &SandboxId;
    /// The host that the connection was decided about: lower case, without a dot at the end.
    fn host(&self) -> &str;
    fn port(&self) -> u16;
    fn policy(&self) -> Arc<Policy>;
    fn decide(&self, method: &str, host: &str, path: &str) -> Decision;
    async fn dial(&self, host: &str, port: u16) -> Result<TcpStream, DialError>;
    fn tell(&self, told: Told);
    /// Cancelled when the connection must end.
    fn cut(&self) -> &CancellationToken;
}

#[async_trait]
impl Errand for Visit {
    fn sandbox(&self) -> &SandboxId {
        &self.member.id
    }

    fn host(&self) -> &str {
        &self.host
    }

    fn port(&self) -> u16 {
        self.to.port()
    }

    fn policy(&self) -> Arc<Policy> {
        self.policy()
    }

    fn decide(&self, method: &str, host: &str, path: &str) -> Decision {
        self.decide(method, host, path)
    }

    async fn dial(&self, host: &str, port: u16) -> Result<TcpStream, DialError> {
        self.dial(host, port).await
    }

    fn tell(&self, told: Told) {
        self.tell(told);
    }

    fn cut(&self) -> &CancellationToken {
        self.cut()
    }
}

/// Reads connections.
pub(crate) struct Reader {
    authority: Arc<Authority>,
    vault: Arc<dyn Vault>,
    /// For the way out.
    tls: ClientConfig,
    rooms: Rooms,
}

impl Reader {
    /// `roots` is a file of certificates that are believed besides those of the host.
    pub(crate) fn new(
        authority: Arc<Authority>,
        vault: Arc<dyn Vault>,
        roots: Option<&Path>,
    ) -> Result<Self, EgressError> {
        let tls = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(EgressError::failed("prepare TLS"))?
            .with_root_certificates(believed(roots)?)
            .with_no_client_auth();
        Ok(Self { authority, vault, tls, rooms: Rooms::default() })
    }

    /// Reads plain HTTP. Returns when the connection has ended.
    pub(crate) async fn read_plain<S>(&self, errand: impl Errand, stream: S)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let errand: Arc<dyn Errand> = Arc::new(errand);
        let within = Within::new(errand.cut());
        let _ended = within.guard();
        let upstream = Upstream::new(errand.clone(), None, within.clone());
        let (vault, room) = (self.vault.clone(), self.rooms.of(errand.sandbox()));
        let exchange = Exchange::new(errand, vault, upstream, Speech::Http1, room, within);
        serve(exchange, stream).await;
    }

    /// Reads HTTPS: the stream begins with the guest's hello. Returns when the connection has ended.
    pub(crate) async fn read_tls<S>(&self, errand: impl Errand, stream: S)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let errand: Arc<dyn Errand> = Arc::new(errand);
        let within = Within::new(errand.cut());
        let _ended = within.guard();
        let opened = within.until_cut(Box::pin(self.open(errand.clone(), stream, &within))).await;
        match opened {
            Some(Ok((exchange, stream))) => serve(exchange, stream).await,
            Some(Err((verdict, rule))) => errand.tell(Told::new(EgressKind::Tls, verdict, rule)),
            None => {}
        }
    }

    /// Shakes hands with the server, and then with the guest.
    async fn open<S>(
        &self,
        errand: Arc<dyn Errand>,
        stream: S,
        within: &Within,
    ) -> Result<(Arc<Exchange>, TlsStream<S>), (Verdict, &'static str)>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let broken = (Verdict::Failed, "handshake");
        let hello =
            timeout(HANDSHAKE_DEADLINE, LazyConfigAcceptor::new(Acceptor::default(), stream));
        let start = hello.await.map_err(|_| broken)?.map_err(|_| broken)?;
        let hello = start.client_hello();
        if hello.server_name().and_then(host_of).as_deref() != Some(errand.host()) {
            return Err((Verdict::Denied, word::BAD_HOST));
        }
        let offered = offered(&hello);
        let negotiates = hello.alpn().is_some();
        let Some(first) = offered.first() else { return Err((Verdict::Denied, word::PROTOCOL)) };

        let mut upstream = Upstream::new(errand.clone(), Some(self.tls.clone()), within.clone());
        // If it fails the guest is told in an answer, which says more than a connection that ends.
        let speech = upstream.connect(&offered).await.unwrap_or(*first);
        let config = self.server(errand.host(), negotiates.then_some(speech));
        let config = config.map_err(|error| {
            tracing::warn!(%error, host = errand.host(), "a host can't be stood in for");
            (Verdict::Failed, "certificate")
        })?;
        let shaken = timeout(HANDSHAKE_DEADLINE, start.into_stream(config)).await;
        let stream = shaken.map_err(|_| broken)?.map_err(|error| {
            tracing::debug!(%error, "a guest does not shake hands");
            broken
        })?;
        let (vault, room) = (self.vault.clone(), self.rooms.of(errand.sandbox()));
        Ok((Exchange::new(errand, vault, upstream, speech, room, within.clone()), stream))
    }

    /// How we stand in for this host.
    fn server(
        &self,
        host: &str,
        speech: Option<Speech>,
    ) -> Result<Arc<ServerConfig>, Box<dyn std::error::Error + Send + Sync>> {
        let leaf = self.authority.leaf(host)?;
        let resolver = Arc::new(SingleCertAndKey::from(leaf));
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(resolver);
        config.alpn_protocols = speech.map(|speech| speech.token().to_vec()).into_iter().collect();
        // There is one configuration for each connection: nothing can be resumed.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }
}

/// The versions of HTTP that a guest speaks, the better one first.
fn offered(hello: &ClientHello<'_>) -> Vec<Speech> {
    let Some(tokens) = hello.alpn() else { return vec![Speech::Http1] };
    let tokens: Vec<&[u8]> = tokens.collect();
    let speeches = [Speech::Http2, Speech::Http1].into_iter();
    speeches.filter(|speech| tokens.contains(&speech.token())).collect()
}

/// The authorities that servers are believed by.
fn believed(more: Option<&Path>) -> Result<RootCertStore, EgressError> {
    let mut roots = RootCertStore::empty();
    let native = rustls_native_certs::load_native_certs();
    for error in native.errors {
        tracing::warn!(%error, "certificates of this host can't be read");
    }
    roots.add_parsable_certificates(native.certs);
    if let Some(path) = more {
        let failed = || format!("read the certificates in {}", path.display());
        let before = roots.len();
        let found = CertificateDer::pem_file_iter(path).map_err(EgressError::failed(failed()))?;
        for certificate in found {
            let certificate = certificate.map_err(EgressError::failed(failed()))?;
            roots.add(certificate).map_err(EgressError::failed(failed()))?;
        }
        if roots.len() == before {
            return Err(EgressError::Invalid(format!("{} has no certificate", path.display())));
        }
    }
    if roots.is_empty() {
        tracing::warn!("no authority is known: servers of hosts that are read won't be believed");
    }
    Ok(roots)
}

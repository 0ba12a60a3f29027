//! Connections that are intercepted: TLS ends here, every request is decided about, secrets go in.
//!
//! ```text
//!  guest ═TLS (our CA)═▶ exchange ═TLS (verified)═▶ server
//!                            │ check, decide, inject ─▶ ask
//!                            └ redact ◀─ answer
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
//! - A secret leaves by TLS on port 443, or where its binding says ([`secrets`]).
//!
//! Not done: placeholders in trailers, multipart forms, compressed bodies and WebSocket messages stay as
//! they are; so does a signature over what a placeholder changed. What [`redact`] can't see is listed there.

mod body;
mod budget;
mod ca;
mod client;
mod decode;
mod exchange;
mod forms;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod headers;
mod inject;
mod placeholder;
mod redact;
mod refusal;
mod secrets;
mod tasks;
#[cfg(test)]
mod tests;
mod tunnel;

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

pub use ca::{CaError, InterceptionCa};
pub(crate) use secrets::secrets_of;

use crate::EgressError;
use crate::connection::{Connection, Outcome};
use crate::dialer::DialError;
use crate::policy::{Decision, Policy, host_of, word};
use budget::BodyBudgets;
use ca::provider;
use client::{Client, HttpVersion};
use exchange::{Exchange, serve};
use tasks::Tasks;

/// How long a guest may take for its part of a TLS handshake.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(30);

/// What is known of the connection that a request came on, and done for it outside. A [`Connection`]; in
/// tests something that reaches what they started.
#[async_trait]
pub(crate) trait RequestContext: Send + Sync + 'static {
    /// Whose connection it is.
    fn sandbox(&self) -> &SandboxId;
    /// The host that the connection was decided about: lower case, without a dot at the end.
    fn host(&self) -> &str;
    fn port(&self) -> u16;
    fn policy(&self) -> Arc<Policy>;
    fn decide(&self, method: &str, host: &str, path: &str) -> Decision;
    async fn dial(&self, host: &str, port: u16) -> Result<TcpStream, DialError>;
    fn record(&self, outcome: Outcome);
    /// Cancelled when the connection must end.
    fn cut(&self) -> &CancellationToken;
}

#[async_trait]
impl RequestContext for Connection {
    fn sandbox(&self) -> &SandboxId {
        &self.guest.id
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

    fn record(&self, outcome: Outcome) {
        self.record(outcome);
    }

    fn cut(&self) -> &CancellationToken {
        self.cut()
    }
}

/// Intercepts connections.
pub(crate) struct Interceptor {
    ca: Arc<InterceptionCa>,
    vault: Arc<dyn Vault>,
    /// For connections to servers.
    tls: ClientConfig,
    budgets: BodyBudgets,
}

impl Interceptor {
    /// `roots` is a file of certificates that are trusted besides those of the host.
    pub(crate) fn new(
        ca: Arc<InterceptionCa>,
        vault: Arc<dyn Vault>,
        roots: Option<&Path>,
        extra_ca: &[String],
    ) -> Result<Self, EgressError> {
        let tls = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(EgressError::failed("prepare TLS"))?
            .with_root_certificates(trusted_roots(roots, extra_ca)?)
            .with_no_client_auth();
        Ok(Self { ca, vault, tls, budgets: BodyBudgets::default() })
    }

    /// Whom connections to servers believe.
    pub(crate) fn tls(&self) -> &ClientConfig {
        &self.tls
    }

    /// Intercepts plain HTTP. Returns when the connection has ended.
    pub(crate) async fn intercept_plain<S>(&self, context: impl RequestContext, stream: S)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let context: Arc<dyn RequestContext> = Arc::new(context);
        let tasks = Tasks::new(context.cut());
        let _ended = tasks.guard();
        let client = Client::new(context.clone(), None, tasks.clone());
        let (vault, budget) = (self.vault.clone(), self.budgets.of(context.sandbox()));
        let exchange = Exchange::new(context, vault, client, HttpVersion::Http1, budget, tasks);
        serve(exchange, stream).await;
    }

    /// Intercepts HTTPS: the stream begins with the guest's hello. Returns when the connection has ended.
    pub(crate) async fn intercept_tls<S>(&self, context: impl RequestContext, stream: S)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let context: Arc<dyn RequestContext> = Arc::new(context);
        let tasks = Tasks::new(context.cut());
        let _ended = tasks.guard();
        let opened = tasks.until_cut(Box::pin(self.open(context.clone(), stream, &tasks))).await;
        match opened {
            Some(Ok((exchange, stream))) => serve(exchange, stream).await,
            Some(Err((verdict, rule))) => {
                context.record(Outcome::new(EgressKind::Tls, verdict, rule))
            }
            None => {}
        }
    }

    /// Shakes hands with the server, and then with the guest.
    async fn open<S>(
        &self,
        context: Arc<dyn RequestContext>,
        stream: S,
        tasks: &Tasks,
    ) -> Result<(Arc<Exchange>, TlsStream<S>), (Verdict, &'static str)>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let broken = (Verdict::Failed, "handshake");
        let hello =
            timeout(HANDSHAKE_DEADLINE, LazyConfigAcceptor::new(Acceptor::default(), stream));
        let start = hello.await.map_err(|_| broken)?.map_err(|_| broken)?;
        let hello = start.client_hello();
        if hello.server_name().and_then(host_of).as_deref() != Some(context.host()) {
            return Err((Verdict::Denied, word::BAD_HOST));
        }
        let offered = offered(&hello);
        let negotiates = hello.alpn().is_some();
        let Some(first) = offered.first() else { return Err((Verdict::Denied, word::PROTOCOL)) };

        let mut client = Client::new(context.clone(), Some(self.tls.clone()), tasks.clone());
        // If it fails the guest is told in an answer, which says more than a connection that ends.
        let version = client.connect(&offered).await.unwrap_or(*first);
        let config = self.server(context.host(), negotiates.then_some(version));
        let config = config.map_err(|error| {
            tracing::warn!(%error, host = context.host(), "cannot mint interception certificate, connection refused");
            (Verdict::Failed, "certificate")
        })?;
        let shaken = timeout(HANDSHAKE_DEADLINE, start.into_stream(config)).await;
        let stream = shaken.map_err(|_| broken)?.map_err(|error| {
            tracing::debug!(%error, "TLS handshake with guest failed");
            broken
        })?;
        let (vault, budget) = (self.vault.clone(), self.budgets.of(context.sandbox()));
        Ok((Exchange::new(context, vault, client, version, budget, tasks.clone()), stream))
    }

    /// The TLS server that stands in for this host.
    fn server(
        &self,
        host: &str,
        version: Option<HttpVersion>,
    ) -> Result<Arc<ServerConfig>, Box<dyn std::error::Error + Send + Sync>> {
        let leaf = self.ca.leaf(host)?;
        let resolver = Arc::new(SingleCertAndKey::from(leaf));
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(resolver);
        config.alpn_protocols =
            version.map(|version| version.token().to_vec()).into_iter().collect();
        // There is one configuration for each connection: nothing can be resumed.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }
}

/// The versions of HTTP that a guest speaks, the better one first.
fn offered(hello: &ClientHello<'_>) -> Vec<HttpVersion> {
    let Some(tokens) = hello.alpn() else { return vec![HttpVersion::Http1] };
    let tokens: Vec<&[u8]> = tokens.collect();
    let versions = [HttpVersion::Http2, HttpVersion::Http1].into_iter();
    versions.filter(|version| tokens.contains(&version.token())).collect()
}

/// The CAs that servers are verified with.
fn trusted_roots(more: Option<&Path>, extra: &[String]) -> Result<RootCertStore, EgressError> {
    let mut roots = RootCertStore::empty();
    let native = rustls_native_certs::load_native_certs();
    for error in native.errors {
        tracing::warn!(%error, "cannot read some CA certificates of this host, continuing without them");
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
    for pem in extra {
        let failed = EgressError::failed("use a CA certificate of guests");
        let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(failed)?;
        let failed = EgressError::failed("use a CA certificate of guests");
        roots.add(certificate).map_err(failed)?;
    }
    if roots.is_empty() {
        tracing::warn!("this host has no CA certificates: intercepted requests will fail");
    }
    Ok(roots)
}

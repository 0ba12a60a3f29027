//! Encrypted connections: which certificate a client gets, and where it comes from.
//!
//! ```text
//!  hello ──▶ fixed (two files) ──▶ claim: ours? ──▶ issuer ──▶ acme ──▶ directory
//!              │ covers the name      │ no            │ held      │ challenges, hook
//!              ▼                      ▼               ▼           ▼
//!            served                refused          served      served, kept
//! ```
//!
//! Invariants
//! - A name that a stranger made up never leads to an order.
//! - The only cryptography is that of [`provider`].
//! - A handshake ends in time, also when the certificate for it takes longer; the order goes on.

mod acme;
mod challenges;
mod claim;
mod config;
mod fixed;
mod held;
mod hook;
mod issuer;
mod validity;
mod web;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::server::{Acceptor, ClientHello, ResolvesServerCertUsingSni};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::signal::unix::{SignalKind, signal};
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;
use torpor_lifecycle::chain;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::PreviewId;
use torpor_service::Service;
use torpor_service::domains::Domains;
use torpor_store::Certificates;

use acme::Acme;
use challenges::Challenges;
use claim::{Claims, Existing};
pub use config::{AcmeChallenge, TlsConfig};
use fixed::Fixed;
use issuer::{Issuer, NoCertificate};

/// What is spoken on encrypted connections, the best first.
const ALPN: [&[u8]; 2] = [b"h2", b"http/1.1"];
/// What is spoken by a directory that wants to see that a name leads here (RFC 8737).
const ACME_ALPN: &[u8] = b"acme-tls/1";

/// From the first byte to the last of a handshake, with the time that a certificate may take which is
/// got for it.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);
/// How often it is looked whether the files of the operator's certificate changed, and whether a name
/// that is sure to be needed has its certificate.
const LOOK: Duration = Duration::from_secs(10);

/// Why encrypted connections can't be served.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{} can't be read", path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the certificate in {} can't be served", path.display())]
    Certificate {
        path: PathBuf,
        #[source]
        source: BadCertificate,
    },
    #[error("there are no certificates (PEM) in {}", .0.display())]
    Roots(PathBuf),
    #[error("TLS can't be set up")]
    Provider(#[source] rustls::Error),
    #[error("certificates can't be kept")]
    Store(#[from] StoreError),
}

pub use held::BadCertificate;

/// The cryptography of all our TLS, named everywhere: what a library would choose by itself depends
/// on what else is linked.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// Encrypted connections for the previews of a daemon, if it has some. `previews`: all names below it lead
/// here.
pub fn open(
    service: &Arc<Service>,
    config: &TlsConfig,
    data_dir: &Path,
    previews: &str,
) -> Result<Option<Arc<Tls>>, TlsError> {
    let (labels, ids) = (Arc::downgrade(service), Arc::downgrade(service));
    let is_open = |service: &Service, id: &PreviewId| service.previews.look_up(id).is_some();
    let existing = Existing {
        by_label: Box::new(move |label| {
            labels.upgrade().is_some_and(|service| {
                let found = service.previews.by_label(label);
                found.is_some_and(|entry| is_open(&service, &entry.preview.id))
            })
        }),
        by_id: Box::new(move |id| ids.upgrade().is_some_and(|service| is_open(&service, id))),
    };
    Tls::open(config, data_dir, previews, Arc::clone(&service.domains), existing)
}

/// Why a client was not let in.
#[derive(Debug, thiserror::Error)]
pub enum NoHandshake {
    #[error("the handshake took longer than {HANDSHAKE_DEADLINE:?}")]
    Late,
    #[error("the handshake failed: {0}")]
    Failed(#[from] io::Error),
    #[error("there is no certificate for {host}: {why}")]
    NoCertificate { host: String, why: String },
    /// A directory has seen what it wanted to see.
    #[error("it was a challenge")]
    Challenge,
}

/// Encrypted connections of a daemon.
pub struct Tls {
    fixed: Option<Fixed>,
    issuer: Option<Arc<Issuer>>,
    claims: Claims,
    challenges: Challenges,
    /// For clients that get no certificate: it tells them so.
    refusing: Arc<ServerConfig>,
}

impl Tls {
    /// None: the daemon has no encrypted connections.
    fn open(
        tls: &TlsConfig,
        data_dir: &Path,
        previews: &str,
        domains: Arc<Domains>,
        existing: Existing,
    ) -> Result<Option<Arc<Self>>, TlsError> {
        if tls.listen.is_none() {
            return Ok(None);
        }
        let fixed = match (&tls.certificate, &tls.key) {
            (Some(certificate), Some(key)) => Some(Fixed::open(certificate, key)?),
            (Some(_) | None, _) => None,
        };
        let store = Certificates::open(data_dir)?;
        let challenges = Challenges::default();
        let acme = Acme::open(tls, store.clone(), challenges.clone())?;
        let issuer = match acme {
            Some(acme) => Some(Issuer::open(Arc::new(acme), store, Arc::new(wall_ms))?),
            None => None,
        };
        let claims = Claims {
            names: tls.names.iter().map(ToString::to_string).collect(),
            previews: public_domain(previews),
            wildcards: tls.acme_dns_hook.is_some(),
            existing,
            domains,
        };
        let refusing = refusing()?;
        Ok(Some(Arc::new(Self { fixed, issuer, claims, challenges, refusing })))
    }

    /// The answer to a plain request for this path, if a directory asks for what it awaits.
    pub fn challenge(&self, path: &str) -> Option<String> {
        self.challenges.text(path)
    }

    /// Shakes hands.
    pub async fn accept<S>(&self, stream: S) -> Result<TlsStream<S>, NoHandshake>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let handshake = self.handshake(stream);
        tokio::time::timeout(HANDSHAKE_DEADLINE, handshake).await.unwrap_or(Err(NoHandshake::Late))
    }

    async fn handshake<S>(&self, stream: S) -> Result<TlsStream<S>, NoHandshake>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
        let (host, challenge) = wanted(&start.client_hello());
        let config = if challenge {
            let awaited = host.as_deref().and_then(|host| self.challenges.config(host));
            awaited.ok_or_else(|| "no challenge is awaited".to_owned())
        } else {
            self.choose(host.as_deref()).await
        };
        match config {
            Ok(config) => {
                let stream = start.into_stream(config).await?;
                if challenge { Err(NoHandshake::Challenge) } else { Ok(stream) }
            }
            Err(why) => {
                // The client gets an alert instead of silence, whatever comes of it.
                let _ = start.into_stream(Arc::clone(&self.refusing)).await;
                let host = host.unwrap_or_else(|| "a client that names no host".to_owned());
                Err(NoHandshake::NoCertificate { host, why })
            }
        }
    }

    /// What a client is served, or why not.
    async fn choose(&self, host: Option<&str>) -> Result<Arc<ServerConfig>, String> {
        let fixed = self.fixed.as_ref().map(Fixed::held);
        let Some(host) = host else {
            return fixed.map(|held| held.config).ok_or_else(|| "it must name one".to_owned());
        };
        if let Some(held) = fixed.filter(|held| held.covers(host)) {
            return Ok(held.config);
        }
        let not_ours = || {
            "it is neither in tls.certificate nor in tls.names, and no preview or verified domain"
                .to_owned()
        };
        let issuer = self.issuer.as_ref().ok_or_else(not_ours)?;
        let name = self.claims.certificate(host).ok_or_else(not_ours)?;
        let held = issuer.get(&name).await.map_err(|error: NoCertificate| chain(&error))?;
        Ok(Arc::clone(&held.config))
    }

    /// Reads the operator's files again when they change or on SIGHUP, and renews what is due, for
    /// ever. `counted` is told how many certificates are valid.
    pub async fn keep(self: Arc<Self>, counted: impl Fn(usize)) {
        let mut hangup = match &self.fixed {
            Some(_) => signal(SignalKind::hangup()).ok(),
            None => None,
        };
        loop {
            let wait = self.renew().min(LOOK);
            counted(self.certificates());
            let hung_up = async {
                match &mut hangup {
                    Some(signal) => drop(signal.recv().await),
                    None => std::future::pending().await,
                }
            };
            let insist = tokio::time::timeout(wait, hung_up).await.is_ok();
            if let Some(fixed) = &self.fixed {
                fixed.reload(insist);
            }
        }
    }

    fn renew(&self) -> Duration {
        let Some(issuer) = &self.issuer else { return LOOK };
        for name in self.claims.always() {
            issuer.prepare(&name);
        }
        issuer.renew(|name| self.claims.wants(name))
    }

    /// How many names have a certificate that was got for them.
    fn certificates(&self) -> usize {
        self.issuer.as_ref().map_or(0, |issuer| issuer.valid())
    }

    /// Ends what goes on in the background.
    pub fn stop(&self) {
        if let Some(issuer) = &self.issuer {
            issuer.stop();
        }
    }
}

/// Which host a client wants, and whether it is a directory that wants to see something.
fn wanted(hello: &ClientHello<'_>) -> (Option<String>, bool) {
    let mut protocols = hello.alpn().into_iter().flatten();
    let challenge = protocols.next() == Some(ACME_ALPN) && protocols.next().is_none();
    (hello.server_name().map(str::to_ascii_lowercase), challenge)
}

/// Nobody gives certificates for names that lead everybody to their own computer.
fn public_domain(domain: &str) -> String {
    let domain = domain.to_ascii_lowercase();
    let local = domain == "localhost" || domain.ends_with(".localhost");
    if local { String::new() } else { domain }
}

fn refusing() -> Result<Arc<ServerConfig>, TlsError> {
    let config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Provider)?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(ResolvesServerCertUsingSni::new()));
    Ok(Arc::new(config))
}

fn wall_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;

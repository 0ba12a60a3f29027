//! Real guests and real servers, with a interceptor between them.

mod back;
mod host;
mod secrets;
mod targets;
mod versions;

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use parking_lot::Mutex;
use rcgen::{CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::DuplexStream;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_util::sync::CancellationToken;
use torpor_lifecycle::store::{BoundSecret, StoreError, Vault};
use torpor_protocol::{SandboxId, SecretName};

use super::body::{Body, empty, full};
use super::ca::provider;
use super::{InterceptionCa, Interceptor, RequestContext};
use crate::connection::Outcome;
use crate::dialer::DialError;
use crate::policy::{Decision, Policy};

pub(super) const HOST: &str = "api.example.com";
/// Where guests believe the server to be.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 34);

type Handler = Arc<
    dyn Fn(Request<Incoming>) -> Pin<Box<dyn Future<Output = Response<Body>> + Send>> + Send + Sync,
>;

/// What a server should do with requests.
pub(super) fn handler<F, R>(answer: F) -> Handler
where
    F: Fn(Request<Incoming>) -> R + Send + Sync + 'static,
    R: Future<Output = Response<Body>> + Send + 'static,
{
    Arc::new(move |request| Box::pin(answer(request)))
}

/// A request as a server got it.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) target: String,
    pub(super) headers: HeaderMap,
    pub(super) body: String,
}

/// A server that remembers what it got, and says `seen`.
pub(super) fn remember() -> (Handler, Arc<Mutex<Vec<Seen>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let kept = seen.clone();
    let handler = handler(move |request| {
        let kept = kept.clone();
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let target = parts.uri.path_and_query().unwrap().to_string();
            let body = String::from_utf8_lossy(&body).into_owned();
            kept.lock().push(Seen { target, headers: parts.headers, body });
            Response::new(full(Bytes::from_static(b"seen")))
        }
    });
    (handler, seen)
}

/// Secrets: name, value, hosts.
type Secrets = &'static [(&'static str, &'static str, &'static [&'static str])];

struct Safe(Secrets);

#[async_trait]
impl Vault for Safe {
    async fn reveal(
        &self,
        _: &[SecretName],
    ) -> Result<std::collections::BTreeMap<String, String>, StoreError> {
        Err(StoreError::Invalid("nobody asks for it here".to_owned()))
    }

    async fn bound(&self, name: &SecretName) -> Result<Option<BoundSecret>, StoreError> {
        if name.as_str() == "BROKEN" {
            return Err(StoreError::Invalid("the vault is broken".to_owned()));
        }
        let found = self.0.iter().find(|(known, _, _)| *known == name.as_str());
        Ok(found.map(|(_, value, hosts)| BoundSecret {
            value: (*value).to_owned(),
            hosts: hosts.iter().map(|host| host.parse().unwrap()).collect(),
        }))
    }
}

#[derive(Clone)]
struct Fake {
    sandbox: SandboxId,
    policy: Arc<Policy>,
    port: u16,
    server: Option<SocketAddr>,
    open: Arc<AtomicBool>,
    told: Arc<Mutex<Vec<Outcome>>>,
    cut: CancellationToken,
}

#[async_trait]
impl RequestContext for Fake {
    fn sandbox(&self) -> &SandboxId {
        &self.sandbox
    }

    fn host(&self) -> &str {
        HOST
    }

    fn port(&self) -> u16 {
        self.port
    }

    fn policy(&self) -> Arc<Policy> {
        self.policy.clone()
    }

    fn decide(&self, method: &str, host: &str, path: &str) -> Decision {
        self.policy.request(method, host, path, ADDRESS)
    }

    async fn dial(&self, host: &str, port: u16) -> Result<TcpStream, DialError> {
        assert_eq!((host, port), (HOST, self.port));
        if !self.open.load(Ordering::Relaxed) {
            return Err(DialError::Denied { rule: "private".to_owned() });
        }
        let address = self.server.expect("the server was started");
        let connected = TcpStream::connect(address).await;
        connected.map_err(|source| DialError::Unreachable { address, source })
    }

    fn record(&self, outcome: Outcome) {
        self.told.lock().push(outcome);
    }

    fn cut(&self) -> &CancellationToken {
        &self.cut
    }
}

/// A server, and a interceptor on the way to it.
pub(super) struct World {
    interceptor: Arc<Interceptor>,
    certificate: String,
    context: Fake,
    tls: Option<TlsAcceptor>,
    handler: Handler,
    tasks: JoinSet<()>,
    _dir: TempDir,
}

impl World {
    /// The server speaks TLS, and the interceptor believes its certificate, which is for [`HOST`].
    pub(super) async fn new(network: Value, secrets: Secrets, handler: Handler) -> Self {
        Self::with(network, secrets, handler, HOST, &["h2", "http/1.1"]).await
    }

    pub(super) async fn with(
        network: Value,
        secrets: Secrets,
        handler: Handler,
        certified: &str,
        alpn: &[&str],
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (acceptor, root) = server_tls(certified, alpn);
        let roots = dir.path().join("roots.pem");
        std::fs::write(&roots, root).unwrap();
        let ca = Arc::new(InterceptionCa::open(dir.path()).unwrap());
        let certificate = ca.certificate().to_owned();
        let interceptor = Interceptor::new(ca, Arc::new(Safe(secrets)), Some(&roots), &[]).unwrap();
        let network = serde_json::from_value(network).unwrap();
        let context = Fake {
            sandbox: SandboxId::random(),
            policy: Arc::new(Policy::new(&network, &[])),
            port: 443,
            server: None,
            open: Arc::new(AtomicBool::new(true)),
            told: Arc::default(),
            cut: CancellationToken::new(),
        };
        let mut world = Self {
            interceptor: Arc::new(interceptor),
            certificate,
            context,
            tls: Some(acceptor),
            handler,
            tasks: JoinSet::new(),
            _dir: dir,
        };
        world.start().await;
        world
    }

    /// The same without TLS, on port 80.
    pub(super) async fn plain(network: Value, secrets: Secrets, handler: Handler) -> Self {
        let mut world = Self::new(network, secrets, handler).await;
        world.tasks.abort_all();
        world.tls = None;
        world.context.port = 80;
        world.start().await;
        world
    }

    async fn start(&mut self) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        self.context.server = Some(listener.local_addr().unwrap());
        let (tls, handler) = (self.tls.clone(), self.handler.clone());
        self.tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(attend(stream, tls.clone(), handler.clone()));
            }
        });
    }

    /// From now on, and as long as this says `false`, the policy does not let the address pass.
    pub(super) fn wall_off(&self) -> Arc<AtomicBool> {
        self.context.open.store(false, Ordering::Relaxed);
        self.context.open.clone()
    }

    pub(super) fn cut(&self) {
        self.context.cut.cancel();
    }

    pub(super) fn told(&self) -> Vec<Outcome> {
        self.context.told.lock().clone()
    }

    /// What was told when as much was.
    pub(super) async fn told_of(&self, count: usize) -> Vec<Outcome> {
        let enough = async {
            while self.told().len() < count {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(10), enough).await.unwrap();
        self.told()
    }

    /// A connection of a guest without TLS.
    pub(super) fn connect(&mut self) -> DuplexStream {
        let (guest, ours) = tokio::io::duplex(64 << 10);
        let (interceptor, context) = (self.interceptor.clone(), self.context.clone());
        self.tasks.spawn(async move { interceptor.intercept_plain(context, ours).await });
        guest
    }

    /// A connection of a guest that trusts our ca.
    pub(super) async fn connect_tls(
        &mut self,
        name: &str,
        alpn: &[&str],
    ) -> std::io::Result<TlsStream<DuplexStream>> {
        let (guest, ours) = tokio::io::duplex(64 << 10);
        let (interceptor, context) = (self.interceptor.clone(), self.context.clone());
        self.tasks.spawn(async move { interceptor.intercept_tls(context, ours).await });
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.certificate.as_bytes()).unwrap()).unwrap();
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|token| token.as_bytes().to_vec()).collect();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, guest).await
    }

    pub(super) async fn http1(&mut self) -> http1::SendRequest<Body> {
        let stream = self.connect_tls(HOST, &["http/1.1"]).await.unwrap();
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        self.tasks.spawn(async move { drop(connection.with_upgrades().await) });
        sender
    }

    pub(super) async fn plain_http1(&mut self) -> http1::SendRequest<Body> {
        let stream = self.connect();
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        self.tasks.spawn(async move { drop(connection.await) });
        sender
    }

    pub(super) async fn http2(&mut self) -> http2::SendRequest<Body> {
        let stream = self.connect_tls(HOST, &["h2"]).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"h2".as_slice()));
        let (sender, connection) =
            http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        self.tasks.spawn(async move { drop(connection.await) });
        sender
    }
}

async fn attend(stream: TcpStream, tls: Option<TlsAcceptor>, handler: Handler) {
    let service = service_fn(move |request| {
        let answer = handler(request);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let server = auto::Builder::new(TokioExecutor::new());
    match tls {
        Some(tls) => {
            let Ok(stream) = tls.accept(stream).await else { return };
            drop(server.serve_connection_with_upgrades(TokioIo::new(stream), service).await);
        }
        None => drop(server.serve_connection_with_upgrades(TokioIo::new(stream), service).await),
    }
}

/// A server with a certificate for this host, and the CA that signed it.
fn server_tls(host: &str, alpn: &[&str]) -> (TlsAcceptor, String) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let root = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let leaf = CertificateParams::new([host.to_owned()]).unwrap().signed_by(&key, &root).unwrap();
    let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![leaf.der().clone()], key)
        .unwrap();
    config.alpn_protocols = alpn.iter().map(|token| token.as_bytes().to_vec()).collect();
    (TlsAcceptor::from(Arc::new(config)), root.pem())
}

/// A request to [`HOST`] without a body.
pub(super) fn get(target: &str) -> Request<Body> {
    Request::get(target).header("host", HOST).body(empty()).unwrap()
}

pub(super) fn post(target: &str, kind: &str, body: impl Into<Bytes>) -> Request<Body> {
    let request = Request::post(target).header("host", HOST).header("content-type", kind);
    request.body(full(body.into())).unwrap()
}

pub(super) async fn text(answer: Response<Incoming>) -> String {
    let body = timeout(Duration::from_secs(20), answer.into_body().collect()).await;
    String::from_utf8(body.unwrap().unwrap().to_bytes().to_vec()).unwrap()
}

//! A fleet with one sandbox, a daemon's front door before it, applications "inside".

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;
use torpor_lifecycle::fake::{FakeEngine, FakeHost, FakeMemory, FakeStore, Inside};
use torpor_lifecycle::{Engines, Fleet, Parts, Policy, Sandbox, wake_deadline};
use torpor_protocol::{Lifetime, Network, Resources, SandboxSpec, StandbyPolicy};
use torpor_proxy::{Destination, Manner, Proxy, Target, refuse, route};

/// No step of a test takes longer, also on a busy host.
pub(crate) const SOON: Duration = Duration::from_secs(30);

pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;
pub(crate) type Body = UnsyncBoxBody<Bytes, BoxError>;

pub(crate) struct World {
    pub(crate) host: std::sync::Arc<FakeHost>,
    pub(crate) fleet: Fleet,
    address: SocketAddr,
    _door: AbortOnDropHandle<()>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.host.end();
    }
}

impl World {
    /// With a sandbox of the name "web".
    pub(crate) async fn new() -> Self {
        Self::made(Inside::RealAgent, StandbyPolicy::default(), Manner::default()).await
    }

    /// With a sandbox of the name "web" that sleeps when nobody used it for so long (0: when it is
    /// told), whose connections are kept.
    pub(crate) async fn keeping(inside: Inside, idle_after_ms: u64) -> Self {
        let standby = StandbyPolicy { idle_after_ms, ..StandbyPolicy::default() };
        Self::made(inside, standby, Manner { keep_open: true }).await
    }

    async fn made(inside: Inside, standby: StandbyPolicy, manner: Manner) -> Self {
        let (host, store) = (FakeHost::new(inside), FakeStore::new());
        let engine = std::sync::Arc::new(FakeEngine::new(std::sync::Arc::clone(&host)));
        let engines = Engines::new(engine, []);
        let parts = Parts {
            engines,
            ledger: store.clone(),
            images: store.clone(),
            saves: store.clone(),
            journal: store.clone(),
            volumes: store.clone(),
            vault: store,
            ca: None,
            guest: torpor_lifecycle::GuestDefaults::default(),
            gauge: FakeMemory::endless(),
            observer: std::sync::Arc::new(()),
            policy: Policy::default(),
        };
        let fleet = Fleet::recover(parts).await.unwrap();
        let spec = SandboxSpec { standby, ..spec("web") };
        let sandbox = fleet.create(spec).await.unwrap();
        soon(fleet.awake(&sandbox, wake_deadline())).await.unwrap();
        let (proxy, finder) = (Proxy::new(fleet.clone()), fleet.clone());
        let (address, door) = listen(move |stream, peer| {
            let (proxy, fleet) = (proxy.clone(), finder.clone());
            let service = service_fn(move |mut request: Request<Incoming>| {
                let (proxy, fleet) = (proxy.clone(), fleet.clone());
                async move {
                    let Some(Target { port, sandbox }) = route(&request) else {
                        return Ok::<_, Infallible>(Response::new(text("the api")));
                    };
                    let sandbox = match fleet.find(&sandbox) {
                        Ok(sandbox) => sandbox,
                        Err(error) => return Ok(refuse(error, &mut request)),
                    };
                    let to = Destination { sandbox, port, lease: None };
                    Ok(proxy.handle(to, request, Some(peer), manner).await)
                }
            });
            async move {
                let server = auto::Builder::new(TokioExecutor::new());
                let io = TokioIo::new(stream);
                let _ = server.serve_connection_with_upgrades(io, service).await;
            }
        })
        .await;
        Self { host, fleet, address, _door: door }
    }

    pub(crate) fn sandbox(&self) -> Sandbox {
        self.fleet.find(&"web".parse().unwrap()).unwrap()
    }

    pub(crate) async fn dial(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// One request over HTTP/1.1 on its own connection, which ends with the handle.
    pub(crate) async fn http1(&self, request: Request<Body>) -> Answer {
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(self.dial().await)).await.unwrap();
        let connection = AbortOnDropHandle::new(tokio::spawn(async move {
            let _ = connection.await;
        }));
        let response = soon(sender.send_request(request)).await.unwrap();
        Answer { response, _connection: connection }
    }

    /// The same over HTTP/2 with prior knowledge.
    pub(crate) async fn http2(&self, request: Request<Body>) -> Answer {
        let io = TokioIo::new(self.dial().await);
        let (mut sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
        let connection = AbortOnDropHandle::new(tokio::spawn(async move {
            let _ = connection.await;
        }));
        let response = soon(sender.send_request(request)).await.unwrap();
        Answer { response, _connection: connection }
    }

    pub(crate) async fn get(&self, port: u16, path: &str) -> Answer {
        self.http1(ask(port, path).body(text("")).unwrap()).await
    }

    /// Bytes in, everything that comes back until the connection is closed, which they must ask for.
    pub(crate) async fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = self.dial().await;
        stream.write_all(bytes).await.unwrap();
        let mut answer = Vec::new();
        let _ = soon(stream.read_to_end(&mut answer)).await;
        String::from_utf8_lossy(&answer).into_owned()
    }
}

/// A response, with the connection it came on.
pub(crate) struct Answer {
    pub(crate) response: Response<Incoming>,
    _connection: AbortOnDropHandle<()>,
}

impl Answer {
    pub(crate) fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name).map(|value| value.to_str().unwrap())
    }

    /// The next piece of the body; empty at its end.
    pub(crate) async fn chunk(&mut self) -> Bytes {
        let frame = soon(self.response.body_mut().frame()).await;
        frame.map(|frame| frame.unwrap().into_data().unwrap()).unwrap_or_default()
    }

    pub(crate) async fn text(mut self) -> String {
        let body = soon(self.response.body_mut().collect()).await.unwrap().to_bytes();
        String::from_utf8(body.to_vec()).unwrap()
    }
}

/// An application that listens on a port of loopback until it is dropped.
pub(crate) struct Application {
    pub(crate) port: u16,
    _task: AbortOnDropHandle<()>,
}

/// An application that speaks HTTP/1 and HTTP/2.
pub(crate) async fn application<F, R>(answer: F) -> Application
where
    F: Fn(Request<Incoming>) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Response<Body>> + Send + 'static,
{
    raw_application(move |stream| {
        let answer = answer.clone();
        let service = service_fn(move |request| {
            let answer = answer(request);
            async move { Ok::<_, Infallible>(answer.await) }
        });
        async move {
            let server = auto::Builder::new(TokioExecutor::new());
            let _ = server.serve_connection(TokioIo::new(stream), service).await;
        }
    })
    .await
}

/// An application that does what it likes with its connections.
pub(crate) async fn raw_application<F, R>(serve: F) -> Application
where
    F: Fn(TcpStream) -> R + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    let (address, task) = listen(move |stream, _| serve(stream)).await;
    Application { port: address.port(), _task: task }
}

async fn listen<F, R>(serve: F) -> (SocketAddr, AbortOnDropHandle<()>)
where
    F: Fn(TcpStream, SocketAddr) -> R + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        loop {
            let (stream, peer) = listener.accept().await.unwrap();
            connections.spawn(serve(stream, peer));
        }
    });
    (address, AbortOnDropHandle::new(task))
}

/// A request for a port of "web".
pub(crate) fn ask(port: u16, path: &str) -> http::request::Builder {
    Request::builder().uri(path).header("host", format!("{port}-web.localhost"))
}

/// The same with the authority in the target, as HTTP/2 has it.
pub(crate) fn ask_http2(port: u16, path: &str) -> http::request::Builder {
    Request::builder().uri(format!("http://{port}-web.localhost{path}"))
}

pub(crate) fn text(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).map_err(|never| match never {}).boxed_unsync()
}

/// A body whose frames the test sends when it likes.
pub(crate) fn fed() -> (tokio::sync::mpsc::Sender<&'static str>, Body) {
    let (sender, receiver) = tokio::sync::mpsc::channel::<&'static str>(1);
    let frames = futures_util::stream::unfold(receiver, |mut receiver| async {
        let data = Bytes::from_static(receiver.recv().await?.as_bytes());
        Some((Ok::<_, BoxError>(hyper::body::Frame::data(data)), receiver))
    });
    (sender, BodyExt::boxed_unsync(http_body_util::StreamBody::new(frames)))
}

pub(crate) async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("it took too long")
}

fn spec(name: &str) -> SandboxSpec {
    SandboxSpec {
        name: Some(name.parse().unwrap()),
        image: "test".to_owned(),
        image_id: FakeStore::image_id(),
        resources: Resources::default(),
        env: Default::default(),
        labels: Default::default(),
        network: Network::default(),
        lifetime: Lifetime::default(),
        standby: StandbyPolicy::default(),
        entrypoint: Vec::new(),
        secrets: Vec::new(),
        ports: None,
        engine: None,
        pool: None,
        mounts: Some(Vec::new()),
    }
}

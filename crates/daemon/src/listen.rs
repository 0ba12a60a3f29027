//! Connections: HTTP/1 and HTTP/2 on plain listeners and on one with TLS, for dialects and previews.
//!
//! Who connects and does not ask in time is cut off, and so is who makes us hold too much before it asked
//! ([`strangers`]); who asked may take as long as it needs, because bodies are streams. A shutdown lets
//! running requests end within [`GRACE`].

mod strangers;

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use torpor_edge::tls::{NoHandshake, Tls};
use torpor_lifecycle::ShutdownMode;
use torpor_service::Service;
use torpor_web::dialect::Dialect;

use crate::config::{Config, ListenAlso};
use crate::dispatcher::{Dispatcher, Peer};
use crate::{ServeError, Shutdown};
use strangers::{Counted, Strangers};

/// How long running requests may go on after a shutdown began.
const GRACE: Duration = Duration::from_secs(5);
/// How long the head of a request may take to arrive, the first one from the connection on.
const HEAD_DEADLINE: Duration = Duration::from_secs(30);
/// How long to wait when the host has no file descriptors left: somebody else must close some.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Longest head of a request, and what is read ahead of a body.
const HEAD_MAX: usize = 64 * 1024;
/// Written ahead to a connection at most; large enough for full speed, small enough for many.
const WRITE_AHEAD: usize = 512 * 1024;
/// Streams of one HTTP/2 connection at the same time.
const H2_STREAMS: u32 = 200;
/// What may be under way on one HTTP/2 stream and connection: 300 MB/s at a few milliseconds.
const H2_WINDOW: u32 = 4 * 1024 * 1024;
/// Silence after which the kernel, or HTTP/2, asks whether the peer is still there.
const KEEP_ALIVE: Duration = Duration::from_secs(30);

/// Takes the address that is configured.
pub async fn bind(config: &Config) -> Result<TcpListener, ServeError> {
    bind_to(config.listen).await
}

async fn bind_to(address: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(address).await.map_err(|source| {
        if source.kind() == io::ErrorKind::AddrInUse {
            return ServeError::PortInUse(address);
        }
        ServeError::Listen { address, source }
    })
}

/// Where connections come from.
pub(crate) struct Listeners {
    /// The first one is where everybody looks.
    all: Vec<Listener>,
    /// Which one is asked first the next time: a busy one does not keep others from being heard.
    turn: AtomicUsize,
}

struct Listener {
    socket: TcpListener,
    /// For encrypted connections.
    secure: bool,
    /// Whose clients look here.
    dialect: Option<&'static str>,
}

impl Listeners {
    /// Takes the other addresses, if there are to be some.
    pub(crate) async fn open(
        first: TcpListener,
        config: &Config,
        dialects: &[Arc<dyn Dialect>],
    ) -> Result<Self, ServeError> {
        let address = address_of(&first)?;
        let mut listeners = Self { all: Vec::new(), turn: AtomicUsize::new(0) };
        listeners.add(first, false, None);
        match config.listen_also {
            Some(ListenAlso::Off) => {}
            Some(ListenAlso::At(second)) => listeners.add(bind_to(second).await?, false, None),
            None => listeners.add_usual(address, dialects).await,
        }
        if let Some(address) = config.tls.listen {
            listeners.add(bind_to(address).await?, true, None);
        }
        for Listener { socket, secure, dialect } in &listeners.all[1..] {
            tracing::info!(address = %address_of(socket)?, tls = secure, dialect, "listening here, too");
        }
        Ok(listeners)
    }

    fn add(&mut self, socket: TcpListener, secure: bool, dialect: Option<&'static str>) {
        self.all.push(Listener { socket, secure, dialect });
    }

    /// Where clients of dialects look. Nobody asked for it, so it need not be free.
    async fn add_usual(&mut self, first: SocketAddr, dialects: &[Arc<dyn Dialect>]) {
        for dialect in dialects {
            for address in dialect.listeners(first) {
                match bind_to(address).await {
                    Ok(socket) => self.add(socket, false, Some(dialect.name())),
                    Err(error) => tracing::warn!(
                        dialect = dialect.name(),
                        "clients that look at {address} find nobody: {error}"
                    ),
                }
            }
        }
    }

    /// The first address.
    pub(crate) fn address(&self) -> Result<SocketAddr, ServeError> {
        address_of(&self.all[0].socket)
    }

    /// The address of encrypted connections.
    pub(crate) fn encrypted(&self) -> Result<Option<SocketAddr>, ServeError> {
        let found = self.all.iter().find(|listener| listener.secure);
        found.map(|listener| address_of(&listener.socket)).transpose()
    }

    /// An address that can be reached from elsewhere.
    pub(crate) fn exposed(&self) -> Result<Option<SocketAddr>, ServeError> {
        for listener in &self.all {
            let address = address_of(&listener.socket)?;
            if !address.ip().is_loopback() {
                return Ok(Some(address));
            }
        }
        Ok(None)
    }

    /// Cancel-safe.
    async fn accept(&self) -> io::Result<(TcpStream, Peer)> {
        let first = self.turn.fetch_add(1, Ordering::Relaxed);
        poll_fn(|context| {
            for offset in 0..self.all.len() {
                let it = &self.all[first.wrapping_add(offset) % self.all.len()];
                if let Poll::Ready(accepted) = it.socket.poll_accept(context) {
                    let (secure, listener) = (it.secure, it.dialect);
                    let known = |(stream, address)| (stream, Peer { address, secure, listener });
                    return Poll::Ready(accepted.map(known));
                }
            }
            Poll::Pending
        })
        .await
    }
}

fn address_of(listener: &TcpListener) -> Result<SocketAddr, ServeError> {
    let unknown = SocketAddr::from(([0; 4], 0));
    listener.local_addr().map_err(|source| ServeError::Listen { address: unknown, source })
}

/// Accepts until `shutdown` resolves, then lets what runs come to its end. Gives what `shutdown` said.
pub(crate) async fn serve(
    service: &Arc<Service>,
    dispatcher: Dispatcher,
    listeners: Listeners,
    tls: Option<Arc<Tls>>,
    connections_max: usize,
    mut shutdown: Shutdown,
) -> ShutdownMode {
    raise_file_limit();
    let front = Front {
        dispatcher,
        tls,
        places: Arc::new(Semaphore::new(connections_max)),
        strangers: Arc::default(),
        connections: TaskTracker::new(),
    };
    let mode = loop {
        tokio::select! {
            mode = &mut shutdown => break mode.unwrap_or(ShutdownMode::Running),
            () = front.accept(&listeners) => {}
        }
    };
    drop(listeners);
    tracing::info!(?mode, "stopping");
    service.stopping.cancel();
    front.connections.close();
    service.tasks.close();
    let ended = async { tokio::join!(front.connections.wait(), service.tasks.wait()) };
    if tokio::time::timeout(GRACE, ended).await.is_err() {
        tracing::warn!("requests that took longer than {GRACE:?} were cut off");
    }
    mode
}

/// Takes connections in.
struct Front {
    dispatcher: Dispatcher,
    tls: Option<Arc<Tls>>,
    places: Arc<Semaphore>,
    strangers: Arc<Strangers>,
    connections: TaskTracker,
}

impl Front {
    /// Takes one connection in. Cancel-safe.
    async fn accept(&self, listeners: &Listeners) {
        let mut place = pin!(Arc::clone(&self.places).acquire_owned());
        let place = tokio::select! {
            biased;
            place = place.as_mut() => place,
            () = self.strangers.make_room() => place.await,
        };
        let place = place.expect("the semaphore is never closed");
        let (stream, peer) = match listeners.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "could not accept a connection");
                return tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        };
        prepare(&stream);
        let strangers = Arc::clone(&self.strangers);
        let caller = Caller { dispatcher: self.dispatcher.clone(), peer, strangers };
        let tls = self.tls.clone();
        self.connections.spawn(async move {
            match tls {
                Some(tls) if peer.secure => caller.encrypted(stream, &tls).await,
                // Without TLS nobody comes to its listener.
                tls => caller.serve(stream, tls).await,
            }
            drop(place);
        });
    }
}

fn prepare(stream: &TcpStream) {
    // Without these a connection works all the same.
    let _ = stream.set_nodelay(true);
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, KEEP_ALIVE);
    let _ = sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE / 3);
    let _ = sockopt::set_tcp_keepcnt(stream, 3);
}

/// Somebody who connected.
struct Caller {
    dispatcher: Dispatcher,
    peer: Peer,
    strangers: Arc<Strangers>,
}

impl Caller {
    /// Shakes hands, or not.
    async fn encrypted(self, stream: TcpStream, tls: &Tls) {
        let stopping = self.dispatcher.stopping();
        let handshake = tokio::select! {
            handshake = tls.accept(stream) => handshake,
            () = self.strangers.wait() => return,
            () = stopping.cancelled() => return,
        };
        let peer = self.peer.address;
        match handshake {
            Ok(stream) => self.serve(stream, None).await,
            Err(error @ NoHandshake::NoCertificate { .. }) => {
                tracing::info!(%peer, "refused an encrypted connection: {error}");
            }
            Err(error @ (NoHandshake::Late | NoHandshake::Failed(_) | NoHandshake::Challenge)) => {
                tracing::debug!(%peer, "an encrypted connection came to nothing: {error}");
            }
        }
    }

    /// `challenged`: who may be asked for the answers that a directory awaits.
    async fn serve(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        challenged: Option<Arc<Tls>>,
    ) {
        let Self { dispatcher, peer, strangers } = self;
        let share = strangers.share();
        let stopping = dispatcher.stopping();
        let asked = CancellationToken::new();
        let first = asked.clone();
        let stream = Counted { inner: stream, share: Arc::clone(&share) };
        let service = service_fn(move |request: Request<Incoming>| {
            asked.cancel();
            let answering = share.answer();
            let path = request.uri().path();
            let awaited = challenged.as_ref().and_then(|tls| tls.challenge(path));
            let dispatcher = dispatcher.clone();
            async move {
                let answer = match awaited {
                    Some(answer) => Response::new(Body::from(answer)),
                    None => dispatcher.answer(request, peer).await?,
                };
                Ok::<_, Infallible>(answering.until_sent(answer))
            }
        });
        let builder = builder();
        let mut serving =
            pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
        let mut late = pin!(tokio::time::sleep(HEAD_DEADLINE));
        let mut crowded = pin!(strangers.wait());
        let mut closing = false;
        loop {
            tokio::select! {
                ended = serving.as_mut() => {
                    if let Err(error) = ended {
                        tracing::debug!(peer = %peer.address, error, "a connection broke");
                    }
                    return;
                }
                () = late.as_mut(), if !first.is_cancelled() => {
                    if !first.is_cancelled() {
                        return;
                    }
                }
                () = crowded.as_mut(), if !first.is_cancelled() => return,
                () = stopping.cancelled(), if !closing => {
                    closing = true;
                    serving.as_mut().graceful_shutdown();
                }
            }
        }
    }
}

fn builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .max_buf_size(HEAD_MAX);
    builder
        .http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(H2_WINDOW)
        .initial_connection_window_size(H2_WINDOW)
        .max_header_list_size(HEAD_MAX as u32)
        .max_concurrent_streams(H2_STREAMS)
        .max_send_buf_size(WRITE_AHEAD)
        .keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE);
    builder
}

/// Every sandbox and connection takes a few descriptors; the usual soft limit of 1024 is for
/// programs that use `select`.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

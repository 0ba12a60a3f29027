//! `torpor serve`: configuration, HTTP API, wiring.
//!
//! ```text
//!  listen ──▶ preview? ──▶ proxy ──┐
//!     │                            ├──▶ lease ──▶ agent
//!     └─────▶ router ──▶ handlers ─┘
//! ```
//!
//! Invariants
//! - Handlers only translate; sandboxes are decided on in `lifecycle`.
//! - The only reader of the environment is [`config`]; the only place with status codes is
//!   [`api::error`].
//! - Stopping the daemon stops no sandbox.

pub mod admission;
pub mod api;
pub mod app;
mod builds;
pub mod config;
mod doctor;
mod engine;
mod listen;
pub mod metrics;
pub mod telemetry;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use torpor_lifecycle::Fleet;
use torpor_lifecycle::engine::EngineError;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::{SandboxId, State};
use torpor_store::{Images, Layout, Ledger};

use app::App;
pub use app::Parts;
pub use config::Config;
pub use doctor::{Finding, Verdict, doctor};
pub use listen::bind;

/// Why the daemon does not run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("{0} is in use")]
    PortInUse(SocketAddr),
    #[error("could not listen on {address}")]
    Listen {
        address: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("{0} can be reached from elsewhere and there is no API key")]
    Exposed(SocketAddr),
    #[error("no isolation engine works on this host: {0}")]
    NoEngine(String),
    #[error("could not open the store")]
    Store(#[from] StoreError),
    #[error("could not open the isolation engine")]
    Engine(#[from] EngineError),
    #[error("could not recover the sandboxes")]
    Recover(#[from] torpor_lifecycle::Error),
}

impl ServeError {
    /// What to do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::PortInUse(_) => {
                Some("stop what uses it, or choose another port with --listen or TORPOR_LISTEN")
            }
            Self::Exposed(_) => Some(
                "set TORPOR_API_KEY, or listen on 127.0.0.1 and make a key with `torpor key create`",
            ),
            Self::NoEngine(_) | Self::Engine(_) => Some("`torpor doctor` says what is missing"),
            Self::Listen { .. } | Self::Store(_) | Self::Recover(_) => None,
        }
    }
}

/// Serves until `shutdown` resolves.
pub async fn serve(
    config: Config,
    listener: TcpListener,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let layout = Arc::new(Layout::open(&config.data_dir)?);
    let ledger = Ledger::open(&layout).await?;
    let images = Images::open(Arc::clone(&layout), ledger.clone(), torpor_engines::AGENT).await?;
    refuse_exposed(&config, &listener, &ledger).await?;
    let engine = engine::open(&config, &layout).await?;
    let installation = layout.tag().to_owned();
    let parts = Parts { installation, engine, ledger, images };
    serve_with(parts, config, listener, shutdown).await
}

/// [`serve`] with an engine and a store of the caller's choice.
pub async fn serve_with(
    parts: Parts,
    config: Config,
    listener: TcpListener,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let Parts { installation, engine, ledger, images } = parts;
    refuse_exposed(&config, &listener, &ledger).await?;
    let exposed = !address_of(&listener)?.ip().is_loopback();
    let keys = api::auth::Keyring::open(ledger.clone(), config.api_key.as_ref(), exposed).await?;
    let about = engine.about();
    let metrics = metrics::Metrics::new(about.kind, &about.version);
    let fleet = Fleet::recover(engine, Arc::new(ledger.clone()), Arc::new(images.clone())).await?;
    let app = Arc::new(App {
        installation,
        fleet,
        images,
        keys,
        config,
        metrics,
        host: admission::Host::here(),
        started: Instant::now(),
        stopping: CancellationToken::new(),
        tasks: TaskTracker::new(),
    });
    let counting = tokio::spawn(count(Arc::clone(&app)));
    let verifying = tokio::spawn(verify_images(Arc::clone(&app)));
    listen::serve(&app, listener, shutdown).await;
    counting.abort();
    verifying.abort();
    app.fleet.shutdown().await;
    ledger.close().await;
    Ok(())
}

/// Ends every machine of the installation and removes what they have on this host; gives how many
/// there were. Images and the ledger stay. Refused while a daemon runs on the same data directory.
pub async fn purge(config: &Config) -> Result<usize, ServeError> {
    let layout = Layout::open(&config.data_dir)?;
    engine::purge(config, &layout).await
}

fn address_of(listener: &TcpListener) -> Result<SocketAddr, ServeError> {
    let unknown = SocketAddr::from(([0; 4], 0));
    listener.local_addr().map_err(|source| ServeError::Listen { address: unknown, source })
}

/// Strangers must not find an open door.
async fn refuse_exposed(
    config: &Config,
    listener: &TcpListener,
    ledger: &Ledger,
) -> Result<(), ServeError> {
    let address = address_of(listener)?;
    let guarded = config.api_key.is_some() || !ledger.keys().await?.is_empty();
    if address.ip().is_loopback() || guarded {
        return Ok(());
    }
    Err(ServeError::Exposed(address))
}

/// Every image's bytes are checked before its first boot. Doing it ahead saves that boot the time.
async fn verify_images(app: Arc<App>) {
    use torpor_lifecycle::store::Images as _;
    let images = app.images.list().await.unwrap_or_default();
    for image in images {
        if let Err(error) = app.images.root(&image.id).await {
            tracing::error!(image = %image.id, error = torpor_lifecycle::chain(&error), "bad image");
        }
    }
}

/// Counts what becomes of sandboxes, however it came about.
async fn count(app: Arc<App>) {
    let mut changes = app.fleet.events();
    let mut states: HashMap<SandboxId, State> = HashMap::new();
    loop {
        let status = match changes.recv().await {
            Ok(status) => status,
            Err(RecvError::Lagged(_)) => continue,
            Err(RecvError::Closed) => return,
        };
        let before = match status.state {
            State::Terminated => states.remove(&status.id),
            State::Creating | State::Running | State::Failed => {
                states.insert(status.id, status.state)
            }
        };
        if before != Some(status.state) {
            app.metrics.entered(status.state);
        }
    }
}

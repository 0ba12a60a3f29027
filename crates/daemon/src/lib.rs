//! `torpor serve`: configuration, HTTP API, wiring.
//!
//! ```text
//!  listen ──▶ dispatcher ──▶ preview or port ──▶ proxy ──┐
//!                 │                                      ├──▶ lease ──▶ agent
//!                 └──▶ dialect ──▶ routes ──▶ handlers ──┘
//! ```
//!
//! Invariants
//! - Handlers only translate; sandboxes are decided on in `lifecycle`.
//! - The only reader of the environment is [`config`]; the only place with status codes is
//!   [`torpor_web::error`].
//! - Stopping the daemon loses no sandbox: they are saved, or go on without it.

pub mod api;
pub mod config;
pub mod cores;
mod dispatcher;
mod doctor;
pub mod egress;
mod engine;
mod listen;
mod memory;
mod parts;
pub mod telemetry;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use torpor_edge::dns::Resolver;
use torpor_edge::tls;
use torpor_egress::Settings;
use torpor_gateway::Gateway;
use torpor_lifecycle::engine::EngineError;
use torpor_lifecycle::store::StoreError;
use torpor_lifecycle::{Fleet, Policy};
use torpor_service::builds::jobs::Jobs;
use torpor_service::domains::{self, Domains};
use torpor_service::events::{self, Events};
use torpor_service::hosting::{self, Hosting};
use torpor_service::keys::Keyring;
use torpor_service::metrics::Metrics;
use torpor_service::previews::{self, Previews};
use torpor_service::schedules::{self, Schedules};
use torpor_service::{
    Registries, Service, admission, audit, caches, hooks, jobs, journals, pulls, tally,
};
use torpor_store::{AuditLog, Images, Journals, Layout, Ledger, Saves, TaskResults, Vault};
use torpor_volumes::{Dirs, VolumeStore};
use torpor_web::dialect::Dialect;

pub use config::Config;
use config::StandbyConfig;
use dispatcher::Dispatcher;
pub use doctor::{Finding, Verdict, doctor, production};
use listen::Listeners;
pub use listen::bind;
pub use parts::Parts;
pub use torpor_edge::tls::{BadCertificate, TlsError};
pub use torpor_lifecycle::ShutdownMode;

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
    #[error(transparent)]
    Config(#[from] config::ConfigError),
    #[error("could not open the way out of sandboxes")]
    Egress(#[from] torpor_egress::EgressError),
    #[error("could not open the encrypted listener")]
    Tls(#[from] TlsError),
    #[error("could not recover the sandboxes")]
    Recover(#[from] torpor_lifecycle::Error),
}

impl ServeError {
    /// What to do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::PortInUse(_) => Some(
                "stop what uses it, or choose another port with --listen, TORPOR_LISTEN or \
                     TORPOR_LISTEN_ALSO",
            ),
            Self::Exposed(_) => Some(
                "set TORPOR_API_KEY, or listen on 127.0.0.1 and make a key with `torpor key create`",
            ),
            Self::NoEngine(_) | Self::Engine(_) => Some("`torpor doctor` says what is missing"),
            Self::Tls(_) => {
                Some("the keys tls.* of the configuration say where certificates come from")
            }
            Self::Listen { .. }
            | Self::Store(_)
            | Self::Config(_)
            | Self::Egress(_)
            | Self::Recover(_) => None,
        }
    }
}

/// Says when to stop and how to leave the sandboxes; they go on if whoever would say so is gone.
pub type Shutdown = oneshot::Receiver<ShutdownMode>;

/// Serves until `shutdown` resolves, and leaves the sandboxes as it says.
///
/// Boxed, so that a daemon is compiled here, and not in each program and test that starts one.
pub fn serve(
    config: Config,
    dialects: Vec<Arc<dyn Dialect>>,
    listener: TcpListener,
    shutdown: Shutdown,
) -> BoxFuture<'static, Result<(), ServeError>> {
    Box::pin(start(config, dialects, listener, shutdown))
}

async fn start(
    config: Config,
    dialects: Vec<Arc<dyn Dialect>>,
    listener: TcpListener,
    shutdown: Shutdown,
) -> Result<(), ServeError> {
    config::arm_fault();
    let guest = config.guest.load()?;
    let layout = Arc::new(Layout::open(&config.data_dir)?);
    let ledger = Ledger::open(&layout).await?;
    let images = Images::open(Arc::clone(&layout), ledger.clone(), torpor_engines::AGENT).await?;
    let saves = Saves::open(Arc::clone(&layout), ledger.clone()).await?;
    let listeners = Listeners::open(listener, &config, &dialects).await?;
    refuse_exposed(&config, &listeners, &ledger).await?;
    let vault =
        Vault::open(ledger.clone(), &layout, config.secret_key.as_ref().map(|key| &*key.0))?;
    let (near, extra_ca) = (engine::near().await?, guest.extra_ca);
    let settings = Settings { near, extra_ca, ..config.egress.settings()? };
    let egress = egress::open(settings, &config.data_dir, &vault)?;
    let engines = engine::open(&config, &layout, Arc::new(egress.clone())).await?;
    let volumes = VolumeStore::open(volume_dirs(&config, &layout), ledger.fleet()).await?;
    let parts = Parts {
        installation: layout.tag().to_owned(),
        engines,
        vault,
        volumes,
        egress,
        audit: AuditLog::open(Arc::clone(&layout))?,
        results: TaskResults::open(Arc::clone(&layout)),
        journals: Journals::open(layout),
        ledger,
        images,
        saves,
        gauge: Arc::new(memory::read),
        dialects,
    };
    serve_at(listeners, parts, config, shutdown).await
}

/// [`serve`] with an engine and a store of the caller's choice.
pub fn serve_with(
    parts: Parts,
    config: Config,
    listener: TcpListener,
    shutdown: Shutdown,
) -> BoxFuture<'static, Result<(), ServeError>> {
    Box::pin(async move {
        let listeners = Listeners::open(listener, &config, &parts.dialects).await?;
        refuse_exposed(&config, &listeners, &parts.ledger).await?;
        serve_at(listeners, parts, config, shutdown).await
    })
}

async fn serve_at(
    listeners: Listeners,
    parts: Parts,
    config: Config,
    shutdown: Shutdown,
) -> Result<(), ServeError> {
    let exposed = listeners.exposed()?.is_some();
    // All engines lead their guests to the same one.
    let egress_proxy = parts.engines.default_engine().about().egress_proxy;
    let _egress_proxy = egress::listen(&parts.egress, egress_proxy);
    let dialects = parts.dialects.clone();
    let service = open(parts, &config, exposed).await?;
    service.previews.found_at(listeners.address()?, listeners.encrypted()?);
    let gateway = Gateway::open(&service, config.mcp_gateway.settings()).await?;
    let tasks = [
        tokio::spawn(Arc::clone(&gateway).follow()),
        tokio::spawn(tally::count(Arc::clone(&service))),
        tokio::spawn(read_ahead(Arc::clone(&service))),
        tokio::spawn(previews::look_after(Arc::clone(&service))),
        tokio::spawn(domains::look_after(Arc::clone(&service))),
        tokio::spawn(pulls::look_after(Arc::clone(&service))),
        tokio::spawn(caches::follow(Arc::clone(&service))),
        tokio::spawn(events::look_after(Arc::clone(&service))),
        tokio::spawn(hooks::deliver(Arc::clone(&service))),
        tokio::spawn(jobs::look_after(Arc::clone(&service))),
        tokio::spawn(journals::look_after(Arc::clone(&service))),
        tokio::spawn(hosting::look_after(Arc::clone(&service))),
        tokio::spawn(schedules::keep(Arc::clone(&service))),
    ];
    let tasks = tasks.map(AbortOnDropHandle::new);
    let kept = audit::keep(service.audit.clone(), service.egress.audit().follow());
    let kept = AbortOnDropHandle::new(tokio::spawn(kept));
    let tls = tls::open(&service, &config.tls, &config.data_dir, &config.previews.domain)?;
    let renewals = tls.clone().map(|tls| {
        let service = Arc::clone(&service);
        let kept = tls.keep(move |valid| service.metrics.certificates(valid));
        AbortOnDropHandle::new(tokio::spawn(kept))
    });
    let (dispatcher, most) =
        (Dispatcher::new(&service, &gateway, dialects), config.limits.connections);
    let invoker = tokio::spawn(dispatcher.previews().run_invocations());
    let invoker = AbortOnDropHandle::new(invoker);
    let mode = listen::serve(&service, dispatcher, listeners, tls.clone(), most, shutdown).await;
    drop((renewals, invoker));
    tls.inspect(|tls| tls.stop());
    drop(tasks);
    service.fleet.shutdown(mode).await;
    service.volumes.close().await;
    service.audit.flush().await;
    gateway.close().await;
    drop(kept);
    service.ledger.close().await;
    Ok(())
}

/// An idle machine that is not frozen may cost two hundredths of a core: a sixth of each, by default.
const IDLE_AWAKE_PER_CORE: usize = 8;

/// The part of the host's memory that is kept free unless the configuration says otherwise.
const FLOOR_PART: u64 = 10;

/// One waits for its machine while the other computes. A hundred at one instant had all answered after 0.8 s
/// with one to four for each core, and after half a minute without a bound.
const WAKES_PER_CORE: usize = 2;

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn idle_awake_max(config: &Config) -> usize {
    match config.standby.idle_awake_max {
        0 => cores() * IDLE_AWAKE_PER_CORE,
        most => most,
    }
}

/// A task mostly waits for something elsewhere, as an agent does for its model.
const TASKS_PER_CORE: usize = 8;

fn task_bounds(config: &Config) -> jobs::Bounds {
    let at_once = match config.limits.tasks {
        0 => cores() * TASKS_PER_CORE,
        most => most,
    };
    jobs::Bounds { at_once, results_bytes: config.limits.results_mib.saturating_mul(1 << 20) }
}

/// Brings the sandboxes back and puts everything together.
async fn open(parts: Parts, config: &Config, exposed: bool) -> Result<Arc<Service>, ServeError> {
    let ledger = parts.ledger.clone();
    let keys = Keyring::open(ledger.clone(), config.keys(exposed)).await?;
    let metrics = Arc::new(Metrics::new(parts.engines.abouts()));
    let host = admission::Host::here();
    let fleet = recover(&parts, config, host, &metrics).await?;
    fleet.retain_builds().await?;
    let resolver = Arc::new(Resolver::new(config.egress.resolver));
    let own = config.own_names();
    let domains = Arc::new(Domains::open(ledger.clone(), own, resolver, fleet.clock()).await?);
    let domain = &config.previews.domain;
    let previews = Previews::open(&ledger, &fleet, &domains, domain).await?;
    let hosting = Hosting::open(ledger.clone(), &fleet).await?;
    Ok(Arc::new(Service {
        installation: parts.installation,
        settings: config.service(),
        fleet,
        keys,
        previews,
        hosting,
        domains,
        registries: Registries::open(config.registries(), parts.vault.clone())?,
        builds: Jobs::open(ledger.clone()).await?,
        events: Events::open(&ledger).await?,
        jobs: jobs::Jobs::open(parts.results, task_bounds(config)),
        schedules: Schedules::default(),
        ledger,
        images: parts.images,
        saves: parts.saves,
        vault: parts.vault,
        volumes: parts.volumes,
        egress: parts.egress,
        audit: parts.audit,
        journals: parts.journals,
        metrics,
        host,
        started: Instant::now(),
        stopping: CancellationToken::new(),
        tasks: TaskTracker::new(),
    }))
}

fn policy(config: &Config, host: admission::Host) -> Policy {
    let StandbyConfig { memory_floor_mib, pressure_percent, .. } = config.standby;
    Policy {
        persist_after: Duration::from_millis(config.standby.persist_after_ms),
        warm_for: Duration::from_secs(config.standby.warm_for_secs),
        idle_awake_max: idle_awake_max(config),
        wakes_at_once: cores() * WAKES_PER_CORE,
        sandboxes_max: config.limits.sandboxes,
        memory_floor_mib: match memory_floor_mib {
            0 => host.memory_mib / FLOOR_PART,
            floor => floor,
        },
        stalled_percent_max: (pressure_percent > 0).then_some(pressure_percent),
    }
}

async fn recover(
    parts: &Parts,
    config: &Config,
    host: admission::Host,
    metrics: &Arc<Metrics>,
) -> Result<Fleet, ServeError> {
    let fleet = Fleet::recover(torpor_lifecycle::Parts {
        engines: parts.engines.clone(),
        ledger: parts.ledger.fleet(),
        images: Arc::new(parts.images.clone()),
        saves: Arc::new(parts.saves.clone()),
        journal: Arc::new(parts.journals.clone()),
        vault: Arc::new(parts.vault.clone()),
        volumes: Arc::new(parts.volumes.clone()),
        gauge: Arc::clone(&parts.gauge),
        observer: Arc::clone(metrics) as _,
        ca: Some(parts.egress.certificate().to_owned()),
        guest: config.guest.load()?,
        policy: policy(config, host),
    });
    Ok(fleet.await?)
}

/// Ends every machine of the installation and removes what they have on this host; gives how many
/// there were. Images, volumes and the ledger stay. Refused while a daemon runs on the same data directory.
pub async fn purge(config: &Config) -> Result<usize, ServeError> {
    let layout = Layout::open(&config.data_dir)?;
    // Before the directory that their mounts are in; machines have mounts of their own.
    torpor_volumes::unmount_all(volume_dirs(config, &layout)).await?;
    engine::purge(config, &layout).await
}

/// An installation keeps what is its own in a directory named after the tag.
fn volume_dirs(config: &Config, layout: &Layout) -> Dirs {
    let mounts = config.runtime_dir.join(layout.tag()).join("volumes");
    Dirs { images: layout.volumes(), mounts }
}

/// Strangers must not find an open door.
async fn refuse_exposed(
    config: &Config,
    listeners: &Listeners,
    ledger: &Ledger,
) -> Result<(), ServeError> {
    let guarded = config.api_key.is_some() || ledger.count_keys().await? > 0;
    match listeners.exposed()? {
        Some(address) if !guarded => Err(ServeError::Exposed(address)),
        Some(_) | None => Ok(()),
    }
}

/// The bytes of every image and save are checked before their first use. Doing it ahead saves the
/// first boot, wake and fork the time.
async fn read_ahead(service: Arc<Service>) {
    use torpor_lifecycle::store::Images as _;
    let images = service.images.all().await.unwrap_or_default();
    for image in images {
        if let Err(error) = service.images.root(&image.id).await {
            tracing::error!(image = %image.id, error = torpor_lifecycle::chain(&error), "bad image");
        }
    }
    service.saves.warm_up().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_a_tenth_of_the_host_unless_configured() {
        let host = admission::Host { memory_mib: 8000 };
        let limits = |memory_floor_mib, pressure_percent| {
            let standby =
                StandbyConfig { memory_floor_mib, pressure_percent, ..StandbyConfig::default() };
            let policy = policy(&Config { standby, ..Config::default() }, host);
            (policy.memory_floor_mib, policy.stalled_percent_max)
        };
        assert_eq!(limits(0, 20), (800, Some(20)));
        assert_eq!(limits(5, 0), (5, None));
    }
}

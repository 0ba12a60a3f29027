//! For tests: a daemon in this process on a free port of loopback, with a store of its own and a fake engine.
//! Data and host outlive a restart; all of it goes away with the value.

pub mod registry;

use std::io::Cursor;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use torpor_daemon::{Config, Parts, ServeError, ShutdownMode, serve_with};
use torpor_egress::Egress;
use torpor_lifecycle::fake::{FakeEngine, FakeHost, Inside};
use torpor_lifecycle::{Engines, MemoryGauge, MemoryReading};
use torpor_protocol::api::PullPolicy;
use torpor_store::{
    AuditLog, ImageConfig, Images, Journals, Layout, Ledger, Saves, TaskResults, Vault,
};
use torpor_volumes::{Dirs, VolumeStore};
use torpor_web::dialect::Dialect;

/// How long a daemon may take to stop.
const STOP_MAX: Duration = Duration::from_secs(60);

/// What a daemon is started with.
pub struct Setup {
    pub config: Config,
    pub inside: Inside,
    pub gauge: Arc<dyn MemoryGauge>,
    pub dialects: fn() -> Vec<Arc<dyn Dialect>>,
    /// Names of the images in its store, each with other content.
    pub images: &'static [&'static str],
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            config: Config::default(),
            inside: Inside::RealAgent,
            gauge: plenty(),
            dialects: Vec::new,
            images: &["torpor/base"],
        }
    }
}

pub struct Daemon {
    pub address: SocketAddr,
    pub host: Arc<FakeHost>,
    pub setup: Setup,
    /// What it lets sandboxes out with.
    pub egress: Option<Egress>,
    stop: Option<oneshot::Sender<ShutdownMode>>,
    serving: Option<JoinHandle<Result<(), ServeError>>>,
    temp: TempDir,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.host.end();
        torpor_volumes::unmount_now(&self.temp.path().join("volumes"));
    }
}

impl Daemon {
    pub async fn start(setup: Setup) -> Self {
        let mut daemon = Self {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            host: FakeHost::new(setup.inside),
            setup,
            egress: None,
            stop: None,
            serving: None,
            temp: tempfile::tempdir().expect("a directory"),
        };
        daemon.begin_again().await;
        daemon
    }

    /// Another daemon on the same data and host.
    pub async fn begin_again(&mut self) {
        let Setup { config, gauge, dialects, images, .. } = &self.setup;
        let parts = parts(self.temp.path(), &self.host, images).await;
        let settings = config.egress.settings().expect("settings");
        let egress = torpor_daemon::egress::open(settings, self.temp.path(), &parts.vault);
        let egress = egress.expect("a way out");
        self.egress = Some(egress.clone());
        let parts = Parts { egress, gauge: Arc::clone(gauge), dialects: dialects(), ..parts };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        self.address = listener.local_addr().expect("an address");
        let (stop, shutdown) = oneshot::channel();
        self.stop = Some(stop);
        self.serving =
            Some(tokio::spawn(serve_with(parts, offline(config.clone()), listener, shutdown)));
    }

    /// Stops it and gives what it ended with.
    pub async fn stop(&mut self, mode: ShutdownMode) -> Result<(), ServeError> {
        let (stop, serving) = (self.stop.take(), self.serving.take());
        let _ = stop.expect("it runs").send(mode);
        let ended = tokio::time::timeout(STOP_MAX, serving.expect("it runs")).await;
        ended.expect("it stops").expect("it does not panic")
    }

    /// Stops it and starts another one on the same data and host.
    pub async fn restart(&mut self, mode: ShutdownMode) {
        self.stop(mode).await.expect("it ends well");
        self.begin_again().await;
    }

    /// A new directory of the test's, beside the data.
    pub fn make_dir(&self, name: &str) -> PathBuf {
        let dir = self.temp.path().join(name);
        std::fs::create_dir(&dir).expect("a directory");
        dir
    }

    pub fn data(&self) -> PathBuf {
        self.temp.path().join("data")
    }
}

/// A store below `dir` with these images in it, and a fake engine.
pub async fn parts(dir: &Path, host: &Arc<FakeHost>, names: &[&str]) -> Parts {
    let layout = Arc::new(Layout::open(&dir.join("data")).expect("a layout"));
    let ledger = Ledger::open(&layout).await.expect("a ledger");
    let images = Images::open(Arc::clone(&layout), ledger.clone(), b"no agent").await;
    let images = images.expect("images");
    for name in names {
        import(&images, dir, name).await;
    }
    let saves = Saves::open(Arc::clone(&layout), ledger.clone()).await.expect("saves");
    let vault = Vault::open(ledger.clone(), &layout, None).expect("a vault");
    let egress = torpor_daemon::egress::open(Default::default(), dir, &vault);
    let dirs = Dirs { images: layout.volumes(), mounts: dir.join("volumes") };
    let volumes = VolumeStore::open(dirs, ledger.fleet()).await.expect("volumes");
    Parts {
        installation: layout.tag().to_owned(),
        engines: Engines::new(Arc::new(FakeEngine::new(Arc::clone(host))), []),
        ledger,
        images,
        saves,
        vault,
        volumes,
        egress: egress.expect("a way out"),
        audit: AuditLog::open(Arc::clone(&layout)).expect("an audit log"),
        results: TaskResults::open(Arc::clone(&layout)),
        journals: Journals::open(layout),
        gauge: plenty(),
        dialects: Vec::new(),
    }
}

/// An image with an empty `/tmp` and its own name in a file.
async fn import(images: &Images, dir: &Path, name: &str) {
    let mut tar = tar::Builder::new(Vec::new());
    tar.append_dir("tmp", dir).expect("a directory");
    let mut header = tar::Header::new_gnu();
    header.set_size(name.len() as u64);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    tar.append_data(&mut header, "name", name.as_bytes()).expect("a file");
    let tar = Cursor::new(tar.into_inner().expect("a tar"));
    let (name, config) = (name.parse().expect("a name"), ImageConfig::default());
    let imported = images.import_tar_stream(Some(&name), tar, config, u64::MAX, Arc::new(|_| {}));
    imported.await.expect("an image");
}

/// A host with more memory than anybody needs.
pub fn plenty() -> Arc<dyn MemoryGauge> {
    Arc::new(|| MemoryReading { available_mib: u64::MAX, stalled_percent: 0.0 })
}

/// Tests look for nothing elsewhere, unless they bring a registry.
fn offline(mut config: Config) -> Config {
    if config.registries.is_empty() {
        config.images.pull = PullPolicy::Never;
    }
    config
}

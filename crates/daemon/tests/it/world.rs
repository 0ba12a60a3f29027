//! A daemon on a free port, with verbs.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use torpor_daemon::{Config, Parts, ServeError, ShutdownMode, serve_with};
use torpor_lifecycle::Engines;
use torpor_lifecycle::fake::{FakeEngine, FakeHost, Inside};
use torpor_lifecycle::{MemoryGauge, MemoryReading};
use torpor_protocol::SandboxId;
use torpor_store::{AuditLog, ImageConfig, Images, Journals, Layout, Ledger, Saves, Vault};

use crate::client::{self, Answer, Open, PATIENCE, Socket, encoded};

pub(crate) struct World {
    pub(crate) address: SocketAddr,
    pub(crate) host: Arc<FakeHost>,
    /// For the files of the test; goes away with the world.
    pub(crate) dir: PathBuf,
    /// What the daemon lets sandboxes out with.
    pub(crate) egress: Option<torpor_egress::Egress>,
    config: Config,
    gauge: Arc<dyn MemoryGauge>,
    stop: Option<oneshot::Sender<ShutdownMode>>,
    daemon: Option<JoinHandle<Result<(), ServeError>>>,
    temp: TempDir,
}

impl Drop for World {
    fn drop(&mut self) {
        self.host.end();
    }
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with(Config::default()).await
    }

    pub(crate) async fn with(config: Config) -> Self {
        Self::made(config, Inside::RealAgent, plenty()).await
    }

    /// A world whose machines say "done" to everything and touch nothing: for what would write
    /// outside of the test's directory.
    pub(crate) async fn scripted() -> Self {
        Self::made(Config::default(), Inside::Scripted, plenty()).await
    }

    pub(crate) async fn made(config: Config, inside: Inside, gauge: Arc<dyn MemoryGauge>) -> Self {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("inside");
        std::fs::create_dir(&dir).unwrap();
        let mut world = Self {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            host: FakeHost::new(inside),
            dir,
            egress: None,
            config,
            gauge,
            stop: None,
            daemon: None,
            temp,
        };
        world.start().await;
        world
    }

    /// Another daemon on the same data and host.
    pub(crate) async fn begin_again(&mut self) {
        self.start().await;
    }

    async fn start(&mut self) {
        let parts = parts(self.temp.path(), &self.host).await;
        let settings = self.config.egress.settings().unwrap();
        let egress = torpor_daemon::egress::open(settings, self.temp.path(), &parts.vault).unwrap();
        self.egress = Some(egress.clone());
        let parts = Parts { egress, gauge: Arc::clone(&self.gauge), ..parts };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        self.address = listener.local_addr().unwrap();
        let (stop, shutdown) = oneshot::channel();
        self.stop = Some(stop);
        self.daemon =
            Some(tokio::spawn(serve_with(parts, self.config.clone(), listener, shutdown)));
    }

    /// Stops the daemon and starts another one on the same data and host.
    pub(crate) async fn restart(&mut self, mode: ShutdownMode) {
        self.stop(mode).await.unwrap();
        self.start().await;
    }

    /// The same with another configuration.
    pub(crate) async fn reconfigure(&mut self, config: Config) {
        self.config = config;
        self.restart(ShutdownMode::Running).await;
    }

    /// A world with one sandbox called `web`.
    pub(crate) async fn with_sandbox() -> Self {
        let world = Self::new().await;
        world.create(json!({"name": "web"})).await.expect(201);
        world
    }

    /// Stops the daemon and gives what it ended with.
    pub(crate) async fn stop(&mut self, mode: ShutdownMode) -> Result<(), ServeError> {
        let _ = self.stop.take().unwrap().send(mode);
        let daemon = self.daemon.take().unwrap();
        tokio::time::timeout(PATIENCE, daemon).await.expect("it stops").unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.dir.join(name).to_str().unwrap().to_owned()
    }

    /// `name` of the test's directory, for a query.
    pub(crate) fn query(&self, name: &str) -> String {
        encoded(&self.path(name))
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        client::send(self.address, client::request(Method::GET, path, "")).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Answer {
        client::send(self.address, client::request(Method::DELETE, path, "")).await
    }

    pub(crate) async fn put(&self, path: &str, body: impl Into<Bytes>) -> Answer {
        client::send(self.address, client::request(Method::PUT, path, body)).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        client::send(self.address, client::with_json(Method::POST, path, &body)).await
    }

    pub(crate) async fn patch(&self, path: &str, body: Value) -> Answer {
        client::send(self.address, client::with_json(Method::PATCH, path, &body)).await
    }

    pub(crate) async fn open(&self, path: &str) -> Open {
        client::open(self.address, client::request(Method::GET, path, "")).await
    }

    pub(crate) async fn open_post(&self, path: &str, body: Value) -> Open {
        client::open(self.address, client::with_json(Method::POST, path, &body)).await
    }

    pub(crate) async fn socket(&self, path: &str) -> Socket {
        Socket::open(self.address, path).await.unwrap_or_else(|error| panic!("{error:?}"))
    }

    pub(crate) async fn create(&self, body: Value) -> Answer {
        self.post("/v1/sandboxes", body).await
    }

    /// Runs a shell command in `web`.
    pub(crate) async fn sh(&self, script: &str) -> Value {
        self.run(json!({"command": ["sh", "-c", script]})).await.expect(200)
    }

    pub(crate) async fn run(&self, command: Value) -> Answer {
        self.post("/v1/sandboxes/web/run", command).await
    }

    /// Posts without a body.
    pub(crate) async fn tell(&self, path: &str) -> Answer {
        client::send(self.address, client::request(Method::POST, path, "")).await
    }

    /// Takes a snapshot of `web`.
    pub(crate) async fn snapshot(&self, name: &str) -> Value {
        let body = json!({"name": name});
        self.post("/v1/sandboxes/web/snapshots", body).await.expect(201)
    }

    pub(crate) async fn id(&self, name: &str) -> SandboxId {
        let status = self.get(&format!("/v1/sandboxes/{name}")).await.expect(200);
        status["id"].as_str().unwrap().parse().unwrap()
    }

    /// Every file of the daemon's, below its data directory.
    pub(crate) fn data_files(&self) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let mut directories = vec![self.temp.path().join("data")];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let entry = entry.unwrap();
                let list =
                    if entry.file_type().unwrap().is_dir() { &mut directories } else { &mut files };
                list.push(entry.path());
            }
        }
        assert!(!files.is_empty());
        files
    }

    /// Bends a byte of every file of that name in the saves.
    pub(crate) fn spoil(&self, file: &str) {
        let saves = std::fs::read_dir(self.temp.path().join("data/saves")).unwrap();
        for path in saves.map(|save| save.unwrap().path().join(file)) {
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[0] ^= 0xff;
            std::fs::write(&path, bytes).unwrap();
        }
    }

    /// Waits until the status of a sandbox is so.
    pub(crate) async fn wait(&self, name: &str, key: &str, value: Value) -> Value {
        let path = format!("/v1/sandboxes/{name}");
        let poll = async {
            loop {
                let status = self.get(&path).await.expect(200);
                if status[key] == value {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let found = tokio::time::timeout(PATIENCE, poll).await;
        found.unwrap_or_else(|_| panic!("{name} never had {key} {value}"))
    }
}

/// Waits for a value with a deadline.
#[track_caller]
pub(crate) fn until(
    what: &'static str,
    mut holds: impl FnMut() -> bool,
) -> impl Future<Output = ()> {
    let poll = async move {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    async move { tokio::time::timeout(PATIENCE, poll).await.expect(what) }
}

/// A store with the default image in it, and a fake engine.
pub(crate) async fn parts(dir: &Path, host: &Arc<FakeHost>) -> Parts {
    let layout = Arc::new(Layout::open(&dir.join("data")).unwrap());
    let ledger = Ledger::open(&layout).await.unwrap();
    let images = Images::open(Arc::clone(&layout), ledger.clone(), b"no agent").await.unwrap();
    let name = "torpor/base".parse().unwrap();
    let mut tar = tar::Builder::new(Vec::new());
    tar.append_dir("tmp", dir).unwrap();
    let (tar, config) = (std::io::Cursor::new(tar.into_inner().unwrap()), ImageConfig::default());
    let quiet = Arc::new(|_| {});
    images.import_tar_stream(Some(&name), tar, config, u64::MAX, quiet).await.unwrap();
    let saves = Saves::open(Arc::clone(&layout), ledger.clone()).await.unwrap();
    let installation = layout.tag().to_owned();
    let engines = Engines::new(Arc::new(FakeEngine::new(Arc::clone(host))), []);
    let vault = Vault::open(ledger.clone(), &layout, None).unwrap();
    let egress = torpor_daemon::egress::open(Default::default(), dir, &vault).unwrap();
    let audit = AuditLog::open(Arc::clone(&layout)).unwrap();
    let (journals, gauge, dialects) = (Journals::open(layout), plenty(), Vec::new());
    Parts {
        installation,
        engines,
        ledger,
        images,
        saves,
        journals,
        vault,
        egress,
        audit,
        gauge,
        dialects,
    }
}

/// A host with more memory than anybody needs.
fn plenty() -> Arc<dyn MemoryGauge> {
    Arc::new(|| MemoryReading { available_mib: u64::MAX, stalled_percent: 0.0 })
}

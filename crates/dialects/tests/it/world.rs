//! A daemon on a free port that speaks all dialects, with verbs.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use torpor_daemon::{Config, Parts, ServeError, ShutdownMode, serve_with};
use torpor_lifecycle::fake::{FakeEngine, FakeHost, Inside};
use torpor_lifecycle::{Engines, MemoryReading};
use torpor_protocol::SandboxId;
use torpor_store::{AuditLog, ImageConfig, Images, Journals, Layout, Ledger, Saves, Vault};

use crate::client::{Answer, Ask, PATIENCE};

/// The prefix that the client libraries use on localhost.
pub(crate) const LIFE: &str = "/v1/namespaces/default";

pub(crate) struct World {
    pub(crate) address: SocketAddr,
    pub(crate) host: Arc<FakeHost>,
    /// For the files of the test; goes away with the world.
    pub(crate) dir: PathBuf,
    /// What the host has left, in MiB: the test may take it away.
    pub(crate) free_mib: Arc<AtomicU64>,
    config: Config,
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
        Self::made(config, Inside::RealAgent).await
    }

    /// A world whose machines say "done" to everything and touch nothing: for what would write
    /// outside of the test's directory.
    pub(crate) async fn scripted() -> Self {
        Self::made(Config::default(), Inside::Scripted).await
    }

    async fn made(config: Config, inside: Inside) -> Self {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("inside");
        std::fs::create_dir(&dir).unwrap();
        let mut world = Self {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            host: FakeHost::new(inside),
            dir,
            free_mib: Arc::new(AtomicU64::new(u64::MAX)),
            config,
            stop: None,
            daemon: None,
            temp,
        };
        world.start().await;
        world
    }

    async fn start(&mut self) {
        let parts = parts(self.temp.path(), &self.host, &self.free_mib).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        self.address = listener.local_addr().unwrap();
        let (stop, shutdown) = oneshot::channel();
        self.stop = Some(stop);
        self.daemon =
            Some(tokio::spawn(serve_with(parts, self.config.clone(), listener, shutdown)));
    }

    /// Stops the daemon and starts another one on the same data and host.
    pub(crate) async fn restart(&mut self, mode: ShutdownMode) {
        let _ = self.stop.take().unwrap().send(mode);
        let daemon = self.daemon.take().unwrap();
        tokio::time::timeout(PATIENCE, daemon).await.expect("it stops").unwrap().unwrap();
        self.start().await;
    }

    pub(crate) async fn send(&self, ask: Ask) -> Answer {
        ask.send(self.address).await
    }

    // === The lifecycle API; paths are without their prefix ===

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(Ask::new("GET", format!("{LIFE}{path}"))).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Answer {
        self.send(Ask::new("DELETE", format!("{LIFE}{path}"))).await
    }

    /// Posts without a body.
    pub(crate) async fn tell(&self, path: &str) -> Answer {
        self.send(Ask::new("POST", format!("{LIFE}{path}"))).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        self.send(Ask::new("POST", format!("{LIFE}{path}")).json(&body)).await
    }

    pub(crate) async fn put(&self, path: &str, body: Value) -> Answer {
        self.send(Ask::new("PUT", format!("{LIFE}{path}")).json(&body)).await
    }

    pub(crate) async fn patch(&self, path: &str, body: Value) -> Answer {
        self.send(Ask::new("PATCH", format!("{LIFE}{path}")).json(&body)).await
    }

    /// A sandbox that runs; its id.
    pub(crate) async fn create(&self, body: Value) -> String {
        let made = self.post("/sandboxes", body).await.expect(200);
        assert_eq!(made["status"], "running", "{made}");
        made["sandbox_id"].as_str().unwrap().to_owned()
    }

    /// A sandbox of that name that runs; its id.
    pub(crate) async fn named(&self, name: &str) -> String {
        self.create(json!({"name": name})).await
    }

    pub(crate) async fn info(&self, sandbox: &str) -> Value {
        self.get(&format!("/sandboxes/{sandbox}")).await.expect(200)
    }

    pub(crate) async fn suspend(&self, sandbox: &str) {
        self.tell(&format!("/sandboxes/{sandbox}/suspend?wait_ms=30000")).await.expect(200);
    }

    /// Ids of all sandboxes.
    pub(crate) async fn ids(&self) -> Vec<String> {
        let list = self.get("/sandboxes").await.expect(200);
        let ids = list["sandboxes"].as_array().unwrap().iter();
        ids.map(|info| info["id"].as_str().unwrap().to_owned()).collect()
    }

    /// Our own API.
    pub(crate) async fn own(
        &self,
        method: &'static str,
        path: &str,
        body: Option<Value>,
    ) -> Answer {
        let ask = Ask::new(method, format!("/v1{path}"));
        self.send(if let Some(body) = body { ask.json(&body) } else { ask }).await
    }

    /// Waits until a sandbox has this status.
    pub(crate) async fn wait(&self, sandbox: &str, status: &str) -> Value {
        let path = format!("/sandboxes/{sandbox}");
        self.until(status, async || {
            let info = self.get(&path).await;
            (info.status == 200).then(|| info.json()).filter(|info| info["status"] == status)
        })
        .await
    }

    /// Asks until there is an answer.
    pub(crate) async fn until<T>(&self, what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
        let poll = async {
            loop {
                if let Some(found) = look().await {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let found = tokio::time::timeout(PATIENCE, poll).await;
        found.unwrap_or_else(|_| panic!("waited in vain for {what}"))
    }

    /// The host has so much memory left from now on.
    pub(crate) fn leave_free(&self, mib: u64) {
        self.free_mib.store(mib, Ordering::SeqCst);
    }
}

pub(crate) fn id(text: &str) -> SandboxId {
    text.parse().unwrap()
}

/// A store with the default image and one called `mine`, and a fake engine.
async fn parts(dir: &Path, host: &Arc<FakeHost>, free_mib: &Arc<AtomicU64>) -> Parts {
    let layout = Arc::new(Layout::open(&dir.join("data")).unwrap());
    let ledger = Ledger::open(&layout).await.unwrap();
    let images = Images::open(Arc::clone(&layout), ledger.clone(), b"no agent").await.unwrap();
    for name in ["torpor/base", "mine"] {
        let root = dir.join(name);
        std::fs::create_dir_all(root.join("tmp")).unwrap();
        std::fs::write(root.join("name"), name).unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        tar.append_dir_all(".", root).unwrap();
        let tar = std::io::Cursor::new(tar.into_inner().unwrap());
        let (name, config, quiet) =
            (name.parse().unwrap(), ImageConfig::default(), Arc::new(|_| {}));
        images.import_tar_stream(Some(&name), tar, config, u64::MAX, quiet).await.unwrap();
    }
    let saves = Saves::open(Arc::clone(&layout), ledger.clone()).await.unwrap();
    let installation = layout.tag().to_owned();
    let engines = Engines::new(Arc::new(FakeEngine::new(Arc::clone(host))), []);
    let vault = Vault::open(ledger.clone(), &layout, None).unwrap();
    let free_mib = Arc::clone(free_mib);
    let gauge = Arc::new(move || MemoryReading {
        available_mib: free_mib.load(Ordering::SeqCst),
        stalled_percent: 0.0,
    });
    let egress = torpor_daemon::egress::open(Default::default(), dir, &vault).unwrap();
    let audit = AuditLog::open(Arc::clone(&layout)).unwrap();
    let (journals, dialects) = (Journals::open(layout), torpor_dialects::all());
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

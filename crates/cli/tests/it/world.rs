//! A daemon on a free port, and `torpor` to talk to it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use torpor_daemon::{Config, Parts, ShutdownMode, serve_with};
use torpor_lifecycle::fake::{FakeEngine, FakeHost, Inside};
use torpor_lifecycle::{Engines, MemoryReading};
use torpor_store::{AuditLog, ImageConfig, Images, Journals, Layout, Ledger, Saves, Vault};

pub(crate) use crate::torpor::{Done, PATIENCE, bare, finish, until};

pub(crate) struct World {
    pub address: SocketAddr,
    /// "Inside" is the host: tests keep what is inside and what is here apart by themselves.
    pub inside: PathBuf,
    pub here: PathBuf,
    host: Arc<FakeHost>,
    runtime: Option<Runtime>,
    stop: Option<oneshot::Sender<ShutdownMode>>,
    _temp: TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(Config::default())
    }

    /// A host that has room for so many sandboxes.
    pub(crate) fn of_size(sandboxes: usize) -> Self {
        let mut config = Config::default();
        config.limits.sandboxes = sandboxes;
        Self::with(config)
    }

    pub(crate) fn with(config: Config) -> Self {
        let temp = tempfile::tempdir().unwrap();
        let host = FakeHost::new(Inside::RealAgent);
        let runtime = Runtime::new().unwrap();
        let (stop, shutdown) = oneshot::channel();
        let address = runtime.block_on(async {
            let parts = parts(temp.path(), &host).await;
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            tokio::spawn(serve_with(parts, config, listener, shutdown));
            address
        });
        let (inside, here) = (temp.path().join("inside"), temp.path().join("here"));
        std::fs::create_dir(&inside).unwrap();
        std::fs::create_dir(&here).unwrap();
        let (runtime, stop) = (Some(runtime), Some(stop));
        Self { address, inside, here, host, runtime, stop, _temp: temp }
    }

    /// A world with one sandbox called `web`.
    pub(crate) fn with_sandbox() -> Self {
        let world = Self::new();
        assert_eq!(world.torpor(["create", "--name", "web"]).ok(), "web\n");
        world
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().unwrap()
    }

    pub(crate) fn torpor<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Done {
        self.torpor_with(args, b"")
    }

    /// With something at its standard input.
    pub(crate) fn torpor_with<'a>(
        &self,
        args: impl IntoIterator<Item = &'a str>,
        stdin: &[u8],
    ) -> Done {
        let command = self.command(args);
        self.runtime().block_on(finish(command, stdin))
    }

    /// Runs a shell script in `web`.
    pub(crate) fn sh(&self, script: &str) -> Done {
        self.torpor(["run", "web", "--", "sh", "-c", script])
    }

    /// A `torpor` that knows this daemon and nothing else of ours.
    pub(crate) fn command<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = bare(args);
        command.env("TORPOR_SERVER", format!("http://{}", self.address));
        command.current_dir(&self.here);
        command
    }

    /// `web:` and a path in the directory of what is inside.
    pub(crate) fn web(&self, name: &str) -> String {
        format!("web:{}", self.inside.join(name).display())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
        self.host.end();
    }
}

/// A store with the default image in it, and a fake engine.
async fn parts(dir: &Path, host: &Arc<FakeHost>) -> Parts {
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
    // More memory than anybody needs.
    let gauge = Arc::new(|| MemoryReading { available_mib: u64::MAX, stalled_percent: 0.0 });
    let vault = Vault::open(ledger.clone(), &layout, None).unwrap();
    let egress = torpor_daemon::egress::open(Default::default(), dir, &vault).unwrap();
    let audit = AuditLog::open(Arc::clone(&layout)).unwrap();
    let (journals, dialects) = (Journals::open(layout), Vec::new());
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

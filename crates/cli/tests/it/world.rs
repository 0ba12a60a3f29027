//! A daemon on a free port, and `torpor` to talk to it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use torpor_daemon::{Config, Parts, serve_with};
use torpor_lifecycle::fake::{FakeEngine, FakeHost, Inside};
use torpor_store::{ImageConfig, Images, Layout, Ledger};

/// Longer than anything here takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct World {
    pub address: SocketAddr,
    /// "Inside" is the host: tests keep what is inside and what is here apart by themselves.
    pub inside: PathBuf,
    pub here: PathBuf,
    runtime: Option<Runtime>,
    stop: Option<oneshot::Sender<()>>,
    _temp: TempDir,
}

/// How a `torpor` ended.
#[derive(Debug)]
pub(crate) struct Done {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Done {
    /// The output of a success; whatever else happened is shown.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        self.stdout
    }

    #[track_caller]
    pub(crate) fn json(self) -> Value {
        serde_json::from_str(&self.ok()).unwrap()
    }

    /// Exit code and standard error of a failure that printed nothing else.
    #[track_caller]
    pub(crate) fn failed(self) -> (i32, String) {
        assert_eq!(self.stdout, "", "{self:?}");
        (self.code, self.stderr)
    }
}

impl World {
    pub(crate) fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        let runtime = Runtime::new().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let address = runtime.block_on(async {
            let parts = parts(temp.path()).await;
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let shutdown = async {
                let _ = stopped.await;
            };
            tokio::spawn(serve_with(parts, Config::default(), listener, shutdown));
            address
        });
        let (inside, here) = (temp.path().join("inside"), temp.path().join("here"));
        std::fs::create_dir(&inside).unwrap();
        std::fs::create_dir(&here).unwrap();
        Self { address, inside, here, runtime: Some(runtime), stop: Some(stop), _temp: temp }
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
    }
}

/// A `torpor` that knows no daemon.
pub(crate) fn bare<'a>(args: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
    command.args(args).kill_on_drop(true);
    for variable in ["TORPOR_SERVER", "TORPOR_API_KEY", "TORPOR_CONFIG", "TERM"] {
        command.env_remove(variable);
    }
    command
}

pub(crate) async fn finish(mut command: Command, stdin: &[u8]) -> Done {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let bytes = stdin.to_vec();
    let feed = tokio::spawn(async move {
        // Who does not read it all has its reasons.
        let _ = input.write_all(&bytes).await;
    });
    let output = tokio::time::timeout(PATIENCE, child.wait_with_output()).await;
    let output = output.expect("torpor ends in time").unwrap();
    feed.abort();
    Done {
        code: output.status.code().expect("no signal ended it"),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Waits for a value with a deadline.
#[track_caller]
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(value) = look() {
            return value;
        }
        assert!(tokio::time::Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A store with the default image in it, and a fake engine.
async fn parts(dir: &Path) -> Parts {
    let layout = Arc::new(Layout::open(&dir.join("data")).unwrap());
    let ledger = Ledger::open(&layout).await.unwrap();
    let images = Images::open(Arc::clone(&layout), ledger.clone(), b"no agent").await.unwrap();
    let root = dir.join("root");
    std::fs::create_dir_all(root.join("tmp")).unwrap();
    let name = "torpor/base".parse().unwrap();
    let config = ImageConfig::default();
    images.import_directory(Some(&name), root, config, Arc::new(|_| {})).await.unwrap();
    let installation = layout.tag().to_owned();
    let engine = Arc::new(FakeEngine::new(FakeHost::new(Inside::RealAgent)));
    Parts { installation, engine, ledger, images }
}

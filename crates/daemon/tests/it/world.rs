//! A daemon on a free port, with verbs.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use serde_json::{Value, json};
use torpor_daemon::{Config, ShutdownMode};
use torpor_lifecycle::MemoryGauge;
use torpor_lifecycle::fake::Inside;
use torpor_protocol::SandboxId;
use torpor_testdaemon::{Daemon, Setup};

use crate::client::{self, Answer, Open, PATIENCE, Socket, encoded};

pub(crate) struct World {
    daemon: Daemon,
    /// For the files of the test; goes away with the world.
    pub(crate) dir: PathBuf,
}

impl Deref for World {
    type Target = Daemon;
    fn deref(&self) -> &Daemon {
        &self.daemon
    }
}

impl DerefMut for World {
    fn deref_mut(&mut self) -> &mut Daemon {
        &mut self.daemon
    }
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with(Config::default()).await
    }

    pub(crate) async fn with(config: Config) -> Self {
        Self::of(Setup { config, ..Setup::default() }).await
    }

    /// A world whose machines say "done" to everything and touch nothing: for what would write
    /// outside of the test's directory.
    pub(crate) async fn scripted() -> Self {
        Self::of(Setup { inside: Inside::Scripted, ..Setup::default() }).await
    }

    pub(crate) async fn made(config: Config, inside: Inside, gauge: Arc<dyn MemoryGauge>) -> Self {
        Self::of(Setup { config, inside, gauge, ..Setup::default() }).await
    }

    async fn of(setup: Setup) -> Self {
        let daemon = Daemon::start(setup).await;
        let dir = daemon.make_dir("inside");
        Self { daemon, dir }
    }

    /// The same with another configuration.
    pub(crate) async fn reconfigure(&mut self, config: Config) {
        self.setup.config = config;
        self.restart(ShutdownMode::Running).await;
    }

    /// A world with one sandbox called `web`.
    pub(crate) async fn with_sandbox() -> Self {
        let world = Self::new().await;
        world.create(json!({"name": "web"})).await.expect(201);
        world
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
        let mut directories = vec![self.data()];
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
        let saves = std::fs::read_dir(self.data().join("saves")).unwrap();
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

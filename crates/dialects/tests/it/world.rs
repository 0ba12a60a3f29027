//! A daemon on a free port that speaks all dialects, with verbs.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use torpor_daemon::Config;
use torpor_lifecycle::MemoryReading;
use torpor_lifecycle::fake::Inside;
use torpor_protocol::SandboxId;
use torpor_testdaemon::{Daemon, Setup};

use crate::client::{Answer, Ask, PATIENCE};

/// The prefix that the client libraries use on localhost.
pub(crate) const LIFE: &str = "/v1/namespaces/default";

pub(crate) struct World {
    daemon: Daemon,
    /// For the files of the test; goes away with the world.
    pub(crate) dir: PathBuf,
    /// What the host has left, in MiB: the test may take it away.
    free_mib: Arc<AtomicU64>,
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
        Self::made(config, Inside::RealAgent).await
    }

    /// A world whose machines say "done" to everything and touch nothing: for what would write
    /// outside of the test's directory.
    pub(crate) async fn scripted() -> Self {
        Self::made(Config::default(), Inside::Scripted).await
    }

    async fn made(config: Config, inside: Inside) -> Self {
        let free_mib = Arc::new(AtomicU64::new(u64::MAX));
        let left = Arc::clone(&free_mib);
        let gauge = Arc::new(move || MemoryReading {
            available_mib: left.load(Ordering::SeqCst),
            stalled_percent: 0.0,
        });
        let (dialects, images) = (torpor_dialects::all, &["torpor/base", "mine"]);
        let daemon = Daemon::start(Setup { config, inside, gauge, dialects, images }).await;
        let dir = daemon.make_dir("inside");
        Self { daemon, dir, free_mib }
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

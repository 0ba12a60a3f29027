//! The fake engine under test: what its promises are worth to the tests of logic that believe it.

mod modest;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use torpor_lifecycle::engine::{Engine, EngineError};
use torpor_lifecycle::fake::{FakeEngine, FakeHost, Inside};
use torpor_lifecycle::guest::Guest;
use torpor_protocol::SandboxId;

use crate::world::{Installation, Settings, World, eventually};

/// Its machine room, which outlives daemons as a real one does.
pub(crate) struct Installed(pub(crate) Arc<FakeHost>);

impl Installed {
    pub(crate) fn new() -> Self {
        Self(FakeHost::new(Inside::Scripted))
    }
}

#[async_trait]
impl Installation for Installed {
    async fn unfit(&self) -> Option<String> {
        None
    }

    async fn open(&self, _: &Settings) -> Result<Arc<dyn Engine>, EngineError> {
        // A daemon that was killed takes its tasks along, which would else hear the answers of the
        // agents that are spoken with now. Its tasks are in this process, and end on their own.
        let metrics = tokio::runtime::Handle::current().metrics();
        eventually("the former daemon is gone", || metrics.num_alive_tasks() == 0).await;
        Ok(Arc::new(FakeEngine::new(Arc::clone(&self.0))))
    }

    async fn purge(&self, _: &Settings) -> Result<(), EngineError> {
        self.0.end();
        Ok(())
    }

    fn root(&self, dir: &Path) -> PathBuf {
        let root = dir.join("root.erofs");
        std::fs::write(&root, "").expect("a file");
        root
    }

    fn kill(&self, _: &World, id: &SandboxId) {
        self.0.crash(id, "killed by the host: signal 9");
    }

    fn traces(&self, _: &World, id: &SandboxId) -> Vec<String> {
        self.0.alive().contains(id).then(|| id.to_string()).into_iter().collect()
    }

    fn gone(&self, _: &World) -> bool {
        self.0.alive().is_empty()
    }

    async fn note(&self, id: &SandboxId, _: &Guest, text: &str) {
        self.0.set_memory(id, text);
    }

    async fn noted(&self, id: &SandboxId, _: &Guest) -> String {
        self.0.memory(id).expect("it lives")
    }

    fn note_file(&self) -> &'static str {
        "memory"
    }
}

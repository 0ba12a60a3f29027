//! gVisor under test: how it is installed, and what is particular to it.

mod connections;
mod crashes;
mod held;
mod mounts;
mod particular;
mod prepared;
mod resources;

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use torpor_engines::EngineConfig;
use torpor_engines::gvisor::build::{Build, Halt};
use torpor_engines::gvisor::{GvisorConfig, enter};
use torpor_lifecycle::engine::{Engine, EngineError};

use crate::world::{Installation, Settings, be, told, unfit};

/// Another runsc to run the whole suite on.
const OTHER: &str = "TORPOR_TEST_RUNSC";

fn runsc() -> PathBuf {
    std::env::var_os(OTHER).map_or_else(|| PathBuf::from("/usr/bin/runsc"), PathBuf::from)
}

/// Whether its guests are stopped by a frozen cgroup.
async fn freezes() -> bool {
    Build::of(&runsc()).await.expect("a build").generation().halt() == Halt::Freezer
}

pub(crate) struct Installed;

impl Installed {
    pub(crate) fn new() -> Self {
        Self
    }
}

/// No test, but what starts the tests' runscs: see [`be`].
#[test]
#[expect(clippy::disallowed_methods, reason = "it is another program, and has no machines")]
fn enter_process() {
    if let Some(description) = told() {
        std::process::exit(enter(&description).unwrap().into());
    }
}

#[async_trait]
impl Installation for Installed {
    async fn unfit(&self) -> Option<String> {
        unfit(&[&runsc().to_string_lossy(), "/usr/bin/mkfs.erofs"])
    }

    async fn open(&self, settings: &Settings) -> Result<Arc<dyn Engine>, EngineError> {
        let config = GvisorConfig {
            runsc: runsc(),
            builds_dir: None,
            enter_command: be("gvisor::enter_process"),
            prepared: settings.prepared,
        };
        settings.open(EngineConfig::Gvisor(config)).await
    }
}

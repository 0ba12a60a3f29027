//! gVisor under test: how it is installed, and what is particular to it.

mod connections;
mod crashes;
mod particular;
mod resources;
mod shells;

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use torpor_engines::Users;
use torpor_engines::gvisor::build::{Build, Halt};
use torpor_engines::gvisor::{Gvisor, GvisorConfig, enter, purge};
use torpor_lifecycle::engine::{Engine, EngineError};

use crate::world::{Installation, Settings, be, keeper_command, told, unfit};

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

fn config(settings: &Settings) -> GvisorConfig {
    let Settings { runtime_dir, scratch_dir, tag, shells, registry } = settings.clone();
    let (runsc, builds_dir) = (runsc(), None);
    GvisorConfig {
        runsc,
        builds_dir,
        runtime_dir,
        scratch_dir,
        tag,
        keeper_command: keeper_command(),
        enter_command: be("gvisor::enter_process"),
        users: Users::default(),
        shells,
        registry,
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
        Ok(Arc::new(Gvisor::open(config(settings)).await?))
    }

    async fn purge(&self, settings: &Settings) -> Result<(), EngineError> {
        purge(&config(settings)).await.map(drop)
    }
}

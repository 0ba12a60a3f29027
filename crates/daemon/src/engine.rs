//! Which isolation engine serves this host; nobody else knows one by name.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use torpor_engines::gvisor::{Gvisor, GvisorConfig};
use torpor_lifecycle::engine::{Engine, EngineError, Guard, NoGuard};
use torpor_protocol::AddressRange;
use torpor_store::Layout;

use crate::ServeError;
use crate::config::{Config, EngineKind};

/// The hidden command that keeps machines while the daemon is away.
const KEEPER: &str = "keeper";

pub(crate) async fn open(
    config: &Config,
    layout: &Layout,
    guard: Arc<dyn Guard>,
) -> Result<Arc<dyn Engine>, ServeError> {
    match config.engine.kind {
        EngineKind::Auto | EngineKind::Gvisor => {
            let runsc = find_runsc(config).ok_or_else(|| {
                ServeError::NoEngine(
                    "runsc is not installed (or name it: engine.runsc_path)".into(),
                )
            })?;
            Ok(Arc::new(Gvisor::open(gvisor(config, layout, runsc, guard)?).await?))
        }
    }
}

/// Addresses around this host that no sandbox reaches, public ones among them, unless the operator and
/// its policy say so.
pub(crate) async fn near() -> Result<Vec<AddressRange>, ServeError> {
    let closed = torpor_engines::network::closed_ranges().await;
    Ok(closed.map_err(EngineError::failed("look at the networks of this host"))?)
}

/// Ends every machine of this installation and removes its traces; no daemon may be running.
pub(crate) async fn purge(config: &Config, layout: &Layout) -> Result<usize, ServeError> {
    // Nothing is started, so any runsc will do, also one that is not there any more.
    let runsc = find_runsc(config).unwrap_or_else(|| PathBuf::from("runsc"));
    Ok(torpor_engines::gvisor::purge(&gvisor(config, layout, runsc, Arc::new(NoGuard))?).await?)
}

fn gvisor(
    config: &Config,
    layout: &Layout,
    runsc: PathBuf,
    guard: Arc<dyn Guard>,
) -> Result<GvisorConfig, ServeError> {
    let program = std::env::current_exe().map_err(|error| {
        ServeError::NoEngine(format!("this program can't find itself: {error}"))
    })?;
    Ok(GvisorConfig {
        runsc,
        // The engine keeps what is its own in a directory named after the tag.
        runtime_dir: config.runtime_dir.clone(),
        scratch_dir: layout.scratch(),
        tag: layout.tag().to_owned(),
        keeper_command: vec![program.into(), KEEPER.into()],
        shells: config.standby.shells,
        guard,
    })
}

/// The one that is configured, else the first in PATH.
pub(crate) fn find_runsc(config: &Config) -> Option<PathBuf> {
    if let Some(path) = &config.engine.runsc_path {
        return Some(path.clone());
    }
    crate::config::search_path().into_iter().map(|dir| dir.join("runsc")).find(|path| runs(path))
}

fn runs(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

//! Which isolation engine serves this host; nobody else knows one by name.

mod choice;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::task::spawn_blocking;
use torpor_engines::gvisor::{self, Gvisor, GvisorConfig};
use torpor_engines::microvm::{self, Microvm, MicrovmConfig};
use torpor_engines::probe::kvm::{self, Kvm};
use torpor_kernel::KernelError;
use torpor_lifecycle::engine::{Engine, EngineError, GuestRegistry, NoGuestRegistry};
use torpor_protocol::AddressRange;
use torpor_qemu::build::{Accel, Build, BuildError};
use torpor_store::Layout;

use crate::ServeError;
use crate::config::Config;

pub(crate) use choice::{Choice, Found, Leaning, Parts, lean, settle};

/// The hidden command that keeps machines while the daemon is away.
const KEEPER: &str = "keeper";
/// The hidden command that starts a QEMU.
const JAIL: &str = "jail";
/// The hidden command that starts runsc.
const ENTER: &str = "enter";

pub(crate) async fn open(
    config: &Config,
    layout: &Layout,
    registry: Arc<dyn GuestRegistry>,
) -> Result<Arc<dyn Engine>, ServeError> {
    let (choice, reason) = choose(config, &layout.kernels()).await?;
    tracing::info!(engine = choice.name(), reason, "isolation engine");
    refuse_strangers(&choice, config, layout.tag())?;
    match choice {
        Choice::Gvisor => {
            let runsc = find_runsc(config).ok_or_else(|| {
                let missing = "runsc is not installed (or name it: engine.runsc_path)";
                ServeError::NoEngine(format!("{missing}; gvisor was chosen: {reason}"))
            })?;
            Ok(Arc::new(Gvisor::open(gvisor_config(config, layout, runsc, registry)?).await?))
        }
        Choice::Microvm(parts) => open_microvm(config, layout, *parts, registry).await,
    }
}

/// The engine for this host, and why. Looks no further than it has to.
async fn choose(config: &Config, kernels: &Path) -> Result<(Choice, String), ServeError> {
    let chosen = match lean(&config.engine, probe_kvm).await {
        Ok(Leaning::Gvisor(reason)) => Ok((Choice::Gvisor, reason)),
        Ok(Leaning::Microvm(accel)) => {
            settle(config.engine.kind, find_parts(config, kernels, accel).await)
        }
        Err(reason) => Err(reason),
    };
    chosen.map_err(ServeError::NoEngine)
}

/// What /dev/kvm is worth.
pub(crate) async fn probe_kvm() -> Kvm {
    let probed = spawn_blocking(kvm::probe).await;
    probed.unwrap_or_else(|error| Kvm::Broken(error.to_string()))
}

/// What a microVM takes besides the processor.
pub(crate) async fn find_parts(config: &Config, kernels: &Path, accel: Accel) -> Found {
    let kernels = kernels.to_owned();
    let kernel = spawn_blocking(move || torpor_kernel::newest(&kernels));
    let program = config.engine.qemu_path.as_deref();
    let qemu = match Build::find(program, accel).await {
        Err(BuildError::NoKvm { .. }) if config.engine.may_emulate() => {
            Build::find(program, Accel::Tcg).await
        }
        found => found,
    };
    let kernel = kernel.await.unwrap_or_else(|error| {
        let action = "look for a kernel".to_owned();
        Err(KernelError::Failed { action, source: error.into() })
    });
    Found { qemu, kernel }
}

/// Opens the microVM engine.
async fn open_microvm(
    config: &Config,
    layout: &Layout,
    parts: Parts,
    registry: Arc<dyn GuestRegistry>,
) -> Result<Arc<dyn Engine>, ServeError> {
    let program = this_program()?;
    let Parts { qemu, kernel } = parts;
    let config = MicrovmConfig {
        qemu,
        kernel,
        runtime_dir: config.runtime_dir.clone(),
        scratch_dir: layout.scratch(),
        templates_dir: layout.templates(),
        tag: layout.tag().to_owned(),
        keeper_command: vec![program.clone().into(), KEEPER.into()],
        jail_command: vec![program.into(), JAIL.into()],
        users: config.engine.users(),
        registry,
    };
    Ok(Arc::new(Microvm::open(config).await?))
}

/// What one engine left alive another can neither serve nor end.
fn refuse_strangers(choice: &Choice, config: &Config, tag: &str) -> Result<(), ServeError> {
    let dir = &config.runtime_dir;
    let (stranger, there) = match choice {
        Choice::Gvisor => ("microvm", microvm::has_machines(dir, tag)),
        Choice::Microvm(_) => ("gvisor", gvisor::has_machines(dir, tag)),
    };
    if !there {
        return Ok(());
    }
    Err(ServeError::NoEngine(format!(
        "machines of the {stranger} engine are still on this host: start the daemon once more with \
         engine.kind = {stranger} and stop it in the ordinary way, so that they are saved, or remove \
         them with `torpor purge`"
    )))
}

fn this_program() -> Result<PathBuf, ServeError> {
    std::env::current_exe()
        .map_err(|error| ServeError::NoEngine(format!("this program can't find itself: {error}")))
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
    let gvisor_config = gvisor_config(config, layout, runsc, Arc::new(NoGuestRegistry))?;
    let (dir, scratch, templates) = (&config.runtime_dir, layout.scratch(), layout.templates());
    let microvms = microvm::purge(dir, layout.tag(), &scratch, &templates).await?;
    Ok(gvisor::purge(&gvisor_config).await? + microvms)
}

fn gvisor_config(
    config: &Config,
    layout: &Layout,
    runsc: PathBuf,
    registry: Arc<dyn GuestRegistry>,
) -> Result<GvisorConfig, ServeError> {
    let program = this_program()?;
    Ok(GvisorConfig {
        runsc,
        builds_dir: Some(layout.engine_builds()),
        // The engine keeps what is its own in a directory named after the tag.
        runtime_dir: config.runtime_dir.clone(),
        scratch_dir: layout.scratch(),
        tag: layout.tag().to_owned(),
        keeper_command: vec![program.clone().into(), KEEPER.into()],
        enter_command: vec![program.into(), ENTER.into()],
        users: config.engine.users(),
        shells: config.standby.shells,
        registry,
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

//! Which isolation engine serves this host; nobody else knows one by name.

mod choice;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::task::spawn_blocking;
use torpor_engines::gvisor::{self, GvisorConfig};
use torpor_engines::microvm::{self, MicrovmConfig};
use torpor_engines::probe::kvm::{self, Kvm};
use torpor_engines::{EngineConfig, HostConfig};
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
    let host = host_config(config, layout, registry)?;
    refuse_strangers(&choice, &host)?;
    let engine = match choice {
        Choice::Gvisor => EngineConfig::Gvisor(gvisor_config(config, layout, &reason)?),
        Choice::Microvm(parts) => EngineConfig::Microvm(microvm_config(layout, *parts)?),
    };
    Ok(torpor_engines::open(host, vec![engine]).await?.remove(0))
}

/// What all engines of this installation are told.
fn host_config(
    config: &Config,
    layout: &Layout,
    registry: Arc<dyn GuestRegistry>,
) -> Result<HostConfig, ServeError> {
    Ok(HostConfig {
        // An installation keeps what is its own in a directory named after the tag.
        runtime_dir: config.runtime_dir.clone(),
        scratch_dir: layout.scratch(),
        tag: layout.tag().to_owned(),
        keeper_command: vec![this_program()?.into(), KEEPER.into()],
        users: config.engine.users(),
        registry,
    })
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

fn microvm_config(layout: &Layout, parts: Parts) -> Result<MicrovmConfig, ServeError> {
    let Parts { qemu, kernel } = parts;
    let jail_command = vec![this_program()?.into(), JAIL.into()];
    Ok(MicrovmConfig { qemu, kernel, templates_dir: layout.templates(), jail_command })
}

/// What one engine left alive another can neither serve nor end.
fn refuse_strangers(choice: &Choice, host: &HostConfig) -> Result<(), ServeError> {
    let (stranger, there) = match choice {
        Choice::Gvisor => ("microvm", microvm::has_machines(host)),
        Choice::Microvm(_) => ("gvisor", gvisor::has_machines(host)),
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
    let host = host_config(config, layout, Arc::new(NoGuestRegistry))?;
    Ok(torpor_engines::purge(&host).await?)
}

fn gvisor_config(
    config: &Config,
    layout: &Layout,
    reason: &str,
) -> Result<GvisorConfig, ServeError> {
    let runsc = find_runsc(config).ok_or_else(|| {
        let missing = "runsc is not installed (or name it: engine.runsc_path)";
        ServeError::NoEngine(format!("{missing}; gvisor was chosen: {reason}"))
    })?;
    Ok(GvisorConfig {
        runsc,
        builds_dir: Some(layout.engine_builds()),
        enter_command: vec![this_program()?.into(), ENTER.into()],
        prepared: config.standby.shells,
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

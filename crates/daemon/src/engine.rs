//! Which isolation engines serve this host; nobody else knows one by name.

mod choice;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::task::spawn_blocking;
use torpor_engines::gvisor::{self, GvisorConfig};
use torpor_engines::microvm::{self, MicrovmConfig};
use torpor_engines::probe::kvm::{self, Kvm};
use torpor_engines::{EngineConfig, HostConfig};
use torpor_kernel::KernelError;
use torpor_lifecycle::Engines;
use torpor_lifecycle::engine::{EngineError, GuestRegistry, NoGuestRegistry};
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

/// The default engine, and the others that work here unless the operator wants none.
pub(crate) async fn open(
    config: &Config,
    layout: &Layout,
    registry: Arc<dyn GuestRegistry>,
) -> Result<Engines, ServeError> {
    let (choice, reason) = choose(config, &layout.kernels()).await?;
    tracing::info!(engine = choice.name(), reason, "isolation engine");
    let other = match config.engine.others {
        true => other_than(&choice, config, layout).await,
        false => None,
    };
    let host = host_config(config, layout, registry)?;
    let default = match choice {
        Choice::Gvisor => EngineConfig::Gvisor(gvisor_config(config, layout, &reason)?),
        Choice::Microvm(parts) => EngineConfig::Microvm(microvm_config(layout, *parts)?),
    };
    refuse_strangers([Some(&default), other.as_ref()], &host)?;
    Ok(torpor_engines::open(host, default, other.into_iter().collect()).await?)
}

/// The engine that was not chosen, if it works here: for sandboxes that ask for it.
async fn other_than(choice: &Choice, config: &Config, layout: &Layout) -> Option<EngineConfig> {
    match choice {
        Choice::Microvm(_) => {
            let config = gvisor_config(config, layout, "sandboxes may ask for it").ok()?;
            // A runsc that is refused is as good as none.
            gvisor::build::Build::of(&config.runsc).await.ok()?;
            Some(EngineConfig::Gvisor(config))
        }
        Choice::Gvisor if probe_kvm().await.works() => {
            let found = find_parts(config, &layout.kernels(), Accel::Kvm).await;
            let parts = Parts { qemu: found.qemu.ok()?, kernel: found.kernel.ok()? };
            Some(EngineConfig::Microvm(microvm_config(layout, parts).ok()?))
        }
        Choice::Gvisor => None,
    }
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

/// What an engine left alive that is not opened nobody can serve or end.
fn refuse_strangers(
    opened: [Option<&EngineConfig>; 2],
    host: &HostConfig,
) -> Result<(), ServeError> {
    let opens = |is: fn(&EngineConfig) -> bool| opened.into_iter().flatten().any(is);
    let gvisor = opens(|engine| matches!(engine, EngineConfig::Gvisor(_)));
    let microvm = opens(|engine| matches!(engine, EngineConfig::Microvm(_)));
    let stranger = match (gvisor, microvm) {
        (false, _) if gvisor::has_machines(host) => "gvisor",
        (_, false) if microvm::has_machines(host) => "microvm",
        (true | false, true | false) => return Ok(()),
    };
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

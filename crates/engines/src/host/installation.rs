//! What the engines of one installation have in common on this host: its name, its network with one numbering of
//! places and users, its cgroups. Machines have ids of their own, so that none has another's.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use torpor_lifecycle::engine::{Engine, EngineError, GuestRegistry};
use torpor_lifecycle::{Engines, chain};

use crate::directory;
use crate::gvisor::{self, GvisorConfig};
use crate::keeper::Keeper;
use crate::limits::{self, Hierarchy};
use crate::machines::{Files, Footprint, Users, host_memory_mib, ids_in, left_in};
use crate::microvm::{self, MicrovmConfig};
use crate::network::{Network, remove_traces};

/// Longest directory of an installation: a unix socket's path has at most 107 bytes, and the longest of ours are
/// `runsc/runsc-<id>.sock` and `vm/machines/<id>/run/monitor`.
const DIR_MAX: usize = 64;

/// What an installation says about itself to its engines.
#[derive(Clone)]
pub struct HostConfig {
    /// For sockets and what is known of running machines, in a directory named by the tag. At most
    /// 55 bytes long.
    pub runtime_dir: PathBuf,
    /// For the machines' disks and memories; made if absent. On the same filesystem as saves, if those
    /// are to be quick.
    pub scratch_dir: PathBuf,
    /// Tells this installation's cgroups and addresses from others on the same host: eight
    /// lowercase letters and digits.
    pub tag: String,
    /// Starts a keeper, to be followed by the path of its socket.
    pub keeper_command: Vec<OsString>,
    /// Who machines are on this host.
    pub users: Users,
    /// Decides about what guests send out, as far as a firewall can't.
    pub registry: Arc<dyn GuestRegistry>,
}

/// An engine to open.
#[derive(Debug, Clone)]
pub enum EngineConfig {
    Gvisor(GvisorConfig),
    Microvm(MicrovmConfig),
}

/// Opens the engines of an installation. On `Err` nothing new is left on the host; of the others one that can't
/// be opened is left out.
pub async fn open(
    config: HostConfig,
    default: EngineConfig,
    others: Vec<EngineConfig>,
) -> Result<Engines, EngineError> {
    let installation = Arc::new(Installation::open(config).await?);
    let default = match installation.open_engine(default).await {
        Ok(engine) => engine,
        Err(error) => {
            installation.close_unused().await;
            return Err(error);
        }
    };
    let mut opened = Vec::new();
    for other in others {
        match installation.open_engine(other).await {
            Ok(engine) => opened.push(engine),
            Err(error) => {
                tracing::warn!(
                    error = chain(&error),
                    "an engine can't be opened, going on without it"
                );
            }
        }
    }
    Ok(Engines::new(default, opened))
}

/// Kills and removes everything of this installation on this host, without a daemon. Returns how many machines
/// there were.
pub async fn purge(config: &HostConfig) -> Result<usize, EngineError> {
    let hierarchy =
        Hierarchy::discover().map_err(EngineError::failed("find the host's cgroups"))?;
    let gvisor = config.footprint(gvisor::Layout::of(config), &hierarchy);
    let microvm = config.footprint(microvm::Layout::of(config), &hierarchy);
    let cleared = gvisor.clear_everything().await? + microvm.clear_everything().await?;
    remove_traces(&config.tag).await.map_err(EngineError::failed("remove the network"))?;
    let traces = || EngineError::failed("remove the engine's traces");
    gvisor.clear_shared().await.map_err(traces())?;
    microvm.clear_shared().await.map_err(traces())?;
    Ok(cleared)
}

impl HostConfig {
    /// The directory of this installation, with what is gVisor's; that of microVMs is in it.
    pub(crate) fn dir(&self) -> PathBuf {
        self.runtime_dir.join(&self.tag)
    }

    /// The directories of machines, of every engine.
    fn machines(&self) -> [PathBuf; 2] {
        [gvisor::Layout::of(self).machines(), microvm::Layout::of(self).machines()]
    }

    /// What it takes to find everything of the engine that has this layout.
    pub(crate) fn footprint<F: Files>(
        &self,
        layout: F,
        hierarchy: &Hierarchy,
    ) -> Arc<Footprint<F>> {
        let own = layout.machines();
        let others = self.machines().into_iter().filter(|machines| *machines != own).collect();
        let socket = layout.keeper_socket();
        let mut command = self.keeper_command.clone();
        command.push(socket.clone().into());
        let keeper = Keeper::at(command, &socket);
        let (tag, hierarchy) = (self.tag.clone(), hierarchy.clone());
        Arc::new(Footprint { layout, tag, hierarchy, keeper, others })
    }

    fn check(&self) -> Result<(), EngineError> {
        let bad = |why: &str| Err(EngineError::failed("use the engine's settings")(why));
        let dir = self.dir();
        if !dir.is_absolute() || dir.as_os_str().len() > DIR_MAX {
            return bad("runtime_dir must be an absolute path of at most 55 bytes");
        }
        if !self.scratch_dir.is_absolute() {
            return bad("scratch_dir must be an absolute path");
        }
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        if self.tag.len() != 8 || !self.tag.bytes().all(plain) {
            return bad("tag must consist of eight lowercase letters and digits");
        }
        Ok(())
    }

    fn make_dirs(&self) -> std::io::Result<()> {
        directory::guarded(&self.runtime_dir)?;
        directory::private(&self.dir())?;
        directory::private(&self.scratch_dir)
    }
}

/// What the engines of this process share.
pub(crate) struct Installation {
    pub(crate) config: HostConfig,
    pub(crate) hierarchy: Hierarchy,
    pub(crate) network: Network,
    pub(crate) memory_mib: u64,
}

impl Installation {
    async fn open(config: HostConfig) -> Result<Self, EngineError> {
        config.check()?;
        let hierarchy = limits::complete()?;
        config.make_dirs().map_err(EngineError::failed("make the engine's directories"))?;
        let left: Vec<_> = config.machines().iter().flat_map(|dir| left_in(dir)).collect();
        let network = Network::open(&config.tag, &left, config.registry.clone()).await;
        let network = network.map_err(EngineError::failed("open the network"))?;
        Ok(Self { config, hierarchy, network, memory_mib: host_memory_mib() })
    }

    async fn open_engine(
        self: &Arc<Self>,
        engine: EngineConfig,
    ) -> Result<Arc<dyn Engine>, EngineError> {
        match engine {
            EngineConfig::Gvisor(config) => gvisor::open(self, config).await,
            EngineConfig::Microvm(config) => microvm::open(self, config).await,
        }
    }

    /// Removes what machines share, if no engine has one.
    pub(crate) async fn close_unused(&self) {
        if self.config.machines().iter().any(|machines| !ids_in(machines).is_empty()) {
            return;
        }
        if let Err(error) = self.network.close().await {
            tracing::warn!(%error, "the network's traces stay on the host");
        }
    }
}

//! gVisor: a machine is a sandbox of `runsc`, an application kernel in user space.
//!
//! ```text
//!            ┌────────────── host ──────────────────────────────────────────────┐
//!   daemon ──┤ keeper ─▶ runsc create ─▶ sandbox ── stdin ── agent (PID 1 inside) │
//!      │     └──────────────────────────────│────────────────────────────────────┘
//!      └── control socket: card, start ─────┘
//! ```
//!
//! Invariants
//! - the command line is used for `create` only; it costs Go's start-up each time, and its `start`
//!   does not work on new kernels;
//! - a machine is started in a container, which is the same for every guest of an image and may have
//!   been prepared ahead (`pool`); the guest comes from the image or from a save (`start`);
//! - of a machine that is paused it is known, also to the next daemon, that its guest executes
//!   nothing (`control`);
//! - every guest has the same address inside; no guest writes to memory what it writes to "disk";
//! - the root must have something in `/tmp` (an empty file will do): runsc mounts an unbounded
//!   memory filesystem over an empty `/tmp`.

pub mod build;
mod container;
mod control;
mod enter;
mod image;
mod layout;
mod links;
mod mounts;
mod oci;
mod pool;
mod report;
mod resize;
mod save;
mod saved;
mod sentry;
mod stacks;
mod start;
mod urpc;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::task::JoinHandle;
use torpor_lifecycle::engine::{BootPlan, Changes, Engine, EngineError};

use self::build::{Build, Builds, Generation};
use self::container::ContainerSpec;
use self::control::KernelControl;
pub use self::enter::enter;
pub(crate) use self::layout::Layout;
use self::pool::Pool;
#[cfg(any(test, fuzzing))]
pub use self::saved::fuzzing;
use self::start::Start;
use crate::host::{Backend, Host, HostConfig, HostMachine, Installation, Origin, Shared, Wanted};
use crate::limits::Group;
use crate::machines::{Files, MachineId, MarkFile, Record, ids_in};
use crate::packet::SeqPacket;

/// What the engine is told besides what all engines are.
#[derive(Debug, Clone)]
pub struct GvisorConfig {
    /// The program.
    pub runsc: PathBuf,
    /// For copies of it, from which saves are revived when it is another one; none: nothing is kept.
    pub builds_dir: Option<PathBuf>,
    /// Starts runsc ([`enter`]), to be followed by the path of a description.
    pub enter_command: Vec<OsString>,
    /// How many containers are kept prepared, so that a start is quick; 0: none.
    pub prepared: usize,
}

/// Checks that runsc will do.
pub(crate) async fn open(
    installation: &Arc<Installation>,
    config: GvisorConfig,
) -> Result<Arc<dyn Engine>, EngineError> {
    let builds = Builds::open(&config.runsc, config.builds_dir).await;
    let builds = builds.map_err(EngineError::failed("use runsc"))?;
    let layout = Layout::of(&installation.config);
    // What earlier versions left there is out of reach for the users of machines.
    build::unmount_state(&layout.runsc_root());
    let (enter_command, pool) = (config.enter_command, Pool::new(config.prepared));
    let backend = Runsc { builds, enter_command, pool };
    Ok(Arc::new(Host::open(installation, backend, layout).await?))
}

/// Whether machines of this engine are on this host, alive or not.
pub fn has_machines(config: &HostConfig) -> bool {
    !ids_in(&Layout::of(config).machines()).is_empty()
}

/// gVisor on this host.
struct Runsc {
    builds: Builds,
    enter_command: Vec<OsString>,
    pool: Pool,
}

impl Runsc {
    /// The build that a guest begins on.
    fn build_for(&self, origin: &Origin) -> Result<Arc<Build>, EngineError> {
        match origin {
            Origin::Image => Ok(self.builds.current().clone()),
            Origin::Save { version, .. } => {
                let build = self.builds.find(version);
                build.ok_or_else(|| EngineError::failed("revive the guest")(self.no_build(version)))
            }
        }
    }

    /// Why nothing of this version can be revived, and what to do.
    fn no_build(&self, version: &str) -> String {
        let here = self.builds.current();
        format!(
            "it was saved by runsc {version}, of which no copy is here; this host has {here}: start \
             the daemon once with that runsc (engine.runsc_path), which keeps a copy, or go on with \
             its files alone (torpor engine migrate)"
        )
    }
}

impl Backend for Runsc {
    type Files = Layout;
    type Channel = SeqPacket;
    type Control = KernelControl;

    const KIND: &'static str = "gvisor";
    const QUIESCES: bool = false;
    const BINDS: bool = true;

    fn version(&self) -> String {
        self.builds.current().to_string()
    }

    async fn start(
        host: &Arc<Shared<Self>>,
        plan: &BootPlan,
        origin: &Origin,
        wanted: Wanted<'_>,
    ) -> Result<HostMachine<Self>, EngineError> {
        let build = host.backend.build_for(origin)?;
        let _hold_off = host.backend.pool.hold_off();
        Start { host, plan, build: &build, origin }.run(wanted).await
    }

    async fn reach(
        host: &Shared<Self>,
        record: &Record,
        group: &Group,
        mark: MarkFile,
    ) -> Result<(SeqPacket, KernelControl), EngineError> {
        let channel = channel_of(host, &record.id).await?;
        let generation = Generation::of_name(&record.build);
        let halt = generation.unwrap_or(host.backend.builds.current().generation).halt();
        let dir = host.footprint.layout.machine(&record.id);
        Ok((channel, KernelControl::new(record, &dir, group.clone(), halt, mark)))
    }

    async fn why_ended(host: &Shared<Self>, group: &Group, record: &Record) -> String {
        let dir = host.footprint.layout.machine(&record.id);
        report::reason(&host.footprint.keeper, &dir, group, record).await
    }

    fn changes(saved: &Path) -> Result<Box<dyn Changes>, EngineError> {
        Ok(Box::new(saved::read(saved)?))
    }

    fn can_revive(&self, version: &str) -> Result<String, String> {
        let build = self.builds.find(version);
        build.map(|build| build.to_string()).ok_or_else(|| self.no_build(version))
    }

    fn builds(&self) -> Vec<String> {
        self.builds.names()
    }

    fn retain_builds(&self, needed: impl Fn(&str) -> bool) {
        self.builds.retain(needed);
    }

    fn expect(&self, plan: &BootPlan) {
        self.pool.expect(&ContainerSpec::of(plan, self.builds.current()));
    }

    fn prepared(&self) -> Vec<MachineId> {
        self.pool.ids()
    }

    fn background(host: &Arc<Shared<Self>>) -> Option<JoinHandle<()>> {
        Some(tokio::spawn(host.clone().fill_pool()))
    }

    fn stop(&self) {
        self.pool.close();
    }
}

/// The daemon's end of the channel, which the keeper holds.
async fn channel_of(host: &Shared<Runsc>, id: &MachineId) -> Result<SeqPacket, EngineError> {
    const WHAT: &str = "get the machine's channel";
    let channel = host.footprint.keeper.channel(id.as_str()).await;
    let channel = channel.map_err(EngineError::failed(WHAT))?;
    let channel = channel.ok_or_else(|| EngineError::failed(WHAT)("it is not held"))?;
    SeqPacket::new(channel).map_err(EngineError::failed(WHAT))
}

//! MicroVMs: a machine is a QEMU with a Linux kernel of its own.
//!
//! ```text
//!            ┌────────────── host ─────────────────────────────────────────────┐
//!   daemon ──┤ keeper ─▶ starter (jail) ─▶ QEMU ── serial port ── agent (PID 1)  │
//!      │     └────────────────────────────│──────────────────────────────────────┘
//!      └── monitor: stop, device state, go on; memory of the guest by /proc ──┘
//! ```
//!
//! Invariants
//! - the guest's memory is a private mapping of a file that never changes: forks share what they do
//!   not write, and what a machine wrote is what is private (`torpor_qemu::memory`);
//! - memory, device state and disk of one moment are one unit (`torpor_qemu::unit`), and a machine
//!   begins from a unit or from a kernel, never from parts of two;
//! - a machine from an image begins from a template: one that booted once and was saved (`template`);
//! - QEMU executes nothing of the guest before the machine's record says whose it is;
//! - a machine that is paused executes nothing: QEMU was told to stop the guest, and is frozen itself
//!   (`control`);
//! - the kernel inside does not notice any of it: its agent is told (`Abilities::quiesces`).

mod changes;
mod channel;
mod control;
mod layout;
mod report;
mod start;
mod template;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use torpor_kernel::Kernel;
use torpor_lifecycle::engine::{BootPlan, Changes, Engine, EngineError};
use torpor_protocol::Resources;
use torpor_qemu::build::Build;
use torpor_qemu::processor::processor;

use self::channel::LineChannel;
use self::control::QemuControl;
pub(crate) use self::layout::Layout;
use self::start::{Start, read_began};
use self::template::Templates;
use crate::INIT;
use crate::directory;
use crate::host::{Backend, Host, HostConfig, HostMachine, Installation, Origin, Shared, Wanted};
use crate::limits::Group;
use crate::machines::{Files, MarkFile, Record, ids_in};

/// What the engine is told besides what all engines are.
#[derive(Debug, Clone)]
pub struct MicrovmConfig {
    /// The program, and whether KVM runs guests or it emulates them, slowly.
    pub qemu: Build,
    /// What machines boot.
    pub kernel: Kernel,
    /// For what machines begin from; made if absent. On the same filesystem as saves, if those are to be
    /// quick.
    pub templates_dir: PathBuf,
    /// Starts a QEMU ([`torpor_qemu::jail::start`]), to be followed by the path of its description.
    pub jail_command: Vec<OsString>,
}

pub(crate) async fn open(
    installation: &Arc<Installation>,
    config: MicrovmConfig,
) -> Result<Arc<dyn Engine>, EngineError> {
    let MicrovmConfig { qemu: build, kernel, templates_dir, jail_command } = config;
    directory::private(&templates_dir)
        .map_err(EngineError::failed("make the engine's directories"))?;
    let initramfs = torpor_kernel::initramfs(&kernel, INIT)
        .map_err(EngineError::failed("put together what machines boot with"))?;
    let layout = Layout::of(&installation.config);
    let initramfs_file = layout.initramfs();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let backend = Qemu {
        version: version(&build, &kernel),
        build,
        kernel,
        jail_command,
        cores: u32::try_from(cores).unwrap_or(u32::MAX),
        templates: Templates::at(&templates_dir),
    };
    let host = Host::open(installation, backend, layout).await?;
    std::fs::write(initramfs_file, initramfs)
        .map_err(EngineError::failed("write what machines boot with"))?;
    Ok(Arc::new(host))
}

/// Whether machines of this engine are on this host, alive or not.
pub fn has_machines(config: &HostConfig) -> bool {
    !ids_in(&Layout::of(config).machines()).is_empty()
}

/// QEMU on this host.
struct Qemu {
    build: Build,
    kernel: Kernel,
    jail_command: Vec<OsString>,
    /// What ties a saved machine to this host.
    version: String,
    cores: u32,
    templates: Templates,
}

/// All that a saved machine is tied to.
fn version(build: &Build, kernel: &Kernel) -> String {
    let Build { text, accel, .. } = build;
    let (cpu, accel) = (processor(*accel), accel.name());
    format!("QEMU {text}, {accel}, processor {cpu}, kernel {} ({})", kernel.release, kernel.id)
}

impl Qemu {
    /// Whole processors that a guest sees; its share of them is bounded by its cgroup.
    fn processors(&self, resources: &Resources) -> u32 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a small positive number, and `as` saturates"
        )]
        let wanted = resources.cpus.ceil() as u32;
        wanted.clamp(1, self.cores)
    }
}

impl Backend for Qemu {
    type Files = Layout;
    type Channel = LineChannel;
    type Control = QemuControl;

    const KIND: &'static str = "microvm";
    const QUIESCES: bool = true;
    const BINDS: bool = false;

    fn version(&self) -> String {
        self.version.clone()
    }

    async fn start(
        host: &Arc<Shared<Self>>,
        plan: &BootPlan,
        origin: &Origin,
        wanted: Wanted<'_>,
    ) -> Result<HostMachine<Self>, EngineError> {
        Start { host, plan }.run(origin, wanted).await
    }

    async fn reach(
        host: &Shared<Self>,
        record: &Record,
        group: &Group,
        mark: MarkFile,
    ) -> Result<(LineChannel, QemuControl), EngineError> {
        let dir = host.footprint.layout.machine(&record.id);
        let channel = LineChannel::connect(&dir.agent).await;
        let channel = channel.map_err(EngineError::failed("reach the machine's agent"))?;
        let began = read_began(&dir).ok_or_else(|| {
            EngineError::failed("take over a machine")("nobody knows what it began from")
        })?;
        Ok((channel, QemuControl::new(&dir, record.process.pid, began, group.clone(), mark)))
    }

    async fn why_ended(host: &Shared<Self>, group: &Group, record: &Record) -> String {
        report::reason(&host.footprint.keeper, group, record).await
    }

    fn changes(saved: &Path) -> Result<Box<dyn Changes>, EngineError> {
        changes::read(saved)
    }
}

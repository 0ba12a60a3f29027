//! The microVM engine: a machine is a QEMU with a Linux kernel of its own.
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
//! - the kernel inside does not notice any of it: its agent is told (`Abilities::rests`).

mod changes;
mod channel;
mod control;
mod layout;
mod machine;
mod report;
mod start;
mod template;

use std::collections::HashSet;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{Semaphore, oneshot};
use torpor_kernel::Kernel;
use torpor_lifecycle::engine::{
    Abilities, About, BootPlan, Changes, Engine, EngineError, GuestRegistry, Machine,
};
use torpor_protocol::{Resources, SandboxId};
use torpor_qemu::build::Build;
use torpor_qemu::processor::processor;

use self::channel::LineChannel;
use self::control::Control;
use self::layout::{Layout, MACHINES_DIR, OWN_DIR, RUNTIME_DIR_MAX};
use self::machine::{MicrovmMachine, Parts};
use self::start::{Began, Origin, Start};
use self::template::Templates;
use crate::INIT;
use crate::directory;
use crate::keeper::Keeper;
use crate::limits::{self, Hierarchy};
use crate::machines::{
    Files, MachineId, MarkFile, Record, Remains, Roll, Turns, Unclaimed, Users, check_root,
    host_memory_mib, ids_in,
};
use crate::network::{Network, remove_traces};

/// What an installation says about itself to the engine.
#[derive(Clone)]
pub struct MicrovmConfig {
    /// The program, and whether KVM runs guests or it emulates them, slowly.
    pub qemu: Build,
    /// What machines boot.
    pub kernel: Kernel,
    /// For sockets and what is known of running machines, in a directory named by the tag. At most
    /// 55 bytes long.
    pub runtime_dir: PathBuf,
    /// For the machines' disks and memories; made if absent. On the same filesystem as saves, if those
    /// are to be quick.
    pub scratch_dir: PathBuf,
    /// For what machines begin from; made if absent. Likewise.
    pub templates_dir: PathBuf,
    /// Tells this installation's cgroups and addresses from others on the same host: eight
    /// lowercase letters and digits.
    pub tag: String,
    /// Starts the keeper, to be followed by the path of its socket.
    pub keeper_command: Vec<OsString>,
    /// Starts a QEMU ([`torpor_qemu::jail::start`]), to be followed by the path of its description.
    pub jail_command: Vec<OsString>,
    /// Who machines are on this host.
    pub users: Users,
    /// Decides about what guests send out, as far as a firewall can't.
    pub registry: Arc<dyn GuestRegistry>,
}

impl fmt::Debug for MicrovmConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { qemu, kernel, runtime_dir, scratch_dir, tag, .. } = self;
        f.debug_struct("MicrovmConfig")
            .field("qemu", qemu)
            .field("kernel", &kernel.release)
            .field("runtime_dir", runtime_dir)
            .field("scratch_dir", scratch_dir)
            .field("tag", tag)
            .finish_non_exhaustive()
    }
}

impl MicrovmConfig {
    fn layout(&self) -> Layout {
        layout(&self.runtime_dir, &self.tag, &self.scratch_dir, &self.templates_dir)
    }

    fn keeper(&self) -> Keeper {
        keeper(&self.layout(), &self.keeper_command)
    }
}

fn layout(runtime_dir: &Path, tag: &str, scratch_dir: &Path, templates_dir: &Path) -> Layout {
    Layout {
        runtime_dir: runtime_dir.join(tag).join(OWN_DIR),
        scratch_dir: scratch_dir.to_owned(),
        templates_dir: templates_dir.to_owned(),
    }
}

fn keeper(layout: &Layout, command: &[OsString]) -> Keeper {
    let socket = layout.keeper_socket();
    let mut command = command.to_vec();
    command.push(socket.clone().into());
    Keeper::at(command, &socket)
}

/// The engine of one installation on this host.
pub struct Microvm {
    host: Arc<Host>,
    about: About,
}

/// What all machines of the engine share.
struct Host {
    build: Build,
    kernel: Kernel,
    jail_command: Vec<OsString>,
    users: Users,
    /// What ties a saved machine to this host.
    version: String,
    memory_mib: u64,
    cores: u32,
    network: Network,
    remains: Arc<Remains<Layout>>,
    templates: Templates,
    /// Starts under way. They are bound by the processor: more at once makes each slower and all
    /// later.
    starts: Semaphore,
    /// The same for saves.
    saves: Arc<Semaphore>,
    turns: Turns,
    roll: Roll,
}

impl Microvm {
    /// Checks that QEMU will do, makes the directories and finds or starts the keeper.
    pub async fn open(config: MicrovmConfig) -> Result<Self, EngineError> {
        check_paths(&config)?;
        let hierarchy = limits::complete()?;
        let layout = config.layout();
        make_dirs(&layout).map_err(EngineError::failed("make the engine's directories"))?;
        let initramfs = torpor_kernel::initramfs(&config.kernel, INIT)
            .map_err(EngineError::failed("put together what machines boot with"))?;
        std::fs::write(layout.initramfs(), initramfs)
            .map_err(EngineError::failed("write what machines boot with"))?;
        let keeper = config.keeper();
        keeper.ensure().await.map_err(EngineError::failed("start the keeper"))?;
        let (roll, left) = Roll::read(&layout.machines());
        let network = Network::open(&config.tag, &left, config.registry).await;
        let network = network.map_err(EngineError::failed("open the network"))?;
        let build = config.qemu;
        let version = version(&build, &config.kernel);
        let about = about(&version, &network);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let host = Host {
            templates: Templates::at(&layout.templates_dir),
            build,
            kernel: config.kernel,
            jail_command: config.jail_command,
            users: config.users,
            version,
            memory_mib: host_memory_mib(),
            cores: u32::try_from(cores).unwrap_or(u32::MAX),
            network,
            roll,
            remains: Arc::new(Remains { layout, tag: config.tag, hierarchy, keeper }),
            starts: Semaphore::new(cores + 1),
            saves: Arc::new(Semaphore::new(cores + 1)),
            turns: Turns::default(),
        };
        Ok(Self { host: Arc::new(host), about })
    }

    async fn start(&self, plan: BootPlan, origin: Origin) -> Result<Box<dyn Machine>, EngineError> {
        self.host.check(&plan)?;
        let (answer, started) = oneshot::channel();
        tokio::spawn(self.host.clone().start(plan, origin, answer));
        let started = started.await.map_err(EngineError::failed("start the machine"))??;
        Ok(Box::new(started.claim()))
    }
}

/// All that a saved machine is tied to.
fn version(build: &Build, kernel: &Kernel) -> String {
    let Build { text, accel, .. } = build;
    let (cpu, accel) = (processor(*accel), accel.name());
    format!("QEMU {text}, {accel}, processor {cpu}, kernel {} ({})", kernel.release, kernel.id)
}

fn about(version: &str, network: &Network) -> About {
    About {
        kind: "microvm",
        version: version.to_owned(),
        nameserver: Some(network.nameserver().to_string()),
        egress_proxy: Some(network.egress_proxy()),
        abilities: Abilities {
            memory_snapshots: true,
            live_snapshots: true,
            warm_standby: true,
            saved_files: true,
            rests: true,
        },
    }
}

/// Whether machines of this engine are on this host, alive or not.
pub fn has_machines(runtime_dir: &Path, tag: &str) -> bool {
    !ids_in(&runtime_dir.join(tag).join(OWN_DIR).join(MACHINES_DIR)).is_empty()
}

/// Kills and removes everything of this installation on this host, without a daemon.
pub async fn purge(
    runtime_dir: &Path,
    tag: &str,
    scratch_dir: &Path,
    templates_dir: &Path,
) -> Result<usize, EngineError> {
    let hierarchy =
        Hierarchy::discover().map_err(EngineError::failed("find the host's cgroups"))?;
    let layout = layout(runtime_dir, tag, scratch_dir, templates_dir);
    let keeper = keeper(&layout, &[]);
    let remains = Arc::new(Remains { layout, tag: tag.to_owned(), hierarchy, keeper });
    let ids = remains.ids().await;
    let count = ids.len();
    remains.clear_all(ids).await?;
    remove_traces(tag).await.map_err(EngineError::failed("remove the network"))?;
    remains.clear_shared().await.map_err(EngineError::failed("remove the engine's traces"))?;
    Ok(count)
}

#[async_trait]
impl Engine for Microvm {
    fn about(&self) -> &About {
        &self.about
    }

    async fn boot(&self, plan: BootPlan) -> Result<Box<dyn Machine>, EngineError> {
        self.start(plan, Origin::Image).await
    }

    async fn revive(
        &self,
        plan: BootPlan,
        saved: &Path,
        _: &str,
    ) -> Result<Box<dyn Machine>, EngineError> {
        self.start(plan, Origin::Save(saved.to_owned())).await
    }

    fn changes(&self, saved: &Path) -> Result<Box<dyn Changes>, EngineError> {
        changes::read(saved)
    }

    async fn adopt(&self, id: &SandboxId) -> Result<Option<Box<dyn Machine>>, EngineError> {
        Ok(self.host.adopt(id).await?.map(|machine| Box::new(machine) as Box<dyn Machine>))
    }

    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<usize, EngineError> {
        let Host { remains, roll, network, .. } = &*self.host;
        roll.retain(keep);
        let stay: HashSet<MachineId> =
            keep.iter().filter_map(|sandbox| roll.machine_of(sandbox)).collect();
        let mut ids = remains.ids().await;
        ids.retain(|id| !stay.contains(id));
        // What was to become a template was nobody's.
        let count = ids.iter().filter(|id| !remains.is_shell(id)).count();
        remains.clear_all(ids).await?;
        network.swept();
        Ok(count)
    }

    async fn close(&self) {
        if !self.host.remains.ids().await.is_empty() {
            return;
        }
        if let Err(error) = self.host.network.close().await {
            tracing::warn!(%error, "the network's traces stay on the host");
        }
        if let Err(error) = self.host.remains.clear_shared().await {
            tracing::warn!(%error, "the engine's traces stay on the host");
        }
    }
}

impl Host {
    /// Refuses what can't work before anything is made.
    fn check(&self, plan: &BootPlan) -> Result<(), EngineError> {
        let wanted = plan.spec.resources.memory_mib;
        if wanted > self.memory_mib {
            let detail = format!("{wanted} MiB wanted, {} MiB here", self.memory_mib);
            return Err(EngineError::Capacity { what: "memory", detail });
        }
        check_root(&plan.root)
    }

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

    async fn start(
        self: Arc<Self>,
        plan: BootPlan,
        origin: Origin,
        answer: oneshot::Sender<Result<Unclaimed<MicrovmMachine>, EngineError>>,
    ) {
        let turn = self.turns.take(&plan.id).await;
        let permit = self.starts.acquire().await.expect("it is never closed");
        if answer.is_closed() {
            return;
        }
        if let Some(former) = self.roll.machine_of(&plan.id) {
            // One that died, or whose removal failed.
            self.clear_up(&former).await;
        }
        let start = Start { host: &self, plan: &plan };
        let started = start.run(&origin, || !answer.is_closed()).await;
        drop(permit);
        // If nobody takes it any more, it clears itself up.
        let _ = answer.send(started.map(|machine| Unclaimed::new(machine, turn)));
    }

    async fn clear_up(&self, id: &MachineId) {
        if let Err(error) = self.remains.clear(id).await {
            tracing::warn!(%id, %error, "something of a machine stays until the next sweep");
        }
    }

    async fn adopt(
        self: &Arc<Self>,
        sandbox: &SandboxId,
    ) -> Result<Option<MicrovmMachine>, EngineError> {
        let _turn = self.turns.take(sandbox).await;
        let Some(id) = self.roll.machine_of(sandbox) else { return Ok(None) };
        match self.take_over(sandbox, &id).await {
            Ok(machine) => Ok(Some(machine)),
            // A start that was cut off, or dead, or without a way to talk to it: not there.
            Err(error) => {
                tracing::warn!(%sandbox, error = %error, "a machine that can't be had is given up");
                self.remains.clear(&id).await?;
                self.roll.forget(sandbox, &id);
                Ok(None)
            }
        }
    }

    async fn take_over(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        id: &MachineId,
    ) -> Result<MicrovmMachine, EngineError> {
        let gone = |what: &'static str| EngineError::failed("take over a machine")(what);
        let dir = self.remains.layout.machine(id);
        let record = Record::read(&dir.record).ok_or_else(|| gone("it has no record"))?;
        let mark = MarkFile::open(&dir.mark).ok_or_else(|| gone("it never ran"))?;
        let pidfd = record.process.open().ok_or_else(|| gone("its QEMU is gone"))?;
        let slot = self.network.adopt(record.slot, sandbox, &record.network).await;
        let slot = slot.map_err(EngineError::failed("take over the machine's network"))?;
        let group = self.remains.group(id);
        let channel = LineChannel::connect(&dir.agent).await;
        let channel = channel.map_err(EngineError::failed("reach the machine's agent"))?;
        let began = Began::read(&dir).ok_or_else(|| gone("nobody knows what it began from"))?;
        let mut control = Control::new(&dir, record.process.pid, began, group.clone(), mark);
        control.take_over().await?;
        let parts = Parts { record, slot, group, channel, pidfd, control };
        MicrovmMachine::new(self.clone(), parts).map_err(EngineError::failed("watch the machine"))
    }
}

fn check_paths(config: &MicrovmConfig) -> Result<(), EngineError> {
    let bad = |why: &str| Err(EngineError::failed("use the engine's settings")(why));
    let own = config.runtime_dir.join(&config.tag);
    if !own.is_absolute() || own.as_os_str().len() > RUNTIME_DIR_MAX {
        return bad("runtime_dir must be an absolute path of at most 55 bytes");
    }
    if !config.scratch_dir.is_absolute() || !config.templates_dir.is_absolute() {
        return bad("scratch_dir and templates_dir must be absolute paths");
    }
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    if config.tag.len() != 8 || !config.tag.bytes().all(plain) {
        return bad("tag must consist of eight lowercase letters and digits");
    }
    Ok(())
}

fn make_dirs(layout: &Layout) -> std::io::Result<()> {
    let (own, machines) = (&layout.runtime_dir, layout.machines());
    // What other engines have is in the same directory of the installation.
    let installation = own.parent().unwrap_or(own);
    directory::guarded(installation.parent().unwrap_or(installation))?;
    let dirs = [installation, own, &machines, &layout.scratch_dir, &layout.templates_dir];
    dirs.into_iter().try_for_each(directory::private)
}

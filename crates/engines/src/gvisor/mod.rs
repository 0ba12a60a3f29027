//! The gVisor engine: a machine is a sandbox of `runsc`, an application kernel in user space.
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
//! - a machine is found by tag and its own id alone: its directory, its cgroups, its disk. Its record
//!   says which sandbox has it; what no sandbox has is a remainder, and `remains` removes it;
//! - a machine is started from a shell, which is the same for every guest of an image and may have
//!   been made ahead (`shelf`); the guest comes from the image or from a save (`start`);
//! - of a machine that is paused it is known, also to the next daemon, that its guest executes
//!   nothing (`control`);
//! - every guest has the same address inside; no guest writes to memory what it writes to "disk";
//! - the root must have something in `/tmp` (an empty file will do): runsc mounts an unbounded
//!   memory filesystem over an empty `/tmp`.

pub mod build;
mod control;
mod enter;
mod image;
mod layout;
mod links;
mod machine;
mod oci;
mod report;
mod save;
mod saved;
mod sentry;
mod settings;
mod shelf;
mod shell;
mod stacks;
mod start;
mod urpc;

use std::collections::HashSet;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use torpor_lifecycle::engine::{
    Abilities, About, BootPlan, Changes, Engine, EngineBuild, EngineError, GuestRegistry, Machine,
};
use torpor_protocol::{Resources, SandboxId};

use self::build::{Build, Builds, Generation};
use self::control::Control;
pub use self::enter::enter;
use self::layout::{Layout, MACHINES_DIR, MachineDir, RUNTIME_DIR_MAX};
use self::machine::{GvisorMachine, Parts};
#[cfg(any(test, fuzzing))]
pub use self::saved::fuzzing;
use self::shelf::Shelf;
use self::shell::Make;
use self::start::{Origin, Start};
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
pub struct GvisorConfig {
    /// The program.
    pub runsc: PathBuf,
    /// For copies of it, from which saves are revived when it is another one; none: nothing is kept.
    pub builds_dir: Option<PathBuf>,
    /// For sockets and what is known of running machines, in a directory named by the tag. At most
    /// 55 bytes long.
    pub runtime_dir: PathBuf,
    /// For the machines' disks; made if absent.
    pub scratch_dir: PathBuf,
    /// Tells this installation's cgroups and addresses from others on the same host: eight
    /// lowercase letters and digits.
    pub tag: String,
    /// Starts the keeper, to be followed by the path of its socket.
    pub keeper_command: Vec<OsString>,
    /// Starts runsc ([`enter`]), to be followed by the path of a description.
    pub enter_command: Vec<OsString>,
    /// Who machines are on this host.
    pub users: Users,
    /// How many empty machines are kept ready, so that a start is quick; 0: none.
    pub shells: usize,
    /// Decides about what guests send out, as far as a firewall can't.
    pub registry: Arc<dyn GuestRegistry>,
}

impl fmt::Debug for GvisorConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            runsc, builds_dir, runtime_dir, scratch_dir, tag, keeper_command, shells, ..
        } = self;
        f.debug_struct("GvisorConfig")
            .field("runsc", runsc)
            .field("builds_dir", builds_dir)
            .field("runtime_dir", runtime_dir)
            .field("scratch_dir", scratch_dir)
            .field("tag", tag)
            .field("keeper_command", keeper_command)
            .field("shells", shells)
            .finish_non_exhaustive()
    }
}

impl GvisorConfig {
    fn layout(&self) -> Layout {
        let runtime_dir = self.runtime_dir.join(&self.tag);
        Layout { runtime_dir, scratch_dir: self.scratch_dir.clone() }
    }

    fn keeper(&self) -> Keeper {
        let socket = self.layout().keeper_socket();
        let mut command = self.keeper_command.clone();
        command.push(socket.clone().into());
        Keeper::at(command, &socket)
    }
}

/// The engine of one installation on this host.
pub struct Gvisor {
    host: Arc<Host>,
    about: About,
    /// `None` once it is closed.
    tending: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Gvisor {
    fn drop(&mut self) {
        if let Some(tending) = self.tending.lock().take() {
            tending.abort();
        }
    }
}

/// What all machines of the engine share.
struct Host {
    builds: Builds,
    enter_command: Vec<OsString>,
    users: Users,
    memory_mib: u64,
    network: Network,
    remains: Arc<Remains<Layout>>,
    /// Starts under way. They are bound by the processor: more at once makes each slower and all
    /// later.
    starts: Semaphore,
    /// The same for saves.
    saves: Arc<Semaphore>,
    turns: Turns,
    roll: Roll,
    shelf: Shelf,
}

impl Gvisor {
    /// Checks that runsc will do, makes the directories and finds or starts the keeper.
    pub async fn open(config: GvisorConfig) -> Result<Self, EngineError> {
        check_paths(&config)?;
        let (layout, keeper) = (config.layout(), config.keeper());
        let builds = Builds::open(&config.runsc, config.builds_dir).await;
        let builds = builds.map_err(EngineError::failed("use runsc"))?;
        let hierarchy = limits::complete()?;
        make_dirs(&layout).map_err(EngineError::failed("make the engine's directories"))?;
        // What earlier versions left there is out of reach for the users of machines.
        build::unmount_state(&layout.runsc_root());
        keeper.ensure().await.map_err(EngineError::failed("start the keeper"))?;
        let (roll, left) = Roll::read(&layout.machines());
        let network = Network::open(&config.tag, &left, config.registry).await;
        let network = network.map_err(EngineError::failed("open the network"))?;
        let about = About {
            kind: "gvisor",
            version: builds.current().to_string(),
            nameserver: Some(network.nameserver().to_string()),
            egress_proxy: Some(network.egress_proxy()),
            abilities: Abilities {
                memory_snapshots: true,
                live_snapshots: true,
                warm_standby: true,
                saved_files: true,
                rests: false,
            },
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let host = Host {
            builds,
            enter_command: config.enter_command,
            users: config.users,
            memory_mib: host_memory_mib(),
            network,
            roll,
            remains: Arc::new(Remains { layout, tag: config.tag, hierarchy, keeper }),
            starts: Semaphore::new(cores + 1),
            saves: Arc::new(Semaphore::new(cores + 1)),
            turns: Turns::default(),
            shelf: Shelf::new(config.shells),
        };
        let host = Arc::new(host);
        let tending = Mutex::new(Some(tokio::spawn(host.clone().tend_shelf())));
        Ok(Self { host, about, tending })
    }
}

impl Gvisor {
    async fn start(
        &self,
        plan: BootPlan,
        build: Arc<Build>,
        origin: Origin,
    ) -> Result<Box<dyn Machine>, EngineError> {
        self.host.check(&plan)?;
        let (answer, started) = oneshot::channel();
        tokio::spawn(self.host.clone().start(plan, build, origin, answer));
        let started = started.await.map_err(EngineError::failed("start the machine"))??;
        Ok(Box::new(started.claim()))
    }
}

impl Gvisor {
    /// Why nothing of this version can be revived, and what to do.
    fn no_build(&self, version: &str) -> String {
        let here = self.host.builds.current();
        format!(
            "it was saved by runsc {version}, of which no copy is here; this host has {here}: start \
             the daemon once with that runsc (engine.runsc_path), which keeps a copy, or go on with \
             its files alone (torpor engine migrate)"
        )
    }
}

/// Whether machines of this engine are on this host, alive or not.
pub fn has_machines(runtime_dir: &Path, tag: &str) -> bool {
    !ids_in(&runtime_dir.join(tag).join(MACHINES_DIR)).is_empty()
}

/// Kills and removes everything of this installation on this host, without a daemon.
pub async fn purge(config: &GvisorConfig) -> Result<usize, EngineError> {
    let hierarchy =
        Hierarchy::discover().map_err(EngineError::failed("find the host's cgroups"))?;
    let (layout, keeper) = (config.layout(), config.keeper());
    let remains = Arc::new(Remains { layout, tag: config.tag.clone(), hierarchy, keeper });
    let ids = remains.ids().await;
    let count = ids.len();
    remains.clear_all(ids).await?;
    remove_traces(&config.tag).await.map_err(EngineError::failed("remove the network"))?;
    remains.clear_shared().await.map_err(EngineError::failed("remove the engine's traces"))?;
    Ok(count)
}

#[async_trait]
impl Engine for Gvisor {
    fn about(&self) -> &About {
        &self.about
    }

    async fn boot(&self, plan: BootPlan) -> Result<Box<dyn Machine>, EngineError> {
        self.start(plan, self.host.builds.current().clone(), Origin::Image).await
    }

    async fn revive(
        &self,
        plan: BootPlan,
        saved: &Path,
        version: &str,
    ) -> Result<Box<dyn Machine>, EngineError> {
        let build = self.host.builds.find(version);
        let build =
            build.ok_or_else(|| EngineError::failed("revive the guest")(self.no_build(version)))?;
        self.start(plan, build, Origin::Save(saved.to_owned())).await
    }

    fn can_revive(&self, version: &str) -> Result<String, String> {
        let build = self.host.builds.find(version);
        build.map(|build| build.to_string()).ok_or_else(|| self.no_build(version))
    }

    fn builds(&self) -> Vec<EngineBuild> {
        let records = self.host.remains.records();
        let build = |version: String| EngineBuild {
            machines: records.iter().filter(|record| record.build == version).count(),
            version,
        };
        self.host.builds.names().into_iter().map(build).collect()
    }

    fn retain_builds(&self, needed: &HashSet<String>) {
        let records = self.host.remains.records();
        let runs = |name: &str| records.iter().any(|record| record.build == name);
        self.host.builds.retain(|name| needed.contains(name) || runs(name));
    }

    fn changes(&self, saved: &Path) -> Result<Box<dyn Changes>, EngineError> {
        Ok(Box::new(saved::read(saved)?))
    }

    fn expect(&self, plan: &BootPlan) {
        if self.host.check(plan).is_ok() {
            self.host.shelf.expect(&Make::of(plan, self.host.builds.current()));
        }
    }

    async fn adopt(&self, id: &SandboxId) -> Result<Option<Box<dyn Machine>>, EngineError> {
        Ok(self.host.adopt(id).await?.map(|machine| Box::new(machine) as Box<dyn Machine>))
    }

    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<usize, EngineError> {
        let Host { remains, roll, shelf, network, .. } = &*self.host;
        roll.retain(keep);
        let mut stay: HashSet<MachineId> = shelf.ids().into_iter().collect();
        stay.extend(keep.iter().filter_map(|sandbox| roll.machine_of(sandbox)));
        let mut ids = remains.ids().await;
        ids.retain(|id| !stay.contains(id));
        let count = ids.iter().filter(|id| !remains.is_shell(id)).count();
        remains.clear_all(ids).await?;
        network.swept();
        Ok(count)
    }

    async fn close(&self) {
        let tending = self.tending.lock().take();
        if let Some(tending) = tending {
            self.host.close_shelf(tending).await;
        }
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
        self.check_memory(&plan.spec.resources)?;
        check_root(&plan.root)
    }

    fn check_memory(&self, resources: &Resources) -> Result<(), EngineError> {
        let wanted = resources.memory_mib;
        if wanted > self.memory_mib {
            let detail = format!("{wanted} MiB wanted, {} MiB here", self.memory_mib);
            return Err(EngineError::Capacity { what: "memory", detail });
        }
        Ok(())
    }

    async fn start(
        self: Arc<Self>,
        plan: BootPlan,
        build: Arc<Build>,
        origin: Origin,
        answer: oneshot::Sender<Result<Unclaimed<GvisorMachine>, EngineError>>,
    ) {
        let turn = self.turns.take(&plan.id).await;
        let _hold_off = self.shelf.hold_off();
        let permit = self.starts.acquire().await.expect("it is never closed");
        if answer.is_closed() {
            return;
        }
        if let Some(former) = self.roll.machine_of(&plan.id) {
            // One that died, or whose removal failed.
            self.clear_up(&former).await;
        }
        let start = Start { host: &self, plan: &plan, build: &build, origin: &origin };
        let started = start.run(|| !answer.is_closed()).await;
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
    ) -> Result<Option<GvisorMachine>, EngineError> {
        let _turn = self.turns.take(sandbox).await;
        let Some(id) = self.roll.machine_of(sandbox) else { return Ok(None) };
        let channel = self.remains.keeper.channel(id.as_str()).await;
        let channel = channel.map_err(EngineError::failed("get the machine's channel"))?;
        let dir = self.remains.layout.machine(&id);
        let (record, mark) = (Record::read(&dir.record), MarkFile::open(&dir.mark));
        let pidfd = record.as_ref().and_then(|record| record.process.open());
        // A start that was cut off, or dead, or without the only way to talk to it: not there.
        let (Some(record), Some(mark), Some(pidfd), Some(channel)) = (record, mark, pidfd, channel)
        else {
            self.remains.clear(&id).await?;
            self.roll.forget(sandbox, &id);
            return Ok(None);
        };
        let slot = self.network.adopt(record.slot, sandbox, &record.network).await;
        let slot = slot.map_err(EngineError::failed("take over the machine's network"))?;
        let group = self.remains.group(&id);
        let generation = Generation::of_name(&record.build);
        let halt = generation.unwrap_or(self.builds.current().generation).halt();
        let mut control = Control::new(&dir, record.process.pid, group.clone(), halt, mark);
        if let Err(error) = control.take_over().await {
            tracing::warn!(%sandbox, %error, "a machine that can't be controlled is given up");
            self.remains.clear(&id).await?;
            self.roll.forget(sandbox, &id);
            return Ok(None);
        }
        let parts = Parts { record, slot, group, channel, pidfd, control };
        GvisorMachine::new(self.clone(), parts)
            .map(Some)
            .map_err(EngineError::failed("watch the machine"))
    }

    fn create_command(&self, dir: &MachineDir, id: &MachineId, build: &Build) -> Vec<String> {
        let path = |path: &Path| path.to_string_lossy().into_owned();
        let mut command = vec![
            path(&build.program),
            format!("--root={}", path(&self.remains.layout.runsc_root())),
            "--platform=systrap".into(),
            "--network=sandbox".into(),
            format!("--panic-log={}", path(&dir.panic_log)),
        ];
        command.extend(build.generation.create_flags(&dir.disk));
        command.extend([
            "create".into(),
            format!("--bundle={}", path(&dir.dir)),
            format!("--pid-file={}", path(&dir.pid)),
            id.to_string(),
        ]);
        command
    }
}

fn check_paths(config: &GvisorConfig) -> Result<(), EngineError> {
    let bad = |why: &str| Err(EngineError::failed("use the engine's settings")(why));
    let runtime_dir = config.layout().runtime_dir;
    if !runtime_dir.is_absolute() || runtime_dir.as_os_str().len() > RUNTIME_DIR_MAX {
        return bad("runtime_dir must be an absolute path of at most 55 bytes");
    }
    if !config.scratch_dir.is_absolute() {
        return bad("scratch_dir must be an absolute path");
    }
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    if config.tag.len() != 8 || !config.tag.bytes().all(plain) {
        return bad("tag must consist of eight lowercase letters and digits");
    }
    Ok(())
}

fn make_dirs(layout: &Layout) -> std::io::Result<()> {
    directory::guarded(layout.runtime_dir.parent().unwrap_or(&layout.runtime_dir))?;
    directory::private(&layout.runtime_dir)?;
    layout
        .own_dirs()
        .iter()
        .chain([&layout.scratch_dir])
        .try_for_each(|dir| directory::private(dir))
}

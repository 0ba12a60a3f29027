//! What all sandboxes of a host share, and how a machine is started from it.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::AsyncReadExt;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use torpor_protocol::guest::{Identity, ProcessSpec, Reply, Request};
use torpor_protocol::snapshot::SavedProcess;
use torpor_protocol::status::Step;
use torpor_protocol::{SandboxId, SandboxSpec, SnapshotKind};

use crate::clock::Clock;
use crate::engine::{Abilities, BootPlan, Channel, Engine, EngineError, Machine};
use crate::engines::Engines;
use crate::guest::{Guest, GuestError, Item};
use crate::guest_defaults::GuestDefaults;
use crate::ledger::{FleetLedger, Owner};
use crate::mounts::Mounted;
use crate::steps::Steps;
use crate::store::{
    Images, Journal, LocalSave, Record, RootImage, Saves, StoreError, Vault, Volumes,
};
use crate::{Error, Refusal, fault};

/// How long a machine may take to start before it counts as failed; starts queue for processors.
const START_DEADLINE: Duration = Duration::from_secs(120);
/// How long the agent of a machine that just started may take to say hello.
pub(crate) const HELLO_DEADLINE: Duration = Duration::from_secs(30);
/// How long a wake from memory may keep others waiting. An agent answers within some 20 ms; whoever
/// takes longer is stuck, or wants to be.
const TURN_MAX: Duration = Duration::from_millis(250);
/// Bytes of a layer that are read at once.
const LAYER_CHUNK: usize = 256 * 1024;

/// How many sandboxes this host has room for, and when sleeping ones leave memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// A sandbox that fell asleep is on disk after so long.
    pub persist_after: Duration,
    /// A sandbox that nobody wakes for so long leaves memory.
    pub warm_for: Duration,
    /// How many may be awake without being used; above it, those unused longest fall asleep before
    /// their time.
    pub idle_awake_max: usize,
    /// How many wake from memory at the same time, first come, first served.
    pub wakes_at_once: usize,
    /// How many may run or sleep in memory.
    pub sandboxes_max: usize,
    /// Below so much free memory, sleeping sandboxes leave it.
    pub memory_floor_mib: u64,
    /// The same when processes wait for memory for more than this part of the time; none: they may.
    pub stalled_percent_max: Option<u32>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            persist_after: Duration::from_secs(30),
            warm_for: Duration::from_secs(3600),
            idle_awake_max: 16,
            wakes_at_once: 4,
            sandboxes_max: usize::MAX,
            memory_floor_mib: 0,
            stalled_percent_max: None,
        }
    }
}

/// What becomes of sandboxes when the daemon stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShutdownMode {
    /// Everything is saved and no machine is left; the next daemon wakes what did not sleep.
    Durable,
    /// Machines go on without the daemon; the next one takes them over.
    Running,
}

pub(crate) struct World {
    pub(crate) engines: Engines,
    pub(crate) ledger: Arc<dyn FleetLedger>,
    /// Who writes: this daemon, until another one takes over.
    pub(crate) owner: Owner,
    pub(crate) images: Arc<dyn Images>,
    pub(crate) saves: Arc<dyn Saves>,
    pub(crate) journal: Arc<dyn Journal>,
    pub(crate) vault: Arc<dyn Vault>,
    pub(crate) volumes: Arc<dyn Volumes>,
    /// The interception CA (PEM), for those whose policy says so.
    pub(crate) ca: Option<String>,
    pub(crate) guest: GuestDefaults,
    pub(crate) policy: Policy,
    pub(crate) clock: Clock,
    /// The daemon stops: drivers let go of their machines and end.
    pub(crate) stopping: CancellationToken,
    pub(crate) shutdown_mode: Mutex<ShutdownMode>,
    /// Turns of those who wake from memory.
    pub(crate) wakes: Semaphore,
}

/// A machine whose agent answered and knows who it is.
pub(crate) struct Started {
    pub(crate) machine: Box<dyn Machine>,
    pub(crate) guest: Guest,
    /// The file of the image that it was booted from.
    pub(crate) root: String,
    pub(crate) mounts: Vec<Mounted>,
    pub(crate) steps: Vec<Step>,
    /// It booted, as opposed to being revived: nothing runs in it yet.
    pub(crate) booted: bool,
}

impl World {
    /// Writes a sandbox as its owner.
    pub(crate) async fn record(&self, record: &Record) -> Result<(), StoreError> {
        self.ledger.update_sandbox(&self.owner, record).await
    }

    /// Starts a machine for `id` from `save`, or from its image. `afresh`: nobody has been it before,
    /// so it gets an identity of its own. On `Err` nothing is left.
    pub(crate) async fn start(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
        save: Option<&LocalSave>,
        afresh: bool,
    ) -> Result<Started, Error> {
        fault::point("start.begun");
        let mut steps = Steps::start();
        let memory = save.filter(|save| save.manifest.about.kind == SnapshotKind::Memory);
        let image = self.root(spec, memory).await?;
        steps.end("image");
        let mut mounts = self.open_volumes(spec).await?;
        if let Some(save) = memory {
            self.put_back_held(id, &mounts, save).await?;
        }
        let hosts = mounts.iter().map(|mounted| mounted.host.clone());
        let bound = hosts.filter(|_| self.abilities(spec).binds).collect();
        let (id_of, root) = (id.clone(), image.path.clone());
        let plan = BootPlan { id: id_of, spec: spec.clone(), root, mounts: bound };
        let mut machine = self.machine(plan, memory).await?;
        steps.extend("engine", machine.start_steps());
        fault::point("start.machine");
        let files = save.filter(|save| save.manifest.about.kind == SnapshotKind::Filesystem);
        let channel = machine.channel();
        let greeted = async {
            let identity = self.identity(id, spec, &image, afresh || memory.is_none()).await?;
            let guest = self.greet(channel, identity, files).await?;
            self.bring_mounts(spec, &mut machine, &guest, &mut mounts).await?;
            self.unquiesce(spec, &guest).await?;
            Ok(guest)
        };
        match greeted.await {
            Ok(guest) => {
                steps.end("hello");
                fault::point("start.greeted");
                let booted = memory.is_none();
                let (root, steps) = (image.file, steps.done);
                Ok(Started { machine, guest, root, mounts, steps, booted })
            }
            Err(error) => {
                discard(id, machine).await;
                Err(error)
            }
        }
    }

    /// The root of a machine: the present one of its image, or the one it was saved with.
    pub(crate) async fn root(
        &self,
        spec: &SandboxSpec,
        memory: Option<&LocalSave>,
    ) -> Result<RootImage, StoreError> {
        match memory.and_then(|save| save.manifest.about.root.as_deref()) {
            Some(file) => self.images.root_file(&spec.image_id, file).await,
            None => self.images.root(&spec.image_id).await,
        }
    }

    async fn machine(
        &self,
        plan: BootPlan,
        memory: Option<&LocalSave>,
    ) -> Result<Box<dyn Machine>, Error> {
        let engine = match memory {
            Some(save) => self.can_revive(save)?,
            None => self.engines.of(&plan.spec)?,
        };
        let start = async {
            match memory {
                Some(save) => {
                    let version = &save.manifest.about.engine_version;
                    engine.revive(plan, &save.dir, version).await
                }
                None => engine.boot(plan).await,
            }
        };
        let machine = tokio::time::timeout(START_DEADLINE, start).await;
        let machine = machine.map_err(|_| EngineError::Failed {
            action: "start the machine".to_owned(),
            source: format!("it took more than {START_DEADLINE:?}").into(),
        })?;
        Ok(machine?)
    }

    /// The engine that revives a save, unless no build of it here can.
    pub(crate) fn can_revive(&self, save: &LocalSave) -> Result<&Arc<dyn Engine>, Refusal> {
        let engine = self.saved_by(save)?;
        let can = engine.can_revive(&save.manifest.about.engine_version);
        can.map(|_| engine).map_err(|reason| incompatible(save, reason))
    }

    /// The engine of a save, if it is here.
    pub(crate) fn saved_by(&self, save: &LocalSave) -> Result<&Arc<dyn Engine>, Refusal> {
        let kind = &save.manifest.about.engine;
        let found = self.engines.find(kind);
        found.map_err(|missing| incompatible(save, format!("{kind} saved it, and {missing}")))
    }

    /// Says hello, brings the files along and tells the machine who it is.
    async fn greet(
        &self,
        channel: Arc<dyn Channel>,
        identity: Identity,
        files: Option<&LocalSave>,
    ) -> Result<Guest, Error> {
        let guest = Guest::connect(channel, HELLO_DEADLINE).await?;
        if let Some(save) = files {
            self.unpack(&guest, save).await?;
        }
        guest.identify(identity).await?;
        Ok(guest)
    }

    /// What the engine of a sandbox can do; nothing if it is not here.
    pub(crate) fn abilities(&self, spec: &SandboxSpec) -> Abilities {
        self.engines.of(spec).map(|engine| engine.about().abilities).unwrap_or_default()
    }

    /// Before a machine is paused or saved: stops what runs inside, where its kernel would not notice.
    pub(crate) async fn quiesce(
        &self,
        spec: &SandboxSpec,
        guest: &Guest,
    ) -> Result<Vec<SavedProcess>, GuestError> {
        if self.abilities(spec).quiesces { guest.quiesce().await } else { Ok(Vec::new()) }
    }

    /// The same afterwards, when the machine knows who it is.
    pub(crate) async fn unquiesce(
        &self,
        spec: &SandboxSpec,
        guest: &Guest,
    ) -> Result<(), GuestError> {
        if self.abilities(spec).quiesces { guest.unquiesce().await } else { Ok(()) }
    }

    /// Takes over the machine of a sandbox, if its engine has one.
    pub(crate) async fn adopt(
        &self,
        record: &Record,
    ) -> Result<Option<Box<dyn Machine>>, EngineError> {
        match self.engines.of(&record.spec) {
            Ok(engine) => engine.adopt(&record.id).await,
            // An engine that is not here has no machines.
            Err(_) => Ok(None),
        }
    }

    /// Does what lets a machine go on when it is its turn: many at once would only take processors from
    /// each other, and the last one would wait for all. Whoever takes too long goes on without a turn.
    pub(crate) async fn in_turn<T>(&self, wake: impl Future<Output = T>) -> T {
        let turn = self.wakes.acquire().await;
        let mut wake = pin!(wake);
        let done = tokio::time::timeout(TURN_MAX, &mut wake).await;
        drop(turn);
        match done {
            Ok(done) => done,
            Err(_) => wake.await,
        }
    }

    /// Puts the files of a filesystem save on top of the image.
    async fn unpack(&self, guest: &Guest, save: &LocalSave) -> Result<(), Error> {
        let request = Request::Unpack { path: "/".to_owned(), owner: None, layer: true };
        let mut layer = self.saves.layer(save).await?;
        let mut stream = guest.open(&request).await?;
        let sender = stream.sender();
        let mut chunk = vec![0; LAYER_CHUNK];
        loop {
            let read = layer.read(&mut chunk).await;
            let count = read.map_err(StoreError::failed("read the files of a snapshot"))?;
            if count == 0 {
                break;
            }
            sender.send(&chunk[..count]).await?;
        }
        sender.finish().await?;
        let Reply::Done = stream.reply().await? else {
            return Err(crate::guest::unexpected(&request).into());
        };
        Ok(())
    }

    pub(crate) async fn identity(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
        image: &RootImage,
        afresh: bool,
    ) -> Result<Identity, Error> {
        let mut env = self.guest.env(&spec.image);
        env.extend(image.env.iter().cloned());
        env.extend(spec.env.clone());
        env.extend(self.secrets(id, spec, afresh).await?);
        let extra_ca = self.guest.extra_ca(&spec.image);
        let hostname = spec.name.as_ref().map_or(id.as_str(), |name| name.as_str());
        Ok(Identity {
            hostname: hostname.to_owned(),
            nameservers: self.engines.default_engine().about().nameserver.iter().cloned().collect(),
            env,
            user: image.user.clone(),
            workdir: image.workdir.clone(),
            entropy: hex::encode(random::<32>()),
            boot_id: afresh.then(boot_id),
            ca: self.trusted_ca(spec).or(extra_ca.first()).cloned(),
            extra_ca,
        })
    }

    /// The CA that everybody inside is to trust, if some of their requests are intercepted.
    pub(crate) fn trusted_ca(&self, spec: &SandboxSpec) -> Option<&String> {
        self.ca.as_ref().filter(|_| spec.network.is_intercepted())
    }

    /// The values of its secrets. A sandbox that wakes does so also when one was removed meanwhile.
    async fn secrets(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
        afresh: bool,
    ) -> Result<BTreeMap<String, String>, Error> {
        if spec.secrets.is_empty() {
            return Ok(BTreeMap::new());
        }
        if afresh {
            return Ok(self.vault.reveal(&spec.secrets).await?);
        }
        let mut env = BTreeMap::new();
        for name in &spec.secrets {
            match self.vault.reveal(std::slice::from_ref(name)).await {
                Ok(value) => env.extend(value),
                Err(error) => {
                    tracing::warn!(sandbox = %id, error = crate::chain(&error), "secret unavailable, waking without it");
                }
            }
        }
        Ok(env)
    }
}

fn incompatible(save: &LocalSave, reason: String) -> Refusal {
    Refusal::Incompatible { snapshot: save.id.to_string(), reason }
}

/// Lets a paused machine go on and speaks with its agent, which finds the hello waiting: the road
/// holds it until the machine runs.
pub(crate) async fn resume(machine: &mut Box<dyn Machine>) -> Result<Guest, Error> {
    let channel = machine.channel();
    let resumed = async { Ok::<_, Error>(machine.resume().await?) };
    let greeted = async { Ok(Guest::connect(channel, HELLO_DEADLINE).await?) };
    let ((), guest) = tokio::try_join!(resumed, greeted)?;
    Ok(guest)
}

/// Kills a machine; what can't be removed is left to the next sweep.
pub(crate) async fn discard(id: &SandboxId, machine: Box<dyn Machine>) {
    if let Err(error) = machine.kill().await {
        tracing::error!(sandbox = %id, error = crate::chain(&error), "kill left traces");
    }
}

/// Runs a hook to its end, or to the end of its grace. What it does is its own business.
pub(crate) async fn run_hook(
    id: &SandboxId,
    guest: &Guest,
    hook: &str,
    command: &[String],
    grace_ms: u64,
) {
    if command.is_empty() {
        return;
    }
    let spec = ProcessSpec {
        command: command.to_vec(),
        timeout_ms: Some(grace_ms),
        ..ProcessSpec::default()
    };
    let run = async {
        let mut stream = guest.open(&Request::Run(spec)).await?;
        let mut exit = None;
        while let Some(item) = stream.next().await? {
            if let Item::Reply(Reply::Exited(status)) = item {
                exit = status.exit;
            }
        }
        Ok::<_, GuestError>(exit)
    };
    match tokio::time::timeout(Duration::from_millis(grace_ms.saturating_add(1000)), run).await {
        Ok(Ok(exit)) => tracing::info!(sandbox = %id, hook, ?exit, "hook ran"),
        Ok(Err(error)) => tracing::warn!(sandbox = %id, hook, %error, "hook failed"),
        Err(_) => tracing::warn!(sandbox = %id, hook, "hook did not end within its grace"),
    }
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0u8; N];
    getrandom::fill(&mut bytes).expect("the system has entropy");
    bytes
}

/// Text that nobody guesses, of 128 bits.
pub(crate) fn token() -> String {
    hex::encode(random::<16>())
}

/// A random UUID, as the kernel has one for each boot.
fn boot_id() -> String {
    let mut bytes = random::<16>();
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    let hex = hex::encode(bytes);
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

//! A fresh installation of an engine, and the verbs of the tests.
//!
//! Which engine it is the test target says: `crate::Installed`.

mod guests;
mod image;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;
use torpor_engines::limits::{Group, Hierarchy};
use torpor_engines::{EngineConfig, HostConfig, Users, keeper};
use torpor_lifecycle::engine::{
    BootPlan, Engine, EngineError, GuestRegistry, Machine, NoGuestRegistry,
};
use torpor_lifecycle::guest::Guest;
use torpor_protocol::{Network, Resources, SandboxId, SandboxSpec};

use crate::Installed;
pub(crate) use guests::{
    boot, chain, eventually, greet, quiesce, revive, say, shell, stage, unquiesce,
};
pub(crate) use image::{make_image, plant, root};

/// Long enough for the busiest host; tests wait for values, so they end early.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What every engine of this host is told about an installation.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) runtime_dir: PathBuf,
    pub(crate) scratch_dir: PathBuf,
    pub(crate) tag: String,
    /// How many containers gVisor prepares ahead.
    pub(crate) prepared: usize,
    pub(crate) registry: Arc<dyn GuestRegistry>,
}

impl Settings {
    /// What all engines of this host are told.
    pub(crate) fn host(&self) -> HostConfig {
        let Self { runtime_dir, scratch_dir, tag, prepared: _, registry } = self.clone();
        let (keeper_command, users) = (keeper_command(), Users::default());
        HostConfig { runtime_dir, scratch_dir, tag, keeper_command, users, registry }
    }

    /// The only engine of an installation.
    pub(crate) async fn open(&self, engine: EngineConfig) -> Result<Arc<dyn Engine>, EngineError> {
        let engines = torpor_engines::open(self.host(), engine, Vec::new()).await?;
        Ok(engines.default_engine().clone())
    }
}

/// What the suite must know of an engine beyond what the engine says itself.
#[async_trait]
pub(crate) trait Installation: Send + Sync + 'static {
    /// Why this host can't run its machines.
    async fn unfit(&self) -> Option<String>;

    /// The engine as a daemon has it that was started anew.
    async fn open(&self, settings: &Settings) -> Result<Arc<dyn Engine>, EngineError>;

    /// Removes everything, without a daemon.
    async fn purge(&self, settings: &Settings) -> Result<(), EngineError> {
        torpor_engines::purge(&settings.host()).await.map(drop)
    }

    /// An image that its machines can begin with; `dir` goes away with the test.
    fn root(&self, dir: &Path) -> PathBuf {
        let _ = dir;
        root()
    }

    /// The directory of one installation on this host.
    fn home(&self, settings: &Settings) -> PathBuf {
        settings.runtime_dir.join(&settings.tag)
    }

    /// How often a test does what takes long: fewer times where every instruction is emulated.
    fn rounds(&self, many: usize) -> usize {
        many
    }

    /// How far the clock of a guest may be from the host's.
    fn clock_slack(&self) -> Duration {
        Duration::from_millis(10)
    }

    /// Kills the machine as someone on the host might.
    fn kill(&self, world: &World, id: &SandboxId) {
        let machine = world.machine_of(id).expect("it has a machine");
        let pid = world.records()[&machine]["process"]["pid"].as_i64().expect("a number");
        kill(i32::try_from(pid).expect("a process"));
    }

    /// Everything on the host of which machines are made, but what other sandboxes have.
    fn traces(&self, world: &World, id: &SandboxId) -> Vec<String> {
        world.host_traces(id)
    }

    /// Whether nothing at all is left on the host.
    fn gone(&self, world: &World) -> bool {
        !world.config.runtime_dir.exists() && world.keepers() == 0
    }

    /// Gives the guest something to remember, in its files and in its memory.
    async fn note(&self, _: &SandboxId, guest: &Guest, text: &str) {
        say(guest, &format!("echo {text} > /root/note; echo {text} > /dev/shm/note")).await;
    }

    /// What it remembers; nothing: an empty text.
    async fn noted(&self, _: &SandboxId, guest: &Guest) -> String {
        let script = "for f in /root/note /dev/shm/note; do [ ! -e $f ] || cat $f; done";
        let noted = say(guest, script).await;
        let Some((file, memory)) = noted.split_once('\n') else { return noted };
        assert_eq!(file, memory, "files and memory are of one moment");
        file.to_owned()
    }

    /// Where the note is among the files of a saved machine.
    fn note_file(&self) -> &'static str {
        "root/note"
    }
}

/// An installation. Dropping it kills and removes everything it has on the host.
pub(crate) struct World {
    pub(crate) config: Settings,
    pub(crate) installed: Arc<Installed>,
    /// `None` only while it is replaced or removed.
    engine: Option<Arc<dyn Engine>>,
    pub(crate) root: PathBuf,
    _dir: tempfile::TempDir,
}

/// `None` after a word to the reader where this host can't run machines.
pub(crate) async fn world() -> Option<World> {
    let installed = Installed::new();
    if let Some(why) = installed.unfit().await {
        torpor_testkit::missing(why);
        return None;
    }
    let dir = tempfile::Builder::new().prefix("tpt").tempdir().expect("a directory");
    let tag = format!("t{:07x}", u64::from_ne_bytes(random()) & 0xfff_ffff);
    let config = Settings {
        runtime_dir: dir.path().join("run"),
        scratch_dir: dir.path().join("scratch"),
        tag,
        prepared: 0,
        registry: Arc::new(NoGuestRegistry),
    };
    let root = installed.root(dir.path());
    let installed = Arc::new(installed);
    let mut world = World { config, installed, engine: None, root, _dir: dir };
    world.reopen().await;
    Some(world)
}

/// Why this host can't run machines of any engine that isolates, or not with these programs.
pub(crate) fn unfit(programs: &[&str]) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("machines need root".into());
    }
    let mut missing = programs.iter().filter(|program| !Path::new(program).exists());
    missing.next().map(|program| format!("{program} is not installed"))
}

fn random() -> [u8; 8] {
    let mut bytes = [0; 8];
    let text = SandboxId::random();
    bytes.copy_from_slice(&blake3::hash(text.as_str().as_bytes()).as_bytes()[..8]);
    bytes
}

/// This test binary, told to be another program: a path follows.
pub(crate) fn be(what: &str) -> Vec<OsString> {
    let me = std::env::current_exe().expect("the test binary has a path");
    let mut command: Vec<OsString> = vec![me.into()];
    command.extend(["--exact", "--test-threads=1", what].map(OsString::from));
    command
}

/// The path that this test binary was told to be another program with.
pub(crate) fn told() -> Option<PathBuf> {
    let last = PathBuf::from(std::env::args_os().next_back().expect("a program has a name"));
    (last.is_absolute() && std::env::args_os().count() > 1).then_some(last)
}

pub(crate) fn keeper_command() -> Vec<OsString> {
    be("world::keeper_process")
}

/// No test, but the keeper of the tests: see [`keeper_command`].
#[test]
fn keeper_process() {
    if let Some(socket) = told() {
        keeper::run(keeper::listen(&socket).unwrap()).unwrap();
    }
}

impl World {
    pub(crate) fn engine(&self) -> &Arc<dyn Engine> {
        self.engine.as_ref().expect("it is open")
    }

    pub(crate) fn runtime_dir(&self) -> PathBuf {
        self.installed.home(&self.config)
    }

    pub(crate) fn plan(&self) -> BootPlan {
        let resources = Resources { memory_mib: 256, disk_mib: 64, ..Resources::default() };
        plan(&self.root, resources)
    }

    /// Whether the machine's group is frozen.
    pub(crate) fn frozen(&self, machine: &str) -> bool {
        let hierarchy = Hierarchy::discover().expect("cgroups");
        let group = Group::open(&hierarchy, &self.config.tag, machine);
        group.frozen().unwrap_or(false)
    }

    /// Revives what this engine saved.
    pub(crate) async fn revive(
        &self,
        plan: &BootPlan,
        saved: &Path,
    ) -> Result<Box<dyn Machine>, EngineError> {
        let engine = self.engine();
        engine.revive(plan.clone(), saved, &engine.about().version).await
    }

    /// Opens the installation as a daemon does that was started anew.
    pub(crate) async fn reopen(&mut self) {
        self.engine = None;
        self.engine = Some(self.installed.open(&self.config).await.expect("the engine opens"));
    }

    /// Puts another engine before this one.
    pub(crate) fn replace(&mut self, with: impl FnOnce(Arc<dyn Engine>) -> Arc<dyn Engine>) {
        self.engine = self.engine.take().map(with);
    }

    /// See [`Installation::rounds`].
    pub(crate) fn rounds(&self, many: usize) -> usize {
        self.installed.rounds(many)
    }

    /// See [`Installation::note`].
    pub(crate) async fn note(&self, id: &SandboxId, guest: &Guest, text: &str) {
        self.installed.note(id, guest, text).await;
    }

    /// See [`Installation::noted`].
    pub(crate) async fn noted(&self, id: &SandboxId, guest: &Guest) -> String {
        self.installed.noted(id, guest).await
    }

    /// The command lines of the machine's processes.
    pub(crate) fn processes(&self, id: &SandboxId) -> Vec<String> {
        self.process_dirs(id).into_iter().map(command_line).collect()
    }

    /// Where the host tells of the machine's processes.
    pub(crate) fn process_dirs(&self, id: &SandboxId) -> Vec<PathBuf> {
        let hierarchy = Hierarchy::discover().expect("cgroups");
        let machine = self.machine_of(id).expect("it has a machine");
        let group = Group::open(&hierarchy, &self.config.tag, &machine);
        group.pids().iter().map(|pid| Path::new("/proc").join(pid.to_string())).collect()
    }

    /// Kills the sandbox as someone on the host might.
    pub(crate) fn kill_sandbox(&self, id: &SandboxId) {
        self.installed.kill(self, id);
    }

    fn keeper_pids(&self) -> Vec<i32> {
        let socket = self.runtime_dir().join("keeper.sock").display().to_string();
        let mine = |path: &PathBuf| command_line(path.clone()).ends_with(&socket);
        let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
        let pid = |path: PathBuf| path.file_name()?.to_str()?.parse().ok();
        processes.filter(mine).filter_map(pid).collect()
    }

    pub(crate) fn keepers(&self) -> usize {
        self.keeper_pids().len()
    }

    pub(crate) fn kill_keeper(&self) {
        self.keeper_pids().into_iter().for_each(kill);
        while self.keepers() > 0 {
            std::thread::yield_now();
        }
    }

    /// The records of all machines, by the machines' ids.
    pub(crate) fn records(&self) -> BTreeMap<String, Value> {
        let machines = std::fs::read_dir(self.runtime_dir().join("machines"));
        let read = |dir: PathBuf| {
            let record = std::fs::read(dir.join("machine.json")).ok()?;
            let id = dir.file_name()?.to_str()?.to_owned();
            Some((id, serde_json::from_slice(&record).expect("a record")))
        };
        machines.into_iter().flatten().flatten().filter_map(|entry| read(entry.path())).collect()
    }

    /// Who has a machine.
    pub(crate) fn sandboxes(&self) -> Vec<SandboxId> {
        let records = self.records().into_values();
        records.filter_map(|record| record["sandbox"].as_str()?.parse().ok()).collect()
    }

    /// The id of the sandbox's machine.
    pub(crate) fn machine_of(&self, sandbox: &SandboxId) -> Option<String> {
        let mut records = self.records().into_iter();
        records.find(|(_, record)| record["sandbox"] == sandbox.as_str()).map(|(id, _)| id)
    }

    pub(crate) fn machine_dir(&self, sandbox: &SandboxId) -> PathBuf {
        let machine = self.machine_of(sandbox).expect("it has a machine");
        self.runtime_dir().join("machines").join(machine)
    }

    /// Everything on the host of which machines are made, but what other sandboxes have.
    pub(crate) fn traces(&self, sandbox: &SandboxId) -> Vec<String> {
        self.installed.traces(self, sandbox)
    }

    /// Whether nothing at all is left on the host.
    pub(crate) fn gone(&self) -> bool {
        self.installed.gone(self)
    }

    fn host_traces(&self, sandbox: &SandboxId) -> Vec<String> {
        let mut traces = vec![];
        for entry in walk(&self.config.runtime_dir).chain(walk(&self.config.scratch_dir)) {
            traces.push(entry.display().to_string());
        }
        let mut find = Command::new("find");
        find.args(["/sys/fs/cgroup", "-type", "d", "-path"])
            .arg(format!("*/{}/*", self.config.tag));
        traces.extend(output(&mut find).lines().map(str::to_owned));
        traces.extend(
            std::fs::read_to_string("/proc/self/mountinfo").unwrap().lines().map(str::to_owned),
        );
        for process in std::fs::read_dir("/proc").unwrap().flatten() {
            traces.push(command_line(process.path()));
        }
        let mut others = self.records();
        others.retain(|_, record| record["sandbox"] != sandbox.as_str());
        let home = self.config.scratch_dir.parent().expect("a directory").display().to_string();
        traces.retain(|trace| {
            let mut words = trace.split(|c: char| !c.is_ascii_alphanumeric());
            (trace.contains(&self.config.tag) || trace.contains(&home))
                && words
                    .any(|word| word.len() == sandbox.as_str().len() && !others.contains_key(word))
        });
        traces
    }
}

pub(crate) fn command_line(process: PathBuf) -> String {
    let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).replace('\0', " ").trim().to_owned()
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it can be killed");
}

impl Drop for World {
    fn drop(&mut self) {
        let (engine, config) = (self.engine.take(), self.config.clone());
        let installed = Arc::clone(&self.installed);
        // A runtime of its own: the test's may be about to end with a panic.
        let purged = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                if let Some(engine) = engine {
                    engine.close().await;
                }
                // Without the engine's hold on the host's network, which would be in its way.
                installed.purge(&config).await
            })
        });
        let purged = purged.join().expect("purge does not panic");
        if !std::thread::panicking() {
            purged.expect("purge leaves nothing");
        }
    }
}

fn walk(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .flat_map(|entry| {
            let below: Vec<PathBuf> =
                if entry.path().is_dir() { walk(&entry.path()).collect() } else { vec![] };
            std::iter::once(entry.path()).chain(below)
        })
        .collect::<Vec<_>>()
        .into_iter()
}

fn output(command: &mut Command) -> String {
    let output = command.output().expect("the program runs");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A fresh sandbox of this image.
pub(crate) fn plan(root: &Path, resources: Resources) -> BootPlan {
    // An engine may keep what it made of an image: another image needs another name.
    let image = blake3::hash(&std::fs::read(root).expect("the image is there")).to_hex();
    let image_id = image.parse().expect("an image id");
    let spec = SandboxSpec {
        name: None,
        image: "test".into(),
        image_id,
        resources,
        env: Default::default(),
        labels: Default::default(),
        network: Network::default(),
        lifetime: Default::default(),
        standby: Default::default(),
        entrypoint: Vec::new(),
        secrets: Vec::new(),
        ports: None,
        engine: None,
        pool: None,
        mounts: Some(Vec::new()),
    };
    BootPlan { id: SandboxId::random(), spec, root: root.to_owned(), mounts: Vec::new() }
}

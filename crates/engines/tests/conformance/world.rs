//! A fresh installation of the gVisor engine, and the verbs of the tests.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;
use torpor_engines::gvisor::{Gvisor, GvisorConfig, purge};
use torpor_engines::limits::{Group, Hierarchy};
use torpor_engines::{AGENT, keeper};
use torpor_lifecycle::engine::{AGENT_PATH, BootPlan, Channel, Engine, Machine, NoGuard};
use torpor_lifecycle::guest::Guest;
use torpor_lifecycle::guest::Item;
use torpor_protocol::guest::{Exit, ProcessSpec, Reply, Request};
use torpor_protocol::{Network, Resources, SandboxId, SandboxSpec};

/// Long enough for the busiest host; tests wait for values, so they end early.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Programs of this host that the test root has.
const PROGRAMS: [&str; 21] = [
    "bash", "cat", "chmod", "dd", "df", "echo", "head", "ip", "kill", "ls", "mkdir", "nproc", "rm",
    "sh", "sleep", "stat", "sync", "tail", "touch", "true", "wc",
];

/// An installation. Dropping it kills and removes everything it has on the host.
pub(crate) struct World {
    pub(crate) config: GvisorConfig,
    /// `None` only while it is replaced or removed.
    engine: Option<Arc<Gvisor>>,
    pub(crate) root: PathBuf,
    _dir: tempfile::TempDir,
}

/// `None` after a word to the reader where this host can't run machines.
pub(crate) async fn world() -> Option<World> {
    if let Some(why) = unfit() {
        println!("skipped, because {why}");
        return None;
    }
    let dir = tempfile::Builder::new().prefix("tpt").tempdir().expect("a directory");
    let tag = format!("t{:07x}", u64::from_ne_bytes(random()) & 0xfff_ffff);
    let config = GvisorConfig {
        runsc: "/usr/bin/runsc".into(),
        runtime_dir: dir.path().join("run"),
        scratch_dir: dir.path().join("scratch"),
        tag,
        keeper_command: keeper_command(),
        shells: 0,
        guard: Arc::new(NoGuard),
    };
    let mut world = World { config, engine: None, root: root(), _dir: dir };
    world.reopen().await;
    Some(world)
}

fn unfit() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("machines need root".into());
    }
    let missing = ["/usr/bin/runsc", "/usr/bin/mkfs.erofs"].into_iter();
    let mut missing = missing.filter(|program| !Path::new(program).exists());
    missing.next().map(|program| format!("{program} is not installed"))
}

fn random() -> [u8; 8] {
    let mut bytes = [0; 8];
    let text = SandboxId::random();
    bytes.copy_from_slice(&blake3::hash(text.as_str().as_bytes()).as_bytes()[..8]);
    bytes
}

/// This test binary, told to be a keeper; its socket's path follows.
pub(crate) fn keeper_command() -> Vec<OsString> {
    let me = std::env::current_exe().expect("the test binary has a path");
    let mut command: Vec<OsString> = vec![me.into()];
    let flags = ["--exact", "--test-threads=1", "world::keeper_process"];
    command.extend(flags.map(OsString::from));
    command
}

/// No test, but the keeper of the tests: see [`keeper_command`].
#[test]
fn keeper_process() {
    let socket = std::env::args_os().next_back().expect("the socket's path is last");
    if Path::new(&socket).is_absolute() {
        keeper::run(keeper::listen(Path::new(&socket)).unwrap()).unwrap();
    }
}

impl World {
    pub(crate) fn engine(&self) -> &Arc<Gvisor> {
        self.engine.as_ref().expect("it is open")
    }

    pub(crate) fn runtime_dir(&self) -> PathBuf {
        self.config.runtime_dir.join(&self.config.tag)
    }

    pub(crate) fn plan(&self) -> BootPlan {
        let resources = Resources { memory_mib: 256, disk_mib: 64, ..Resources::default() };
        BootPlan { id: SandboxId::random(), spec: spec(resources), root: self.root.clone() }
    }

    /// Whether the machine's group is frozen.
    pub(crate) fn frozen(&self, machine: &str) -> bool {
        let hierarchy = Hierarchy::discover().expect("cgroups");
        let group = Group::open(&hierarchy, &self.config.tag, machine);
        group.frozen().unwrap_or(false)
    }

    /// Opens the installation as a daemon does that was started anew.
    pub(crate) async fn reopen(&mut self) {
        self.engine = None;
        let engine = Gvisor::open(self.config.clone()).await.expect("the engine opens");
        self.engine = Some(Arc::new(engine));
    }

    /// The command lines of the machine's processes.
    pub(crate) fn processes(&self, id: &SandboxId) -> Vec<String> {
        let hierarchy = Hierarchy::discover().expect("cgroups");
        let machine = self.machine_of(id).expect("it has a machine");
        let group = Group::open(&hierarchy, &self.config.tag, &machine);
        group
            .pids()
            .iter()
            .map(|pid| command_line(Path::new("/proc").join(pid.to_string())))
            .collect()
    }

    /// Kills the sandbox as someone on the host might.
    pub(crate) fn kill_sandbox(&self, id: &SandboxId) {
        let file = self.machine_dir(id).join("pid");
        kill(std::fs::read_to_string(file).expect("a pid file").trim().parse().expect("a number"));
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

fn command_line(process: PathBuf) -> String {
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
        // A runtime of its own: the test's may be about to end with a panic.
        let purged = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                if let Some(engine) = engine {
                    engine.close().await;
                }
                // Without the engine's hold on the host's network, which would be in its way.
                purge(&config).await
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

pub(crate) fn spec(resources: Resources) -> SandboxSpec {
    SandboxSpec {
        name: None,
        image: "test".into(),
        image_id: "0".repeat(64).parse().expect("an image id"),
        resources,
        env: Default::default(),
        labels: Default::default(),
        network: Network::default(),
        lifetime: Default::default(),
        standby: Default::default(),
        entrypoint: Vec::new(),
        secrets: Vec::new(),
        ports: None,
        pool: None,
    }
}

// === Verbs ===

/// An error with all its reasons.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    text
}

/// Waits until `holds`.
pub(crate) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not happen in time");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) async fn greet(channel: Arc<dyn Channel>) -> Guest {
    Guest::connect(channel, PATIENCE).await.expect("the agent says hello")
}

pub(crate) async fn boot(engine: &dyn Engine, plan: BootPlan) -> (Box<dyn Machine>, Guest) {
    let machine = engine.boot(plan).await.expect("the machine boots");
    let guest = greet(machine.channel()).await;
    (machine, guest)
}

/// Runs a shell command to its end; its output and how it ended.
pub(crate) async fn shell(guest: &Guest, script: &str) -> (String, Exit) {
    let command = ["/bin/bash", "-c", script].map(str::to_owned).to_vec();
    let spec = ProcessSpec { command, ..ProcessSpec::default() };
    let mut stream = guest.open(&Request::Run(spec)).await.expect("a stream");
    let mut text = Vec::new();
    loop {
        let next = tokio::time::timeout(PATIENCE, stream.next());
        match next.await.expect("in time").expect("the stream lives") {
            Some(Item::Data(bytes) | Item::DataErr(bytes)) => text.extend_from_slice(&bytes),
            Some(Item::Reply(Reply::Exited(status))) => {
                let exit = status.exit.expect("it ended");
                return (String::from_utf8_lossy(&text).trim().to_owned(), exit);
            }
            Some(_) => {}
            None => panic!("the stream ended before the process: {text:?}"),
        }
    }
}

/// The output of a shell command that must succeed.
pub(crate) async fn say(guest: &Guest, script: &str) -> String {
    let (text, exit) = shell(guest, script).await;
    assert_eq!(exit, Exit::Code { code: 0 }, "{script}: {text}");
    text
}

// === The root ===

/// A small root with the agent and a shell, made once per build of the agent.
pub(crate) fn root() -> PathBuf {
    let mut key = blake3::Hasher::new();
    key.update(AGENT).update(format!("{PROGRAMS:?}").as_bytes());
    let name = format!("conformance-{}.erofs", &key.finalize().to_hex()[..16]);
    let image = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if !image.exists() {
        // Several test processes may do it at once: each makes its own, the last one stays.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let (tree, fresh) = (dir.path().join("tree"), dir.path().join("fresh.erofs"));
        plant(&tree);
        let mut mkfs = Command::new("mkfs.erofs");
        mkfs.args(["-x-1", "-E", "noinline_data", "--quiet"]).arg(&fresh).arg(&tree);
        assert!(mkfs.status().expect("mkfs.erofs runs").success());
        std::fs::rename(fresh, &image).expect("the image is put in place");
    }
    image
}

pub(crate) fn plant(tree: &Path) {
    for dir in ["proc", "sys", "dev", "tmp", "etc", "bin", "root", "usr/bin"] {
        std::fs::create_dir_all(tree.join(dir)).unwrap();
    }
    std::fs::write(tree.join("tmp/.keep"), "").unwrap();
    std::fs::write(tree.join("etc/passwd"), "root:x:0:0:root:/root:/bin/bash\n").unwrap();
    std::fs::write(tree.join("etc/group"), "root:x:0:\n").unwrap();
    write_program(&tree.join(&AGENT_PATH[1..]), AGENT);
    for program in PROGRAMS {
        let host = output(Command::new("which").arg(program));
        let host = Path::new(host.trim());
        write_program(&tree.join("bin").join(program), &std::fs::read(host).unwrap());
        let libraries = output(Command::new("ldd").arg(host));
        for library in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
            write_program(&tree.join(&library[1..]), &std::fs::read(library).unwrap());
        }
    }
}

fn write_program(path: &Path, bytes: &[u8]) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(path, mode).unwrap();
}

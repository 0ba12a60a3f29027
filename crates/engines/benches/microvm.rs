//! What a microVM's standby costs in the engine alone: `cargo bench -p torpor-engines --bench microvm`.
//!
//! Suspending (quiesce, pause, save, kill) with 34 MB written, reviving until the agent answers and goes on,
//! and the private memory of ten copies right after the agent first answered. Under emulation figures show
//! that the mechanism is sound and say nothing about speed with KVM; the first line says which it was.
//!
//! Needs root, QEMU, and kernels in `TORPOR_TEST_CACHE/kernels`; an EROFS root is made of this host's
//! programs.

#![expect(clippy::print_stdout, reason = "figures are for people")]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use torpor_engines::microvm::MicrovmConfig;
use torpor_engines::{AGENT, EngineConfig, HostConfig, Users, keeper};
use torpor_lifecycle::engine::{AGENT_PATH, BootPlan, Engine, Machine, NoGuestRegistry};
use torpor_lifecycle::guest::{Guest, Item};
use torpor_protocol::guest::{ProcessSpec, Request};
use torpor_protocol::{Network, Resources, SandboxId, SandboxSpec};
use torpor_qemu::build::{Accel, Build};
use torpor_qemu::memory::{GuestMemory, bytes_of};

const ROUNDS: usize = 20;
const COPIES: usize = 10;
/// What the issue of the engine asks for.
const WRITTEN_MB: u32 = 34;
const TAG: &str = "benchvm0";
const PATIENCE: Duration = Duration::from_secs(60);

/// A benchmark has nothing to do about an error but to say it.
type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let args: Vec<OsString> = std::env::args_os().collect();
    match args.get(1).and_then(|arg| arg.to_str()) {
        Some("keeper") => Ok(keeper::run(keeper::listen(Path::new(&args[2]))?)?),
        Some("jail") => Ok(torpor_engines::jail(Path::new(&args[2]))?),
        // What cargo adds.
        Some(_) | None => tokio::runtime::Runtime::new()?.block_on(bench()),
    }
}

async fn bench() -> Outcome<()> {
    let cache = std::env::var_os("TORPOR_TEST_CACHE").ok_or("TORPOR_TEST_CACHE is not set")?;
    let kernel = torpor_kernel::newest(&Path::new(&cache).join("kernels"))?;
    let accel = if torpor_engines::probe::kvm::probe().works() { Accel::Kvm } else { Accel::Tcg };
    let qemu = Build::find(None, accel).await?;
    let dir = tempfile::tempdir()?;
    let me: OsString = std::env::current_exe()?.into();
    let path = |name: &str| dir.path().join(name);
    let host = HostConfig {
        runtime_dir: path("run"),
        scratch_dir: path("scratch"),
        tag: TAG.to_owned(),
        keeper_command: vec![me.clone(), "keeper".into()],
        users: Users::default(),
        registry: Arc::new(NoGuestRegistry),
    };
    let (templates_dir, jail_command) = (path("templates"), vec![me, "jail".into()]);
    let config = MicrovmConfig { qemu, kernel, templates_dir, jail_command };
    let root = root(dir.path())?;
    let engine = EngineConfig::Microvm(config);
    let engines = torpor_engines::open(host.clone(), engine, Vec::new()).await?;
    let measured = measure(&**engines.default_engine(), accel, root, dir.path()).await;
    drop(engines);
    torpor_engines::purge(&host).await?;
    measured
}

async fn measure(engine: &dyn Engine, accel: Accel, root: PathBuf, dir: &Path) -> Outcome<()> {
    let load = std::fs::read_to_string("/proc/loadavg")?;
    let emulated = if accel == Accel::Tcg { " (EMULATED)" } else { "" };
    println!("{}{emulated}; load {}", engine.about().version, load.trim());
    let begun = Instant::now();
    let plan = plan(&root);
    let (mut machine, mut guest) = greet(engine.boot(plan.clone()).await?).await?;
    println!("first boot, with its template: {} ms", begun.elapsed().as_millis());
    let (mut suspends, mut revives) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        run(&guest, &format!("head -c {WRITTEN_MB}M /dev/urandom > /dev/shm/{}", round % 2))
            .await?;
        // What stays behind is part of the next save.
        run(&guest, &format!("rm -f /dev/shm/{}", (round + 1) % 2)).await?;
        let save = dir.join(format!("save-{round}"));
        std::fs::create_dir(&save)?;
        let begun = Instant::now();
        guest.quiesce().await?;
        machine.pause().await?;
        machine.save(&save).await?;
        suspends.push(begun.elapsed());
        drop(guest);
        machine.kill().await?;
        let begun = Instant::now();
        (machine, guest) =
            greet(engine.revive(plan.clone(), &save, &engine.about().version).await?).await?;
        revives.push(begun.elapsed());
        let _ = std::fs::remove_dir_all(dir.join(format!("save-{}", round.wrapping_sub(1))));
    }
    tell("suspend: quiesce, pause, save", &mut suspends);
    tell("revive until it goes on", &mut revives);
    copies(engine, &plan, &mut machine, &guest, dir).await?;
    machine.kill().await?;
    engine.close().await;
    Ok(())
}

/// Memory that copies of a live snapshot have of their own when they first answer.
async fn copies(
    engine: &dyn Engine,
    plan: &BootPlan,
    machine: &mut Box<dyn Machine>,
    guest: &Guest,
    dir: &Path,
) -> Outcome<()> {
    let save = dir.join("base");
    std::fs::create_dir(&save)?;
    guest.quiesce().await?;
    let saved = machine.save(&save).await?;
    guest.unquiesce().await?;
    println!("pause of a live save: {} ms", saved.pause.as_millis());
    let mut machines = Vec::new();
    let (mut own, mut times) = (Vec::new(), Vec::new());
    for _ in 0..COPIES {
        let plan = BootPlan { id: SandboxId::random(), ..plan.clone() };
        let begun = Instant::now();
        let machine = engine.revive(plan.clone(), &save, &engine.about().version).await?;
        let guest = Guest::connect(machine.channel(), PATIENCE).await?;
        times.push(begun.elapsed());
        own.push(private_kib(dir, &plan.id)?);
        guest.unquiesce().await?;
        machines.push((machine, guest));
    }
    tell("copy until its agent answers", &mut times);
    if let Some((machine, _)) = machines.last() {
        println!("of which, in the last: {:?}", machine.start_steps());
    }
    own.sort_unstable();
    println!("private guest memory of {COPIES} copies: {own:?} KiB");
    for (machine, _) in machines {
        machine.kill().await?;
    }
    Ok(())
}

fn private_kib(dir: &Path, sandbox: &SandboxId) -> Outcome<u64> {
    for entry in std::fs::read_dir(dir.join("run").join(TAG).join("vm/machines"))? {
        let entry = entry?.path();
        let record = std::fs::read_to_string(entry.join("machine.json"))?;
        if !record.contains(sandbox.as_str()) {
            continue;
        }
        let id = entry.file_name().and_then(|name| name.to_str()).ok_or("a machine's id")?;
        let memory = std::fs::File::open(dir.join("scratch").join(format!("{id}.memory")))?;
        let pid = std::fs::read_to_string(entry.join("pid"))?.trim().parse()?;
        let guest = GuestMemory::of(pid, &memory, u64::from(MEMORY_MIB) << 20)?;
        return Ok(bytes_of(&guest.written()?) >> 10);
    }
    Err("no machine has it".into())
}

const MEMORY_MIB: u32 = 512;

fn plan(root: &Path) -> BootPlan {
    let resources =
        Resources { memory_mib: MEMORY_MIB.into(), disk_mib: 1024, ..Resources::default() };
    let image_id = "0".repeat(64).parse().expect("an image's id is 64 hexadecimal digits");
    let spec = SandboxSpec {
        name: None,
        image: "bench".into(),
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

async fn greet(machine: Box<dyn Machine>) -> Outcome<(Box<dyn Machine>, Guest)> {
    let guest = Guest::connect(machine.channel(), PATIENCE).await?;
    guest.unquiesce().await?;
    Ok((machine, guest))
}

async fn run(guest: &Guest, script: &str) -> Outcome<()> {
    let command = ["sh", "-c", script].map(str::to_owned).to_vec();
    let spec = ProcessSpec { command, ..ProcessSpec::default() };
    let mut stream = guest.open(&Request::Run(spec)).await?;
    while let Some(item) = stream.next().await? {
        if let Item::DataErr(text) = item {
            return Err(String::from_utf8_lossy(&text).into_owned().into());
        }
    }
    Ok(())
}

fn tell(what: &str, times: &mut [Duration]) {
    times.sort_unstable();
    let at = |share: usize| times[(times.len() - 1) * share / 100].as_secs_f64() * 1e3;
    println!("{what}: p50 {:.0}, p95 {:.0}, max {:.0} ms", at(50), at(95), at(100));
}

/// An EROFS image of some programs of this host and the agent.
fn root(dir: &Path) -> Outcome<PathBuf> {
    let (tree, image) = (dir.join("tree"), dir.join("root.erofs"));
    for name in ["proc", "sys", "dev", "tmp", "etc", "bin", "root"] {
        std::fs::create_dir_all(tree.join(name))?;
    }
    std::fs::write(tree.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n")?;
    put(&tree.join(&AGENT_PATH[1..]), AGENT)?;
    for program in ["/bin/sh", "/usr/bin/head", "/bin/rm"] {
        put(
            &tree.join("bin").join(Path::new(program).file_name().ok_or("a name")?),
            &std::fs::read(program)?,
        )?;
        let libraries = Command::new("ldd").arg(program).output()?;
        let libraries = String::from_utf8_lossy(&libraries.stdout).into_owned();
        for library in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
            put(&tree.join(&library[1..]), &std::fs::read(library)?)?;
        }
    }
    let made = Command::new("mkfs.erofs")
        .args(["-x-1", "-E", "noinline_data", "--quiet"])
        .args([&image, &tree])
        .status()?;
    if !made.success() {
        return Err("mkfs.erofs failed".into());
    }
    Ok(image)
}

fn put(path: &Path, bytes: &[u8]) -> Outcome<()> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    std::fs::write(path, bytes)?;
    Ok(std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?)
}

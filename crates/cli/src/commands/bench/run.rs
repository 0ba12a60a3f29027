//! `/bin/true` in a running sandbox: through the API, with `runsc exec` in the same sandbox, and
//! started by a program inside, which is what the guest's kernel itself needs for it.

use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;
use torpor_protocol::api::{Command, RunResult};

use super::Bench;
use super::load::{Summary, on_schedule};
use super::report::Report;
use crate::client::{Client, Route};
use crate::error::{Error, Result};

/// Runs before the first one that counts: connections, page cache.
const WARM_UP: u32 = 5;
/// Turns that a run and its floor take.
const BLOCKS: u32 = 4;
/// Starts and awaits /bin/true as often as it is told, and prints the seconds each took.
const INSIDE: &str = "import os, sys, time
for _ in range(int(sys.argv[1])):
    begun = time.perf_counter()
    os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)
    print(time.perf_counter() - begun)";

pub(super) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let status = bench.create(client).await?;
    let route = Route::sandbox(&status.id).then("/run");
    for _ in 0..WARM_UP {
        api(client, &route).await?;
    }
    beside_the_floor(bench, client, &route, report).await?;
    let runsc = Runsc::find(status.id.as_str());
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds {
        ours.push(timed(api(client, &route)).await?);
        if let Some(runsc) = &runsc {
            theirs.push(timed(runsc.exec()).await?);
        }
    }
    let mine = Summary::of(&ours);
    if !theirs.is_empty() {
        let other = Summary::of(&theirs);
        report.figure("runsc exec / run, p50", other.p50 / mine.p50, "×");
        report.figure("runsc exec / run, p95", other.p95 / mine.p95, "×");
        report.latency("runsc exec /bin/true, alternately", other);
    }
    report.latency("run /bin/true, alternately", mine);
    let count = bench.rounds.saturating_mul(5);
    let times = on_schedule(bench.rate, count, |_| {
        let (client, route) = (client.clone(), route.clone());
        async move { api(&client, &route).await }
    });
    let name = format!("run /bin/true, {} a second", bench.rate);
    report.latency(name, Summary::of(&times.await?));
    client.delete(&Route::sandbox(&status.id)).await
}

/// Like with like: both one right after another, in blocks that take turns, so that what others do
/// on the machine meets both.
async fn beside_the_floor(
    bench: &Bench,
    client: &Client,
    route: &Route,
    report: &mut Report,
) -> Result<()> {
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    for _ in 0..BLOCKS {
        for _ in 0..bench.rounds {
            ours.push(timed(api(client, route)).await?);
        }
        floor.extend(inside(client, route, bench.rounds).await?);
    }
    let (ours, floor) = (Summary::of(&ours), Summary::of(&floor));
    report.figure("run − started inside, p50", ours.p50 - floor.p50, "ms");
    report.latency("run /bin/true, one after another", ours);
    report.latency("  the same, started inside", floor);
    Ok(())
}

async fn api(client: &Client, route: &Route) -> Result<()> {
    let command = Command { command: vec!["/bin/true".into()], ..Command::default() };
    let result: RunResult = client.post(route, &command).await?;
    if result.exit.exit_code == Some(0) {
        return Ok(());
    }
    Err(Error::failed(format!("/bin/true ended with {:?}", result.exit)))
}

/// What the guest's kernel needs, told by a program inside.
async fn inside(client: &Client, route: &Route, rounds: u32) -> Result<Vec<Duration>> {
    let command = ["python3", "-c", INSIDE, &rounds.to_string()].map(str::to_owned).to_vec();
    let result: RunResult = client.post(route, &Command { command, ..Command::default() }).await?;
    let times = result.stdout.lines().map(|line| line.parse().map(Duration::from_secs_f64));
    times
        .collect::<Result<_, _>>()
        .map_err(|error| Error::failed(format!("the program inside said {error}")))
}

async fn timed(job: impl Future<Output = Result<()>>) -> Result<Duration> {
    let begun = Instant::now();
    job.await?;
    Ok(begun.elapsed())
}

/// The engine's own command line, for comparison.
struct Runsc {
    program: PathBuf,
    root: String,
    id: String,
}

impl Runsc {
    /// Finds the sandbox's process on this host; none if the daemon is elsewhere.
    fn find(id: &str) -> Option<Self> {
        for entry in std::fs::read_dir("/proc").ok()?.flatten() {
            let Ok(line) = std::fs::read_to_string(entry.path().join("cmdline")) else { continue };
            let words: Vec<&str> = line.split('\0').collect();
            if !words.contains(&"boot") || !line.contains(id) {
                continue;
            }
            let root = words.iter().find_map(|word| word.strip_prefix("--root="))?.to_owned();
            let program = std::fs::read_link(entry.path().join("exe")).ok()?;
            return Some(Self { program, root, id: id.to_owned() });
        }
        None
    }

    async fn exec(&self) -> Result<()> {
        let status = tokio::process::Command::new(&self.program)
            .arg(format!("--root={}", self.root))
            .args(["exec", &self.id, "/bin/true"])
            .status()
            .await
            .map_err(|error| Error::local("run runsc", error))?;
        if status.success() {
            return Ok(());
        }
        Err(Error::failed(format!("runsc exec ended with {status}")))
    }
}

//! `/bin/true` in a running sandbox: through the API, with `runsc exec` in the same sandbox, and
//! started by a program inside, which is what the guest's kernel itself needs for it.

use std::time::Duration;

use torpor_client::{Client, Route};
use torpor_protocol::api::{Command, RunResult};

use crate::Bench;
use crate::error::{Error, Result};
use crate::load::{Summary, on_schedule, timed};
use crate::report::{Report, Start};
use crate::runsc::Live;

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

pub(crate) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let status = bench.create(client).await?;
    let route = Route::sandbox(&status.id).then("/run");
    for _ in 0..WARM_UP {
        api(client, &route).await?;
    }
    beside_the_floor(bench, client, &route, report).await?;
    let runsc = Live::find(&status.id);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds {
        ours.push(timed(api(client, &route)).await?);
        if let Some(runsc) = &runsc {
            theirs.push(timed(runsc.exec(&["/bin/true"])).await?);
        }
    }
    let mine = Summary::of(&ours);
    if !theirs.is_empty() {
        let other = Summary::of(&theirs);
        report.at_least("runsc exec / run, p50", other.p50 / mine.p50, 3.0, "×");
        report.figure("runsc exec / run, p95", other.p95 / mine.p95, "×");
        report.latency("runsc exec /bin/true, alternately", Start::Running, other);
    }
    report.latency("run /bin/true, alternately", Start::Running, mine);
    let count = bench.rounds.saturating_mul(5);
    let times = on_schedule(bench.rate, count, |_| {
        let (client, route) = (client.clone(), route.clone());
        async move { api(&client, &route).await }
    });
    let name = format!("run /bin/true, {} a second", bench.rate);
    report.latency(name, Start::Running, Summary::of(&times.await?));
    Ok(client.delete(&Route::sandbox(&status.id)).await?)
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
    report.at_most("run /bin/true, p50", ours.p50, 8.0, "ms");
    report.latency("run /bin/true, one after another", Start::Running, ours);
    report.latency("  the same, started inside", Start::Running, floor);
    Ok(())
}

pub(crate) async fn api(client: &Client, route: &Route) -> Result<()> {
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

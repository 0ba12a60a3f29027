//! Tasks of jobs: how many a second of those that do nothing, how a long queue drains, and what it is worth that set-up is
//! paid once.

use std::time::Duration;

use http::Method;
use tokio::time::Instant;
use torpor_client::{Client, Route, body};
use torpor_protocol::Snapshot;
use torpor_protocol::api::{Command, CreateSandbox, RunResult};
use torpor_protocol::job::{
    BeginExecution, Execution, ExecutionState, JobEvent, JobSpec, TaskList,
};
use torpor_protocol::snapshot::{CreatePool, Pool, TakeSnapshot};

use crate::error::{Error, Result};
use crate::load::Summary;
use crate::report::{Report, Start};
use crate::{Bench, LABEL, PREFIX, awake, cost};

/// Tasks of each kind, and of a quick run.
const TASKS: usize = 60;
const QUICK_TASKS: usize = 10;
/// A long queue, and of a quick run.
const QUEUE: usize = 1_000;
const QUICK_QUEUE: usize = 100;
const SWARM: usize = 5;
/// Machines that wait in the pool: more than run at once on two cores.
const READY: usize = 20;
const POOL_MAX: Duration = Duration::from_secs(180);
const LOOK: Duration = Duration::from_millis(100);
/// Reads, computes and writes a thousand files, as the installation of a project does.
/// Some of the files are no Python, on purpose; an image without Python is no measurement.
const SET_UP: &str = "command -v python3 >/dev/null || exit 1
    python3 -m compileall -q -f /usr/lib/python3* >/dev/null || true";

pub(crate) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let tasks = if bench.quick { QUICK_TASKS } else { TASKS };
    let snapshot = prepared(bench, client, None).await?;
    let memory = from(|asked| asked.snapshot = Some(snapshot.id.to_string()));
    let image = from(|asked| asked.image = Some(bench.image.clone()));
    nothing(client, report, "image", Start::Prepared, image.clone(), tasks).await?;
    let pool = full_pool(bench, client).await?;
    let pooled = from(|asked| asked.pool = Some(pool.name.clone()));
    nothing(client, report, "pool", Start::Pool, pooled, tasks).await?;
    client.delete(&Route::new("/v1/pools").part(pool.name.as_str())).await?;
    nothing(client, report, "memory snapshot", Start::Snapshot, memory.clone(), tasks).await?;
    queue(bench, client, report, memory).await?;
    swarm(bench, client, report, image).await
}

fn from(source: impl FnOnce(&mut CreateSandbox)) -> CreateSandbox {
    let labels = [(LABEL.0.to_owned(), LABEL.1.to_owned())].into();
    let mut asked = CreateSandbox { labels, ..CreateSandbox::default() };
    source(&mut asked);
    asked
}

/// A memory snapshot of a sandbox in which something was set up, or nothing.
async fn prepared(bench: &Bench, client: &Client, set_up: Option<&str>) -> Result<Snapshot> {
    let asked = CreateSandbox { standby: awake(), ..bench.sandbox() };
    let made: torpor_protocol::Status = client.post(&Route::new("/v1/sandboxes"), &asked).await?;
    if let Some(script) = set_up {
        let command = Command { command: shell(script), ..Command::default() };
        let route = Route::sandbox(&made.id).then("/run");
        let done: RunResult = client.ask(Method::POST, &route, &command).await?;
        if done.exit.exit_code != Some(0) {
            return Err(Error::failed(format!("the set-up failed: {}", done.stderr)));
        }
    }
    let request = TakeSnapshot { name: Some(bench.fresh_name()), ..TakeSnapshot::default() };
    let taken = client.post(&Route::sandbox(&made.id).then("/snapshots"), &request).await?;
    client.delete(&Route::sandbox(&made.id)).await?;
    Ok(taken)
}

fn shell(script: &str) -> Vec<String> {
    ["sh", "-c", script].map(str::to_owned).into()
}

/// Machines from the image, all of them ready.
async fn full_pool(bench: &Bench, client: &Client) -> Result<Pool> {
    let request = serde_json::json!({
        "name": format!("{PREFIX}{}-tasks", std::process::id()), "size": READY, "image": bench.image,
    });
    let request: CreatePool =
        serde_json::from_value(request).map_err(|error| Error::garbled("a pool", error))?;
    let pool: Pool = client.post(&Route::new("/v1/pools"), &request).await?;
    let deadline = Instant::now() + POOL_MAX;
    loop {
        let now: Pool = client.get(&Route::new("/v1/pools").part(pool.name.as_str())).await?;
        if now.ready == now.size {
            return Ok(now);
        }
        if Instant::now() > deadline {
            return Err(Error::failed("the pool was not filled"));
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// How an execution went.
struct Run {
    submitted: Duration,
    /// From the request to the end of the last task.
    whole: Duration,
    /// Of each task, from its claim to its end.
    tasks: Vec<Duration>,
}

async fn run(
    client: &Client,
    asked: &CreateSandbox,
    script: &[String],
    count: usize,
) -> Result<Run> {
    let spec = JobSpec { sandbox: asked.clone(), command: script.to_vec(), ..JobSpec::default() };
    let request = BeginExecution { spec: Some(spec), count: Some(count), ..Default::default() };
    let executions = Route::new("/v1/executions");
    let begun = Instant::now();
    let execution: Execution = client.post(&executions, &request).await?;
    let submitted = begun.elapsed();
    let route = executions.part(execution.id.as_str());
    let ended = ended(client, &route.clone().then("/watch")).await?;
    let whole = begun.elapsed();
    if ended.state != ExecutionState::Succeeded {
        let failed = ended.counts.failed;
        return Err(Error::failed(format!("{failed} tasks of {count} failed")));
    }
    let list: TaskList = client.list(&route.clone().then("/tasks")).await?;
    let took = |(from, to): (Option<u64>, Option<u64>)| {
        Duration::from_millis(to.unwrap_or(0).saturating_sub(from.unwrap_or(0)))
    };
    let tasks =
        list.tasks.iter().map(|task| took((task.started_at_ms, task.ended_at_ms))).collect();
    client.delete(&route).await?;
    Ok(Run { submitted, whole, tasks })
}

async fn ended(client: &Client, watch: &Route) -> Result<Execution> {
    let mut events = client.lines::<JobEvent>(Method::GET, watch, body::empty()).await?;
    while let Some(event) = events.next().await? {
        match event {
            JobEvent::Ended { execution } => return Ok(*execution),
            JobEvent::Progress { .. } | JobEvent::Task { .. } => {}
        }
    }
    Err(Error::failed("the watch ended before the execution"))
}

async fn nothing(
    client: &Client,
    report: &mut Report,
    name: &str,
    start: Start,
    asked: CreateSandbox,
    count: usize,
) -> Result<()> {
    let done = run(client, &asked, &["true".to_owned()], count).await?;
    let rate = cost::count(count) / done.whole.as_secs_f64();
    report.figure(format!("tasks of true from {} {name}", article(name)), rate, "tasks/s");
    let latency = format!("a task of true from {} {name}, beside others", article(name));
    report.latency(latency, start, Summary::of(&done.tasks));
    Ok(())
}

fn article(name: &str) -> &'static str {
    if name.starts_with('i') { "an" } else { "a" }
}

async fn queue(
    bench: &Bench,
    client: &Client,
    report: &mut Report,
    asked: CreateSandbox,
) -> Result<()> {
    let count = if bench.quick { QUICK_QUEUE } else { QUEUE };
    let done = run(client, &asked, &["true".to_owned()], count).await?;
    let millis = done.submitted.as_secs_f64() * 1e3;
    report.figure(format!("queue of {count}: submitted in"), millis, "ms");
    let drained = cost::count(count) / (done.whole - done.submitted).as_secs_f64();
    report.figure(format!("queue of {count}: drained at"), drained, "tasks/s");
    Ok(())
}

/// Five that need the same set-up, each doing it, and all beginning after it.
async fn swarm(
    bench: &Bench,
    client: &Client,
    report: &mut Report,
    image: CreateSandbox,
) -> Result<()> {
    let (mut each, mut once, mut forked) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..bench.slow_rounds().min(3) {
        each.push(run(client, &image, &shell(SET_UP), SWARM).await?.whole);
        let begun = Instant::now();
        let snapshot = prepared(bench, client, Some(SET_UP)).await?;
        let memory = from(|asked| asked.snapshot = Some(snapshot.id.to_string()));
        let done = run(client, &memory, &["true".to_owned()], SWARM).await?;
        once.push(begun.elapsed());
        forked.push(done.whole);
        client.delete(&Route::snapshot(&snapshot.id)).await?;
    }
    let (five, one) = (Summary::of(&each), Summary::of(&once));
    report.figure("swarm of five: set-up five times / once", five.p50 / one.p50, "×");
    report.latency("swarm of five, each sets up", Start::Prepared, five);
    report.latency("swarm of five, set-up and snapshot once", Start::Prepared, one);
    let forked = Summary::of(&forked);
    report.latency("  of that, the five tasks", Start::Snapshot, forked);
    Ok(())
}

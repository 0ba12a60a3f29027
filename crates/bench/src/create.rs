//! From the request for a sandbox to the first command's output, and where that time goes: taken
//! from a pool, put into a machine that was prepared, and from nothing.

use std::time::Duration;

use tokio::time::Instant;
use torpor_client::{Client, Route};
use torpor_lifecycle::engine::PREPARED_STEP;
use torpor_protocol::api::{Command, RunResult, Standby};
use torpor_protocol::snapshot::{CreatePool, Pool};
use torpor_protocol::{Lifetime, Status};

use crate::Bench;
use crate::error::{Error, Result};
use crate::load::Summary;
use crate::report::{Profile, Report, Start};

/// Long enough for the daemon to prepare a machine, which it does when nobody wants anything.
pub(crate) const REST: Duration = Duration::from_millis(1200);
/// How long it takes a pool to have another machine, and to remove the one that was deleted.
const REFILLED: Duration = Duration::from_millis(500);
/// How long a pool may take to be full.
const FILL_MAX: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(100);
/// Machines in the pool: as many as are created from it.
const POOL_MAX: u32 = 20;

/// What a sandbox was made of, by the steps that its start took.
pub(crate) fn start_of(status: &Status) -> Start {
    if status.start_steps.is_empty() {
        return Start::Pool;
    }
    let prepared = status.start_steps.iter().any(|step| step.name == PREPARED_STEP);
    if prepared { Start::Prepared } else { Start::Nothing }
}

pub(crate) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let mut all = Samples::default();
    // One right after another: what was prepared is soon used up.
    for _ in 0..bench.rounds {
        all.add(client, bench).await?;
    }
    for _ in 0..bench.slow_rounds() {
        tokio::time::sleep(REST).await;
        all.add(client, bench).await?;
    }
    from_pool(bench, client, &mut all).await?;
    all.report(report);
    Ok(())
}

async fn from_pool(bench: &Bench, client: &Client, all: &mut Samples) -> Result<()> {
    let size = bench.rounds.min(POOL_MAX);
    let wish = CreatePool {
        name: bench.fresh_name(),
        size: size as usize,
        image: Some(bench.image.clone()),
        snapshot: None,
        engine: None,
        cpus: None,
        memory_mib: None,
        disk_mib: None,
        network: bench.sandbox().network,
        max: None,
        ports: None,
        entrypoint: Vec::new(),
        lifetime: Lifetime::default(),
        standby: Standby::default(),
    };
    let _: Pool = client.post(&Route::new("/v1/pools"), &wish).await?;
    let route = Route::new("/v1/pools").part(wish.name.as_str());
    let deadline = Instant::now() + FILL_MAX;
    loop {
        let pool: Pool = client.get(&route).await?;
        if pool.ready == pool.size {
            break;
        }
        if Instant::now() > deadline {
            let Pool { ready, size, message, .. } = pool;
            return Err(Error::failed(format!("{ready} of {size} are in the pool: {message:?}")));
        }
        tokio::time::sleep(LOOK).await;
    }
    tokio::time::sleep(REST).await;
    for _ in 0..size {
        all.add(client, bench).await?;
        tokio::time::sleep(REFILLED).await;
    }
    Ok(client.delete(&route).await?)
}

/// By what there was before.
#[derive(Debug, Default)]
struct Samples {
    pool: Sample,
    prepared: Sample,
    nothing: Sample,
    deletes: Vec<Duration>,
}

#[derive(Debug, Default)]
struct Sample {
    creates: Profile,
    whole: Vec<Duration>,
}

impl Samples {
    async fn add(&mut self, client: &Client, bench: &Bench) -> Result<()> {
        let begun = Instant::now();
        let status = bench.create(client).await?;
        let created = begun.elapsed();
        let route = Route::sandbox(&status.id);
        let hello = Command { command: vec!["echo".into(), "hello".into()], ..Command::default() };
        let result: RunResult = client.post(&route.clone().then("/run"), &hello).await?;
        let whole = begun.elapsed();
        if result.stdout != "hello\n" {
            return Err(Error::failed(format!("the first command said {:?}", result.stdout)));
        }
        let sample = match start_of(&status) {
            Start::Pool => &mut self.pool,
            Start::Prepared => &mut self.prepared,
            Start::Nothing
            | Start::Running
            | Start::Warm
            | Start::PagedOut
            | Start::Cold
            | Start::Snapshot => &mut self.nothing,
        };
        sample.creates.add(created, &status.start_steps);
        sample.whole.push(whole);
        let begun = Instant::now();
        client.delete(&route).await?;
        self.deletes.push(begun.elapsed());
        Ok(())
    }

    fn report(&self, report: &mut Report) {
        let kinds = [
            (&self.pool, Start::Pool, 5.0, "create from a pool, p50"),
            (&self.prepared, Start::Prepared, 60.0, "create with a prepared machine, p50"),
            (&self.nothing, Start::Nothing, 200.0, "create from nothing, p50"),
        ];
        for (Sample { creates, whole }, start, limit, promise) in kinds {
            if whole.is_empty() {
                report.note(format!("{promise}: it did not happen"));
                continue;
            }
            let created = creates.report(report, "create", start, true);
            report.latency("create → first output", start, Summary::of(whole));
            report.at_most(promise, created.p50, limit, "ms");
        }
        report.latency("delete", Start::Running, Summary::of(&self.deletes));
    }
}

//! Many sandboxes: created at one instant; asleep, and each asked once, over time and at one
//! instant; what they cost while nobody asks; and many more that are only records.

use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::time::Instant;
use torpor_protocol::api::Info;
use torpor_protocol::{SandboxId, Tier};

use super::create::REST;
use super::fork::{forks, ids};
use super::guest::Guest;
use super::load::{Outcome, Summary, at_once, at_times, poisson};
use super::report::{Report, Start};
use super::{Bench, clean_up, cost, picture, records, write};
use crate::client::{Client, Route};
use crate::error::Result;

/// Created at one instant, at most.
const CREATED_MAX: u32 = 50;
/// Over this time each is asked once.
const SPAN: Duration = Duration::from_secs(10);
/// For so long the idle are watched.
const IDLE: Duration = Duration::from_secs(10);
const QUICK_IDLE: Duration = Duration::from_secs(3);
/// Put to sleep at the same time.
const ASLEEP_AT_ONCE: usize = 4;

pub(super) async fn measure(
    bench: &Bench,
    client: &Client,
    info: &Info,
    report: &mut Report,
) -> Result<()> {
    created(bench, client, report).await?;
    let crowd = Crowd::start(bench, client).await?;
    let memory = cost::memory_of(client, &crowd.ids).await?;
    report.at_most("memory per idle sandbox, running", memory, 20.0, "MB");
    for tier in [Tier::Warm, Tier::Cold] {
        crowd.sleep(client, tier).await?;
        if tier == Tier::Warm {
            idle(bench, client, info, &crowd, report).await?;
        }
        let memory = cost::memory_of(client, &crowd.ids).await?;
        match tier {
            // Only what is in swap is promised to be small.
            Tier::Warm => report.figure("memory per sandbox, warm", memory, "MB"),
            Tier::Cold => report.at_most("memory per sandbox, cold", memory, 0.0, "MB"),
        }
        over_time(bench, client, &crowd, tier, report).await?;
        crowd.sleep(client, tier).await?;
        at_one_instant(client, &crowd, tier, report).await?;
    }
    clean_up(client).await?;
    records::measure(bench, report).await
}

async fn created(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let count = bench.fleet.min(CREATED_MAX);
    let begun = Instant::now();
    let times = at_once(count as usize, |_| {
        let (client, spec) = (client.clone(), bench.sandbox());
        async move {
            let created: Result<torpor_protocol::Status> =
                client.post(&Route::new("/v1/sandboxes"), &spec).await;
            created.map(drop)
        }
    });
    let summary = Summary::of(&times.await?);
    let name = format!("{count} created at once");
    report.figure(format!("{name}: all up after"), begun.elapsed().as_secs_f64(), "s");
    report.latency(name, Start::Nothing, summary);
    clean_up(client).await
}

/// Sandboxes that are alike.
struct Crowd {
    ids: Vec<SandboxId>,
}

impl Crowd {
    async fn start(bench: &Bench, client: &Client) -> Result<Self> {
        let guest = Guest::start(bench, client, 0).await?;
        let snapshot = guest.snapshot(bench, client).await?;
        guest.delete(client).await?;
        let (_, forked) = forks(client, &snapshot, bench.fleet as usize).await?;
        Ok(Self { ids: ids(&forked).collect() })
    }

    async fn sleep(&self, client: &Client, tier: Tier) -> Result<()> {
        let sleeps = self.ids.iter().map(async |id| {
            let guest = Guest { id: id.clone() };
            guest.sleep(client, tier).await
        });
        stream::iter(sleeps).buffer_unordered(ASLEEP_AT_ONCE).try_collect::<()>().await?;
        tokio::time::sleep(REST).await;
        Ok(())
    }

    /// Asks each once, when it is due.
    async fn ask(&self, client: &Client, times: &[Duration]) -> Result<Vec<Outcome>> {
        at_times(times, |number| {
            let (client, guest) = (client.clone(), Guest { id: self.ids[number].clone() });
            async move { guest.ask(&client).await }
        })
        .await
    }
}

async fn over_time(
    bench: &Bench,
    client: &Client,
    crowd: &Crowd,
    tier: Tier,
    report: &mut Report,
) -> Result<()> {
    let outcomes = crowd.ask(client, &poisson(crowd.ids.len(), SPAN)).await?;
    let summary = summarize(&outcomes);
    let count = crowd.ids.len();
    let name = format!("{count} asked once within 10 s");
    if let Some(dir) = &bench.pictures {
        let title = format!("{count} sandboxes in {} standby, each asked once", tier.as_str());
        let svg = picture::draw(&title, &outcomes, &summary, SPAN);
        write(&dir.join(format!("wake-{}.svg", tier.as_str())), svg.as_bytes())?;
    }
    let (start, limit) = match tier {
        Tier::Warm => (Start::Warm, 25.0),
        Tier::Cold => (Start::Cold, 1000.0),
    };
    report.at_most(&format!("{name}, {}, p95", tier.as_str()), summary.p95, limit, "ms");
    failures(&outcomes, report);
    report.latency(name, start, summary);
    Ok(())
}

async fn at_one_instant(
    client: &Client,
    crowd: &Crowd,
    tier: Tier,
    report: &mut Report,
) -> Result<()> {
    let outcomes = crowd.ask(client, &vec![Duration::ZERO; crowd.ids.len()]).await?;
    let summary = summarize(&outcomes);
    let name = format!("{} asked at one instant", crowd.ids.len());
    let (start, limit) = match tier {
        Tier::Warm => (Start::Warm, 250.0),
        Tier::Cold => (Start::Cold, 4000.0),
    };
    report.at_most(&format!("{name}, {}, p95", tier.as_str()), summary.p95, limit, "ms");
    failures(&outcomes, report);
    report.latency(name, start, summary);
    Ok(())
}

/// All of them at one instant, over and over: how far apart the slowest answers of such bursts are.
pub(super) async fn bursts(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let crowd = Crowd::start(bench, client).await?;
    let (mut all, mut slowest) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds {
        crowd.sleep(client, Tier::Warm).await?;
        let outcomes = crowd.ask(client, &vec![Duration::ZERO; crowd.ids.len()]).await?;
        slowest.extend(outcomes.iter().map(|outcome| outcome.latency).max());
        all.extend(outcomes);
    }
    let name = format!("{} asked at one instant", crowd.ids.len());
    failures(&all, report);
    report.latency(format!("{name}, {} times", bench.rounds), Start::Warm, summarize(&all));
    report.latency(format!("{name}: the last answer"), Start::Warm, Summary::of(&slowest));
    clean_up(client).await
}

/// A request that failed counts with the time it took.
fn summarize(outcomes: &[Outcome]) -> Summary {
    Summary::of(&outcomes.iter().map(|outcome| outcome.latency).collect::<Vec<_>>())
}

fn failures(outcomes: &[Outcome], report: &mut Report) {
    let failed: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.error.as_ref()).collect();
    report.at_most("  of them failed", count(failed.len()), 0.0, "");
    if let Some(error) = failed.first() {
        report.note(format!("the first that failed: {error}"));
    }
}

pub(super) fn count(number: usize) -> f64 {
    u32::try_from(number).map_or(f64::INFINITY, f64::from)
}

/// Processor time of the daemon and of all sandboxes while nobody asks.
async fn idle(
    bench: &Bench,
    client: &Client,
    info: &Info,
    crowd: &Crowd,
    report: &mut Report,
) -> Result<()> {
    let processes = cost::Processes::of_daemon(&client.server().to_string(), &info.installation);
    let millis = async || -> Result<u64> {
        let usage = cost::usage(client, &crowd.ids).await?;
        Ok(usage.iter().map(|usage| usage.cpu_ms).sum())
    };
    let sandboxes = millis().await?;
    let daemon = processes.as_ref().map(cost::Processes::cpu);
    let begun = Instant::now();
    tokio::time::sleep(if bench.quick { QUICK_IDLE } else { IDLE }).await;
    let span = begun.elapsed().as_secs_f64();
    let daemon = processes.as_ref().zip(daemon).map(|(now, before)| now.cpu() - before);
    let sandboxes = Duration::from_millis(millis().await?.saturating_sub(sandboxes));
    let percent = |time: Duration| time.as_secs_f64() / span * 100.0;
    let count = crowd.ids.len();
    report.at_most(&format!("{count} idle sandboxes: processor"), percent(sandboxes), 0.1, "%");
    match daemon {
        Some(daemon) => {
            report.at_most("  their daemon: processor", percent(daemon), 1.0, "%");
            let memory = processes.map_or(0.0, |processes| processes.memory());
            report.figure(format!("daemon's memory with {count} warm"), memory, "MB");
        }
        None => report.note("cost of the daemon: skipped, it is not on this host"),
    }
    Ok(())
}

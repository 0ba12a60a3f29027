//! Many sandboxes: created at one instant; asleep, and each asked once, over time and at one
//! instant; what they cost while nobody asks; and many more that are only records.

use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::time::Instant;
use torpor_client::{Client, Route};
use torpor_protocol::api::Info;
use torpor_protocol::{SandboxId, Status, Tier};

use crate::create::REST;
use crate::error::Result;
use crate::fork::{forks, ids};
use crate::guest::Guest;
use crate::load::{Outcome, Summary, at_once, at_times, poisson};
use crate::report::{Report, Start};
use crate::{Bench, clean_up, cost, picture, records, write};

/// Created at one instant, at most.
const CREATED_MAX: u32 = 50;
/// Over this time each is asked once.
const SPAN: Duration = Duration::from_secs(10);
/// For so long the idle are watched.
const IDLE: Duration = Duration::from_secs(10);
const QUICK_IDLE: Duration = Duration::from_secs(3);
/// Put to sleep at the same time.
const ASLEEP_AT_ONCE: usize = 4;

pub(crate) async fn measure(
    bench: &Bench,
    client: &Client,
    info: &Info,
    report: &mut Report,
) -> Result<()> {
    created(bench, client, report).await?;
    let crowd = Crowd::start(bench, client).await?;
    let ids = crowd.ids();
    let memory = cost::memory_of(client, &ids).await?;
    report.at_most("memory per idle sandbox, running", memory, 20.0, "MB");
    for tier in [Tier::Warm, Tier::Cold] {
        crowd.sleep(tier).await?;
        if tier == Tier::Warm {
            idle(bench, client, info, &ids, report).await?;
        }
        let memory = cost::memory_of(client, &ids).await?;
        match tier {
            // Only what is in swap is promised to be small.
            Tier::Warm => report.figure("memory per sandbox, warm", memory, "MB"),
            Tier::Cold => report.at_most("memory per sandbox, cold", memory, 0.0, "MB"),
        }
        over_time(bench, &crowd, tier, report).await?;
        crowd.sleep(tier).await?;
        at_one_instant(&crowd, tier, report).await?;
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
            let _: Status = client.post(&Route::new("/v1/sandboxes"), &spec).await?;
            Ok(())
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
    guests: Vec<Guest>,
}

impl Crowd {
    async fn start(bench: &Bench, client: &Client) -> Result<Self> {
        let guest = Guest::start(bench, client, 0).await?;
        let snapshot = guest.snapshot(bench).await?;
        guest.delete().await?;
        let (_, forked) = forks(client, &snapshot, bench.fleet as usize).await?;
        Ok(Self { guests: ids(&forked).map(|id| Guest { client: client.clone(), id }).collect() })
    }

    fn ids(&self) -> Vec<SandboxId> {
        self.guests.iter().map(|guest| guest.id.clone()).collect()
    }

    async fn sleep(&self, tier: Tier) -> Result<()> {
        let sleeps = self.guests.iter().map(|guest| guest.sleep(tier));
        stream::iter(sleeps).buffer_unordered(ASLEEP_AT_ONCE).try_collect::<()>().await?;
        tokio::time::sleep(REST).await;
        Ok(())
    }

    /// Asks each once, when it is due.
    async fn ask(&self, times: &[Duration]) -> Result<Vec<Outcome>> {
        at_times(times, |number| {
            let guest = self.guests[number].clone();
            async move { guest.ask().await }
        })
        .await
    }

    async fn ask_at_once(&self) -> Result<Vec<Outcome>> {
        self.ask(&vec![Duration::ZERO; self.guests.len()]).await
    }
}

async fn over_time(bench: &Bench, crowd: &Crowd, tier: Tier, report: &mut Report) -> Result<()> {
    let count = crowd.guests.len();
    let outcomes = crowd.ask(&poisson(count, SPAN)).await?;
    if let Some(dir) = &bench.pictures {
        let title = format!("{count} sandboxes in {} standby, each asked once", tier.as_str());
        let svg = picture::draw(&title, &outcomes, &summarize(&outcomes), SPAN);
        write(&dir.join(format!("wake-{}.svg", tier.as_str())), svg.as_bytes())?;
    }
    let limit = match tier {
        Tier::Warm => 25.0,
        Tier::Cold => 1000.0,
    };
    tell(format!("{count} asked once within 10 s"), tier, &outcomes, limit, report);
    Ok(())
}

async fn at_one_instant(crowd: &Crowd, tier: Tier, report: &mut Report) -> Result<()> {
    let outcomes = crowd.ask_at_once().await?;
    let limit = match tier {
        Tier::Warm => 250.0,
        Tier::Cold => 4000.0,
    };
    let name = format!("{} asked at one instant", crowd.guests.len());
    tell(name, tier, &outcomes, limit, report);
    Ok(())
}

/// What became of those who slept like this, and the limit of their p95.
fn tell(name: String, tier: Tier, outcomes: &[Outcome], limit: f64, report: &mut Report) {
    let summary = summarize(outcomes);
    let start = match tier {
        Tier::Warm => Start::Warm,
        Tier::Cold => Start::Cold,
    };
    report.at_most(&format!("{name}, {}, p95", tier.as_str()), summary.p95, limit, "ms");
    failures(outcomes, report);
    report.latency(name, start, summary);
}

/// All of them at one instant, over and over: how far apart the slowest answers of such bursts are.
pub(crate) async fn bursts(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let crowd = Crowd::start(bench, client).await?;
    let (mut all, mut slowest) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds {
        crowd.sleep(Tier::Warm).await?;
        let outcomes = crowd.ask_at_once().await?;
        slowest.extend(outcomes.iter().map(|outcome| outcome.latency).max());
        all.extend(outcomes);
    }
    let name = format!("{} asked at one instant", crowd.guests.len());
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
    report.at_most("  of them failed", cost::count(failed.len()), 0.0, "");
    if let Some(error) = failed.first() {
        report.note(format!("the first that failed: {error}"));
    }
}

/// Processor time of the daemon and of all sandboxes while nobody asks.
async fn idle(
    bench: &Bench,
    client: &Client,
    info: &Info,
    ids: &[SandboxId],
    report: &mut Report,
) -> Result<()> {
    let processes = cost::Processes::of_daemon(&client.server().to_string(), &info.installation);
    let millis = async || -> Result<u64> {
        let usage = cost::usage(client, ids).await?;
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
    let count = ids.len();
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

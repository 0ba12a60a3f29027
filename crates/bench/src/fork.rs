//! Forks of a memory snapshot: one, five, and more and more of them, until each answers.

use std::time::Duration;

use tokio::time::Instant;
use torpor_client::{Client, Route};
use torpor_protocol::snapshot::{Fork, ForkList, ForkOutcome};
use torpor_protocol::{SandboxId, Snapshot, Status};

use crate::create::REST;
use crate::error::{Error, Result};
use crate::guest::{Guest, size};
use crate::load::{Summary, at_once};
use crate::report::{Profile, Report, Start};
use crate::wake::SIZES;
use crate::{Bench, LABEL, cost, remove, usual};

/// How many at once, and of a quick run.
const GROWTH: [usize; 6] = [1, 5, 10, 25, 50, 100];
const QUICK_GROWTH: [usize; 3] = [1, 5, 10];

pub(crate) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    for megabytes in SIZES {
        let guest = Guest::start(bench, client, megabytes).await?;
        let snapshot = guest.snapshot(bench).await?;
        guest.delete().await?;
        one(bench, client, &snapshot, megabytes, report).await?;
        if megabytes == 0 {
            five(bench, client, &snapshot, report).await?;
            growth(bench, client, &snapshot, report).await?;
        }
        client.delete(&Route::snapshot(&snapshot.id)).await?;
    }
    Ok(())
}

async fn one(
    bench: &Bench,
    client: &Client,
    snapshot: &Snapshot,
    megabytes: u64,
    report: &mut Report,
) -> Result<()> {
    let mut profile = Profile::default();
    for _ in 0..bench.slow_rounds() {
        tokio::time::sleep(REST).await;
        let (time, forks) = forks(client, snapshot, 1).await?;
        let steps = forks.first().map(|status| status.start_steps.clone());
        profile.add(time, &steps.unwrap_or_default());
        remove(client, ids(&forks)).await?;
    }
    let name = format!("fork → first answer, {}", size(megabytes));
    let summary = profile.report(report, &name, Start::Snapshot, true);
    if let Some(floor) = profile.floor() {
        let name = format!("fork − the engine's restore, {}, p50", size(megabytes));
        report.figure(name, summary.p50 - floor.p50, "ms");
    }
    let limit = if megabytes == 0 { 60.0 } else { 190.0 };
    report.at_most(&format!("fork, {}, p50", size(megabytes)), summary.p50, limit, "ms");
    Ok(())
}

async fn five(
    bench: &Bench,
    client: &Client,
    snapshot: &Snapshot,
    report: &mut Report,
) -> Result<()> {
    let mut times = Vec::new();
    for _ in 0..bench.slow_rounds().min(10) {
        tokio::time::sleep(REST).await;
        let (time, forks) = forks(client, snapshot, 5).await?;
        times.push(time);
        remove(client, ids(&forks)).await?;
    }
    let name = "five forks, small, all answer".to_owned();
    report.promised(name, Start::Snapshot, Summary::of(&times), 250.0);
    Ok(())
}

async fn growth(
    bench: &Bench,
    client: &Client,
    snapshot: &Snapshot,
    report: &mut Report,
) -> Result<()> {
    let counts: &[usize] = if bench.quick { &QUICK_GROWTH } else { &GROWTH };
    for count in counts {
        tokio::time::sleep(REST).await;
        let (time, forks) = forks(client, snapshot, *count).await?;
        let ids: Vec<_> = ids(&forks).collect();
        let memory = cost::memory_of(client, &ids).await?;
        report.figure(format!("growth: {count} forks, all answer"), time.as_secs_f64() * 1e3, "ms");
        report.figure(format!("growth: memory per fork of {count}"), memory, "MB");
        remove(client, ids).await?;
    }
    Ok(())
}

/// Forks so many, and asks each of them; until all have answered.
pub(crate) async fn forks(
    client: &Client,
    snapshot: &Snapshot,
    count: usize,
) -> Result<(Duration, Vec<Status>)> {
    let wish = Fork {
        count,
        labels: [(LABEL.0.to_owned(), LABEL.1.to_owned())].into(),
        standby: usual(),
        ..Fork::default()
    };
    let begun = Instant::now();
    let list: ForkList = client.post(&Route::snapshot(&snapshot.id).then("/fork"), &wish).await?;
    let forks = list.forks.into_iter().map(|fork| match fork {
        ForkOutcome { sandbox: Some(status), .. } => Ok(*status),
        ForkOutcome { error: Some(body), .. } => Err(torpor_client::Error::refused(body).into()),
        ForkOutcome { sandbox: None, error: None, .. } => Err(Error::failed("a fork is missing")),
    });
    let forks = forks.collect::<Result<Vec<_>>>()?;
    let guests: Vec<_> = ids(&forks).map(|id| Guest { client: client.clone(), id }).collect();
    at_once(guests.len(), |number| {
        let guest = guests[number].clone();
        async move { guest.ask().await }
    })
    .await?;
    Ok((begun.elapsed(), forks))
}

pub(crate) fn ids(forks: &[Status]) -> impl Iterator<Item = SandboxId> {
    forks.iter().map(|status| status.id.clone())
}

//! How long it takes to fall asleep: until it is frozen, until it is on disk; for how long a snapshot
//! stops a running sandbox; and how both grow with memory.

use std::time::Duration;

use tokio::time::Instant;
use torpor_protocol::api::{Standby, UpdateSandbox};
use torpor_protocol::{State, Status, Tier};

use super::create::REST;
use super::guest::{Guest, size};
use super::load::{Summary, timed};
use super::report::{Report, Start};
use super::wake::{SIZES, cold_wake};
use super::{Bench, awake};
use crate::client::{Client, Route};
use crate::error::{Error, Result};

/// Megabytes in memory, and of a quick run.
const GROWTH: [u64; 4] = [20, 100, 300, 1000];
const QUICK_GROWTH: [u64; 2] = [20, 100];
const GROWTH_ROUNDS: u32 = 3;
/// Long enough for the watcher to be there before it happens.
const IDLE_AFTER_MS: u64 = 200;

pub(super) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    for megabytes in SIZES {
        let guest = Guest::start(bench, client, megabytes).await?;
        frozen(bench, client, &guest, megabytes, report).await?;
        durable(bench, client, &guest, megabytes, report).await?;
        snapshots(bench, client, &guest, megabytes, report).await?;
        guest.delete(client).await?;
    }
    let sizes: &[u64] = if bench.quick { &QUICK_GROWTH } else { &GROWTH };
    for megabytes in sizes {
        growth(bench, client, *megabytes, report).await?;
    }
    Ok(())
}

/// From the moment it counts as idle until the API says that it sleeps.
async fn frozen(
    bench: &Bench,
    client: &Client,
    guest: &Guest,
    megabytes: u64,
    report: &mut Report,
) -> Result<()> {
    update(client, guest, soon()).await?;
    let mut times = Vec::new();
    for _ in 0..bench.slow_rounds() {
        guest.ask(client).await?;
        let due = Instant::now() + Duration::from_millis(IDLE_AFTER_MS);
        let status = guest.wait(client, State::Asleep).await?;
        if status.durable {
            return Err(Error::failed("it was saved before anybody could see it frozen"));
        }
        times.push(due.elapsed());
    }
    guest.ask(client).await?;
    update(client, guest, awake()).await?;
    let summary = Summary::of(&times);
    let name = format!("idle → frozen, {}", size(megabytes));
    report.at_most(&format!("{name}, p50"), summary.p50, 5.0, "ms");
    report.latency(name, Start::Running, summary);
    Ok(())
}

/// Frozen soon after the last request.
pub(super) fn soon() -> Standby {
    Standby { idle_after_ms: Some(Some(IDLE_AFTER_MS)), ..Standby::default() }
}

pub(super) async fn update(client: &Client, guest: &Guest, standby: Standby) -> Result<Status> {
    let update = UpdateSandbox { standby: Some(standby), ..UpdateSandbox::default() };
    client.patch(&guest.route(), &update).await
}

/// From the request to sleep until all of it is on disk.
async fn durable(
    bench: &Bench,
    client: &Client,
    guest: &Guest,
    megabytes: u64,
    report: &mut Report,
) -> Result<()> {
    let mut times = Vec::new();
    for _ in 0..bench.slow_rounds() {
        guest.ask(client).await?;
        times.push(timed(guest.sleep(client, Tier::Warm)).await?);
    }
    guest.ask(client).await?;
    let summary = Summary::of(&times);
    let name = format!("sleep → durable, {}", size(megabytes));
    report.at_most(&format!("{name}, p50"), summary.p50, 200.0, "ms");
    report.latency(name, Start::Running, summary);
    Ok(())
}

async fn snapshots(
    bench: &Bench,
    client: &Client,
    guest: &Guest,
    megabytes: u64,
    report: &mut Report,
) -> Result<()> {
    let (mut pauses, mut whole) = (Vec::new(), Vec::new());
    for _ in 0..bench.slow_rounds() {
        guest.ask(client).await?;
        let begun = Instant::now();
        let snapshot = guest.snapshot(bench, client).await?;
        whole.push(begun.elapsed());
        pauses.push(Duration::from_secs_f64(snapshot.pause_ms / 1e3));
        client.delete(&Route::snapshot(&snapshot.id)).await?;
    }
    let (pauses, limit) = (Summary::of(&pauses), if megabytes == 0 { 60.0 } else { 110.0 });
    let name = format!("pause of a live snapshot, {}", size(megabytes));
    report.at_most(&format!("{name}, p50"), pauses.p50, limit, "ms");
    report.latency(name, Start::Running, pauses);
    let name = format!("live snapshot, {}", size(megabytes));
    report.latency(name, Start::Running, Summary::of(&whole));
    Ok(())
}

/// The same with more and more memory.
async fn growth(bench: &Bench, client: &Client, megabytes: u64, report: &mut Report) -> Result<()> {
    let guest = Guest::start(bench, client, megabytes).await?;
    let (mut sleeps, mut wakes, mut saved_bytes) = (Vec::new(), Vec::new(), 0);
    for _ in 0..bench.rounds.min(GROWTH_ROUNDS) {
        sleeps.push(timed(guest.sleep(client, Tier::Warm)).await?);
        saved_bytes = guest.status(client).await?.saved_bytes;
        guest.sleep(client, Tier::Cold).await?;
        tokio::time::sleep(REST).await;
        wakes.push(cold_wake(client, &guest).await?.0);
    }
    report.latency(format!("growth: sleep, {megabytes} MB"), Start::Running, Summary::of(&sleeps));
    report.latency(format!("growth: wake, {megabytes} MB"), Start::Cold, Summary::of(&wakes));
    let name = format!("growth: save on disk, {megabytes} MB");
    report.figure(name, super::cost::megabytes(saved_bytes), "MB");
    guest.delete(client).await
}

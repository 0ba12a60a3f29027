//! How long it takes to fall asleep: until it is frozen, until it is on disk; for how long a snapshot
//! stops a running sandbox; and how both grow with memory.

use std::time::Duration;

use tokio::time::Instant;
use torpor_client::{Client, Route};
use torpor_protocol::api::Standby;
use torpor_protocol::{State, Tier};

use crate::create::REST;
use crate::error::{Error, Result};
use crate::guest::{Guest, size};
use crate::load::{Summary, timed};
use crate::report::{Report, Start};
use crate::wake::{SIZES, cold_wake};
use crate::{Bench, awake, cost};

/// Megabytes in memory, and of a quick run.
const GROWTH: [u64; 4] = [20, 100, 300, 1000];
const QUICK_GROWTH: [u64; 2] = [20, 100];
const GROWTH_ROUNDS: u32 = 3;
/// Long enough for the watcher to be there before it happens.
const IDLE_AFTER_MS: u64 = 200;

pub(crate) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    for megabytes in SIZES {
        let guest = Guest::start(bench, client, megabytes).await?;
        frozen(bench, &guest, megabytes, report).await?;
        durable(bench, &guest, megabytes, report).await?;
        snapshots(bench, &guest, megabytes, report).await?;
        guest.delete().await?;
    }
    let sizes: &[u64] = if bench.quick { &QUICK_GROWTH } else { &GROWTH };
    for megabytes in sizes {
        growth(bench, client, *megabytes, report).await?;
    }
    Ok(())
}

/// From the moment it counts as idle until the API says that it sleeps.
async fn frozen(bench: &Bench, guest: &Guest, megabytes: u64, report: &mut Report) -> Result<()> {
    guest.update(soon()).await?;
    let mut times = Vec::new();
    for _ in 0..bench.slow_rounds() {
        guest.ask().await?;
        let due = Instant::now() + Duration::from_millis(IDLE_AFTER_MS);
        let status = guest.wait(State::Asleep).await?;
        if status.durable {
            return Err(Error::failed("it was saved before anybody could see it frozen"));
        }
        times.push(due.elapsed());
    }
    guest.ask().await?;
    guest.update(awake()).await?;
    let name = format!("idle → frozen, {}", size(megabytes));
    report.promised(name, Start::Running, Summary::of(&times), 5.0);
    Ok(())
}

/// Frozen soon after the last request.
pub(crate) fn soon() -> Standby {
    Standby { idle_after_ms: Some(Some(IDLE_AFTER_MS)), ..Standby::default() }
}

/// From the request to sleep until all of it is on disk.
async fn durable(bench: &Bench, guest: &Guest, megabytes: u64, report: &mut Report) -> Result<()> {
    let mut times = Vec::new();
    for _ in 0..bench.slow_rounds() {
        guest.ask().await?;
        times.push(timed(guest.sleep(Tier::Warm)).await?);
    }
    guest.ask().await?;
    let name = format!("sleep → durable, {}", size(megabytes));
    report.promised(name, Start::Running, Summary::of(&times), 200.0);
    Ok(())
}

async fn snapshots(
    bench: &Bench,
    guest: &Guest,
    megabytes: u64,
    report: &mut Report,
) -> Result<()> {
    let (mut pauses, mut whole) = (Vec::new(), Vec::new());
    for _ in 0..bench.slow_rounds() {
        guest.ask().await?;
        let begun = Instant::now();
        let snapshot = guest.snapshot(bench).await?;
        whole.push(begun.elapsed());
        pauses.push(Duration::from_secs_f64(snapshot.pause_ms / 1e3));
        guest.client.delete(&Route::snapshot(&snapshot.id)).await?;
    }
    let limit = if megabytes == 0 { 60.0 } else { 110.0 };
    let name = format!("pause of a live snapshot, {}", size(megabytes));
    report.promised(name, Start::Running, Summary::of(&pauses), limit);
    let name = format!("live snapshot, {}", size(megabytes));
    report.latency(name, Start::Running, Summary::of(&whole));
    Ok(())
}

/// The same with more and more memory.
async fn growth(bench: &Bench, client: &Client, megabytes: u64, report: &mut Report) -> Result<()> {
    let guest = Guest::start(bench, client, megabytes).await?;
    let (mut sleeps, mut wakes, mut saved_bytes) = (Vec::new(), Vec::new(), 0);
    for _ in 0..bench.rounds.min(GROWTH_ROUNDS) {
        sleeps.push(timed(guest.sleep(Tier::Warm)).await?);
        saved_bytes = guest.status().await?.saved_bytes;
        guest.sleep(Tier::Cold).await?;
        tokio::time::sleep(REST).await;
        wakes.push(cold_wake(&guest).await?.0);
    }
    report.latency(format!("growth: sleep, {megabytes} MB"), Start::Running, Summary::of(&sleeps));
    report.latency(format!("growth: wake, {megabytes} MB"), Start::Cold, Summary::of(&wakes));
    let name = format!("growth: save on disk, {megabytes} MB");
    report.figure(name, cost::megabytes(saved_bytes), "MB");
    guest.delete().await
}

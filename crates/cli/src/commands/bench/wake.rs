//! From a request to a sleeping sandbox to the agent's answer: from memory, from swap and from disk,
//! beside runsc's own command line, and where the time of a cold wake goes.

use std::time::Duration;

use tokio::time::Instant;
use torpor_protocol::api::UsageReport;
use torpor_protocol::{State, Status, Tier};

use super::Bench;
use super::create::{REST, start_of};
use super::guest::{Guest, size};
use super::load::{Summary, timed};
use super::report::{Profile, Report, Start};
use super::runsc::{CommandLine, Times};
use super::standby::{soon, update};
use crate::client::Client;
use crate::error::{Error, Result};

/// A Python process and little else; one with 100 MB.
pub(super) const SIZES: [u64; 2] = [0, 100];
/// Wakes from memory per round: they are quick, and their tail is a promise.
const WARM_PER_ROUND: u32 = 4;
/// What is left of a sandbox in memory when it is in swap.
const PAGED_OUT_BYTES: u64 = 8_000_000;
/// How long it may take to get there.
const PAGE_OUT_MAX: Duration = Duration::from_secs(30);
/// How long it takes to remove the save that a new one replaces, which keeps a disk busy.
const REPLACED: Duration = Duration::from_millis(100);
const LOOK: Duration = Duration::from_millis(100);

pub(super) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    for megabytes in SIZES {
        let guest = Guest::start(bench, client, megabytes).await?;
        warm(bench, client, &guest, megabytes, report).await?;
        if swap() {
            paged_out(bench, client, &guest, megabytes, report).await?;
        }
        cold(bench, client, &guest, megabytes, report).await?;
        guest.delete(client).await?;
    }
    if !swap() {
        report.note("wake, paged out to swap: skipped, this host has no swap");
    }
    Ok(())
}

async fn warm(
    bench: &Bench,
    client: &Client,
    guest: &Guest,
    megabytes: u64,
    report: &mut Report,
) -> Result<()> {
    let mut times = Vec::new();
    update(client, guest, soon()).await?;
    for _ in 0..bench.rounds * WARM_PER_ROUND {
        guest.wait(client, State::Asleep).await?;
        times.push(timed(guest.ask(client)).await?);
    }
    update(client, guest, super::awake()).await?;
    let mut saved = Vec::new();
    for _ in 0..bench.rounds * WARM_PER_ROUND {
        guest.sleep(client, Tier::Warm).await?;
        tokio::time::sleep(REPLACED).await;
        saved.push(timed(guest.ask(client)).await?);
    }
    let mut awake = Vec::new();
    for _ in 0..bench.rounds {
        awake.push(timed(guest.ask(client)).await?);
    }
    let summary = Summary::of(&times);
    let name = size(megabytes);
    report.at_most(&format!("wake from warm, {name}, p50"), summary.p50, 3.0, "ms");
    report.at_most(&format!("wake from warm, {name}, p99"), summary.p99, 25.0, "ms");
    report.latency(format!("wake, {name}"), Start::Warm, summary);
    let summary = Summary::of(&saved);
    report.at_most(&format!("wake from warm, saved, {name}, p50"), summary.p50, 3.0, "ms");
    report.at_most(&format!("wake from warm, saved, {name}, p99"), summary.p99, 15.0, "ms");
    report.latency(format!("wake, saved, {name}"), Start::Warm, summary);
    report.latency(format!("  the same request, {name}"), Start::Running, Summary::of(&awake));
    Ok(())
}

/// With swap, the daemon pages out what sleeps: a wake right after is one from memory, a wake when
/// that is done one from swap.
async fn paged_out(
    bench: &Bench,
    client: &Client,
    guest: &Guest,
    megabytes: u64,
    report: &mut Report,
) -> Result<()> {
    let mut times = Vec::new();
    for _ in 0..bench.slow_rounds() {
        guest.sleep(client, Tier::Warm).await?;
        let deadline = Instant::now() + PAGE_OUT_MAX;
        loop {
            let usage: UsageReport = client.get(&guest.route().then("/usage")).await?;
            if usage.memory_bytes < PAGED_OUT_BYTES {
                break;
            }
            if Instant::now() > deadline {
                let left = usage.memory_bytes;
                report.note(format!("wake, paged out: skipped, {left} bytes stay in memory"));
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
        }
        times.push(timed(guest.ask(client)).await?);
    }
    let summary = Summary::of(&times);
    let name = size(megabytes);
    report.at_most(&format!("wake, paged out, {name}, p50"), summary.p50, 10.0, "ms");
    report.latency(format!("wake, {name}"), Start::PagedOut, summary);
    Ok(())
}

/// Ours and the command line's take turns.
async fn cold(
    bench: &Bench,
    client: &Client,
    guest: &Guest,
    megabytes: u64,
    report: &mut Report,
) -> Result<()> {
    let name = size(megabytes);
    let runsc = CommandLine::like(&guest.id, megabytes).await?;
    let (mut runsc, made) = runsc.unzip();
    let mut times = Times::default();
    let (mut prepared, mut unprepared) = (Profile::default(), Profile::default());
    for _ in 0..bench.slow_rounds() {
        guest.sleep(client, Tier::Cold).await?;
        if let Some(runsc) = &mut runsc {
            runsc.round(&mut times).await?;
        }
        tokio::time::sleep(REST).await;
        let (time, status) = cold_wake(client, guest).await?;
        match start_of(&status) {
            Start::Shell => prepared.add(time, &status.start_steps),
            Start::Nothing
            | Start::Pool
            | Start::Running
            | Start::Warm
            | Start::PagedOut
            | Start::Cold
            | Start::Snapshot => unprepared.add(time, &status.start_steps),
        }
    }
    let ours = report_cold(report, &name, &prepared, &unprepared);
    if let Some(floor) = prepared.floor() {
        report.figure(
            format!("wake from cold − the engine's restore, {name}, p50"),
            ours.p50 - floor.p50,
            "ms",
        );
    }
    let limit = if megabytes == 0 { 60.0 } else { 190.0 };
    report.at_most(&format!("wake from cold, {name}, p50"), ours.p50, limit, "ms");
    let Some(made) = made else {
        report.note("runsc beside it: skipped, the daemon is not on this host");
        return Ok(());
    };
    let (restore, exec, both) =
        (Summary::of(&times.restore), Summary::of(&times.exec), Summary::of(&times.both));
    report.at_most(&format!("  … / runsc restore + exec, {name}"), ours.p50 / both.p50, 0.5, "×");
    report.figure(
        format!("wake from cold / runsc restore alone, {name}"),
        ours.p50 / restore.p50,
        "×",
    );
    report.latency(format!("runsc restore + exec, {name}"), Start::Cold, both);
    report.latency("  runsc restore", Start::Cold, restore);
    report.latency("  runsc exec cat", Start::Running, exec);
    let create = Summary::of(&[made.create]);
    report.latency(format!("runsc create + start, {name}"), Start::Nothing, create);
    let checkpoint = Summary::of(&[made.checkpoint]);
    report.latency(format!("runsc checkpoint, {name}"), Start::Running, checkpoint);
    Ok(())
}

/// With its parts: the restore call is what the engine itself needs.
fn report_cold(
    report: &mut Report,
    name: &str,
    prepared: &Profile,
    unprepared: &Profile,
) -> Summary {
    let first = format!("wake, {name}");
    let second = format!("wake, {name}, nothing prepared");
    match (prepared.is_empty(), unprepared.is_empty()) {
        (true, _) => unprepared.report(report, &second, Start::Cold, true),
        (false, true) => prepared.report(report, &first, Start::Cold, true),
        (false, false) => {
            unprepared.report(report, &second, Start::Cold, false);
            prepared.report(report, &first, Start::Cold, true)
        }
    }
}

/// A request that wakes it from disk, and where its time went.
pub(super) async fn cold_wake(client: &Client, guest: &Guest) -> Result<(Duration, Status)> {
    let before = guest.status(client).await?;
    if before.tier != Some(Tier::Cold) {
        return Err(Error::failed(format!("it does not sleep on disk but as {:?}", before.tier)));
    }
    let time = timed(guest.ask(client)).await?;
    Ok((time, guest.status(client).await?))
}

fn swap() -> bool {
    std::fs::read_to_string("/proc/swaps").is_ok_and(|swaps| swaps.lines().count() > 1)
}

//! From a request to a sleeping sandbox to the agent's answer: from memory, from swap and from disk,
//! beside runsc's own command line, and where the time of a cold wake goes.

use std::time::Duration;

use tokio::time::Instant;
use torpor_client::Client;
use torpor_protocol::api::UsageReport;
use torpor_protocol::{State, Status, Tier};

use crate::Bench;
use crate::create::{REST, start_of};
use crate::error::{Error, Result};
use crate::guest::{Guest, size};
use crate::load::{Summary, timed};
use crate::report::{Profile, Report, Start};
use crate::runsc::{CommandLine, Times};
use crate::standby::soon;

/// A Python process and little else; one with 100 MB.
pub(crate) const SIZES: [u64; 2] = [0, 100];
/// Wakes from memory per round: they are quick, and their tail is a promise.
const WARM_PER_ROUND: u32 = 4;
/// What is left of a sandbox in memory when it is in swap.
const PAGED_OUT_BYTES: u64 = 8_000_000;
/// How long it may take to get there.
const PAGE_OUT_MAX: Duration = Duration::from_secs(30);
/// How long it takes to remove the save that a new one replaces, which keeps a disk busy.
const REPLACED: Duration = Duration::from_millis(100);
const LOOK: Duration = Duration::from_millis(100);

pub(crate) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    for megabytes in SIZES {
        let guest = Guest::start(bench, client, megabytes).await?;
        warm(bench, &guest, megabytes, report).await?;
        if swap() {
            swapped(bench, &guest, megabytes, report).await?;
        }
        cold(bench, &guest, megabytes, report).await?;
        guest.delete().await?;
    }
    if !swap() {
        report.note("wake, paged out to swap: skipped, this host has no swap");
    }
    Ok(())
}

async fn warm(bench: &Bench, guest: &Guest, megabytes: u64, report: &mut Report) -> Result<()> {
    let rounds = bench.rounds * WARM_PER_ROUND;
    let (mut times, mut saved, mut awake) = (Vec::new(), Vec::new(), Vec::new());
    guest.update(soon()).await?;
    for _ in 0..rounds {
        guest.wait(State::Asleep).await?;
        times.push(timed(guest.ask()).await?);
    }
    guest.update(crate::awake()).await?;
    for _ in 0..rounds {
        guest.sleep(Tier::Warm).await?;
        tokio::time::sleep(REPLACED).await;
        saved.push(timed(guest.ask()).await?);
    }
    for _ in 0..bench.rounds {
        awake.push(timed(guest.ask()).await?);
    }
    let name = size(megabytes);
    for (how, times, p99) in [("", &times, 25.0), ("saved, ", &saved, 15.0)] {
        let summary = Summary::of(times);
        report.at_most(&format!("wake from warm, {how}{name}, p50"), summary.p50, 3.0, "ms");
        report.at_most(&format!("wake from warm, {how}{name}, p99"), summary.p99, p99, "ms");
        report.latency(format!("wake, {how}{name}"), Start::Warm, summary);
    }
    report.latency(format!("  the same request, {name}"), Start::Running, Summary::of(&awake));
    Ok(())
}

/// With swap, the daemon pages out what sleeps: a wake right after is one from memory, a wake when
/// that is done one from swap.
async fn swapped(bench: &Bench, guest: &Guest, megabytes: u64, report: &mut Report) -> Result<()> {
    let mut times = Vec::new();
    for _ in 0..bench.slow_rounds() {
        guest.sleep(Tier::Warm).await?;
        let deadline = Instant::now() + PAGE_OUT_MAX;
        loop {
            let usage: UsageReport = guest.client.get(&guest.route().then("/usage")).await?;
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
        times.push(timed(guest.ask()).await?);
    }
    let summary = Summary::of(&times);
    let name = size(megabytes);
    report.at_most(&format!("wake, paged out, {name}, p50"), summary.p50, 10.0, "ms");
    report.latency(format!("wake, {name}"), Start::PagedOut, summary);
    Ok(())
}

/// Ours and the command line's take turns.
async fn cold(bench: &Bench, guest: &Guest, megabytes: u64, report: &mut Report) -> Result<()> {
    let name = size(megabytes);
    let runsc = CommandLine::like(&guest.id, megabytes).await?;
    let (mut runsc, made) = runsc.unzip();
    let mut times = Times::default();
    let (mut prepared, mut unprepared) = (Profile::default(), Profile::default());
    for _ in 0..bench.slow_rounds() {
        guest.sleep(Tier::Cold).await?;
        if let Some(runsc) = &mut runsc {
            runsc.round(&mut times).await?;
        }
        tokio::time::sleep(REST).await;
        let (time, status) = cold_wake(guest).await?;
        let ready = start_of(&status) == Start::Prepared;
        let profile = if ready { &mut prepared } else { &mut unprepared };
        profile.add(time, &status.start_steps);
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
pub(crate) async fn cold_wake(guest: &Guest) -> Result<(Duration, Status)> {
    let before = guest.status().await?;
    if before.tier != Some(Tier::Cold) {
        return Err(Error::failed(format!("it does not sleep on disk but as {:?}", before.tier)));
    }
    let time = timed(guest.ask()).await?;
    Ok((time, guest.status().await?))
}

fn swap() -> bool {
    std::fs::read_to_string("/proc/swaps").is_ok_and(|swaps| swaps.lines().count() > 1)
}

//! A volume beside the sandbox's own disk and a directory of this host, in one run; and what it costs to have one.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::process;
use tokio::time::Instant;
use torpor_client::{Client, Route};
use torpor_protocol::Status;
use torpor_protocol::api::{Command, RunResult};

use crate::Bench;
use crate::error::{Error, Result};
use crate::load::Summary;
use crate::report::{Report, Start};

/// Prints how many seconds each kind of work took in a directory.
const WORK: &str = include_str!("volumes.py");
const SIZE_MIB: u64 = 1024;
/// How much slower than the sandbox's own disk a volume may be.
const SLOWER_MAX: f64 = 2.0;
/// What a bench makes of a volume must fit this often.
const ROUNDS_MAX: u32 = 5;

type Times = BTreeMap<String, Vec<f64>>;

pub(crate) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let name = bench.fresh_name();
    let volume = json!({"name": name, "size_mib": SIZE_MIB});
    let _: Value = client.post(&Route::new("/v1/volumes"), &volume).await?;
    let status = bench.create(client).await?;
    let measured = compare(bench, client, report, &status, name.as_str()).await;
    client.delete(&Route::sandbox(&status.id)).await?;
    client.delete(&Route::new(&format!("/v1/volumes/{name}"))).await?;
    measured
}

async fn compare(
    bench: &Bench,
    client: &Client,
    report: &mut Report,
    status: &Status,
    volume: &str,
) -> Result<()> {
    attaching(bench, client, report, status, volume).await?;
    let (mut host, mut own, mut slot) = (Times::new(), Times::new(), Times::new());
    // In turns: a host that is busy for a while is so for all of them.
    for _ in 0..bench.slow_rounds().min(ROUNDS_MAX) {
        add(&mut own, inside(client, status, "/root/bench").await?);
        add(&mut slot, inside(client, status, "/data/bench").await?);
        match here().await {
            Some(times) => add(&mut host, times),
            None => report.note("there is no python3 here to try a directory of this host"),
        }
    }
    if !slot.contains_key("npm install") {
        report.note("npm install is left out: the image has no npm (try --image of one that has)");
    }
    for (work, times) in &slot {
        let (own, volume) = (median(&own, work), median_of(times));
        for (place, seconds) in
            [("this host", median(&host, work)), ("own disk", own), ("volume", volume)]
        {
            report.figure(format!("{work}, {place}"), seconds * 1e3, "ms");
        }
        let ratio = volume / own;
        match work.as_str() {
            "1,000 creates" | "git clone" => {
                report.at_most(&format!("{work}, volume / own disk"), ratio, SLOWER_MAX, "×");
            }
            _ => report.figure(format!("{work}, volume / own disk"), ratio, "×"),
        }
    }
    Ok(())
}

/// To and from a sandbox that runs. Leaves it attached.
async fn attaching(
    bench: &Bench,
    client: &Client,
    report: &mut Report,
    status: &Status,
    volume: &str,
) -> Result<()> {
    let mounts = Route::sandbox(&status.id).then("/mounts");
    let request = json!({"volume": volume, "path": "/data"});
    let (mut attached, mut detached) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds {
        let begun = Instant::now();
        let _: Value = client.post(&mounts, &request).await?;
        attached.push(begun.elapsed());
        let begun = Instant::now();
        client.delete(&mounts.clone().query("path", "/data")).await?;
        detached.push(begun.elapsed());
    }
    report.latency("attach", Start::Running, Summary::of(&attached));
    report.latency("detach", Start::Running, Summary::of(&detached));
    let _: Value = client.post(&mounts, &request).await?;
    Ok(())
}

async fn inside(client: &Client, status: &Status, dir: &str) -> Result<BTreeMap<String, f64>> {
    let command = ["python3", "-c", WORK, dir].map(str::to_owned).to_vec();
    let run = Command { command, ..Command::default() };
    let ran: RunResult = client.post(&Route::sandbox(&status.id).then("/run"), &run).await?;
    parse(ran.stdout.as_bytes()).ok_or_else(|| {
        Error::failed(format!("the work in {dir} did not end well: {} {}", ran.stdout, ran.stderr))
    })
}

/// The same on this host, if it can.
async fn here() -> Option<BTreeMap<String, f64>> {
    let dir = std::env::temp_dir().join(format!("torpor-bench-{}", std::process::id()));
    let mut python = process::Command::new("python3");
    python.args(["-c", WORK]).arg(dir).stdin(Stdio::null()).stderr(Stdio::null());
    let output = tokio::time::timeout(Duration::from_secs(120), python.output()).await;
    parse(&output.ok()?.ok()?.stdout)
}

fn parse(output: &[u8]) -> Option<BTreeMap<String, f64>> {
    serde_json::from_slice(output).ok()
}

fn add(all: &mut Times, once: BTreeMap<String, f64>) {
    for (work, seconds) in once {
        all.entry(work).or_default().push(seconds);
    }
}

fn median(times: &Times, work: &str) -> f64 {
    times.get(work).map_or(f64::NAN, |times| median_of(times))
}

fn median_of(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

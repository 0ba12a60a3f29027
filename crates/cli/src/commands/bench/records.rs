//! What cold sandboxes cost the daemon when there are thousands: time of a listing, time of a start,
//! memory.
//!
//! Making thousands through the API would take an hour, so this has a daemon and a data directory of
//! its own. One sandbox is made, saved and put to sleep for real; the ledger gets as many records
//! that name its save, which is what forks that never woke are.

use std::time::Duration;

use serde::Deserialize;
use tokio::time::Instant;
use torpor_lifecycle::ledger::SandboxLedger as _;
use torpor_lifecycle::store::Record;
use torpor_protocol::snapshot::Sleep;
use torpor_protocol::{SandboxId, Status, Tier};
use torpor_store::{Layout, Ledger};

use super::Bench;
use super::home::Home;
use super::load::{Summary, timed};
use super::report::{Report, Start};
use crate::client::{Client, Route};
use crate::commands::sandboxes;
use crate::error::{Error, Result};

const COUNTS: [usize; 4] = [10, 100, 1000, 10_000];
const QUICK_COUNTS: [usize; 3] = [10, 100, 1000];
/// Listings of all, each.
const LISTINGS: u32 = 10;
/// Between the start and the measure of memory: what runs once at the start has run.
const SETTLE: Duration = Duration::from_secs(1);

pub(super) async fn measure(bench: &Bench, report: &mut Report) -> Result<()> {
    if !Home::possible() {
        report.note("many cold records: skipped, a daemon of its own needs root");
        return Ok(());
    }
    let home = Home::make(None)?;
    let model = home.sleeper().await?;
    let counts: &[usize] = if bench.quick { &QUICK_COUNTS } else { &COUNTS };
    let mut present = 1;
    for count in counts {
        home.record(&model, count - present).await?;
        present = *count;
        let begun = Instant::now();
        let daemon = home.serve().await?;
        let started = begun.elapsed();
        let mut listings = Vec::new();
        for _ in 0..LISTINGS {
            listings.push(timed(list(&daemon.client, *count)).await?);
        }
        tokio::time::sleep(SETTLE).await;
        let memory = daemon.processes().memory();
        report.latency(
            format!("growth: list {count} records"),
            Start::Cold,
            Summary::of(&listings),
        );
        let name = format!("growth: start of a daemon with {count} records");
        report.figure(name, started.as_secs_f64() * 1e3, "ms");
        report.figure(format!("growth: daemon's memory, {count} records"), memory, "MB");
        daemon.stop().await?;
    }
    Ok(())
}

/// What is read of each: the daemon is measured, not who reads its answer.
#[derive(Deserialize)]
struct Row {
    tier: Option<Tier>,
}

async fn list(client: &Client, count: usize) -> Result<()> {
    let all: Vec<Row> = sandboxes::rows(client, &[], None).await?;
    let cold = all.iter().filter(|row| row.tier == Some(Tier::Cold)).count();
    if cold == count {
        return Ok(());
    }
    Err(Error::failed(format!("{cold} of {count} sandboxes are listed as cold")))
}

impl Home {
    /// A sandbox with nothing in it but the agent, made for real and put to sleep; its record.
    async fn sleeper(&self) -> Result<Record> {
        let daemon = self.serve().await?;
        let status = daemon.sandbox().await?;
        let route = Route::sandbox(&status.id).then("/sleep");
        let _: Status = daemon.client.post(&route, &Sleep { cold: true }).await?;
        daemon.stop().await?;
        let (layout, ledger) = self.open().await?;
        let record = ledger.find_sandbox(&status.id).await.map_err(|error| stored(&error))?;
        ledger.close().await;
        drop(layout);
        record.ok_or_else(|| Error::failed("the daemon forgot its sandbox"))
    }

    /// So many more like this one.
    async fn record(&self, model: &Record, count: usize) -> Result<()> {
        let (layout, ledger) = self.open().await?;
        let owner = ledger.take_over().await.map_err(|error| stored(&error))?;
        for _ in 0..count {
            let record = Record { id: SandboxId::random(), ..model.clone() };
            ledger.create_sandbox(&owner, &record).await.map_err(|error| stored(&error))?;
        }
        ledger.close().await;
        drop(layout);
        Ok(())
    }

    async fn open(&self) -> Result<(Layout, Ledger)> {
        let layout = Layout::open(&self.data()).map_err(|error| stored(&error))?;
        let ledger = Ledger::open(&layout).await.map_err(|error| stored(&error))?;
        Ok((layout, ledger))
    }
}

fn stored(error: &torpor_lifecycle::store::StoreError) -> Error {
    Error::failed(torpor_lifecycle::chain(error))
}

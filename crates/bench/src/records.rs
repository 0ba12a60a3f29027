//! What cold sandboxes and snapshots cost the daemon when there are thousands: time of a listing and of a
//! look at one of them, time of a start, memory.
//!
//! Making thousands through the API would take an hour, so this has a daemon and a data directory of
//! its own. One sandbox is made, saved and put to sleep for real; the ledger gets as many records
//! that name its save, which is what forks that never woke are.

use std::ops::Range;
use std::time::Duration;

use serde::Deserialize;
use tokio::time::Instant;
use torpor_client::{Client, Route};
use torpor_lifecycle::store::{Record, SnapshotRecord};
use torpor_protocol::snapshot::{Sleep, TakeSnapshot};
use torpor_protocol::{Name, SandboxId, Snapshot, SnapshotId, SnapshotRef, Status, Tier};
use torpor_store::{Layout, Ledger};

use crate::error::{Error, Result};
use crate::home::Home;
use crate::load::{Summary, timed};
use crate::report::{Report, Start};
use crate::{Bench, PREFIX};

const COUNTS: [usize; 4] = [10, 100, 1000, 10_000];
const QUICK_COUNTS: [usize; 3] = [10, 100, 1000];
/// Listings of all, each.
const LISTINGS: u32 = 10;
/// First pages, and looks at one by its name, each.
const LOOKS: u32 = 200;
/// Between the start and the measure of memory: what runs once at the start has run.
const SETTLE: Duration = Duration::from_secs(1);

pub(crate) async fn measure(bench: &Bench, report: &mut Report) -> Result<()> {
    if !Home::possible() {
        report.note("many cold records: skipped, a daemon of its own needs root");
        return Ok(());
    }
    let home = Home::make(None)?;
    let model = home.sleeper().await?;
    let counts: &[usize] = if bench.quick { &QUICK_COUNTS } else { &COUNTS };
    let mut present = 0;
    for count in counts {
        home.record(&model, present..*count).await?;
        present = *count;
        let begun = Instant::now();
        let daemon = home.serve().await?;
        let started = begun.elapsed();
        look_up(&daemon.client, *count, report).await?;
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

/// What the records are copies of.
struct Model {
    sandbox: Record,
    snapshot: SnapshotRecord,
}

/// A first page, and one of them by its name.
async fn look_up(client: &Client, count: usize, report: &mut Report) -> Result<()> {
    for kind in ["sandboxes", "snapshots"] {
        let all = Route::new(&format!("/v1/{kind}"));
        let page = async |_| -> Result<()> {
            let page = all.clone().query("limit", "100");
            Ok(client.get::<serde::de::IgnoredAny>(&page).await.map(drop)?)
        };
        let one = async |round: u32| -> Result<()> {
            let name = name_of(round as usize % count);
            let one = all.clone().part(name.as_str());
            Ok(client.get::<serde::de::IgnoredAny>(&one).await.map(drop)?)
        };
        let (mut pages, mut ones) = (Vec::new(), Vec::new());
        for round in 0..LOOKS {
            pages.push(timed(page(round)).await?);
            ones.push(timed(one(round)).await?);
        }
        let name = format!("growth: first page of {count} {kind}");
        report.latency(name, Start::Cold, Summary::of(&pages));
        let name = format!("growth: one of {count} {kind} by name");
        report.latency(name, Start::Cold, Summary::of(&ones));
    }
    Ok(())
}

fn name_of(number: usize) -> Name {
    format!("{PREFIX}{number}").parse().expect("letters, digits and dashes are a name")
}

/// What is read of each: the daemon is measured, not who reads its answer.
#[derive(Deserialize)]
struct Row {
    tier: Option<Tier>,
}

async fn list(client: &Client, count: usize) -> Result<()> {
    let all: Vec<Row> = client.sandboxes(&[], None).await?;
    let cold = all.iter().filter(|row| row.tier == Some(Tier::Cold)).count();
    // With the one that was made for real.
    if cold == count + 1 {
        return Ok(());
    }
    Err(Error::failed(format!("{cold} of {count} sandboxes are listed as cold")))
}

impl Home {
    /// A sandbox with nothing in it but the agent, made for real, saved and put to sleep.
    async fn sleeper(&self) -> Result<Model> {
        let daemon = self.serve().await?;
        let status = daemon.sandbox().await?;
        let route = Route::sandbox(&status.id).then("/snapshots");
        let taken: Snapshot = daemon.client.post(&route, &TakeSnapshot::default()).await?;
        let route = Route::sandbox(&status.id).then("/sleep");
        let _: Status = daemon.client.post(&route, &Sleep { cold: true }).await?;
        daemon.stop().await?;
        let (layout, ledger) = self.open().await?;
        let sandbox = ledger.find_sandbox(&status.id).await.map_err(|error| stored(&error))?;
        let snapshot = ledger.find_snapshot(&SnapshotRef::Id(taken.id)).await;
        let snapshot = snapshot.map_err(|error| stored(&error))?;
        ledger.close().await;
        drop(layout);
        let model = sandbox.zip(snapshot).map(|(sandbox, snapshot)| Model { sandbox, snapshot });
        model.ok_or_else(|| Error::failed("the daemon forgot its sandbox"))
    }

    /// More like this one, of these numbers.
    async fn record(&self, model: &Model, numbers: Range<usize>) -> Result<()> {
        let (layout, ledger) = self.open().await?;
        let owner = ledger.take_over().await.map_err(|error| stored(&error))?;
        for number in numbers {
            let (mut sandbox, mut snapshot) = (model.sandbox.clone(), model.snapshot.clone());
            sandbox.id = SandboxId::random();
            sandbox.spec.name = Some(name_of(number));
            ledger.create_sandbox(&owner, &sandbox).await.map_err(|error| stored(&error))?;
            snapshot.snapshot.id = SnapshotId::random();
            snapshot.snapshot.name = Some(name_of(number));
            ledger.record_snapshot(&snapshot).await.map_err(|error| stored(&error))?;
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

//! What cold sandboxes cost the daemon when there are thousands: time of a listing, time of a start,
//! memory.
//!
//! Making thousands through the API would take an hour, so this has a daemon and a data directory of
//! its own. One sandbox is made, saved and put to sleep for real; the ledger gets as many records
//! that name its save, which is what forks that never woke are.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{Instant, timeout};
use torpor_lifecycle::store::{Ledger as _, Record};
use torpor_protocol::SandboxId;
use torpor_protocol::api::{CreateSandbox, ImageEvent};
use torpor_protocol::snapshot::Sleep;
use torpor_protocol::{Status, Tier};
use torpor_store::{Layout, Ledger};

use super::cost::Processes;
use super::load::{Summary, timed};
use super::report::{Report, Start};
use super::{Bench, awake};
use crate::client::{Client, Route, body};
use crate::commands::sandboxes;
use crate::error::{Error, Result};

const COUNTS: [usize; 4] = [10, 100, 1000, 10_000];
const QUICK_COUNTS: [usize; 3] = [10, 100, 1000];
/// Listings of all, each.
const LISTINGS: u32 = 10;
/// How long the daemon may take to listen, and to stop.
const START_MAX: Duration = Duration::from_secs(60);
const STOP_MAX: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);
/// Between the start and the measure of memory: what runs once at the start has run.
const SETTLE: Duration = Duration::from_secs(1);
const IMAGE: &str = "empty";

pub(super) async fn measure(bench: &Bench, report: &mut Report) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        report.note("many cold records: skipped, a daemon of its own needs root");
        return Ok(());
    }
    let home = Home::make()?;
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

/// A data directory that goes when it is dropped, with every machine that was begun in it.
struct Home {
    dir: PathBuf,
}

impl Home {
    fn make() -> Result<Self> {
        let dir = std::env::temp_dir().join(format!("torpor-bench-{}", std::process::id()));
        std::fs::create_dir_all(&dir).map_err(|error| Error::local("make a directory", error))?;
        Ok(Self { dir })
    }

    fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    fn torpor(&self, verb: &str) -> Result<std::process::Command> {
        let program =
            std::env::current_exe().map_err(|error| Error::local("find torpor", error))?;
        let mut command = std::process::Command::new(program);
        command.arg(verb).arg("--data-dir").arg(self.data());
        command.arg("--runtime-dir").arg(self.dir.join("run"));
        command.env_remove("TORPOR_CONFIG").stdin(Stdio::null()).stderr(Stdio::null());
        Ok(command)
    }

    async fn serve(&self) -> Result<Daemon> {
        let mut command = Command::from(self.torpor("serve")?);
        command.args(["--listen", "127.0.0.1:0"]).stdout(Stdio::piped());
        let child = command.spawn().map_err(|error| Error::local("start a daemon", error))?;
        let mut child = Reaped(child);
        let stdout = child.0.stdout.take().expect("it is a pipe");
        let mut said = BufReader::new(stdout).lines();
        let line = timeout(START_MAX, said.next_line()).await;
        let line = line.map_err(|_| Error::failed("a daemon of its own did not start"))?;
        let line = line.ok().flatten().unwrap_or_default();
        let address = line.split_whitespace().find(|word| word.starts_with("http://"));
        let address = address.ok_or_else(|| Error::failed("a daemon of its own did not start"))?;
        let server = address.parse().map_err(Error::failed)?;
        let client = Client::new(server, None)?;
        // It listens before it knows its sandboxes.
        let _: torpor_protocol::api::Info = client.get(&Route::new("/v1/info")).await?;
        Ok(Daemon { child, client })
    }

    /// A sandbox with nothing in it but the agent, made for real and put to sleep; its record.
    async fn sleeper(&self) -> Result<Record> {
        let daemon = self.serve().await?;
        let client = &daemon.client;
        let route = Route::new("/v1/images/import").query("name", IMAGE);
        let mut events = client
            .lines::<ImageEvent>(http::Method::POST, &route, body::full(empty_root()))
            .await?;
        while let Some(event) = events.next().await? {
            if let ImageEvent::Error { error } = event {
                return Err(Error::Refused { body: Box::new(error), about: None });
            }
        }
        let wish = CreateSandbox {
            image: Some(IMAGE.to_owned()),
            standby: awake(),
            ..CreateSandbox::default()
        };
        let status: Status = client.post(&Route::new("/v1/sandboxes"), &wish).await?;
        let route = Route::sandbox(&status.id).then("/sleep");
        let _: Status = client.post(&route, &Sleep { cold: true }).await?;
        daemon.stop().await?;
        let (layout, ledger) = self.open().await?;
        let record = ledger.all().await.map_err(|error| stored(&error))?.pop();
        ledger.close().await;
        drop(layout);
        record.ok_or_else(|| Error::failed("the daemon forgot its sandbox"))
    }

    /// So many more like this one.
    async fn record(&self, model: &Record, count: usize) -> Result<()> {
        let (layout, ledger) = self.open().await?;
        for _ in 0..count {
            let record = Record { id: SandboxId::random(), ..model.clone() };
            ledger.record(&record).await.map_err(|error| stored(&error))?;
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

impl Drop for Home {
    fn drop(&mut self) {
        // The daemon is gone by now; what it left of its machines goes here.
        if let Ok(mut purge) = self.torpor("purge") {
            let _ = purge.arg("--yes").stdout(Stdio::null()).status();
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn stored(error: &torpor_lifecycle::store::StoreError) -> Error {
    Error::failed(torpor_lifecycle::chain(error))
}

/// A tar of a root filesystem with one empty directory.
fn empty_root() -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Directory);
    header.set_mode(0o755);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    let mut tar = tar::Builder::new(Vec::new());
    tar.append_data(&mut header, "tmp/", std::io::empty()).expect("memory takes any bytes");
    tar.into_inner().expect("memory takes any bytes")
}

struct Daemon {
    child: Reaped,
    client: Client,
}

impl Daemon {
    fn processes(&self) -> Processes {
        Processes::one(self.child.0.id().unwrap_or(0))
    }

    async fn stop(mut self) -> Result<()> {
        self.child.terminate();
        let ended = timeout(STOP_MAX, self.child.0.wait()).await;
        ended.map(drop).map_err(|_| Error::failed("a daemon of its own did not stop"))
    }
}

/// Ends with its owner.
struct Reaped(Child);

impl Reaped {
    fn terminate(&self) {
        let pid = self.0.id().and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
        if let Some(pid) = pid {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

impl Drop for Reaped {
    fn drop(&mut self) {
        self.terminate();
        let deadline = Instant::now() + STOP_MAX;
        while matches!(self.0.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = self.0.start_kill();
                return;
            }
            std::thread::sleep(LOOK);
        }
    }
}

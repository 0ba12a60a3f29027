//! `torpor bench`: the promises of SPECIFICATION.md, measured against a running daemon. Who is shown the
//! figures, and how, is the caller's.
//!
//! Latencies under load are taken from the moment a request was *due*, not from when it could be
//! sent, so a stall of the daemon shows in every request it delayed. What is compared runs
//! alternately in one go, because machines are noisy; read the ratios before the milliseconds.
//!
//! ```text
//!  create run files egress wake standby fork fleet burst soak ──▶ report ──▶ tables, JSON
//!      │             │        │         ├─▶ picture      latency over time
//!      ├─▶ guest, load  far     │         ├─▶ cost         what the daemon uses of its host
//!      └─▶ runsc              │         └─▶ records      a daemon of its own with many records
//!  timing connections ──▶ home     a daemon with a data directory of its own, also for records
//! ```
//!
//! Invariants
//! - everything that is made has a label or a name by which it is found and removed again, also
//!   after an error and after ctrl-c; what lives outside of the daemon goes when its owner drops;
//! - how a sandbox sleeps is looked up before its wake is timed.

mod connections;
mod cost;
mod create;
mod egress;
mod error;
mod far;
mod files;
mod fleet;
mod fork;
mod gateway;
mod guest;
mod home;
mod jobs;
mod load;
mod machine;
mod mcp;
mod picture;
mod pull;
mod records;
mod report;
mod run;
mod runsc;
mod soak;
mod standby;
mod timing;
mod volumes;
mod wake;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use clap::{Args, ValueEnum};
use futures_util::future::LocalBoxFuture;
use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};
use torpor_client::{Client, Route};
use torpor_protocol::api::{CreateSandbox, Info, Standby};
use torpor_protocol::snapshot::{PoolList, SnapshotList};
use torpor_protocol::{Name, SandboxId, StandbyPolicy, Status, api};

use error::Result;

pub use error::Error;
pub use report::Report;

/// The label of every sandbox a benchmark creates.
const LABEL: (&str, &str) = ("torpor.bench", "1");
/// The beginning of the names of its snapshots and pools.
const PREFIX: &str = "torpor-bench-";
/// Sandboxes removed at the same time.
const REMOVED_AT_ONCE: usize = 8;
/// Of a quick run.
const QUICK_ROUNDS: u32 = 5;
const QUICK_FLEET: u32 = 25;

/// Measure this daemon: percentiles and promises, as tables or JSON.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor bench --quick\n  \
    torpor bench run --rounds 500 --json run.json\n  torpor bench wake fleet --pictures .")]
pub struct Bench {
    /// What to measure; all of it if nothing is named.
    #[arg(value_enum)]
    what: Vec<What>,
    /// How often each thing is done.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: u32,
    /// Fewer rounds, smaller fleets: everything within two minutes.
    #[arg(long)]
    quick: bool,
    /// Requests a second in the part of `run` with a schedule.
    #[arg(long, default_value_t = 20.0)]
    rate: f64,
    /// Image of the sandboxes; it has Python.
    #[arg(long, default_value = api::DEFAULT_IMAGE)]
    image: String,
    /// Sandboxes in the fleet.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    fleet: u32,
    /// Connections of strangers.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    connections: u32,
    /// Write everything as JSON to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the fleet's latencies over time into this directory: wake-warm.svg, wake-cold.svg.
    #[arg(long, value_name = "DIR")]
    pictures: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// From the request to the first command's output: from a pool, a prepared machine, nothing.
    Create,
    /// /bin/true through the API, beside `runsc exec`.
    Run,
    /// A command through a sandbox's MCP server, beside the API. Only by name.
    Mcp,
    /// 100 MB up and down.
    Files,
    /// From standby to the first answer, beside the runsc command line.
    Wake,
    /// How long it takes to fall asleep and to be saved, and how that grows with memory.
    Standby,
    /// Forks of a memory snapshot, one to a hundred.
    Fork,
    /// The way out by name beside the direct one, many connections, a change of policy.
    Egress,
    /// Many sleeping sandboxes: woken over time and at one instant, and what they cost idle.
    Fleet,
    /// A call of an MCP server through the gateway, beside the call itself. Only by name.
    Gateway,
    /// A volume beside the sandbox's own disk and a directory of this host; attaching and detaching. Only by name.
    Volumes,
    /// An image of 300 MB from a registry on this host, beside the transfer alone, on a daemon of its own. Needs
    /// docker-registry. Only by name.
    Pull,
    /// Tasks of jobs from an image, a pool and a memory snapshot, a queue of a thousand, and a swarm whose set-up is
    /// paid once or each time. Only by name.
    Jobs,
    /// Many sandboxes asleep in memory, all asked at one instant, as often as `--rounds` says. Only by name.
    Burst,
    /// First requests right after wakes, `--rounds` in each of four sandboxes, and how many failed. Only by
    /// name.
    Soak,
    /// Whether the time of a refusal tells how much of a key or token was right, on a daemon of its own. Only
    /// by name.
    Timing,
    /// What strangers' connections that say nothing or half a request cost a daemon of its own, and who is
    /// still answered. Only by name.
    Connections,
}

impl What {
    /// In this order, from quick to slow.
    const ALL: [Self; 17] = [
        Self::Create,
        Self::Run,
        Self::Mcp,
        Self::Files,
        Self::Egress,
        Self::Wake,
        Self::Standby,
        Self::Fork,
        Self::Fleet,
        Self::Gateway,
        Self::Volumes,
        Self::Pull,
        Self::Jobs,
        Self::Burst,
        Self::Soak,
        Self::Timing,
        Self::Connections,
    ];

    /// Whether it is measured although nothing was named.
    fn is_usual(self) -> bool {
        !matches!(
            self,
            Self::Mcp
                | Self::Gateway
                | Self::Volumes
                | Self::Pull
                | Self::Jobs
                | Self::Burst
                | Self::Soak
                | Self::Timing
                | Self::Connections
        )
    }

    fn title(self) -> &'static str {
        match self {
            Self::Create => "create to first output",
            Self::Run => "run /bin/true, beside runsc exec",
            Self::Mcp => "MCP beside the API",
            Self::Files => "100 MB up and down",
            Self::Egress => "the way out",
            Self::Wake => "wake, beside runsc restore",
            Self::Standby => "sleep and snapshot",
            Self::Fork => "fork",
            Self::Fleet => "the fleet",
            Self::Gateway => "the MCP gateway, beside the call itself",
            Self::Volumes => "volumes, beside disk and host",
            Self::Pull => "an image of a registry",
            Self::Jobs => "tasks of jobs",
            Self::Burst => "bursts",
            Self::Soak => "first requests after wakes",
            Self::Timing => "timing of refusals",
            Self::Connections => "connections of strangers",
        }
    }
}

impl Bench {
    /// Measures until `stop`; `say` hears what. Whatever was made is removed again. What was measured before
    /// an error is worth reading, so the report is there also then.
    ///
    /// Boxed: all of it is compiled in this crate.
    pub fn run<'a>(
        self,
        client: &'a Client,
        say: Box<dyn Fn(&str)>,
        stop: LocalBoxFuture<'a, ()>,
    ) -> LocalBoxFuture<'a, Result<(Report, Result<()>)>> {
        self.run_until(client, say, stop).boxed_local()
    }

    async fn run_until(
        mut self,
        client: &Client,
        say: Box<dyn Fn(&str)>,
        stop: LocalBoxFuture<'_, ()>,
    ) -> Result<(Report, Result<()>)> {
        if !self.rate.is_finite() || self.rate <= 0.0 {
            return Err(Error::Usage("--rate is a number of requests a second, above 0"));
        }
        if self.quick {
            self.rounds = self.rounds.min(QUICK_ROUNDS);
            self.fleet = self.fleet.min(QUICK_FLEET);
        }
        let info: Info = client.get(&Route::new("/v1/info")).await?;
        let mut report = Report::new(machine::describe(&info));
        let measured = tokio::select! {
            measured = Box::pin(self.measure(client, &info, &mut report, say)) => measured,
            () = stop => Err(Error::Interrupted),
        };
        report.end();
        let cleaned = clean_up(client).await;
        let kept = measured.and(cleaned).and_then(|()| self.keep(&report));
        Ok((report, kept))
    }

    fn keep(&self, report: &Report) -> Result<()> {
        let Some(path) = &self.json else { return Ok(()) };
        write(path, &serde_json::to_vec_pretty(report).expect("a report has text keys only"))
    }

    async fn measure(
        &self,
        client: &Client,
        info: &Info,
        report: &mut Report,
        say: Box<dyn Fn(&str)>,
    ) -> Result<()> {
        let wanted = |what: &What| match self.what.is_empty() {
            true => what.is_usual(),
            false => self.what.contains(what),
        };
        for what in What::ALL.into_iter().filter(wanted) {
            say(what.title());
            match what {
                What::Create => create::measure(self, client, report).await?,
                What::Run => run::measure(self, client, report).await?,
                What::Mcp => mcp::measure(self, client, report).await?,
                What::Files => files::measure(self, client, report).await?,
                What::Egress => egress::measure(self, client, report).await?,
                What::Wake => wake::measure(self, client, report).await?,
                What::Standby => standby::measure(self, client, report).await?,
                What::Fork => fork::measure(self, client, report).await?,
                What::Fleet => fleet::measure(self, client, info, report).await?,
                What::Gateway => gateway::measure(self, client, report).await?,
                What::Volumes => volumes::measure(self, client, report).await?,
                What::Pull => pull::measure(self, report).await?,
                What::Jobs => jobs::measure(self, client, report).await?,
                What::Burst => fleet::bursts(self, client, report).await?,
                What::Soak => soak::measure(self, client, report).await?,
                What::Timing => timing::measure(self, report).await?,
                What::Connections => connections::measure(self, report).await?,
            }
        }
        Ok(())
    }

    /// How often something is done that takes a second or more.
    fn slow_rounds(&self) -> u32 {
        self.rounds.div_ceil(2).min(20)
    }

    /// What a benchmark creates. It sleeps when it is told to.
    fn sandbox(&self) -> CreateSandbox {
        CreateSandbox {
            image: Some(self.image.clone()),
            labels: [(LABEL.0.to_owned(), LABEL.1.to_owned())].into(),
            standby: awake(),
            ..CreateSandbox::default()
        }
    }

    async fn create(&self, client: &Client) -> Result<Status> {
        Ok(client.post(&Route::new("/v1/sandboxes"), &self.sandbox()).await?)
    }

    /// For a snapshot or a pool.
    fn fresh_name(&self) -> Name {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{count}", std::process::id());
        name.parse().expect("letters, digits and dashes are a name")
    }
}

/// As sandboxes are by default.
fn usual() -> Standby {
    Standby {
        idle_after_ms: Some(Some(StandbyPolicy::default().idle_after_ms)),
        ..Standby::default()
    }
}

/// Never asleep by itself.
fn awake() -> Standby {
    Standby { idle_after_ms: Some(None), ..Standby::default() }
}

fn write(path: &std::path::Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes)
        .map_err(|error| Error::local(format!("write {}", path.display()), error))
}

async fn clean_up(client: &Client) -> Result<()> {
    let pools: PoolList = client.list(&Route::new("/v1/pools")).await?;
    for pool in pools.pools.iter().filter(|pool| pool.name.as_str().starts_with(PREFIX)) {
        client.delete(&Route::new("/v1/pools").part(pool.name.as_str())).await?;
    }
    let label = (LABEL.0.to_owned(), LABEL.1.to_owned());
    let left: Vec<Status> = client.sandboxes(&[label], None).await?;
    remove(client, left.into_iter().map(|status| status.id)).await?;
    let snapshots: SnapshotList = client.list(&Route::new("/v1/snapshots")).await?;
    for snapshot in snapshots.snapshots {
        if snapshot.name.is_some_and(|name| name.as_str().starts_with(PREFIX)) {
            client.delete(&Route::snapshot(&snapshot.id)).await?;
        }
    }
    Ok(())
}

async fn remove(client: &Client, ids: impl IntoIterator<Item = SandboxId>) -> Result<()> {
    let removals = ids.into_iter().map(async |id| Ok(client.delete(&Route::sandbox(&id)).await?));
    stream::iter(removals).buffer_unordered(REMOVED_AT_ONCE).try_collect::<()>().await
}

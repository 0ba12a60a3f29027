//! `torpor bench`: the promises of SPECIFICATION.md, measured against a running daemon.
//!
//! Latencies under load are taken from the moment a request was *due*, not from when it could be
//! sent, so a stall of the daemon shows in every request it delayed. What is compared runs
//! alternately in one go, because machines are noisy; read the ratios before the milliseconds.

mod create;
mod files;
mod fleet;
mod load;
mod machine;
mod report;
mod run;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use torpor_protocol::api::{CreateSandbox, Info};
use torpor_protocol::{Status, api};

use crate::client::{Client, Route};
use crate::error::{Error, Result};
use crate::output;
use crate::progress::Progress;
use report::Report;

/// The label of everything a benchmark creates.
const LABEL: (&str, &str) = ("torpor.bench", "1");

/// Measure this daemon: percentiles as a table and as JSON.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  torpor bench\n  torpor bench run --rounds 500 --json run.json"
)]
pub(super) struct Bench {
    /// What to measure; all of it if nothing is named.
    #[arg(value_enum)]
    what: Vec<What>,
    /// How often each thing is done.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: u32,
    /// Requests a second in the part with a schedule.
    #[arg(long, default_value_t = 20.0)]
    rate: f64,
    /// Image of the sandboxes.
    #[arg(long, default_value = api::DEFAULT_IMAGE)]
    image: String,
    /// Sandboxes created at one instant.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
    fleet: u32,
    /// Write everything as JSON to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// From the request to the first command's output.
    Create,
    /// /bin/true through the API, beside `runsc exec`.
    Run,
    /// 100 MB up and down.
    Files,
    /// Many created at one instant.
    Fleet,
}

impl Bench {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        if !self.rate.is_finite() || self.rate <= 0.0 {
            return Err(Error::usage("--rate is a number of requests a second, above 0"));
        }
        let info: Info = client.get(&Route::new("/v1/info")).await?;
        let mut report = Report::new(machine::describe(&info));
        let measured = self.measure(client, &mut report).await;
        // Also after an error: a benchmark leaves nothing behind.
        let cleaned = clean_up(client).await;
        measured?;
        cleaned?;
        output::print(&report.table())?;
        if let Some(path) = &self.json {
            let text = serde_json::to_vec_pretty(&report).expect("a report has text keys only");
            std::fs::write(path, text)
                .map_err(|error| Error::local(format!("write {}", path.display()), error))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    async fn measure(&self, client: &Client, report: &mut Report) -> Result<()> {
        let progress = Progress::waiting("measuring");
        let wanted = |what| self.what.is_empty() || self.what.contains(&what);
        if wanted(What::Create) {
            progress.say("create to first output".to_owned());
            create::measure(self, client, report).await?;
        }
        if wanted(What::Run) {
            progress.say("run /bin/true, beside runsc exec".to_owned());
            run::measure(self, client, report).await?;
        }
        if wanted(What::Files) {
            progress.say("100 MB up and down".to_owned());
            files::measure(self, client, report).await?;
        }
        if wanted(What::Fleet) {
            progress.say(format!("{} created at once", self.fleet));
            fleet::measure(self, client, report).await?;
        }
        Ok(())
    }

    /// What a benchmark creates.
    fn sandbox(&self) -> CreateSandbox {
        CreateSandbox {
            image: Some(self.image.clone()),
            labels: [(LABEL.0.to_owned(), LABEL.1.to_owned())].into(),
            ..CreateSandbox::default()
        }
    }

    async fn create(&self, client: &Client) -> Result<Status> {
        client.post(&Route::new("/v1/sandboxes"), &self.sandbox()).await
    }
}

async fn clean_up(client: &Client) -> Result<()> {
    let label = (LABEL.0.to_owned(), LABEL.1.to_owned());
    for status in super::sandboxes::list(client, &[label], None).await? {
        client.delete(&Route::sandbox(&status.id)).await?;
    }
    Ok(())
}

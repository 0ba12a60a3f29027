//! `torpor job run`

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde_json::Value;
use torpor_client::Client;
use torpor_protocol::Name;
use torpor_protocol::job::{BeginExecution, Execution, IfFull};

use super::executions;
use super::watch::{Shown, follow};
use crate::error::{Error, Result};
use crate::{output, units};

/// Run a job, one task for each input, and print the id of the execution.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor job run check --tasks tasks.json\n  \
    torpor job run check --count 100 --parallel 4 --wait\n  \
    torpor job run check --tasks - --key nightly-2027-01-31 <tasks.json")]
pub(super) struct Run {
    job: Name,
    /// File with a JSON list: one task for each entry; - reads standard input.
    #[arg(long, value_name = "FILE", required_unless_present = "count")]
    tasks: Option<PathBuf>,
    /// So many tasks without input.
    #[arg(short = 'n', long, value_name = "N", conflicts_with = "tasks")]
    count: Option<usize>,
    /// Run so many tasks at the same time at most, instead of what the job says.
    #[arg(long, value_name = "N")]
    parallel: Option<u32>,
    /// Cancel it if it is not over after so long.
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    deadline: Option<Duration>,
    /// If its tasks can't all begin at once: queue or refuse.
    #[arg(long, value_name = "HOW", default_value = "queue", value_parser = parse_if_full)]
    if_full: IfFull,
    /// Begin it once, however often this is run with the same key.
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Wait until it is over, and exit with 1 unless all tasks succeeded. ctrl-c leaves it running.
    #[arg(long)]
    wait: bool,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

fn parse_if_full(text: &str) -> Result<IfFull, String> {
    match text {
        "queue" => Ok(IfFull::Queue),
        "refuse" => Ok(IfFull::Refuse),
        _ => Err("it is queue or refuse".to_owned()),
    }
}

/// The inputs in a file.
fn read(path: &Path) -> Result<Vec<Value>> {
    let shown = path.display();
    let text = match path.as_os_str() == "-" {
        true => std::io::read_to_string(std::io::stdin()),
        false => std::fs::read_to_string(path),
    };
    let text = text.map_err(|error| Error::local(format!("can't read {shown}"), error))?;
    serde_json::from_str(&text)
        .map_err(|error| Error::usage(format!("{shown} is not a JSON list of inputs: {error}")))
}

impl Run {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let request = BeginExecution {
            job: Some(self.job),
            spec: None,
            tasks: self.tasks.as_deref().map(read).transpose()?,
            count: self.count,
            parallel: self.parallel,
            timeout_ms: self.deadline.map(units::millis),
            if_full: self.if_full,
        };
        let begun: Execution = match &self.key {
            Some(key) => client.post_once(&executions(), key, &request).await?,
            None => client.post(&executions(), &request).await?,
        };
        if !self.wait {
            output::show_line(self.json, &begun, begun.id.as_str())?;
            return Ok(ExitCode::SUCCESS);
        }
        let ended = follow(client, &begun, Shown::Nothing).await?;
        super::watch::conclude(&ended, self.json)
    }
}

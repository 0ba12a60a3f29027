//! `torpor processes`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::SandboxRef;
use torpor_protocol::api::{ExitReport, Process, ProcessList};
use torpor_protocol::guest::HealthState;

use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// Longest command that is shown whole.
const COMMAND_WIDTH: usize = 60;

/// List the processes of a sandbox that were started through the API.
#[derive(Debug, Args)]
pub(super) struct Processes {
    /// Name or id.
    sandbox: SandboxRef,
    /// Only process ids.
    #[arg(short, long)]
    quiet: bool,
    /// As JSON.
    #[arg(long, conflicts_with = "quiet")]
    json: bool,
}

impl Processes {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let mut list = list(client, &self.sandbox).await?;
        list.processes.sort_by_key(|process| (process.started_at_ms, process.pid));
        if self.json {
            output::json(&list)?;
        } else if self.quiet {
            output::ids(list.processes.iter().map(|process| process.pid))?;
        } else {
            output::print(&table(&list.processes, units::now_ms()))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

pub(super) async fn list(client: &Client, sandbox: &SandboxRef) -> Result<ProcessList> {
    Ok(client.list(&Route::sandbox(sandbox).then("/processes")).await?)
}

fn table(processes: &[Process], now_ms: u64) -> String {
    let row = |process: &Process| {
        vec![
            process.pid.to_string(),
            process.name.as_deref().map_or_else(|| "-".to_owned(), plain),
            state(process, now_ms),
            health(process),
            units::show_age(process.started_at_ms, now_ms),
            process.restarts.to_string(),
            output::command_line(&process.command, COMMAND_WIDTH),
        ]
    };
    let header = ["PID", "NAME", "STATE", "HEALTH", "AGE", "RESTARTS", "COMMAND"];
    output::table(&header, processes.iter().map(row).collect())
}

/// What it does now, or how it ended.
pub(super) fn state(process: &Process, now_ms: u64) -> String {
    match (&process.exit, process.next_start_at_ms) {
        (None, _) => "running".to_owned(),
        (Some(_), Some(at)) => format!("restarts in {}s", at.saturating_sub(now_ms).div_ceil(1000)),
        (Some(ExitReport { timed_out: true, .. }), None) => "timed out".to_owned(),
        (Some(ExitReport { exit_code: Some(code), .. }), None) => format!("exit {code}"),
        (Some(ExitReport { signal: Some(signal), .. }), None) => format!("signal {signal}"),
        (Some(_), None) => "ended".to_owned(),
    }
}

/// What its health check says, if it has one; while it runs.
fn health(process: &Process) -> String {
    let Some(report) = process.health.filter(|_| process.running) else { return "-".to_owned() };
    match (report.state, report.failures) {
        (HealthState::Starting, _) => "starting".to_owned(),
        (HealthState::Healthy, 0) => "healthy".to_owned(),
        (HealthState::Healthy, failures) => format!("healthy ({failures} failed)"),
        (HealthState::Unhealthy, _) => "unhealthy".to_owned(),
    }
}

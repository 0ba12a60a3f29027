//! `torpor map`: the simple case of a job. One task for each fork of a snapshot, or of a sandbox as it is now.
//!
//! Invariants
//! - the daemon owns the work: whatever happens to us, its sandboxes are removed when it is over;
//! - a fork or a command that fails does not stop the others;
//! - a snapshot that is taken for this goes with it.

mod tally;

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use futures_util::{StreamExt, TryStreamExt, stream};
use torpor_client::{Client, Route};
use torpor_protocol::api::{CreateSandbox, ExitReport, Log, OutputStream, RunResult};
use torpor_protocol::job::{BeginExecution, Execution, JobSpec, Task, TaskList};
use torpor_protocol::snapshot::TakeSnapshot;
use torpor_protocol::{Snapshot, SnapshotKind};

use self::tally::{Outcome, Tally};
use super::base::{Base, BaseArgs};
use super::fork::{NUMBER, check_name, parse_count};
use super::job::watch::{Shown, follow};
use super::job::{cancel, execution, executions};
use super::parse_pair;
use super::process::ProcessArgs;
use crate::error::{EXIT_FAILED, Error, Result};
use crate::progress::Progress;
use crate::signals::Signals;
use crate::units::millis;
use crate::{output, units};

/// Logs read at once.
const PARALLEL: usize = 8;
/// Who interrupts us waits so long at most for the forks to be gone.
const PATIENCE: Duration = Duration::from_secs(60);
/// As long as a task may take.
const WEEK: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// A journal keeps at least so much of one that is gone, and an agent so much of a line.
const LOG_KEPT: usize = 250 * 1024;
const LINE_KEPT: usize = 4096;

/// Fork, run a command in each fork, and collect the results.
///
/// Shows of each fork the exit code, the time and the first line of its output (--json: all of it),
/// and how much faster that was than one after the other. Forks for which the host has no room yet wait for it. They
/// are removed afterwards, also on ctrl-c. One that fails does not stop the others; then it exits with 1.
#[derive(Debug, Args)]
// An escape keeps clap from taking the braces for a line end.
#[command(after_help = "Examples:\n  torpor map base --count 5 -- ./analyze {\x1b[0mn}\n  \
    torpor map web --count 3 -e SEED={\x1b[0mn} --json -- python3 simulate.py")]
pub(super) struct Map {
    #[command(flatten)]
    base: BaseArgs,
    /// How many.
    #[arg(short = 'n', long, value_parser = parse_count)]
    count: usize,
    #[arg(
        long,
        help = "What to call the forks; {\x1b[0mn} is the number of each, from 1",
        value_name = "NAME"
    )]
    name: Option<String>,
    /// Label to find the forks by.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    label: Vec<(String, String)>,
    #[command(flatten)]
    process: ProcessArgs,
    /// Kill a command with everything it started after so long, such as 10m.
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    timeout: Option<Duration>,
    /// Do not remove the forks afterwards.
    #[arg(long)]
    keep: bool,
    /// As JSON, with all output.
    #[arg(long)]
    json: bool,
    #[arg(
        last = true,
        required = true,
        value_name = "COMMAND",
        help = "Program and arguments; {\x1b[0mn} in them and in variables is the number of the fork"
    )]
    command: Vec<String>,
}

impl Map {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        check_name(self.name.as_deref(), self.count)?;
        let (json, mut signals) = (self.json, Signals::new()?);
        let base = self.base.clone().find(client).await?;
        let (snapshot, taken) = moment(client, base).await?;
        let name = self.name.clone();
        let begun = client.post::<Execution>(&executions(), &self.request(snapshot)).await;
        let shown = match begun {
            Ok(begun) => {
                let shown = tokio::select! {
                    tally = collect(client, &begun, name.as_deref()) => {
                        tally.and_then(|tally| show(&tally, json))
                    }
                    left = signals.next() => Err(left),
                };
                tokio::select! {
                    () = end(client, &begun) => (),
                    _ = signals.next() => output::note("torpor: some forks are being removed still"),
                }
                shown
            }
            Err(error) => Err(error.into()),
        };
        if let Some(taken) = taken {
            tidy(client.delete(&Route::snapshot(&taken.id)).await);
        }
        shown
    }

    fn request(self, snapshot: String) -> BeginExecution {
        let command = self.process.command(self.command);
        let labels = self.label.into_iter().collect();
        let snapshot = Some(snapshot);
        let spec = JobSpec {
            sandbox: CreateSandbox { snapshot, labels, ..CreateSandbox::default() },
            sandbox_name: self.name,
            command: command.command,
            env: command.env,
            cwd: command.cwd,
            user: command.user,
            numbered: true,
            timeout_ms: millis(self.timeout.unwrap_or(WEEK)),
            keep: self.keep,
            ..JobSpec::default()
        };
        BeginExecution { spec: Some(spec), count: Some(self.count), ..BeginExecution::default() }
    }
}

/// The snapshot to begin from, and the same if it was taken for us.
async fn moment(client: &Client, base: Base) -> Result<(String, Option<Snapshot>)> {
    let sandbox = match base {
        Base::Snapshot(snapshot) => return Ok((snapshot, None)),
        Base::Sandbox(sandbox) => sandbox,
    };
    let _progress = Progress::waiting(format!("taking a snapshot of {sandbox}"));
    let request = TakeSnapshot { name: None, kind: SnapshotKind::Memory };
    let taken: Snapshot =
        client.post(&Route::sandbox(&sandbox).then("/snapshots"), &request).await?;
    Ok((taken.id.to_string(), Some(taken)))
}

/// Waits until it is over, and reads what came of it.
async fn collect(client: &Client, begun: &Execution, name: Option<&str>) -> Result<Tally> {
    follow(client, begun, Shown::Nothing).await?;
    let tasks: TaskList = client.list(&execution(&begun.id).then("/tasks")).await?;
    let outcomes = stream::iter(&tasks.tasks).map(|task| outcome(client, task, name));
    let outcomes = outcomes.buffered(PARALLEL).try_collect().await?;
    let began = |task: &Task| Some(task.ended_at_ms?.saturating_sub(task.ran_ms?));
    let first = tasks.tasks.iter().filter_map(began).min().unwrap_or(begun.created_at_ms);
    let last = tasks.tasks.iter().filter_map(began).max().unwrap_or(begun.created_at_ms);
    let end = tasks.tasks.iter().filter_map(|task| task.ended_at_ms).max().unwrap_or(last);
    let fork_ms = last.saturating_sub(begun.created_at_ms) as f64;
    Ok(Tally::new(outcomes, fork_ms, end.saturating_sub(first) as f64))
}

async fn outcome(client: &Client, task: &Task, name: Option<&str>) -> Result<Outcome> {
    let n = task.index as usize + 1;
    let named = name.map(|name| name.replace(NUMBER, &n.to_string()));
    let sandbox = named.or_else(|| task.sandbox.as_ref().map(ToString::to_string));
    let failed = || {
        let why = task.message.clone().unwrap_or_else(|| task.state.as_str().to_owned());
        Some(format!("error: {why}"))
    };
    // What ended a command that has no exit is its time.
    let timed_out = task.reason == Some(torpor_protocol::job::TaskFailure::TimedOut);
    let late = ExitReport { timed_out: true, ..ExitReport::default() };
    let Some(exit) = task.exit.or(timed_out.then_some(late)) else {
        return Ok(Outcome { n, sandbox, result: None, error: failed() });
    };
    let route = execution(&task.execution).then("/tasks").part(&task.index.to_string());
    let log: Log = client.list(&route.then("/log")).await?;
    let (mut stdout, mut stderr) = (String::new(), String::new());
    for line in &log.lines {
        let text = match line.stream {
            OutputStream::Stdout => &mut stdout,
            OutputStream::Stderr => &mut stderr,
        };
        text.push_str(&line.text);
        text.push('\n');
    }
    let cut = stdout.len() + stderr.len() >= LOG_KEPT;
    let truncated = cut || log.lines.iter().any(|line| line.text.len() >= LINE_KEPT);
    let duration_ms = task.ran_ms.unwrap_or_default();
    let result = Some(RunResult { exit, stdout, stderr, truncated, duration_ms });
    Ok(Outcome { n, sandbox, result, error: None })
}

fn show(tally: &Tally, json: bool) -> Result<ExitCode> {
    output::show(json, tally, || tally.text())?;
    Ok(if tally.failed > 0 { ExitCode::from(EXIT_FAILED) } else { ExitCode::SUCCESS })
}

/// Ends it if it is not over, and leaves nothing of it.
async fn end(client: &Client, begun: &Execution) {
    let ended = async {
        let told = cancel(client, &begun.id).await?;
        if !told.state.is_over() {
            let _progress = Progress::waiting("removing the forks");
            follow(client, &told, Shown::Nothing).await?;
        }
        Ok::<_, Error>(client.delete(&execution(&begun.id)).await?)
    };
    match tokio::time::timeout(PATIENCE, ended).await {
        Ok(done) => tidy(done),
        Err(_) => output::note("torpor: some forks are being removed still"),
    }
}

/// What can't be removed is said and no error: the results are there.
fn tidy<E: std::fmt::Display>(done: std::result::Result<(), E>) {
    if let Err(error) = done {
        output::note(&format!("torpor: can't clean up: {error}"));
    }
}

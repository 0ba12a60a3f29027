//! `torpor map`: fork, run in all of them at once, collect.
//!
//! Invariants
//! - the forks carry a label that is this run's only, and are found by it: whatever happens to us
//!   short of SIGKILL, they are removed, and after that they end by themselves;
//! - a fork or a command that fails does not stop the others.

mod tally;

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use futures_util::stream::FuturesUnordered;
use futures_util::{StreamExt, stream};
use http::Method;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use torpor_client::{Client, Route};
use torpor_protocol::api::{Command, RunResult};
use torpor_protocol::snapshot::{Fork, ForkList};
use torpor_protocol::{ErrorCode, Lifetime, SandboxId, Status};

use self::tally::{Outcome, Tally};
use super::base::{Base, BaseArgs};
use super::fork::{NUMBER, check_name, failure, fork, parse_count};
use super::process::ProcessArgs;
use super::{parse_pair, sandboxes};
use crate::error::{EXIT_FAILED, Error, Result};
use crate::progress::Progress;
use crate::signals::Signals;
use crate::units::millis;
use crate::{output, units};

/// The label of the forks of one run.
const LABEL: &str = "torpor.map";
/// Forks that we can't remove any more end by themselves when unused for so long.
const EXPIRE_IDLE_MS: u64 = 3_600_000;
/// Forks that are being made when we are interrupted are waited for, so that they can be removed.
const FORK_PATIENCE: Duration = Duration::from_secs(60);
/// Removals under way at once.
const PARALLEL: usize = 8;

/// Fork, run a command in all forks at once, and collect the results.
///
/// Shows of each fork the exit code, the time and the first line of its output (--json: all of it),
/// and how much faster that was than one after the other. The forks are removed afterwards, also on
/// ctrl-c. One that fails does not stop the others; then it exits with 1.
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
        let base = self.base.clone().find(client).await?;
        let tag = SandboxId::random().to_string();
        let mut forking = self.begin(client, base, &tag);
        let (keep, json) = (self.keep, self.json);
        let mut signals = Signals::new()?;
        let shown = tokio::select! {
            tally = self.work(client, &mut forking) => tally.and_then(|tally| show(&tally, json)),
            left = signals.next() => Err(left),
        };
        if !keep {
            tokio::select! {
                () = clean_up(client, &tag, forking) => (),
                _ = signals.next() => output::note("torpor: some forks are left; they end by \
                    themselves after an hour without use"),
            }
        }
        shown
    }

    /// A task of its own: being interrupted does not lose the answer.
    fn begin(&self, client: &Client, base: Base, tag: &str) -> JoinHandle<Result<ForkList>> {
        let mut labels: torpor_protocol::spec::Pairs = self.label.iter().cloned().collect();
        labels.insert(LABEL.to_owned(), tag.to_owned());
        let expire_idle_ms = (!self.keep).then_some(EXPIRE_IDLE_MS);
        let request = Fork {
            count: self.count,
            name: self.name.clone(),
            labels,
            lifetime: Lifetime { expire_idle_ms, ..Lifetime::default() },
            ..Fork::default()
        };
        let client = client.clone();
        tokio::spawn(async move { fork(&client, &base, &request).await })
    }

    async fn work(
        self,
        client: &Client,
        forking: &mut JoinHandle<Result<ForkList>>,
    ) -> Result<Tally> {
        let started = Instant::now();
        let forks = forking.await.map_err(|error| Error::internal("forking failed", error))??;
        let fork_ms = elapsed_ms(started);
        let timeout_ms = self.timeout.map(millis);
        let template = Command { timeout_ms, ..self.process.command(self.command) };
        let started = Instant::now();
        let results = run_all(client, forks, &template).await;
        Ok(Tally::new(results, fork_ms, elapsed_ms(started)))
    }
}

fn elapsed_ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

fn show(tally: &Tally, json: bool) -> Result<ExitCode> {
    output::show(json, tally, || tally.text())?;
    Ok(if tally.failed > 0 { ExitCode::from(EXIT_FAILED) } else { ExitCode::SUCCESS })
}

async fn run_all(client: &Client, forks: ForkList, template: &Command) -> Vec<Outcome> {
    let count = forks.forks.len();
    let progress = Progress::waiting(format!("0 of {count} are done"));
    let mut runs = FuturesUnordered::new();
    for (index, fork) in forks.forks.into_iter().enumerate() {
        runs.push(async move {
            let n = index + 1;
            match fork.sandbox {
                Some(status) => run_one(client, n, &status, template).await,
                None => {
                    let error = Some(failure(fork.error.as_ref()));
                    Outcome { n, sandbox: None, result: None, error }
                }
            }
        });
    }
    let mut outcomes = Vec::with_capacity(count);
    while let Some(outcome) = runs.next().await {
        outcomes.push(outcome);
        progress.say(format!("{} of {count} are done", outcomes.len()));
    }
    outcomes.sort_by_key(|outcome| outcome.n);
    outcomes
}

async fn run_one(client: &Client, n: usize, status: &Status, template: &Command) -> Outcome {
    let route = Route::sandbox(&status.id).then("/run");
    let ran = client.ask(Method::POST, &route, &numbered(template, n)).await;
    let (result, error) = match ran {
        Ok(result) => (Some::<RunResult>(result), None),
        Err(error) => (None, Some(Error::from(error).render(false).trim_end().to_owned())),
    };
    Outcome { n, sandbox: Some(sandboxes::title(status).to_owned()), result, error }
}

/// The command of fork `n`.
fn numbered(template: &Command, n: usize) -> Command {
    let n = n.to_string();
    let number = |text: &String| text.replace(NUMBER, &n);
    Command {
        command: template.command.iter().map(number).collect(),
        env: template.env.iter().map(|(key, value)| (key.clone(), number(value))).collect(),
        ..template.clone()
    }
}

/// Removes whatever carries our label. What can't be removed is said and no error: the results are
/// there.
async fn clean_up(client: &Client, tag: &str, mut forking: JoinHandle<Result<ForkList>>) {
    let progress = Progress::waiting("removing the forks");
    if !forking.is_finished() {
        // Its answer, and how it ended, do not matter any more.
        let _ = tokio::time::timeout(FORK_PATIENCE, &mut forking).await;
    }
    let label = (LABEL.to_owned(), tag.to_owned());
    let forks = match client.sandboxes::<Status>(&[label], None).await {
        Ok(forks) => forks,
        Err(error) => {
            progress.note(&format!("torpor: can't remove the forks: {error}"));
            return;
        }
    };
    let removals = forks
        .iter()
        .map(|status| async move { (status, client.delete(&Route::sandbox(&status.id)).await) });
    let mut removals = stream::iter(removals).buffer_unordered(PARALLEL);
    while let Some((status, removed)) = removals.next().await {
        match removed {
            Ok(()) => (),
            Err(error) if error.code() == Some(ErrorCode::SandboxNotFound) => (),
            Err(error) => progress
                .note(&format!("torpor: can't remove {}: {error}", sandboxes::title(status))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fork_knows_its_number() {
        let template = Command {
            command: ["./analyze", "{n}", "part-{n}.csv", "{m}"].map(String::from).into(),
            env: [("SEED".to_owned(), "0{n}".to_owned())].into(),
            ..Command::default()
        };
        let third = numbered(&template, 3);
        assert_eq!(third.command, ["./analyze", "3", "part-3.csv", "{m}"]);
        assert_eq!(third.env["SEED"], "03");
    }
}

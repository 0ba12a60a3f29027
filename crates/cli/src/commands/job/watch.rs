//! `torpor job watch`: how an execution goes on, until it is over.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use http::Method;
use torpor_client::{Client, body};
use torpor_protocol::job::{Execution, ExecutionState, JobEvent, Task, TaskCounts};
use torpor_protocol::{ErrorCode, ExecutionId};

use super::{execution, show};
use crate::error::{EXIT_FAILED, Error, Result};
use crate::output;
use crate::progress::Progress;

/// Show how an execution goes on, until it is over.
///
/// Prints a line for each task that is over. Exits with 1 unless all succeeded.
#[derive(Debug, Args)]
pub(in crate::commands) struct Watch {
    execution: ExecutionId,
    /// As JSON, one event a line.
    #[arg(long)]
    json: bool,
}

/// What is printed while it goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::commands) enum Shown {
    Nothing,
    Tasks,
    Events,
}

impl Watch {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let begun: Execution = client.get(&execution(&self.execution)).await?;
        let shown = if self.json { Shown::Events } else { Shown::Tasks };
        let ended = follow(client, &begun, shown).await?;
        match self.json {
            true => Ok(exit(&ended)),
            false => conclude(&ended, false),
        }
    }
}

/// How often, and how far apart, a connection that broke is made again: a daemon that is restarted is back by then.
const TRIES: u32 = 60;
const PAUSE: Duration = Duration::from_secs(1);

/// Follows it to its end, also over a restart of the daemon.
pub(in crate::commands) async fn follow(
    client: &Client,
    begun: &Execution,
    shown: Shown,
) -> Result<Execution> {
    let progress = Progress::count(begun.counts.total(), text(&begun.counts));
    let mut watched = Watched { client, id: &begun.id, after: 0, shown, progress };
    let mut tries = 0;
    loop {
        let before = watched.after;
        match watched.until_it_breaks().await {
            Ok(Some(ended)) => return Ok(ended),
            Ok(None) if tries >= TRIES => {
                return Err(Error::Failed {
                    message: format!("the daemon no longer tells about execution {}", begun.id),
                    hint: Some(format!("it goes on: torpor job watch {}", begun.id)),
                });
            }
            // The daemon said no, or our own output broke.
            Err(error) if tries >= TRIES || !is_broken(&error) => return Err(error),
            Ok(None) | Err(_) => {}
        }
        tries = if watched.after == before { tries + 1 } else { 0 };
        tokio::time::sleep(PAUSE).await;
    }
}

/// Whether it was the connection, and not what came over it.
fn is_broken(error: &Error) -> bool {
    matches!(error, Error::Client(_))
        && error.code().is_none_or(|code| code == ErrorCode::ShuttingDown)
}

/// An execution that is followed.
struct Watched<'a> {
    client: &'a Client,
    id: &'a ExecutionId,
    /// The place of the last task that is known.
    after: u64,
    shown: Shown,
    progress: Progress,
}

impl Watched<'_> {
    /// None: the daemon ended the connection, and not the execution.
    async fn until_it_breaks(&mut self) -> Result<Option<Execution>> {
        let route = execution(self.id).then("/watch").query("after", &self.after.to_string());
        let mut events = self.client.lines::<JobEvent>(Method::GET, &route, body::empty()).await?;
        while let Some(event) = events.next().await? {
            if self.shown == Shown::Events {
                output::line(&output::compact(&event)?)?;
            }
            match event {
                JobEvent::Progress { counts } => self.progress.set(counts.over(), text(&counts)),
                JobEvent::Task { next, task } => {
                    self.after = next;
                    if self.shown == Shown::Tasks {
                        self.progress.aside(|| output::line(&line(&task)))?;
                    }
                }
                JobEvent::Ended { execution } => return Ok(Some(*execution)),
            }
        }
        Ok(None)
    }
}

fn text(counts: &TaskCounts) -> String {
    let mut text = format!("{} running, {} queued", counts.running, counts.queued);
    if counts.failed > 0 {
        text.push_str(&format!(", {} failed", counts.failed));
    }
    text
}

fn line(task: &Task) -> String {
    format!("{}\t{}\t{}", task.index, task.state.as_str(), show::outcome(task))
}

/// Says how it ended.
pub(super) fn conclude(ended: &Execution, json: bool) -> Result<ExitCode> {
    output::show(json, ended, || output::fields(&show::execution(ended)))?;
    Ok(exit(ended))
}

fn exit(ended: &Execution) -> ExitCode {
    match ended.state {
        ExecutionState::Succeeded => ExitCode::SUCCESS,
        ExecutionState::Running
        | ExecutionState::Cancelling
        | ExecutionState::Failed
        | ExecutionState::Cancelled => ExitCode::from(EXIT_FAILED),
    }
}

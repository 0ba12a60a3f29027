//! One attempt at a task: a sandbox, the command in it, and what it left. Each step is done anew by the next daemon
//! where this one ended, and finds what is done already.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use torpor_lifecycle::guest::GuestError;
use torpor_lifecycle::store::Journal as _;
use torpor_lifecycle::{self as lifecycle, Refusal, Sandbox, fault};
use torpor_protocol::api::{ExitReport, OutputStream};
use torpor_protocol::guest::Request;
use torpor_protocol::job::{OUTPUT_MAX, TaskFailure};
use torpor_protocol::{ErrorCode, SandboxRef, State};
use torpor_store::{AttemptEnd, TaskClaim, TaskProcess};

use super::admission::is_about_task;
use super::last_line::{LastLine, Lines};
use super::{environment, results};
use crate::Service;
use crate::calls;
use crate::error::Error;
use crate::files::{self, Write};
use crate::processes::{self, Awake, Output, Patience, ProcessRef, Said};

/// What a command may take to end by itself when it is told to (SIGTERM).
const GRACE_MS: u64 = 10_000;
/// How long it may take to read what a command said that had ended before: a few hundred kilobytes.
const READ_MAX: Duration = Duration::from_secs(60);

/// Why an attempt ended without an exit of its command.
#[derive(Debug)]
pub(super) enum Trouble {
    /// No room now: on the host, or in its pool.
    Full {
        of_pool: bool,
        told: String,
    },
    /// What it ran in is gone.
    Lost,
    Failed(TaskFailure, String),
    Cancelled,
    /// The daemon stops: the next one goes on.
    Stopping,
    /// It is somebody else's by now.
    NotOurs,
}

pub(super) type Result<T> = std::result::Result<T, Trouble>;

/// An attempt under way.
pub(super) struct Attempt<'a> {
    pub app: &'a Arc<Service>,
    pub claim: &'a TaskClaim,
    /// Says that it is to end before its time.
    pub stop: &'a CancellationToken,
}

/// How the command ended, and the last line it printed.
struct Ended {
    exit: ExitReport,
    ran_ms: u64,
    line: LastLine,
}

impl Attempt<'_> {
    /// To the end of its command, with its results on disk.
    pub(super) async fn run(&self) -> Result<AttemptEnd> {
        fault::point("task.claimed");
        let sandbox = Box::pin(self.sandbox()).await?;
        let (awake, process) = self.begun(&sandbox).await?;
        let noted = self.app.ledger.note_process(&self.claim.lease, &process).await;
        if !noted.map_err(|error| self.unrecorded(&error))? {
            return Err(Trouble::NotOurs);
        }
        self.app.jobs.changed();
        fault::point("task.noted");
        let ended = self.follow(&sandbox, awake, &process).await;
        fault::point("task.ended");
        self.note_lines(&sandbox, &ended).await;
        let ended = ended?;
        let kept = self.results(&sandbox).await;
        fault::point("task.collected");
        self.end(ended, kept)
    }

    // === The sandbox ===

    /// The one that was made for this attempt before, or a new one. It runs, or sleeps.
    async fn sandbox(&self) -> Result<Sandbox> {
        let (app, claim) = (self.app, self.claim);
        if let Some(process) = &claim.process {
            let found = app.fleet.find(&SandboxRef::Id(process.sandbox.clone()));
            return found.map_err(|_| Trouble::Lost);
        }
        let begun = Instant::now();
        let asked = environment::sandbox(claim).map_err(|error| self.no_sandbox(&error))?;
        let key = environment::Mark::of(claim).key();
        let made = calls::create(app, asked, Some(&key)).await;
        let sandbox = made.map_err(|error| self.no_sandbox(&error))?;
        fault::point("task.created");
        // It was put to sleep before its command began: it is woken when it is entered.
        if sandbox.status().state == State::Asleep {
            return Ok(sandbox);
        }
        let started = tokio::select! {
            started = calls::started(app, &sandbox, begun) => started,
            () = self.stop.cancelled() => return Err(Trouble::Cancelled),
        };
        started.map_err(|error| self.no_sandbox(&error))?;
        Ok(sandbox)
    }

    fn no_sandbox(&self, error: &Error) -> Trouble {
        let told = error.describe();
        if told.code == ErrorCode::ShuttingDown || self.app.stopping.is_cancelled() {
            return Trouble::Stopping;
        }
        if told.code == ErrorCode::CapacityReached {
            let of_pool = matches!(error.refusal(), Some(Refusal::PoolFull { .. }));
            return Trouble::Full { of_pool, told: told.message };
        }
        if self.claim.taken_over {
            return Trouble::Lost;
        }
        if let Some(causes) = error.internal() {
            tracing::warn!(task = environment::title(self.claim, None), causes, "no sandbox");
        }
        let hint = told.hint.map_or_else(String::new, |hint| format!(" ({hint})"));
        Trouble::Failed(TaskFailure::NoSandbox, format!("{}{hint}", told.message))
    }

    fn unrecorded(&self, error: &dyn std::error::Error) -> Trouble {
        let task = environment::title(self.claim, None);
        tracing::warn!(task, error = lifecycle::chain(error), "an attempt could not be recorded");
        Trouble::Lost
    }

    /// Keeps it awake while this is held.
    async fn enter(&self, patience: &Patience<'_>) -> Result<Awake> {
        let entered = tokio::select! {
            entered = patience.enter() => entered,
            () = self.stop.cancelled() => return Err(Trouble::Cancelled),
        };
        entered.map_err(|error| self.lost(&error))
    }

    /// The way to it broke: returns when it may be tried again.
    async fn after(&self, patience: &mut Patience<'_>, broke: Error) -> Result<()> {
        let again = tokio::select! {
            again = patience.after(broke) => again,
            () = self.stop.cancelled() => return Err(Trouble::Cancelled),
        };
        again.map_err(|error| self.lost(&error))
    }

    /// What became of a sandbox that ran.
    fn lost(&self, error: &Error) -> Trouble {
        let told = error.describe();
        if told.code == ErrorCode::ShuttingDown || self.app.stopping.is_cancelled() {
            return Trouble::Stopping;
        }
        tracing::info!(
            task = environment::title(self.claim, None),
            error = lifecycle::chain(error),
            "the sandbox of a task was lost"
        );
        Trouble::Lost
    }

    // === The command ===

    /// Inside, with the process of this attempt.
    async fn begun(&self, sandbox: &Sandbox) -> Result<(Awake, TaskProcess)> {
        let mut patience = Patience::new(self.app, sandbox);
        loop {
            let awake = self.enter(&patience).await?;
            fault::point("task.awake");
            let may_run = self.claim.taken_over || patience.tried();
            match Box::pin(self.process(&awake, may_run)).await {
                Ok(process) => return Ok((awake, process?)),
                Err(broke) => self.after(&mut patience, broke).await?,
            }
        }
    }

    /// The process of this attempt, which is started if it was not. `Err`: the way to it broke.
    async fn process(&self, awake: &Awake, may_run: bool) -> crate::Result<Result<TaskProcess>> {
        if may_run {
            match processes::find(awake, &self.name()).await {
                Ok(found) => return Ok(Ok(self.started(awake, &found))),
                Err(error) if error.code() == ErrorCode::ProcessNotFound => {}
                Err(error) => return Err(error),
            }
            // It ran, and its machine is not the one it ran in any more.
            if self.claim.process.is_some() {
                return Ok(Err(Trouble::Lost));
            }
        }
        let input = self.claim.input.as_ref().map(ToString::to_string);
        if let Err(error) = self.prepare(awake, input.as_deref()).await {
            return refused("its input can't be written: ", error).map(Err);
        }
        fault::point("task.prepared");
        let command = environment::command(self.claim, input.as_deref());
        let started = processes::start(awake, command).await;
        fault::point("task.started");
        match started {
            Ok(process) => Ok(Ok(self.started(awake, &process))),
            Err(error) => refused("", error).map(Err),
        }
    }

    fn name(&self) -> ProcessRef {
        ProcessRef::Name(environment::Mark::of(self.claim).key())
    }

    fn started(&self, awake: &Awake, process: &torpor_protocol::api::Process) -> TaskProcess {
        let now_ms = self.app.fleet.clock().now_ms();
        let known = self.claim.process.as_ref().map(|process| process.timeout_at_ms);
        TaskProcess {
            sandbox: awake.sandbox.id().clone(),
            pid: process.pid,
            started_at_ms: process.started_at_ms,
            timeout_at_ms: known.unwrap_or(now_ms + self.claim.spec.timeout_ms),
        }
    }

    /// A directory for its results, and a file with its input.
    async fn prepare(&self, awake: &Awake, input: Option<&str>) -> crate::Result<()> {
        let spec = &self.claim.spec;
        // The command may be whoever the image says.
        let (mode, owner) = (Some(0o777), spec.user.clone());
        let request = Request::MakeDir { path: spec.results.to_string(), mode, owner };
        match awake.lease.guest().stat(&request).await {
            Ok(_) | Err(GuestError::Refused { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let Some(input) = input else { return Ok(()) };
        let path = spec.input_file.to_string();
        let write = Write { path, mode: Some(0o644), ..Write::default() };
        let bytes = bytes::Bytes::from(input.to_owned());
        let pieces = futures_util::stream::iter([Ok(bytes)]).boxed();
        files::write(self.app, awake, write, pieces).await.map(drop)
    }

    /// Reads what it prints until it ends, or ends it when its time is up.
    async fn follow(
        &self,
        sandbox: &Sandbox,
        mut awake: Awake,
        process: &TaskProcess,
    ) -> Result<Ended> {
        let mut patience = Patience::new(self.app, sandbox);
        loop {
            let output = processes::attach(awake, &self.name(), true, true).await;
            let broke = match output {
                Ok(output) => match Box::pin(self.read(output, process)).await {
                    Ok(ended) => return ended,
                    Err(broke) => broke,
                },
                Err(error) => error,
            };
            self.after(&mut patience, broke).await?;
            awake = self.enter(&patience).await?;
        }
    }

    /// `Err`: the way to it broke.
    async fn read(
        &self,
        mut output: Output,
        process: &TaskProcess,
    ) -> crate::Result<Result<Ended>> {
        // One that ended while no daemon looked was not late.
        let ended_at_ms = output.started.ended_at_ms.filter(|_| output.started.exit.is_some());
        let least = ended_at_ms.map_or(Duration::ZERO, |_| READ_MAX);
        let left = self.app.fleet.clock().until(process.timeout_at_ms).max(least);
        let (time_up, mut lines) = (Instant::now() + left, Lines::default());
        loop {
            let said = tokio::select! {
                said = output.next() => said,
                () = self.stop.cancelled() => {
                    return self.end_command(&output, Trouble::Cancelled).await;
                }
                () = tokio::time::sleep_until(time_up) => {
                    let told = format!("it took longer than {} ms", self.claim.spec.timeout_ms);
                    let late = Trouble::Failed(TaskFailure::TimedOut, told);
                    return self.end_command(&output, late).await;
                }
            };
            match said {
                Ok(Some(Said::Bytes(OutputStream::Stdout, bytes))) => lines.push(&bytes),
                Ok(Some(Said::Skipped(_))) => lines.tear(),
                Ok(Some(Said::Bytes(OutputStream::Stderr, _) | Said::At(_))) => {}
                Ok(Some(Said::Exited(exit))) => {
                    let until = ended_at_ms.unwrap_or_else(|| self.app.fleet.clock().now_ms());
                    let ran_ms = until.saturating_sub(process.started_at_ms);
                    return Ok(Ok(Ended { exit, ran_ms, line: lines.last() }));
                }
                Ok(None) => return Err(GuestError::protocol("a process without an end").into()),
                Err(_) if output.starved() => {
                    let told = "it used up the memory of its sandbox".to_owned();
                    return Ok(Err(Trouble::Failed(TaskFailure::OutOfMemory, told)));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// SIGTERM, a while to end by itself, SIGKILL.
    async fn end_command(&self, output: &Output, because: Trouble) -> crate::Result<Result<Ended>> {
        match processes::kill(output.awake(), &self.name(), Some(GRACE_MS)).await {
            // One that can't be killed goes with its sandbox.
            Ok(()) | Err(Error::Guest(GuestError::Refused { .. })) => Ok(Err(because)),
            Err(error) => Err(error),
        }
    }

    // === What it left ===

    async fn results(&self, sandbox: &Sandbox) -> Result<Option<u64>> {
        let mut patience = Patience::new(self.app, sandbox);
        let kept = async {
            loop {
                let awake = self.enter(&patience).await?;
                let kept = tokio::select! {
                    kept = Box::pin(results::keep(self.app, self.claim, awake)) => kept,
                    () = self.stop.cancelled() => return Err(Trouble::Cancelled),
                };
                match kept {
                    Ok(kept) => return kept,
                    Err(broke) => self.after(&mut patience, broke).await?,
                }
            }
        };
        let kept = tokio::time::timeout(results::DEADLINE, kept).await;
        kept.unwrap_or_else(|_| Err(results::late()))
    }

    /// What it said, before it goes with its sandbox, which waits for nobody. One that sleeps has said it.
    async fn note_lines(&self, sandbox: &Sandbox, ended: &Result<Ended>) {
        match ended {
            Ok(_) | Err(Trouble::Failed(..) | Trouble::Cancelled) => {}
            Err(Trouble::Full { .. } | Trouble::Lost | Trouble::Stopping | Trouble::NotOurs) => {
                return;
            }
        }
        let Some(lease) = sandbox.if_awake() else { return };
        let (journals, id) = (&self.app.journals, sandbox.id());
        let noted: crate::Result<()> = async {
            let lines = lease.guest().lines(journals.last(id).await?).await?;
            Ok(journals.append(id, &lines).await?)
        }
        .await;
        if let Err(error) = noted {
            let task = environment::title(self.claim, Some(id));
            tracing::warn!(task, error = lifecycle::chain(&error), "what it said is not kept");
        }
    }

    fn end(&self, ended: Ended, kept: Result<Option<u64>>) -> Result<AttemptEnd> {
        let Ended { exit, ran_ms, line } = ended;
        let (output, mut message) = match line {
            LastLine::Json(value) => (Some(value), None),
            LastLine::Nothing => (None, None),
            LastLine::TooLong => {
                let told =
                    format!("its last line has more than {OUTPUT_MAX} bytes, and was not kept");
                (None, Some(told))
            }
        };
        let mut reason = None;
        if exit.exit_code != Some(0) {
            let killed = exit.oom_killed && exit.exit_code.is_none();
            reason = Some(if killed { TaskFailure::OutOfMemory } else { TaskFailure::Exit });
            message = message.or_else(|| Some(exit_in_words(&exit)));
        }
        let results_bytes = match kept {
            Ok(bytes) => bytes,
            // How it ended counts more than that its files are missing.
            Err(Trouble::Failed(why, told)) => {
                message = Some(told);
                reason = reason.or(Some(why));
                None
            }
            Err(trouble) => return Err(trouble),
        };
        let ran_ms = Some(ran_ms);
        Ok(AttemptEnd { exit: Some(exit), ran_ms, output, reason, message, results_bytes })
    }
}

/// Why its command does not run, if that is about the task; else the error.
fn refused(what: &str, error: Error) -> crate::Result<Trouble> {
    match error.guest() {
        Some(GuestError::Refused { code, message }) if is_about_task(*code) => {
            Ok(Trouble::Failed(TaskFailure::CannotStart, format!("{what}{message}")))
        }
        Some(_) | None => Err(error),
    }
}

fn exit_in_words(exit: &ExitReport) -> String {
    match (exit.exit_code, exit.signal) {
        (Some(code), _) => format!("it exited with {code}"),
        (None, Some(signal)) => format!("signal {signal} ended it"),
        (None, None) => "it was ended".to_owned(),
    }
}

/// A random part of a pause, so that many do not come back at once.
pub(super) fn jitter(longest: Duration) -> u64 {
    let longest = u64::try_from(longest.as_millis()).unwrap_or(u64::MAX);
    let mut bytes = [0; 8];
    match getrandom::fill(&mut bytes) {
        Ok(()) => u64::from_le_bytes(bytes) % longest.saturating_add(1).max(1),
        Err(_) => longest,
    }
}

//! What a firing does: it begins something, and waits for its end.
//!
//! - A process has the name of its firing, and is recorded with its number before it is waited for. It lives on its own, so a
//!   daemon that ends does not end it, and the next one finds it.
//! - What was begun is known before it can be ended: beginning is never cut off.
//! - The id of a snapshot follows from the firing: whoever takes it again takes the same one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use torpor_lifecycle::guest::GuestError;
use torpor_lifecycle::store::StoreError;
use torpor_lifecycle::{chain, fault};
use torpor_protocol::api::{Command, ExitReport, Process};
use torpor_protocol::guest::{RestartPolicy, Supervision};
use torpor_protocol::job::{BeginExecution, ExecutionState};
use torpor_protocol::schedule::{
    Action, Firing, FiringState, ProcessMark, Schedule, ScheduledRun, ScheduledSnapshot,
};
use torpor_protocol::{ErrorCode, ExecutionId, SandboxRef, SnapshotRef};

use super::sandbox_ref;
use crate::error::{Error, Result};
use crate::processes::{self, Awake, Patience, ProcessRef, Said};
use crate::{Service, calls, jobs};

/// A command that says nothing else is ended after so long.
const TIMEOUT_MS: u64 = 60 * 60 * 1000;
/// Bytes of what a command said that are kept: its end.
const OUTPUT_MAX: usize = 16 * 1024;
/// Bytes of a reason.
const MESSAGE_MAX: usize = 500;
/// How long a process that is replaced may take to end by itself.
const GRACE_MS: u64 = 5_000;
/// How long the sandbox of one may take to take the order.
const KILL_MAX: Duration = Duration::from_secs(30);
/// How often an execution is looked at.
const LOOK: Duration = Duration::from_secs(1);
const NOT_BEGUN: &str = "the daemon ended before it began";
const LOST: &str = "its process is not there any more, and how it ended is not known";

/// A firing that is over.
pub(super) struct Ended {
    pub(super) firing: Firing,
    pub(super) state: FiringState,
}

/// How what was to be done went.
#[derive(Clone, Copy)]
enum Went {
    Well,
    Wrong,
    /// Nobody knows, because of this.
    Unknown(&'static str),
}

/// What a firing began.
enum Begun {
    Process(ProcessMark),
    Execution(ExecutionId),
    /// There is nothing to wait for.
    Over(Went),
}

/// None: the daemon stops, and the next one goes on.
pub(super) async fn act(
    service: &Arc<Service>,
    schedule: &Schedule,
    mut firing: Firing,
    again: bool,
    end: &CancellationToken,
) -> Option<Ended> {
    let went = match begin(service, schedule, &mut firing, again, end).await {
        Ok(Some(begun)) => {
            let went = tokio::select! {
                biased;
                went = wait(service, &begun, &mut firing) => Some(went),
                () = end.cancelled() => None,
            };
            // Also what is given up must not go on.
            let given_up = went.as_ref().is_none_or(Result::is_err);
            if given_up && !service.stopping.is_cancelled() {
                let _ = tokio::time::timeout(KILL_MAX, cancel(service, &begun)).await;
            }
            went
        }
        Ok(None) => None,
        Err(error) => Some(Err(error)),
    };
    if service.stopping.is_cancelled() {
        return None;
    }
    let state = match went {
        Some(Ok(Went::Well)) => FiringState::Succeeded,
        Some(Ok(Went::Wrong)) => FiringState::Failed,
        Some(Ok(Went::Unknown(why))) => {
            firing.outcome.message.get_or_insert_with(|| why.to_owned());
            FiringState::Interrupted
        }
        Some(Err(error)) => {
            firing.outcome.message = Some(in_words(&error));
            FiringState::Failed
        }
        None => FiringState::Replaced,
    };
    Some(Ended { firing, state })
}

/// None: it was to end before it began.
async fn begin(
    service: &Arc<Service>,
    schedule: &Schedule,
    firing: &mut Firing,
    again: bool,
    end: &CancellationToken,
) -> Result<Option<Begun>> {
    if end.is_cancelled() && !again {
        return Ok(None);
    }
    match &schedule.spec.action {
        Action::Run(run) => self::run(service, run, firing, again).await.map(Some),
        Action::Job(request) => job(service, request, firing).await.map(Some),
        // The next daemon takes it anew.
        Action::Snapshot(take) => {
            let taking = snapshot(service, schedule, take, firing);
            let taken = service.stopping.run_until_cancelled(taking).await;
            taken.transpose().map(|went| went.map(Begun::Over))
        }
    }
}

async fn wait(service: &Service, begun: &Begun, firing: &mut Firing) -> Result<Went> {
    match begun {
        Begun::Process(mark) => process(service, mark, firing).await,
        Begun::Execution(id) => execution(service, id, firing).await,
        Begun::Over(went) => Ok(*went),
    }
}

/// Ends what a firing began.
async fn cancel(service: &Service, begun: &Begun) -> Result<()> {
    match begun {
        Begun::Process(mark) => kill(service, mark).await,
        Begun::Execution(id) => jobs::cancel(service, id).await.map(drop),
        Begun::Over(_) => Ok(()),
    }
}

/// Records what was begun. Nobody waits for what can't be recorded, or whose schedule is gone: it is ended.
async fn noted(service: &Service, firing: &Firing, begun: Begun) -> Result<Begun> {
    let noted = service.ledger.update_firing(firing).await;
    if !matches!(noted, Ok(true)) {
        cancel(service, &begun).await?;
    }
    Ok(if noted? { begun } else { Begun::Over(Went::Wrong) })
}

/// Wakes the sandbox and starts the command there, unless an earlier daemon did.
async fn run(
    service: &Service,
    run: &ScheduledRun,
    firing: &mut Firing,
    again: bool,
) -> Result<Begun> {
    if let Some(mark) = &firing.outcome.process {
        return Ok(Begun::Process(mark.clone()));
    }
    fault::point("firing.recorded");
    let sandbox = service.fleet.find(&sandbox_ref(&run.sandbox)?)?;
    let mut awake = Awake::woken(service, sandbox.clone()).await?;
    let mut patience = Patience::new(service, &sandbox);
    let name = firing.id.to_string();
    let process = loop {
        let may_run = again || patience.tried();
        match started(&awake, run, &name, may_run, again).await {
            Ok(Some(process)) => break process,
            Ok(None) => return Ok(Begun::Over(Went::Unknown(NOT_BEGUN))),
            Err(broke) => patience.after(broke).await?,
        }
        awake = patience.enter().await?;
    };
    fault::point("firing.started");
    let sandbox = awake.sandbox.id().clone();
    let mark = ProcessMark { sandbox, pid: process.pid, started_at_ms: process.started_at_ms };
    firing.outcome.process = Some(mark.clone());
    let begun = noted(service, firing, Begun::Process(mark)).await?;
    fault::point("firing.noted");
    Ok(begun)
}

/// The process of a firing. None: it is not there, and is not to be started any more.
async fn started(
    awake: &Awake,
    run: &ScheduledRun,
    name: &str,
    may_run: bool,
    again: bool,
) -> Result<Option<Process>> {
    if may_run {
        match processes::find(awake, &ProcessRef::Name(name.to_owned())).await {
            Ok(process) => return Ok(Some(process)),
            Err(error) if error.code() == ErrorCode::ProcessNotFound => {}
            Err(error) => return Err(error),
        }
    }
    if again {
        return Ok(None);
    }
    processes::start(awake, command(run, name.to_owned())).await.map(Some)
}

/// A process that keeps its sandbox awake and is found by its name.
fn command(run: &ScheduledRun, name: String) -> Command {
    let name = Some(name);
    Command {
        keep_awake: true,
        timeout_ms: run.command.timeout_ms.or(Some(TIMEOUT_MS)),
        supervise: Some(Supervision { name, restart: RestartPolicy::Never, ..Default::default() }),
        ..run.command.clone()
    }
}

/// Waits for its end, whatever becomes of the way to it: an error says that its sandbox can't run, or is gone.
async fn process(service: &Service, mark: &ProcessMark, firing: &mut Firing) -> Result<Went> {
    let sandbox = service.fleet.find(&SandboxRef::Id(mark.sandbox.clone()))?;
    let mut patience = Patience::new(service, &sandbox);
    loop {
        let awake = patience.enter().await?;
        match follow(awake, mark).await {
            Ok(Some((tail, exit))) => {
                firing.outcome.output = Some(tail).filter(|tail| !tail.is_empty());
                return Ok(judge(firing, exit));
            }
            Ok(None) => return Ok(Went::Unknown(LOST)),
            Err(broke) => patience.after(broke).await?,
        }
    }
}

/// The end of what it says, and how it ends; none if it is not there any more.
async fn follow(awake: Awake, mark: &ProcessMark) -> Result<Option<(String, ExitReport)>> {
    let process = ProcessRef::Pid(mark.pid);
    match processes::find(&awake, &process).await {
        Ok(found) if found.started_at_ms == mark.started_at_ms => {}
        // Its number is another one's by now.
        Ok(_) => return Ok(None),
        Err(error) if error.code() == ErrorCode::ProcessNotFound => return Ok(None),
        Err(error) => return Err(error),
    }
    let mut output = processes::attach(awake, &process, true, true).await?;
    let mut tail = VecDeque::new();
    while let Some(said) = output.next().await? {
        match said {
            Said::Bytes(_, bytes) => {
                tail.extend(bytes);
                let extra = tail.len().saturating_sub(OUTPUT_MAX);
                tail.drain(..extra);
            }
            Said::Exited(exit) => {
                let bytes: Vec<u8> = tail.into();
                return Ok(Some((String::from_utf8_lossy(&bytes).into_owned(), exit)));
            }
            Said::Skipped(_) | Said::At(_) => {}
        }
    }
    Err(GuestError::protocol("a process without an end").into())
}

/// Whoever begins it again for the same firing gets the same execution.
async fn job(
    service: &Arc<Service>,
    request: &BeginExecution,
    firing: &mut Firing,
) -> Result<Begun> {
    let begun = jobs::begin(service, request.clone(), Some(firing.id.as_str())).await?;
    firing.outcome.result = Some(begun.id.to_string());
    noted(service, firing, Begun::Execution(begun.id)).await
}

async fn execution(service: &Service, id: &ExecutionId, firing: &mut Firing) -> Result<Went> {
    loop {
        match jobs::find(service, id).await.map(|execution| execution.state) {
            Ok(ExecutionState::Running | ExecutionState::Cancelling) => {}
            Ok(ExecutionState::Succeeded) => return Ok(Went::Well),
            Ok(state @ (ExecutionState::Failed | ExecutionState::Cancelled)) => {
                let state = state.as_str();
                firing.outcome.message = Some(format!("the execution ended as {state}"));
                return Ok(Went::Wrong);
            }
            Err(error) if error.code() == ErrorCode::NotFound => return Err(error),
            Err(error) => {
                tracing::warn!(execution = %id, error = chain(&error), "cannot look at it");
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

async fn kill(service: &Service, mark: &ProcessMark) -> Result<()> {
    let sandbox = service.fleet.find(&SandboxRef::Id(mark.sandbox.clone()))?;
    let awake = Awake::woken(service, sandbox).await?;
    processes::kill(&awake, &ProcessRef::Pid(mark.pid), Some(GRACE_MS)).await
}

/// What an exit means.
fn judge(firing: &mut Firing, exit: ExitReport) -> Went {
    let ExitReport { exit_code, signal, timed_out, oom_killed } = exit;
    firing.outcome.exit = exit_code.or_else(|| signal.map(|signal| 128 + signal));
    let why = if timed_out {
        Some("it took longer than allowed and was ended".to_owned())
    } else if oom_killed {
        Some("something was killed for want of memory while it ran".to_owned())
    } else {
        signal.map(|signal| format!("signal {signal} ended it"))
    };
    firing.outcome.message = why;
    if exit_code == Some(0) { Went::Well } else { Went::Wrong }
}

async fn snapshot(
    service: &Arc<Service>,
    schedule: &Schedule,
    take: &ScheduledSnapshot,
    firing: &mut Firing,
) -> Result<Went> {
    let sandbox = service.fleet.find(&sandbox_ref(&take.sandbox)?)?;
    // The random part of it.
    let seed = firing.id.as_str().rsplit('-').next().unwrap_or_default();
    let taken = calls::snapshot(service, &sandbox, None, take.kind, Some(seed)).await?;
    let snapshot = taken.done().await?;
    firing.outcome.result = Some(snapshot.id.to_string());
    if let Some(keep) = take.keep {
        service.ledger.note_snapshot(&schedule.id, &snapshot.id, snapshot.created_at_ms).await?;
        firing.outcome.message = remove_old(service, schedule, keep).await?;
    }
    Ok(Went::Well)
}

/// Removes those that it took before, but for the newest; says which could not be removed.
async fn remove_old(service: &Service, schedule: &Schedule, keep: u32) -> Result<Option<String>> {
    let mut stay = None;
    for old in service.ledger.snapshots_beyond(&schedule.id, keep).await? {
        let of = SnapshotRef::Id(old.clone());
        if service.fleet.find_snapshot(&of).await.is_ok()
            && let Err(error) = service.fleet.erase_snapshot(&of).await
        {
            let why = in_words(&Error::from(error));
            stay = Some(clipped(format!("{old} could not be removed: {why}")));
            continue;
        }
        forget(service, schedule, &old).await?;
    }
    Ok(stay)
}

async fn forget(
    service: &Service,
    schedule: &Schedule,
    old: &torpor_protocol::SnapshotId,
) -> std::result::Result<(), StoreError> {
    service.ledger.forget_scheduled_snapshot(&schedule.id, old).await
}

fn in_words(error: &Error) -> String {
    let told = error.describe();
    let hint = told.hint.map_or_else(String::new, |hint| format!(" ({hint})"));
    clipped(format!("{}{hint}", told.message))
}

fn clipped(mut text: String) -> String {
    let end = text.floor_char_boundary(MESSAGE_MAX);
    text.truncate(end);
    text
}

#[cfg(test)]
mod tests {
    use super::super::plan::firing;
    use super::*;

    #[test]
    fn an_exit_says_whether_it_went_well() {
        let judged = |exit| {
            let mut firing = firing(1, 1, false);
            let well = matches!(judge(&mut firing, exit), Went::Well);
            (well, firing.outcome.exit, firing.outcome.message)
        };
        let exit = ExitReport::default();
        assert_eq!(judged(ExitReport { exit_code: Some(0), ..exit }), (true, Some(0), None));
        assert_eq!(judged(ExitReport { exit_code: Some(3), ..exit }), (false, Some(3), None));
        let (well, code, why) = judged(ExitReport { signal: Some(9), ..exit });
        assert_eq!((well, code, why.unwrap().as_str()), (false, Some(137), "signal 9 ended it"));
        let (well, _, why) = judged(ExitReport { timed_out: true, ..exit });
        assert!(!well && why.unwrap().contains("longer than allowed"));
    }
}

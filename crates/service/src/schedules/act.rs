//! What a firing does.
//!
//! - A process is recorded with its number before it is waited for. It lives on its own, so a daemon that ends does
//!   not end it, and the next one finds it.
//! - The id of a snapshot follows from the firing: whoever takes it again takes the same one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::api::ExitReport;
use torpor_protocol::job::{BeginExecution, ExecutionState};
use torpor_protocol::schedule::{
    Action, Firing, FiringState, ProcessMark, Schedule, ScheduledRun, ScheduledSnapshot,
};
use torpor_protocol::{SandboxRef, SnapshotRef};

use super::sandbox_ref;
use crate::error::{Error, Result};
use crate::processes::{self, Awake, Output, ProcessRef, Said};
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

/// A firing that is over.
pub(super) struct Ended {
    pub(super) firing: Firing,
    pub(super) state: FiringState,
}

/// How what was to be done went.
enum Went {
    Well,
    Wrong,
    /// An earlier daemon began it, and nobody knows how it ended.
    Unknown,
}

/// None: the daemon stops, and the next one goes on.
pub(super) async fn act(
    service: &Arc<Service>,
    schedule: &Schedule,
    mut firing: Firing,
    again: bool,
    end: &CancellationToken,
) -> Option<Ended> {
    let went = {
        let doing = async {
            match &schedule.spec.action {
                Action::Run(run) => self::run(service, run, &mut firing, again).await,
                Action::Snapshot(take) => snapshot(service, schedule, take, &mut firing).await,
                Action::Job(request) => job(service, request, &mut firing).await,
            }
        };
        end.run_until_cancelled(doing).await
    };
    if service.stopping.is_cancelled() {
        return None;
    }
    let state = match went {
        Some(Ok(Went::Well)) => FiringState::Succeeded,
        Some(Ok(Went::Wrong)) => FiringState::Failed,
        Some(Ok(Went::Unknown)) => {
            let text = "the daemon ended meanwhile, and how it went on is not known";
            firing.outcome.message.get_or_insert_with(|| text.to_owned());
            FiringState::Interrupted
        }
        Some(Err(error)) => {
            firing.outcome.message = Some(clipped(error.describe().message));
            FiringState::Failed
        }
        None => {
            let _ = tokio::time::timeout(KILL_MAX, cancel(service, schedule, &firing)).await;
            FiringState::Replaced
        }
    };
    Some(Ended { firing, state })
}

async fn run(
    service: &Service,
    run: &ScheduledRun,
    firing: &mut Firing,
    again: bool,
) -> Result<Went> {
    let mark = match (&firing.outcome.process, again) {
        (Some(mark), _) => mark.clone(),
        (None, true) => return Ok(Went::Unknown),
        (None, false) => start(service, run, firing).await?,
    };
    let awake = awake(service, &SandboxRef::Id(mark.sandbox.clone())).await?;
    let process = ProcessRef::Pid(mark.pid);
    if again && !is_still(&awake, &mark).await {
        return Ok(Went::Unknown);
    }
    let output = processes::attach(awake, &process, true, true).await?;
    let (tail, exit) = follow(output).await?;
    firing.outcome.output = Some(tail).filter(|tail| !tail.is_empty());
    let Some(exit) = exit else { return Ok(Went::Unknown) };
    Ok(judge(firing, exit))
}

/// Wakes the sandbox and starts the command there; that it did is recorded.
async fn start(service: &Service, run: &ScheduledRun, firing: &mut Firing) -> Result<ProcessMark> {
    let awake = awake(service, &sandbox_ref(&run.sandbox)?).await?;
    let mut command = run.command.clone();
    command.keep_awake = true;
    command.timeout_ms = command.timeout_ms.or(Some(TIMEOUT_MS));
    let process = processes::start(&awake, command).await?;
    let sandbox = awake.sandbox.id().clone();
    let mark = ProcessMark { sandbox, pid: process.pid, started_at_ms: process.started_at_ms };
    firing.outcome.process = Some(mark.clone());
    service.ledger.update_firing(firing).await?;
    Ok(mark)
}

async fn awake(service: &Service, of: &SandboxRef) -> Result<Awake> {
    Awake::new(service, service.fleet.find(of)?).await
}

/// Whether the process of that number is the one that was started.
async fn is_still(awake: &Awake, mark: &ProcessMark) -> bool {
    let found = processes::find(awake, &ProcessRef::Pid(mark.pid)).await;
    found.is_ok_and(|process| process.started_at_ms == mark.started_at_ms)
}

/// Ends what a firing began.
async fn cancel(service: &Service, schedule: &Schedule, firing: &Firing) -> Result<()> {
    if let Some(mark) = &firing.outcome.process {
        kill(service, mark).await?;
    }
    if let (Action::Job(_), Some(id)) = (&schedule.spec.action, &firing.outcome.result)
        && let Ok(id) = id.parse()
    {
        jobs::cancel(service, &id).await?;
    }
    Ok(())
}

/// Whoever begins it again for the same firing gets the same execution.
async fn job(
    service: &Arc<Service>,
    request: &BeginExecution,
    firing: &mut Firing,
) -> Result<Went> {
    let begun = jobs::begin(service, request.clone(), Some(firing.id.as_str())).await?;
    firing.outcome.result = Some(begun.id.to_string());
    service.ledger.update_firing(firing).await?;
    loop {
        let execution = jobs::find(service, &begun.id).await?;
        match execution.state {
            ExecutionState::Running | ExecutionState::Cancelling => {}
            ExecutionState::Succeeded => return Ok(Went::Well),
            ExecutionState::Failed | ExecutionState::Cancelled => {
                let state = execution.state.as_str();
                firing.outcome.message = Some(format!("the execution ended as {state}"));
                return Ok(Went::Wrong);
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

async fn kill(service: &Service, mark: &ProcessMark) -> Result<()> {
    let awake = awake(service, &SandboxRef::Id(mark.sandbox.clone())).await?;
    processes::kill(&awake, &ProcessRef::Pid(mark.pid), Some(GRACE_MS)).await
}

/// The end of what it says, and how it ends.
async fn follow(mut output: Output) -> Result<(String, Option<ExitReport>)> {
    let (mut tail, mut exit) = (VecDeque::new(), None);
    while let Some(said) = output.next().await? {
        match said {
            Said::Bytes(_, bytes) => {
                tail.extend(bytes);
                let extra = tail.len().saturating_sub(OUTPUT_MAX);
                tail.drain(..extra);
            }
            Said::Exited(report) => exit = Some(report),
            Said::Skipped(_) | Said::At(_) => {}
        }
    }
    let bytes: Vec<u8> = tail.into();
    Ok((String::from_utf8_lossy(&bytes).into_owned(), exit))
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
    service.ledger.note_snapshot(&schedule.id, &snapshot.id, snapshot.created_at_ms).await?;
    if let Some(keep) = take.keep {
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
            let why = Error::from(error).describe().message;
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

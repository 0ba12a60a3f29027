//! What can be done to a process by number.

use std::rc::Rc;
use std::time::Duration;

use rustix::io::Errno;
use tokio::task::spawn_local;
use tokio::time::timeout;
use torpor_protocol::guest::{Failure, FailureCode, ProcessStatus, Reply, TerminalSize};

use super::life::{begin, reaped};
use super::{Order, Process, tree};
use crate::agent::Agent;
use crate::failure::{cannot, failure};
use crate::stream::Stream;
use crate::terminal;

/// How long a killed process may take to vanish.
const KILL_DEADLINE: Duration = Duration::from_secs(5);
/// The longest grace: whoever needs longer to end does not end.
const GRACE_MAX_MS: u64 = 60 * 60 * 1000;
/// Bytes of one batch of a list; a status is never larger than the rest of a packet, even if every
/// byte of its command has to be escaped.
const BATCH: usize = 64 * 1024;
const SIGNAL_MAX: i32 = 64;

/// Sends a signal to the process and all in its group.
pub(crate) fn signal(agent: &Agent, pid: u32, signal: i32) -> Result<(), Failure> {
    if !(1..=SIGNAL_MAX).contains(&signal) {
        return Err(failure(FailureCode::Invalid, format!("there is no signal {signal}")));
    }
    let process = agent.processes.find(pid)?;
    if !process.alive() {
        return Err(ended(pid));
    }
    match send_signal(pid, signal) {
        Ok(()) => Ok(()),
        Err(Errno::SRCH) => Err(ended(pid)),
        Err(error) => Err(cannot(format!("cannot signal process {pid}"))(error)),
    }
}

#[expect(unsafe_code, reason = "the safe call does not know all signals by number")]
pub(super) fn send_signal(group: u32, signal: i32) -> Result<(), Errno> {
    // SAFETY: takes numbers only.
    let sent = unsafe { libc::killpg(group.cast_signed(), signal) };
    if sent == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(Errno::from_io_error(&error).unwrap_or(Errno::INVAL))
}

fn ended(pid: u32) -> Failure {
    failure(FailureCode::NoSuchProcess, format!("process {pid} has ended"))
}

/// Kills the process and everything it started, and waits until it is gone and stays so. For one that
/// has ended, kills what it left behind. With a grace it is asked to end by itself first.
pub(crate) async fn kill(agent: &Agent, pid: u32, grace_ms: Option<u64>) -> Result<(), Failure> {
    if grace_ms.is_some_and(|ms| ms > GRACE_MAX_MS) {
        let message = format!("a process gets at most {GRACE_MAX_MS} ms to end");
        return Err(failure(FailureCode::Invalid, message));
    }
    let process = agent.processes.find(pid)?;
    process.order(Order::Stay);
    let life = process.life();
    // A task of its own: once it was asked to end it will, whether or not somebody waits for it.
    let killed = spawn_local(async move {
        if let Some(ms) = grace_ms {
            ask_to_end(&process, Duration::from_millis(ms)).await;
        }
        if process.life() != life {
            // Somebody wanted it started again meanwhile.
            return Ok(());
        }
        stop(&process).await?;
        let over = until_over(&process, life);
        timeout(KILL_DEADLINE, over).await.map_err(|_| does_not_end(pid))
    });
    killed.await.unwrap_or_else(|_| Err(does_not_end(pid)))
}

/// Until this life of it is over: it was retired, or began another one.
async fn until_over(process: &Process, life: u64) {
    while process.life() == life && !process.retired() {
        process.changed.notified().await;
    }
}

fn does_not_end(pid: u32) -> Failure {
    failure(FailureCode::Io, format!("process {pid} does not end"))
}

/// Tells the process and all in its group to end, and waits until they have, or their time is up.
async fn ask_to_end(process: &Process, grace: Duration) {
    let pid = process.pid();
    if !process.alive() || send_signal(pid, libc::SIGTERM).is_err() {
        return;
    }
    let gone = async {
        reaped(process).await;
        tree::group_gone(pid).await;
    };
    let _ = timeout(grace, gone).await;
}

async fn stop(process: &Process) -> Result<(), Failure> {
    let pid = process.pid();
    let life = process.life();
    let gone = async {
        tree::kill(pid, !process.alive()).await;
        while process.life() == life && !process.ended() {
            process.changed.notified().await;
        }
    };
    timeout(KILL_DEADLINE, gone).await.map_err(|_| does_not_end(pid))
}

/// Ends a supervised process and starts it anew.
pub(crate) async fn restart(agent: &Rc<Agent>, pid: u32) -> Result<ProcessStatus, Failure> {
    let process = agent.processes.find(pid)?;
    if process.spec.supervise.is_none() {
        let message = format!("process {pid} is not supervised");
        return Err(failure(FailureCode::Invalid, message));
    }
    if process.retired() {
        tree::kill(pid, true).await;
        begin(agent, &process)?;
        return Ok(process.status());
    }
    let life = process.life();
    process.order(Order::Again);
    stop(&process).await?;
    let late = |_| failure(FailureCode::Io, format!("process {pid} does not start again"));
    timeout(KILL_DEADLINE, until_over(&process, life)).await.map_err(late)?;
    Ok(process.status())
}

/// Tells a terminal its size.
pub(crate) fn resize(agent: &Agent, pid: u32, size: TerminalSize) -> Result<(), Failure> {
    let process = agent.processes.find(pid)?;
    if process.spec.terminal.is_none() {
        let message = format!("process {pid} has no terminal");
        return Err(failure(FailureCode::Invalid, message));
    }
    let terminal = process.terminal.borrow().clone().ok_or_else(|| ended(pid))?;
    terminal::resize(terminal.get_ref(), size)
        .map_err(cannot(format!("cannot resize the terminal of process {pid}")))?;
    process.terminal_size.set(Some(size));
    Ok(())
}

/// All processes, in as many replies as it takes, at least one.
pub(crate) async fn list(agent: &Agent, stream: &Stream) -> Result<(), Failure> {
    let mut processes = Vec::new();
    let mut size = 0;
    for process in agent.processes.all() {
        let status = process.status();
        size += serde_json::to_vec(&status).map_or(0, |json| json.len() + 1);
        processes.push(status);
        if size > BATCH {
            let processes = std::mem::take(&mut processes);
            stream.reply(&Reply::Processes { processes }).await;
            size = 0;
        }
    }
    stream.reply(&Reply::Processes { processes }).await;
    Ok(())
}

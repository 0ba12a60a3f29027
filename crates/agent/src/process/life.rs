//! The task that minds one process: reads its output, notices its end, starts it again.

use std::cell::RefCell;
use std::future::pending;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::WaitStatus;
use tokio::io::Interest;
use tokio::time::{Instant, sleep_until};
use torpor_protocol::guest::{Exit, Failure, ProcessSpec};

use super::spawn::{Outlets, spawn};
use super::{Order, Process, health, now_ms, supervise, tree};
use crate::agent::Agent;
use crate::descriptor::Descriptor;

/// Read at once: a whole pipe.
const READ: usize = 64 * 1024;
/// After a process ended, its output is over when nothing came for so long: somebody else may hold
/// the pipe open for ever.
const QUIET: Duration = Duration::from_millis(200);
/// What is read after a process ended. It can't have left more in its pipes, whose size the kernel
/// limits to half of this each; the rest is somebody else's.
const DRAIN_MAX: usize = 2 * 1024 * 1024;
/// What a shell says when a command is not there.
const NOT_FOUND: Exit = Exit::Code { code: 127 };

thread_local! {
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; READ]);
}

/// Starts a process and a task that minds it. With `attached`, a stream will read all its output
/// from the first byte on, and slows it down.
pub(crate) fn start(
    agent: &Rc<Agent>,
    spec: ProcessSpec,
    attached: bool,
) -> Result<Rc<Process>, Failure> {
    spec.supervise.as_ref().map_or(Ok(()), supervise::validate)?;
    let process = Rc::new(Process::new(spec, agent.lines.clone()));
    process.slowed_by.set(attached.then_some(0));
    begin(agent, &process)?;
    Ok(process)
}

/// Gives a process that is not minded a life and a task.
pub(super) fn begin(agent: &Rc<Agent>, process: &Rc<Process>) -> Result<(), Failure> {
    agent.processes.admit(process)?;
    let outlets = match launch(agent, process) {
        Ok(outlets) => outlets,
        Err(failed) => {
            agent.processes.dismiss(process);
            return Err(failed);
        }
    };
    tokio::task::spawn_local(mind(agent.clone(), process.clone(), outlets));
    Ok(())
}

fn launch(agent: &Agent, process: &Rc<Process>) -> Result<Outlets, Failure> {
    let pid_before = process.pid();
    // Nothing may be awaited between fork and table, or the reaper finds a stranger.
    let outlets = process.begin(spawn(agent, &process.spec)?);
    agent.processes.enter(process, pid_before);
    Ok(outlets)
}

async fn mind(agent: Rc<Agent>, process: Rc<Process>, outlets: Outlets) {
    let mut outlets = outlets;
    loop {
        let began = Instant::now();
        let exit = watch(&agent, &process, &mut outlets).await;
        process.end(exit);
        match relaunch(&agent, &process, exit, began).await {
            Some(again) => outlets = again,
            None => break,
        }
    }
    agent.processes.retire(&process);
    // Others who write to the same pipes must not be broken by the end of the process.
    if outlets.open() && process.spec.terminal.is_none() && agent.processes.linger() {
        let life = process.life();
        while outlets.read(&process).await.is_some() {}
        if process.life() == life {
            process.fall_silent();
        }
        agent.processes.silent();
    }
}

/// Until the process has ended and its output is read.
async fn watch(agent: &Agent, process: &Rc<Process>, outlets: &mut Outlets) -> Exit {
    let timeout = process.spec.timeout_ms.map(|ms| Instant::now() + Duration::from_millis(ms));
    let mut timed_out = false;
    let mut unwell = pin!(health::until_unwell(&agent.quiesce, process));
    loop {
        tokio::select! {
            biased;
            () = reaped(process) => break,
            () = at(timeout), if !timed_out => {
                timed_out = true;
                tokio::task::spawn_local(tree::kill(process.pid(), false));
            }
            () = &mut unwell, if !timed_out && !process.unhealthy() => {
                tokio::task::spawn_local(tree::kill(process.pid(), false));
            }
            () = pump(process, outlets) => {}
        }
    }
    drain(process, outlets).await;
    let status = process.state.borrow().reaped;
    if timed_out { Exit::TimedOut } else { exit_of(status) }
}

pub(super) async fn reaped(process: &Process) {
    while process.alive() {
        process.changed.notified().await;
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}

/// Reads for ever.
async fn pump(process: &Process, outlets: &mut Outlets) {
    while outlets.read(process).await.is_some() {}
    pending().await
}

async fn drain(process: &Process, outlets: &mut Outlets) {
    let mut drained = 0;
    // What it wrote is in the pipes, whether the kernel told of it or not.
    for pipe in [&outlets.stdout, &outlets.stderr].into_iter().flatten() {
        pipe.assume_ready(Interest::READABLE);
    }
    while drained < DRAIN_MAX {
        // While the reader is slow, silence says nothing.
        room(process).await;
        match tokio::time::timeout(QUIET, outlets.read(process)).await {
            Ok(Some(length)) => drained += length,
            Ok(None) | Err(_) => return,
        }
    }
}

/// Waits until the reader that slows the process down has caught up.
async fn room(process: &Process) {
    while process.held_back() {
        process.changed.notified().await;
    }
}

pub(super) fn exit_of(status: Option<WaitStatus>) -> Exit {
    match status.map(|status| (status.exit_status(), status.terminating_signal())) {
        Some((Some(code), _)) => Exit::Code { code },
        Some((None, Some(signal))) => Exit::Signal { signal },
        Some((None, None)) | None => Exit::Code { code: -1 },
    }
}

/// Starts the process again if it should be, after the pause that it takes.
async fn relaunch(
    agent: &Rc<Agent>,
    process: &Rc<Process>,
    exit: Exit,
    began: Instant,
) -> Option<Outlets> {
    let supervision = process.spec.supervise.as_ref()?;
    let mut failed = exit != Exit::Code { code: 0 } || process.unhealthy();
    let mut ran = began.elapsed();
    loop {
        let order = process.state.borrow().order;
        let pause = match order {
            Some(Order::Stay) => None,
            Some(Order::Again) => Some(Duration::ZERO),
            None => process.state.borrow().restarts.pause(supervision, failed),
        };
        // Nothing was awaited since its end: nobody sees it ended and takes it for one that stays so.
        let start_at_ms = |pause: Duration| now_ms().saturating_add(millis(pause));
        process.state.borrow_mut().next_start_at_ms = pause.map(start_at_ms);
        let pause = pause?;
        // What the life before left running would be in the way of the next one.
        tree::kill(process.pid(), true).await;
        pause_for(process, pause).await;
        agent.quiesce.unquiesced().await;
        // Nothing is awaited from here on: what was ordered until now is obeyed.
        let ordered = process.state.borrow_mut().order.take_if(|order| *order == Order::Again);
        if process.state.borrow().order.is_some() {
            continue;
        }
        {
            let mut state = process.state.borrow_mut();
            state.restarts_shown = state.restarts_shown.saturating_add(1);
            if ordered.is_none() {
                state.restarts.count(supervision, ran);
            }
        }
        match launch(agent, process) {
            Ok(outlets) => return Some(outlets),
            Err(why) => {
                process.write_output(true, format!("{}\n", why.message).as_bytes());
                process.end(NOT_FOUND);
                (failed, ran) = (true, Duration::ZERO);
            }
        }
    }
}

/// Waits, unless something is ordered.
async fn pause_for(process: &Process, pause: Duration) {
    let ordered = async {
        while process.state.borrow().order.is_none() {
            process.changed.notified().await;
        }
    };
    let _ = tokio::time::timeout(pause, ordered).await;
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Outlets {
    fn open(&self) -> bool {
        self.stdout.is_some() || self.stderr.is_some()
    }

    /// Reads what is there, when the process may go on: how many bytes, none at the end of both.
    async fn read(&mut self, process: &Process) -> Option<usize> {
        room(process).await;
        tokio::select! {
            read = read(self.stdout.as_deref(), process, false), if self.stdout.is_some() => {
                if read == 0 {
                    self.stdout = None;
                }
                Some(read)
            }
            read = read(self.stderr.as_deref(), process, true), if self.stderr.is_some() => {
                if read == 0 {
                    self.stderr = None;
                }
                Some(read)
            }
            else => None,
        }
    }
}

/// Reads once; 0 at the end. A terminal says EIO when nobody has it open.
async fn read(pipe: Option<&Descriptor>, process: &Process, stderr: bool) -> usize {
    let Some(pipe) = pipe else { return 0 };
    let once = |fd: &std::os::fd::OwnedFd| {
        SCRATCH.with_borrow_mut(|scratch| {
            let length = rustix::io::read(fd, scratch.as_mut_slice())?;
            if !process.discards(stderr) {
                process.write_output(stderr, &scratch[..length]);
            }
            Ok::<_, io::Error>(length)
        })
    };
    match pipe.async_io(Interest::READABLE, once).await {
        Ok(length) => length,
        Err(error) => {
            debug_assert_eq!(Errno::from_io_error(&error), Some(Errno::IO));
            0
        }
    }
}

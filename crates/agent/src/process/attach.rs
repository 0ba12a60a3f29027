//! Conversations between a stream and a process.

use std::rc::Rc;

use tokio::task::AbortHandle;
use torpor_protocol::guest::{Failure, FailureCode, Kind, ProcessSpec, Reply};

use super::life::start;
use super::{Ended, Process, tree};
use crate::agent::Agent;
use crate::descriptor::Descriptor;
use crate::failure::failure;
use crate::stream::{Closed, Input, Stream};
use crate::terminal::END_OF_INPUT;

/// Starts a process and stays attached to it: its output is complete, however slow the reader.
pub(crate) async fn run(
    agent: &Rc<Agent>,
    stream: &Rc<Stream>,
    spec: ProcessSpec,
) -> Result<(), Failure> {
    if spec.supervise.is_some() {
        return Err(failure(FailureCode::Invalid, "only started processes are supervised"));
    }
    if spec.discard_stdout || spec.discard_stderr {
        let message = "only of started processes the output is thrown away";
        return Err(failure(FailureCode::Invalid, message));
    }
    let process = start(agent, spec, true)?;
    let leash = Leash { stream, process: &process };
    let feeding = Feeding::begin(stream, &process, process.spec.stdin);
    stream.reply(&Reply::Started(process.status())).await;
    let view = View { stream, process: &process, life: process.life(), slows: true, stamps: false };
    let ended = view.show(0, true).await;
    drop((feeding, leash));
    finish(stream, ended).await;
    Ok(())
}

/// Ties a process to the stream that runs it.
struct Leash<'a> {
    stream: &'a Stream,
    process: &'a Process,
}

impl Drop for Leash<'_> {
    fn drop(&mut self) {
        self.process.slow_down_for(None);
        // A daemon that went away (`Forgotten`) takes no process with it.
        let given_up = self.stream.closed_because() == Some(Closed::Reset);
        if given_up && !self.process.spec.survives_detach && !self.process.ended() {
            let reaped = !self.process.alive();
            tokio::task::spawn_local(tree::kill(self.process.pid(), reaped));
        }
    }
}

/// Writes what arrives on a stream to a process, for as long as they are attached. A task of its own:
/// what had arrived when another session began is still written, like a line that was typed just
/// before the machine fell asleep.
struct Feeding<'a> {
    stream: &'a Stream,
    task: AbortHandle,
}

impl<'a> Feeding<'a> {
    fn begin(stream: &'a Rc<Stream>, process: &Rc<Process>, close: bool) -> Self {
        let task = tokio::task::spawn_local(feed(stream.clone(), process.clone(), close));
        Self { stream, task: task.abort_handle() }
    }
}

impl Drop for Feeding<'_> {
    fn drop(&mut self) {
        if self.stream.closed_because() != Some(Closed::Forgotten) {
            self.task.abort();
        }
    }
}

/// What somebody who attaches wants to see.
pub(crate) struct Show {
    /// What it wrote before.
    pub(crate) replay: bool,
    /// What it will write.
    pub(crate) follow: bool,
    /// When it wrote it.
    pub(crate) stamps: bool,
}

/// Shows what a process wrote and writes, as far as the stream keeps up.
pub(crate) async fn attach(
    agent: &Agent,
    stream: &Rc<Stream>,
    pid: u32,
    show: Show,
) -> Result<(), Failure> {
    let process = agent.processes.find(pid)?;
    let life = process.life();
    let from = {
        let output = process.output.borrow();
        if show.replay { output.start() } else { output.end() }
    };
    let feeding = Feeding::begin(stream, &process, false);
    stream.reply(&Reply::Started(process.status())).await;
    let view = View { stream, process: &process, life, slows: false, stamps: show.stamps };
    let ended = view.show(from, show.follow).await;
    drop(feeding);
    finish(stream, ended).await;
    Ok(())
}

async fn finish(stream: &Stream, ended: Option<Rc<Ended>>) {
    if let Some(ended) = ended {
        stream.reply(&Reply::Exited(ended.status.clone())).await;
    }
}

/// One life of a process, shown on a stream.
struct View<'a> {
    stream: &'a Stream,
    process: &'a Process,
    life: u64,
    /// Whether the process waits for this stream.
    slows: bool,
    /// Whether it is said when output was written.
    stamps: bool,
}

impl View<'_> {
    /// Sends output from `offset` on until the life is over, or until now unless `follow`. Returns how
    /// the life ended, if it has.
    async fn show(&self, mut offset: u64, follow: bool) -> Option<Rc<Ended>> {
        let now = self.process.output.borrow().end();
        let mut said_ms = None;
        loop {
            let ended = self.process.ended_life(self.life);
            let (start, end) = {
                let output = self.process.output.borrow();
                (output.start(), output.end())
            };
            let until = match &ended {
                Some(ended) => ended.output_end.min(end),
                None if follow => end,
                None => now,
            };
            if offset < start {
                self.stream.reply(&Reply::Skipped { bytes: start - offset }).await;
                offset = start;
            } else if offset < until {
                if self.stamps {
                    self.say_when(offset, &mut said_ms).await;
                }
                offset += self.send(offset, until).await;
                if self.slows {
                    self.process.slow_down_for(Some(offset));
                }
            } else if ended.is_some() || !follow {
                return ended;
            } else {
                self.process.changed.notified().await;
            }
        }
    }

    /// Says when what is at `offset` was written, unless that was said before.
    async fn say_when(&self, offset: u64, said_ms: &mut Option<u64>) {
        let at_ms = self.process.output.borrow().said_at(offset);
        if at_ms != *said_ms
            && let Some(ms) = at_ms
        {
            self.stream.reply(&Reply::At { ms }).await;
            *said_ms = Some(ms);
        }
    }

    /// Sends one packet; nothing if the output was gone when it was our turn.
    async fn send(&self, offset: u64, until: u64) -> u64 {
        let fill = |room: &mut [u8]| {
            let wanted = usize::try_from(until - offset).unwrap_or(usize::MAX);
            let length = room.len().min(wanted);
            let room = &mut room[..length];
            let copied = self.process.output.borrow().copy(offset, self.stamps, room);
            let kind = |stderr| if stderr { Kind::DataErr } else { Kind::Data };
            Ok::<_, std::convert::Infallible>(copied.map(|(stderr, length)| (kind(stderr), length)))
        };
        match self.stream.send_data(fill).await {
            Ok(sent) => sent as u64,
            Err(never) => match never {},
        }
    }
}

/// Writes what arrives to the process; after the `End` closes its stdin if `close`.
async fn feed(stream: Rc<Stream>, process: Rc<Process>, close: bool) {
    loop {
        let bytes = match stream.receive_to_the_last().await {
            Input::Bytes(bytes) => bytes,
            Input::End if close => return close_stdin(&process).await,
            Input::End | Input::Closed => return,
        };
        let stdin = process.stdin.borrow().clone();
        // What a process does not want to read is lost, as with any pipe.
        if let Some(stdin) = stdin {
            let _ = stdin.write_all(&bytes).await;
        }
    }
}

async fn close_stdin(process: &Process) {
    let terminal = process.terminal.borrow().clone();
    match terminal {
        // Closing a terminal would hang up; this is what a person types.
        Some(terminal) => {
            let _ = terminal.write_all(END_OF_INPUT).await;
        }
        None => drop(process.stdin.take()),
    }
}

/// Writes what arrives to a process's stdin, to the last byte.
pub(crate) async fn write_stdin(
    agent: &Agent,
    stream: &Stream,
    pid: u32,
    close: bool,
) -> Result<(), Failure> {
    let process = agent.processes.find(pid)?;
    let stdin = open_stdin(&process)?;
    while let Some(bytes) = stream.receive().await {
        stdin.write_all(&bytes).await.map_err(|_| gone(pid))?;
    }
    drop(stdin);
    if close {
        close_stdin(&process).await;
    }
    stream.reply(&Reply::Done).await;
    Ok(())
}

fn open_stdin(process: &Process) -> Result<Rc<Descriptor>, Failure> {
    let pid = process.pid();
    if process.ended() {
        return Err(gone(pid));
    }
    let message = || format!("process {pid} has no open stdin");
    process.stdin.borrow().clone().ok_or_else(|| failure(FailureCode::Invalid, message()))
}

fn gone(pid: u32) -> Failure {
    failure(FailureCode::NoSuchProcess, format!("process {pid} reads no more"))
}

//! What a process says, to its end, also if its sandbox sleeps in between.
//!
//! - Sleep takes the way to the agent, not the process. The tail waits for the sandbox to be awake
//!   again, which it does not cause, and goes on where it was: output has one order and is counted
//!   from the first byte, so what was told before is left out of what the agent still has.
//! - A process that is run for somebody is killed when he leaves. While it sleeps it can't be.

use bytes::Buf;
use torpor_protocol::api::ExitReport;
use torpor_protocol::guest::{ProcessStatus, Request};
use torpor_protocol::{ErrorCode, State, Status};
use torpor_service::processes::{Awake, Output, Said};
use torpor_service::{Error, Sandbox};

const SIGKILL: i32 = 9;

pub(super) struct Tail {
    sandbox: Sandbox,
    process: ProcessStatus,
    /// None while the sandbox sleeps.
    output: Option<Output>,
    /// How often the sandbox had woken when the output was opened.
    wakes: u64,
    /// How many bytes of the process's output were told, or are lost.
    position: u64,
    /// How many of the bytes that come were told before.
    known: u64,
    /// Whether the process lives for whoever reads.
    leashed: bool,
    /// Whether `output` is of an attach, which leaves the process alone when it is dropped.
    attached: bool,
}

impl Tail {
    /// Of a process that was run: it dies with the tail.
    pub(super) fn of_run(output: Output) -> Self {
        Self::new(output, true)
    }

    /// Of a process that lives on its own.
    pub(super) fn of_attach(output: Output) -> Self {
        Self::new(output, false)
    }

    fn new(output: Output, leashed: bool) -> Self {
        let sandbox = output.awake().sandbox.clone();
        let process = output.started.clone();
        Self {
            wakes: wakes(&sandbox),
            position: process.output_dropped,
            sandbox,
            process,
            output: Some(output),
            known: 0,
            leashed,
            attached: false,
        }
    }

    pub(super) fn process(&self) -> &ProcessStatus {
        &self.process
    }

    /// Cancel-safe. `None` after the end, and if it is lost.
    pub(super) async fn next(&mut self) -> Option<Said> {
        loop {
            let Some(output) = &mut self.output else {
                match self.attach_again().await? {
                    0 => continue,
                    lost => return Some(Said::Skipped(lost)),
                }
            };
            match output.next().await {
                Ok(said) => match self.take(said?) {
                    Some(said) => return Some(said),
                    None => continue,
                },
                Err(error) if fell_asleep(&error) => self.output = None,
                Err(error) => return self.broke(&error),
            }
        }
    }

    /// Leaves out what was told before.
    fn take(&mut self, said: Said) -> Option<Said> {
        match said {
            Said::Bytes(stream, mut bytes) => {
                let known = usize::try_from(self.known).map_or(bytes.len(), |n| n.min(bytes.len()));
                bytes.advance(known);
                self.known -= known as u64;
                self.position += bytes.len() as u64;
                (!bytes.is_empty()).then_some(Said::Bytes(stream, bytes))
            }
            Said::Skipped(lost) => {
                let known = self.known.min(lost);
                self.known -= known;
                self.position += lost - known;
                (lost > known).then_some(Said::Skipped(lost - known))
            }
            Said::At(ms) => Some(Said::At(ms)),
            Said::Exited(report) => {
                self.leashed = false;
                Some(Said::Exited(report))
            }
        }
    }

    /// Waits until the sandbox is awake and attaches to the process. Gives how many bytes of its
    /// output are gone; `None` if the process is.
    async fn attach_again(&mut self) -> Option<u64> {
        let wakes_before = self.wakes;
        let over = |status: &Status| match status.state {
            // Until it sleeps it still counts as running, with the wakes that we know.
            State::Running => status.wakes > wakes_before,
            State::Failed | State::Terminated => true,
            State::Creating | State::Asleep => false,
        };
        let state = self.sandbox.watch().wait_for(over).await.ok()?.state;
        if state != State::Running {
            return None;
        }
        let Some(lease) = self.sandbox.if_awake() else { return self.missed() };
        let pid = self.process.pid;
        let request = Request::Attach { pid, replay: true, follow: true, stamps: true };
        let awake = Awake { sandbox: self.sandbox.clone(), lease };
        let output = match Output::open(awake, &request, None).await {
            Ok(output) => output,
            Err(error) if fell_asleep(&error) => return self.missed(),
            Err(_) => return None,
        };
        if output.started.started_at_ms != self.process.started_at_ms {
            return None;
        }
        let kept_from = output.started.output_dropped;
        let lost = kept_from.saturating_sub(self.position);
        self.known = self.position.saturating_sub(kept_from);
        self.position += lost;
        self.wakes = wakes(&self.sandbox);
        self.attached = true;
        self.output = Some(output);
        Some(lost)
    }

    /// It sleeps again already: the next wake is waited for.
    fn missed(&mut self) -> Option<u64> {
        self.wakes = wakes(&self.sandbox);
        Some(0)
    }

    /// The machine is gone, and the process with it. If there was no memory left, that is how it ended.
    fn broke(&mut self, error: &Error) -> Option<Said> {
        if let Some(blame) = error.internal() {
            tracing::error!(error = blame, "the output of a process broke off");
        }
        let starved = self.output.as_ref().is_some_and(Output::starved);
        if !starved || !std::mem::take(&mut self.leashed) {
            return None;
        }
        let signal = Some(SIGKILL);
        Some(Said::Exited(ExitReport { signal, oom_killed: true, ..ExitReport::default() }))
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        if !(self.leashed && self.attached) {
            return;
        }
        let Some(output) = self.output.take() else { return };
        let pid = self.process.pid;
        tokio::spawn(async move {
            let kill = Request::Kill { pid, grace_ms: None };
            // It may have ended by itself, or sleep.
            let _ = output.awake().lease.guest().done(&kill).await;
        });
    }
}

fn wakes(sandbox: &Sandbox) -> u64 {
    sandbox.watch().borrow().wakes
}

/// Whether it broke off because somebody put the sandbox to sleep.
pub(super) fn fell_asleep(error: &Error) -> bool {
    error.code() == ErrorCode::SandboxAsleep
}

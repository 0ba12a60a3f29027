//! A process that somebody inside the machine asked for. It has that one's stdin, stdout and stderr,
//! and the daemon knows nothing of it: it is in no list, and nothing of its output is kept. It is
//! reaped, and it is killed with the others when the agent ends.

use std::os::fd::BorrowedFd;

use rustix::process::WaitStatus;
use tokio::sync::oneshot;
use torpor_protocol::guest::{Exit, Failure, ProcessSpec};

use super::life::exit_of;
use super::orders::send_signal;
use super::spawn::spawn_onto;
use super::tree;
use crate::agent::Agent;

pub(crate) struct Bystander {
    pid: u32,
    /// None once it was told.
    end: Option<oneshot::Receiver<WaitStatus>>,
}

impl Bystander {
    /// Starts it in its own session. Nothing but the spec decides about it.
    pub(crate) fn start(
        agent: &Agent,
        spec: &ProcessSpec,
        stdio: [BorrowedFd<'_>; 3],
    ) -> Result<Self, Failure> {
        // Nothing may be awaited between fork and table, or the reaper finds a stranger.
        let pid = spawn_onto(agent, spec, stdio)?;
        Ok(Self { pid, end: Some(agent.processes.stand_by(pid)) })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits for its end, which is told once.
    pub(crate) async fn ended(&mut self) -> Exit {
        let Some(end) = &mut self.end else { return exit_of(None) };
        let status = end.await.ok();
        self.end = None;
        exit_of(status)
    }

    /// Sends a signal to it and all in its group, if it is there. Only directly after `ended` was
    /// seen to wait: its number may be another's once it is reaped.
    pub(crate) fn signal(&self, signal: i32) {
        if self.end.is_some() {
            // Who is gone meanwhile, or whom no such signal exists for, gets none.
            let _ = send_signal(self.pid, signal);
        }
    }

    /// Kills it with everything it started; what it left behind, if it has ended.
    pub(crate) async fn kill(&self) {
        tree::kill(self.pid, self.end.is_none()).await;
    }
}

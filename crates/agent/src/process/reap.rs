//! Collects children that ended.
//!
//! As PID 1 the agent inherits every orphan of the machine and collects whatever it can. In another
//! program's process it asks for its own children by number only, so it never takes a child from
//! that program.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use rustix::process::{Pid, WaitOptions, wait, waitpid};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::tree;
use crate::Mode;
use crate::agent::Agent;

/// How long processes get to vanish when the agent ends.
const LAST_WAIT: Duration = Duration::from_secs(5);

pub(crate) struct Reaper {
    agent: Rc<Agent>,
    children: Signal,
}

impl Reaper {
    /// Must exist before the first child does, or its end goes unnoticed.
    pub(crate) fn new(agent: &Rc<Agent>) -> io::Result<Self> {
        Ok(Self { agent: agent.clone(), children: signal(SignalKind::child())? })
    }

    pub(crate) async fn run(mut self) {
        while self.children.recv().await.is_some() {
            collect(&self.agent);
        }
    }
}

fn collect(agent: &Agent) {
    match agent.mode {
        Mode::Init => {
            while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
                agent.processes.reaped(pid.as_raw_nonzero().get().unsigned_abs(), status);
            }
        }
        Mode::InProcess => {
            for pid in agent.processes.running_pids() {
                let child = Pid::from_raw(pid.cast_signed());
                if let Ok(Some((_, status))) = waitpid(child, WaitOptions::NOHANG) {
                    agent.processes.reaped(pid, status);
                }
            }
        }
    }
}

/// Kills whatever was started and is still there.
pub(crate) async fn kill_all(agent: &Rc<Agent>) {
    let gone = async {
        while agent.processes.running() > 0 {
            tree::kill_all(&agent.processes.running_pids()).await;
            collect(agent);
        }
    };
    // What can't be killed within this time is stuck in the kernel, and goes with the machine.
    let _ = tokio::time::timeout(LAST_WAIT, gone).await;
}

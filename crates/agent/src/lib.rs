//! The agent: PID 1 inside every machine, the daemon's hands and eyes there.
//!
//! ```text
//!   channel (packets) ─▶ session ─▶ one task per stream ─▶ answer
//!        ▲                                │                  ├─ process/   run, attach, supervise
//!        └────────── turn, credit ────────┘                  ├─ files/     read, write, list, watch
//!                                                            ├─ archive/   tar in, tar out
//!                                                            ├─ ports, identity ─▶ ca/
//!                                                            ├─ mounts     volumes of the host
//!                                                            └─ quiesce/   stand still, go on
//!   line (threads, where the channel is a serial port) ─▶ channel
//!        └─▶ fuse/ (a thread of its own) ─▶ mounts of files that the host serves
//!   sudo/ (its socket inside the machine) ─▶ process/
//! ```
//!
//! Invariants:
//! - One thread owns everything; state lives in cells that are never borrowed across an await.
//! - Nothing that came from a user process or from the channel grows without a bound.
//! - A stream nobody reads stops itself and nobody else: there is one packet buffer, and whoever has
//!   something to send takes turns at it.
//! - Processes belong to the table, not to the streams: they outlive a daemon that went away.

mod agent;
mod answer;
mod archive;
mod ca;
mod channel;
mod descriptor;
mod failure;
mod files;
mod fuse;
mod identity;
mod kept;
mod line;
mod listeners;
mod mounts;
mod ports;
mod process;
mod quiesce;
mod session;
mod stream;
mod sudo;
mod terminal;
mod writable;

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::task::LocalSet;

use agent::Agent;
#[cfg(any(test, fuzzing))]
pub use archive::fuzzing;
pub use line::{Packets, line, packets};
pub use sudo::{called_as_sudo, sudo};
pub use writable::make_pages_writable;

/// Threads for the few jobs that are long and wait for nobody (removing a big tree). In a machine
/// every thread costs the host one too.
const BLOCKING_THREADS: usize = 4;
/// How long such a thread is kept for the next job.
const BLOCKING_KEEP: Duration = Duration::from_secs(1);

/// Where the agent runs, and so what it may touch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// PID 1 of a machine: reaps everybody's orphans, owns the hostname, mounts nothing but
    /// its boot id.
    Init,
    /// In the test process of the fake engine: touches only processes it started, sets no hostname,
    /// writes no resolv.conf.
    InProcess,
}

/// Serves one channel, a SEQPACKET socket (see [`packets`]), until the other side is gone; kills what it started
/// before it returns. Blocks; makes its own single-threaded runtime.
pub fn serve(channel: OwnedFd, mode: Mode) -> io::Result<()> {
    serve_all(Packets { agent: channel, files: None }, mode)
}

/// The same, with the packets for its mounts where the channel has any (see [`line()`]).
pub fn serve_all(channel: Packets, mode: Mode) -> io::Result<()> {
    let runtime = Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_keep_alive(BLOCKING_KEEP)
        .build()?;
    let tasks = LocalSet::new();
    let served = tasks.block_on(&runtime, async {
        descriptor::begin()?;
        let served = match channel.files {
            Some(files) => Some(fuse::start(files, channel.agent.try_clone()?)?),
            None => None,
        };
        let agent = Rc::new(Agent::new(channel.agent, mode, served)?);
        let reaper = process::Reaper::new(&agent)?;
        tokio::task::spawn_local(reaper.run());
        if mode == Mode::Init {
            put_away_gofer();
            sudo::offer(&agent);
        }
        let ended = session::converse(&agent).await;
        process::kill_all(&agent).await;
        ended
    });
    drop(tasks);
    descriptor::end();
    // A job that still runs on a thread must not keep the caller.
    runtime.shutdown_background();
    served
}

/// A directory of the host that some builds of runsc need for making a machine; nothing is in it, and
/// nobody serves it once the machine runs.
const GOFER_MOUNT: &str = "/dev/.gofer";

fn put_away_gofer() {
    use rustix::mount::{UnmountFlags, unmount};
    // Fails where there is none.
    if unmount(GOFER_MOUNT, UnmountFlags::DETACH).is_ok() {
        let _ = std::fs::remove_dir(GOFER_MOUNT);
    }
}

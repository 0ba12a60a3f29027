//! Standing still, so that the machine can be saved without its kernel noticing.
//!
//! Whoever starts processes puts them into one group of the kernel's, which stops as a whole and goes on
//! as a whole. It goes on only after the clock is right and the kernel's randomness is new: else two
//! machines that were one would roll the same dice.
//!
//! While the group stands still nobody can be born into it, for a child would stop before it executes its
//! program, and the agent waits for that. Whoever wants to start a process waits for [`Quiesce::unquiesced`].
//!
//! A machine without the group stands still by other means, and then there is nothing to do here.

mod group;
mod list;
mod renew;

use std::cell::Cell;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use torpor_protocol::guest::Failure;
use torpor_protocol::snapshot::SavedProcess;

use crate::agent::Agent;
use crate::failure::cannot;
use group::Group;

/// The group of everybody but the agent, in a machine that has one.
pub(crate) const GROUP: &str = "/sys/fs/cgroup/sandbox";
/// How long processes may take to stand still. One that waits for a disk does not until it has answered.
const FREEZE_MAX: Duration = Duration::from_secs(10);
/// How long writing may take: all memory of a large machine, to a slow disk.
const SYNC_MAX: Duration = Duration::from_secs(60);

pub(crate) struct Quiesce {
    group: Option<Group>,
    quiesced: Cell<bool>,
    /// How often it was begun.
    count: Cell<u64>,
    changed: Notify,
}

impl Quiesce {
    /// With the group at `directory`, if there is one.
    pub(crate) fn new(directory: Option<&Path>) -> Self {
        Self {
            group: directory.and_then(Group::open),
            quiesced: Cell::new(false),
            count: Cell::new(0),
            changed: Notify::new(),
        }
    }

    /// Where a child says that it belongs to the group.
    pub(crate) fn joining(&self) -> Option<BorrowedFd<'_>> {
        self.group.as_ref().map(Group::joining)
    }

    pub(crate) fn quiesced(&self) -> bool {
        self.quiesced.get()
    }

    /// Differs if it was quiesced in between.
    pub(crate) fn count(&self) -> u64 {
        self.count.get()
    }

    /// Waits until processes may go on.
    pub(crate) async fn unquiesced(&self) {
        while self.quiesced() {
            self.changed.notified().await;
        }
    }

    fn begin(&self) {
        self.quiesced.set(true);
        self.count.set(self.count.get() + 1);
    }

    fn end(&self) {
        self.quiesced.set(false);
        self.changed.notify_waiters();
    }
}

/// Everybody but the agent stands still from now on, and what was written is on the disk. If that fails,
/// everybody goes on.
pub(crate) async fn quiesce(agent: &Agent) -> Result<Vec<SavedProcess>, Failure> {
    let Some(group) = &agent.quiesce.group else { return Ok(list::all()) };
    // Before the group stops: nobody is being born then.
    agent.quiesce.begin();
    match still(agent, group).await {
        Ok(()) => Ok(list::of(group)),
        Err(failed) => {
            if group.freeze(false).is_ok() {
                agent.quiesce.end();
            }
            Err(failed)
        }
    }
}

async fn still(agent: &Agent, group: &Group) -> Result<(), Failure> {
    group.freeze(true).map_err(cannot("cannot stop the processes"))?;
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    timeout(FREEZE_MAX, group.frozen())
        .await
        .unwrap_or_else(|late_by| Err(late(late_by)))
        .map_err(cannot("the processes do not stand still"))?;
    // On a thread: nobody knows how long it takes. Only what is below the root, and what the host serves now: another
    // file system may be served by somebody who stands still.
    let served = agent.served.as_ref().map(|served| served.borrow().clone()).unwrap_or_default();
    let synced = spawn_blocking(move || {
        for mount in served.iter().map(PathBuf::as_path).chain([Path::new("/")]) {
            rustix::fs::syncfs(std::fs::File::open(mount)?)?;
        }
        Ok::<_, io::Error>(())
    });
    match timeout(SYNC_MAX, synced).await {
        Ok(Ok(synced)) => synced,
        Ok(Err(_)) => Err(io::ErrorKind::Interrupted.into()),
        Err(late_by) => Err(late(late_by)),
    }
    .map_err(cannot("cannot write to the disk"))
}

/// Everybody goes on, with the right time and with new randomness; or nobody.
pub(crate) fn unquiesce(agent: &Agent, now_us: u64, entropy: &str) -> Result<(), Failure> {
    let Some(group) = &agent.quiesce.group else { return Ok(()) };
    renew::clock(now_us).map_err(cannot("cannot set the clock"))?;
    renew::randomness(entropy).map_err(cannot("cannot renew the kernel's randomness"))?;
    group.freeze(false).map_err(cannot("the processes do not go on"))?;
    agent.quiesce.end();
    Ok(())
}

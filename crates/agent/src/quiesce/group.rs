//! A group of processes that stops and goes on as a whole: a cgroup, version 2.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::sleep;

/// The pause between looks grows up to this. Most groups stand still at the first look or the second.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

pub(super) struct Group {
    directory: PathBuf,
    /// Who writes a zero here is a member.
    members: File,
}

impl Group {
    /// None where there is no such group.
    pub(super) fn open(directory: &Path) -> Option<Self> {
        let members = OpenOptions::new().write(true).open(directory.join("cgroup.procs")).ok()?;
        directory
            .join("cgroup.freeze")
            .exists()
            .then(|| Self { directory: directory.into(), members })
    }

    pub(super) fn joining(&self) -> BorrowedFd<'_> {
        self.members.as_fd()
    }

    /// Tells the members to stop, or to go on.
    pub(super) fn freeze(&self, freeze: bool) -> io::Result<()> {
        fs::write(self.directory.join("cgroup.freeze"), if freeze { "1" } else { "0" })
    }

    /// Waits until all have stopped.
    pub(super) async fn frozen(&self) -> io::Result<()> {
        let mut pause = Duration::from_millis(1);
        while !self.is_frozen()? {
            sleep(pause).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
        Ok(())
    }

    fn is_frozen(&self) -> io::Result<bool> {
        let events = fs::read_to_string(self.directory.join("cgroup.events"))?;
        Ok(events.lines().any(|line| line == "frozen 1"))
    }

    pub(super) fn pids(&self) -> Vec<u32> {
        let members = fs::read_to_string(self.directory.join("cgroup.procs")).unwrap_or_default();
        members.lines().filter_map(|line| line.parse().ok()).collect()
    }
}

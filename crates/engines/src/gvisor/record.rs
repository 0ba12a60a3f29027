//! What a daemon must know of a machine that an earlier daemon started: `machine.json`.
//!
//! It is written when the machine is whole and before anybody hears of it, so a machine without it
//! is a boot that was cut off.

use std::io;
use std::path::Path;

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};
use torpor_protocol::{Network, SandboxId};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) id: SandboxId,
    pub(super) process: Process,
    /// The number of its place in the network.
    pub(super) slot: u16,
    pub(super) network: Network,
    /// The build of runsc it runs on.
    pub(super) build: String,
}

impl Record {
    /// Replaces the file as a whole: a reader sees all of it or none.
    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, serde_json::to_vec(self).expect("a record has text keys only"))?;
        std::fs::rename(fresh, path)
    }

    /// `None` if there is none, or none that can be read: the machine is not whole.
    pub(super) fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(path).ok()?).ok()
    }
}

/// One process of this host and no other, also when its number is used again or the host was
/// started anew.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    pub(super) pid: i32,
    /// When it started, in the kernel's ticks.
    started: u64,
    /// Which start of the host.
    boot: String,
}

impl Process {
    pub(super) fn of(pid: i32) -> io::Result<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        Ok(Self { pid, started: start_ticks(pid)?, boot })
    }

    /// Takes hold of it if it is still there.
    pub(super) fn open(&self) -> Option<rustix::fd::OwnedFd> {
        let pidfd = pidfd_open(Pid::from_raw(self.pid)?, PidfdFlags::NONBLOCK).ok()?;
        // Compared after it is held: from here on the number can't change its owner unseen.
        (Self::of(self.pid).ok()? == *self).then_some(pidfd)
    }
}

/// Field 22 of `/proc/<pid>/stat`, counted after the name, which may contain anything.
fn start_ticks(pid: i32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let ticks = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19));
    ticks
        .and_then(|ticks| ticks.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "unexpected /proc/<pid>/stat"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_apart_from_one_with_the_same_number() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let process = Process::of(child.id().try_into().unwrap()).unwrap();
        assert!(process.open().is_some());
        let other = Process { started: process.started + 1, ..process.clone() };
        assert!(other.open().is_none());
        let before_reboot = Process { boot: "other".into(), ..process.clone() };
        assert!(before_reboot.open().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.open().is_none());
    }

    #[test]
    fn a_record_that_was_cut_off_is_no_record() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("machine.json");
        assert_eq!(Record::read(&path), None);
        let record = Record {
            id: SandboxId::random(),
            process: Process::of(1).unwrap(),
            slot: 7,
            network: Network::default(),
            build: "release-20260622.0".into(),
        };
        record.write(&path).unwrap();
        assert_eq!(Record::read(&path), Some(record));
        let half = std::fs::read(&path).unwrap();
        std::fs::write(&path, &half[..half.len() / 2]).unwrap();
        assert_eq!(Record::read(&path), None);
    }
}

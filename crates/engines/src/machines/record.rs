//! What a daemon must know of a machine that an earlier daemon started: `machine.json`, which is
//! written before a guest runs in it, and `mark`, which is there once one does.
//!
//! Neither needs to survive the host, which would take the machine with it: nobody waits for a disk
//! here.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};
use torpor_lifecycle::engine::EngineError;
use torpor_protocol::{Network, SandboxId};

use super::id::MachineId;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) id: MachineId,
    /// Whose it is; `None`: it was prepared ahead and nobody has it.
    pub(crate) sandbox: Option<SandboxId>,
    pub(crate) process: Process,
    /// The number of its place in the network.
    pub(crate) slot: u16,
    pub(crate) network: Network,
    /// The build of the engine's program it runs on.
    pub(crate) build: String,
}

impl Record {
    /// Replaces the file as a whole: a reader sees all of it or none.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, serde_json::to_vec(self).expect("a record has text keys only"))?;
        std::fs::rename(fresh, path)
    }

    /// `None` if there is none, or none that can be read: the machine is not whole.
    pub(crate) fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(path).ok()?).ok()
    }
}

/// How a guest stands. The sandbox's kernel counts how often it was told to pause, can't be asked for
/// the count, and dies when told to resume once too often: so every such call lies between two
/// marks, and a daemon that finds the first of them has to look (see `control`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    Running,
    /// Frozen, and the kernel was told nothing.
    Frozen,
    /// It was frozen; unless it still is, the kernel may have been told to pause.
    Pausing,
    /// The kernel is paused; frozen, or about to be.
    Paused,
    /// The kernel may have been told to resume, unless the machine is still frozen.
    Resuming,
}

impl Mark {
    /// Whether the guest stands still as far as anybody outside is concerned.
    pub(crate) fn stands(self) -> bool {
        match self {
            Self::Frozen | Self::Pausing | Self::Paused => true,
            Self::Running | Self::Resuming => false,
        }
    }
}

const MARKING: &str = "mark the machine";
const MARKS: [(Mark, u8); 5] = [
    (Mark::Running, b'r'),
    (Mark::Frozen, b'f'),
    (Mark::Pausing, b'q'),
    (Mark::Paused, b'p'),
    (Mark::Resuming, b's'),
];

/// A machine's mark and its file: one byte, so that it is always whole, and written in place, so that it
/// costs a waking machine nothing.
#[derive(Debug)]
pub(crate) struct MarkFile {
    file: File,
    mark: Mark,
    paused: Arc<AtomicBool>,
}

impl MarkFile {
    /// Of a guest that runs now for the first time.
    pub(crate) fn create(path: &Path) -> Result<Self, EngineError> {
        let file = File::create_new(path).map_err(EngineError::failed(MARKING))?;
        let mut created = Self { file, mark: Mark::Running, paused: Arc::default() };
        created.set(Mark::Running)?;
        Ok(created)
    }

    /// `None` if no guest was started.
    pub(crate) fn open(path: &Path) -> Option<Self> {
        let file = File::options().read(true).write(true).open(path).ok()?;
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0).ok()?;
        let (mark, _) = MARKS.into_iter().find(|(_, letter)| *letter == byte[0])?;
        Some(Self { file, mark, paused: Arc::new(AtomicBool::new(mark.stands())) })
    }

    pub(crate) fn get(&self) -> Mark {
        self.mark
    }

    /// Whether the guest stands still, for whoever can't wait for a turn.
    pub(crate) fn paused(&self) -> Arc<AtomicBool> {
        self.paused.clone()
    }

    pub(crate) fn set(&mut self, mark: Mark) -> Result<(), EngineError> {
        let letter = MARKS.into_iter().find(|(known, _)| *known == mark);
        let (_, letter) = letter.expect("every mark has a letter");
        self.file.write_all_at(&[letter], 0).map_err(EngineError::failed(MARKING))?;
        self.mark = mark;
        self.paused.store(mark.stands(), Ordering::Release);
        Ok(())
    }
}

/// One process of this host and no other, also when its number is used again or the host was
/// started anew.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// When it started, in the kernel's ticks.
    started: u64,
    /// Which start of the host.
    boot: String,
}

impl Process {
    pub(crate) fn of(pid: i32) -> io::Result<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        Ok(Self { pid, started: start_ticks(pid)?, boot })
    }

    /// Takes hold of it if it is still there.
    pub(crate) fn open(&self) -> Option<rustix::fd::OwnedFd> {
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
            id: MachineId::random(),
            sandbox: Some(SandboxId::random()),
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
    #[test]
    fn a_mark_is_found_as_it_was_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mark");
        assert!(MarkFile::open(&path).is_none(), "no guest was started");
        let mut file = MarkFile::create(&path).unwrap();
        assert_eq!(MarkFile::open(&path).unwrap().get(), Mark::Running);
        for (mark, _) in MARKS {
            file.set(mark).unwrap();
            assert_eq!(MarkFile::open(&path).unwrap().get(), mark);
        }
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1);
        std::fs::write(&path, "").unwrap();
        assert!(MarkFile::open(&path).is_none());
    }
}

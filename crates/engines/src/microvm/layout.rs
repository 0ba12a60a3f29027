//! Where the engine's files are: the only place that knows.
//!
//! ```text
//! runtime_dir/<tag>/vm/     0700; gone when the last machine is gone and the daemon stops
//!   keeper.sock
//!   initramfs               what machines boot with: the kernel's modules and our first program
//!   machines/<id>/          made first and removed last: what is under way has one
//!     jail.json, pid        how its QEMU is started, and which process it is
//!     machine.json, mark    see `machines`
//!     root/                 empty: what its QEMU sees is built on it
//!     run/                  of its QEMU's user: the sockets `monitor` and `agent`
//! scratch_dir/<id>.memory   what its memory began as: shared with all who began so, never written
//! scratch_dir/<id>.disk     what it writes on top of its image
//! templates_dir/<key>/      a machine right after its boot, for all that begin so (see `template`)
//! ```

use std::io;
use std::path::{Path, PathBuf};

use crate::machines::{Files, MARK, MachineId, RECORD, absent, remove_if_empty};

/// Longest runtime directory, with the tag: a unix socket's path has at most 107 bytes, and the longest
/// of ours is `vm/machines/<id>/run/monitor`.
pub(super) const RUNTIME_DIR_MAX: usize = 64;

/// Beside what other engines have of the same installation.
pub(super) const OWN_DIR: &str = "vm";
pub(super) const MACHINES_DIR: &str = "machines";

#[derive(Debug, Clone)]
pub(super) struct Layout {
    /// Of this engine and this installation alone.
    pub(super) runtime_dir: PathBuf,
    pub(super) scratch_dir: PathBuf,
    pub(super) templates_dir: PathBuf,
}

impl Layout {
    pub(super) fn initramfs(&self) -> PathBuf {
        self.runtime_dir.join("initramfs")
    }

    pub(super) fn machine(&self, id: &MachineId) -> MachineDir {
        let dir = self.machines().join(id.as_str());
        let run = dir.join("run");
        MachineDir {
            jail: dir.join("jail.json"),
            pid: dir.join("pid"),
            record: dir.join(RECORD),
            mark: dir.join(MARK),
            root: dir.join("root"),
            monitor: run.join("monitor"),
            agent: run.join("agent"),
            run,
            memory: self.scratch_dir.join(format!("{id}.memory")),
            disk: self.scratch_dir.join(format!("{id}.disk")),
            dir,
        }
    }
}

impl Files for Layout {
    fn machines(&self) -> PathBuf {
        self.runtime_dir.join(MACHINES_DIR)
    }

    fn scratch(&self) -> &Path {
        &self.scratch_dir
    }

    fn keeper_socket(&self) -> PathBuf {
        self.runtime_dir.join("keeper.sock")
    }

    fn remove(&self, id: &MachineId) -> io::Result<()> {
        let MachineDir { memory, disk, .. } = self.machine(id);
        absent(std::fs::remove_file(memory))?;
        absent(std::fs::remove_file(disk))
    }

    fn remove_shared(&self) -> io::Result<()> {
        absent(std::fs::remove_dir_all(&self.runtime_dir))?;
        // The parents are shared with other engines and installations.
        for parent in self.runtime_dir.ancestors().skip(1).take(2) {
            remove_if_empty(parent)?;
        }
        remove_if_empty(&self.scratch_dir)
    }
}

/// The files of one machine.
#[derive(Debug, Clone)]
pub(super) struct MachineDir {
    pub(super) dir: PathBuf,
    pub(super) jail: PathBuf,
    pub(super) pid: PathBuf,
    pub(super) record: PathBuf,
    pub(super) mark: PathBuf,
    pub(super) root: PathBuf,
    pub(super) run: PathBuf,
    pub(super) monitor: PathBuf,
    pub(super) agent: PathBuf,
    pub(super) memory: PathBuf,
    pub(super) disk: PathBuf,
}

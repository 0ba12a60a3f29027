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
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::directory::{self, absent, remove_if_empty};
use crate::host::HostConfig;
use crate::machines::{Files, MARK, MachineId};

/// Beside what other engines have of the same installation.
const OWN_DIR: &str = "vm";
/// What files are counted in.
const BLOCK: u64 = 512;

#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// Of this engine and this installation alone.
    runtime_dir: PathBuf,
    scratch_dir: PathBuf,
}

impl Layout {
    pub(crate) fn of(config: &HostConfig) -> Self {
        let runtime_dir = config.dir().join(OWN_DIR);
        Self { runtime_dir, scratch_dir: config.scratch_dir.clone() }
    }

    pub(super) fn initramfs(&self) -> PathBuf {
        self.runtime_dir.join("initramfs")
    }

    pub(super) fn machine(&self, id: &MachineId) -> MachineDir {
        let dir = self.machines().join(id.as_str());
        let run = dir.join("run");
        MachineDir {
            jail: dir.join("jail.json"),
            pid: dir.join("pid"),
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
    fn runtime(&self) -> &Path {
        &self.runtime_dir
    }

    fn scratch(&self) -> &Path {
        &self.scratch_dir
    }

    fn make(&self) -> io::Result<()> {
        directory::private(&self.runtime_dir)?;
        directory::private(&self.machines())
    }

    fn disk_bytes(&self, id: &MachineId) -> u64 {
        let disk = std::fs::metadata(self.machine(id).disk);
        disk.map_or(0, |disk| disk.blocks() * BLOCK)
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
    pub(super) mark: PathBuf,
    pub(super) root: PathBuf,
    pub(super) run: PathBuf,
    pub(super) monitor: PathBuf,
    pub(super) agent: PathBuf,
    pub(super) memory: PathBuf,
    pub(super) disk: PathBuf,
}

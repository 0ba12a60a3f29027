//! Where the engine's files are: the only place that knows.
//!
//! ```text
//! runtime_dir/<tag>/        0700; gone when the last machine is gone and the daemon stops
//!   keeper.sock
//!   root/                   empty: runsc wants directories, the root comes from the image
//!   runsc/                  runsc's own state: <id>_sandbox:<id>.{state,lock}, runsc-<id>.sock,
//!                           null-netns (a mount)
//!   machines/<id>/          made first and removed last: what is under way has one
//!     config.json, enter.json, pid, panic.log
//!     machine.json          whose it is; without it it is nobody's
//!     mark                  how its guest stands; without it it has none
//!     disk/                 its disk, mounted
//!     mounts/               volumes and drives that it has (see `mounts`)
//! scratch_dir/<id>.img      its disk
//! ```

use std::io;
use std::path::{Path, PathBuf};

use super::build::remove_state;
use super::mounts::Mounts;
use crate::directory::{self, absent, remove_if_empty};
use crate::disk::ScratchDisk;
use crate::host::HostConfig;
use crate::machines::{Files, MARK, MachineId};

#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// Of this installation alone.
    runtime_dir: PathBuf,
    scratch_dir: PathBuf,
}

impl Layout {
    pub(crate) fn of(config: &HostConfig) -> Self {
        Self { runtime_dir: config.dir(), scratch_dir: config.scratch_dir.clone() }
    }

    pub(super) fn empty_root(&self) -> PathBuf {
        self.runtime_dir.join("root")
    }

    pub(super) fn runsc_root(&self) -> PathBuf {
        self.runtime_dir.join("runsc")
    }

    /// Directories in the runtime directory that nobody else uses.
    fn own_dirs(&self) -> [PathBuf; 3] {
        [self.empty_root(), self.runsc_root(), self.machines()]
    }

    pub(super) fn machine(&self, id: &MachineId) -> MachineDir {
        let dir = self.machines().join(id.as_str());
        let runsc = self.runsc_root();
        MachineDir {
            config: dir.join("config.json"),
            entry: dir.join("enter.json"),
            pid: dir.join("pid"),
            panic_log: dir.join("panic.log"),
            mark: dir.join(MARK),
            disk: dir.join("disk"),
            disk_image: self.scratch_dir.join(format!("{id}.img")),
            mounts: dir.join("mounts"),
            control_socket: runsc.join(format!("runsc-{id}.sock")),
            runsc_files: vec![
                runsc.join(format!("runsc-{id}.sock")),
                runsc.join(format!("{id}_sandbox:{id}.state")),
                runsc.join(format!("{id}_sandbox:{id}.lock")),
            ],
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
        self.own_dirs().iter().try_for_each(|dir| directory::private(dir))
    }

    fn disk_bytes(&self, id: &MachineId) -> u64 {
        let MachineDir { disk_image, disk, .. } = self.machine(id);
        // Unmounted is unused.
        ScratchDisk::open(&disk_image, &disk).used_bytes().unwrap_or(0)
    }

    fn remove(&self, id: &MachineId) -> io::Result<()> {
        let dir = self.machine(id);
        let unbound = Mounts::at(&dir.mounts).remove();
        let removed = ScratchDisk::open(&dir.disk_image, &dir.disk).remove().and(unbound);
        dir.runsc_files.iter().try_for_each(|file| absent(std::fs::remove_file(file)))?;
        removed
    }

    fn remove_shared(&self) -> io::Result<()> {
        absent(remove_state(&self.runsc_root()))?;
        for dir in self.own_dirs() {
            absent(std::fs::remove_dir_all(dir))?;
        }
        remove_if_empty(&self.runtime_dir)?;
        // The parent is shared with other installations.
        self.runtime_dir.parent().map_or(Ok(()), remove_if_empty)?;
        remove_if_empty(&self.scratch_dir)
    }
}

/// The files of one machine.
#[derive(Debug, Clone)]
pub(super) struct MachineDir {
    pub(super) dir: PathBuf,
    pub(super) config: PathBuf,
    pub(super) entry: PathBuf,
    pub(super) pid: PathBuf,
    pub(super) panic_log: PathBuf,
    pub(super) mark: PathBuf,
    pub(super) disk: PathBuf,
    pub(super) disk_image: PathBuf,
    pub(super) mounts: PathBuf,
    pub(super) control_socket: PathBuf,
    pub(super) runsc_files: Vec<PathBuf>,
}

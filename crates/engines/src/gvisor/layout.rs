//! Where the engine's files are: the only place that knows.
//!
//! ```text
//! runtime_dir/<tag>/        0700; gone when the last machine is gone and the daemon stops
//!   keeper.sock
//!   root/                   empty: runsc wants a directory, the root comes from the image
//!   runsc/                  runsc's own state: <id>_sandbox:<id>.{state,lock}, runsc-<id>.sock
//!   machines/<id>/          made first and removed last: what is under way has one
//!     config.json, pid, panic.log
//!     machine.json          whose it is; without it it is nobody's
//!     mark                  how its guest stands; without it it has none
//!     disk/                 its disk, mounted
//! scratch_dir/<id>.img      its disk
//! ```

use std::path::{Path, PathBuf};

use super::id::MachineId;

/// Longest runtime directory, with the tag: a unix socket's path has at most 107 bytes, and the longest of ours
/// is `runsc/runsc-<id>.sock`.
pub(super) const RUNTIME_DIR_MAX: usize = 64;

#[derive(Debug, Clone)]
pub(super) struct Layout {
    /// Of this installation alone.
    pub(super) runtime_dir: PathBuf,
    pub(super) scratch_dir: PathBuf,
}

impl Layout {
    pub(super) fn keeper_socket(&self) -> PathBuf {
        self.runtime_dir.join("keeper.sock")
    }

    pub(super) fn empty_root(&self) -> PathBuf {
        self.runtime_dir.join("root")
    }

    pub(super) fn runsc_root(&self) -> PathBuf {
        self.runtime_dir.join("runsc")
    }

    pub(super) fn machines(&self) -> PathBuf {
        self.runtime_dir.join("machines")
    }

    /// Directories in the runtime directory that nobody else uses.
    pub(super) fn own_dirs(&self) -> [PathBuf; 3] {
        [self.empty_root(), self.runsc_root(), self.machines()]
    }

    pub(super) fn machine(&self, id: &MachineId) -> MachineDir {
        let dir = self.machines().join(id.as_str());
        let runsc = self.runsc_root();
        MachineDir {
            config: dir.join("config.json"),
            pid: dir.join("pid"),
            panic_log: dir.join("panic.log"),
            record: dir.join("machine.json"),
            mark: dir.join("mark"),
            disk: dir.join("disk"),
            disk_image: self.scratch_dir.join(format!("{id}.img")),
            control_socket: runsc.join(format!("runsc-{id}.sock")),
            runsc_files: vec![
                runsc.join(format!("runsc-{id}.sock")),
                runsc.join(format!("{id}_sandbox:{id}.state")),
                runsc.join(format!("{id}_sandbox:{id}.lock")),
            ],
            dir,
        }
    }

    /// Ids in the names of a directory's entries; foreign names are passed over.
    pub(super) fn ids_in(dir: &Path) -> Vec<MachineId> {
        let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
        let id = |name: &str| name.split('.').next().and_then(|stem| stem.parse().ok());
        entries.flatten().filter_map(|entry| id(entry.file_name().to_str()?)).collect()
    }
}

/// The files of one machine.
#[derive(Debug, Clone)]
pub(super) struct MachineDir {
    pub(super) dir: PathBuf,
    pub(super) config: PathBuf,
    pub(super) pid: PathBuf,
    pub(super) panic_log: PathBuf,
    pub(super) record: PathBuf,
    pub(super) mark: PathBuf,
    pub(super) disk: PathBuf,
    pub(super) disk_image: PathBuf,
    pub(super) control_socket: PathBuf,
    pub(super) runsc_files: Vec<PathBuf>,
}

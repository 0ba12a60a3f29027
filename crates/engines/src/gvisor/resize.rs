//! How much a machine may use can be changed while it lives. It is recorded nowhere but in its cgroup and its
//! disk, which outlive daemons and say it themselves.

use std::io::ErrorKind;

use torpor_lifecycle::engine::EngineError;
use torpor_protocol::Resources;

use crate::disk::ScratchDisk;
use crate::limits::{Group, Limits};

/// On `Err` it is as it was. Blocks.
pub(super) fn resize(
    group: &Group,
    disk: &ScratchDisk,
    wanted: &Resources,
) -> Result<(), EngineError> {
    const WHAT: &str = "change the machine's resources";
    let size = disk.size_mib().map_err(EngineError::failed(WHAT))?;
    if wanted.disk_mib < size {
        return Err(cant(format!("take from a disk, which has {size} MiB")));
    }
    if wanted.disk_mib > size {
        return Err(cant("grow a disk while the sandbox lives".to_owned()));
    }
    let (before, limits) = (group.limits().map_err(EngineError::failed(WHAT))?, Limits::of(wanted));
    check_use(group, &before, &limits)?;
    let Err(error) = group.bound(&limits) else { return Ok(()) };
    if let Err(error) = group.bound(&before) {
        tracing::warn!(%error, "a machine has neither its new limits nor all of its old ones");
    }
    // It used more by the time the kernel was asked.
    if matches!(error.kind(), ErrorKind::ResourceBusy | ErrorKind::TimedOut) {
        return Err(too_little(group, &limits));
    }
    Err(EngineError::failed(WHAT)(error))
}

/// Nothing is taken away that is in use.
fn check_use(group: &Group, before: &Limits, wanted: &Limits) -> Result<(), EngineError> {
    if wanted.memory_bytes < before.memory_bytes && wanted.memory_bytes < group.memory_held() {
        return Err(too_little(group, wanted));
    }
    let tasks = group.tasks();
    if wanted.pids < before.pids && wanted.pids < tasks {
        let pids = wanted.pids;
        return Err(cant(format!("limit a sandbox to {pids} tasks while it has {tasks}")));
    }
    Ok(())
}

fn too_little(group: &Group, wanted: &Limits) -> EngineError {
    let (limit, held) = (wanted.memory_bytes >> 20, group.memory_held().div_ceil(1 << 20));
    cant(format!("limit a sandbox to {limit} MiB of memory while it uses {held} MiB"))
}

fn cant(what: String) -> EngineError {
    EngineError::Unsupported { engine: "gvisor", what }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::tests::v2_on_paper;

    #[test]
    fn a_change_that_fails_half_way_is_taken_back() {
        let directory = tempfile::tempdir().unwrap();
        let group = v2_on_paper(directory.path());
        let image = directory.path().join("disk.img");
        std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        let disk = ScratchDisk::open(&image, directory.path());
        // A number that can be read and that nobody can change, so that the last step fails.
        let pids = directory.path().join("torpor/paper/one/pids.max");
        std::fs::remove_file(&pids).unwrap();
        std::os::unix::fs::symlink("/proc/sys/kernel/ngroups_max", &pids).unwrap();
        let before = group.limits().unwrap();
        let half = Resources { disk_mib: 64, cpus: 0.5, memory_mib: 512, ..Resources::default() };
        let error = resize(&group, &disk, &half).unwrap_err();
        assert!(matches!(error, EngineError::Failed { .. }), "{error}");
        assert_eq!(group.limits().unwrap(), before);
        std::fs::remove_file(&pids).unwrap();
        std::fs::write(&pids, "4096").unwrap();
        resize(&group, &disk, &half).unwrap();
        assert_eq!(group.limits().unwrap(), Limits::of(&half), "it was not for another reason");
    }
}

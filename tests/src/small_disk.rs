//! A data directory that can run full.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A filesystem in memory. Unmounted when dropped.
pub(crate) struct SmallDisk {
    path: PathBuf,
}

impl SmallDisk {
    /// Without a limit yet.
    pub(crate) fn mount(path: &Path) -> Self {
        run("mount", &["-t", "tmpfs", "-o", "size=4g,mode=0700", "torpor-test"], path);
        Self { path: path.to_owned() }
    }

    /// Leaves so much room besides what is there.
    pub(crate) fn limit(&self, spare_mib: u64) {
        let about = rustix::fs::statvfs(&self.path).expect("it is mounted");
        let used = (about.f_blocks - about.f_bfree) * about.f_frsize;
        let size = format!("remount,size={}", used + spare_mib * 1024 * 1024);
        run("mount", &["-o", &size], &self.path);
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: whatever a failed test left must not keep it.
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

fn run(program: &str, args: &[&str], path: &Path) {
    let status = Command::new(program).args(args).arg(path).status();
    assert!(status.is_ok_and(|status| status.success()), "{program} {args:?} {}", path.display());
}

//! Directories that can't grow beyond a size: what a machine writes on top of its image.
//!
//! ```text
//!   image (sparse file) ── loop device ── ext4 without journal ── mountpoint
//! ```
//!
//! Nothing here survives the host on purpose: what must last is in snapshots, so there is no
//! journal and no waiting for the disk. Blocks that are freed inside are given back to the host.
//!
//! Invariants: the loop device lives as long as the mount and no longer, whoever dies when; a
//! failed `create` leaves neither file nor mount; no name is used twice.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tokio::time::Instant;

use crate::directory::absent;
use crate::{loop_device, mountinfo, template};

#[cfg(test)]
mod tests;

/// Processes of a machine that was just killed hold its directory for a moment; then the mount is
/// taken out of sight instead, and goes when they do.
const UNMOUNT_DEADLINE: Duration = Duration::from_secs(2);
/// Somebody's copy of the mount (a machine that starts right now) may hold the device a bit longer.
const DETACH_DEADLINE: Duration = Duration::from_secs(2);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(2);

/// A size-limited directory. Dropping it changes nothing on the host. All methods block: some
/// milliseconds as a rule, seconds if the host is in trouble.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScratchDisk {
    image: PathBuf,
    mountpoint: PathBuf,
}

impl ScratchDisk {
    /// Makes the disk. Both names must be new; an empty directory may stand at the mountpoint.
    pub fn create(image: &Path, mountpoint: &Path, size_mib: u64) -> io::Result<Self> {
        let disk = Self::open(image, mountpoint);
        let template = template::of_size(size_mib)?;
        let file =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(image)?;
        let made = template.fill(&file).and_then(|()| disk.mount(&file));
        if made.is_err() {
            let _ = disk.remove();
        }
        made.map(|()| disk)
    }

    /// The disk that an earlier daemon made; see [`mounted`](Self::mounted).
    pub fn open(image: &Path, mountpoint: &Path) -> Self {
        Self { image: image.to_owned(), mountpoint: mountpoint.to_owned() }
    }

    pub fn mounted(&self) -> io::Result<bool> {
        Ok(device_at(&self.mountpoint)?.is_some())
    }

    pub fn path(&self) -> &Path {
        &self.mountpoint
    }

    /// What it was made with.
    pub fn size_mib(&self) -> io::Result<u64> {
        Ok(fs::metadata(&self.image)?.len() >> 20)
    }

    /// What is written in it.
    pub fn used_bytes(&self) -> io::Result<u64> {
        let fs = rustix::fs::statvfs(&self.mountpoint)?;
        Ok(fs.f_blocks.saturating_sub(fs.f_bfree).saturating_mul(fs.f_frsize))
    }

    /// Removes mount, device and files; works from the names alone. Idempotent.
    pub fn remove(&self) -> io::Result<()> {
        let device = device_at(&self.mountpoint)?;
        if device.is_some() {
            // Else unmounting would first write out what nobody will read.
            empty(&self.mountpoint);
        }
        unmount_all(&self.mountpoint)?;
        if let Some(device) = device {
            wait_for_detachment(&device, &self.image);
        }
        absent(fs::remove_file(&self.image))?;
        absent(fs::remove_dir(&self.mountpoint))
    }

    fn mount(&self, image: &File) -> io::Result<()> {
        match fs::create_dir(&self.mountpoint) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let device = loop_device::attach(image)?;
        // Executable, because an engine maps guest programs from a file in it.
        let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOATIME;
        let options = CString::new("discard,nobarrier,noinit_itable").expect("no zero byte");
        mount(device.path(), &self.mountpoint, "ext4", flags, options.as_c_str())?;
        Ok(())
    }
}

/// Removes all disks mounted below `directory` that `keep` does not want, by their mountpoint.
/// Returns how many. Goes on after a failure and then returns the first one.
pub fn sweep(directory: &Path, keep: impl Fn(&Path) -> bool) -> io::Result<usize> {
    let mut removed = 0;
    let mut failure = None;
    for mount in mountinfo::read()? {
        let ours =
            mount.point.starts_with(directory) && loop_device::number(&mount.source).is_some();
        if !ours || keep(&mount.point) {
            continue;
        }
        let image = loop_device::backing_file(&mount.source).unwrap_or_default();
        match ScratchDisk::open(&image, &mount.point).remove() {
            Ok(()) => removed += 1,
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    failure.map_or(Ok(removed), Err)
}

/// Makes an empty file the disk of a machine with a kernel of its own. Nothing is mounted. Blocks.
pub fn format(file: &File, size_mib: u64) -> io::Result<()> {
    template::format_whole(file, size_mib)
}

// === Steps ===

/// The loop device mounted there, if one is.
pub(crate) fn device_at(mountpoint: &Path) -> io::Result<Option<PathBuf>> {
    let mounts = mountinfo::read()?;
    let here = mounts.into_iter().rev().find(|mount| mount.point == mountpoint);
    Ok(here.map(|mount| mount.source).filter(|source| loop_device::number(source).is_some()))
}

/// Best effort: what stays is removed with the image.
fn empty(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let _ = if is_directory {
            fs::remove_dir_all(entry.path())
        } else {
            fs::remove_file(entry.path())
        };
    }
}

/// Until nothing is mounted there: mounts can lie on top of each other.
fn unmount_all(mountpoint: &Path) -> io::Result<()> {
    let deadline = Instant::now() + UNMOUNT_DEADLINE;
    loop {
        let patient = Instant::now() < deadline;
        let flags = if patient { UnmountFlags::NOFOLLOW } else { UnmountFlags::DETACH };
        match unmount(mountpoint, flags) {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            Err(Errno::BUSY) if patient => std::thread::sleep(PAUSE),
            Err(error) => return Err(error.into()),
        }
    }
}

/// The kernel lets go of the image with the last user of the mount. Waiting longer than the
/// deadline would not help; the image's blocks are free when that user ends.
fn wait_for_detachment(device: &Path, image: &Path) {
    let deadline = Instant::now() + DETACH_DEADLINE;
    while loop_device::backing_file(device).is_some_and(|file| file == image) {
        if Instant::now() >= deadline {
            tracing::warn!(device = %device.display(), "a removed disk is still held by a process");
            return;
        }
        std::thread::sleep(PAUSE);
    }
}

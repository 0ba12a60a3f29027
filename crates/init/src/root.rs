//! The root: the image, and over it what the guest writes.
//!
//! What the guest wrote is read on the host, from the disk, by a reader that knows plain files,
//! whiteouts and opaque directories. So the layer above has nothing else: no redirects, no metadata
//! without data.

use std::ffi::CStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::failure::{Failure, Told};
use crate::{devices, own};

/// Where the root is until it is the root.
pub(crate) const NEW: &str = "/new";
const IMAGE: &str = "/image";
const DISK: &str = "/disk";
/// On the disk: what is over the image, and what the kernel needs to change it as a whole.
const UPPER: &str = "/disk/upper";
const WORK: &str = "/disk/work";
const OVERLAY: &CStr = c"lowerdir=/image,upperdir=/disk/upper,workdir=/disk/work,index=off,metacopy=off,redirect_dir=off,nfs_export=off";

/// Mounts the root at `NEW`.
pub(crate) fn mount() -> Result<(), Failure> {
    for directory in [IMAGE, DISK, NEW] {
        own::make_dir(Path::new(directory))?;
    }
    let (image, disk) = devices::disks()?;
    rustix::mount::mount(&image, IMAGE, "erofs", MountFlags::RDONLY, None)
        .told("cannot mount the image")?;
    // What the guest removes is room on the host again.
    rustix::mount::mount(&disk, DISK, "ext4", MountFlags::NOATIME, c"discard")
        .told("cannot mount the disk")?;
    prepare_upper().told("cannot prepare the disk")?;
    rustix::mount::mount("overlay", NEW, "overlay", MountFlags::NOATIME, OVERLAY)
        .told("cannot mount the disk over the image")?;
    // The layers have each other; by path nobody needs them any more, and nobody shall find them.
    for layer in [DISK, IMAGE] {
        rustix::mount::unmount(layer, UnmountFlags::DETACH).told(layer)?;
    }
    Ok(())
}

/// The first time: directories for the kernel. The root of what is written decides about owner and mode
/// of the root, so it has those of the image.
fn prepare_upper() -> std::io::Result<()> {
    match fs::create_dir(UPPER) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        made => {
            made?;
            let like = fs::metadata(IMAGE)?;
            chown(UPPER, Some(like.uid()), Some(like.gid()))?;
            fs::set_permissions(UPPER, Permissions::from_mode(like.mode() & 0o7777))?;
        }
    }
    match fs::create_dir(WORK) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Makes `NEW` the root, and frees the memory of what the machine began with.
pub(crate) fn enter() -> Result<(), Failure> {
    own::leave_first()?;
    rustix::process::chdir(NEW).told(NEW)?;
    forget(Path::new("/init"));
    forget(Path::new("/modules"));
    rustix::mount::mount_move(".", "/").told("cannot move the root")?;
    rustix::process::chroot(".").told("cannot change the root")?;
    rustix::process::chdir("/").told("/")
}

/// Removes files of the root before. What is left is memory, nothing else.
fn forget(path: &Path) {
    if let Ok(entries) = fs::read_dir(path) {
        for entry in entries.flatten() {
            forget(&entry.path());
        }
        let _ = fs::remove_dir(path);
    } else {
        let _: Result<(), Errno> = rustix::fs::unlink(path);
    }
}

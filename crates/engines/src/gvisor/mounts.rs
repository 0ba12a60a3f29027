//! Directories of the host in a machine: volumes and drives.
//!
//! ```text
//!   machines/<id>/mounts/        read-only, a mount of its own, shared with the machine's file server (gofer)
//!     0/ … 15/                   empty; or a volume, bound there at any time
//!     flush/                     a little memory, for the guest to have the gofer forget what it closed
//! ```
//!
//! The guest has all of it at [`GUEST_DIR`], and its agent binds what is there to where its user wants it.
//!
//! Invariants
//! - a guest reaches of the host what is bound here, and nothing else; never a device or a set-user-ID bit;
//! - what is bound when a guest is revived is what was bound when it was saved, or more.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount,
    mount_bind, mount_change, mount_remount, move_mount, open_tree, unmount,
};
use serde_json::{Value, json};
use torpor_lifecycle::engine::HostMount;
use torpor_protocol::volume::SLOTS;

use crate::directory::{self, absent};
use crate::mountinfo;

/// Where a guest has them. In memory, so that nothing of it is among what the guest wrote.
const GUEST_DIR: &str = "/dev/.mounts";
const FLUSH: &str = "flush";
/// The guest makes some hundred empty files in it.
const FLUSH_OPTIONS: &str = "size=64k,nr_inodes=256,mode=0700";
/// How often `openat2` is asked again when a rename elsewhere disturbed it.
const ATTEMPTS: usize = 16;

/// The directory of one machine.
#[derive(Debug, Clone)]
pub(super) struct Mounts {
    dir: PathBuf,
}

impl Mounts {
    pub(super) fn at(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// Whether its machine can have any.
    pub(super) fn exist(&self) -> bool {
        self.dir.is_dir()
    }

    /// Makes it, with nothing bound. Blocks.
    pub(super) fn make(&self) -> io::Result<()> {
        directory::fresh(&self.dir)?;
        for slot in 0..SLOTS {
            fs::create_dir(self.slot(slot))?;
        }
        let flush = self.dir.join(FLUSH);
        fs::create_dir(&flush)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount_bind(&self.dir, &self.dir)?;
        // A group of its own: what is bound here is seen by this machine alone.
        mount_change(&self.dir, MountPropagationFlags::PRIVATE)?;
        mount_change(&self.dir, MountPropagationFlags::SHARED)?;
        let options = CString::new(FLUSH_OPTIONS).expect("no zero byte");
        mount("tmpfs", &flush, "tmpfs", flags | MountFlags::NOEXEC, options.as_c_str())?;
        mount_remount(&self.dir, flags | MountFlags::BIND | MountFlags::RDONLY, c"")?;
        Ok(())
    }

    /// The mount that runsc is told of. Recursive, so that it has also what was bound before.
    pub(super) fn describe(&self) -> Value {
        json!({
            "destination": GUEST_DIR,
            "type": "bind",
            "source": self.dir,
            "options": ["rbind", "rslave", "nosuid", "nodev"],
        })
    }

    /// Binds a volume; one that is there already is left, another one replaced. Blocks.
    pub(super) fn bind(&self, mount: &HostMount) -> io::Result<()> {
        let source = beneath(&mount.volume.dir, mount.subpath.relative())?;
        let target = self.slot(mount.slot);
        let (there, wanted) = (rustix::fs::stat(&target)?, rustix::fs::fstat(&source)?);
        if (there.st_dev, there.st_ino) == (wanted.st_dev, wanted.st_ino) {
            return Ok(());
        }
        self.unbind(mount.slot)?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH;
        let tree = open_tree(&source, c"", flags)?;
        set_flags(&tree, mount.read_only)?;
        let target = rustix::fs::open(target, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let both =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        Ok(move_mount(&tree, c"", &target, c"", both)?)
    }

    /// Takes a volume out of sight; whoever still has files of it open goes on using them. Blocks.
    pub(super) fn unbind(&self, slot: u16) -> io::Result<()> {
        loop {
            match unmount(self.slot(slot), UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
                Ok(()) => {}
                Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Removes it, with all that is bound; works from its name alone. Blocks.
    pub(super) fn remove(&self) -> io::Result<()> {
        let points = mountinfo::read()?.into_iter().map(|mount| mount.point);
        let mut points: Vec<_> = points.filter(|point| point.starts_with(&self.dir)).collect();
        // What lies on top goes first.
        points.reverse();
        for point in points {
            match unmount(&point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
                Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        // Without what was bound there is nothing in it but empty directories.
        for slot in 0..SLOTS {
            absent(fs::remove_dir(self.slot(slot)))?;
        }
        absent(fs::remove_dir(self.dir.join(FLUSH)))?;
        absent(fs::remove_dir(&self.dir))
    }

    fn slot(&self, slot: u16) -> PathBuf {
        self.dir.join(slot.to_string())
    }
}

/// A directory of a volume. No link leads anywhere: who writes to a drive can't have others bind what is not in it.
fn beneath(root: &Path, subpath: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(root, flags, Mode::empty())?;
    if subpath.is_empty() {
        return Ok(root);
    }
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let mut last = Errno::AGAIN;
    for _ in 0..ATTEMPTS {
        match openat2(&root, subpath, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) => last = Errno::AGAIN,
            opened => return Ok(opened?),
        }
    }
    Err(last.into())
}

/// `struct mount_attr` of the kernel.
#[repr(C)]
struct MountAttributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

const MOUNT_ATTR_RDONLY: u64 = 1;
const MOUNT_ATTR_NOSUID: u64 = 2;
const MOUNT_ATTR_NODEV: u64 = 4;

/// Before it is anywhere: a mount that is changed later is not changed for those who see it through another.
#[expect(unsafe_code, reason = "this system call has no safe wrapper")]
fn set_flags(tree: &OwnedFd, read_only: bool) -> io::Result<()> {
    let set = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | if read_only { MOUNT_ATTR_RDONLY } else { 0 };
    let attributes = MountAttributes { set, clear: 0, propagation: 0, user_namespace: 0 };
    // SAFETY: the kernel reads one `struct mount_attr`, of the same layout and of the given size, and an empty text.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<MountAttributes>(),
        )
    };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

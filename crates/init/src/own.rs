//! The machine's own file systems: processes, devices, the kernel's settings, shared memory.
//!
//! They are what other engines give: devices are the few that every program knows, not the disks, and
//! the kernel's settings can be read only. What is more: groups of processes, for the agent, which stops
//! all but itself while the machine is saved.

use std::ffi::CStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, makedev};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::failure::{Failure, Told};

/// A file system of the kernel's.
struct Kernels {
    at: &'static str,
    kind: &'static str,
    flags: MountFlags,
    data: Option<&'static CStr>,
}

const PLAIN: MountFlags = MountFlags::NOSUID.union(MountFlags::NOEXEC).union(MountFlags::NODEV);

/// What this program needs itself.
const FIRST: [Kernels; 3] = [
    Kernels { at: "/dev", kind: "devtmpfs", flags: MountFlags::NOSUID, data: None },
    Kernels { at: "/proc", kind: "proc", flags: PLAIN, data: None },
    Kernels { at: "/sys", kind: "sysfs", flags: PLAIN, data: None },
];

/// What those inside have, in this order.
const INSIDE: [Kernels; 5] = [
    Kernels { at: "proc", kind: "proc", flags: PLAIN, data: None },
    Kernels { at: "sys", kind: "sysfs", flags: PLAIN.union(MountFlags::RDONLY), data: None },
    Kernels { at: "dev", kind: "tmpfs", flags: MountFlags::NOSUID, data: Some(c"mode=755") },
    Kernels {
        at: "dev/pts",
        kind: "devpts",
        flags: MountFlags::NOSUID.union(MountFlags::NOEXEC),
        data: Some(c"mode=0620,ptmxmode=0666"),
    },
    Kernels {
        at: "dev/shm",
        kind: "tmpfs",
        flags: MountFlags::NOSUID.union(MountFlags::NODEV),
        // A quarter, as these files are memory, and all of it used ends processes.
        data: Some(c"mode=1777,size=25%"),
    },
];

/// Groups of processes.
const GROUPS: &str = "sys/fs/cgroup";
/// With this a process joins a group at once; else the kernel waits until all processors noticed, which
/// takes longer than starting the process. Older kernels do not know it.
const GROUPS_AT_ONCE: &CStr = c"favordynmods";
/// The group of everybody but the agent.
const SANDBOX: &str = "sys/fs/cgroup/sandbox";

/// Devices and the kernel's numbers for them; everybody may read and write them.
const DEVICES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];
const LINKS: [(&str, &str); 5] = [
    ("ptmx", "pts/ptmx"),
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
];

/// Settings below /proc/sys, where the kernel has them.
const SETTINGS: [(&str, &str); 3] = [
    // Everybody may ping, also with an image that lost the right of its program to raw sockets.
    ("net/ipv4/ping_group_range", "0 2147483647"),
    // The network has no routes for it, and a card that looks for them wakes the host.
    ("net/ipv6/conf/eth0/disable_ipv6", "1"),
    ("net/ipv6/conf/default/disable_ipv6", "1"),
];

pub(crate) fn mount_first() -> Result<(), Failure> {
    FIRST.iter().try_for_each(|kernels| mount(kernels, Path::new(kernels.at)))
}

/// Takes away what only this program needed. What it has open stays open.
pub(crate) fn leave_first() -> Result<(), Failure> {
    for kernels in FIRST.iter().rev() {
        rustix::mount::unmount(kernels.at, UnmountFlags::DETACH).told(kernels.at)?;
    }
    Ok(())
}

/// Mounts what those inside have below `root`.
pub(crate) fn mount_in(root: &str) -> Result<(), Failure> {
    let root = Path::new(root);
    for kernels in &INSIDE {
        mount(kernels, &root.join(kernels.at))?;
    }
    furnish(&root.join("dev")).told("cannot make devices")?;
    let groups = root.join(GROUPS);
    for data in [Some(GROUPS_AT_ONCE), None] {
        match rustix::mount::mount("cgroup2", &groups, "cgroup2", PLAIN, data) {
            Err(Errno::INVAL) if data.is_some() => {}
            mounted => {
                mounted.told("cannot mount the groups of processes")?;
                break;
            }
        }
    }
    make_dir(&root.join(SANDBOX))?;
    for (name, value) in SETTINGS {
        // Not every kernel has all of them.
        let _ = fs::write(Path::new("/proc/sys").join(name), value);
    }
    Ok(())
}

fn mount(kernels: &Kernels, at: &Path) -> Result<(), Failure> {
    make_dir(at)?;
    rustix::mount::mount(kernels.kind, at, kernels.kind, kernels.flags, kernels.data)
        .told(format!("cannot mount {}", at.display()))
}

/// Makes a directory where there is none. A link there is the image's, and would lead out of it.
pub(crate) fn make_dir(path: &Path) -> Result<(), Failure> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => Err(Failure::new(format!("{} is no directory", path.display()))),
        Err(_) => fs::create_dir(path).told(path.display()),
    }
}

fn furnish(dev: &Path) -> std::io::Result<()> {
    for (name, major, minor) in DEVICES {
        let path = dev.join(name);
        let mode = Mode::from_raw_mode(0o666);
        rustix::fs::mknodat(CWD, &path, FileType::CharacterDevice, mode, makedev(major, minor))?;
        fs::set_permissions(&path, Permissions::from_mode(0o666))?;
    }
    for (name, target) in LINKS {
        symlink(PathBuf::from(target), dev.join(name))?;
    }
    Ok(())
}

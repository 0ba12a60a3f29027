//! Starts QEMU without rights.
//!
//! The *starter* is a process of its own, root, and spent when [`start`] returns: it makes the
//! sockets, enters new namespaces, builds a root from nothing but what is listed, forks QEMU into it
//! and ends. What holds for QEMU then:
//!
//! - its user is not root, it has no capability and can get none, and QEMU's own seccomp filter
//!   forbids it to start anything;
//! - its root is a read-only tmpfs with the listed files in it. There is no /proc, no /sys, and
//!   nothing that can be written except what is listed so: its sockets were made for it;
//! - it is the first process of its own process namespace, alone in its network (which has not even
//!   a loopback that is up), ipc and host name;
//! - of the starter's descriptors it has stderr, the sockets, its network card's other end and KVM.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{CWD, Gid, Mode, Uid};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change,
    mount_remount, unmount,
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags, unshare_unsafe};
use serde::{Deserialize, Serialize};

use crate::line::inside;

/// The sockets in [`Jail::run`]: QMP, and the agent's channel.
pub const MONITOR: &str = "monitor";
pub const AGENT: &str = "agent";

/// The root holds directories and empty files to mount on: some hundred, none with content.
const ROOT_OPTIONS: &std::ffi::CStr = c"mode=0755,size=64k,nr_inodes=1024";
/// QEMU has some 40 descriptors open; a guest can't make it open many more.
const FILES_MAX: u64 = 1024;
/// More than one client waits only while one daemon takes over from another.
const BACKLOG: i32 = 4;
/// Descriptors are gathered from here on before they get their numbers, so that none is overwritten.
const HIGH: RawFd = 64;
/// What capabilities are numbered with; the kernel says where they end.
const CAPABILITIES_MAX: libc::c_ulong = 64;
/// What QEMU opens whatever it is told.
const DEVICES: [&str; 2] = ["/dev/null", "/dev/urandom"];
const KVM: &str = "/dev/kvm";

/// Something of the host that QEMU sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    pub host: PathBuf,
    pub inside: PathBuf,
    pub write: bool,
}

impl Seen {
    pub fn read(host: impl Into<PathBuf>, inside: impl Into<PathBuf>) -> Self {
        Self { host: host.into(), inside: inside.into(), write: false }
    }

    pub fn write(host: impl Into<PathBuf>, inside: impl Into<PathBuf>) -> Self {
        Self { host: host.into(), inside: inside.into(), write: true }
    }
}

/// What the starter is told, as JSON in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Jail {
    /// One of `seen`, by its path inside.
    pub program: PathBuf,
    pub arguments: Vec<String>,
    pub user: u32,
    pub group: u32,
    pub more_groups: Vec<u32>,
    /// An empty directory; jails may share it.
    pub root: PathBuf,
    pub seen: Vec<Seen>,
    /// Where the sockets [`MONITOR`] and [`AGENT`] appear, in place of older ones.
    pub run: PathBuf,
    /// The network card's other end, a character device.
    pub tap: Option<PathBuf>,
    /// Opened for QEMU, which needs no right to it.
    pub kvm: bool,
    /// QEMU's number as the starter sees it. Whole when the starter has ended well.
    pub pid_file: PathBuf,
}

/// The body of the starter. When it returns without an error QEMU is executing, its sockets take
/// connections and its number is in [`Jail::pid_file`]. The calling thread is then in the jail too:
/// nothing is left to do for it but to end.
pub fn start(description: &Path) -> io::Result<()> {
    let text = fs::read(description).map_err(|error| context(&error, "read", description))?;
    let jail: Jail = serde_json::from_slice(&text)?;
    jail.start()
}

/// What QEMU is given of the starter's descriptors.
struct Given {
    tap: Option<OwnedFd>,
    kvm: Option<OwnedFd>,
    monitor: OwnedFd,
    agent: OwnedFd,
}

impl Jail {
    fn start(&self) -> io::Result<()> {
        if self.user == 0 || self.group == 0 || self.more_groups.contains(&0) {
            return Err(invalid("QEMU is never started as root"));
        }
        // The working directory is this thread's own from here on.
        unshare(UnshareFlags::FS)?;
        // All that needs the host's paths comes first.
        let mut pid_file = File::create(&self.pid_file)
            .map_err(|error| context(&error, "create", &self.pid_file))?;
        let given = self.given()?;
        let groups: Vec<Gid> = self.more_groups.iter().map(|id| Gid::from_raw(*id)).collect();
        enter_namespaces()?;
        self.build_root()?;
        enter_root(&self.root)?;

        let _reserved = reserve()?;
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).env_clear();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
        let (user, group) = (Uid::from_raw(self.user), Gid::from_raw(self.group));
        #[expect(unsafe_code, reason = "rights are dropped between fork and exec")]
        // SAFETY: the closure, which runs in the forked child, makes system calls only: it takes no
        // lock and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                hand_over(&given)?;
                drop_rights(user, group, &groups)
            });
        }
        let child = command.spawn().map_err(|error| context(&error, "execute", &self.program))?;
        writeln!(pid_file, "{}", child.id())
            .map_err(|error| context(&error, "write", &self.pid_file))
    }

    fn given(&self) -> io::Result<Given> {
        let tap = self.tap.as_deref().map(open_device).transpose()?;
        let kvm = self.kvm.then(|| open_device(Path::new(KVM))).transpose()?;
        // By a relative name: the name of a socket has room for 108 bytes.
        std::env::set_current_dir(&self.run)
            .map_err(|error| context(&error, "enter", &self.run))?;
        let listen = |name: &str| {
            listen(name).map_err(|error| context(&error, "listen at", &self.run.join(name)))
        };
        Ok(Given { tap, kvm, monitor: listen(MONITOR)?, agent: listen(AGENT)? })
    }

    fn build_root(&self) -> io::Result<()> {
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount(c"tmpfs", &self.root, c"tmpfs", flags, ROOT_OPTIONS)
            .map_err(|error| context(&error.into(), "mount a tmpfs on", &self.root))?;
        for seen in &self.seen {
            let write = if seen.write { MountFlags::empty() } else { MountFlags::RDONLY };
            self.show(&seen.host, &seen.inside, write | MountFlags::NODEV)?;
        }
        for device in DEVICES {
            self.show(Path::new(device), Path::new(device), MountFlags::RDONLY)?;
        }
        Ok(())
    }

    /// Binds `host` where QEMU sees it as `inside`.
    fn show(&self, host: &Path, inside: &Path, flags: MountFlags) -> io::Result<()> {
        let place = self.root.join(below_root(inside)?);
        let failed = |error: io::Error| {
            let words = format!("can't show {} as {}: {error}", host.display(), inside.display());
            io::Error::new(error.kind(), words)
        };
        let directory = fs::metadata(host).map_err(failed)?.is_dir();
        if directory {
            fs::create_dir_all(&place).map_err(failed)?;
        } else {
            fs::create_dir_all(place.parent().unwrap_or(&self.root)).map_err(failed)?;
            File::create_new(&place).map_err(failed)?;
        }
        mount_bind(host, &place).map_err(|error| failed(error.into()))?;
        let flags = MountFlags::BIND | MountFlags::NOSUID | flags;
        mount_remount(&place, flags, c"").map_err(|error| failed(error.into()))
    }
}

/// The rest of an absolute path in which nothing leads elsewhere.
fn below_root(inside: &Path) -> io::Result<&Path> {
    let below = inside.strip_prefix("/").map_err(|_| invalid("a path inside is not absolute"))?;
    let plain = below.components().all(|part| matches!(part, Component::Normal(_)));
    if below.as_os_str().is_empty() || !plain {
        return Err(invalid("a path inside leads elsewhere"));
    }
    Ok(below)
}

fn open_device(path: &Path) -> io::Result<OwnedFd> {
    // A device that is not there yet would be waited for.
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    let device = options.open(path).map_err(|error| context(&error, "open", path))?;
    Ok(device.into())
}

/// A socket in the current directory, for root only: whoever connects commands QEMU.
fn listen(name: &str) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::fs::unlink(name) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    rustix::net::bind(&socket, &SocketAddrUnix::new(name)?)?;
    rustix::fs::chmodat(CWD, name, Mode::RUSR | Mode::WUSR, rustix::fs::AtFlags::empty())?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// New ones for this thread; the one of processes is for its children.
fn enter_namespaces() -> io::Result<()> {
    unshare(
        UnshareFlags::NEWNS
            | UnshareFlags::NEWNET
            | UnshareFlags::NEWIPC
            | UnshareFlags::NEWUTS
            | UnshareFlags::NEWPID,
    )?;
    // Nothing that is mounted here reaches the host, and nothing of the host comes here later.
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change(c"/", private)?;
    Ok(())
}

fn unshare(flags: UnshareFlags) -> io::Result<()> {
    assert!(!flags.contains(UnshareFlags::FILES), "descriptors stay shared");
    #[expect(unsafe_code, reason = "rustix marks it so for the flag FILES")]
    // SAFETY: the table of descriptors stays shared.
    unsafe {
        unshare_unsafe(flags)?;
    }
    Ok(())
}

/// Makes `root` the root, read-only, and lets go of the host's.
fn enter_root(root: &Path) -> io::Result<()> {
    std::env::set_current_dir(root)?;
    // The old root is put over the new one, and taken away.
    rustix::process::pivot_root(c".", c".")?;
    unmount(c".", UnmountFlags::DETACH)?;
    std::env::set_current_dir("/")?;
    let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID;
    mount_remount(c"/", flags | MountFlags::NODEV | MountFlags::NOEXEC, c"")?;
    Ok(())
}

/// Takes the numbers that QEMU's descriptors get, as far as they are free, so that nothing that the
/// fork needs has one of them.
fn reserve() -> io::Result<Vec<OwnedFd>> {
    let null = File::open("/dev/null")?;
    let mut taken = Vec::new();
    loop {
        let fd = rustix::io::fcntl_dupfd_cloexec(&null, inside::CARD_FD)?;
        if fd.as_raw_fd() > inside::LAST_FD {
            taken.push(null.into());
            return Ok(taken);
        }
        taken.push(fd);
    }
}

/// Gives the descriptors their numbers; all others close when QEMU is executed.
fn hand_over(given: &Given) -> io::Result<()> {
    // Out of the way first: one may have the number that another gets.
    let raise = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, HIGH);
    let tap = given.tap.as_ref().map(raise).transpose()?;
    let kvm = given.kvm.as_ref().map(raise).transpose()?;
    let (monitor, agent) = (raise(&given.monitor)?, raise(&given.agent)?);
    close_on_exec_from(inside::CARD_FD)?;
    if let Some(tap) = &tap {
        put(tap, inside::CARD_FD)?;
    }
    if let Some(kvm) = &kvm {
        put(kvm, inside::KVM_FD)?;
    }
    put(&monitor, inside::MONITOR_FD)?;
    put(&agent, inside::AGENT_FD)
}

/// Gives `fd` a second number, which QEMU inherits.
fn put(fd: &OwnedFd, number: RawFd) -> io::Result<()> {
    #[expect(unsafe_code, reason = "the number is fixed, whatever has it now")]
    // SAFETY: two numbers; between fork and exec nobody uses what the second one meant.
    let put = unsafe { libc::dup2(fd.as_raw_fd(), number) };
    if put < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn close_on_exec_from(first: RawFd) -> io::Result<()> {
    #[expect(unsafe_code, reason = "rustix has no such call")]
    // SAFETY: three numbers; marks descriptors and closes none.
    let marked = unsafe {
        libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC)
    };
    if marked < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// From root to nobody in particular. Last, because the rest needs rights.
fn drop_rights(user: Uid, group: Gid, groups: &[Gid]) -> io::Result<()> {
    rustix::process::setsid()?;
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    // Not 0, which lets the kernel pipe a core to a program.
    limit(Resource::Core, 1)?;
    limit(Resource::Nofile, FILES_MAX)?;
    drop_bounding_set()?;
    rustix::thread::set_thread_groups(groups)?;
    rustix::thread::set_thread_res_gid(group, group, group)?;
    rustix::thread::set_thread_res_uid(user, user, user)?;
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets)?;
    rustix::thread::set_no_new_privs(true)?;
    Ok(())
}

fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let limit = Rlimit { current: Some(most), maximum: Some(most) };
    Ok(rustix::process::setrlimit(resource, limit)?)
}

/// By number, because the running kernel may know more of them than any list here.
fn drop_bounding_set() -> io::Result<()> {
    for capability in 0..CAPABILITIES_MAX {
        #[expect(unsafe_code, reason = "rustix knows capabilities by name only")]
        // SAFETY: two numbers.
        let dropped = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        if dropped < 0 {
            let error = io::Error::last_os_error();
            // Past the last one.
            let known = capability > 0 && error.raw_os_error() == Some(libc::EINVAL);
            return if known { Ok(()) } else { Err(error) };
        }
    }
    Ok(())
}

fn context(error: &io::Error, verb: &str, path: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("can't {verb} {}: {error}", path.display()))
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jail(directory: &Path) -> Jail {
        Jail {
            program: "/qemu".into(),
            arguments: vec![],
            user: 60_000,
            group: 60_000,
            more_groups: vec![],
            root: directory.into(),
            seen: vec![],
            run: directory.into(),
            tap: None,
            kvm: false,
            pid_file: directory.join("pid"),
        }
    }

    #[test]
    fn nothing_is_started_as_root_or_in_its_group() {
        let directory = tempfile::tempdir().unwrap();
        let plain = jail(directory.path());
        let as_root = [
            Jail { user: 0, ..plain.clone() },
            Jail { group: 0, ..plain.clone() },
            Jail { more_groups: vec![7, 0], ..plain },
        ];
        for jail in as_root {
            let description = directory.path().join("jail.json");
            fs::write(&description, serde_json::to_vec(&jail).unwrap()).unwrap();
            let error = start(&description).unwrap_err();
            assert_eq!(error.to_string(), "QEMU is never started as root");
        }
    }

    #[test]
    fn a_path_inside_can_not_leave_the_root() {
        assert_eq!(below_root(Path::new("/lib64/ld.so")).unwrap(), Path::new("lib64/ld.so"));
        for path in ["", "/", "lib", "/../etc", "/lib/../../etc", "../etc"] {
            assert!(below_root(Path::new(path)).is_err(), "{path}");
        }
    }

    #[test]
    fn the_numbers_of_qemus_descriptors_are_taken_before_the_fork() {
        let taken = reserve().unwrap();
        for number in inside::CARD_FD..=inside::LAST_FD {
            assert!(Path::new(&format!("/proc/self/fd/{number}")).exists(), "{number}");
        }
        assert!(taken.len() <= 5, "{taken:?}");
    }
}

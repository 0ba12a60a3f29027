//! The control group of one machine, in every tree that has one for it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::Instant;
use torpor_protocol::Resources;

use super::bounds::{Limits, number};
use super::hierarchy::{Hierarchy, Tree};

/// The directory of all installations in each tree.
const ROOT: &str = "torpor";
/// Freezing takes a fraction of a millisecond, unless a task sits in a disk operation.
const FREEZE_DEADLINE: Duration = Duration::from_secs(5);
/// Processes killed while the host is short of processor time take this long at worst.
const KILL_DEADLINE: Duration = Duration::from_secs(10);
/// A group stays busy for a moment after its last process is gone.
const REMOVE_DEADLINE: Duration = Duration::from_secs(5);
/// First and longest pause between two looks at something the kernel does not announce.
const PAUSE: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(20));
/// Paging out a machine takes about 5 ms per MiB; what is left after this long stays.
const PAGE_OUT_DEADLINE: Duration = Duration::from_secs(30);
/// How much at once, so that who changes their mind need not wait.
const PAGE_OUT_PIECE: &str = "16M";
/// v1 gives what it can; most goes at the first time, all but the last MiB at the third.
const PAGE_OUT_ROUNDS: usize = 3;
/// Another installation may remove the shared parent between two of our steps, but hardly often.
const PARENT_ATTEMPTS: usize = 10;

/// The group of one machine. Dropping it changes nothing on the host.
///
/// The methods block, mostly for microseconds; [`freeze`](Self::freeze),
/// [`kill_all`](Self::kill_all) and [`remove`](Self::remove) can take seconds in the worst case and
/// belong on a blocking thread.
#[derive(Debug, Clone)]
pub struct Group {
    hierarchy: Hierarchy,
    relative: PathBuf,
}

impl Group {
    /// Makes the group with its limits. `AlreadyExists` if there is one: two machines never share.
    pub fn create(
        hierarchy: &Hierarchy,
        tag: &str,
        id: &str,
        resources: &Resources,
    ) -> io::Result<Self> {
        for name in [tag, id] {
            if name.is_empty() || name.starts_with('.') || name.contains('/') {
                return Err(io::Error::new(ErrorKind::InvalidInput, "not a name for a group"));
            }
        }
        let group = Self::open(hierarchy, tag, id);
        // Before anything is made: the leftover of another machine must not be removed below.
        if group.used().any(|path| path.exists()) {
            return Err(ErrorKind::AlreadyExists.into());
        }
        let made = group.make(resources);
        if made.is_err() {
            let _ = group.remove();
        }
        made.map(|()| group)
    }

    /// The group that an earlier daemon made; whether it exists is not checked.
    pub fn open(hierarchy: &Hierarchy, tag: &str, id: &str) -> Self {
        Self { hierarchy: hierarchy.clone(), relative: [ROOT, tag, id].iter().collect() }
    }

    /// The files a starting process writes `0` to in order to enter the group.
    pub fn procs_files(&self) -> Vec<PathBuf> {
        self.used().map(|path| path.join("cgroup.procs")).collect()
    }

    /// The same in every tree, as an engine wants it that makes further groups beside ours.
    pub fn relative_path(&self) -> String {
        format!("/{}", self.relative.display())
    }

    /// Stops every instruction in the group; returns when nothing runs any more. On `Err` the
    /// group runs. Idempotent.
    pub fn freeze(&self) -> io::Result<()> {
        let frozen = match self.v2() {
            Some(path) => freeze_v2(&path),
            None => self.v1("freezer").and_then(|path| freeze_v1(&path)),
        };
        if frozen.is_err() {
            let _ = self.thaw();
        }
        frozen
    }

    /// Lets it go on. Idempotent.
    pub fn thaw(&self) -> io::Result<()> {
        match self.v2() {
            Some(path) => fs::write(path.join("cgroup.freeze"), "0"),
            None => self.v1("freezer").and_then(|path| thaw_v1(&path)),
        }
    }

    /// Whether it is frozen, or about to be.
    pub fn frozen(&self) -> io::Result<bool> {
        match self.v2() {
            Some(path) => Ok(fs::read_to_string(path.join("cgroup.freeze"))?.trim() == "1"),
            None => {
                let state = fs::read_to_string(self.v1("freezer")?.join("freezer.state"))?;
                Ok(state.trim() != "THAWED")
            }
        }
    }

    /// What is not urgent gets a tenth of the processor time that a group beside it gets.
    pub fn set_urgent(&self, urgent: bool) -> io::Result<()> {
        let (v1, v2) = if urgent { ("1024", "100") } else { ("102", "10") };
        let value = if self.hierarchy.v1_tree("cpu").is_some() { v1 } else { v2 };
        fs::write(self.need("cpu", "cpu.shares", "cpu.weight")?, value)
    }

    /// Gives its memory to the host's swap, if there is any, a piece at a time while it is `wanted`.
    pub fn page_out(&self, wanted: impl Fn() -> bool) -> io::Result<()> {
        let info = rustix::system::sysinfo();
        if info.totalswap == 0 {
            return Ok(());
        }
        let Some(file) = self.pick("memory", "memory.force_empty", "memory.reclaim") else {
            return Ok(());
        };
        let piece = if file.ends_with("memory.reclaim") { PAGE_OUT_PIECE } else { "0" };
        let rounds = if file.ends_with("memory.reclaim") { usize::MAX } else { PAGE_OUT_ROUNDS };
        let deadline = Instant::now() + PAGE_OUT_DEADLINE;
        for _ in 0..rounds {
            if !wanted() || Instant::now() > deadline {
                return Ok(());
            }
            match fs::write(&file, piece) {
                Ok(()) => {}
                // Nothing more to be had; v1 says that it is busy as long as something is left.
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// How many processes the host killed here for want of memory.
    pub fn oom_kills(&self) -> u64 {
        let file = self.pick("memory", "memory.oom_control", "memory.events");
        file.and_then(|file| field(&file, "oom_kill")).unwrap_or(0)
    }

    /// Memory in use, without file contents that the host could drop at once.
    pub fn memory_bytes(&self) -> u64 {
        let droppable = match self.hierarchy.v1_tree("memory") {
            Some(_) => "total_inactive_file",
            None => "inactive_file",
        };
        let stat = self.pick("memory", "memory.stat", "memory.stat");
        let idle = stat.and_then(|stat| field(&stat, droppable)).unwrap_or(0);
        self.memory_charged().saturating_sub(idle)
    }

    /// Memory that is neither used nor filled with files, up to its limit.
    pub fn memory_room(&self) -> u64 {
        let limit = self.memory_limit().map_or(0, |file| number(&file));
        limit.saturating_sub(self.memory_charged())
    }

    /// Processor time used since the group was made.
    pub fn cpu_micros(&self) -> u64 {
        match self.hierarchy.v1_tree("cpuacct") {
            Some(tree) => number(&tree.mount.join(&self.relative).join("cpuacct.usage")) / 1_000,
            None => self.v2().and_then(|v2| field(&v2.join("cpu.stat"), "usage_usec")).unwrap_or(0),
        }
    }

    /// Every process in the group.
    pub fn pids(&self) -> Vec<u32> {
        let mut pids = BTreeSet::new();
        for file in self.procs_files() {
            let text = fs::read_to_string(file).unwrap_or_default();
            pids.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
        }
        pids.into_iter().collect()
    }

    /// Kills every process in the group, frozen or not, and waits until none is left.
    pub fn kill_all(&self) -> io::Result<()> {
        if let Some(path) = self.v2() {
            // Absent before Linux 5.14; the loop below does the same, only slower.
            let _ = fs::write(path.join("cgroup.kill"), "1");
        }
        wait_until(KILL_DEADLINE, "its processes did not die", || {
            let pids = self.pids();
            if pids.is_empty() {
                return Ok(true);
            }
            self.kill_once(&pids);
            if self.hierarchy.v2.is_none() {
                // A task of a frozen v1 group dies only when it is thawed.
                let _ = self.thaw();
            }
            Ok(false)
        })
    }

    /// Takes hold of each process before looking again who is in the group, so that a number that
    /// was given to a stranger in between hurts nobody.
    fn kill_once(&self, pids: &[u32]) {
        let open = |pid: &u32| {
            let raw = Pid::from_raw(i32::try_from(*pid).ok()?)?;
            Some((*pid, pidfd_open(raw, PidfdFlags::empty()).ok()?))
        };
        let held: Vec<_> = pids.iter().filter_map(open).collect();
        let still_here = self.pids();
        for (pid, process) in held {
            if still_here.binary_search(&pid).is_ok() {
                let _ = pidfd_send_signal(process, Signal::KILL);
            }
        }
    }

    /// Removes the group from every tree of this host. Processes must be gone. Idempotent.
    pub fn remove(&self) -> io::Result<()> {
        for mount in self.hierarchy.mounts() {
            let path = mount.join(&self.relative);
            wait_until(REMOVE_DEADLINE, "the group stays busy", || remove_tree(&path))?;
        }
        Ok(())
    }

    // === Making ===

    fn make(&self, resources: &Resources) -> io::Result<()> {
        let used: Vec<&Tree> = self.hierarchy.used().collect();
        // Where an engine makes groups by itself: as long as the installation has a directory there, another
        // one does not remove what both hang on while the engine is on its way down.
        for tree in self.hierarchy.trees().filter(|tree| !used.contains(tree)) {
            match make_path(tree, self.relative.parent().unwrap_or(&self.relative)) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        for tree in used {
            make_path(tree, &self.relative)?;
        }
        self.bound(&Limits::of(resources))
    }

    // === Where things are ===

    fn used(&self) -> impl Iterator<Item = PathBuf> {
        self.hierarchy.used().map(|tree| tree.mount.join(&self.relative))
    }

    fn v2(&self) -> Option<PathBuf> {
        self.hierarchy.v2.as_ref().map(|tree| tree.mount.join(&self.relative))
    }

    fn v1(&self, controller: &str) -> io::Result<PathBuf> {
        let tree = self.hierarchy.v1_tree(controller).ok_or_else(|| no_controller(controller))?;
        Ok(tree.mount.join(&self.relative))
    }

    /// The file of a controller under the name it has in the tree that carries it.
    pub(super) fn pick(&self, controller: &str, v1: &str, v2: &str) -> Option<PathBuf> {
        let name = if self.hierarchy.v1_tree(controller).is_some() { v1 } else { v2 };
        let tree = self.hierarchy.tree(controller)?;
        Some(tree.mount.join(&self.relative).join(name))
    }
}

/// Ids of the groups an installation has on this host, in any tree.
pub fn list(hierarchy: &Hierarchy, tag: &str) -> Vec<String> {
    let mut ids = BTreeSet::new();
    for mount in hierarchy.mounts() {
        let Ok(entries) = fs::read_dir(mount.join(ROOT).join(tag)) else { continue };
        let directories = entries.flatten().filter(|entry| entry.path().is_dir());
        ids.extend(directories.filter_map(|entry| entry.file_name().into_string().ok()));
    }
    ids.into_iter().collect()
}

/// Removes what all groups of an installation hung on, and what all installations hung on; both
/// only if nothing is left in them.
pub fn remove_root(hierarchy: &Hierarchy, tag: &str) {
    for mount in hierarchy.mounts() {
        let root = mount.join(ROOT);
        let _ = fs::remove_dir(root.join(tag));
        let _ = fs::remove_dir(root);
    }
}

// === Steps ===

/// The controllers that bound a machine.
const HANDED_DOWN: [&str; 3] = ["memory", "cpu", "pids"];

/// Makes the directories down to the group. The last one must be new.
fn make_path(tree: &Tree, relative: &Path) -> io::Result<()> {
    let mut attempts = 0;
    loop {
        match try_make_path(tree, relative) {
            Err(error) if is_gone(&error) && attempts < PARENT_ATTEMPTS => attempts += 1,
            done => return done,
        }
    }
}

/// What is removed while it is used is not always just absent (`ENODEV`).
fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

fn try_make_path(tree: &Tree, relative: &Path) -> io::Result<()> {
    let group = tree.mount.join(relative);
    match fs::create_dir(&group) {
        Ok(()) if has_controllers(tree, &group) => return Ok(()),
        // Its parent was made just now by somebody who has not handed them down yet.
        Ok(()) => fs::remove_dir(&group)?,
        Err(error) if is_gone(&error) => {}
        Err(error) => return Err(error),
    }
    let mut parent = tree.mount.clone();
    for name in relative.parent().into_iter().flatten() {
        hand_down(tree, &parent)?;
        parent.push(name);
        match fs::create_dir(&parent) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    hand_down(tree, &parent)?;
    fs::create_dir(&group)
}

/// Whether a group of the v2 tree has what its limits are set with; one of v1 always does.
fn has_controllers(tree: &Tree, group: &Path) -> bool {
    let Ok(here) = fs::read_to_string(group.join("cgroup.controllers")) else { return true };
    HANDED_DOWN
        .iter()
        .all(|name| !tree.controls(name) || here.split_whitespace().any(|c| c == *name))
}

/// In the v2 tree a directory has a controller only if its parent hands it down.
fn hand_down(tree: &Tree, parent: &Path) -> io::Result<()> {
    let file = parent.join("cgroup.subtree_control");
    for controller in HANDED_DOWN {
        if tree.controls(controller) && file.exists() {
            fs::write(&file, format!("+{controller}"))?;
        }
    }
    Ok(())
}

/// True when the directory and all below it are gone, false if something is in use.
fn remove_tree(path: &Path) -> io::Result<bool> {
    match fs::remove_dir(path) {
        Ok(()) => return Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
        Err(error) if error.kind() == ErrorKind::ResourceBusy => {}
        Err(error) => return Err(error),
    }
    // Busy with processes, or with groups below.
    let Ok(entries) = fs::read_dir(path) else { return Ok(false) };
    for below in entries.flatten().map(|entry| entry.path()).filter(|below| below.is_dir()) {
        remove_tree(&below)?;
    }
    Ok(false)
}

/// The kernel announces a change of `cgroup.events` as an exceptional condition of the open file.
fn freeze_v2(group: &Path) -> io::Result<()> {
    let mut events = File::open(group.join("cgroup.events"))?;
    fs::write(group.join("cgroup.freeze"), "1")?;
    let deadline = Instant::now() + FREEZE_DEADLINE;
    let mut text = String::new();
    loop {
        text.clear();
        events.rewind()?;
        events.read_to_string(&mut text)?;
        if text.lines().any(|line| line == "frozen 1") {
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        let mut watched = [PollFd::from_borrowed_fd(events.as_fd(), PollFlags::PRI)];
        match poll(&mut watched, Some(&left)) {
            Ok(0) => return Err(late("the group does not freeze")),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn freeze_v1(group: &Path) -> io::Result<()> {
    let file = group.join("freezer.state");
    wait_until(FREEZE_DEADLINE, "the group does not freeze", || {
        // Written again each time: a task that was on its way out of a system call is caught then.
        fs::write(&file, "FROZEN")?;
        Ok(fs::read_to_string(&file)?.trim() == "FROZEN")
    })
}

fn thaw_v1(group: &Path) -> io::Result<()> {
    fs::write(group.join("freezer.state"), "THAWED")
}

pub(super) fn wait_until(
    deadline: Duration,
    otherwise: &'static str,
    mut done: impl FnMut() -> io::Result<bool>,
) -> io::Result<()> {
    let end = Instant::now() + deadline;
    let (mut pause, longest) = PAUSE;
    while !done()? {
        if Instant::now() >= end {
            return Err(late(otherwise));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(longest);
    }
    Ok(())
}

fn late(what: &'static str) -> io::Error {
    io::Error::new(ErrorKind::TimedOut, what)
}

pub(super) fn no_controller(name: &str) -> io::Error {
    io::Error::new(ErrorKind::Unsupported, format!("this host has no {name} controller"))
}

/// The value in a file of `name value` lines.
fn field(file: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
    text.lines().find_map(value)
}

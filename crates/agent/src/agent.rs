//! What all streams share: the channel, the process table, the identity.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;

use rustix::process::{Resource, Rlimit};
use rustix::thread::CapabilitySet;
use tokio::sync::Mutex;
use tokio::time::Instant;
use torpor_protocol::guest::{Health, Identity};

use crate::Mode;
use crate::channel::Channel;
use crate::fuse;
use crate::kept;
use crate::mounts::Mounts;
use crate::process::{Lines, Table};
use crate::quiesce::{GROUP, Quiesce};
use crate::stream::Streams;

pub(crate) struct Agent {
    pub(crate) mode: Mode,
    pub(crate) channel: Rc<Channel>,
    pub(crate) streams: Streams,
    pub(crate) processes: Table,
    pub(crate) quiesce: Quiesce,
    /// Connections that outlive sessions.
    pub(crate) kept: kept::Table,
    /// Volumes and drives.
    pub(crate) mounts: Mounts,
    /// What they said lately.
    pub(crate) lines: Rc<Lines>,
    /// What the daemon said last, nothing at first; new processes read it.
    pub(crate) identity: RefCell<Identity>,
    /// Held by whoever changes a store of Java's.
    pub(crate) keystores: Mutex<()>,
    /// The limit of open files that processes get, where the agent raised its own.
    pub(crate) open_files: Option<Rlimit>,
    /// Mounts that the host serves now, where it can.
    pub(crate) served: Option<fuse::Served>,
    /// The stdin of processes that have none.
    pub(crate) null: OwnedFd,
    since: Instant,
}

impl Agent {
    pub(crate) fn new(
        channel: OwnedFd,
        mode: Mode,
        served: Option<fuse::Served>,
    ) -> io::Result<Self> {
        if mode == Mode::Init {
            confine();
            keep_memory();
        }
        Ok(Self {
            mode,
            channel: Rc::new(Channel::new(channel)?),
            streams: Streams::default(),
            processes: Table::default(),
            quiesce: Quiesce::new((mode == Mode::Init).then_some(Path::new(GROUP))),
            kept: kept::Table::default(),
            mounts: Mounts::default(),
            lines: Rc::default(),
            identity: RefCell::default(),
            keystores: Mutex::default(),
            open_files: (mode == Mode::Init).then(raise_open_files),
            served,
            null: File::open("/dev/null")?.into(),
            since: Instant::now(),
        })
    }

    pub(crate) fn health(&self) -> Health {
        Health {
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX),
            running: u32::try_from(self.processes.running()).unwrap_or(u32::MAX),
            keeping_awake: u32::try_from(self.processes.keeping_awake()).unwrap_or(u32::MAX),
            started: self.processes.started(),
            memory_kib: resident_kib().unwrap_or(0),
            open_files: open_files().unwrap_or(0),
        }
    }
}

/// All that a program which the agent executes can have, root's too: with every engine the same, and
/// most of it what other containers give. Mounting, setting the hostname or the clock and the like are
/// the agent's.
const HANDED_DOWN: CapabilitySet = CapabilitySet::AUDIT_WRITE
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::NET_BIND_SERVICE)
    // Where an engine gives it: the kernel refuses to execute a program that is marked for more than
    // it can have, and many a `ping` is marked so.
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::SYS_PTRACE);

fn confine() {
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if !HANDED_DOWN.contains(capability) {
            // Those that the kernel does not know it does not give. An engine whose kernel knows no
            // bounding set has its own bounds.
            let _ = rustix::thread::remove_capability_from_bounding_set(capability);
        }
    }
}

/// Freed buffers of a transfer are used again instead of going back to the kernel: in a machine every
/// page that is touched anew costs more than copying it.
#[expect(unsafe_code, reason = "the allocator's settings are plain C")]
fn keep_memory() {
    const KEPT: libc::c_int = 8 << 20;
    // SAFETY: sets numbers of the allocator; at worst it does not know them.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
        libc::mallopt(libc::M_MMAP_THRESHOLD, KEPT);
    }
}

/// Each process and connection takes a few descriptors of the agent. Returns the limit before.
fn raise_open_files() -> Rlimit {
    let before = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: before.maximum, maximum: before.maximum };
    // With the limit as it was, fewer processes can run at once; nothing else changes.
    let _ = rustix::process::setrlimit(Resource::Nofile, raised);
    before
}

/// The agent's own resident memory.
fn resident_kib() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64 / 1024)
}

fn open_files() -> Option<u32> {
    u32::try_from(std::fs::read_dir("/proc/self/fd").ok()?.count()).ok()
}

//! What an isolation technology must provide: [`Engine`] starts machines, a [`Machine`] is one that
//! lives, a [`Channel`] is the packet road to the agent inside.

use std::collections::HashSet;
use std::io;
use std::net::Ipv4Addr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use torpor_protocol::snapshot::SavedProcess;
use torpor_protocol::{GuestPath, Network, Resources, SandboxId, SandboxSpec};

use crate::store::OpenVolume;

/// Everything an engine needs to start a machine.
#[derive(Debug, Clone)]
pub struct BootPlan {
    pub id: SandboxId,
    pub spec: SandboxSpec,
    /// The image: one read-only EROFS file, with the agent at [`AGENT_PATH`].
    pub root: PathBuf,
    /// Directories of the host that are bound into it, where the engine does that.
    pub mounts: Vec<HostMount>,
}

/// A directory of the host that a machine has, by its slot.
#[derive(Debug, Clone)]
pub struct HostMount {
    /// Below [`SLOTS`](torpor_protocol::volume::SLOTS); the agent finds it by this number.
    pub slot: u16,
    pub volume: Arc<OpenVolume>,
    /// The directory of the volume that is seen.
    pub subpath: GuestPath,
    pub read_only: bool,
}

/// Where the agent is inside every root.
pub const AGENT_PATH: &str = "/.torpor/agent";

/// What an engine is and can do, as data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct About {
    /// `gvisor`, `microvm`, `fake`.
    pub kind: &'static str,
    /// The build that runs; a saved machine is tied to it.
    pub version: String,
    /// Address the guest should ask for names, if it has a network.
    pub nameserver: Option<String>,
    /// Where connections of proxied guests arrive; none: nowhere.
    pub egress_proxy: Option<EgressProxy>,
    pub abilities: Abilities,
}

/// Where the engine leads connections of guests whose policy is proxied ([`Network::is_proxied`]): an
/// address of this host that only they reach, each from the address that [`GuestRegistry::register`] named. Nobody
/// listens there: their connections are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EgressProxy {
    pub address: Ipv4Addr,
    /// TCP, to any address and port; the kernel knows which (`SO_ORIGINAL_DST`).
    pub connections: u16,
    /// UDP and TCP: questions for names.
    pub names: u16,
    /// Mark (`SO_MARK`) of the connections that are made for guests: what carries it reaches public
    /// addresses that are not this host's own, and nothing else.
    pub public_mark: u32,
    /// The same for what a policy explicitly allows: private addresses, and this host's own.
    pub private_mark: u32,
}

/// Who has to know which guest is behind which address: whoever decides about what guests send out, beyond
/// what a firewall can. It is also told what the firewall decided by itself.
pub trait GuestRegistry: Send + Sync + 'static {
    /// From now on this address is this sandbox, under this policy; also when the policy changes.
    /// Called before the guest's first packet, and before a change is in force.
    fn register(&self, guest: Ipv4Addr, id: &SandboxId, network: &Network);
    /// Nobody has this address now. Connections that it has are cut.
    fn unregister(&self, guest: Ipv4Addr);
    /// The firewall let the first packet of something pass, or did not. Must not block.
    fn packet_logged(&self, guest: Ipv4Addr, packet: LoggedPacket);
}

/// What a firewall decided about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoggedPacket {
    /// The number of its protocol: 6 TCP, 17 UDP, 1 ICMP.
    pub protocol: u8,
    pub to: Ipv4Addr,
    /// 0 if the protocol has none.
    pub port: u16,
    pub allowed: bool,
}

/// Nobody needs to know: for engines without a network.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoGuestRegistry;

impl GuestRegistry for NoGuestRegistry {
    fn register(&self, _: Ipv4Addr, _: &SandboxId, _: &Network) {}
    fn unregister(&self, _: Ipv4Addr) {}
    fn packet_logged(&self, _: Ipv4Addr, _: LoggedPacket) {}
}

/// What not every engine can do; asked for in vain it is refused by name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Abilities {
    /// Saving memory and processes, and reviving them.
    pub memory_snapshots: bool,
    /// Saving while the machine goes on afterwards.
    pub live_snapshots: bool,
    /// Freezing in memory.
    pub warm_standby: bool,
    /// Reading the files of a saved machine without reviving it.
    pub saved_files: bool,
    /// Whether the guest has a kernel of its own, which does not notice that it was saved, copied or
    /// revived: it must be told before ([`Request::Quiesce`]) and after ([`Request::Unquiesce`]), or its clock
    /// is wrong and its copies have the same randomness.
    ///
    /// [`Request::Quiesce`]: torpor_protocol::guest::Request::Quiesce
    /// [`Request::Unquiesce`]: torpor_protocol::guest::Request::Unquiesce
    pub quiesces: bool,
    /// Whether directories of the host are bound into its machines ([`Machine::bind`]). Otherwise the agent has
    /// their files from the daemon, over the channel.
    pub binds: bool,
}

impl About {
    /// The error for something this engine has no way of doing.
    pub fn cant(&self, what: &str) -> EngineError {
        EngineError::Unsupported { engine: self.kind, what: what.to_owned() }
    }
}

/// A build of an engine's program that is on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineBuild {
    /// As saves name it.
    pub version: String,
    /// How many machines run on it.
    pub machines: usize,
}

/// An isolation technology on this host.
#[async_trait]
pub trait Engine: Send + Sync + 'static {
    fn about(&self) -> &About;

    /// Boots a fresh machine. Its agent may take a moment until it says hello.
    /// On `Err`, and if the future is dropped, nothing is left behind.
    async fn boot(&self, plan: BootPlan) -> Result<Box<dyn Machine>, EngineError>;

    /// Brings a machine back from what [`Machine::save`] wrote into `saved`; the guest goes on
    /// from there. `version`: the build that saved it. The same promises as `boot`. One save may be
    /// revived many times, also at once.
    async fn revive(
        &self,
        plan: BootPlan,
        saved: &Path,
        version: &str,
    ) -> Result<Box<dyn Machine>, EngineError> {
        let _ = (plan, saved, version);
        Err(self.about().cant("revive a machine"))
    }

    /// The build that revives here what `version` of this engine saved; the reason if none can.
    fn can_revive(&self, version: &str) -> Result<String, String> {
        let here = &self.about().version;
        if here == version {
            return Ok(here.clone());
        }
        Err(format!("it was saved by version {version} and this host has {here}"))
    }

    /// The builds that can start or revive machines here, the current one first.
    fn builds(&self) -> Vec<EngineBuild> {
        vec![EngineBuild { version: self.about().version.clone(), machines: 0 }]
    }

    /// Gives up copies of builds that no machine here and none of these versions needs.
    fn retain_builds(&self, needed: &HashSet<String>) {
        let _ = needed;
    }

    /// What a saved machine had written on top of its image, also one that can't be revived here.
    /// Blocks: for a thread of its own.
    fn changes(&self, saved: &Path) -> Result<Box<dyn Changes>, EngineError> {
        let _ = saved;
        Err(self.about().cant("read the files of a saved machine"))
    }

    /// A machine like this may be wanted soon: the engine may prepare for it.
    fn expect(&self, plan: &BootPlan) {
        let _ = plan;
    }

    /// Takes over a machine that an earlier daemon left running or paused. `None`: it is not there any more.
    async fn adopt(&self, id: &SandboxId) -> Result<Option<Box<dyn Machine>>, EngineError>;

    /// Kills and removes everything on this host that belongs to this engine's installation and to
    /// no sandbox in `keep`: machines, mounts, addresses, cgroups. Returns how many machines it
    /// removed. Called once at start, before any `boot`.
    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<usize, EngineError>;

    /// The daemon stops. Machines go on; if there are none, the engine's own traces on the host
    /// (helper process, namespace, firewall table) are removed too.
    async fn close(&self);
}

/// The step of a start in which a prepared machine was taken, instead of made.
pub const PREPARED_STEP: &str = "container";

/// One live machine. Only the driver of its sandbox calls these methods, one at a time.
/// Dropping it neither kills it nor leaks anything that [`Engine::adopt`] or `sweep` would not find.
#[async_trait]
pub trait Machine: Send + 'static {
    /// The road to the agent; the same for the machine's whole life.
    fn channel(&self) -> Arc<dyn Channel>;
    /// What it uses now, and what went wrong in it; cheap and callable from anywhere.
    fn meter(&self) -> Arc<dyn Meter>;
    /// The build it runs on, which its saves are tied to; `None`: the engine's.
    fn version(&self) -> Option<&str> {
        None
    }
    /// Where the time of its start went, in order; none if somebody else started it.
    fn start_steps(&self) -> Vec<(&'static str, Duration)> {
        Vec::new()
    }
    /// Stops every instruction inside. Idempotent.
    async fn pause(&mut self) -> Result<(), EngineError>;
    /// Lets it go on. Idempotent.
    async fn resume(&mut self) -> Result<(), EngineError>;
    /// Whether it is paused: known also of a machine that was adopted.
    fn paused(&self) -> bool;
    /// Writes files, memory and processes into the empty directory `into`, without waiting for the
    /// disk. A paused machine stays paused and executes no instruction; a running one goes on
    /// afterwards. On `Err` the machine is as it was, and what is in `into` is worth nothing.
    /// Begun is done: if the future is dropped, the machine ends up as after an `Err`.
    async fn save(&mut self, into: &Path) -> Result<Saved, EngineError> {
        let _ = into;
        Err(EngineError::Unsupported { engine: "this", what: "save a machine".to_owned() })
    }
    /// Begins to give the memory of a paused machine to the host's swap, if there is any; returns
    /// at once. The machine may be resumed or killed meanwhile.
    fn page_out(&self) {}
    /// Changes what the guest reaches, at once and also for connections that are open. On `Err` it
    /// is as it was.
    async fn set_network(&mut self, network: &Network) -> Result<(), EngineError> {
        let _ = network;
        let what = "change what a sandbox reaches while it lives".to_owned();
        Err(EngineError::Unsupported { engine: "this", what })
    }
    /// Changes how much of the host the guest may use, running or paused. On `Err` it is as it was.
    async fn set_resources(&mut self, resources: &Resources) -> Result<(), EngineError> {
        let _ = resources;
        let what = "change the resources of a sandbox while it lives".to_owned();
        Err(EngineError::Unsupported { engine: "this", what })
    }
    /// Gives it a directory of the host, running or paused. One that it has already is fine.
    async fn bind(&mut self, mount: &HostMount) -> Result<(), EngineError> {
        let _ = mount;
        Err(no_binds())
    }
    /// Takes it away again; nobody inside finds it from now on. One that it has not is fine.
    async fn unbind(&mut self, slot: u16) -> Result<(), EngineError> {
        let _ = slot;
        Err(no_binds())
    }
    /// Resolves when the machine is dead by itself, with the reason for people. Cancel-safe.
    async fn exited(&mut self) -> String;
    /// Kills it, waits until it is gone and gives back all it held. On `Err` the rest is left to
    /// `sweep`; the machine is dead in any case.
    async fn kill(self: Box<Self>) -> Result<(), EngineError>;
}

/// For engines that have another way.
pub fn no_binds() -> EngineError {
    EngineError::Unsupported { engine: "this", what: "bind a directory".to_owned() }
}

/// What is known of a save.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Saved {
    /// For how long the guest stood still.
    pub pause: Duration,
    pub processes: Vec<SavedProcess>,
}

/// What a saved machine had written on top of its image. A guest can make a file of any length that has
/// no data: whatever is done with one takes the time and the room of its data.
pub trait Changes: Send {
    /// Sorted by path; a directory comes before what is in it.
    fn entries(&self) -> &[Change];
    /// Where the file at `index` of [`Changes::entries`] has data: in rising order, apart, within its
    /// size. All else of it is zeros.
    fn data(&self, index: usize) -> io::Result<Vec<Range<u64>>>;
    /// Shows that data in rising order, piece by piece, each with its place in the file.
    fn read(&self, index: usize, see: See<'_>) -> io::Result<()>;

    /// The content of the file, whole, with its zeros: for whoever wants every byte of it.
    fn copy(&self, index: usize, to: &mut dyn io::Write) -> io::Result<()> {
        let Some(Change { kind: ChangeKind::File { size }, .. }) = self.entries().get(index) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "only files have content"));
        };
        let mut done = 0;
        self.read(index, &mut |at, piece| {
            write_zeros(at.saturating_sub(done), to)?;
            done = at.saturating_add(piece.len() as u64);
            to.write_all(piece)
        })?;
        write_zeros(size.saturating_sub(done), to)
    }
}

/// Takes a piece of a file, and where in the file it begins.
pub type See<'a> = &'a mut dyn FnMut(u64, &[u8]) -> io::Result<()>;

fn write_zeros(mut count: u64, to: &mut dyn io::Write) -> io::Result<()> {
    static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];
    while count > 0 {
        let length = usize::try_from(count).unwrap_or(ZEROS.len()).min(ZEROS.len());
        to.write_all(&ZEROS[..length])?;
        count -= length as u64;
    }
    Ok(())
}

/// One path that is not as in the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Relative to the root: `etc/hostname`. Bytes, as a guest may call a file anything but `/` and 0.
    pub path: Vec<u8>,
    pub kind: ChangeKind,
    /// Permission bits.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub modified_at_ms: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChangeKind {
    File {
        size: u64,
    },
    /// Another name of the file at `to`, which comes earlier.
    HardLink {
        to: Vec<u8>,
    },
    Directory {
        /// Nothing of the image's directory of that name shines through.
        opaque: bool,
    },
    Symlink {
        target: Vec<u8>,
    },
    Fifo,
    Socket,
    CharDevice {
        major: u32,
        minor: u32,
    },
    BlockDevice {
        major: u32,
        minor: u32,
    },
    /// It is in the image and was removed.
    Removed,
}

/// Readings of a machine.
pub trait Meter: Send + Sync + 'static {
    /// How many processes the host killed in this machine for want of memory, since it booted.
    fn oom_kills(&self) -> u64;
    fn usage(&self) -> Usage;
}

/// What a machine uses of its host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub memory_bytes: u64,
    pub cpu_micros: u64,
    pub disk_bytes: u64,
}

/// Packets to and from the agent (`protocol::guest` frames). `send` may be called from many tasks at
/// once, `recv` from one. Both are cancel-safe: a packet goes whole, or not at all.
#[async_trait]
pub trait Channel: Send + Sync + 'static {
    /// Waits while the road is full.
    async fn send(&self, packet: Bytes) -> io::Result<()>;
    /// An empty packet means that the other side is gone for good.
    async fn recv(&self) -> io::Result<Bytes>;
}

/// The engine tried and it broke.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The host has not got what the machine needs.
    #[error("this host has not enough {what}: {detail}")]
    Capacity { what: &'static str, detail: String },
    /// There is no room for what was to be written; nothing was lost.
    #[error("the disk is full: {0}")]
    DiskFull(String),
    /// The root image can't be used.
    #[error("the image can't be used: {0}")]
    Image(String),
    /// What the guest made of its files is beyond what can be read from outside.
    #[error("the files of the sandbox can't be read: {0}")]
    GuestFiles(String),
    /// The engine can't do this.
    #[error("the {engine} engine can't {what}")]
    Unsupported { engine: &'static str, what: String },
    /// A step failed.
    #[error("could not {action}")]
    Failed {
        action: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl EngineError {
    /// `EngineError::failed("start runsc")(error)`, for `map_err`.
    pub fn failed<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        action: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let action = action.into();
        move |source| Self::Failed { action, source: source.into() }
    }
}

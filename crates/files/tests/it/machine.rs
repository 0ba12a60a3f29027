//! An agent with a line, as a microVM has it, in this process; and a daemon that serves files to it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rustix::mount::UnmountFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::net::UnixDatagram;
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use torpor_agent::{Mode, line, packets, serve_all};
use torpor_files::{FileService, Volume};
use torpor_lifecycle::engine::Channel;
use torpor_lifecycle::guest::{
    FileServer, FilesMount, Guest, GuestError, ServedFiles, serve_files, stop_files,
};
use torpor_protocol::guest::files::{Call, decode_call};
use torpor_protocol::guest::{HEADER, MAX_PAYLOAD};

use crate::world::{Disk, access};

const PATIENCE: Duration = Duration::from_secs(20);

/// The road to the agent, which breaks when the daemon dies.
struct Road {
    socket: UnixDatagram,
    dead: CancellationToken,
}

#[async_trait]
impl Channel for Road {
    async fn send(&self, packet: Bytes) -> io::Result<()> {
        tokio::select! {
            biased;
            () = self.dead.cancelled() => Err(io::ErrorKind::BrokenPipe.into()),
            sent = self.socket.send(&packet) => sent.map(|_| ()),
        }
    }

    async fn recv(&self) -> io::Result<Bytes> {
        let mut packet = vec![0; HEADER + MAX_PAYLOAD];
        tokio::select! {
            biased;
            () = self.dead.cancelled() => Ok(Bytes::new()),
            received = self.socket.recv(&mut packet) => {
                packet.truncate(received?);
                Ok(packet.into())
            }
        }
    }
}

/// A service that counts its calls, and may stop to answer.
pub(crate) struct Server {
    pub(crate) service: FileService,
    pub(crate) calls: AtomicU64,
    /// Answers that were lost.
    pub(crate) lost: AtomicU64,
    /// Answers from this one on are lost.
    pub(crate) silent_after: AtomicU64,
    /// Answers to what makes or appends are.
    pub(crate) forgetful: AtomicBool,
}

impl FileServer for Server {
    fn call(&self, message: &[u8]) -> Vec<u8> {
        let number = self.calls.fetch_add(1, Ordering::SeqCst);
        let answer = self.service.serve(message);
        let silent = number >= self.silent_after.load(Ordering::SeqCst);
        let makes = matches!(
            decode_call(message),
            Ok((_, _, Call::Mkdir { .. } | Call::Write { append: true, .. }))
        );
        let forgotten = makes && self.forgetful.load(Ordering::SeqCst);
        if !silent && !forgotten {
            return answer;
        }
        self.lost.fetch_add(1, Ordering::SeqCst);
        Vec::new()
    }

    fn turns(&self) -> Arc<Semaphore> {
        Arc::clone(self.service.volume().turns())
    }
}

impl Server {
    pub(crate) fn new(volume: &Arc<Volume>, read_only: bool) -> Arc<Self> {
        let service = volume.attach(Path::new(""), access(read_only)).unwrap();
        Arc::new(Self {
            service,
            calls: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            silent_after: AtomicU64::new(u64::MAX),
            forgetful: AtomicBool::new(false),
        })
    }
}

pub(crate) struct Machine {
    runtime: Runtime,
    socket: OwnedFd,
    daemon: Option<(Guest, CancellationToken)>,
    mounts: Vec<PathBuf>,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        std::thread::spawn(move || serve_all(line(theirs).unwrap(), Mode::InProcess).unwrap());
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let socket = packets(ours).unwrap();
        let mut machine = Self { runtime, socket, daemon: None, mounts: Vec::new() };
        machine.restart_daemon();
        machine
    }

    /// The daemon dies in the middle of what it does, and another comes.
    pub(crate) fn restart_daemon(&mut self) {
        self.kill_daemon();
        let dead = CancellationToken::new();
        let guest = self.runtime.block_on(async {
            let socket = self.socket.try_clone().unwrap();
            rustix::io::ioctl_fionbio(&socket, true).unwrap();
            let socket = UnixDatagram::from_std(socket.into()).unwrap();
            let road = Arc::new(Road { socket, dead: dead.clone() });
            Guest::connect(road, PATIENCE).await.unwrap()
        });
        self.daemon = Some((guest, dead));
    }

    pub(crate) fn kill_daemon(&mut self) {
        if let Some((guest, dead)) = self.daemon.take() {
            dead.cancel();
            self.runtime.block_on(guest.gone());
        }
    }

    pub(crate) fn guest(&self) -> &Guest {
        &self.daemon.as_ref().unwrap().0
    }

    pub(crate) fn run<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(async { tokio::time::timeout(PATIENCE, future).await.unwrap() })
    }

    pub(crate) fn mount(&mut self, mount: FilesMount, server: &Arc<Server>) -> ServedFiles {
        self.mount_served(mount, Arc::clone(server) as Arc<dyn FileServer>)
    }

    /// By whatever answers.
    pub(crate) fn mount_served(
        &mut self,
        mount: FilesMount,
        server: Arc<dyn FileServer>,
    ) -> ServedFiles {
        self.mounts.push(mount.path.clone().into());
        self.run(serve_files(self.guest(), mount, server)).unwrap()
    }

    pub(crate) fn unmount(&self, number: u16, force: bool) -> Result<(), GuestError> {
        self.run(stop_files(self.guest(), number, force))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for mount in &self.mounts {
            // Whoever waits gets an error.
            let _ = rustix::mount::unmount(mount, UnmountFlags::FORCE | UnmountFlags::DETACH);
        }
    }
}

/// A disk, a machine, and one mounted in the other.
pub(crate) struct World {
    pub(crate) served: Option<ServedFiles>,
    pub(crate) server: Arc<Server>,
    pub(crate) machine: Machine,
    pub(crate) disk: Disk,
}

pub(crate) fn files(disk: &Disk, number: u16, name: &str) -> FilesMount {
    let path = disk.beside(name).to_str().unwrap().to_owned();
    FilesMount { number, path, read_only: false, shared: false }
}

impl World {
    pub(crate) fn new(mib: u64) -> Option<Self> {
        let disk = Disk::new(mib)?;
        if !Path::new("/dev/fuse").exists() {
            torpor_testkit::missing("mounts need /dev/fuse");
            return None;
        }
        let mut machine = Machine::new();
        let server = Server::new(&disk.volume(), false);
        let served = Some(machine.mount(files(&disk, 1, "guest"), &server));
        Some(Self { served, server, machine, disk })
    }

    /// Where the guest sees it.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.disk.beside("guest").join(name)
    }

    /// Where the host does.
    pub(crate) fn host(&self, name: &str) -> PathBuf {
        self.disk.path().join(name)
    }

    /// Another daemon serves the same.
    pub(crate) fn restart_daemon(&mut self) {
        self.machine.restart_daemon();
        self.server = Server::new(&self.disk.volume(), false);
        self.serve();
    }

    /// The same service, on a new stream.
    pub(crate) fn serve(&mut self) {
        self.server.silent_after.store(u64::MAX, Ordering::SeqCst);
        let mount = files(&self.disk, 1, "guest");
        self.served = Some(self.machine.mount(mount, &self.server));
    }
}

/// Waits for a value, with a deadline.
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(value) = look() {
            return value;
        }
        assert!(tokio::time::Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

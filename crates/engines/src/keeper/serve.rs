//! The keeper's side: one loop that accepts, answers, reads and reaps.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitId, WaitIdOptions, WaitOptions, WaitStatus};

use super::KEEPER_VERSION;
use super::held::{Held, now};
use super::wire::{self, Ended, PACKET_MAX, RecvError, Reply, Request, Spawn};
use crate::directory::absent;

/// Connections at once; more wait in the backlog. A daemon has one per boot that is under way.
const PEERS_MAX: usize = 1024;
/// Ends of processes nobody asked about yet; the oldest is dropped.
const ENDS_MAX: usize = 1024;
/// Waiting connections; what the kernel's default bound allows.
const BACKLOG: i32 = 4096;

/// Makes the socket at `path`, for root only. A socket file left by a dead keeper is replaced.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    absent(std::fs::remove_file(path))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Serves requests on `socket` (from [`listen`]) until asked to stop. The process becomes a session of its own and the parent of all orphans among its descendants.
pub fn run(socket: OwnedFd) -> io::Result<()> {
    // Refused only to the leader of a process group, who has what is wanted.
    let _ = rustix::process::setsid();
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    std::env::set_current_dir("/")?;
    let signals = child_signals()?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    drop(null);
    let mut server = Server::default();
    while !server.stopping {
        server.turn(&socket, &signals)?;
    }
    Ok(())
}

/// Where [`on_child`] rings; -1 until there is somebody to hear it.
static BELL: AtomicI32 = AtomicI32::new(-1);

/// A descriptor that is readable when a child has ended, whichever thread the signal comes to.
#[expect(unsafe_code, reason = "there is no safe way to hear of signals in the standard library")]
fn child_signals() -> io::Result<OwnedFd> {
    let (heard, bell) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // Never closed: the handler may run until the process ends.
    BELL.store(bell.into_raw_fd(), Ordering::Relaxed);
    // SAFETY: an all-zero sigaction is valid (no flags, empty mask); the handler is a function of
    // the type SA_SIGINFO-less handlers have, and makes one async-signal-safe call.
    let done = unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        action.sa_sigaction = on_child as extern "C" fn(libc::c_int) as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART | libc::SA_NOCLDSTOP;
        libc::sigaction(libc::SIGCHLD, &action, std::ptr::null_mut())
    };
    if done == 0 { Ok(heard) } else { Err(io::Error::last_os_error()) }
}

#[expect(unsafe_code, reason = "a signal handler may do hardly anything")]
extern "C" fn on_child(_signal: libc::c_int) {
    // SAFETY: write is async-signal-safe, the buffer is one static byte; errno, which the
    // interrupted code may be about to read, is put back. A full pipe rings already.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(BELL.load(Ordering::Relaxed), b"!".as_ptr().cast(), 1);
        *libc::__errno_location() = errno;
    }
}

/// Someone who asked, and what they wait for.
#[derive(Debug)]
struct Peer {
    socket: OwnedFd,
    waits: Option<Wait>,
}

#[derive(Debug, PartialEq, Eq)]
enum Wait {
    Starter(String),
    Exit(Pid),
}

#[derive(Debug, Default)]
struct Server {
    machines: BTreeMap<String, Held>,
    peers: Vec<Peer>,
    ends: VecDeque<(Pid, Ended)>,
    stopping: bool,
}

/// What became readable.
struct Ready {
    listener: bool,
    child: bool,
    peers: Vec<usize>,
    stderrs: Vec<String>,
}

impl Server {
    /// Waits until something happens and deals with all of it.
    fn turn(&mut self, listener: &OwnedFd, signals: &OwnedFd) -> io::Result<()> {
        let ready = self.wait(listener, signals)?;
        for id in &ready.stderrs {
            if let Some(held) = self.machines.get_mut(id) {
                held.read_stderr(now());
            }
        }
        // Oldest connection first: a `Forget` never overtakes the `Spawn` it follows.
        let mut gone = Vec::new();
        for &index in &ready.peers {
            if !self.serve(index) {
                gone.push(index);
            }
        }
        for index in gone.into_iter().rev() {
            self.peers.remove(index);
        }
        // After the requests: whoever asks for an end that is there already gets it here.
        if ready.child {
            self.reap(signals);
        }
        if ready.listener {
            self.accept(listener);
        }
        Ok(())
    }

    fn wait(&self, listener: &OwnedFd, signals: &OwnedFd) -> io::Result<Ready> {
        let mut timeout: Option<Duration> = None;
        let mut stderrs: Vec<(&String, BorrowedFd<'_>)> = Vec::new();
        let now = now();
        for (id, held) in &self.machines {
            match held.stderr(now) {
                Ok(Some(fd)) => stderrs.push((id, fd)),
                Ok(None) => {}
                Err(rest) => timeout = Some(timeout.map_or(rest, |least| least.min(rest))),
            }
        }
        let accepting = self.peers.len() < PEERS_MAX;
        let watch = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds = vec![watch(signals.as_fd())];
        fds.push(if accepting { watch(listener.as_fd()) } else { watch(signals.as_fd()) });
        fds.extend(self.peers.iter().map(|peer| watch(peer.socket.as_fd())));
        fds.extend(stderrs.iter().map(|(_, fd)| watch(*fd)));
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (fixed, rest) = ready.split_at(2);
        let (peers, pipes) = rest.split_at(self.peers.len());
        Ok(Ready {
            child: fixed[0],
            listener: accepting && fixed[1],
            peers: (0..peers.len()).filter(|index| peers[*index]).collect(),
            stderrs: stderrs
                .iter()
                .zip(pipes)
                .filter(|(_, r)| **r)
                .map(|((id, _), _)| (*id).clone())
                .collect(),
        })
    }

    fn accept(&mut self, listener: &OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        while self.peers.len() < PEERS_MAX {
            let Ok(socket) = rustix::net::accept_with(listener, flags) else { return };
            let me = rustix::process::getuid();
            if sockopt::socket_peercred(&socket).is_ok_and(|peer| peer.uid == me) {
                let _ = sockopt::set_socket_send_buffer_size_force(&socket, 2 * PACKET_MAX);
                self.peers.push(Peer { socket, waits: None });
            }
        }
    }

    /// Answers the peer. `false`: it is done with.
    fn serve(&mut self, index: usize) -> bool {
        let request = match wire::recv::<Request>(&self.peers[index].socket) {
            Ok((request, _)) => request,
            Err(RecvError::Io(Errno::AGAIN | Errno::INTR)) => return true,
            Err(RecvError::Closed | RecvError::Io(_)) => return false,
            Err(RecvError::Nonsense(error)) => {
                let why = error.to_string();
                return wire::send(&self.peers[index].socket, &Reply::Refused { why }, None)
                    .is_ok();
            }
        };
        if let Request::Channel { id } = &request
            && let Some(held) = self.machines.get(id)
        {
            let fd = Some(held.channel.as_fd());
            return wire::send(&self.peers[index].socket, &Reply::Channel, fd).is_ok();
        }
        match self.answer(request) {
            Ok(reply) => wire::send(&self.peers[index].socket, &reply, None).is_ok(),
            Err(wait) => {
                self.peers[index].waits = Some(wait);
                true
            }
        }
    }

    fn answer(&mut self, request: Request) -> Result<Reply, Wait> {
        Ok(match request {
            Request::Hello => Reply::Hello { version: KEEPER_VERSION },
            Request::Spawn(spawn) => return self.spawn(spawn),
            Request::Channel { id } => refuse(format!("no machine {id} is held here")),
            Request::ExitOf { pid } => return self.exit_of(pid),
            Request::Tail { id } => match self.machines.get_mut(&id) {
                Some(held) => {
                    held.read_stderr(now());
                    Reply::Tail { text: held.tail() }
                }
                None => refuse(format!("no machine {id} is held here")),
            },
            Request::Forget { id } => {
                self.forget(id);
                Reply::Forgotten
            }
            Request::List => Reply::Ids { ids: self.machines.keys().cloned().collect() },
            Request::Stop if self.machines.is_empty() => {
                self.stopping = true;
                Reply::Stopping
            }
            Request::Stop => refuse(format!("{} machines are held here", self.machines.len())),
        })
    }

    fn spawn(&mut self, spawn: Spawn) -> Result<Reply, Wait> {
        if self.machines.contains_key(&spawn.id) {
            return Ok(refuse(format!("machine {} is held already", spawn.id)));
        }
        match Held::spawn(&spawn) {
            Ok(held) => {
                self.machines.insert(spawn.id.clone(), held);
                Err(Wait::Starter(spawn.id))
            }
            Err(error) => {
                let program = spawn.argv.first().map_or("", String::as_str);
                Ok(refuse(format!("could not start {program}: {error}")))
            }
        }
    }

    fn forget(&mut self, id: String) {
        let Some(held) = self.machines.remove(&id) else { return };
        held.abandon();
        let why = format!("machine {id} was given up");
        let wait = Some(Wait::Starter(id));
        for peer in self.peers.iter_mut().filter(|peer| peer.waits == wait) {
            peer.waits = None;
            // Whoever can't hear it is gone, and noticed as such in the next turn.
            let _ = wire::send(&peer.socket, &refuse(why.clone()), None);
        }
    }

    fn exit_of(&mut self, pid: i32) -> Result<Reply, Wait> {
        let Some(pid) = Pid::from_raw(pid) else { return Ok(refuse("0 is no process".into())) };
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if rustix::process::waitid(WaitId::Pid(pid), look).is_ok() {
            // A child that runs, or that has ended and is reaped within this turn.
            return Err(Wait::Exit(pid));
        }
        // The latest: numbers are used again.
        match self.ends.iter().rfind(|(ended, _)| *ended == pid) {
            Some((_, ended)) => Ok(Reply::Exited { ended: *ended }),
            None => Ok(refuse(format!("process {pid} was not seen to end"))),
        }
    }

    /// Reaps everything that ended and tells who waits for it.
    fn reap(&mut self, signals: &OwnedFd) {
        let mut sink = [0u8; 256];
        while rustix::io::read(signals, &mut sink).is_ok_and(|count| count > 0) {}
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            self.ended(pid, end_of(status));
        }
    }

    fn ended(&mut self, pid: Pid, ended: Ended) {
        let starter = self.machines.iter_mut().find(|(_, held)| held.starter == Some(pid));
        let (wait, reply) = if let Some((id, held)) = starter {
            held.starter = None;
            held.read_stderr(now());
            (Wait::Starter(id.clone()), Reply::Spawned { ended, stderr: held.tail() })
        } else {
            (Wait::Exit(pid), Reply::Exited { ended })
        };
        self.peers.retain_mut(|peer| {
            if peer.waits.as_ref() != Some(&wait) {
                return true;
            }
            peer.waits = None;
            wire::send(&peer.socket, &reply, None).is_ok()
        });
        if matches!(wait, Wait::Exit(_)) {
            self.ends.push_back((pid, ended));
            if self.ends.len() > ENDS_MAX {
                self.ends.pop_front();
            }
        }
    }
}

fn refuse(why: String) -> Reply {
    Reply::Refused { why }
}

fn end_of(status: WaitStatus) -> Ended {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Ended::Code { code },
        (None, signal) => Ended::Signal { signal: signal.unwrap_or(0) },
    }
}

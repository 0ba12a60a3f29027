//! Carries packets over a line of bytes: the serial port of a microVM.
//!
//! The rest of the agent knows packet sockets only. So it gets one, and two threads carry what goes in
//! and out of its other end over the line. On the host somebody may be there or not: the machine lives
//! on, and whoever comes next says hello.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::{Builder, sleep};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use torpor_protocol::guest::line::{Decoder, encode};
use torpor_protocol::guest::{FILES_STREAM, HEADER, MAX_PAYLOAD};

/// Bytes taken off the line at once. The kernel gives a page at a time.
const READ: usize = 16 * 1024;
/// Packets that may wait for the agent: enough to keep both sides busy.
const SOCKET_BUFFER: usize = 4 * (HEADER + MAX_PAYLOAD);
/// The threads have little to remember.
const STACK: usize = 64 * 1024;
/// How long nobody is believed to be there without asking. The kernel tells when somebody comes; this is
/// for one that does not.
const ABSENT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// When to try again after the line failed.
const FAILED_PAUSE: Duration = Duration::from_millis(100);

/// Where packets from the host come out.
#[derive(Debug)]
pub struct Packets {
    /// The agent's own; what it sends goes back.
    pub agent: OwnedFd,
    /// Those of streams for files, where there is a way of their own.
    pub files: Option<OwnedFd>,
}

/// What `serve` takes, of whatever leads to the host: the descriptor itself if it carries packets, else
/// a socket whose packets go over it from now on.
pub fn packets(host: OwnedFd) -> io::Result<OwnedFd> {
    carried(host, None)
}

/// What `serve_all` takes: the same, and over a line packets for files apart from the others. So neither waits
/// for the other: the agent may wait for a file.
pub fn line(host: OwnedFd) -> io::Result<Packets> {
    if sockopt::socket_type(&host) == Ok(SocketType::SEQPACKET) {
        return Ok(Packets { agent: host, files: None });
    }
    let (files, ours) = pair()?;
    Ok(Packets { agent: carried(host, Some(ours))?, files: Some(files) })
}

fn carried(host: OwnedFd, files: Option<OwnedFd>) -> io::Result<OwnedFd> {
    if sockopt::socket_type(&host) == Ok(SocketType::SEQPACKET) {
        return Ok(host);
    }
    let (agent, ours) = pair()?;
    let (line, socket) = (Arc::new(host), Arc::new(ours));
    let (line_too, socket_too) = (line.clone(), socket.clone());
    let thread = || Builder::new().stack_size(STACK);
    let mut inward =
        Inward { agent: Queue::new(socket), files: files.map(|it| Queue::new(it.into())) };
    thread().name("in".to_owned()).spawn(move || carry_in(&line, &mut inward))?;
    thread().name("out".to_owned()).spawn(move || carry_out(&socket_too, &line_too))?;
    Ok(agent)
}

fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let (theirs, ours) = rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
    // Where it can't be resized, fewer packets wait in it.
    let _ = sockopt::set_socket_send_buffer_size(&ours, SOCKET_BUFFER);
    Ok((theirs, ours))
}

/// Where packets go.
struct Inward {
    agent: Queue,
    files: Option<Queue>,
}

impl Inward {
    fn send(&mut self, packet: &[u8]) -> Result<(), Errno> {
        let files = self.files.as_mut();
        let stream = packet.first_chunk().map_or(0, |stream| u32::from_le_bytes(*stream));
        match files {
            None => send(&self.agent.socket, packet),
            Some(files) if stream & FILES_STREAM != 0 => files.send(packet),
            Some(files) => {
                // A new session is one for them too, once they have begun.
                if stream == 0 && files.used {
                    files.send(packet)?;
                }
                self.agent.send(packet)
            }
        }
    }
}

/// A socket to a part of the agent, and what has no room in it: as much as the host may send, which is bounded for each
/// stream. Whoever does not read waits for itself only.
struct Queue {
    socket: Arc<OwnedFd>,
    used: bool,
    waiting: Arc<AtomicUsize>,
    overflow: Option<mpsc::Sender<Vec<u8>>>,
}

impl Queue {
    fn new(socket: Arc<OwnedFd>) -> Self {
        Self { socket, used: false, waiting: Arc::default(), overflow: None }
    }

    fn send(&mut self, packet: &[u8]) -> Result<(), Errno> {
        self.used = true;
        if self.waiting.load(Ordering::Acquire) == 0 {
            match rustix::net::send(&self.socket, packet, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
            {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM) => {}
                Err(errno) => return Err(errno),
            }
        }
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let overflow = match &self.overflow {
            Some(overflow) => overflow,
            None => {
                let (sender, packets) = mpsc::channel::<Vec<u8>>();
                let (socket, waiting) = (self.socket.clone(), self.waiting.clone());
                let thread = Builder::new().stack_size(STACK).name("queue".to_owned());
                let started = thread.spawn(move || {
                    while let Ok(packet) = packets.recv() {
                        if send(&socket, &packet).is_err() {
                            return;
                        }
                        waiting.fetch_sub(1, Ordering::AcqRel);
                    }
                });
                started.map_err(|_| Errno::AGAIN)?;
                self.overflow.insert(sender)
            }
        };
        overflow.send(packet.to_vec()).map_err(|_| Errno::PIPE)
    }
}

/// From the host to the agent; returns when the agent is gone.
fn carry_in(line: &OwnedFd, agent: &mut Inward) {
    let arrival = Arrival::new(line);
    let mut decoder = Decoder::new();
    let mut buffer = vec![0; READ];
    loop {
        match rustix::io::read(line, &mut *buffer) {
            Ok(0) => arrival.wait(),
            Ok(length) => {
                let mut bytes = &buffer[..length];
                while let Some(packet) = decoder.next(&mut bytes) {
                    // An empty one would pass for the end.
                    if !packet.is_empty() && agent.send(packet).is_err() {
                        return;
                    }
                }
            }
            Err(Errno::INTR) => {}
            Err(_) => sleep(FAILED_PAUSE),
        }
    }
}

fn send(socket: &OwnedFd, packet: &[u8]) -> Result<(), Errno> {
    loop {
        match rustix::net::send(socket, packet, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::NOBUFS | Errno::NOMEM) => sleep(FAILED_PAUSE),
            Err(error) => return Err(error),
        }
    }
}

/// From the agent to the host; returns when the agent is gone.
fn carry_out(socket: &OwnedFd, line: &OwnedFd) {
    let mut packet = vec![0; HEADER + MAX_PAYLOAD];
    let mut bytes = Vec::new();
    loop {
        let received =
            retry_on_intr(|| rustix::net::recv(socket, &mut packet[..], RecvFlags::empty()));
        let length = match received {
            Ok((0, _)) | Err(_) => return,
            Ok((length, _)) => length,
        };
        bytes.clear();
        encode(&packet[..length], &mut bytes);
        write_all(line, &bytes);
    }
}

/// Waits as long as nobody takes it. What the kernel refuses is lost, and the host sees a torn packet.
fn write_all(line: &OwnedFd, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match rustix::io::write(line, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN | Errno::NOMEM) => sleep(FAILED_PAUSE),
            Err(_) => return sleep(FAILED_PAUSE),
        }
    }
}

/// Tells when somebody comes to the other end of the line.
struct Arrival(Option<OwnedFd>);

impl Arrival {
    fn new(line: &OwnedFd) -> Self {
        let list = epoll::create(CreateFlags::CLOEXEC).and_then(|list| {
            // At changes only: that nobody is there would be told for ever.
            let flags = EventFlags::IN | EventFlags::ET;
            epoll::add(&list, line.as_fd(), EventData::new_u64(0), flags)?;
            Ok(list)
        });
        Self(list.ok())
    }

    fn wait(&self) {
        let Some(list) = &self.0 else { return sleep(FAILED_PAUSE) };
        let mut events = Vec::with_capacity(1);
        let spare = rustix::buffer::spare_capacity(&mut events);
        if epoll::wait(list, spare, Some(&ABSENT)).is_err() {
            sleep(FAILED_PAUSE);
        }
    }
}

//! A small daemon: one agent in a thread, a blocking socket, streams by number.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::process::{Child, Command};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::process::{Pid, Signal};
use torpor_agent::{Mode, serve};
use torpor_protocol::guest::{
    Failure, Frame, GUEST_VERSION, HEADER, Hello, Kind, MAX_PAYLOAD, ProcessSpec, ProcessStatus,
    Reply, Request, WINDOW, json_packet, packet,
};

/// No answer of the agent takes longer.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Daemon {
    socket: Option<OwnedFd>,
    agent: Option<JoinHandle<std::io::Result<()>>>,
    machine: Option<Child>,
    next: u32,
    arrived: HashMap<u32, VecDeque<Piece>>,
    windows: HashMap<u32, u64>,
    /// Streams whose data is not acknowledged.
    pub(crate) stingy: Vec<u32>,
}

#[derive(Debug, PartialEq)]
pub(crate) enum Piece {
    Reply(Reply),
    Data(Vec<u8>),
    DataErr(Vec<u8>),
    End,
    Reset,
}

/// All of a finished run.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) started: ProcessStatus,
    pub(crate) exited: ProcessStatus,
}

impl Ran {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }
}

impl Daemon {
    /// An agent in a thread.
    pub(crate) fn new() -> Self {
        let (ours, theirs) = channel();
        let mut daemon = Self::over(ours);
        daemon.agent = Some(std::thread::spawn(move || serve(theirs, Mode::InProcess)));
        daemon.hello(1);
        daemon
    }

    /// An agent that is PID 1 of something like a machine.
    pub(crate) fn with_machine(mut command: Command) -> Self {
        let (ours, theirs) = channel();
        let mut daemon = Self::over(ours);
        daemon.machine = Some(command.stdin(theirs).spawn().unwrap());
        drop(command);
        daemon.hello(1);
        daemon
    }

    /// A machine whose agent has a line of bytes instead of a packet socket; and the host's end of it.
    pub(crate) fn with_line(mut command: Command) -> (Self, OwnedFd) {
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let (ours, theirs) =
            rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        let line = ours.try_clone().unwrap();
        // The agent's own way of carrying packets, from the other end.
        let packets = torpor_agent::packets(ours).unwrap();
        let timeout = rustix::net::sockopt::Timeout::Recv;
        rustix::net::sockopt::set_socket_timeout(&packets, timeout, Some(PATIENCE)).unwrap();
        let mut daemon = Self::over(packets);
        daemon.machine = Some(command.stdin(theirs).spawn().unwrap());
        (daemon, line)
    }

    /// Lets the agent of a machine stand still while `meanwhile` happens, like a frozen one.
    pub(crate) fn frozen(&mut self, meanwhile: impl FnOnce(&mut Self)) {
        let parent = self.machine.as_ref().expect("only a machine can be frozen").id();
        let children = format!("/proc/{parent}/task/{parent}/children");
        let agent: u32 = std::fs::read_to_string(children).unwrap().trim().parse().unwrap();
        let pid = Pid::from_raw(agent.cast_signed()).unwrap();
        rustix::process::kill_process(pid, Signal::STOP).unwrap();
        eventually("the agent stands still", || (state(agent) == Some('T')).then_some(()));
        meanwhile(self);
        rustix::process::kill_process(pid, Signal::CONT).unwrap();
    }

    fn over(socket: OwnedFd) -> Self {
        Self {
            socket: Some(socket),
            agent: None,
            machine: None,
            next: 1,
            arrived: HashMap::new(),
            windows: HashMap::new(),
            stingy: Vec::new(),
        }
    }

    /// Starts a session; frames of the one before are dropped.
    pub(crate) fn hello(&mut self, session: u64) {
        self.send_packet(&json_packet(0, Kind::Hello, &Hello { version: GUEST_VERSION, session }));
        self.arrived.clear();
        loop {
            let packet = self.receive_packet();
            let frame = Frame::parse(&packet).unwrap();
            if frame.kind == Kind::Hello && frame.json::<Hello>().unwrap().session == session {
                return;
            }
        }
    }

    /// The other side is gone; returns what `serve` said.
    pub(crate) fn hang_up(mut self) -> std::io::Result<()> {
        self.socket = None;
        match self.machine.take() {
            Some(mut machine) => {
                let ended = eventually("the machine ends", || machine.try_wait().unwrap());
                assert!(ended.success());
                Ok(())
            }
            None => self.agent.take().unwrap().join().unwrap(),
        }
    }

    pub(crate) fn send_packet(&self, packet: &[u8]) {
        let socket = self.socket.as_ref().unwrap();
        let send = || rustix::net::send(socket, packet, SendFlags::NOSIGNAL);
        rustix::io::retry_on_intr(send).unwrap();
    }

    fn receive_packet(&self) -> Vec<u8> {
        let mut buffer = vec![0; HEADER + MAX_PAYLOAD];
        let socket = self.socket.as_ref().unwrap();
        // The agent's children end, and their signals interrupt whom they find.
        let (length, _) = rustix::io::retry_on_intr(|| {
            rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty())
        })
        .expect("the agent answers in time");
        assert!(length > 0, "the agent is gone");
        buffer.truncate(length);
        buffer
    }

    pub(crate) fn send(&self, stream: u32, kind: Kind, payload: &[u8]) {
        self.send_packet(&packet(stream, kind, payload));
    }

    pub(crate) fn open(&mut self, request: &Request) -> u32 {
        let stream = self.next;
        self.next += 1;
        self.windows.insert(stream, WINDOW.into());
        self.send_packet(&json_packet(stream, Kind::Open, request));
        stream
    }

    /// Sends data as the agent grants it, and the end; stops if the agent wants no more.
    pub(crate) fn send_all(&mut self, stream: u32, bytes: &[u8]) {
        for chunk in bytes.chunks(MAX_PAYLOAD) {
            while self.windows[&stream] < chunk.len() as u64 {
                self.take_packet();
                if self.arrived.get(&stream).is_some_and(|it| it.contains(&Piece::End)) {
                    return;
                }
            }
            *self.windows.get_mut(&stream).unwrap() -= chunk.len() as u64;
            self.send(stream, Kind::Data, chunk);
        }
        self.send(stream, Kind::End, &[]);
    }

    fn take_packet(&mut self) {
        let packet = self.receive_packet();
        let frame = Frame::parse(&packet).unwrap();
        let stream = frame.stream;
        let piece = match frame.kind {
            Kind::Reply => Piece::Reply(frame.json().unwrap()),
            Kind::Data => Piece::Data(frame.payload.to_vec()),
            Kind::DataErr => Piece::DataErr(frame.payload.to_vec()),
            Kind::End => Piece::End,
            Kind::Reset => Piece::Reset,
            Kind::Credit => {
                *self.windows.entry(stream).or_default() += u64::from(frame.credit().unwrap());
                return;
            }
            Kind::Hello | Kind::Open => panic!("unexpected {frame:?}"),
        };
        if matches!(piece, Piece::Data(_) | Piece::DataErr(_)) && !self.stingy.contains(&stream) {
            self.credit(stream, u32::try_from(frame.payload.len()).unwrap());
        }
        self.arrived.entry(stream).or_default().push_back(piece);
    }

    pub(crate) fn credit(&self, stream: u32, bytes: u32) {
        self.send(stream, Kind::Credit, &bytes.to_le_bytes());
    }

    /// The next piece of a stream.
    pub(crate) fn next(&mut self, stream: u32) -> Piece {
        loop {
            if let Some(arrived) = self.arrived.get_mut(&stream)
                && let Some(piece) = arrived.pop_front()
            {
                if arrived.is_empty() {
                    self.arrived.remove(&stream);
                }
                return piece;
            }
            self.take_packet();
        }
    }

    pub(crate) fn reply(&mut self, stream: u32) -> Reply {
        match self.next(stream) {
            Piece::Reply(reply) => reply,
            other => panic!("no reply but {other:?}"),
        }
    }

    /// Data up to the end; then what was replied in between.
    pub(crate) fn collect(&mut self, stream: u32) -> (Vec<u8>, Vec<u8>, Vec<Reply>) {
        let (mut out, mut err, mut replies) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            match self.next(stream) {
                Piece::Data(bytes) => out.extend(bytes),
                Piece::DataErr(bytes) => err.extend(bytes),
                Piece::Reply(reply) => replies.push(reply),
                Piece::End => return (out, err, replies),
                Piece::Reset => panic!("reset"),
            }
        }
    }

    /// A request with one reply.
    pub(crate) fn ask(&mut self, request: &Request) -> Result<Reply, Failure> {
        let stream = self.open(request);
        self.answer(stream)
    }

    /// The one reply of a stream, and its end.
    pub(crate) fn answer(&mut self, stream: u32) -> Result<Reply, Failure> {
        let (out, err, mut replies) = self.collect(stream);
        assert!(out.is_empty() && err.is_empty(), "unexpected data");
        assert_eq!(replies.len(), 1, "{replies:?}");
        match replies.remove(0) {
            Reply::Failed(failed) => Err(failed),
            reply => Ok(reply),
        }
    }

    pub(crate) fn process(&mut self, request: &Request) -> ProcessStatus {
        match self.ask(request).unwrap() {
            Reply::Process(status) => status,
            other => panic!("no process but {other:?}"),
        }
    }

    pub(crate) fn start(&mut self, spec: ProcessSpec) -> ProcessStatus {
        self.process(&Request::Start(spec))
    }

    pub(crate) fn status(&mut self, pid: u32) -> ProcessStatus {
        self.process(&Request::Process { pid })
    }

    pub(crate) fn run(&mut self, spec: ProcessSpec) -> Ran {
        self.run_with(spec, b"")
    }

    pub(crate) fn run_with(&mut self, spec: ProcessSpec, stdin: &[u8]) -> Ran {
        let stream = self.open(&Request::Run(spec));
        self.send_all(stream, stdin);
        self.ran(stream)
    }

    /// The rest of a run.
    pub(crate) fn ran(&mut self, stream: u32) -> Ran {
        let (stdout, stderr, replies) = self.collect(stream);
        match replies.as_slice() {
            [Reply::Started(started), Reply::Exited(exited)] => {
                Ran { stdout, stderr, started: started.clone(), exited: exited.clone() }
            }
            other => panic!("no run but {other:?}"),
        }
    }

    /// Attaches to a process that has ended or will end.
    pub(crate) fn replay(&mut self, pid: u32) -> Ran {
        let stream = self.open(&Request::Attach { pid, replay: true, follow: true, stamps: false });
        self.ran(stream)
    }

    pub(crate) fn fail(&mut self, request: &Request) -> Failure {
        self.ask(request).expect_err("this must fail")
    }
}

fn channel() -> (OwnedFd, OwnedFd) {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let (ours, theirs) = rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
    let timeout = rustix::net::sockopt::Timeout::Recv;
    rustix::net::sockopt::set_socket_timeout(&ours, timeout, Some(PATIENCE)).unwrap();
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(&ours, 2 * MAX_PAYLOAD);
    (ours, theirs)
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.socket = None;
        if let Some(mut machine) = self.machine.take() {
            let _ = machine.kill();
            let _ = machine.wait();
        }
        if let Some(agent) = self.agent.take() {
            let served = agent.join();
            if !std::thread::panicking() {
                served.expect("the agent does not panic").expect("the agent ends well");
            }
        }
    }
}

pub(crate) fn command(words: &[&str]) -> ProcessSpec {
    ProcessSpec {
        command: words.iter().map(|word| (*word).to_owned()).collect(),
        ..Default::default()
    }
}

pub(crate) fn sh(script: &str) -> ProcessSpec {
    command(&["/bin/sh", "-c", script])
}

pub(crate) fn env(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
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

/// Whether a process is there and no zombie.
pub(crate) fn lives(pid: u32) -> bool {
    state(pid).is_some_and(|it| it != 'Z')
}

fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next()?.chars().next()
}

//! The agent's half: decides who may, starts the command, tells its end.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use tokio::io::Interest;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use torpor_protocol::guest::{Exit, ProcessSpec};

use super::packet::{Packet, receive};
use super::wire::{Order, PACKET_MAX, Wish, Word};
use super::{SOCKET, refusal};
use crate::agent::Agent;
use crate::descriptor::{Descriptor, watched};
use crate::process::{Bystander, user};

/// Commands at once. Each holds a descriptor of the agent and a little memory.
const CONNECTIONS_MAX: usize = 64;
/// Clients that may wait to be accepted.
const BACKLOG: i32 = 64;
/// A client sends its wish at once.
const WISH_DEADLINE: Duration = Duration::from_secs(10);
/// Room for an order.
const ORDER_MAX: usize = 256;
/// How long a command gets to end by itself after its client went away.
const GRACE: Duration = Duration::from_secs(2);
/// When to try again after the kernel had no descriptor for a client.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Makes the socket and serves it from now on. A machine where that fails has no sudo, and its
/// clients say that nobody answers.
pub(crate) fn offer(agent: &Rc<Agent>) {
    if let Ok(listener) = listen(Path::new(SOCKET)) {
        tokio::task::spawn_local(welcome(agent.clone(), listener));
    }
}

/// A socket for everybody at `path`, in place of what is there.
fn listen(path: &Path) -> io::Result<Descriptor> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(directory)?;
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))?;
    rustix::net::listen(&socket, BACKLOG)?;
    watched(socket, Interest::READABLE)
}

async fn welcome(agent: Rc<Agent>, listener: Descriptor) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let accept = |socket: &OwnedFd| Ok(rustix::net::accept_with(socket, SocketFlags::CLOEXEC)?);
        let Ok(client) = listener.async_io(Interest::READABLE, accept).await else {
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let Ok(line) = Line::new(client) else { continue };
        match places.clone().try_acquire_owned() {
            Ok(place) => {
                let agent = agent.clone();
                tokio::task::spawn_local(async move {
                    attend(&agent, &line).await;
                    drop(place);
                });
            }
            Err(_) => {
                let words = format!("{CONNECTIONS_MAX} commands run with sudo already");
                line.send(&Word::Refused(words));
            }
        }
    }
}

/// One client, from its first packet to its last.
async fn attend(agent: &Agent, line: &Line) {
    line.send(&Word::Ready);
    let Ok(Ok(packet)) = timeout(WISH_DEADLINE, line.recv(PACKET_MAX)).await else { return };
    if packet.bytes.is_empty() {
        return;
    }
    agent.quiesce.unquiesced().await;
    match grant(agent, &packet) {
        Err(words) => line.send(&Word::Refused(words)),
        Ok(process) => {
            // The client has them too, and waits for the end of what is written to them.
            drop(packet);
            line.send(&Word::Started(process.pid()));
            let exit = mind(process, line).await;
            line.send(&Word::Exited(exit));
        }
    }
}

/// Starts what the packet wishes, or says why not.
fn grant(agent: &Agent, packet: &Packet) -> Result<Bystander, String> {
    let uid = packet.uid.ok_or("the kernel does not say who asks")?;
    if let Some(words) = refusal(&user::numbered(uid)) {
        return Err(words);
    }
    let [stdin, stdout, stderr] = packet.descriptors.as_slice() else {
        return Err("stdin, stdout and stderr have to come with the command".to_owned());
    };
    if packet.cut {
        return Err("the command and its environment are too long".to_owned());
    }
    let wish: Wish = serde_json::from_slice(&packet.bytes)
        .map_err(|error| format!("the agent does not understand this: {error}"))?;
    let spec = ProcessSpec {
        command: wish.command,
        cwd: Some(wish.cwd),
        env: wish.env,
        user: Some(wish.user),
        ..ProcessSpec::default()
    };
    let stdio = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
    Bystander::start(agent, &spec, stdio).map_err(|failed| failed.message)
}

/// Until the process has ended.
async fn mind(mut process: Bystander, line: &Line) -> Exit {
    loop {
        let heard = tokio::select! {
            biased;
            exit = process.ended() => return exit,
            heard = line.recv(ORDER_MAX) => heard,
        };
        let order = heard.ok().and_then(|heard| serde_json::from_slice(&heard.bytes).ok());
        match order {
            Some(Order::Signal(signal)) => process.signal(signal),
            // Gone, or nobody that this agent understands.
            None => return hang_up(process).await,
        }
    }
}

/// Ends the process of a client that is gone.
async fn hang_up(mut process: Bystander) -> Exit {
    process.signal(libc::SIGHUP);
    // What was stopped can't hear it otherwise.
    process.signal(libc::SIGCONT);
    let ended = timeout(GRACE, process.ended()).await;
    process.kill().await;
    // Nobody hears what is told here.
    ended.unwrap_or(Exit::Signal { signal: libc::SIGKILL })
}

/// The connection with one client.
struct Line(Descriptor);

impl Line {
    fn new(client: OwnedFd) -> io::Result<Self> {
        sockopt::set_socket_passcred(&client, true)?;
        Ok(Self(watched(client, Interest::READABLE)?))
    }

    /// Says one of very few words, for which there is always room. That somebody is gone is heard.
    fn send(&self, word: &Word) {
        let packet = serde_json::to_vec(word).unwrap_or_default();
        let _ = rustix::net::send(&self.0, &packet, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }

    /// The next packet, an empty one at the end.
    async fn recv(&self, max: usize) -> io::Result<Packet> {
        self.0.async_io(Interest::READABLE, |socket| receive(socket.as_fd(), max)).await
    }
}

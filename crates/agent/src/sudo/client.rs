//! The caller's half: reads the arguments, asks the agent, forwards signals, ends as the command did.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::io::{self, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sockopt,
};
use torpor_protocol::guest::Exit;

use super::arguments::{Run, Shell, USAGE, Wanted, parse};
use super::environment::{command, environment, home};
use super::wire::{Order, PACKET_MAX, Wish, Word};
use super::{SOCKET, name_of, refusal, signals};
use crate::failure::reason;
use crate::process::user::{self, Account};

/// The agent answers at once, or a little later when it has much to do.
const ANSWER: Duration = Duration::from_secs(10);
const SILENCE: &str = "the Torpor agent does not answer";
/// Room for every word of the agent.
const WORD_MAX: usize = 64 * 1024;
const FAILURE: u8 = 1;
/// Shells say so that a signal ended a command.
const BY_SIGNAL: i32 = 128;

pub(super) fn main(words: impl Iterator<Item = OsString>) -> ExitCode {
    let text = |word: OsString| {
        word.into_string().map_err(|word| format!("this argument is not UTF-8: {}", word.display()))
    };
    let done = words.map(text).collect::<Result<Vec<_>, _>>().and_then(|words| act(&words));
    match done {
        Ok(code) => ExitCode::from(code),
        Err(words) => {
            // Nobody is there to be told about a stderr that is closed.
            let _ = writeln!(io::stderr(), "sudo: {words}");
            ExitCode::from(FAILURE)
        }
    }
}

fn act(words: &[String]) -> Result<u8, String> {
    let wanted = parse(words).map_err(|mistake| format!("{mistake}\n{USAGE}"))?;
    let caller = user::numbered(rustix::process::getuid().as_raw());
    match wanted {
        Wanted::Help => print(USAGE),
        Wanted::Version => {
            print(&format!("sudo of the Torpor agent {}", env!("CARGO_PKG_VERSION")))
        }
        Wanted::Forget => Ok(0),
        Wanted::Validate => refusal(&caller).map_or(Ok(0), Err),
        Wanted::List => match refusal(&caller) {
            Some(words) => Err(words),
            None => print(&format!(
                "{} may run the following commands in this sandbox:\n    (ALL : ALL) NOPASSWD: ALL",
                name_of(&caller)
            )),
        },
        Wanted::Run(run) => perform(&run, &caller),
    }
}

fn print(text: &str) -> Result<u8, String> {
    writeln!(io::stdout(), "{text}")
        .map_err(|error| format!("cannot write: {}", reason(&error)))?;
    Ok(0)
}

fn perform(run: &Run, caller: &Account) -> Result<u8, String> {
    let user = run.user.as_deref().unwrap_or("root");
    let target = target(user)?;
    // A variable that is not text is in nobody's way; it stays behind.
    let theirs: BTreeMap<String, String> = env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let login = run.shell == Some(Shell::Login);
    // A directory that is gone has no name any more.
    let here = || env::current_dir().ok()?.into_os_string().into_string().ok();
    let wish = Wish {
        command: command(run, &theirs, &target),
        cwd: login.then(|| home(&target)).or_else(here).unwrap_or_else(|| "/".to_owned()),
        env: environment(run, &theirs, caller, &target),
        user: user.to_owned(),
    };
    if rustix::process::geteuid().is_root() && target.uid == 0 {
        return Err(execute(&wish, login));
    }
    ask(&wish)
}

fn target(user: &str) -> Result<Account, String> {
    // Where there are no accounts, there is root.
    let found = user::find(user).or_else(|words| match user {
        "root" => Ok(user::numbered(0)),
        _ => Err(words),
    });
    found.map_err(|_| format!("unknown user {user}"))
}

/// Nobody has to be asked who is root already. Returns only if it failed: why.
fn execute(wish: &Wish, login: bool) -> String {
    let program = &wish.command[0];
    let mut command = Command::new(program);
    command.args(&wish.command[1..]).env_clear().envs(&wish.env);
    if login && let Err(error) = env::set_current_dir(&wish.cwd) {
        return format!("cannot use directory {}: {}", wish.cwd, reason(&error));
    }
    let error = command.exec();
    if error.kind() == io::ErrorKind::NotFound {
        return not_found(program);
    }
    format!("{program}: {}", reason(&error))
}

fn not_found(program: &str) -> String {
    format!("{program}: command not found")
}

// === The agent ===

fn ask(wish: &Wish) -> Result<u8, String> {
    let packet = serde_json::to_vec(wish).map_err(|error| error.to_string())?;
    if packet.len() > PACKET_MAX {
        let limit = PACKET_MAX / 1024;
        return Err(format!("the command and its environment are longer than {limit} KiB"));
    }
    // From here on signals are the command's.
    let signals = signals::taken().map_err(|error| reason(&error))?;
    let agent = connect().map_err(|_| SILENCE)?;
    loop {
        match answer(&agent)? {
            // One that has hung up may have said why.
            Word::Ready => drop(send_wish(&agent, &packet)),
            Word::Refused(words) => {
                let missing = words.strip_prefix("command not found: ");
                return Err(missing.map_or(words.clone(), not_found));
            }
            Word::Started(_) => return follow(&agent, &signals),
            Word::Exited(exit) => return Ok(code_of(exit)),
        }
    }
}

fn connect() -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(ANSWER))?;
    let address = SocketAddrUnix::new(SOCKET)?;
    retry_on_intr(|| rustix::net::connect(&socket, &address))?;
    Ok(socket)
}

fn send_wish(agent: &OwnedFd, packet: &[u8]) -> io::Result<()> {
    let stdio = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut along = SendAncillaryBuffer::new(&mut room);
    along.push(SendAncillaryMessage::ScmRights(&stdio));
    let flags = SendFlags::NOSIGNAL;
    retry_on_intr(|| rustix::net::sendmsg(agent, &[IoSlice::new(packet)], &mut along, flags))?;
    Ok(())
}

/// What the agent says next, in time.
fn answer(agent: &OwnedFd) -> Result<Word, String> {
    let mut waited = [PollFd::new(agent, PollFlags::IN)];
    let deadline = Timespec { tv_sec: ANSWER.as_secs().cast_signed(), tv_nsec: 0 };
    match retry_on_intr(|| poll(&mut waited, Some(&deadline))) {
        Ok(1..) => recv(agent),
        Ok(0) | Err(_) => Err(SILENCE.to_owned()),
    }
}

fn recv(agent: &OwnedFd) -> Result<Word, String> {
    let mut buffer = vec![0; WORD_MAX];
    let mut receive =
        || retry_on_intr(|| rustix::net::recv(agent, &mut buffer[..], RecvFlags::empty()));
    let received = match receive() {
        // It hung up before it read our last signal, which says nothing about its last word.
        Err(Errno::CONNRESET) => receive(),
        received => received,
    };
    match received {
        Ok((length @ 1.., _)) => serde_json::from_slice(&buffer[..length])
            .map_err(|error| format!("the Torpor agent says something strange: {error}")),
        Ok((0, _)) | Err(_) => Err(SILENCE.to_owned()),
    }
}

/// Until the command has ended.
fn follow(agent: &OwnedFd, signals: &OwnedFd) -> Result<u8, String> {
    loop {
        let mut waited = [PollFd::new(agent, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        retry_on_intr(|| poll(&mut waited, None)).map_err(|error| reason(&error.into()))?;
        let [said, signalled] = waited.map(|it| !it.revents().is_empty());
        if said {
            return match recv(agent)? {
                Word::Exited(exit) => Ok(code_of(exit)),
                Word::Refused(words) => Err(words),
                Word::Ready | Word::Started(_) => Err("the Torpor agent repeats itself".to_owned()),
            };
        }
        if signalled {
            let signal = signals::next(signals).map_err(|error| reason(&error))?;
            let order = serde_json::to_vec(&Order::Signal(signal)).unwrap_or_default();
            // An agent that is gone is heard.
            let _ = rustix::net::send(agent.as_fd(), &order, SendFlags::NOSIGNAL);
        }
    }
}

fn code_of(exit: Exit) -> u8 {
    let code = match exit {
        Exit::Code { code } => code,
        Exit::Signal { signal } => BY_SIGNAL + signal,
        Exit::TimedOut => BY_SIGNAL + libc::SIGKILL,
    };
    u8::try_from(code).unwrap_or(FAILURE)
}

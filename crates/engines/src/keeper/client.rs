//! The daemon's side of the keeper: finds it or starts it, and asks.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use torpor_protocol::Excerpt;

use super::wire::{self, Ended, RecvError, Reply, Request, Spawn};
use super::{KEEPER_VERSION, SYSTEM_PATH};
use crate::watch::watch;

/// How long a keeper may take to start: it has nothing to do but to bind a socket.
const START_MAX: Duration = Duration::from_secs(5);
/// How long an answer may take that waits for nothing.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Between two looks for a keeper that is starting.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// What went wrong with the keeper.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    #[error("the keeper could not be started")]
    Start(#[source] io::Error),
    #[error("the keeper did not start within {} s", START_MAX.as_secs())]
    Slow,
    #[error("the keeper can't be reached")]
    Connection(#[source] io::Error),
    #[error("the keeper did not answer in time")]
    Deadline,
    #[error("the keeper refused: {0}")]
    Refused(String),
    #[error("the keeper's answer makes no sense: {0}")]
    Nonsense(String),
    #[error(
        "a keeper of another version ({found}, not {KEEPER_VERSION}) holds machines: stop them \
         with the program that started them, or purge"
    )]
    Version { found: u32 },
}

/// The way to the keeper of one installation. Cheap to clone; holds no connection.
#[derive(Debug, Clone)]
pub struct Keeper {
    command: Vec<OsString>,
    socket: PathBuf,
}

impl Keeper {
    /// The keeper behind `socket`. `command` starts it if need be; it must end in [`super::run`] on
    /// a socket made by [`super::listen`] at the same path.
    pub fn at(command: Vec<OsString>, socket: &Path) -> Self {
        Self { command, socket: socket.to_owned() }
    }

    /// Starts the keeper if there is none, or only an idle one of another version.
    pub async fn ensure(&self) -> Result<(), KeeperError> {
        match self.hello().await {
            Ok(KEEPER_VERSION) => return Ok(()),
            Ok(found) => self.stop().await.map_err(|_| KeeperError::Version { found })?,
            Err(KeeperError::Connection(_)) => {}
            Err(error) => return Err(error),
        }
        let (program, args) = self.command.split_first().ok_or_else(|| {
            KeeperError::Start(io::Error::new(io::ErrorKind::InvalidInput, "no command"))
        })?;
        let mut child = tokio::process::Command::new(program)
            .args(args)
            .env_clear()
            .env("PATH", SYSTEM_PATH)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(KeeperError::Start)?;
        let deadline = Instant::now() + START_MAX;
        loop {
            if self.hello().await.is_ok() {
                break;
            }
            if let Some(status) = child.try_wait().map_err(KeeperError::Start)? {
                return Err(KeeperError::Start(io::Error::other(status.to_string())));
            }
            if Instant::now() > deadline {
                return Err(KeeperError::Slow);
            }
            sleep(LOOK_EVERY).await;
        }
        // Our child until we end; someone must reap it if it ends before.
        tokio::spawn(async move { child.wait().await });
        Ok(())
    }

    async fn hello(&self) -> Result<u32, KeeperError> {
        match self.ask(&Request::Hello, ANSWER_MAX).await? {
            (Reply::Hello { version }, _) => Ok(version),
            (other, _) => Err(nonsense(&other)),
        }
    }

    /// Runs a program that starts a machine; gives how it ended and the end of its stderr. The
    /// keeper holds the machine's channel from now on, also on `Err` ([`Self::forget`] it).
    pub async fn spawn(
        &self,
        spawn: Spawn,
        deadline: Duration,
    ) -> Result<(Ended, String), KeeperError> {
        let request = Request::Spawn(spawn);
        let answer = match self.ask(&request, deadline).await {
            Err(KeeperError::Connection(_)) => {
                // It died; its machines were lost with it, new ones need not be.
                self.ensure().await?;
                self.ask(&request, deadline).await
            }
            answer => answer,
        };
        match answer? {
            (Reply::Spawned { ended, stderr }, _) => Ok((ended, stderr)),
            (other, _) => Err(nonsense(&other)),
        }
    }

    /// A copy of the daemon's end of a machine's channel; `None` if it is not held.
    pub async fn channel(&self, id: &str) -> Result<Option<OwnedFd>, KeeperError> {
        match self.ask(&Request::Channel { id: id.to_owned() }, ANSWER_MAX).await {
            Ok((Reply::Channel, Some(fd))) => Ok(Some(fd)),
            Ok((other, _)) => Err(nonsense(&other)),
            Err(KeeperError::Refused(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// How a process ended that the keeper is the parent of; waits until it is reaped. `None`: the
    /// keeper knows nothing of it.
    pub async fn exit_of(&self, pid: i32, wait: Duration) -> Result<Option<Ended>, KeeperError> {
        match self.ask(&Request::ExitOf { pid }, wait).await {
            Ok((Reply::Exited { ended }, _)) => Ok(Some(ended)),
            Ok((other, _)) => Err(nonsense(&other)),
            Err(KeeperError::Refused(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The end of what a machine wrote to its stderr.
    pub async fn tail(&self, id: &str) -> Result<String, KeeperError> {
        match self.ask(&Request::Tail { id: id.to_owned() }, ANSWER_MAX).await? {
            (Reply::Tail { text }, _) => Ok(text),
            (other, _) => Err(nonsense(&other)),
        }
    }

    /// Lets go of a machine's channel and ends the program that starts it. Idempotent.
    pub async fn forget(&self, id: &str) -> Result<(), KeeperError> {
        match self.ask(&Request::Forget { id: id.to_owned() }, ANSWER_MAX).await? {
            (Reply::Forgotten, _) => Ok(()),
            (other, _) => Err(nonsense(&other)),
        }
    }

    /// The machines whose channels are held.
    pub async fn list(&self) -> Result<Vec<String>, KeeperError> {
        match self.ask(&Request::List, ANSWER_MAX).await? {
            (Reply::Ids { ids }, _) => Ok(ids),
            (other, _) => Err(nonsense(&other)),
        }
    }

    /// Ends the keeper and waits until nobody answers any more; refused while it holds machines.
    pub async fn stop(&self) -> Result<(), KeeperError> {
        match self.ask(&Request::Stop, ANSWER_MAX).await? {
            (Reply::Stopping, _) => {}
            (other, _) => return Err(nonsense(&other)),
        }
        let deadline = Instant::now() + ANSWER_MAX;
        while self.hello().await.is_ok() {
            if Instant::now() > deadline {
                return Err(KeeperError::Deadline);
            }
            sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// One connection, one question, one answer.
    async fn ask(
        &self,
        request: &Request,
        wait: Duration,
    ) -> Result<(Reply, Option<OwnedFd>), KeeperError> {
        let socket =
            timeout(ANSWER_MAX, self.connect()).await.map_err(|_| KeeperError::Deadline)??;
        let socket = watch(socket, Interest::READABLE).map_err(KeeperError::Connection)?;
        wire::send(&socket, request, None)
            .map_err(|errno| KeeperError::Connection(errno.into()))?;
        let deadline = Instant::now() + wait;
        let answer = async {
            loop {
                let mut ready = socket.readable().await.map_err(KeeperError::Connection)?;
                match wire::recv::<Reply>(&socket) {
                    Ok(answer) => return Ok(answer),
                    Err(RecvError::Io(Errno::AGAIN | Errno::INTR)) => ready.clear_ready(),
                    Err(RecvError::Io(errno)) => return Err(KeeperError::Connection(errno.into())),
                    Err(RecvError::Closed) => {
                        let kind = io::ErrorKind::UnexpectedEof;
                        return Err(KeeperError::Connection(kind.into()));
                    }
                    Err(RecvError::Nonsense(error)) => {
                        return Err(KeeperError::Nonsense(error.to_string()));
                    }
                }
            }
        };
        match timeout_at(deadline, answer).await.map_err(|_| KeeperError::Deadline)?? {
            (Reply::Refused { why }, _) => Err(KeeperError::Refused(why)),
            answer => Ok(answer),
        }
    }

    async fn connect(&self) -> Result<OwnedFd, KeeperError> {
        let broken = |errno: Errno| KeeperError::Connection(errno.into());
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let address = SocketAddrUnix::new(&self.socket).map_err(broken)?;
        let (unix, packets) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = rustix::net::socket_with(unix, packets, flags, None).map_err(broken)?;
        loop {
            match rustix::net::connect(&socket, &address) {
                Ok(()) => return Ok(socket),
                // The backlog is full.
                Err(Errno::AGAIN) => sleep(LOOK_EVERY).await,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(broken(errno)),
            }
        }
    }
}

fn nonsense(reply: &Reply) -> KeeperError {
    KeeperError::Nonsense(Excerpt::from(format!("{reply:?}")).to_string())
}

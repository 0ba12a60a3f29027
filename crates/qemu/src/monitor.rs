//! QEMU's control socket: one JSON object a line (QMP).
//!
//! The other end may be a QEMU that its guest broke: what it says is bounded ([`LINE_MAX`],
//! [`STATE_MAX`]) and every call has a deadline. Device state goes through files that have no name:
//! QEMU gets a descriptor, never a path, and none of a file that is kept.

use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout_at};

/// Longest line: the list of all commands has 20 kB.
const LINE_MAX: usize = 1024 * 1024;
/// Largest device state: it has 12 kB, and the guest's unread bytes in some queues.
pub const STATE_MAX: usize = 16 * 1024 * 1024;
/// Longest text of a refusal that is passed on.
const WORDS_MAX: usize = 300;
/// Answers come in a millisecond, and from a host with a hundred starting machines in some seconds.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Saving takes 2 ms and loading 4 ms.
const STATE_WAIT_MAX: Duration = Duration::from_secs(30);
/// Our name for the descriptor that a state goes through.
const STATE_SET: u32 = 1;
/// The command that writes the state of devices without memory. Its name is of its first user; it
/// works for every machine.
const SAVE_STATE: &str = "xen-save-devices-state";

/// Why the monitor could not do it.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    #[error("QEMU's control socket {} can't be reached", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("QEMU refused {command}: {words}")]
    Refused { command: &'static str, words: String },
    #[error("QEMU did not answer {command} within {} s", wait.as_secs())]
    Deadline { command: &'static str, wait: Duration },
    #[error("the connection to QEMU broke during {command}")]
    Broken {
        command: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("QEMU could not load the state: {words}")]
    NotLoaded { words: String },
    #[error("QEMU saved a state of more than {STATE_MAX} bytes")]
    LargeState,
    #[error("the state can't be passed on")]
    State(#[source] io::Error),
}

/// A connection to one QEMU. One call at a time; after an error other than a refusal it is not used
/// again.
#[derive(Debug)]
pub struct Monitor {
    stream: UnixStream,
    /// What was read of lines to come.
    unread: Vec<u8>,
    /// The last call's number.
    calls: u64,
    /// The last word of an event about loading a state.
    loading: Option<String>,
}

/// A line from QEMU: an answer, or else an event or the greeting.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Said {
    id: Option<u64>,
    #[serde(rename = "return")]
    value: Option<Value>,
    error: Option<Refusal>,
    event: Option<String>,
    data: Value,
    #[serde(rename = "QMP")]
    greeting: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Refusal {
    #[serde(default)]
    desc: String,
}

impl Monitor {
    /// Connects and agrees on the protocol. The socket may be there before QEMU listens: that is
    /// waited for until the `deadline`.
    pub async fn connect(socket: &Path, deadline: Instant) -> Result<Self, MonitorError> {
        const COMMAND: &str = "qmp_capabilities";
        let wait = deadline.saturating_duration_since(Instant::now());
        let stream = connect(socket)
            .await
            .map_err(|source| MonitorError::Connect { path: socket.to_owned(), source })?;
        let mut monitor = Self { stream, unread: Vec::new(), calls: 0, loading: None };
        let greeted = async {
            while monitor.next().await?.greeting.is_none() {}
            Ok(())
        };
        timeout_at(deadline, greeted)
            .await
            .map_err(|_| MonitorError::Deadline { command: COMMAND, wait })?
            .map_err(|source| MonitorError::Broken { command: COMMAND, source })?;
        monitor.call(COMMAND, Value::Null).await?;
        Ok(monitor)
    }

    /// The guest executes nothing from here on, and what it wrote to its disk is in the file.
    pub async fn stop(&mut self) -> Result<(), MonitorError> {
        self.call("stop", Value::Null).await.map(drop)
    }

    pub async fn resume(&mut self) -> Result<(), MonitorError> {
        self.call("cont", Value::Null).await.map(drop)
    }

    /// The state of all devices and processors of a stopped machine, without its memory.
    pub async fn save_state(&mut self) -> Result<Vec<u8>, MonitorError> {
        let file = unnamed().map_err(MonitorError::State)?;
        let end = reopened(&file, OFlags::WRONLY).map_err(MonitorError::State)?;
        self.lend(end).await?;
        let arguments = json!({ "filename": set_path(), "live": false });
        let saved = self.ask(SAVE_STATE, arguments, None, STATE_WAIT_MAX).await;
        self.take_back().await?;
        saved?;
        bounded(file)
    }

    /// Loads what [`save_state`](Self::save_state) gave into a QEMU that waits for it. The machine
    /// is stopped then; its memory must be right before it is resumed.
    pub async fn load_state(&mut self, state: &[u8]) -> Result<(), MonitorError> {
        let mut file = unnamed().map_err(MonitorError::State)?;
        file.write_all(state).map_err(MonitorError::State)?;
        let end = reopened(&file, OFlags::RDONLY).map_err(MonitorError::State)?;
        let events = json!({ "capabilities": [{ "capability": "events", "state": true }] });
        self.call("migrate-set-capabilities", events).await?;
        self.lend(end).await?;
        self.loading = None;
        // Else a QEMU that could not load it ends without a word.
        let arguments = json!({ "uri": format!("file:{}", set_path()), "exit-on-error": false });
        self.call("migrate-incoming", arguments).await?;
        let loaded = self.loaded(Instant::now() + STATE_WAIT_MAX).await?;
        if !loaded {
            let said = self.call("query-migrate", Value::Null).await?;
            let words = said["error-desc"].as_str().unwrap_or("it does not say why");
            return Err(MonitorError::NotLoaded { words: shortened(words) });
        }
        self.take_back().await
    }

    /// Waits for the last word about the state that is being loaded.
    async fn loaded(&mut self, deadline: Instant) -> Result<bool, MonitorError> {
        const COMMAND: &str = "migrate-incoming";
        loop {
            match self.loading.as_deref() {
                Some("completed") => return Ok(true),
                Some("failed") => return Ok(false),
                Some(_) | None => {}
            }
            timeout_at(deadline, self.next())
                .await
                .map_err(|_| MonitorError::Deadline { command: COMMAND, wait: STATE_WAIT_MAX })?
                .map_err(|source| MonitorError::Broken { command: COMMAND, source })?;
        }
    }

    async fn lend(&mut self, fd: OwnedFd) -> Result<(), MonitorError> {
        let arguments = json!({ "fdset-id": STATE_SET });
        self.ask("add-fd", arguments, Some(fd.as_fd()), ANSWER_MAX).await.map(drop)
    }

    async fn take_back(&mut self) -> Result<(), MonitorError> {
        self.call("remove-fd", json!({ "fdset-id": STATE_SET })).await.map(drop)
    }

    async fn call(
        &mut self,
        command: &'static str,
        arguments: Value,
    ) -> Result<Value, MonitorError> {
        self.ask(command, arguments, None, ANSWER_MAX).await
    }

    async fn ask(
        &mut self,
        command: &'static str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        wait: Duration,
    ) -> Result<Value, MonitorError> {
        self.calls += 1;
        let mut call = json!({ "execute": command, "id": self.calls });
        if !arguments.is_null() {
            call["arguments"] = arguments;
        }
        let line = format!("{call}\n");
        let said = timeout_at(Instant::now() + wait, self.exchange(line.as_bytes(), fd))
            .await
            .map_err(|_| MonitorError::Deadline { command, wait })?
            .map_err(|source| MonitorError::Broken { command, source })?;
        match said.error {
            Some(refusal) => {
                Err(MonitorError::Refused { command, words: shortened(&refusal.desc) })
            }
            None => Ok(said.value.unwrap_or_default()),
        }
    }

    /// Sends a call and waits for the answer with its number.
    async fn exchange(&mut self, line: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<Said> {
        let sent = match fd {
            Some(fd) => self.send_with(line, fd).await?,
            None => 0,
        };
        self.stream.write_all(&line[sent..]).await?;
        loop {
            let said = self.next().await?;
            let answers = said.value.is_some() || said.error.is_some();
            if answers && said.id == Some(self.calls) {
                return Ok(said);
            }
            // QEMU could not even read the call's number.
            if said.error.is_some() && said.id.is_none() {
                return Ok(said);
            }
        }
    }

    async fn send_with(&self, line: &[u8], fd: BorrowedFd<'_>) -> io::Result<usize> {
        let send = || {
            let fds = [fd];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)), "space is made for one");
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            Ok(sendmsg(self.stream.as_fd(), &[IoSlice::new(line)], &mut control, flags)?)
        };
        self.stream.async_io(Interest::WRITABLE, send).await
    }

    /// The next line. Can be cancelled: what was read of it is kept.
    async fn next(&mut self) -> io::Result<Said> {
        let mut searched = 0;
        loop {
            if let Some(at) = self.unread[searched..].iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=searched + at).collect();
                let said: Said = serde_json::from_slice(&line).map_err(|error| {
                    io::Error::new(io::ErrorKind::InvalidData, shortened(&error.to_string()))
                })?;
                if said.event.as_deref() == Some("MIGRATION") {
                    self.loading = said.data["status"].as_str().map(str::to_owned);
                }
                return Ok(said);
            }
            searched = self.unread.len();
            if searched > LINE_MAX {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a line has no end"));
            }
            if self.stream.read_buf(&mut self.unread).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

/// Through the directory: the name of a socket has room for 108 bytes, and data directories have
/// long names.
async fn connect(socket: &Path) -> io::Result<UnixStream> {
    let (Some(directory), Some(name)) = (socket.parent(), socket.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory, flags, Mode::empty())?;
    UnixStream::connect(own(&directory).join(name)).await
}

/// A file in memory that only descriptors lead to.
fn unnamed() -> io::Result<File> {
    Ok(rustix::fs::memfd_create(c"state", MemfdFlags::CLOEXEC)?.into())
}

/// All of what QEMU wrote, if that is not too much.
fn bounded(file: File) -> Result<Vec<u8>, MonitorError> {
    let mut state = Vec::new();
    let most = STATE_MAX as u64 + 1;
    file.take(most).read_to_end(&mut state).map_err(MonitorError::State)?;
    if state.len() > STATE_MAX { Err(MonitorError::LargeState) } else { Ok(state) }
}

/// The same file from its beginning, with no more rights than `flags` gives: QEMU takes a descriptor
/// only for exactly what it will do with it.
fn reopened(file: &File, flags: OFlags) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(own(file), flags | OFlags::CLOEXEC, Mode::empty())?)
}

fn own(fd: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
}

fn set_path() -> String {
    format!("/dev/fdset/{STATE_SET}")
}

/// The first line, without what acts on a terminal; the rest is for who wrote QEMU.
pub(crate) fn shortened(words: &str) -> String {
    let line = words.lines().next().unwrap_or_default().chars().take(WORDS_MAX);
    line.map(|c| if c.is_ascii() && !c.is_control() { c } else { '?' }).collect()
}

#[cfg(any(test, fuzzing))]
pub mod fuzzing;
#[cfg(test)]
mod tests;

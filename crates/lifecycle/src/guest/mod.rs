//! The daemon's side of the agent's protocol: many streams over one packet channel.
//!
//! A [`Guest`] is a cheap handle. One task per machine receives packets and hands them to the
//! stream they belong to; whoever holds a [`Stream`] sends on the channel itself, so a request costs
//! no hop on its way in and one on its way out.
//!
//! The guest is not trusted: frames are parsed with limits, unread bytes of one machine are bounded
//! by [`UNREAD_MAX`], and a guest that breaks the protocol loses its channel, which fails its
//! sandbox and nobody else.

mod files;
mod kept;
mod mux;
mod stream;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use torpor_protocol::Excerpt;
use torpor_protocol::guest::{
    FailureCode, FileStat, Health, Identity, LogLine, ProcessSpec, ProcessStatus, Reply, Request,
    WINDOW,
};
use torpor_protocol::snapshot::SavedProcess;

use crate::engine::Channel;
use crate::world::token;
pub use files::{FileServer, FilesMount, ServedFiles, serve_files, stop_files};
pub use kept::Parked;
pub use mux::UNREAD_MAX;
pub use stream::{Item, Parcel, Sender, Stream};

/// How long the agent may take for an answer that needs no work of unknown length.
const CALL_DEADLINE: Duration = Duration::from_secs(30);

/// More lines no agent keeps: each takes a byte of its ring, its stamp and its process aside.
const KEPT_LINES_MAX: usize = 1024 * 1024;

/// Why the guest did not do what it was asked.
#[derive(Debug, Clone, thiserror::Error)]
pub enum GuestError {
    /// The agent said no.
    #[error("{message}")]
    Refused { code: FailureCode, message: Excerpt },
    /// The machine is gone.
    #[error("the machine is gone")]
    Gone,
    /// The sandbox was put to sleep under an open request. Its processes are kept.
    #[error(
        "the sandbox fell asleep; its processes are kept and can be attached to when it is awake"
    )]
    Asleep,
    /// What came is not our protocol.
    #[error("the agent broke the protocol: {0}")]
    Protocol(Excerpt),
    #[error("the agent did not answer within {0:?}")]
    Timeout(Duration),
}

impl GuestError {
    pub fn protocol(what: impl Into<Excerpt>) -> Self {
        Self::Protocol(what.into())
    }
}

/// Speaks with the agent of one machine.
#[derive(Debug, Clone)]
pub struct Guest {
    shared: Arc<mux::Shared>,
}

impl Guest {
    /// Says hello over `channel` and waits for the agent's answer.
    /// The tasks that serve the channel end when the machine or the last handle is gone.
    pub async fn connect(
        channel: Arc<dyn Channel>,
        deadline: Duration,
    ) -> Result<Self, GuestError> {
        let hello = mux::hello(&*channel);
        tokio::time::timeout(deadline, hello)
            .await
            .map_err(|_| GuestError::Timeout(deadline))??;
        Ok(Self { shared: mux::serve(channel) })
    }

    /// Opens a stream. Dropping it before its end tells the agent to give up.
    pub async fn open(&self, request: &Request) -> Result<Stream, GuestError> {
        mux::open(&self.shared, request, WINDOW, None).await
    }

    /// Asks for one answer.
    pub async fn call(&self, request: &Request) -> Result<Reply, GuestError> {
        let answer = async { self.open(request).await?.reply().await };
        tokio::time::timeout(CALL_DEADLINE, answer)
            .await
            .map_err(|_| GuestError::Timeout(CALL_DEADLINE))?
    }

    /// Lets go of the channel, for another handle: open requests end with
    /// [`GuestError::Asleep`], and the agent hears nothing of it.
    pub(crate) async fn sever(&self) {
        self.shared.sever().await;
    }

    /// Resolves when the channel is dead.
    pub async fn gone(&self) {
        self.shared.gone().await;
    }

    pub async fn identify(&self, identity: Identity) -> Result<(), GuestError> {
        self.done(&Request::Identify(identity)).await
    }

    pub async fn health(&self) -> Result<Health, GuestError> {
        let request = Request::Health;
        let Reply::Health(health) = self.call(&request).await? else {
            return Err(unexpected(&request));
        };
        Ok(health)
    }

    /// Stops every process inside, and has what they wrote on the disk; gives what they are.
    pub async fn quiesce(&self) -> Result<Vec<SavedProcess>, GuestError> {
        let request = Request::Quiesce;
        let Reply::Quiesced { processes } = self.call(&request).await? else {
            return Err(unexpected(&request));
        };
        Ok(processes)
    }

    /// The machine goes on: with the clock of this host and randomness that no other has.
    pub async fn unquiesce(&self) -> Result<(), GuestError> {
        // As much as a kernel's generator holds.
        let entropy = format!("{}{}", token(), token());
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_us = u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX);
        self.done(&Request::Unquiesce { now_us, entropy }).await
    }

    pub async fn start(&self, spec: ProcessSpec) -> Result<ProcessStatus, GuestError> {
        self.process(&Request::Start(spec)).await
    }

    /// For requests that are answered with a process.
    pub async fn process(&self, request: &Request) -> Result<ProcessStatus, GuestError> {
        let Reply::Process(status) = self.call(request).await? else {
            return Err(unexpected(request));
        };
        Ok(status)
    }

    /// All processes that the agent knows.
    pub async fn processes(&self) -> Result<Vec<ProcessStatus>, GuestError> {
        let request = Request::Processes;
        let answer = async {
            let mut stream = self.open(&request).await?;
            let mut all = Vec::new();
            while let Some(item) = stream.next().await? {
                let Item::Reply(Reply::Processes { processes }) = item else {
                    return Err(unexpected(&request));
                };
                all.extend(processes);
            }
            Ok(all)
        };
        tokio::time::timeout(CALL_DEADLINE, answer)
            .await
            .map_err(|_| GuestError::Timeout(CALL_DEADLINE))?
    }

    /// What processes said after that stamp, as far as the agent keeps it.
    pub async fn lines(&self, after_us: u64) -> Result<Vec<LogLine>, GuestError> {
        let request = Request::Lines { after_us };
        let answer = async {
            let mut stream = self.open(&request).await?;
            let mut all = Vec::new();
            while let Some(item) = stream.next().await? {
                match item {
                    Item::Reply(Reply::Lines { lines }) => all.extend(lines),
                    Item::Reply(Reply::Done) => return Ok(all),
                    Item::Reply(_) | Item::Data(_) | Item::DataErr(_) | Item::End | Item::Reset => {
                        return Err(unexpected(&request));
                    }
                }
                if all.len() > KEPT_LINES_MAX {
                    return Err(GuestError::protocol("more lines than an agent keeps"));
                }
            }
            Ok(all)
        };
        tokio::time::timeout(CALL_DEADLINE, answer)
            .await
            .map_err(|_| GuestError::Timeout(CALL_DEADLINE))?
    }

    /// For requests that are answered with a file's description.
    pub async fn stat(&self, request: &Request) -> Result<FileStat, GuestError> {
        let Reply::Stat(stat) = self.call(request).await? else {
            return Err(unexpected(request));
        };
        Ok(stat)
    }

    /// For requests that are only done.
    pub async fn done(&self, request: &Request) -> Result<(), GuestError> {
        let Reply::Done = self.call(request).await? else {
            return Err(unexpected(request));
        };
        Ok(())
    }
}

/// The agent answered something else than the protocol says.
pub fn unexpected(request: &Request) -> GuestError {
    // What it carries may be secret.
    let text = format!("{request:?}");
    let verb = text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
    GuestError::protocol(format!("an answer that does not belong to {verb}"))
}

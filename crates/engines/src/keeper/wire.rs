//! What daemon and keeper say to each other: one JSON packet each way per connection, a file
//! descriptor beside it where the reply is a channel.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Largest packet: a list of some ten thousand ids.
pub(super) const PACKET_MAX: usize = 256 * 1024;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub(super) enum Request {
    Hello,
    /// Answered when the program has ended.
    Spawn(Spawn),
    Channel {
        id: String,
    },
    /// Answered when the process was reaped.
    ExitOf {
        pid: i32,
    },
    /// The end of what a machine wrote to stderr.
    Tail {
        id: String,
    },
    Forget {
        id: String,
    },
    List,
    Stop,
}

/// A program that starts a machine and ends, with the agent's end of the channel as stdin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spawn {
    /// Names the channel from now on.
    pub id: String,
    pub argv: Vec<String>,
    /// `cgroup.procs` files of the groups it enters before its first instruction.
    pub cgroup_procs: Vec<PathBuf>,
    pub cwd: PathBuf,
    /// How willingly the host gives it up when the host itself is out of memory.
    pub oom_score_adj: i32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub(super) enum Reply {
    Hello {
        version: u32,
    },
    Spawned {
        ended: Ended,
        stderr: String,
    },
    /// With a file descriptor.
    Channel,
    Exited {
        ended: Ended,
    },
    Tail {
        text: String,
    },
    Forgotten,
    Ids {
        ids: Vec<String>,
    },
    Stopping,
    Refused {
        why: String,
    },
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "how", rename_all = "snake_case")]
pub enum Ended {
    Code { code: i32 },
    Signal { signal: i32 },
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code { code } => write!(f, "exit code {code}"),
            Self::Signal { signal } => write!(f, "signal {signal}"),
        }
    }
}

/// Sends one packet, whole, without waiting.
pub(super) fn send<T: Serialize>(
    socket: impl AsFd,
    message: &T,
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    let packet = serde_json::to_vec(message).expect("keeper messages have text keys only");
    if packet.len() > PACKET_MAX {
        return Err(Errno::MSGSIZE);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "space is made for one");
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(&packet)], &mut control, flags)?;
    Ok(())
}

/// Why a packet could not be had.
#[derive(Debug, thiserror::Error)]
pub(super) enum RecvError {
    #[error("the connection was closed")]
    Closed,
    #[error(transparent)]
    Io(#[from] Errno),
    #[error("the packet makes no sense")]
    Nonsense(#[from] serde_json::Error),
}

/// Receives one packet without waiting ([`Errno::AGAIN`]), and the descriptor beside it.
pub(super) fn recv<T: DeserializeOwned>(
    socket: impl AsFd,
) -> Result<(T, Option<OwnedFd>), RecvError> {
    let mut packet = vec![0; PACKET_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut packet)], &mut control, flags)?;
    if received.bytes == 0 {
        return Err(RecvError::Closed);
    }
    let fd = control.drain().find_map(|message| {
        let RecvAncillaryMessage::ScmRights(mut fds) = message else { return None };
        fds.next()
    });
    Ok((serde_json::from_slice(&packet[..received.bytes])?, fd))
}

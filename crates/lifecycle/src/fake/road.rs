//! The road into a fake machine, and who answers at its end.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use rustix::net::{
    AddressFamily, RecvFlags, Shutdown, SocketFlags, SocketType, recv, shutdown, socketpair,
};
use tokio::net::UnixDatagram;
use torpor_protocol::SandboxId;
use torpor_protocol::guest::{HEADER, MAX_PAYLOAD};

use super::Inside;
use super::script::Script;
use crate::engine::Channel;

/// The road in, and who answers at its end if that is a script.
pub(super) struct Road {
    pub(super) channel: Arc<dyn Channel>,
    pub(super) script: Option<Arc<Script>>,
    pub(super) agent: Option<RealAgent>,
}

fn inside_channel(inside: Inside) -> io::Result<Road> {
    match inside {
        Inside::Scripted => {
            let script = Arc::new(Script::start());
            let channel = Arc::clone(&script) as Arc<dyn Channel>;
            Ok(Road { channel, script: Some(script), agent: None })
        }
        Inside::RealAgent | Inside::LastingAgent => {
            let flags = SocketFlags::CLOEXEC;
            let (ours, theirs) =
                socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
            let thread = std::thread::Builder::new().name("fake-agent".to_owned());
            let thread = thread.spawn(move || {
                if let Err(error) = torpor_agent::serve(theirs, torpor_agent::Mode::InProcess) {
                    tracing::error!(%error, "the in-process agent failed");
                }
            })?;
            let agent = RealAgent { socket: ours.try_clone()?, thread };
            Ok(Road { channel: Arc::new(Packets::new(ours)?), script: None, agent: Some(agent) })
        }
    }
}

/// The road to a real agent.
struct Packets(UnixDatagram);

impl Packets {
    /// Its calls are those of a datagram socket; the kernel tells besides when the other side is gone.
    fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        UnixDatagram::from_std(socket.into()).map(Self)
    }
}

#[async_trait]
impl Channel for Packets {
    async fn send(&self, packet: Bytes) -> io::Result<()> {
        self.0.send(&packet).await.map(drop)
    }

    async fn recv(&self) -> io::Result<Bytes> {
        let mut packet = vec![0; HEADER + MAX_PAYLOAD];
        match self.0.recv(&mut packet).await {
            Ok(length) => Ok(Bytes::copy_from_slice(&packet[..length])),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(Bytes::new()),
            Err(error) => Err(error),
        }
    }
}

/// The agent of a machine that has a real one.
pub(super) struct RealAgent {
    socket: OwnedFd,
    /// Ends when nothing that the agent started is left.
    thread: JoinHandle<()>,
}

impl RealAgent {
    /// Tells it that its machine is over.
    pub(super) fn end(self) -> JoinHandle<()> {
        // Whoever is gone hears nothing.
        let _ = shutdown(&self.socket, Shutdown::Both);
        self.thread
    }
}

/// An agent and the road to it.
type Inhabited = (Arc<dyn Channel>, RealAgent);

/// Agents of sandboxes that are on disk only.
#[derive(Default)]
pub(super) struct Dormant(Mutex<HashMap<SandboxId, Inhabited>>);

impl Dormant {
    /// Its machine is over. `lasting`: the agent is not.
    pub(super) fn part(&self, id: SandboxId, road: Inhabited, lasting: bool) {
        if lasting {
            self.0.lock().insert(id, road);
        } else {
            drop(road.1.end());
        }
    }

    /// The road to the agent of that sandbox, if it is here, else to a new one. What was on the old road
    /// is lost, as with a machine that is killed.
    pub(super) fn road(&self, id: &SandboxId, inside: Inside) -> io::Result<Road> {
        let Some((channel, agent)) = self.0.lock().remove(id) else {
            return inside_channel(inside);
        };
        // Any length will do: the rest of a packet goes with it.
        while recv(&agent.socket, &mut [0_u8; 1][..], RecvFlags::DONTWAIT).is_ok() {}
        Ok(Road { channel, script: None, agent: Some(agent) })
    }

    pub(super) fn end(&self) -> Vec<JoinHandle<()>> {
        self.0.lock().drain().map(|(_, (_, agent))| agent.end()).collect()
    }
}

//! The road into a fake machine, and who answers at its end.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};

use super::Inside;
use super::script::Script;
use crate::SeqPacket;
use crate::engine::Channel;

/// The road in, and who answers at its end if that is a script.
pub(super) struct Road {
    pub(super) channel: Arc<dyn Channel>,
    pub(super) script: Option<Arc<Script>>,
    pub(super) agent: Option<RealAgent>,
}

pub(super) fn inside_channel(inside: Inside) -> io::Result<Road> {
    match inside {
        Inside::Scripted => {
            let script = Arc::new(Script::start());
            let channel = Arc::clone(&script) as Arc<dyn Channel>;
            Ok(Road { channel, script: Some(script), agent: None })
        }
        Inside::RealAgent => {
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
            Ok(Road { channel: Arc::new(SeqPacket::new(ours)?), script: None, agent: Some(agent) })
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

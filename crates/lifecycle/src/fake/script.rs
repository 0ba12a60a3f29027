//! An agent that says yes to everything, unless it is paused.

use std::io;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use torpor_protocol::SandboxId;
use torpor_protocol::guest::{
    self, Failure, FailureCode, Frame, Health, HeldPath, Hello, Kind, LogLine, ProcessSpec,
    ProcessStatus, Reply, Request,
};

use super::FakeHost;
use crate::engine::Channel;

pub(super) struct Script {
    answers: mpsc::UnboundedSender<Bytes>,
    inbox: tokio::sync::Mutex<mpsc::UnboundedReceiver<Bytes>>,
    state: Mutex<ScriptState>,
}

#[derive(Default)]
struct ScriptState {
    paused: bool,
    /// What came while it was paused.
    waiting: Vec<Bytes>,
    keeping_awake: u32,
    /// Every request it was ever asked.
    asked: Vec<Request>,
    lines: Vec<LogLine>,
    /// So many times it will not be who it is told to be.
    refused_identities: usize,
    held: Vec<HeldPath>,
}

impl FakeHost {
    /// A process of this machine holds a file of a volume. Scripted machines only.
    pub fn hold(&self, id: &SandboxId, held: HeldPath) {
        if let Some(script) = self.machine(id).and_then(|machine| machine.script.clone()) {
            script.state.lock().held.push(held);
        }
    }

    /// The agent of this machine refuses the next `count` identities. Scripted machines only.
    pub fn refuse_identities(&self, id: &SandboxId, count: usize) {
        if let Some(script) = self.machine(id).and_then(|machine| machine.script.clone()) {
            script.state.lock().refused_identities = count;
        }
    }
}

impl Script {
    pub(super) fn start() -> Self {
        let (answers, inbox) = mpsc::unbounded_channel();
        Self { answers, inbox: tokio::sync::Mutex::new(inbox), state: Mutex::default() }
    }

    pub(super) fn pause(&self) {
        self.state.lock().paused = true;
    }

    pub(super) fn resume(&self) {
        let waiting = {
            let mut state = self.state.lock();
            state.paused = false;
            std::mem::take(&mut state.waiting)
        };
        for packet in waiting {
            // The daemon let go of the channel: nobody hears it.
            let _ = self.react(&packet);
        }
    }

    pub(super) fn keep_awake(&self, processes: u32) {
        self.state.lock().keeping_awake = processes;
    }

    pub(super) fn say(&self, line: LogLine) {
        self.state.lock().lines.push(line);
    }

    pub(super) fn asked(&self) -> Vec<Request> {
        self.state.lock().asked.clone()
    }

    fn answer(&self, packet: Vec<u8>) -> io::Result<()> {
        self.answers.send(packet.into()).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    fn react(&self, packet: &[u8]) -> io::Result<()> {
        let frame = Frame::parse(packet).map_err(io::Error::other)?;
        match frame.kind {
            Kind::Hello => {
                let hello: Hello = frame.json().map_err(io::Error::other)?;
                self.answer(guest::json_packet(0, Kind::Hello, &hello))
            }
            Kind::Open => {
                let request: Request = frame.json().map_err(io::Error::other)?;
                let reply = self.reply(&request);
                self.state.lock().asked.push(request);
                self.answer(guest::json_packet(frame.stream, Kind::Reply, &reply))?;
                self.answer(guest::packet(frame.stream, Kind::End, &[]))
            }
            Kind::Reply | Kind::Data | Kind::DataErr | Kind::Credit | Kind::End | Kind::Reset => {
                Ok(())
            }
        }
    }

    fn reply(&self, request: &Request) -> Reply {
        if let Request::Start(spec) = request {
            return Reply::Process(started(spec));
        }
        if let Request::Lines { after_us } = request {
            let mut lines = self.state.lock().lines.clone();
            lines.retain(|line| line.stamp_us > *after_us);
            return Reply::Lines { lines };
        }
        if let Request::Identify(_) = request {
            let mut state = self.state.lock();
            if state.refused_identities > 0 {
                state.refused_identities -= 1;
                let message = "a fake fault".to_owned();
                return Reply::Failed(Failure { code: FailureCode::Io, message });
            }
        }
        if *request == Request::HeldPaths {
            return Reply::Held { paths: self.state.lock().held.clone() };
        }
        if *request != Request::Health {
            return Reply::Done;
        }
        Reply::Health(Health {
            agent_version: "fake".to_owned(),
            uptime_ms: 0,
            running: 0,
            keeping_awake: self.state.lock().keeping_awake,
            started: 0,
            memory_kib: 0,
            open_files: 0,
        })
    }
}

/// What is said of a process that was started.
fn started(spec: &ProcessSpec) -> ProcessStatus {
    ProcessStatus {
        pid: 2,
        command: spec.command.clone(),
        name: None,
        terminal: false,
        terminal_size: None,
        stdin_open: false,
        started_at_ms: 0,
        ended_at_ms: None,
        exit: None,
        restarts: 0,
        next_start_at_ms: None,
        output_bytes: 0,
        output_dropped: 0,
        supervision: None,
        health: None,
        last_exit: None,
    }
}

#[async_trait]
impl Channel for Script {
    async fn send(&self, packet: Bytes) -> io::Result<()> {
        {
            let mut state = self.state.lock();
            if state.paused {
                state.waiting.push(packet);
                return Ok(());
            }
        }
        self.react(&packet)
    }

    async fn recv(&self) -> io::Result<Bytes> {
        Ok(self.inbox.lock().await.recv().await.unwrap_or_default())
    }
}

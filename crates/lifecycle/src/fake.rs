//! An engine and a store without isolation or disk, for tests of logic.
//!
//! [`FakeHost`] stands for the machine room: machines in it outlive the [`FakeEngine`] that started
//! them, as real ones outlive a daemon. It fails on command and counts what matters. Its machines
//! answer with a scripted agent on virtual time, or run the real agent in a thread of the test
//! process, where "inside" is the test's own host: never for code that is not ours.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use torpor_protocol::guest::{self, Frame, Hello, Kind, Reply, Request};
use torpor_protocol::{ImageId, SandboxId};

use crate::SeqPacket;
use crate::engine::{About, BootPlan, Channel, Engine, EngineError, Machine, Meter, Usage};
use crate::store::{Images, Ledger, Record, RootImage, StoreError};

/// Who answers inside a fake machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inside {
    /// Says hello and "done" to everything.
    Scripted,
    /// The real agent, in a thread of this process.
    RealAgent,
}

/// Where fake machines live.
pub struct FakeHost {
    inside: Inside,
    state: Mutex<HostState>,
}

#[derive(Default)]
struct HostState {
    machines: HashMap<SandboxId, Arc<FakeMachine>>,
    boots: usize,
    fail_boots: usize,
    boot_takes: Duration,
}

struct FakeMachine {
    id: SandboxId,
    host: Arc<FakeHost>,
    channel: Arc<dyn Channel>,
    meter: Arc<FakeMeter>,
    /// The reason once it is dead.
    dead: watch::Sender<Option<String>>,
    paused: watch::Sender<bool>,
}

impl FakeHost {
    pub fn new(inside: Inside) -> Arc<Self> {
        Arc::new(Self { inside, state: Mutex::default() })
    }

    /// Ids of the machines that live now.
    pub fn alive(&self) -> HashSet<SandboxId> {
        self.state.lock().machines.keys().cloned().collect()
    }

    /// How many machines were ever booted.
    pub fn boots(&self) -> usize {
        self.state.lock().boots
    }

    /// The next `count` boots fail.
    pub fn fail_boots(&self, count: usize) {
        self.state.lock().fail_boots = count;
    }

    /// Every boot takes so long.
    pub fn boot_takes(&self, time: Duration) {
        self.state.lock().boot_takes = time;
    }

    /// The machine dies by itself, as after a crash of its kernel.
    pub fn crash(&self, id: &SandboxId, reason: &str) {
        if let Some(machine) = self.state.lock().machines.remove(id) {
            machine.dead.send_replace(Some(reason.to_owned()));
        }
    }
}

/// The engine of one daemon; several after each other may share a host.
pub struct FakeEngine {
    about: About,
    host: Arc<FakeHost>,
}

impl FakeEngine {
    pub fn new(host: Arc<FakeHost>) -> Self {
        let about = About { kind: "fake", version: "0".to_owned(), nameserver: None, abilities: crate::engine::Abilities::default() };
        Self { about, host }
    }
}

#[async_trait]
impl Engine for FakeEngine {
    fn about(&self) -> &About {
        &self.about
    }

    async fn boot(&self, plan: BootPlan) -> Result<Box<dyn Machine>, EngineError> {
        let (time, fails) = {
            let mut state = self.host.state.lock();
            state.boots += 1;
            let fails = state.fail_boots > 0;
            state.fail_boots = state.fail_boots.saturating_sub(1);
            (state.boot_takes, fails)
        };
        tokio::time::sleep(time).await;
        if fails {
            return Err(EngineError::failed("boot")("a fake fault"));
        }
        let channel =
            inside_channel(self.host.inside).map_err(EngineError::failed("make a channel"))?;
        let machine = Arc::new(FakeMachine {
            id: plan.id.clone(),
            host: Arc::clone(&self.host),
            channel,
            meter: Arc::default(),
            dead: watch::channel(None).0,
            paused: watch::channel(false).0,
        });
        self.host.state.lock().machines.insert(plan.id, Arc::clone(&machine));
        Ok(Box::new(Handle(machine)))
    }

    async fn adopt(&self, id: &SandboxId) -> Result<Option<Box<dyn Machine>>, EngineError> {
        let machine = self.host.state.lock().machines.get(id).cloned();
        Ok(machine.map(|machine| Box::new(Handle(machine)) as Box<dyn Machine>))
    }

    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<usize, EngineError> {
        let mut state = self.host.state.lock();
        let before = state.machines.len();
        state.machines.retain(|id, _| keep.contains(id));
        Ok(before - state.machines.len())
    }

    async fn close(&self) {}
}

struct Handle(Arc<FakeMachine>);

#[async_trait]
impl Machine for Handle {
    fn channel(&self) -> Arc<dyn Channel> {
        Arc::clone(&self.0.channel)
    }

    fn meter(&self) -> Arc<dyn Meter> {
        Arc::clone(&self.0.meter) as Arc<dyn Meter>
    }

    async fn pause(&mut self) -> Result<(), EngineError> {
        self.0.paused.send_replace(true);
        Ok(())
    }

    async fn resume(&mut self) -> Result<(), EngineError> {
        self.0.paused.send_replace(false);
        Ok(())
    }

    fn paused(&self) -> bool {
        *self.0.paused.borrow()
    }

    async fn exited(&mut self) -> String {
        let mut dead = self.0.dead.subscribe();
        let reason = dead.wait_for(Option::is_some).await;
        let reason = reason.expect("the machine holds the sender");
        reason.clone().unwrap_or_default()
    }

    async fn kill(self: Box<Self>) -> Result<(), EngineError> {
        self.0.host.state.lock().machines.remove(&self.0.id);
        Ok(())
    }
}

/// A machine that uses nothing.
#[derive(Debug, Default)]
struct FakeMeter;

impl Meter for FakeMeter {
    fn oom_kills(&self) -> u64 {
        0
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

fn inside_channel(inside: Inside) -> io::Result<Arc<dyn Channel>> {
    match inside {
        Inside::Scripted => Ok(Arc::new(Script::start())),
        Inside::RealAgent => {
            use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
            let flags = SocketFlags::CLOEXEC;
            let (ours, theirs) =
                socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
            std::thread::Builder::new().name("fake-agent".to_owned()).spawn(move || {
                if let Err(error) = torpor_agent::serve(theirs, torpor_agent::Mode::InProcess) {
                    tracing::error!(%error, "the in-process agent failed");
                }
            })?;
            Ok(Arc::new(SeqPacket::new(ours)?))
        }
    }
}

/// An agent that says yes to everything.
struct Script {
    answers: mpsc::UnboundedSender<Bytes>,
    inbox: tokio::sync::Mutex<mpsc::UnboundedReceiver<Bytes>>,
}

impl Script {
    fn start() -> Self {
        let (answers, inbox) = mpsc::unbounded_channel();
        Self { answers, inbox: tokio::sync::Mutex::new(inbox) }
    }

    fn answer(&self, packet: Vec<u8>) -> io::Result<()> {
        self.answers.send(packet.into()).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

#[async_trait]
impl Channel for Script {
    async fn send(&self, packet: Bytes) -> io::Result<()> {
        let frame = Frame::parse(&packet).map_err(io::Error::other)?;
        match frame.kind {
            Kind::Hello => {
                let hello: Hello = frame.json().map_err(io::Error::other)?;
                self.answer(guest::json_packet(0, Kind::Hello, &hello))
            }
            Kind::Open => {
                let _: Request = frame.json().map_err(io::Error::other)?;
                self.answer(guest::json_packet(frame.stream, Kind::Reply, &Reply::Done))?;
                self.answer(guest::packet(frame.stream, Kind::End, &[]))
            }
            Kind::Reply | Kind::Data | Kind::DataErr | Kind::Credit | Kind::End | Kind::Reset => {
                Ok(())
            }
        }
    }

    async fn recv(&self) -> io::Result<Bytes> {
        Ok(self.inbox.lock().await.recv().await.unwrap_or_default())
    }
}

/// A ledger and images in memory; the ledger outlives the daemon that writes it.
#[derive(Default)]
pub struct FakeStore {
    state: Mutex<StoreState>,
}

#[derive(Default)]
struct StoreState {
    records: HashMap<SandboxId, Record>,
    failing: bool,
}

impl FakeStore {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Whether every write fails from now on.
    pub fn fail(&self, failing: bool) {
        self.state.lock().failing = failing;
    }

    /// An id that any image may have.
    pub fn image_id() -> ImageId {
        "0".repeat(64).parse().expect("64 zeros are an image id")
    }
}

#[async_trait]
impl Ledger for FakeStore {
    async fn record(&self, record: &Record) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        if state.failing {
            return Err(StoreError::failed("write the ledger")("a fake fault"));
        }
        state.records.insert(record.id.clone(), record.clone());
        Ok(())
    }

    async fn erase(&self, id: &SandboxId) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        if state.failing {
            return Err(StoreError::failed("write the ledger")("a fake fault"));
        }
        state.records.remove(id);
        Ok(())
    }

    async fn all(&self) -> Result<Vec<Record>, StoreError> {
        Ok(self.state.lock().records.values().cloned().collect())
    }

    async fn record_snapshot(&self, _: &crate::store::SnapshotRecord) -> Result<(), StoreError> {
        Ok(())
    }
    async fn erase_snapshot(&self, _: &torpor_protocol::SnapshotId) -> Result<(), StoreError> {
        Ok(())
    }
    async fn snapshots(&self) -> Result<Vec<crate::store::SnapshotRecord>, StoreError> {
        Ok(Vec::new())
    }
    async fn record_pool(&self, _: &crate::store::PoolRecord) -> Result<(), StoreError> {
        Ok(())
    }
    async fn erase_pool(&self, _: &torpor_protocol::Name) -> Result<(), StoreError> {
        Ok(())
    }
    async fn pools(&self) -> Result<Vec<crate::store::PoolRecord>, StoreError> {
        Ok(Vec::new())
    }
}

#[async_trait]
impl Images for FakeStore {
    async fn root(&self, _id: &ImageId) -> Result<RootImage, StoreError> {
        Ok(RootImage::default())
    }
}

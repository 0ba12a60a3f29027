//! An engine and a store without isolation or disk, for tests of logic.
//!
//! [`FakeHost`] stands for the machine room: machines in it outlive the [`FakeEngine`] that started
//! them, as real ones outlive a daemon. Its machines answer with a scripted agent on virtual time, or run
//! the real agent in a thread of the test process, where "inside" is the test's own host: never for code
//! that is not ours. What one keeps in memory is one text, which is all that saving and reviving keep; it is
//! also the content of its only changed file, `/memory`.

mod changes;
mod faults;
mod ledger;
mod road;
mod script;
mod store;
mod volumes;

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::watch;
use torpor_protocol::guest::{LogLine, Request};
use torpor_protocol::snapshot::SavedProcess;
use torpor_protocol::{Network, Resources, SandboxId};

use crate::engine::{
    Abilities, About, BootPlan, Changes, Channel, Engine, EngineError, HostMount, Machine, Meter,
    Saved, Usage,
};
use changes::FakeChanges;
use road::{Dormant, RealAgent, Road};
use script::Script;
pub use store::{FakeMemory, FakeStore};

/// Between two looks whether agents have ended.
const LOOK: Duration = Duration::from_millis(1);
/// An agent that has not ended by then hangs; the test is over all the same.
const LOOKS_MAX: usize = 2000;
/// What a fake machine saves, if it is given a real directory.
const MEMORY_FILE: &str = "memory";
/// For how long a fake machine stands still when it is saved.
const PAUSE: Duration = Duration::from_millis(5);

/// Who answers inside a fake machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inside {
    /// Says hello and "done" to everything.
    Scripted,
    /// The real agent, in a thread of this process.
    RealAgent,
    /// The same, and it lives on while its sandbox is on disk only, as if it had been saved.
    LastingAgent,
}

/// Where fake machines live.
pub struct FakeHost {
    inside: Inside,
    state: Mutex<HostState>,
    dormant: Dormant,
}

#[derive(Default)]
struct HostState {
    machines: HashMap<SandboxId, Arc<FakeMachine>>,
    /// What was saved into directories that do not exist.
    saved: HashMap<PathBuf, String>,
    boots: usize,
    revives: usize,
    saves: usize,
    network_changes: usize,
    start_failures: Vec<EngineError>,
    fail_saves: usize,
    fail_resumes: usize,
    fail_resizes: usize,
    start_takes: Duration,
    save_takes: Duration,
    resume_takes: Duration,
    resuming: usize,
    resuming_max: usize,
}

struct FakeMachine {
    id: SandboxId,
    host: Arc<FakeHost>,
    channel: Arc<dyn Channel>,
    script: Option<Arc<Script>>,
    agent: Mutex<Option<RealAgent>>,
    meter: Arc<FakeMeter>,
    root: PathBuf,
    memory: Mutex<String>,
    limits: Mutex<(Network, Resources)>,
    /// The reason once it is dead.
    dead: watch::Sender<Option<String>>,
    paused: watch::Sender<bool>,
}

impl FakeMachine {
    /// Tells the agent, if there is a real one, that its machine is over.
    fn end(&self) -> Option<JoinHandle<()>> {
        Some(self.agent.lock().take()?.end())
    }
}

impl FakeHost {
    pub fn new(inside: Inside) -> Arc<Self> {
        Arc::new(Self { inside, state: Mutex::default(), dormant: Dormant::default() })
    }

    /// Ids of the machines that live now.
    pub fn alive(&self) -> HashSet<SandboxId> {
        self.state.lock().machines.keys().cloned().collect()
    }

    /// How many machines were ever booted.
    pub fn boots(&self) -> usize {
        self.state.lock().boots
    }

    /// How many machines were ever revived.
    pub fn revives(&self) -> usize {
        self.state.lock().revives
    }

    /// How often a machine was saved.
    pub fn saves(&self) -> usize {
        self.state.lock().saves
    }

    /// Every boot and revive takes so long.
    pub fn start_takes(&self, time: Duration) {
        self.state.lock().start_takes = time;
    }

    /// Every machine that should go on takes so long for it.
    pub fn resume_takes(&self, time: Duration) {
        self.state.lock().resume_takes = time;
    }

    /// How many machines were ever about to go on at the same time.
    pub fn resuming_max(&self) -> usize {
        self.state.lock().resuming_max
    }

    /// Every save takes so long.
    pub fn save_takes(&self, time: Duration) {
        self.state.lock().save_takes = time;
    }

    /// The machine dies by itself, as after a crash of its kernel.
    pub fn crash(&self, id: &SandboxId, reason: &str) {
        if let Some(machine) = self.state.lock().machines.remove(id) {
            machine.dead.send_replace(Some(reason.to_owned()));
        }
    }

    /// All machines are gone, as after the host lost power.
    pub fn lose_power(&self) {
        self.state.lock().machines.clear();
    }

    /// Ends all machines; returns when no process of theirs is left, or after a while. For the
    /// end of a test.
    pub fn end(&self) {
        let machines = std::mem::take(&mut self.state.lock().machines);
        let ended = machines.into_values().filter_map(|machine| machine.end());
        let agents: Vec<_> = ended.chain(self.dormant.end()).collect();
        for _ in 0..LOOKS_MAX {
            if agents.iter().all(JoinHandle::is_finished) {
                return;
            }
            std::thread::sleep(LOOK);
        }
    }

    pub fn paused(&self, id: &SandboxId) -> bool {
        self.machine(id).is_some_and(|machine| *machine.paused.borrow())
    }

    pub fn set_memory(&self, id: &SandboxId, text: &str) {
        if let Some(machine) = self.machine(id) {
            text.clone_into(&mut machine.memory.lock());
        }
    }

    pub fn memory(&self, id: &SandboxId) -> Option<String> {
        self.machine(id).map(|machine| machine.memory.lock().clone())
    }

    /// The root file it was started with.
    pub fn root(&self, id: &SandboxId) -> Option<PathBuf> {
        self.machine(id).map(|machine| machine.root.clone())
    }

    /// So many processes inside want the sandbox to stay awake. Scripted machines only.
    pub fn keep_awake(&self, id: &SandboxId, processes: u32) {
        if let Some(script) = self.machine(id).and_then(|machine| machine.script.clone()) {
            script.keep_awake(processes);
        }
    }

    /// A process inside says a line. Scripted machines only.
    pub fn say(&self, id: &SandboxId, stamp_us: u64, text: &str) {
        let line = LogLine {
            stamp_us,
            pid: 2,
            started_at_ms: 0,
            command: "talk".to_owned(),
            name: None,
            stderr: false,
            text: text.to_owned(),
        };
        if let Some(script) = self.machine(id).and_then(|machine| machine.script.clone()) {
            script.say(line);
        }
    }

    /// What a machine may reach and use now.
    pub fn limits(&self, id: &SandboxId) -> Option<(Network, Resources)> {
        self.machine(id).map(|machine| machine.limits.lock().clone())
    }

    /// How often a machine was told anew what it may reach.
    pub fn network_changes(&self) -> usize {
        self.state.lock().network_changes
    }

    /// What the scripted agent of this machine was asked.
    pub fn asked(&self, id: &SandboxId) -> Vec<Request> {
        let script = self.machine(id).and_then(|machine| machine.script.clone());
        script.map(|script| script.asked()).unwrap_or_default()
    }

    fn machine(&self, id: &SandboxId) -> Option<Arc<FakeMachine>> {
        self.state.lock().machines.get(id).cloned()
    }

    fn recall(&self, dir: &Path) -> io::Result<String> {
        if let Some(memory) = self.state.lock().saved.get(dir) {
            return Ok(memory.clone());
        }
        std::fs::read_to_string(dir.join(MEMORY_FILE))
    }
}

/// The engine of one daemon; several after each other may share a host.
pub struct FakeEngine {
    about: About,
    host: Arc<FakeHost>,
}

impl FakeEngine {
    pub fn new(host: Arc<FakeHost>) -> Self {
        Self::of_version(host, "0")
    }

    /// Saves of another version can't be revived.
    pub fn of_version(host: Arc<FakeHost>, version: &str) -> Self {
        let abilities = Abilities {
            memory_snapshots: true,
            live_snapshots: true,
            warm_standby: true,
            saved_files: true,
            quiesces: false,
            binds: true,
        };
        let (kind, version) = ("fake", version.to_owned());
        let about = About { kind, version, nameserver: None, egress_proxy: None, abilities };
        Self { about, host }
    }

    /// The same under another name.
    pub fn of_kind(self, kind: &'static str) -> Self {
        Self { about: About { kind, ..self.about }, ..self }
    }

    async fn start(
        &self,
        plan: BootPlan,
        memory: io::Result<String>,
    ) -> Result<Box<dyn Machine>, EngineError> {
        let (time, failure) = {
            let mut state = self.host.state.lock();
            (state.start_takes, state.start_failures.pop())
        };
        tokio::time::sleep(time).await;
        failure.map_or(Ok(()), Err)?;
        let memory = memory.map_err(EngineError::failed("read what was saved"))?;
        let Road { channel, script, agent } = self
            .host
            .dormant
            .road(&plan.id, self.host.inside)
            .map_err(EngineError::failed("make a channel"))?;
        let machine = Arc::new(FakeMachine {
            id: plan.id.clone(),
            host: Arc::clone(&self.host),
            channel,
            script,
            agent: Mutex::new(agent),
            meter: Arc::default(),
            root: plan.root,
            memory: Mutex::new(memory),
            limits: Mutex::new((plan.spec.network, plan.spec.resources)),
            dead: watch::channel(None).0,
            paused: watch::channel(false).0,
        });
        self.host.state.lock().machines.insert(plan.id, Arc::clone(&machine));
        Ok(Box::new(Handle(machine)))
    }
}

#[async_trait]
impl Engine for FakeEngine {
    fn about(&self) -> &About {
        &self.about
    }

    async fn boot(&self, plan: BootPlan) -> Result<Box<dyn Machine>, EngineError> {
        self.host.state.lock().boots += 1;
        self.start(plan, Ok(String::new())).await
    }

    async fn revive(
        &self,
        plan: BootPlan,
        saved: &Path,
        _: &str,
    ) -> Result<Box<dyn Machine>, EngineError> {
        self.host.state.lock().revives += 1;
        self.start(plan, self.host.recall(saved)).await
    }

    fn changes(&self, saved: &Path) -> Result<Box<dyn Changes>, EngineError> {
        let memory = self.host.recall(saved);
        let memory = memory.map_err(EngineError::failed("read what was saved"))?;
        Ok(Box::new(FakeChanges::new(memory)))
    }

    async fn adopt(&self, id: &SandboxId) -> Result<Option<Box<dyn Machine>>, EngineError> {
        let machine = self.host.machine(id);
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
        if let Some(script) = &self.0.script {
            script.pause();
        }
        Ok(())
    }

    async fn resume(&mut self) -> Result<(), EngineError> {
        let takes = {
            let mut state = self.0.host.state.lock();
            if state.fail_resumes > 0 {
                state.fail_resumes -= 1;
                return Err(EngineError::failed("resume the machine")("a fake fault"));
            }
            state.resuming += 1;
            state.resuming_max = state.resuming_max.max(state.resuming);
            state.resume_takes
        };
        if !takes.is_zero() {
            tokio::time::sleep(takes).await;
        }
        self.0.host.state.lock().resuming -= 1;
        self.0.paused.send_replace(false);
        if let Some(script) = &self.0.script {
            script.resume();
        }
        Ok(())
    }

    fn paused(&self) -> bool {
        *self.0.paused.borrow()
    }

    async fn set_network(&mut self, network: &Network) -> Result<(), EngineError> {
        self.0.host.state.lock().network_changes += 1;
        self.0.limits.lock().0 = network.clone();
        Ok(())
    }

    async fn bind(&mut self, _: &HostMount) -> Result<(), EngineError> {
        Ok(())
    }

    async fn unbind(&mut self, _: u16) -> Result<(), EngineError> {
        Ok(())
    }

    async fn set_resources(&mut self, resources: &Resources) -> Result<(), EngineError> {
        let mut state = self.0.host.state.lock();
        if state.fail_resizes > 0 {
            state.fail_resizes -= 1;
            let (engine, what) = ("fake", "change that".to_owned());
            return Err(EngineError::Unsupported { engine, what });
        }
        self.0.limits.lock().1 = *resources;
        Ok(())
    }

    async fn save(&mut self, into: &Path) -> Result<Saved, EngineError> {
        let (time, fails) = {
            let mut state = self.0.host.state.lock();
            let fails = state.fail_saves > 0;
            state.fail_saves = state.fail_saves.saturating_sub(1);
            (state.save_takes, fails)
        };
        tokio::time::sleep(time).await;
        if fails {
            return Err(EngineError::DiskFull("a fake fault".to_owned()));
        }
        if let Some(reason) = self.0.dead.borrow().clone() {
            return Err(EngineError::failed("save what is dead")(reason));
        }
        let memory = self.0.memory.lock().clone();
        if into.is_dir() {
            let written = std::fs::write(into.join(MEMORY_FILE), memory);
            written.map_err(EngineError::failed("save"))?;
        } else {
            self.0.host.state.lock().saved.insert(into.to_owned(), memory);
        }
        self.0.host.state.lock().saves += 1;
        let command = "/.torpor/agent".to_owned();
        let agent = SavedProcess { pid: 1, parent: 0, command, user: 0, threads: 1 };
        let pause = if self.paused() { Duration::ZERO } else { PAUSE };
        Ok(Saved { pause, processes: vec![agent] })
    }

    async fn exited(&mut self) -> String {
        let mut dead = self.0.dead.subscribe();
        let reason = dead.wait_for(Option::is_some).await;
        let reason = reason.expect("the machine holds the sender");
        reason.clone().unwrap_or_default()
    }

    async fn kill(self: Box<Self>) -> Result<(), EngineError> {
        let mut state = self.0.host.state.lock();
        let same = |there: &Arc<FakeMachine>| Arc::ptr_eq(there, &self.0);
        if state.machines.get(&self.0.id).is_some_and(same) {
            state.machines.remove(&self.0.id);
        }
        let lasting = self.0.host.inside == Inside::LastingAgent && self.paused();
        if let Some(agent) = self.0.agent.lock().take() {
            let road = (Arc::clone(&self.0.channel), agent);
            self.0.host.dormant.part(self.0.id.clone(), road, lasting);
        }
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

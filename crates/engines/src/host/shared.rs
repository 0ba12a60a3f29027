//! What all machines of an engine share, and the way from a plan to a machine.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use torpor_lifecycle::engine::{BootPlan, EngineError};
use torpor_protocol::{Excerpt, Resources, SandboxId};

use super::backend::{Backend, Control, Origin};
use super::installation::Installation;
use super::machine::{HostMachine, Parts};
use super::unclaimed::Unclaimed;
use crate::keeper::{Ended, KeeperError, Spawn};
use crate::limits::Group;
use crate::machines::{
    Assignments, Files, Footprint, MARK, MachineId, MarkFile, Process, Record, Turns, check_root,
};
use crate::network::{Network, Slot};

/// How willingly the kernel gives up a machine when memory runs out, in it or on the host: before all else.
const OOM_SCORE: i32 = 1000;

/// Where the time of a start went, in order.
pub(crate) type Steps = Vec<(&'static str, Duration)>;

pub(crate) struct Shared<B: Backend> {
    pub(crate) backend: B,
    pub(crate) installation: Arc<Installation>,
    pub(crate) footprint: Arc<Footprint<B::Files>>,
    /// Starts under way. They are bound by the processor: more at once makes each slower and all
    /// later.
    starts: Semaphore,
    /// The same for saves.
    pub(super) saves: Arc<Semaphore>,
    pub(super) turns: Turns,
    pub(super) assignments: Assignments,
}

impl<B: Backend> Shared<B> {
    pub(super) fn new(
        installation: &Arc<Installation>,
        backend: B,
        footprint: Arc<Footprint<B::Files>>,
    ) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            backend,
            installation: installation.clone(),
            assignments: Assignments::read(&footprint.layout.machines()),
            footprint,
            starts: Semaphore::new(cores + 1),
            saves: Arc::new(Semaphore::new(cores + 1)),
            turns: Turns::default(),
        }
    }

    pub(crate) fn network(&self) -> &Network {
        &self.installation.network
    }

    /// The user, and the group of the same number, of the machine that has this slot.
    pub(crate) fn user_of(&self, slot: &Slot) -> u32 {
        self.installation.config.users.of(slot)
    }

    /// Refuses what can't work before anything is made.
    pub(super) fn check(&self, plan: &BootPlan) -> Result<(), EngineError> {
        self.check_memory(&plan.spec.resources)?;
        check_root(&plan.root)
    }

    pub(super) fn check_memory(&self, resources: &Resources) -> Result<(), EngineError> {
        let (wanted, here) = (resources.memory_mib, self.installation.memory_mib);
        if wanted > here {
            let detail = format!("{wanted} MiB wanted, {here} MiB here");
            return Err(EngineError::Capacity { what: "memory", detail });
        }
        Ok(())
    }

    /// Runs as a task of its own, so that whoever asked may go away at any moment.
    pub(super) async fn start(
        self: Arc<Self>,
        plan: BootPlan,
        origin: Origin,
        answer: oneshot::Sender<Result<Unclaimed<B>, EngineError>>,
    ) {
        let turn = self.turns.take(&plan.id).await;
        let permit = self.starts.acquire().await.expect("it is never closed");
        if answer.is_closed() {
            return;
        }
        if let Some(former) = self.assignments.machine_of(&plan.id) {
            // One that died, or whose removal failed.
            self.clear_up(&former).await;
        }
        let started = B::start(&self, &plan, &origin, &|| !answer.is_closed()).await;
        drop(permit);
        // If nobody takes it any more, it clears itself up.
        let _ = answer.send(started.map(|machine| Unclaimed::new(machine, turn)));
    }

    /// The end of every start: the machine, or nothing is left of it.
    pub(crate) async fn finish_start(
        &self,
        started: Result<HostMachine<B>, EngineError>,
        id: &MachineId,
        sandbox: Option<&SandboxId>,
        steps: Steps,
    ) -> Result<HostMachine<B>, EngineError> {
        match started {
            Ok(machine) => {
                tracing::info!(?sandbox, %id, ?steps, "machine started");
                Ok(machine.started_in(steps))
            }
            Err(error) => {
                tracing::debug!(?sandbox, %id, %error, "clearing up");
                self.clear_up(id).await;
                if let Some(sandbox) = sandbox {
                    self.assignments.forget(sandbox, id);
                }
                Err(error)
            }
        }
    }

    /// Says whose a machine is, before its guest executes anything: in its record, and to the network, where
    /// what is nobody's goes by the name of `stand_in`.
    pub(crate) async fn assign(
        &self,
        record: &Record,
        slot: &Slot,
        stand_in: &SandboxId,
    ) -> Result<(), EngineError> {
        let written = record.write(&self.footprint.layout.record(&record.id));
        written.map_err(EngineError::failed("write the machine's record"))?;
        if let Some(sandbox) = &record.sandbox {
            self.assignments.assign(sandbox, &record.id);
        }
        let whose = record.sandbox.as_ref().unwrap_or(stand_in);
        let set = self.network().set_policy(slot, whose, &record.network).await;
        set.map_err(EngineError::failed("bound the machine's network"))
    }

    /// Has the keeper run a program that starts a machine: `command`, with the path of its `description`.
    pub(crate) async fn spawn(
        &self,
        id: &MachineId,
        command: &[OsString],
        description: &Path,
        group: &Group,
        wait: Duration,
    ) -> Result<(Ended, String), KeeperError> {
        let words = command.iter().map(OsString::as_os_str).chain([description.as_os_str()]);
        let spawn = Spawn {
            id: id.to_string(),
            argv: words.map(|word| word.to_string_lossy().into_owned()).collect(),
            cgroup_procs: group.procs_files(),
            cwd: self.footprint.layout.machines().join(id.as_str()),
            oom_score_adj: OOM_SCORE,
        };
        self.footprint.keeper.spawn(spawn, wait).await
    }

    pub(crate) async fn clear_up(&self, id: &MachineId) {
        if let Err(error) = self.footprint.clear(id).await {
            tracing::warn!(%id, %error, "something of a machine stays until the next sweep");
        }
    }

    /// Takes over a machine that an earlier daemon left.
    pub(super) async fn adopt(
        self: &Arc<Self>,
        sandbox: &SandboxId,
    ) -> Result<Option<HostMachine<B>>, EngineError> {
        let _turn = self.turns.take(sandbox).await;
        let Some(id) = self.assignments.machine_of(sandbox) else { return Ok(None) };
        match self.take_over(sandbox, &id).await {
            Ok(machine) => Ok(Some(machine)),
            // A start that was cut off, or dead, or without a way to talk to it: not there.
            Err(error) => {
                tracing::warn!(%sandbox, %error, "a machine that can't be had is given up");
                self.footprint.clear(&id).await?;
                self.assignments.forget(sandbox, &id);
                Ok(None)
            }
        }
    }

    async fn take_over(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        id: &MachineId,
    ) -> Result<HostMachine<B>, EngineError> {
        let gone = |what: &'static str| EngineError::failed("take over a machine")(what);
        let file = self.footprint.layout.record(id);
        let record = Record::read(&file).ok_or_else(|| gone("it has no record"))?;
        let mark = MarkFile::open(&file.with_file_name(MARK));
        let mark = mark.ok_or_else(|| gone("it never ran"))?;
        let pidfd = record.process.open().ok_or_else(|| gone("its process is gone"))?;
        let slot = self.network().adopt(record.slot, sandbox, &record.network).await;
        let slot = slot.map_err(EngineError::failed("take over the machine's network"))?;
        let group = self.footprint.group(id);
        let (channel, mut control) = B::reach(self, &record, &group, mark).await?;
        control.take_over().await?;
        HostMachine::new(self.clone(), Parts { record, slot, group, channel, pidfd, control })
    }
}

/// The last that a program wrote, as one printable line.
pub(crate) fn last_line(text: &str) -> Option<Excerpt> {
    text.lines().rfind(|line| !line.trim().is_empty()).map(|line| line.trim().into())
}

/// The process whose number a program wrote into this file.
pub(crate) fn process_in(pid_file: &Path, prepare: impl FnOnce(i32)) -> io::Result<Process> {
    let text = std::fs::read_to_string(pid_file)?;
    let pid = text.trim().parse();
    let pid = pid.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    prepare(pid);
    Process::of(pid)
}

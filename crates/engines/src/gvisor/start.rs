//! Starting a machine, step by step.
//!
//! ```text
//!   network slot ┐
//!   cgroup       ├─▶ runsc create (by the keeper) ─▶ card, over the control socket ─▶ start ─▶ record
//!   disk         ┘          packet socket ┘
//! ```
//!
//! Runs as a task of its own, so that whoever asked may go away at any moment: between two steps it
//! looks whether somebody still waits, and clears up if not.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::Mode;
use tokio::io::Interest;
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use torpor_lifecycle::SeqPacket;
use torpor_lifecycle::engine::{BootPlan, EngineError};

use super::Host;

use super::image;
use super::layout::MachineDir;
use super::links::links_and_routes;
use super::machine::GvisorMachine;
use super::oci::Description;
use super::record::{Process, Record};
use super::urpc::{Urpc, UrpcError};
use crate::disk::ScratchDisk;
use crate::keeper::{Ended, Spawn};
use crate::limits::Group;
use crate::network::Slot;
use crate::watch::watch;

/// `runsc create` takes a tenth of a second; ten times that on a busy host, and then some.
const CREATE_MAX: Duration = Duration::from_secs(60);
/// One call to a fresh sandbox, which may have to load a large program from a cold disk.
const CALL_MAX: Duration = Duration::from_secs(30);
/// How willingly the kernel gives up the guest's processes when memory runs out, in the machine or
/// on the host: before all else.
const GUEST_OOM_SCORE: i32 = 1000;
/// The same for the sandbox's own kernel, with which all of the machine would be lost. It maps what
/// the guest uses, so by its size alone it would often be the first. The lowest that is allowed.
const SENTRY_OOM_SCORES: [i32; 2] = [-900, 0];

/// How long the steps took.
#[derive(Debug, Default, Clone, Copy)]
struct Times {
    prepare: Duration,
    create: Duration,
    links: Duration,
    start: Duration,
}

impl Times {
    fn steps(&self) -> Vec<(&'static str, Duration)> {
        vec![
            ("prepare", self.prepare),
            ("runsc create", self.create),
            ("network", self.links),
            ("start", self.start),
        ]
    }
}

/// A machine that is being made. What it took so far is on the host, under its id.
pub(super) struct Boot<'a> {
    pub(super) host: &'a Arc<Host>,
    pub(super) plan: &'a BootPlan,
}

impl Boot<'_> {
    /// Goes through all steps; after an `Err` the caller clears up.
    pub(super) async fn run(
        &self,
        wanted: impl Fn() -> bool,
    ) -> Result<GvisorMachine, EngineError> {
        let dir = self.host.remains.layout.machine(&self.plan.id);
        let mut times = Times::default();
        let mut since = Instant::now();
        let mut lap = || std::mem::replace(&mut since, Instant::now()).elapsed();

        let (group, slot) = self.prepare(&dir).await?;
        times.prepare = lap();
        still(&wanted)?;
        let card = self.create(&dir, &group, &slot).await?;
        times.create = lap();
        still(&wanted)?;
        let process = self.sandbox(&dir)?;
        self.start(&dir, &slot, card, &mut times).await?;
        still(&wanted)?;
        let machine = self.hand_over(dir, group, slot, process).await?.started_in(times.steps());
        tracing::info!(
            id = %self.plan.id,
            prepare_ms = millis(times.prepare),
            create_ms = millis(times.create),
            links_ms = millis(times.links),
            start_ms = millis(times.start),
            "machine booted"
        );
        Ok(machine)
    }

    /// Slot, cgroup, disk and bundle, side by side.
    async fn prepare(&self, dir: &MachineDir) -> Result<(Group, Slot), EngineError> {
        let remains = self.host.remains.clone();
        let (plan, files) = (self.plan.clone(), dir.clone());
        let group = remains.group(&plan.id);
        let config = Description {
            plan: &plan,
            empty_root: &remains.layout.empty_root(),
            disk: &dir.disk,
            cgroups_path: &group.relative_path(),
        };
        let config = serde_json::to_vec(&config.to_json()).expect("a description has text keys");
        make_dir(dir).map_err(EngineError::failed("make the machine's directory"))?;

        let disk_mib = plan.spec.resources.disk_mib;
        let disk = spawn_blocking(move || {
            std::fs::write(&files.config, config)?;
            ScratchDisk::create(&files.disk_image, &files.disk, disk_mib).map(drop)
        });
        let (id, resources) = (plan.id.clone(), plan.spec.resources);
        let group = spawn_blocking(move || {
            Group::create(&remains.hierarchy, &remains.tag, id.as_str(), &resources)
        });
        let slot = self.host.network.take(&plan.spec.network);
        // All to the end, also when one fails: what was begun is known to be there or not.
        let (disk, group, slot) = tokio::join!(disk, group, slot);
        let slot = slot.map_err(EngineError::failed("give the machine a network"))?;
        disk.map_err(EngineError::failed("make the machine's disk"))?
            .map_err(EngineError::failed("make the machine's disk"))?;
        let group = group
            .map_err(EngineError::failed("make the machine's cgroup"))?
            .map_err(EngineError::failed("make the machine's cgroup"))?;
        Ok((group, slot))
    }

    /// A sandbox with nothing in it, and the socket that will be its network card.
    async fn create(
        &self,
        dir: &MachineDir,
        group: &Group,
        slot: &Slot,
    ) -> Result<OwnedFd, EngineError> {
        let spawn = Spawn {
            id: self.plan.id.to_string(),
            argv: self.host.create_command(dir, &self.plan.id),
            cgroup_procs: group.procs_files(),
            cwd: dir.dir.clone(),
            oom_score_adj: GUEST_OOM_SCORE,
        };
        let card = async { slot.packet_socket() };
        let (spawned, card) = tokio::join!(self.host.remains.keeper.spawn(spawn, CREATE_MAX), card);
        let (ended, stderr) = spawned.map_err(EngineError::failed("start runsc"))?;
        if ended != (Ended::Code { code: 0 }) {
            let why = format!("runsc create ended with {ended}: {}", stderr.trim());
            return Err(EngineError::failed("create the sandbox")(why));
        }
        card.map_err(EngineError::failed("open the machine's network card"))
    }

    /// The process that is the sandbox.
    fn sandbox(&self, dir: &MachineDir) -> Result<Process, EngineError> {
        let pid = std::fs::read_to_string(&dir.pid).and_then(|text| -> io::Result<i32> {
            text.trim().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
        });
        let process = pid.and_then(|pid| {
            spare(pid);
            Process::of(pid)
        });
        process.map_err(EngineError::failed("find the sandbox's process"))
    }

    /// Plugs the card in and runs the agent.
    async fn start(
        &self,
        dir: &MachineDir,
        slot: &Slot,
        card: OwnedFd,
        times: &mut Times,
    ) -> Result<(), EngineError> {
        let begun = Instant::now();
        let mut control = Urpc::connect(&dir.control_socket)
            .await
            .map_err(EngineError::failed("reach the sandbox"))?;
        let links = links_and_routes(&slot.link());
        control
            .call("Network.CreateLinksAndRoutes", links, &[card.as_fd()], CALL_MAX)
            .await
            .map_err(EngineError::failed("plug in the machine's network card"))?;
        times.links = begun.elapsed();
        let begun = Instant::now();
        match control.call("containerManager.StartRoot", &self.plan.id, &[], CALL_MAX).await {
            Ok(_) => {}
            Err(error) => {
                let unloadable = match &error {
                    UrpcError::Refused { message, .. } => image::unloadable(message),
                    UrpcError::Connect { .. }
                    | UrpcError::Deadline { .. }
                    | UrpcError::Broken { .. } => None,
                };
                return Err(
                    unloadable.unwrap_or_else(|| EngineError::failed("start the agent")(error))
                );
            }
        }
        times.start = begun.elapsed();
        Ok(())
    }

    /// Writes down what a later daemon needs, then makes the machine.
    async fn hand_over(
        &self,
        dir: MachineDir,
        group: Group,
        slot: Slot,
        process: Process,
    ) -> Result<GvisorMachine, EngineError> {
        let record = Record {
            id: self.plan.id.clone(),
            process,
            slot: slot.number(),
            network: self.plan.spec.network,
            build: self.host.build.text.clone(),
        };
        record.write(&dir.record).map_err(EngineError::failed("write the machine's record"))?;
        let channel = self.host.remains.keeper.channel(self.plan.id.as_str()).await;
        let channel = channel
            .map_err(EngineError::failed("get the machine's channel"))?
            .ok_or_else(|| EngineError::failed("get the machine's channel")("it is not held"))?;
        let pidfd = record.process.open().ok_or_else(|| {
            EngineError::failed("start the agent")("the sandbox ended right after its start")
        })?;
        GvisorMachine::new(self.host.clone(), record, slot, group, channel, pidfd)
            .map_err(EngineError::failed("watch the machine"))
    }
}

impl GvisorMachine {
    /// Puts together what is known of a machine that runs. Needs a tokio runtime.
    pub(super) fn new(
        host: Arc<Host>,
        record: Record,
        slot: Slot,
        group: Group,
        channel: OwnedFd,
        pidfd: OwnedFd,
    ) -> io::Result<Self> {
        let channel = Arc::new(SeqPacket::new(channel)?);
        let pidfd = watch(pidfd, Interest::READABLE)?;
        let dir = host.remains.layout.machine(&record.id);
        Ok(Self::from_parts(host, dir, record, slot, group, channel, pidfd))
    }
}

/// The machine's directory, anew: nothing of an earlier boot is taken for ours.
fn make_dir(dir: &MachineDir) -> io::Result<()> {
    std::fs::create_dir(&dir.dir)?;
    rustix::fs::chmod(&dir.dir, Mode::RWXU)?;
    Ok(())
}

/// Makes the sandbox's own kernel the last that dies for want of memory. What holds guest processes
/// was forked from it before and keeps its score, and all guest processes come from there.
fn spare(sentry: i32) {
    let file = format!("/proc/{sentry}/oom_score_adj");
    // Below 0 needs a privilege (CAP_SYS_RESOURCE) that root has not got everywhere.
    let scores = SENTRY_OOM_SCORES.iter();
    let lowered = scores.map(|score| std::fs::write(&file, score.to_string())).any(|w| w.is_ok());
    if !lowered {
        tracing::warn!("a sandbox's kernel can't be spared when memory runs out");
    }
}

fn still(wanted: impl Fn() -> bool) -> Result<(), EngineError> {
    if wanted() {
        return Ok(());
    }
    Err(EngineError::failed("boot the machine")("nobody waits for it any more"))
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

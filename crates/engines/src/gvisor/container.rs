//! A container of runsc with nothing in it: place in the network, cgroup, disk and an empty sandbox.
//!
//! ```text
//!   network slot ┐
//!   cgroup       ├─▶ runsc create (by the keeper) ─▶ container ─▶ start ─▶ machine
//!   disk         ┘          packet socket ┘
//! ```
//!
//! It takes ten times as long to make one as to run an agent in it, and it depends on nothing but the
//! image and the resources: so some are made ahead (see `pool`).

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use torpor_lifecycle::engine::{BootPlan, EngineError};
use torpor_protocol::{Excerpt, Network as Policy, Resources};

use super::Runsc;
use super::build::Build;
use super::enter::Entry;
use super::layout::MachineDir;
use super::mounts::Mounts;
use super::oci::Description;
use super::sentry;
use crate::directory;
use crate::disk::ScratchDisk;
use crate::host::{Shared, Steps, Wanted, blocking, process_in, still};
use crate::keeper::Ended;
use crate::limits::Group;
use crate::machines::{MachineId, Process, Record};
use crate::network::Slot;

/// `runsc create` takes a tenth of a second; ten times that on a busy host, and then some.
const CREATE_MAX: Duration = Duration::from_secs(60);
/// How willingly the kernel gives up the sandbox's own kernel when memory runs out, with which all of the
/// machine would be lost; its guest's processes go before all else. It maps what
/// the guest uses, so by its size alone it would often be the first. The lowest that is allowed.
const SENTRY_OOM_SCORES: [i32; 2] = [-900, 0];

/// All that a container depends on.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ContainerSpec {
    pub(super) root: PathBuf,
    pub(super) resources: Resources,
    pub(super) build: Arc<Build>,
    /// Whether it can have volumes: a guest that was saved without them can't be put where they are.
    pub(super) mountable: bool,
}

impl ContainerSpec {
    pub(super) fn of(plan: &BootPlan, build: &Arc<Build>) -> Self {
        let (root, resources) = (plan.root.clone(), plan.spec.resources);
        Self { root, resources, build: build.clone(), mountable: plan.spec.mounts.is_some() }
    }
}

/// A container, thawed or frozen. Dropping it changes nothing on the host.
#[derive(Debug)]
pub(super) struct Container {
    pub(super) id: MachineId,
    pub(super) spec: ContainerSpec,
    pub(super) dir: MachineDir,
    pub(super) group: Group,
    pub(super) slot: Slot,
    /// The socket that will be its network card.
    pub(super) card: OwnedFd,
    pub(super) process: Process,
    /// Where the time of its making went.
    pub(super) steps: Steps,
}

impl Container {
    /// Goes through all steps while it is `wanted`; after an `Err` the caller clears up what has
    /// this `id`.
    pub(super) async fn make(
        host: &Shared<Runsc>,
        id: MachineId,
        spec: ContainerSpec,
        urgent: bool,
        wanted: Wanted<'_>,
    ) -> Result<Self, EngineError> {
        let dir = host.footprint.layout.machine(&id);
        let begun = Instant::now();
        let (group, slot) = prepare(host, &id, &spec, &dir).await?;
        let prepared = Instant::now();
        if !urgent {
            let lowered = group.set_urgent(false);
            lowered.map_err(EngineError::failed("let a container wait for others"))?;
        }
        still(wanted)?;
        let card = create(host, &id, &spec.build, &dir, &group, &slot).await?;
        still(wanted)?;
        let process = process_in(&dir.pid, |sentry| {
            spare(sentry);
            sentry::prefer(sentry);
        });
        let process = process.map_err(EngineError::failed("find the sandbox's process"))?;
        let steps = vec![("prepare", prepared - begun), ("runsc create", prepared.elapsed())];
        Ok(Self { id, spec, dir, group, slot, card, process, steps })
    }

    pub(super) fn record(&self) -> Record {
        Record {
            id: self.id.clone(),
            sandbox: None,
            process: self.process.clone(),
            slot: self.slot.number(),
            network: Policy::default(),
            build: self.spec.build.to_string(),
        }
    }
}

/// Slot, cgroup, disk and bundle, side by side.
async fn prepare(
    host: &Shared<Runsc>,
    id: &MachineId,
    spec: &ContainerSpec,
    dir: &MachineDir,
) -> Result<(Group, Slot), EngineError> {
    let footprint = host.footprint.clone();
    let mounts = spec.mountable.then(|| Mounts::at(&dir.mounts));
    let config = Description {
        root: &spec.root,
        memory_mib: spec.resources.memory_mib,
        empty_root: &footprint.layout.empty_root(),
        generation: spec.build.generation,
        disk: &dir.disk,
        cgroups_path: &footprint.group(id).relative_path(),
        mounts: mounts.as_ref(),
    };
    let config = serde_json::to_vec(&config.to_json()).expect("a description has text keys");
    directory::fresh(&dir.dir).map_err(EngineError::failed("make the machine's directory"))?;

    let (files, resources) = (dir.clone(), spec.resources);
    let disk = blocking("make the machine's disk", move || {
        std::fs::write(&files.config, config)?;
        mounts.as_ref().map_or(Ok(()), Mounts::make)?;
        ScratchDisk::create(&files.disk_image, &files.disk, resources.disk_mib).map(drop)
    });
    let id = id.clone();
    let group = blocking("make the machine's cgroup", move || {
        Group::create(&footprint.hierarchy, &footprint.tag, id.as_str(), &resources)
    });
    // Open, as most machines want it; closed when it gets a guest that must not.
    let slot = host.network().take();
    // All to the end, also when one fails: what was begun is known to be there or not.
    let (disk, group, slot) = tokio::join!(disk, group, slot);
    let slot = slot.map_err(EngineError::failed("give the machine a network"))?;
    disk?;
    Ok((group?, slot))
}

/// A sandbox with nothing in it, and the socket that will be its network card.
async fn create(
    host: &Shared<Runsc>,
    id: &MachineId,
    build: &Build,
    dir: &MachineDir,
    group: &Group,
    slot: &Slot,
) -> Result<OwnedFd, EngineError> {
    let entry = Entry { user: host.user_of(slot), command: create_command(host, dir, id, build) };
    let text = serde_json::to_vec(&entry).expect("an entry has text keys");
    std::fs::write(&dir.entry, text).map_err(EngineError::failed("describe the sandbox"))?;
    let starting = host.spawn(id, &host.backend.enter_command, &dir.entry, group, CREATE_MAX);
    let card = async { slot.packet_socket() };
    let (spawned, card) = tokio::join!(starting, card);
    let (ended, stderr) = spawned.map_err(EngineError::failed("start runsc"))?;
    if ended != (Ended::Code { code: 0 }) {
        let why = format!("runsc create ended with {ended}: {}", Excerpt::from(stderr.trim()));
        return Err(EngineError::failed("create the sandbox")(why));
    }
    card.map_err(EngineError::failed("open the machine's network card"))
}

fn create_command(
    host: &Shared<Runsc>,
    dir: &MachineDir,
    id: &MachineId,
    build: &Build,
) -> Vec<String> {
    let path = |path: &Path| path.to_string_lossy().into_owned();
    let mut command = vec![
        path(&build.program),
        format!("--root={}", path(&host.footprint.layout.runsc_root())),
        "--platform=systrap".into(),
        "--network=sandbox".into(),
        format!("--panic-log={}", path(&dir.panic_log)),
    ];
    command.extend(build.generation.create_flags(&dir.disk));
    command.extend([
        "create".into(),
        format!("--bundle={}", path(&dir.dir)),
        format!("--pid-file={}", path(&dir.pid)),
        id.to_string(),
    ]);
    command
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

//! From a container to a machine: a guest is put into it, from its image or from a save.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::time::Instant;
use torpor_lifecycle::engine::{BootPlan, EngineError, PREPARED_STEP};

use super::build::{Build, of_another_build, unknown_method};
use super::container::{Container, ContainerSpec};
use super::control::KernelControl;
use super::image;
use super::layout::MachineDir;
use super::links::links_and_routes;
use super::mounts::Mounts;
use super::report;
use super::save;
use super::sentry;
use super::urpc::{Urpc, UrpcError};
use super::{Runsc, channel_of};
use crate::host::{HostMachine, Origin, Parts, Shared, Steps, Wanted, blocking, still};
use crate::limits::Group;
use crate::machines::{MachineId, MarkFile, Record};

/// One call to a fresh sandbox, which may have to load a large program from a cold disk.
const CALL_MAX: Duration = Duration::from_secs(30);
/// Reading a save back takes a millisecond per MiB. Less than anybody waits for it, so that a
/// restore that is stuck is cleared up before the next attempt.
const RESTORE_MAX: Duration = Duration::from_secs(110);

/// How a sandbox ends its words when it can't open a file again as it was.
const READ_ONLY: &str = "read-only file system";

/// A machine that is being started.
pub(super) struct Start<'a> {
    pub(super) host: &'a Arc<Shared<Runsc>>,
    pub(super) plan: &'a BootPlan,
    pub(super) build: &'a Arc<Build>,
    pub(super) origin: &'a Origin,
}

impl Start<'_> {
    /// Goes through all steps; on `Err` nothing is left.
    pub(super) async fn run(&self, wanted: Wanted<'_>) -> Result<HostMachine<Runsc>, EngineError> {
        let (container, mut steps) = self.container(wanted).await?;
        let id = container.id.clone();
        let started = self.fill(container, wanted, &mut steps).await;
        self.host.finish_start(started, &id, Some(&self.plan.id), steps).await
    }

    /// One that is ready, or else a new one.
    async fn container(&self, wanted: Wanted<'_>) -> Result<(Container, Steps), EngineError> {
        let (spec, begun) = (ContainerSpec::of(self.plan, self.build), Instant::now());
        if let Some(container) = self.host.take_prepared(&spec).await {
            return Ok((container, vec![(PREPARED_STEP, begun.elapsed())]));
        }
        let id = MachineId::random();
        let made = Container::make(self.host, id.clone(), spec, true, wanted).await;
        if made.is_err() {
            self.host.clear_up(&id).await;
        }
        made.map(|container| {
            let steps = container.steps.clone();
            (container, steps)
        })
    }

    async fn fill(
        &self,
        container: Container,
        wanted: Wanted<'_>,
        steps: &mut Steps,
    ) -> Result<HostMachine<Runsc>, EngineError> {
        let Container { dir, group, slot, card, .. } = &container;
        let record = Record {
            sandbox: Some(self.plan.id.clone()),
            network: self.plan.spec.network.clone(),
            ..container.record()
        };
        let begun = Instant::now();
        // Containers have an open network; only the rarer wish costs anything.
        self.host.assign(&record, slot, &self.plan.id).await?;
        sentry::nudge(record.process.pid);
        let mut control = Urpc::connect(&dir.control_socket)
            .await
            .map_err(EngineError::failed("reach the sandbox"))?;
        let links = links_and_routes(&slot.link());
        let plugged = self.plug(&mut control, &links, card.as_fd()).await;
        plugged.map_err(EngineError::failed("plug in the machine's network card"))?;
        steps.push(("network", begun.elapsed()));
        still(wanted)?;

        self.bind_all(dir).await?;
        let begun = Instant::now();
        match self.origin {
            Origin::Image => {
                let boot = self.boot(control, &container, &record);
                sentry::nudged(record.process.pid, boot).await?;
                steps.push(("start", begun.elapsed()));
            }
            Origin::Save { dir: saved, .. } => {
                let restore = self.restore(control, &container, &record, saved);
                sentry::nudged(record.process.pid, restore).await?;
                steps.push(("restore", begun.elapsed()));
            }
        }
        sentry::nudge(record.process.pid);
        still(wanted)?;
        let mark = MarkFile::create(&dir.mark)?;
        let channel = channel_of(self.host, &record.id).await?;
        let pidfd = record.process.open().ok_or_else(|| {
            EngineError::failed("start the machine")("the sandbox ended right after its start")
        })?;
        let halt = self.build.generation.halt();
        let control = KernelControl::new(&record, dir, group.clone(), halt, mark);
        let Container { slot, group, .. } = container;
        let parts = Parts { record, slot, group, channel, pidfd, control };
        HostMachine::new(self.host.clone(), parts)
    }

    /// Before a guest is there: one that is revived finds its open files.
    async fn bind_all(&self, dir: &MachineDir) -> Result<(), EngineError> {
        if self.plan.mounts.is_empty() {
            return Ok(());
        }
        let (mounts, all) = (Mounts::at(&dir.mounts), self.plan.mounts.clone());
        blocking("bind the sandbox's volumes", move || {
            all.iter().try_for_each(|mount| mounts.bind(mount))
        })
        .await
    }

    /// Gives the machine its network, by the first call that its build knows.
    async fn plug(
        &self,
        control: &mut Urpc,
        links: &Value,
        card: BorrowedFd<'_>,
    ) -> Result<(), UrpcError> {
        let (last, calls) = self.build.generation.network_calls().split_last().expect("one call");
        for call in calls {
            match control.call(call, links, &[card], CALL_MAX).await {
                Err(UrpcError::Refused { message, .. }) if unknown_method(&message) => {}
                answer => return answer.map(drop),
            }
        }
        control.call(last, links, &[card], CALL_MAX).await.map(drop)
    }

    /// Runs the agent of the image.
    async fn boot(
        &self,
        control: Urpc,
        Container { dir, group, .. }: &Container,
        record: &Record,
    ) -> Result<(), EngineError> {
        let id = &record.id;
        let error = match control.call_last("containerManager.StartRoot", id, &[], CALL_MAX).await {
            Ok(_) => return Ok(()),
            Err(error) => error,
        };
        let why: Box<dyn std::error::Error + Send + Sync> = match error {
            UrpcError::Refused { ref message, .. } => match image::unloadable(message) {
                Some(error) => return Err(error),
                None => error.into(),
            },
            // It crashed, and the reason is in what it left.
            UrpcError::Broken { .. } => {
                report::reason(&self.host.footprint.keeper, dir, group, record).await.into()
            }
            UrpcError::Connect { .. } | UrpcError::Deadline { .. } => error.into(),
        };
        Err(EngineError::failed("start the agent")(why))
    }

    /// The guest goes on where it was saved.
    async fn restore(
        &self,
        control: Urpc,
        Container { dir, group, .. }: &Container,
        record: &Record,
        saved: &Path,
    ) -> Result<(), EngineError> {
        let open = |name: &str| {
            let file = File::open(saved.join(name));
            file.map_err(EngineError::failed(format!("revive the guest: open {name}")))
        };
        let [graph, meta, pages] = save::FILES;
        let (graph, meta, pages) = (open(graph)?, open(meta)?, open(pages)?);
        let fds = [graph.as_fd(), meta.as_fd(), pages.as_fd()];
        let background = self.build.generation.restores_in_background();
        let arg = serde_json::json!({
            "HavePagesFile": true, "HaveDeviceFile": false, "Background": background,
        });
        // Reading memory back is the host's work, and under a guest's limit it would take longer.
        let limited = |done: io::Result<()>| done.map_err(EngineError::failed("limit the machine"));
        limited(group.lend_processors())?;
        let restored = control.call_last("containerManager.Restore", arg, &fds, RESTORE_MAX).await;
        limited(group.bound_processors(&self.plan.spec.resources))?;
        let why: Box<dyn std::error::Error + Send + Sync> = match restored {
            Ok(_) => return Ok(()),
            Err(UrpcError::Refused { message, .. }) if of_another_build(&message) => {
                format!("it was saved by another build of runsc ({message})").into()
            }
            Err(UrpcError::Refused { message, .. }) if message.ends_with(READ_ONLY) => {
                "a process has a file of a volume open for writing, which is read-only now: close it \
                 before a fork that reads, or fork with a copy of the volume"
                    .into()
            }
            // It crashed, and the reason is in what it left.
            Err(UrpcError::Broken { .. }) => {
                report::reason(&self.host.footprint.keeper, dir, group, record).await.into()
            }
            Err(error) => error.into(),
        };
        Err(EngineError::failed("revive the guest")(why))
    }
}

/// Ends the process that serves files of the host, where there is one: it was needed to make the guest's
/// disk, and since its agent put the directory away nothing comes from it. It would only take memory, and
/// be one more process that a guest can talk to.
pub(super) fn end_gofer(group: &Group) {
    let is_gofer = |pid: &Pid| {
        let words = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero()));
        words.is_ok_and(|words| words.starts_with(b"runsc-gofer"))
    };
    let pids = group.pids().into_iter().filter_map(|pid| Pid::from_raw(pid.cast_signed()));
    for gofer in pids.filter(is_gofer) {
        // Fails only if it is gone already.
        let _ = kill_process(gofer, Signal::KILL);
    }
}

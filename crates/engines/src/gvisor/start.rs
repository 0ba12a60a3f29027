//! From a shell to a machine: a guest is put into it, from its image or from a save.
//!
//! Runs as a task of its own, so that whoever asked may go away at any moment: between two steps it
//! looks whether somebody still waits, and clears up if not.
//!
//! The record names the sandbox before the guest executes its first instruction; the mark says when
//! the machine is whole.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::time::Instant;
use torpor_lifecycle::engine::{BootPlan, EngineError};

use super::Host;
use super::build::{Build, of_another_build, unknown_method};
use super::control::Control;
use super::image;
use super::links::links_and_routes;
use super::machine::{GvisorMachine, Parts};
use super::report;
use super::save;
use super::sentry;
use super::shell::{Make, Shell, still};
use super::urpc::{Urpc, UrpcError};
use crate::limits::Group;
use crate::machines::{MachineId, Mark, MarkFile, Record};

/// One call to a fresh sandbox, which may have to load a large program from a cold disk.
const CALL_MAX: Duration = Duration::from_secs(30);
/// Reading a save back takes a millisecond per MiB. Less than anybody waits for it, so that a
/// restore that is stuck is cleared up before the next attempt.
const RESTORE_MAX: Duration = Duration::from_secs(110);

/// What a guest begins from.
#[derive(Debug, Clone)]
pub(super) enum Origin {
    /// The agent of the image.
    Image,
    /// What was saved into this directory.
    Save(PathBuf),
}

type Steps = Vec<(&'static str, Duration)>;

/// A machine that is being started.
pub(super) struct Start<'a> {
    pub(super) host: &'a Arc<Host>,
    pub(super) plan: &'a BootPlan,
    pub(super) build: &'a Arc<Build>,
    pub(super) origin: &'a Origin,
}

impl Start<'_> {
    /// Goes through all steps; on `Err` nothing is left.
    pub(super) async fn run(
        &self,
        wanted: impl Fn() -> bool,
    ) -> Result<GvisorMachine, EngineError> {
        let (shell, mut steps) = self.shell(&wanted).await?;
        let id = shell.id.clone();
        let started = self.fill(shell, &wanted, &mut steps).await;
        match &started {
            Ok(_) => tracing::info!(sandbox = %self.plan.id, %id, ?steps, "machine started"),
            Err(error) => {
                tracing::debug!(sandbox = %self.plan.id, %id, %error, "clearing up");
                self.host.clear_up(&id).await;
                self.host.roll.forget(&self.plan.id, &id);
            }
        }
        Ok(started?.started_in(steps))
    }

    /// One that is ready, or else a new one.
    async fn shell(&self, wanted: impl Fn() -> bool) -> Result<(Shell, Steps), EngineError> {
        let (make, begun) = (Make::of(self.plan, self.build), Instant::now());
        if let Some(shell) = self.host.ready_shell(&make).await {
            return Ok((shell, vec![("shell", begun.elapsed())]));
        }
        let id = MachineId::random();
        let made = Shell::make(self.host, id.clone(), make, true, wanted).await;
        if made.is_err() {
            self.host.clear_up(&id).await;
        }
        made.map(|shell| {
            let steps = shell.steps.clone();
            (shell, steps)
        })
    }

    async fn fill(
        &self,
        shell: Shell,
        wanted: impl Fn() -> bool,
        steps: &mut Steps,
    ) -> Result<GvisorMachine, EngineError> {
        let Shell { dir, group, slot, card, .. } = &shell;
        let record = Record {
            sandbox: Some(self.plan.id.clone()),
            network: self.plan.spec.network.clone(),
            ..shell.record()
        };
        let begun = Instant::now();
        record.write(&dir.record).map_err(EngineError::failed("write the machine's record"))?;
        self.host.roll.assign(&self.plan.id, &record.id);
        // Shells have an open one; only the rarer wish costs anything.
        let set = self.host.network.set_policy(slot, &self.plan.id, &record.network).await;
        set.map_err(EngineError::failed("bound the machine's network"))?;
        sentry::nudge(record.process.pid);
        let mut control = Urpc::connect(&dir.control_socket)
            .await
            .map_err(EngineError::failed("reach the sandbox"))?;
        let links = links_and_routes(&slot.link());
        let plugged = self.plug(&mut control, &links, card.as_fd()).await;
        plugged.map_err(EngineError::failed("plug in the machine's network card"))?;
        steps.push(("network", begun.elapsed()));
        still(&wanted)?;

        let begun = Instant::now();
        match self.origin {
            Origin::Image => {
                self.boot(control, &shell, &record).await?;
                steps.push(("start", begun.elapsed()));
            }
            Origin::Save(saved) => {
                self.restore(control, &shell, &record, saved).await?;
                steps.push(("restore", begun.elapsed()));
            }
        }
        sentry::nudge(record.process.pid);
        still(&wanted)?;
        let mark = MarkFile::create(&dir.mark);
        let mark = (mark.map_err(EngineError::failed("mark the machine"))?, Mark::Running);
        let (channel, pidfd) = self.connect(&record).await?;
        let control = Control::new(
            dir,
            record.process.pid,
            group.clone(),
            self.build.generation.halt(),
            mark,
        );
        let Shell { slot, group, .. } = shell;
        GvisorMachine::new(
            self.host.clone(),
            Parts { record, slot, group, channel, pidfd, control },
        )
        .map_err(EngineError::failed("watch the machine"))
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
        Shell { dir, group, .. }: &Shell,
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
                report::reason(&self.host.remains.keeper, dir, group, record).await.into()
            }
            UrpcError::Connect { .. } | UrpcError::Deadline { .. } => error.into(),
        };
        Err(EngineError::failed("start the agent")(why))
    }

    /// The guest goes on where it was saved.
    async fn restore(
        &self,
        control: Urpc,
        Shell { dir, group, .. }: &Shell,
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
            // It crashed, and the reason is in what it left.
            Err(UrpcError::Broken { .. }) => {
                report::reason(&self.host.remains.keeper, dir, group, record).await.into()
            }
            Err(error) => error.into(),
        };
        Err(EngineError::failed("revive the guest")(why))
    }

    /// The daemon's end of the channel, and a hold on the process.
    async fn connect(&self, record: &Record) -> Result<(OwnedFd, OwnedFd), EngineError> {
        let channel = self.host.remains.keeper.channel(record.id.as_str()).await;
        let channel = channel
            .map_err(EngineError::failed("get the machine's channel"))?
            .ok_or_else(|| EngineError::failed("get the machine's channel")("it is not held"))?;
        let pidfd = record.process.open().ok_or_else(|| {
            EngineError::failed("start the machine")("the sandbox ended right after its start")
        })?;
        Ok((channel, pidfd))
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

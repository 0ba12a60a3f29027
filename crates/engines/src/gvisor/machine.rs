//! One live sandbox of runsc.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rustix::process::{Signal, pidfd_send_signal};
use tokio::io::unix::AsyncFd;
use tokio::task::spawn_blocking;
use torpor_lifecycle::SeqPacket;
use torpor_lifecycle::engine::{Channel, EngineError, Machine, Meter, Usage};

use super::Host;

use super::layout::MachineDir;
use super::record::Record;
use crate::disk::ScratchDisk;
use crate::keeper::Ended;
use crate::limits::Group;
use crate::network::Slot;

/// From the kill to the last trace of the process; it takes 10 to 50 ms.
const REAP_MAX: Duration = Duration::from_secs(10);
/// How much of a crash report is read: the reason stands at its head.
const PANIC_MAX: u64 = 64 * 1024;
/// Longest line of a crash report or of the agent's stderr that is passed on.
const LINE_MAX: usize = 300;

pub(super) struct GvisorMachine {
    host: Arc<Host>,
    dir: MachineDir,
    record: Record,
    slot: Slot,
    group: Group,
    channel: Arc<SeqPacket>,
    pidfd: AsyncFd<OwnedFd>,
    meter: Arc<Readings>,
    start_steps: Vec<(&'static str, Duration)>,
}

impl GvisorMachine {
    /// Remembers where the time of its start went.
    pub(super) fn started_in(mut self, steps: Vec<(&'static str, Duration)>) -> Self {
        self.start_steps = steps;
        self
    }

    pub(super) fn from_parts(
        host: Arc<Host>,
        dir: MachineDir,
        record: Record,
        slot: Slot,
        group: Group,
        channel: Arc<SeqPacket>,
        pidfd: AsyncFd<OwnedFd>,
    ) -> Self {
        let disk = ScratchDisk::open(&dir.disk_image, &dir.disk);
        let meter = Arc::new(Readings { group: group.clone(), disk });
        Self { host, dir, record, slot, group, channel, pidfd, meter, start_steps: Vec::new() }
    }

    /// Kills it and removes all of it; the caller holds the sandbox's turn.
    pub(super) async fn destroy(self) -> Result<(), EngineError> {
        let keeper = &self.host.remains.keeper;
        // Fails only if it is dead already.
        let _ = pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL);
        // A frozen v1 group dies when it is thawed; `clear` sees to that and to the rest.
        let cleared = self.host.remains.clear(&self.record.id).await;
        // Its keeper's child: reaped, its number is free, and nothing of it is left.
        let _ = keeper.exit_of(self.record.process.pid, REAP_MAX).await;
        self.host.network.release(self.slot);
        cleared
    }

    async fn in_group(
        &self,
        what: &'static str,
        action: fn(&Group) -> std::io::Result<()>,
    ) -> Result<(), EngineError> {
        let group = self.group.clone();
        spawn_blocking(move || action(&group))
            .await
            .map_err(EngineError::failed(what))?
            .map_err(EngineError::failed(what))
    }

    /// Why it is dead, for people.
    async fn reason(&self) -> String {
        let keeper = &self.host.remains.keeper;
        let ended = keeper.exit_of(self.record.process.pid, REAP_MAX).await.ok().flatten();
        let report = crash_report(&self.dir);
        let killed = ended == Some(Ended::Signal { signal: libc::SIGKILL });
        if killed && self.group.oom_kills() > 0 {
            return "killed by the host: out of memory".into();
        }
        if report.contains("failed to get clone") || report.contains("createSysmsgThread") {
            return "crashed: process limit reached (pids.max)".into();
        }
        if let Some(line) = report.lines().find(|line| !line.trim().is_empty()) {
            return format!("crashed: {}", shortened(line));
        }
        match ended {
            Some(Ended::Signal { signal }) => format!("killed by the host: signal {signal}"),
            // As shells tell a signal.
            Some(Ended::Code { code }) if code > 128 => {
                format!("agent was killed: signal {}", code - 128)
            }
            Some(Ended::Code { code }) => {
                let tail = keeper.tail(self.record.id.as_str()).await.unwrap_or_default();
                match tail.lines().rfind(|line| !line.trim().is_empty()) {
                    Some(line) => format!("agent exited with {code}: {}", shortened(line)),
                    None => format!("agent exited with {code}"),
                }
            }
            None => "ended, nobody knows how".into(),
        }
    }
}

#[async_trait]
impl Machine for GvisorMachine {
    fn channel(&self) -> Arc<dyn Channel> {
        self.channel.clone()
    }

    fn meter(&self) -> Arc<dyn Meter> {
        self.meter.clone()
    }

    fn start_steps(&self) -> Vec<(&'static str, Duration)> {
        self.start_steps.clone()
    }

    /// By the cgroup alone: it stops the guest and its kernel, whose ticker would go on otherwise,
    /// can be repeated, and is visible to a daemon that comes after us.
    async fn pause(&mut self) -> Result<(), EngineError> {
        self.in_group("pause the machine", Group::freeze).await
    }

    async fn resume(&mut self) -> Result<(), EngineError> {
        self.in_group("resume the machine", Group::thaw).await
    }

    async fn exited(&mut self) -> String {
        // Readable for ever once the process has ended.
        let ended = self.pidfd.readable().await.map(|mut ready| ready.retain_ready());
        match ended {
            Ok(()) => self.reason().await,
            Err(error) => format!("can't be watched any more: {error}"),
        }
    }

    async fn kill(self: Box<Self>) -> Result<(), EngineError> {
        // As a task: begun is done, also if the caller goes away.
        let killing = tokio::spawn(async move {
            let host = self.host.clone();
            let _turn = host.turns.take(&self.record.id).await;
            self.destroy().await
        });
        killing.await.map_err(EngineError::failed("kill the machine"))?
    }
}

/// What the sandbox's kernel wrote when it crashed.
fn crash_report(dir: &MachineDir) -> String {
    let mut report = Vec::new();
    if let Ok(file) = std::fs::File::open(&dir.panic_log) {
        let _ = file.take(PANIC_MAX).read_to_end(&mut report);
    }
    String::from_utf8_lossy(&report).into_owned()
}

/// One printable line of what a guest may have written.
fn shortened(line: &str) -> String {
    line.trim().chars().filter(|c| !c.is_control()).take(LINE_MAX).collect()
}

#[derive(Debug)]
struct Readings {
    group: Group,
    disk: ScratchDisk,
}

impl Meter for Readings {
    fn oom_kills(&self) -> u64 {
        self.group.oom_kills()
    }

    fn usage(&self) -> Usage {
        Usage {
            memory_bytes: self.group.memory_bytes(),
            cpu_micros: self.group.cpu_micros(),
            // Unmounted is unused.
            disk_bytes: self.disk.used_bytes().unwrap_or(0),
        }
    }
}

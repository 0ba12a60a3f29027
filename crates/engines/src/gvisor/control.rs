//! Stopping a guest, letting it go on, and saving it: all that is asked of a sandbox's kernel while
//! a guest is in it.
//!
//! ```text
//!              freeze           thaw              Pause
//!   running ──────────▶ frozen ──────▶ pausing ──────────▶ paused (and frozen again)
//!      ▲  ▲               │ thaw                               │ thaw
//!      │  └───────────────┘                                    │
//!      └───────────────────── resuming ◀───────────────────────┘
//!                              Resume
//! ```
//!
//! This is how it is where a frozen cgroup stops guests ([`Halt::Freezer`]). Where the kernel does
//! ([`Halt::Kernel`]), nothing is ever frozen, and `running` leads to `pausing` at once.
//!
//! A machine is stopped by its cgroup, which stops its kernel too, whose ticker would go on
//! otherwise. To be saved its kernel must run: then it is first told to stop the guest. From
//! then until it is let go or killed the guest executes no instruction, so that its save is all of
//! it. Letting a kernel go on costs some milliseconds, in which its tasks begin their system calls anew
//! and get their memory mapped again: so a kernel is told nothing before it has to be.
//!
//! The kernel counts pauses and dies at a resume too many, so what was asked of it is marked before
//! and after. Where a daemon was killed between the two marks the kernel is looked at
//! (see `stacks`); outside of them the count is known: 1 if paused, else 0. A save changes the count
//! by nothing, whoever is there to hear of its end.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde_json::Value;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};
use torpor_lifecycle::engine::{EngineError, HostMount, Saved};
use torpor_protocol::Resources;

use super::build::Halt;
use super::layout::MachineDir;
use super::mounts::Mounts;
use super::resize::resize;
use super::sentry;
use super::stacks::{self, Seen};
use super::urpc::{Urpc, UrpcError};
use crate::disk::ScratchDisk;
use crate::host::{Control, blocking};
use crate::limits::Group;
use crate::machines::{MachineId, Mark, MarkFile, Record};

/// Every task of the guest has to come to a halt; a host may be busy.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// How long a save that nobody waits for any more may stand in the way.
const SETTLE_MAX: Duration = Duration::from_secs(60);
/// Between two looks at a kernel: what a killed daemon asked last may be on its way for a moment.
const LOOK_EVERY: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct KernelControl {
    pub(super) id: MachineId,
    socket: PathBuf,
    /// The process of the kernel.
    sentry: i32,
    pub(super) group: Group,
    disk: ScratchDisk,
    pub(super) mounts: Mounts,
    halt: Halt,
    pub(super) mark: MarkFile,
    connection: Option<Urpc>,
}

impl Control for KernelControl {
    fn paused(&self) -> Arc<AtomicBool> {
        self.mark.paused()
    }

    async fn pause(&mut self) -> Result<(), EngineError> {
        self.settle().await?;
        match self.mark.get() {
            Mark::Frozen | Mark::Paused => Ok(()),
            Mark::Running | Mark::Pausing | Mark::Resuming => match self.halt {
                Halt::Freezer => {
                    self.freeze().await?;
                    self.mark.set(Mark::Frozen)
                }
                Halt::Kernel => self.stop_guest().await,
            },
        }
    }

    async fn resume(&mut self) -> Result<(), EngineError> {
        self.settle().await?;
        match self.mark.get() {
            Mark::Running | Mark::Pausing | Mark::Resuming => Ok(()),
            Mark::Frozen => {
                // Marked while it is frozen: from here on it may run.
                self.mark.set(Mark::Running)?;
                sentry::nudge(self.sentry);
                self.thaw()
            }
            Mark::Paused => self.release().await,
        }
    }

    async fn take_over(&mut self) -> Result<(), EngineError> {
        self.settle().await?;
        match self.mark.get() {
            Mark::Frozen | Mark::Paused => self.freeze().await,
            Mark::Running | Mark::Pausing | Mark::Resuming => self.thaw(),
        }
    }

    async fn save(&mut self, into: &Path) -> Result<Saved, EngineError> {
        self.save_files(into).await
    }

    /// Processor time, memory and tasks; a disk keeps its size. What the guest shows of itself
    /// (`nproc`, the total in `/proc/meminfo`, the size of `/dev/shm`) stays as it was when its machine
    /// was started, and its kernel schedules for as many processors as it had then.
    async fn set_resources(&mut self, resources: Resources) -> Result<(), EngineError> {
        let (group, disk) = (self.group.clone(), self.disk.clone());
        spawn_blocking(move || resize(&group, &disk, &resources))
            .await
            .map_err(EngineError::failed("change the machine's resources"))?
    }

    async fn bind(&mut self, mount: HostMount) -> Result<(), EngineError> {
        let mounts = self.mounts.clone();
        blocking("bind a volume into the machine", move || mounts.bind(&mount)).await
    }

    async fn unbind(&mut self, slot: u16) -> Result<(), EngineError> {
        let mounts = self.mounts.clone();
        blocking("take a volume out of the machine", move || mounts.unbind(slot)).await
    }
}

impl KernelControl {
    pub(super) fn new(
        record: &Record,
        dir: &MachineDir,
        group: Group,
        halt: Halt,
        mark: MarkFile,
    ) -> Self {
        Self {
            id: record.id.clone(),
            socket: dir.control_socket.clone(),
            sentry: record.process.pid,
            group,
            disk: ScratchDisk::open(&dir.disk_image, &dir.disk),
            mounts: Mounts::at(&dir.mounts),
            halt,
            mark,
            connection: None,
        }
    }

    /// Lets a guest go on whose kernel was told to stop it.
    async fn release(&mut self) -> Result<(), EngineError> {
        self.mark.set(Mark::Resuming)?;
        sentry::nudge(self.sentry);
        self.thaw()?;
        if let Err(error) = self.call_last("containerManager.Resume", (), &[], PAUSE_MAX).await {
            self.settle().await?;
            if self.mark.get() != Mark::Running {
                return Err(EngineError::failed("resume the machine")(error));
            }
        }
        self.mark.set(Mark::Running)
    }

    /// Does `work` while the kernel runs and hears us. A guest that stood still executes nothing from
    /// the beginning of `work` on, and `work` hears whether it did.
    pub(super) async fn with_kernel<T>(
        &mut self,
        work: impl AsyncFnOnce(&mut Self, bool) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        self.settle().await?;
        match self.mark.get() {
            Mark::Running | Mark::Pausing | Mark::Resuming => return work(self, false).await,
            Mark::Frozen => self.stop_guest().await?,
            Mark::Paused => self.thaw()?,
        }
        let done = work(self, true).await;
        self.freeze().await?;
        done
    }

    /// Tells the kernel to stop the guest; it is not frozen then. On `Err` it is as before.
    async fn stop_guest(&mut self) -> Result<(), EngineError> {
        self.mark.set(Mark::Pausing)?;
        self.thaw()?;
        if let Err(error) = self.call("containerManager.Pause", (), &[], PAUSE_MAX).await {
            self.settle().await?;
            // It did, and nobody heard of it.
            if (self.halt, self.mark.get()) == (Halt::Kernel, Mark::Paused) {
                return Ok(());
            }
            return Err(EngineError::failed("pause the machine")(error));
        }
        self.mark.set(Mark::Paused)
    }

    /// Brings it from whatever its mark says to running, frozen or paused.
    async fn settle(&mut self) -> Result<(), EngineError> {
        // What is still frozen was not told anything after its mark.
        let (told, untold) = match self.mark.get() {
            Mark::Running | Mark::Frozen | Mark::Paused => return Ok(()),
            Mark::Pausing if self.halt == Halt::Kernel => (Mark::Running, Mark::Running),
            Mark::Pausing => (Mark::Frozen, Mark::Frozen),
            Mark::Resuming => (Mark::Running, Mark::Paused),
        };
        let frozen = self.halt == Halt::Freezer
            && self.group.frozen().map_err(EngineError::failed("look at the machine"))?;
        let mark = match frozen {
            true => untold,
            false if self.guest_stands().await? => Mark::Paused,
            false => told,
        };
        if mark != Mark::Running {
            self.freeze().await?;
        }
        self.mark.set(mark)
    }

    /// Whether the kernel was told to pause; two looks must agree.
    async fn guest_stands(&mut self) -> Result<bool, EngineError> {
        let look = "look at the machine";
        let deadline = Instant::now() + SETTLE_MAX;
        let mut before = None;
        while Instant::now() < deadline {
            let text = self.call("debug.Stacks", (), &[], PAUSE_MAX).await;
            let text = text.map_err(EngineError::failed(look))?;
            match stacks::seen(text.as_str().unwrap_or_default()) {
                None => return Err(EngineError::failed(look)("nobody can tell what it does")),
                Some(Seen::Running) if before == Some(Seen::Running) => return Ok(false),
                Some(Seen::Paused) if before == Some(Seen::Paused) => return Ok(true),
                seen => before = seen,
            }
            sleep(LOOK_EVERY).await;
        }
        Err(EngineError::failed(look)("it does not come to rest"))
    }

    /// A call that sets the guest going.
    pub(super) async fn call_last<A: serde::Serialize>(
        &mut self,
        method: &'static str,
        arg: A,
        fds: &[BorrowedFd<'_>],
        wait: Duration,
    ) -> Result<Value, UrpcError> {
        self.connection().await?.call_last(method, arg, fds, wait).await
    }

    async fn connection(&mut self) -> Result<Urpc, UrpcError> {
        match self.connection.take() {
            Some(connection) => Ok(connection),
            None => Urpc::connect(&self.socket).await,
        }
    }

    /// One call to the kernel, over a connection that is kept.
    pub(super) async fn call<A: serde::Serialize>(
        &mut self,
        method: &'static str,
        arg: A,
        fds: &[BorrowedFd<'_>],
        wait: Duration,
    ) -> Result<Value, UrpcError> {
        let mut connection = self.connection().await?;
        let answer = connection.call(method, arg, fds, wait).await;
        // After a refusal the next call is heard as well; after anything else nobody knows.
        if matches!(answer, Ok(_) | Err(UrpcError::Refused { .. })) {
            self.connection = Some(connection);
        }
        answer
    }

    /// Nothing, where the kernel stops guests and is quiet then.
    async fn freeze(&self) -> Result<(), EngineError> {
        if self.halt == Halt::Kernel {
            return Ok(());
        }
        let group = self.group.clone();
        blocking("freeze the machine", move || group.freeze()).await
    }

    /// One short write; not worth a thread.
    fn thaw(&self) -> Result<(), EngineError> {
        if self.halt == Halt::Kernel {
            return Ok(());
        }
        self.group.thaw().map_err(EngineError::failed("thaw the machine"))
    }
}

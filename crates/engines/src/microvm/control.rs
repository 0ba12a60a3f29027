//! Stopping a guest, letting it go on, and saving it: all that is asked of a QEMU while a guest is in
//! it.
//!
//! A machine is paused in two steps: its QEMU is told to stop the guest, and then frozen by its cgroup, as
//! it would wake up now and then for nothing. To be saved its QEMU must run, and the guest still
//! executes nothing. What is marked is only whether it is paused: telling a QEMU twice does no harm.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::Instant;
use torpor_lifecycle::engine::{EngineError, Saved};
use torpor_protocol::Resources;
use torpor_qemu::memory::{GuestMemory, bytes_of};
use torpor_qemu::monitor::Monitor;
use torpor_qemu::unit::{self, About, UnitId};

use super::Qemu;
use super::layout::MachineDir;
use super::start::READERS;
use crate::host::{Backend, Control, blocking, not_saved};
use crate::limits::{Group, Limits};
use crate::machines::{Mark, MarkFile};

/// How long a QEMU may take to answer at its control socket; a host may be busy.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// How a machine is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    /// By what it wrote since it began, if that is little.
    Little,
    /// With a memory of its own, for others to begin from.
    Whole,
}

#[derive(Debug)]
pub(super) struct QemuControl {
    dir: MachineDir,
    pid: i32,
    /// What it began from, and what its saves are of.
    about: About,
    group: Group,
    mark: MarkFile,
    monitor: Option<Monitor>,
    /// Whether QEMU was told to stop the guest; `None`: perhaps.
    stopped: Option<bool>,
}

impl Control for QemuControl {
    fn paused(&self) -> Arc<AtomicBool> {
        self.mark.paused()
    }

    async fn pause(&mut self) -> Result<(), EngineError> {
        if self.stands() {
            return Ok(());
        }
        self.stop().await?;
        let paused = match self.freeze().await {
            Ok(()) => self.mark.set(Mark::Frozen),
            Err(error) => Err(error),
        };
        if paused.is_err() {
            self.thaw()?;
            self.let_go().await?;
        }
        paused
    }

    async fn resume(&mut self) -> Result<(), EngineError> {
        if !self.stands() {
            return Ok(());
        }
        // Marked while it is frozen: from here on it may run.
        self.mark.set(Mark::Running)?;
        self.thaw()?;
        self.let_go().await
    }

    async fn take_over(&mut self) -> Result<(), EngineError> {
        if self.stands() {
            return self.freeze().await;
        }
        self.thaw()?;
        // It may have been left in the middle of a save.
        self.let_go().await
    }

    async fn save(&mut self, into: &Path) -> Result<Saved, EngineError> {
        self.save_as(into, Keep::Little).await
    }

    /// Processor time up to as many processors as the guest has; memory and disk are built in.
    async fn set_resources(&mut self, resources: Resources) -> Result<(), EngineError> {
        let About { memory_bytes, disk_bytes, cpus, .. } = self.about;
        let (memory, disk) = (memory_bytes >> 20, disk_bytes >> 20);
        if resources.memory_mib != memory {
            return Err(cant(format!("change the memory of a sandbox, which is {memory} MiB")));
        }
        if resources.disk_mib != disk {
            return Err(cant(format!("change the disk of a sandbox, which is {disk} MiB")));
        }
        if resources.cpus > f64::from(cpus) {
            return Err(cant(format!("give a sandbox more than its {cpus} processors")));
        }
        let (group, cpu_micros) = (self.group.clone(), Limits::of(&resources).cpu_micros);
        blocking("change the machine's resources", move || {
            let limits = group.limits()?;
            group.bound(&Limits { cpu_micros, ..limits })
        })
        .await
    }
}

fn cant(what: String) -> EngineError {
    EngineError::Unsupported { engine: Qemu::KIND, what }
}

impl QemuControl {
    pub(super) fn new(
        dir: &MachineDir,
        pid: i32,
        about: About,
        group: Group,
        mark: MarkFile,
    ) -> Self {
        Self { dir: dir.clone(), pid, about, group, mark, monitor: None, stopped: None }
    }

    /// The same for a machine that was started right now.
    pub(super) fn begun(self, monitor: Monitor) -> Self {
        Self { monitor: Some(monitor), stopped: Some(false), ..self }
    }

    fn stands(&self) -> bool {
        self.mark.get().stands()
    }

    /// Has QEMU run the guest, unless it is known to.
    async fn let_go(&mut self) -> Result<(), EngineError> {
        if self.stopped == Some(false) {
            return Ok(());
        }
        let resumed = self.monitor().await?.resume().await;
        self.answered(resumed, "resume the machine")?;
        self.stopped = Some(false);
        Ok(())
    }

    async fn stop(&mut self) -> Result<(), EngineError> {
        self.stopped = None;
        let stopped = self.monitor().await?.stop().await;
        self.answered(stopped, "stop the guest")?;
        self.stopped = Some(true);
        Ok(())
    }

    /// See [`Control::save`].
    pub(super) async fn save_as(&mut self, into: &Path, keep: Keep) -> Result<Saved, EngineError> {
        let stood = self.stands();
        if stood {
            self.thaw()?;
        }
        let begun = Instant::now();
        let taken = self.take(into, keep, stood).await;
        let back = if stood { self.freeze().await } else { self.let_go().await };
        let pause = if stood { Duration::ZERO } else { begun.elapsed() };
        let taken = taken?;
        back?;
        let (into, dir) = (into.to_owned(), self.dir.clone());
        let finished = spawn_blocking(move || finish(&into, &dir, taken)).await;
        finished
            .map_err(EngineError::failed("save the machine"))?
            .map_err(|(error, into)| not_saved(error, &into))?;
        Ok(Saved { pause, processes: Vec::new() })
    }

    /// All that must be taken while the guest stands still.
    async fn take(&mut self, into: &Path, keep: Keep, stood: bool) -> Result<Taken, EngineError> {
        self.stop().await?;
        let state = self.monitor().await?.save_state().await;
        let state = self.answered(state, "save the state of the machine")?;
        let work = Taking {
            about: About {
                unit: UnitId::random().map_err(|error| not_saved(error, into))?,
                ..self.about.clone()
            },
            base: self.about.base.unwrap_or(self.about.unit),
            pid: self.pid,
            dir: self.dir.clone(),
            into: into.to_owned(),
            keep,
            stood,
            state,
        };
        let taken = spawn_blocking(move || work.take()).await;
        taken
            .map_err(EngineError::failed("save the machine"))?
            .map_err(|error| not_saved(error, into))
    }

    async fn monitor(&mut self) -> Result<&mut Monitor, EngineError> {
        if self.monitor.is_none() {
            let monitor = Monitor::connect(&self.dir.monitor, Instant::now() + ANSWER_MAX).await;
            self.monitor = Some(monitor.map_err(EngineError::failed("reach QEMU"))?);
        }
        self.monitor.as_mut().ok_or_else(|| EngineError::failed("reach QEMU")("it is not there"))
    }

    /// After an error nobody knows what of the next answer belongs to which question.
    fn answered<T, E: std::error::Error + Send + Sync + 'static>(
        &mut self,
        answer: Result<T, E>,
        action: &'static str,
    ) -> Result<T, EngineError> {
        if answer.is_err() {
            self.monitor = None;
        }
        answer.map_err(EngineError::failed(action))
    }

    async fn freeze(&self) -> Result<(), EngineError> {
        let group = self.group.clone();
        blocking("freeze the machine", move || group.freeze()).await
    }

    /// One short write; not worth a thread.
    fn thaw(&self) -> Result<(), EngineError> {
        self.group.thaw().map_err(EngineError::failed("thaw the machine"))
    }
}

/// The work on files and memory while the guest stands still.
struct Taking {
    about: About,
    /// The unit that its memory began as.
    base: UnitId,
    pid: i32,
    dir: MachineDir,
    into: PathBuf,
    keep: Keep,
    stood: bool,
    state: Vec<u8>,
}

/// What is left to do when the guest may go on.
struct Taken {
    about: About,
    /// `memory` is what the machine began from, and `delta` must be merged with it.
    merge: bool,
}

impl Taking {
    fn take(self) -> io::Result<Taken> {
        let Self { mut about, base, pid, dir, into, keep, stood, state } = self;
        let below = File::open(&dir.memory)?;
        let memory = GuestMemory::of(pid, &below, about.memory_bytes)?;
        let runs = memory.written()?;
        let create = |name: &str| unit::create(&into.join(name), Some(READERS));
        let little = unit::worth_a_delta(bytes_of(&runs), unit::data_bytes(&below)?);
        // Whoever goes on waits for nothing but what it wrote itself.
        let delta = !stood || (keep == Keep::Little && little);
        if delta {
            unit::write_delta(
                &memory,
                &runs,
                &below,
                (&about.unit, &base),
                &create(unit::DELTA_FILE)?,
            )?;
            about.base = Some(base);
        } else {
            unit::write_full(&below, &memory, &runs, &about.unit, &create(unit::MEMORY_FILE)?)?;
            about.base = None;
        }
        let disk = File::open(&dir.disk)?;
        unit::copy_disk(&disk, &create(unit::DISK_FILE)?, about.disk_bytes, Some(&about.unit))?;
        io::Write::write_all(&mut create(unit::STATE_FILE)?, &state)?;
        about.state_hash = unit::hash_state(&into).map_err(io::Error::other)?;
        let merge = delta && !stood;
        if delta && !merge {
            unit::link_or_copy(&below, &into.join(unit::MEMORY_FILE), Some(READERS))?;
        }
        Ok(Taken { about, merge })
    }
}

/// Makes the files a unit. Blocks.
fn finish(into: &Path, dir: &MachineDir, taken: Taken) -> Result<(), (io::Error, PathBuf)> {
    let Taken { mut about, merge } = taken;
    let done = (|| {
        if merge {
            let delta = unit::delta_of(into, &about).map_err(io::Error::other)?;
            let delta = delta.ok_or(io::ErrorKind::InvalidData)?;
            let memory = unit::create(&into.join(unit::MEMORY_FILE), Some(READERS))?;
            unit::merge(&File::open(&dir.memory)?, &delta, &about.unit, &memory)?;
            std::fs::remove_file(into.join(unit::DELTA_FILE))?;
            about.base = None;
        }
        unit::write_about(into, &about, None)
    })();
    done.map_err(|error| (error, into.to_owned()))
}

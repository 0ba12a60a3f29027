//! One live QEMU.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use rustix::process::{Signal, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use torpor_lifecycle::engine::{Channel, EngineError, Machine, Meter, Saved, Usage};
use torpor_protocol::{Network as Policy, Resources};

use super::Host;
use super::channel::LineChannel;
use super::control::{Control, Keep};
use super::report::{self, REAP_MAX};
use crate::limits::{Group, Limits};
use crate::machines::{PagingOut, Place, Record, Removable};
use crate::network::Slot;
use crate::watch::watch;

/// How long what is asked of a killed QEMU may take to notice.
const NOTICE_MAX: Duration = Duration::from_secs(5);
/// What files are counted in.
const BLOCK: u64 = 512;

pub(super) struct MicrovmMachine {
    host: Arc<Host>,
    /// Whose it is and which process; `place` has all of it as it is now.
    record: Record,
    place: Arc<Mutex<Place>>,
    group: Group,
    channel: Arc<LineChannel>,
    pidfd: AsyncFd<OwnedFd>,
    control: Arc<Mutex<Control>>,
    processors: u32,
    /// Bytes of memory and disk, as the guest sees them.
    sizes: (u64, u64),
    paused: Arc<AtomicBool>,
    paging_out: PagingOut,
    meter: Arc<Readings>,
    start_steps: Vec<(&'static str, Duration)>,
}

/// What a machine that runs is put together from.
pub(super) struct Parts {
    pub(super) record: Record,
    pub(super) slot: Slot,
    pub(super) group: Group,
    pub(super) channel: LineChannel,
    pub(super) pidfd: OwnedFd,
    pub(super) control: Control,
}

impl MicrovmMachine {
    /// Needs a tokio runtime.
    pub(super) fn new(host: Arc<Host>, parts: Parts) -> std::io::Result<Self> {
        let Parts { record, slot, group, channel, pidfd, control } = parts;
        let pidfd = watch(pidfd, Interest::READABLE)?;
        let dir = host.remains.layout.machine(&record.id);
        let place = Place { record: record.clone(), file: dir.record, slot };
        let meter = Arc::new(Readings { group: group.clone(), disk: dir.disk });
        Ok(Self {
            host,
            record,
            place: Arc::new(Mutex::new(place)),
            group,
            channel: Arc::new(channel),
            pidfd,
            processors: control.processors(),
            sizes: control.sizes(),
            paused: control.paused(),
            control: Arc::new(Mutex::new(control)),
            paging_out: PagingOut::default(),
            meter,
            start_steps: Vec::new(),
        })
    }

    /// Remembers where the time of its start went.
    pub(super) fn started_in(mut self, steps: Vec<(&'static str, Duration)>) -> Self {
        self.start_steps = steps;
        self
    }

    /// The same for what came before.
    pub(super) fn with_step(mut self, name: &'static str, took: Duration) -> Self {
        self.start_steps.insert(0, (name, took));
        self
    }

    /// Saves a machine for others to begin from.
    pub(super) async fn save_whole(&mut self, into: &Path) -> Result<Saved, EngineError> {
        self.keep(into, Keep::Whole).await
    }

    async fn keep(&mut self, into: &Path, keep: Keep) -> Result<Saved, EngineError> {
        self.paging_out.stop();
        // Waits here, where it can still be given up.
        let permit = self.host.saves.clone().acquire_owned().await.expect("it is never closed");
        let (control, into) = (self.control.clone(), into.to_owned());
        self.to_the_end(async move {
            let saved = control.lock().await.save(&into, keep).await;
            drop(permit);
            saved
        })
        .await
    }

    /// Begun is done: what is asked of a QEMU is carried through, also if the caller goes away.
    async fn to_the_end<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, EngineError>> + Send + 'static,
    ) -> Result<T, EngineError> {
        tokio::spawn(work).await.map_err(EngineError::failed("control the machine"))?
    }

    fn cant(what: impl Into<String>) -> EngineError {
        EngineError::Unsupported { engine: "microvm", what: what.into() }
    }
}

impl Removable for MicrovmMachine {
    async fn destroy(self) -> Result<(), EngineError> {
        let host = &self.host;
        self.paging_out.stop();
        // Fails only if it is dead already.
        let _ = pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL);
        // Whatever was under way with it breaks off now and writes nothing more.
        let _control = timeout(NOTICE_MAX, self.control.lock()).await;
        let place = timeout(NOTICE_MAX, self.place.lock()).await;
        let cleared = host.remains.clear(&self.record.id).await;
        if let Some(sandbox) = &self.record.sandbox {
            host.roll.forget(sandbox, &self.record.id);
        }
        // Its keeper's child: reaped, its number is free, and nothing of it is left.
        let _ = host.remains.keeper.exit_of(self.record.process.pid, REAP_MAX).await;
        drop(place);
        // Only now, with all else: its place in the network.
        drop(self.place);
        cleared
    }
}

#[async_trait]
impl Machine for MicrovmMachine {
    fn channel(&self) -> Arc<dyn Channel> {
        self.channel.clone()
    }

    fn meter(&self) -> Arc<dyn Meter> {
        self.meter.clone()
    }

    fn start_steps(&self) -> Vec<(&'static str, Duration)> {
        self.start_steps.clone()
    }

    async fn pause(&mut self) -> Result<(), EngineError> {
        let control = self.control.clone();
        self.to_the_end(async move { control.lock().await.pause().await }).await
    }

    async fn resume(&mut self) -> Result<(), EngineError> {
        self.paging_out.stop();
        let control = self.control.clone();
        self.to_the_end(async move { control.lock().await.resume().await }).await
    }

    fn paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    async fn save(&mut self, into: &Path) -> Result<Saved, EngineError> {
        self.keep(into, Keep::Little).await
    }

    fn page_out(&self) {
        if self.paused() {
            let (group, wanted) = (self.group.clone(), self.paging_out.begin());
            spawn_blocking(move || {
                if let Err(error) = group.page_out(|| wanted.load(Ordering::Relaxed)) {
                    tracing::debug!(%error, "a machine could not be paged out");
                }
            });
        }
    }

    async fn set_network(&mut self, network: &Policy) -> Result<(), EngineError> {
        let (host, place, network) = (self.host.clone(), self.place.clone(), network.clone());
        self.to_the_end(async move { place.lock().await.set_network(&host.network, network).await })
            .await
    }

    /// Processor time up to as many processors as the guest has; memory and disk are built in.
    async fn set_resources(&mut self, resources: &Resources) -> Result<(), EngineError> {
        let (memory, disk) = (self.sizes.0 >> 20, self.sizes.1 >> 20);
        if resources.memory_mib != memory {
            return Err(Self::cant(format!(
                "change the memory of a sandbox, which is {memory} MiB"
            )));
        }
        if resources.disk_mib != disk {
            return Err(Self::cant(format!("change the disk of a sandbox, which is {disk} MiB")));
        }
        if resources.cpus > f64::from(self.processors) {
            let has = self.processors;
            return Err(Self::cant(format!("give a sandbox more than its {has} processors")));
        }
        let (group, cpu_micros) = (self.group.clone(), Limits::of(resources).cpu_micros);
        let bounded = spawn_blocking(move || {
            let limits = group.limits()?;
            group.bound(&Limits { cpu_micros, ..limits })
        });
        let what = "change the machine's resources";
        bounded.await.map_err(EngineError::failed(what))?.map_err(EngineError::failed(what))
    }

    async fn exited(&mut self) -> String {
        // Readable for ever once the process has ended.
        let ended = self.pidfd.readable().await.map(|mut ready| ready.retain_ready());
        match ended {
            Ok(()) => report::reason(&self.host.remains.keeper, &self.group, &self.record).await,
            Err(error) => format!("can't be watched any more: {error}"),
        }
    }

    async fn kill(self: Box<Self>) -> Result<(), EngineError> {
        // As a task: begun is done, also if the caller goes away.
        let killing = tokio::spawn(async move {
            let host = self.host.clone();
            let _turn = match &self.record.sandbox {
                Some(sandbox) => Some(host.turns.take(sandbox).await),
                None => None,
            };
            self.destroy().await
        });
        killing.await.map_err(EngineError::failed("kill the machine"))?
    }
}

#[derive(Debug)]
struct Readings {
    group: Group,
    disk: PathBuf,
}

impl Meter for Readings {
    /// Those of the host: what the guest's own kernel does for want of memory is not seen here.
    fn oom_kills(&self) -> u64 {
        self.group.oom_kills()
    }

    fn usage(&self) -> Usage {
        Usage {
            memory_bytes: self.group.memory_bytes(),
            cpu_micros: self.group.cpu_micros(),
            disk_bytes: std::fs::metadata(&self.disk).map_or(0, |disk| disk.blocks() * BLOCK),
        }
    }
}

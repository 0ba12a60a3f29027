//! One live sandbox of runsc.

use std::os::fd::OwnedFd;
use std::path::Path;
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
use torpor_lifecycle::SeqPacket;
use torpor_lifecycle::engine::{Channel, EngineError, Machine, Meter, Saved, Usage};
use torpor_protocol::{Network as Policy, Resources};

use super::Host;
use super::control::Control;
use super::layout::MachineDir;
use super::report::{self, REAP_MAX};
use super::settings::Settings;
use super::start::end_gofer;
use crate::disk::ScratchDisk;
use crate::limits::Group;
use crate::machines::{PagingOut, Place, Record, Removable};
use crate::network::Slot;
use crate::watch::watch;

/// How long what is asked of a killed kernel may take to notice.
const NOTICE_MAX: Duration = Duration::from_secs(5);

pub(super) struct GvisorMachine {
    host: Arc<Host>,
    dir: MachineDir,
    /// Whose it is and which process; `settings` has all of it as it is now.
    record: Record,
    settings: Arc<Mutex<Settings>>,
    group: Group,
    channel: Arc<SeqPacket>,
    pidfd: AsyncFd<OwnedFd>,
    control: Arc<Mutex<Control>>,
    paused: Arc<AtomicBool>,
    paging_out: PagingOut,
    meter: Arc<Readings>,
    start_steps: Vec<(&'static str, Duration)>,
}

/// What a machine that runs is put together from.
pub(super) struct Parts {
    /// As it was when the machine was started or taken over; `control` has it as it is.
    pub(super) record: Record,
    pub(super) slot: Slot,
    pub(super) group: Group,
    pub(super) channel: OwnedFd,
    pub(super) pidfd: OwnedFd,
    pub(super) control: Control,
}

impl GvisorMachine {
    /// Needs a tokio runtime.
    pub(super) fn new(host: Arc<Host>, parts: Parts) -> std::io::Result<Self> {
        let Parts { record, slot, group, channel, pidfd, control } = parts;
        let channel = Arc::new(SeqPacket::new(channel)?);
        let pidfd = watch(pidfd, Interest::READABLE)?;
        let dir = host.remains.layout.machine(&record.id);
        let disk = ScratchDisk::open(&dir.disk_image, &dir.disk);
        let place = Place { record: record.clone(), file: dir.record.clone(), slot };
        let settings = Settings { place, group: group.clone(), disk: disk.clone() };
        let settings = Arc::new(Mutex::new(settings));
        let meter = Arc::new(Readings { group: group.clone(), disk });
        let paused = control.paused();
        let control = Arc::new(Mutex::new(control));
        let start_steps = Vec::new();
        Ok(Self {
            host,
            dir,
            record,
            settings,
            group,
            channel,
            pidfd,
            control,
            paused,
            meter,
            start_steps,
            paging_out: PagingOut::default(),
        })
    }

    /// Remembers where the time of its start went.
    pub(super) fn started_in(mut self, steps: Vec<(&'static str, Duration)>) -> Self {
        self.start_steps = steps;
        self
    }

    /// Begun is done: what is asked of a kernel is carried through, also if the caller goes away.
    async fn to_the_end<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, EngineError>> + Send + 'static,
    ) -> Result<T, EngineError> {
        tokio::spawn(work).await.map_err(EngineError::failed("control the machine"))?
    }
}

impl Removable for GvisorMachine {
    async fn destroy(self) -> Result<(), EngineError> {
        let host = &self.host;
        self.paging_out.stop();
        // Fails only if it is dead already.
        let _ = pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL);
        // Whatever was under way with it breaks off now and writes nothing more.
        let _control = timeout(NOTICE_MAX, self.control.lock()).await;
        let settings = timeout(NOTICE_MAX, self.settings.lock()).await;
        // A frozen v1 group dies when it is thawed; `clear` sees to that and to the rest.
        let cleared = host.remains.clear(&self.record.id).await;
        if let Some(sandbox) = &self.record.sandbox {
            host.roll.forget(sandbox, &self.record.id);
        }
        // Its keeper's child: reaped, its number is free, and nothing of it is left.
        let _ = host.remains.keeper.exit_of(self.record.process.pid, REAP_MAX).await;
        drop(settings);
        // Only now, with all else: its place in the network.
        drop(self.settings);
        cleared
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

    fn version(&self) -> Option<&str> {
        Some(&self.record.build)
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
        self.paging_out.stop();
        end_gofer(&self.group);
        // Waits here, where it can still be given up.
        let permit = self.host.saves.clone().acquire_owned().await.expect("it is never closed");
        let (control, into) = (self.control.clone(), into.to_owned());
        let id = self.record.id.clone();
        self.to_the_end(async move {
            let saved = control.lock().await.save(&id, &into).await;
            drop(permit);
            saved
        })
        .await
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
        let (host, settings, network) = (self.host.clone(), self.settings.clone(), network.clone());
        self.to_the_end(async move {
            settings.lock().await.place.set_network(&host.network, network).await
        })
        .await
    }

    /// Processor time, memory and tasks; a disk keeps its size. What the guest shows of itself
    /// (`nproc`, the total in `/proc/meminfo`, the size of `/dev/shm`) stays as it was when its machine
    /// was started, and its kernel schedules for as many processors as it had then.
    async fn set_resources(&mut self, resources: &Resources) -> Result<(), EngineError> {
        self.host.check_memory(resources)?;
        let (settings, resources) = (self.settings.clone(), *resources);
        self.to_the_end(async move { settings.lock().await.set_resources(resources).await }).await
    }

    async fn exited(&mut self) -> String {
        // Readable for ever once the process has ended.
        let ended = self.pidfd.readable().await.map(|mut ready| ready.retain_ready());
        match ended {
            Ok(()) => {
                report::reason(&self.host.remains.keeper, &self.dir, &self.group, &self.record)
                    .await
            }
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

//! One live machine, of any engine.

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
use torpor_lifecycle::engine::{Channel, EngineError, HostMount, Machine, Meter, Saved, Usage};
use torpor_protocol::{Network as Policy, Resources};

use super::backend::{Backend, Control};
use super::shared::{Shared, Steps};
use crate::limits::Group;
use crate::machines::{Files, MachineId, PagingOut, Place, Record};
use crate::network::Slot;
use crate::watch::watch;

/// How long what is asked of a killed machine may take to notice.
const NOTICE_MAX: Duration = Duration::from_secs(5);
/// From the end of a process to its last trace: all of the guest's memory is given back. It takes 10 to 50 ms.
pub(crate) const REAP_MAX: Duration = Duration::from_secs(10);

pub(crate) struct HostMachine<B: Backend> {
    host: Arc<Shared<B>>,
    /// Whose it is and which process; `place` has all of it as it is now.
    record: Record,
    place: Arc<Mutex<Place>>,
    group: Group,
    channel: Arc<B::Channel>,
    pidfd: AsyncFd<OwnedFd>,
    control: Arc<Mutex<B::Control>>,
    paused: Arc<AtomicBool>,
    paging_out: PagingOut,
    meter: Arc<Readings<B::Files>>,
    start_steps: Steps,
}

/// What a machine that runs is put together from.
pub(crate) struct Parts<B: Backend> {
    pub(crate) record: Record,
    pub(crate) slot: Slot,
    pub(crate) group: Group,
    pub(crate) channel: B::Channel,
    pub(crate) pidfd: OwnedFd,
    pub(crate) control: B::Control,
}

impl<B: Backend> HostMachine<B> {
    /// Needs a tokio runtime.
    pub(crate) fn new(host: Arc<Shared<B>>, parts: Parts<B>) -> Result<Self, EngineError> {
        let Parts { record, slot, group, channel, pidfd, control } = parts;
        let pidfd =
            watch(pidfd, Interest::READABLE).map_err(EngineError::failed("watch the machine"))?;
        let layout = host.footprint.layout.clone();
        let place = Place { record: record.clone(), file: layout.record(&record.id), slot };
        let meter = Readings { group: group.clone(), layout, id: record.id.clone() };
        Ok(Self {
            host,
            record,
            place: Arc::new(Mutex::new(place)),
            group,
            channel: Arc::new(channel),
            pidfd,
            paused: control.paused(),
            control: Arc::new(Mutex::new(control)),
            paging_out: PagingOut::default(),
            meter: Arc::new(meter),
            start_steps: Steps::new(),
        })
    }

    /// Remembers where the time of its start went.
    pub(super) fn started_in(mut self, steps: Steps) -> Self {
        self.start_steps = steps;
        self
    }

    /// The same for what came before.
    pub(crate) fn with_step(mut self, name: &'static str, took: Duration) -> Self {
        self.start_steps.insert(0, (name, took));
        self
    }

    /// For what an engine does with machines of its own.
    pub(crate) fn control(&self) -> &Mutex<B::Control> {
        &self.control
    }

    /// Begun is done: what is asked of a machine is carried through, also if the caller goes away.
    async fn to_the_end<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, EngineError>> + Send + 'static,
    ) -> Result<T, EngineError> {
        tokio::spawn(work).await.map_err(EngineError::failed("control the machine"))?
    }

    /// Kills it and removes all of it; the caller holds the sandbox's turn.
    pub(crate) async fn destroy(self) -> Result<(), EngineError> {
        let host = &self.host;
        self.paging_out.stop();
        // Fails only if it is dead already.
        let _ = pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL);
        // Whatever was under way with it breaks off now and writes nothing more.
        let _control = timeout(NOTICE_MAX, self.control.lock()).await;
        let place = timeout(NOTICE_MAX, self.place.lock()).await;
        // A frozen v1 group dies when it is thawed; `clear` sees to that and to the rest.
        let cleared = host.footprint.clear(&self.record.id).await;
        if let Some(sandbox) = &self.record.sandbox {
            host.assignments.forget(sandbox, &self.record.id);
        }
        // Its keeper's child: reaped, its number is free, and nothing of it is left.
        let _ = host.footprint.keeper.exit_of(self.record.process.pid, REAP_MAX).await;
        drop(place);
        // Only now, with all else: its place in the network.
        drop(self.place);
        cleared
    }
}

#[async_trait]
impl<B: Backend> Machine for HostMachine<B> {
    fn channel(&self) -> Arc<dyn Channel> {
        self.channel.clone()
    }

    fn meter(&self) -> Arc<dyn Meter> {
        self.meter.clone()
    }

    fn start_steps(&self) -> Steps {
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
        // Waits here, where it can still be given up.
        let permit = self.host.saves.clone().acquire_owned().await.expect("it is never closed");
        let (control, into) = (self.control.clone(), into.to_owned());
        self.to_the_end(async move {
            let saved = control.lock().await.save(&into).await;
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
        let (host, place, network) = (self.host.clone(), self.place.clone(), network.clone());
        self.to_the_end(
            async move { place.lock().await.set_network(host.network(), network).await },
        )
        .await
    }

    async fn set_resources(&mut self, resources: &Resources) -> Result<(), EngineError> {
        self.host.check_memory(resources)?;
        let (control, resources) = (self.control.clone(), *resources);
        self.to_the_end(async move { control.lock().await.set_resources(resources).await }).await
    }

    async fn bind(&mut self, mount: &HostMount) -> Result<(), EngineError> {
        let (control, mount) = (self.control.clone(), mount.clone());
        self.to_the_end(async move { control.lock().await.bind(mount).await }).await
    }

    async fn unbind(&mut self, slot: u16) -> Result<(), EngineError> {
        let control = self.control.clone();
        self.to_the_end(async move { control.lock().await.unbind(slot).await }).await
    }

    async fn exited(&mut self) -> String {
        // Readable for ever once the process has ended.
        let ended = self.pidfd.readable().await.map(|mut ready| ready.retain_ready());
        match ended {
            Ok(()) => B::why_ended(&self.host, &self.group, &self.record).await,
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

struct Readings<F> {
    group: Group,
    layout: F,
    id: MachineId,
}

impl<F: Files> Meter for Readings<F> {
    /// Those of the host: what a kernel of the guest's own does for want of memory is not seen here.
    fn oom_kills(&self) -> u64 {
        self.group.oom_kills()
    }

    fn usage(&self) -> Usage {
        Usage {
            memory_bytes: self.group.memory_bytes(),
            cpu_micros: self.group.cpu_micros(),
            disk_bytes: self.layout.disk_bytes(&self.id),
        }
    }
}

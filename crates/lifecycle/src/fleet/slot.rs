//! Who answers for a sandbox: its driver, or nobody while it sleeps on disk and nobody wants anything
//! of it. Thousands may sleep there, so each is some data and no task; whoever asks calls a driver.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch::Ref;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use torpor_protocol::{LossReason, State, Status};

use super::{Fleet, Inner};
use crate::driver::{Driver, End, Phase, first_status};
use crate::lease::Gate;
use crate::sandbox::{INBOX, Request, Sandbox};
use crate::store::Record;

/// Sleepers that a starting daemon looks after at the same time; each has a driver meanwhile.
const ADOPTED_AT_ONCE: usize = 32;
/// Longer than this a starting daemon does not wait for its sleepers: others have requests.
const ADOPTED_WITHIN: Duration = Duration::from_secs(10);

/// The place of the driver of a sandbox, who is there only while something wants it.
pub(crate) struct DriverSlot {
    fleet: Weak<Inner>,
    occupant: Mutex<Occupant>,
}

enum Occupant {
    Driver(mpsc::Sender<Request>),
    /// An alarm calls a driver when the sandbox's time is up.
    Nobody(Box<DriverState>, Option<AbortOnDropHandle<()>>),
    /// The sandbox is gone, or the daemon stops.
    Gone,
}

/// What a driver takes over.
pub(crate) struct DriverState {
    pub(crate) record: Record,
    pub(crate) status: watch::Sender<Status>,
    pub(crate) ca_dirty: bool,
    pub(crate) phase: Phase,
}

impl DriverSlot {
    /// The way to the driver, who is called if there is none.
    pub(crate) fn inbox(&self, sandbox: &Sandbox) -> Option<mpsc::Sender<Request>> {
        let mut occupant = self.occupant.lock();
        if let Occupant::Driver(inbox) = &*occupant {
            return Some(inbox.clone());
        }
        let Occupant::Nobody(state, alarm) = std::mem::replace(&mut *occupant, Occupant::Gone)
        else {
            return None;
        };
        drop(alarm);
        let fleet = Fleet { inner: self.fleet.upgrade()? };
        let inbox = fleet.drive(sandbox.clone(), *state);
        *occupant = Occupant::Driver(inbox.clone());
        Some(inbox)
    }

    /// Tells a driver something that is of no interest if there is none, or if it has much to do.
    pub(crate) fn hint(&self, request: Request) {
        if let Occupant::Driver(inbox) = &*self.occupant.lock() {
            let _ = inbox.try_send(request);
        }
    }

    /// A driver goes, unless somebody wants something of it after all. Nobody gets at its inbox
    /// meanwhile, so nobody is left unanswered.
    fn leave(&self, sandbox: &Sandbox, driver: Box<Driver>) -> Result<(), Box<Driver>> {
        let mut occupant = self.occupant.lock();
        if !driver.is_unwanted() {
            return Err(driver);
        }
        let alarm = driver.time_left().map(|left| {
            let sandbox = sandbox.clone();
            AbortOnDropHandle::new(tokio::spawn(async move {
                tokio::time::sleep(left).await;
                drop(sandbox.slot.inbox(&sandbox));
            }))
        });
        *occupant = Occupant::Nobody(Box::new(driver.into_state()), alarm);
        Ok(())
    }

    /// No driver is called any more. Who watches the sandbox hears that nothing comes.
    pub(super) fn close(&self) {
        let mut occupant = self.occupant.lock();
        if let Occupant::Nobody(..) = *occupant {
            *occupant = Occupant::Gone;
        }
    }

    #[cfg(test)]
    pub(crate) fn is_free(&self) -> bool {
        matches!(*self.occupant.lock(), Occupant::Nobody(..))
    }
}

impl Fleet {
    /// One more sandbox, with a driver.
    pub(super) fn launch(&self, record: Record, phase: Phase) -> Sandbox {
        let sandbox = self.admit(record, phase);
        drop(sandbox.slot.inbox(&sandbox));
        sandbox
    }

    /// One more sandbox, whose first driver begins with this phase.
    pub(super) fn admit(&self, record: Record, phase: Phase) -> Sandbox {
        let world = &self.inner.world;
        let first = first_status(&record);
        let (sender, status) = watch::channel(first);
        let (id, last_used_at_ms) = (record.id.clone(), record.last_used_at_ms);
        let state = DriverState { record, status: sender, ca_dirty: false, phase };
        let sandbox = Sandbox {
            id: id.clone(),
            slot: Arc::new(DriverSlot {
                fleet: Arc::downgrade(&self.inner),
                occupant: Mutex::new(Occupant::Nobody(Box::new(state), None)),
            }),
            status,
            gate: Arc::new(Gate::closed(world.clock, last_used_at_ms)),
            delete: CancellationToken::new(),
        };
        self.inner.register.lock().by_id.insert(id, sandbox.clone());
        sandbox
    }

    /// Takes over what an earlier daemon left asleep, some at a time: most have no machine, and no
    /// driver afterwards.
    pub(super) async fn adopt(&self, sleepers: Vec<Sandbox>) {
        let adopting = async move {
            let mut turns = JoinSet::new();
            for sandbox in sleepers {
                if turns.len() >= ADOPTED_AT_ONCE {
                    turns.join_next().await;
                }
                drop(sandbox.slot.inbox(&sandbox));
                let mut status = sandbox.watch();
                turns.spawn(async move {
                    let _ = status.wait_for(|status| status.state != State::Creating).await;
                });
            }
            turns.join_all().await;
        };
        let adopting = self.inner.tasks.spawn(adopting);
        let _ = tokio::time::timeout(ADOPTED_WITHIN, adopting).await;
    }

    fn drive(self, sandbox: Sandbox, state: DriverState) -> mpsc::Sender<Request> {
        let (inbox, requests) = mpsc::channel(INBOX);
        let told = state.status.subscribe();
        let world = Arc::clone(&self.inner.world);
        let (driver, phase) = Driver::new(world, &sandbox, state, requests);
        let tasks = self.inner.tasks.clone();
        self.inner.called.notify_one();
        tasks.spawn(self.supervise(sandbox, told, driver, phase));
        inbox
    }

    /// Runs a driver to its end. A bug in it takes one sandbox only.
    async fn supervise(
        self,
        sandbox: Sandbox,
        mut told: watch::Receiver<Status>,
        mut driver: Box<Driver>,
        mut phase: Phase,
    ) {
        let record = driver.record.clone();
        loop {
            let driven = tokio::spawn(driver.run(phase));
            match self.relay(&mut told, driven).await {
                Ok(End::Unwanted(unwanted)) => match sandbox.slot.leave(&sandbox, unwanted) {
                    Ok(()) => return,
                    Err(wanted) => (driver, phase) = (wanted, Phase::Dormant),
                },
                Ok(End::Over(inbox)) => {
                    let last = sandbox.status();
                    if last.state == State::Terminated {
                        self.inner.register.lock().forget(&sandbox.id, last.spec.name.as_ref());
                    }
                    drop(inbox);
                    return;
                }
                Err(error) => return self.panicked(&sandbox, record, &error).await,
            }
        }
    }

    async fn panicked(&self, sandbox: &Sandbox, known: Record, error: &JoinError) {
        tracing::error!(sandbox = %sandbox.id, %error, "the driver of a sandbox panicked");
        sandbox.gate.close();
        if let Ok(Some(machine)) = self.inner.world.adopt(&known).await {
            let _ = machine.kill().await;
        }
        self.launch(self.recorded(known).await, Phase::Lost(LossReason::DaemonBug));
    }

    /// What the ledger says now of a sandbox whose driver is gone.
    async fn recorded(&self, known: Record) -> Record {
        let found = self.inner.world.ledger.find_sandbox(&known.id).await;
        found.ok().flatten().unwrap_or(known)
    }

    /// Passes the status of one sandbox on to the watchers of all, until its driver ends.
    async fn relay(
        &self,
        status: &mut watch::Receiver<Status>,
        mut driven: JoinHandle<End>,
    ) -> Result<End, JoinError> {
        // Nobody listens: nobody to tell.
        let tell = |now: Ref<'_, Status>| drop(self.inner.events.send(now.clone()));
        let end = loop {
            tokio::select! {
                biased;
                Ok(()) = status.changed() => tell(status.borrow_and_update()),
                end = &mut driven => break end,
            }
        };
        let last = status.borrow_and_update();
        if last.has_changed() {
            tell(last);
        }
        end
    }
}

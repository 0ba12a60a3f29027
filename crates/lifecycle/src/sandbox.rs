//! The handle everybody holds: cheap to clone, asks the driver, who is called if there is none.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;
use torpor_protocol::api::UpdateSandbox;
use torpor_protocol::{GuestPath, Mount, SandboxId, SaveId, SnapshotId, State, Status, VolumeId};

use crate::engine::Usage;
use crate::fleet::DriverSlot;
use crate::lease::{Gate, Lease};
use crate::store::LocalSave;
use crate::{Error, Refusal};

/// Requests that may wait for a driver; more callers wait to be let in.
pub(crate) const INBOX: usize = 256;

/// Volumes and what was made of them.
pub(crate) type Copies = BTreeMap<VolumeId, VolumeId>;

pub(crate) type Reply<T> = oneshot::Sender<Result<T, Error>>;

/// What the driver can be asked. Deletion is a token instead: it must pre-empt a stuck start.
pub(crate) enum Request {
    Awake(Reply<Lease>),
    /// Also if requests do not wake it.
    Wake(Reply<()>),
    /// Answered when it is durable.
    Sleep {
        cold: bool,
        reply: Reply<()>,
    },
    /// If it is awake and unused, it should fall asleep now.
    SuspendEarly,
    /// If it sleeps in memory, it should do so on disk only.
    Demote,
    Update(Box<UpdateSandbox>, Reply<()>),
    /// A save of it as it is now, and copies of its volumes if they shall be somebody's.
    Save {
        copies_for: Option<SandboxId>,
        reply: Reply<(Arc<LocalSave>, Copies)>,
    },
    /// Only of one that is awake.
    Mount(Box<Mount>, Reply<()>),
    Unmount(GuestPath, Reply<()>),
    Restore(Back),
    /// Begin from another save than `of` when it wakes. Answered with whether it does: not unless it
    /// sleeps on disk, and `of` is its save.
    Replace {
        of: SaveId,
        with: Arc<LocalSave>,
        reply: Reply<bool>,
    },
    /// A snapshot was taken of it.
    Parent(SnapshotId, Reply<()>),
    /// What its processes said is wanted in the journal.
    Lines(Reply<()>),
}

impl Request {
    /// Answers without anything being done. `Ok` gives nobody a lease or a save.
    pub(crate) fn answer(self, answer: Result<(), Error>) {
        match self {
            Self::Wake(reply)
            | Self::Sleep { reply, .. }
            | Self::Update(_, reply)
            | Self::Restore(Back { reply, .. })
            | Self::Parent(_, reply)
            | Self::Mount(_, reply)
            | Self::Unmount(_, reply)
            | Self::Lines(reply) => drop(reply.send(answer)),
            Self::Replace { reply, .. } => drop(reply.send(answer.map(|()| false))),
            Self::Awake(reply) => drop(answer.map_err(|error| reply.send(Err(error)))),
            Self::Save { reply, .. } => drop(answer.map_err(|error| reply.send(Err(error)))),
            Self::SuspendEarly | Self::Demote => {}
        }
    }
}

/// To a restore point.
pub(crate) struct Back {
    pub(crate) save: Arc<LocalSave>,
    pub(crate) snapshot: Option<SnapshotId>,
    pub(crate) reply: Reply<()>,
}

#[derive(Clone)]
pub struct Sandbox {
    pub(crate) id: SandboxId,
    pub(crate) slot: Arc<DriverSlot>,
    pub(crate) status: watch::Receiver<Status>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) delete: CancellationToken,
}

impl Sandbox {
    pub fn id(&self) -> &SandboxId {
        &self.id
    }

    pub fn status(&self) -> Status {
        let mut status = self.status.borrow().clone();
        status.last_used_at_ms = self.gate.last_used_ms();
        status
    }

    /// Every change of status; level-triggered, so a slow reader misses steps but never the last.
    pub fn watch(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// A lease if it runs; it is not woken.
    pub fn if_awake(&self) -> Option<Lease> {
        self.gate.enter()
    }

    /// A lease: at once if it runs, else when it does. Everybody else asks [`crate::Fleet::awake`].
    pub(crate) async fn awake(&self) -> Result<Lease, Error> {
        if let Some(lease) = self.if_awake() {
            return Ok(lease);
        }
        self.ask(Request::Awake).await
    }

    /// Why one that failed can't run.
    pub async fn why_failed(&self) -> Option<Error> {
        match self.status.borrow().state {
            State::Failed => {}
            State::Creating | State::Running | State::Asleep | State::Terminated => return None,
        }
        self.awake().await.err()
    }

    /// The right to a connection that does not keep it awake; none if there are too many.
    pub fn keep(&self) -> Option<Keep> {
        self.gate.keep().then(|| Keep { sandbox: self.clone(), token: crate::world::token() })
    }

    /// Wakes it, also if requests do not; returns when it runs.
    pub(crate) async fn wake(&self) -> Result<(), Error> {
        self.ask(Request::Wake).await
    }

    /// Puts it to sleep, whoever uses it; returns when all of it is on disk. `cold`: and when
    /// nothing of it is in memory.
    pub async fn sleep(&self, cold: bool) -> Result<(), Error> {
        self.ask(|reply| Request::Sleep { cold, reply }).await
    }

    /// Without the name: that is the fleet's ([`crate::Fleet::update`]).
    pub(crate) async fn update(&self, update: UpdateSandbox) -> Result<(), Error> {
        self.ask(|reply| Request::Update(Box::new(update), reply)).await
    }

    /// A save of it as it is now, made without waking it, and copies of its volumes of the same moment.
    pub(crate) async fn save(
        &self,
        copies_for: Option<SandboxId>,
    ) -> Result<(Arc<LocalSave>, Copies), Error> {
        self.ask(|reply| Request::Save { copies_for, reply }).await
    }

    /// Gives it a volume; its slot is chosen here. The lease is what keeps it awake.
    pub async fn mount(&self, _awake: &Lease, mount: Mount) -> Result<(), Error> {
        self.ask(|reply| Request::Mount(Box::new(mount), reply)).await
    }

    /// Takes a volume from it, unless somebody inside uses it.
    pub async fn unmount(&self, _awake: &Lease, path: GuestPath) -> Result<(), Error> {
        self.ask(|reply| Request::Unmount(path, reply)).await
    }

    pub(crate) async fn restore(
        &self,
        save: Arc<LocalSave>,
        snapshot: Option<SnapshotId>,
    ) -> Result<(), Error> {
        self.ask(|reply| Request::Restore(Back { save, snapshot, reply })).await
    }

    /// Has it begin from another save than `of` when it wakes; whether it will.
    pub(crate) async fn replace(&self, of: SaveId, with: Arc<LocalSave>) -> Result<bool, Error> {
        self.ask(|reply| Request::Replace { of, with, reply }).await
    }

    /// A snapshot was taken of it, from which the next one comes.
    pub(crate) async fn note_parent(&self, snapshot: SnapshotId) -> Result<(), Error> {
        self.ask(|reply| Request::Parent(snapshot, reply)).await
    }

    /// Returns when what its processes said is in the journal; does not wake it.
    pub(crate) async fn note_lines(&self) -> Result<(), Error> {
        self.ask(Request::Lines).await
    }

    /// Tells it something that needs no answer.
    pub(crate) async fn tell(&self, request: Request) {
        if let Some(inbox) = self.slot.inbox(self) {
            // An error means that it is gone.
            let _ = inbox.send(request).await;
        }
    }

    /// Terminates it and waits until nothing of it is left.
    pub async fn delete(&self) {
        self.delete.cancel();
        if let Some(inbox) = self.slot.inbox(self) {
            inbox.closed().await;
        }
    }

    /// What its machine uses; none without a machine.
    pub fn usage(&self) -> Option<(Usage, u64)> {
        self.gate.meter().map(|meter| (meter.usage(), meter.oom_kills()))
    }

    async fn ask<T>(&self, request: impl FnOnce(Reply<T>) -> Request) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        self.tell(request(reply)).await;
        if let Ok(answer) = answer.await {
            return answer;
        }
        Err(self.over())
    }

    /// Why nobody answered.
    fn over(&self) -> Error {
        if self.status.borrow().state == State::Terminated || self.delete.is_cancelled() {
            return Refusal::Terminated(self.id.to_string()).into();
        }
        Refusal::Stopping.into()
    }
}

/// The right to one connection to the inside that outlives sleep: [`crate::guest::Parked`]. It is no
/// lease. Dropping it makes room for another.
pub struct Keep {
    sandbox: Sandbox,
    token: String,
}

impl Keep {
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// What the agent knows the connection by; nobody else does.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Bytes went over it, which is use.
    pub fn used(&self) {
        self.sandbox.gate.touch();
    }

    /// A lease as soon as it is awake, whoever wakes it; at once if it is. `None`: it will not be any
    /// more. Cancel-safe.
    pub async fn when_awake(&self) -> Option<Lease> {
        let mut status = self.sandbox.status.clone();
        let over = |status: &Status| match status.state {
            State::Failed | State::Terminated => true,
            State::Creating | State::Running | State::Asleep => false,
        };
        tokio::select! {
            biased;
            lease = self.sandbox.gate.enter_when_open() => Some(lease),
            // An error means that it is gone.
            _ = status.wait_for(over) => None,
        }
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        self.sandbox.gate.let_go();
    }
}

impl std::fmt::Debug for Keep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Without the token.
        f.debug_struct("Keep").field("sandbox", &self.sandbox.id).finish_non_exhaustive()
    }
}

//! What becomes of a request: one table, [`admit`], decides it, wherever the sandbox stands, and each
//! request is carried out in one place.

use std::sync::Arc;

use torpor_protocol::{FailureReason, SandboxId};

use super::{Driver, Phase, Sleeper};
use crate::engine::Machine;
use crate::sandbox::{Back, Copies, Request};
use crate::store::LocalSave;
use crate::{Error, Refusal};

/// Where a sandbox stands when it looks at a request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Standing<'a> {
    /// It waits for room.
    Queued,
    Running,
    Warm,
    Cold,
    /// It is cold, and a wake that others asked for too just failed.
    Unwoken,
    Failed(&'a FailureReason),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    /// It is carried out here and now.
    Act,
    /// There is nothing to do, and who asked is told so.
    Settle,
    Refuse,
    /// It waits until the sandbox stands elsewhere.
    Defer,
    /// The sandbox wakes, and who asked waits for it.
    Wake,
}

/// What is done about a request. `auto_wake`: whoever wants it awake wakes it.
pub(crate) fn admit(standing: Standing<'_>, request: &Request, auto_wake: bool) -> Decision {
    use Decision::{Act, Defer, Refuse, Settle, Wake};
    let enter = if auto_wake { Wake } else { Refuse };
    let [queued, running, warm, cold, unwoken, failed] = match request {
        Request::Awake(_) => [Defer, Act, enter, enter, Refuse, Refuse],
        Request::Wake(_) => [Defer, Settle, Wake, Wake, Refuse, Refuse],
        Request::Sleep { .. } => [Defer, Act, Act, Settle, Defer, Refuse],
        Request::SuspendEarly => [Defer, Act, Settle, Settle, Defer, Settle],
        Request::Demote => [Defer, Settle, Act, Settle, Defer, Settle],
        Request::Update(..) => [Act, Act, Act, Act, Defer, Act],
        Request::Save { .. } => [Defer, Act, Act, Act, Defer, Refuse],
        Request::Mount(..) | Request::Unmount(..) => [Defer, Act, Refuse, Refuse, Refuse, Refuse],
        Request::Restore(_) => [Defer, Act, Act, Act, Defer, Act],
        Request::Replace { .. } => [Defer, Settle, Settle, Act, Defer, Settle],
        Request::Parent(..) => [Defer, Act, Act, Act, Defer, Act],
        Request::Lines(_) => [Settle, Act, Settle, Settle, Defer, Settle],
    };
    match standing {
        Standing::Queued => queued,
        Standing::Running => running,
        Standing::Warm => warm,
        Standing::Cold => cold,
        Standing::Unwoken => unwoken,
        Standing::Failed(_) => failed,
    }
}

/// What is alive of a sandbox.
pub(super) enum Body {
    Nothing,
    Running(Box<dyn Machine>),
    Frozen(Sleeper),
}

impl Body {
    fn machine(&mut self) -> Option<&mut Box<dyn Machine>> {
        match self {
            Self::Nothing => None,
            Self::Running(machine) => Some(machine),
            Self::Frozen(sleeper) => Some(&mut sleeper.machine),
        }
    }

    pub(super) fn into_phase(self) -> Phase {
        match self {
            Self::Nothing => Phase::Dormant,
            Self::Running(machine) => Phase::Running(machine),
            Self::Frozen(sleeper) => Phase::Warm(sleeper),
        }
    }
}

impl Driver {
    /// Does about a request what is to be done. `Err`: the sandbox stands elsewhere from now on.
    pub(super) async fn serve(
        &mut self,
        standing: Standing<'_>,
        body: Body,
        request: Request,
    ) -> Result<Body, Phase> {
        match admit(standing, &request, self.record.spec.standby.auto_wake) {
            Decision::Act => return self.act(body, request).await,
            Decision::Wake => return Err(self.rouse(body, request).await),
            Decision::Settle => request.answer(Ok(())),
            Decision::Refuse => request.answer(Err(self.refusal(standing).into())),
            Decision::Defer => self.backlog.push_back(request),
        }
        Ok(body)
    }

    fn refusal(&self, standing: Standing<'_>) -> Refusal {
        let id = self.record.id.to_string();
        let Standing::Failed(reason) = standing else { return Refusal::Asleep(id) };
        Refusal::Failed { id, reason: reason.clone() }
    }

    async fn rouse(&mut self, body: Body, waiter: Request) -> Phase {
        match body {
            Body::Frozen(sleeper) => self.thaw(sleeper, vec![waiter]).await,
            Body::Nothing | Body::Running(_) => Phase::waking(vec![waiter]),
        }
    }

    async fn act(&mut self, mut body: Body, request: Request) -> Result<Body, Phase> {
        match request {
            Request::Awake(_) | Request::Wake(_) => self.let_in(request),
            Request::Sleep { cold, reply } => {
                let (slept, answer) = self.sleep(body, cold).await;
                let _ = reply.send(answer);
                return slept;
            }
            Request::SuspendEarly => {
                let Body::Running(machine) = body else { return Ok(body) };
                return Err(self.suspend_if_idle(machine).await);
            }
            Request::Demote => {
                let Body::Frozen(sleeper) = body else { return Ok(body) };
                return Err(self.leave_memory(sleeper).await);
            }
            Request::Restore(back) => return self.go_back(body, back).await,
            Request::Save { copies_for, reply } => {
                drop(reply.send(self.save(&mut body, copies_for.as_ref()).await));
            }
            Request::Mount(mount, reply) => {
                let Some(machine) = body.machine() else { return Ok(body) };
                drop(reply.send(self.mount(machine, *mount).await));
            }
            Request::Unmount(path, reply) => {
                let Some(machine) = body.machine() else { return Ok(body) };
                drop(reply.send(self.unmount(machine, &path).await));
            }
            Request::Replace { of, with, reply } => {
                let _ = reply.send(self.replace_save(&of, &with).await);
            }
            Request::Update(update, reply) => self.update(update, body.machine(), reply).await,
            Request::Parent(parent, reply) => self.note_parent(parent, reply).await,
            Request::Lines(reply) => {
                self.note_last_lines().await;
                let _ = reply.send(Ok(()));
            }
        }
        Ok(body)
    }

    /// Where it stands then, and what to answer: all of it is on disk, or why not.
    async fn sleep(&mut self, body: Body, cold: bool) -> (Result<Body, Phase>, Result<(), Error>) {
        let mut sleeper = match body {
            Body::Nothing => return (Ok(body), Ok(())),
            Body::Running(machine) => {
                let (phase, answer) = self.put_to_sleep(machine, cold).await;
                return (Err(phase), answer);
            }
            Body::Frozen(sleeper) => sleeper,
        };
        let saved = self.make_durable(&mut sleeper, false).await.map(drop);
        if cold && saved.is_ok() {
            return (Err(self.demote(sleeper).await), saved);
        }
        (Ok(Body::Frozen(sleeper)), saved)
    }

    /// The save, and copies of its volumes: while it sleeps nobody writes to them, and one that runs stands still.
    async fn save(
        &mut self,
        body: &mut Body,
        copies_for: Option<&SandboxId>,
    ) -> Result<(Arc<LocalSave>, Copies), Error> {
        let save = match body {
            Body::Nothing => self.saved().await?,
            Body::Running(machine) => return self.persist_running(machine, copies_for).await,
            Body::Frozen(sleeper) => self.make_durable(sleeper, false).await?,
        };
        let copies = match copies_for {
            Some(made_for) => self.copy_volumes(made_for).await?,
            None => Copies::new(),
        };
        Ok((save, copies))
    }

    async fn go_back(&mut self, body: Body, back: Back) -> Result<Body, Phase> {
        let machine = match body {
            Body::Nothing => return self.restore(None, back).await.map_or(Ok(body), Err),
            Body::Running(machine) => machine,
            Body::Frozen(sleeper) => sleeper.machine,
        };
        let guest = self.gate.guest();
        if let Some(phase) = self.restore(Some(machine), back).await {
            return Err(phase);
        }
        // It could not be recorded: the machine was not touched. Whoever holds a stream must not hear
        // what is said in the next session.
        if let Some(guest) = guest {
            guest.sever().await;
        }
        Err(Phase::Adopting)
    }
}

//! Room for another machine. Running sandboxes and those that sleep in memory take some; cold ones
//! take none. If there is none left, whoever sleeps in memory for longest without use leaves it;
//! only when nobody does, the newcomer is refused.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;
use torpor_lifecycle::engine::EngineError;
use torpor_lifecycle::{self as lifecycle, Lease, Room, Sandbox};
use torpor_protocol::{SandboxRef, State, Status, Tier};

use crate::Service;
use crate::admission::Inadmissible;
use crate::error::Error;
use crate::pressure::Cause;

/// How long a sandbox may take to be saved and leave memory.
const DEMOTE_DEADLINE: Duration = Duration::from_secs(30);
/// How often a wake is tried again after the engine lacked something that others then gave back.
const TRIES: usize = 8;
/// What the smallest machine needs: the engine's own kernel and the agent.
pub const MACHINE_MIB: u64 = 20;

/// The way in for every request to a sandbox: wakes it if it sleeps and there is room.
pub async fn awake(app: &Service, sandbox: &Sandbox) -> Result<Lease, Error> {
    let begun = Instant::now();
    let Some(tier) = sandbox.watch().borrow().tier else { return Ok(sandbox.awake().await?) };
    wake_room(app, sandbox, false).await?;
    let mut woken = sandbox.awake().await;
    for _ in 0..TRIES {
        // Addresses, for one, are given back by those who leave memory.
        let Err(lifecycle::Error::Engine(EngineError::Capacity { .. })) = woken else { break };
        if !demote(app, Cause::Room).await {
            break;
        }
        woken = sandbox.awake().await;
    }
    let lease = woken?;
    app.metrics.waited(tier, begun.elapsed());
    Ok(lease)
}

/// Room for a sandbox that is about to wake: asked to (`asked`), or for a request.
pub(crate) async fn wake_room(app: &Service, sandbox: &Sandbox, asked: bool) -> Result<(), Error> {
    let needed = {
        let status = sandbox.watch();
        let status = status.borrow();
        let wakes = asked || status.spec.standby.auto_wake;
        (wakes && status.tier == Some(Tier::Cold)).then(|| mib(status.saved_bytes))
    };
    if let Some(needed) = needed {
        make(app, 1, needed).await?;
    }
    Ok(())
}

/// Room for so many machines that need so much memory together.
pub(crate) async fn make(
    app: &Service,
    machines: usize,
    needed_mib: u64,
) -> Result<(), Inadmissible> {
    if lack(app, machines, needed_mib).is_none() {
        return Ok(());
    }
    // One at a time: what one makes room for may be enough for the next.
    let _making = app.making_room.lock().await;
    while let Some(lack) = lack(app, machines, needed_mib) {
        if !demote(app, Cause::Room).await {
            return Err(lack);
        }
    }
    Ok(())
}

/// The room of this host, for sandboxes that wait for it. It knows the daemon as soon as there is one.
#[derive(Default)]
pub struct HostRoom(OnceLock<Weak<Service>>);

impl HostRoom {
    pub fn open(&self, app: &Arc<Service>) {
        // Set once: there is one daemon.
        let _ = self.0.set(Arc::downgrade(app));
    }
}

#[async_trait]
impl Room for HostRoom {
    async fn make(&self, needed_mib: u64, entered: Box<dyn FnOnce() + Send>) -> bool {
        let Some(app) = self.0.get().and_then(Weak::upgrade) else { return false };
        let _making = app.making_room.lock().await;
        while lack(&app, 1, needed_mib).is_some() {
            if !demote(&app, Cause::Room).await {
                return false;
            }
        }
        entered();
        true
    }
}

/// What is missing.
fn lack(app: &Service, machines: usize, needed_mib: u64) -> Option<Inadmissible> {
    let allowed = app.settings.sandboxes_max;
    // Usually there are so few that nobody has to be looked at.
    if app.fleet.count() + machines > allowed && present(app) + machines > allowed {
        return Some(Inadmissible::Full(allowed));
    }
    let free_mib = (app.gauge)().available_mib;
    let asked_mib = needed_mib.max(MACHINE_MIB.saturating_mul(machines as u64));
    (free_mib < asked_mib).then_some(Inadmissible::NoMemory { asked_mib, free_mib })
}

/// How many take memory of this host.
fn present(app: &Service) -> usize {
    app.fleet.survey(in_memory).into_iter().filter(|present| *present).count()
}

/// Whether a sandbox takes memory of this host.
fn in_memory(status: &Status) -> bool {
    match status.state {
        State::Creating => status.queued_until_ms.is_none(),
        State::Running => true,
        State::Asleep => status.tier == Some(Tier::Warm),
        State::Failed | State::Terminated => false,
    }
}

/// Tells the sandbox that sleeps in memory and was unused longest to leave it, and waits until it
/// did. `false`: there is none, or it can't.
pub(crate) async fn demote(app: &Service, cause: Cause) -> bool {
    let Some(id) = app.fleet.demote_least_used().await else { return false };
    app.metrics.demoted(cause);
    let Ok(sandbox) = app.fleet.find(&SandboxRef::Id(id.clone())) else { return true };
    let mut status = sandbox.watch();
    let left = status.wait_for(|status| status.tier != Some(Tier::Warm));
    match tokio::time::timeout(DEMOTE_DEADLINE, left).await {
        Ok(_) => true,
        Err(_) => {
            tracing::warn!(sandbox = %id, "it did not leave memory within {DEMOTE_DEADLINE:?}");
            false
        }
    }
}

pub(crate) fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1024 * 1024)
}

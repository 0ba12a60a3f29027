//! Keeps as many instances of each revision as there should be: starts, replaces, keeps awake and stops them. One
//! task per service.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, interval, timeout};
use torpor_lifecycle::{Lease, Sandbox, chain, wake_deadline};
use torpor_protocol::hosting::{INSTANCE_LABEL, RevisionState};
use torpor_protocol::{ErrorCode, SandboxId, SandboxRef, ServiceId, State};

use super::check::{self, Patience};
use super::group::{Group, Health, Role};
use super::hosted::Hosted;
use super::{admit, calls, deploy, instances, invocations, start};
use crate::Service;

/// How often each service is looked at when nothing rings.
const LOOK: Duration = Duration::from_secs(1);
/// How often it is looked for instances that are nobody's.
const SWEEP: Duration = Duration::from_secs(30);
/// How long requests of a revision that lost its traffic may go on: an answer of a language model may take
/// minutes, and a WebSocket that lasts for hours is no reason to keep a machine.
const DRAIN: Duration = Duration::from_secs(600);

/// Looks after all services until the daemon stops.
pub async fn look_after(app: Arc<Service>) {
    adopt(&app);
    for hosted in app.hosting.all() {
        keep(&app, &hosted);
        if let Err(error) = calls::readdress(&app, &hosted).await {
            tracing::warn!(service = %hosted.name(), error = chain(&error), "no address");
        }
        let unsettled: Vec<_> = hosted.see(|known| {
            let revisions = known.revisions.values();
            revisions.filter(|it| !it.state.is_settled()).map(|it| it.number).collect()
        });
        unsettled.into_iter().for_each(|number| deploy::set_off(&app, &hosted, number));
    }
    let mut ticks = interval(SWEEP);
    loop {
        ticks.tick().await;
        sweep(&app).await;
        invocations::prune(&app).await;
    }
}

/// What earlier daemons left. Who runs is checked before the next request; who sleeps, when one wakes it.
fn adopt(app: &Arc<Service>) {
    for (service, revision, id) in instances(&app.fleet) {
        let Some(hosted) = app.hosting.by_id(&service) else { continue };
        let settled = hosted.revision(revision).map(|revision| revision.state);
        let Ok(sandbox) = app.fleet.find(&SandboxRef::Id(id.clone())) else { continue };
        match settled {
            Ok(RevisionState::Ready) => {}
            // A deploy goes on with it, or it is swept away.
            Ok(
                RevisionState::Starting
                | RevisionState::Checking
                | RevisionState::Saving
                | RevisionState::Failed,
            )
            | Err(_) => continue,
        }
        let state = sandbox.watch().borrow().state;
        let now = Instant::now();
        let health = match state {
            State::Asleep => Health::Unchecked,
            State::Creating | State::Running => Health::Unwell { since: now },
            State::Failed | State::Terminated => continue,
        };
        hosted.with_group(revision, |group| group.add(id.clone(), health, now));
        if health != Health::Unchecked {
            recheck(app, &hosted, revision, &sandbox);
        }
    }
}

/// Ends sandboxes that have the labels of instances and are none.
async fn sweep(app: &Arc<Service>) {
    for (service, revision, id) in instances(&app.fleet) {
        let claimed = app.hosting.by_id(&service).is_some_and(|it| it.claims(&id, revision));
        if claimed {
            continue;
        }
        let Ok(sandbox) = app.fleet.find(&SandboxRef::Id(id)) else { continue };
        if is_ours(app, &sandbox, &service, revision).await {
            tracing::info!(sandbox = %sandbox.id(), %service, revision, "instance of nothing, removed");
            sandbox.delete().await;
        }
    }
}

/// Whether it was made as an instance, whatever its labels say.
async fn is_ours(app: &Service, sandbox: &Sandbox, service: &ServiceId, revision: u32) -> bool {
    let name = sandbox.watch().borrow().spec.labels.get(INSTANCE_LABEL).cloned();
    let Some(name) = name else { return false };
    let key = admit::key(service, revision, &name);
    // Forks of one request are counted, and this is the only one.
    for key in [format!("{key}-0"), key] {
        // What can't be read now is swept next time.
        if let Ok(Some(made)) = app.ledger.made_by(&key).await {
            return made == *sandbox.id();
        }
    }
    false
}

/// Looks after one service from now on.
pub(super) fn keep(app: &Arc<Service>, hosted: &Arc<Hosted>) {
    let (app, hosted) = (Arc::clone(app), Arc::clone(hosted));
    let tasks = app.tasks.clone();
    tasks.spawn(async move {
        let mut keeper = Keeper { app: Arc::clone(&app), hosted, awake: HashMap::new() };
        tokio::select! {
            () = keeper.run() => {}
            () = app.stopping.cancelled() => {}
        }
    });
}

struct Keeper {
    app: Arc<Service>,
    hosted: Arc<Hosted>,
    /// Of instances that shall not sleep.
    awake: HashMap<SandboxId, Lease>,
}

impl Keeper {
    async fn run(&mut self) {
        loop {
            self.look();
            tokio::select! {
                () = self.hosted.changed.notified() => {}
                () = tokio::time::sleep(LOOK) => {}
                () = self.hosted.gone.cancelled() => return,
            }
        }
    }

    fn look(&mut self) {
        let mut numbers: BTreeSet<_> =
            self.hosted.see(|known| known.revisions.keys().copied().collect());
        numbers
            .extend(self.hosted.with_groups(|groups| groups.keys().copied().collect::<Vec<_>>()));
        let mut awake = HashMap::new();
        for number in numbers {
            if let Some(role) = self.hosted.role(number) {
                self.replace_lost(number);
                self.resize(number, role);
                self.stay_awake(number, role, &mut awake);
            }
        }
        // Whoever need not stay awake is let go of.
        self.awake = awake;
        self.hosted.with_groups(|groups| {
            groups.retain(|number, group| {
                group.starts() || !group.slots().is_empty() || self.hosted.revision(*number).is_ok()
            });
        });
    }

    /// Instances that can't run any more, or are gone.
    fn replace_lost(&self, number: u32) {
        let ids = self.hosted.with_group(number, |group| ids(group));
        for id in ids {
            let sandbox = self.app.fleet.find(&SandboxRef::Id(id.clone())).ok();
            let state = sandbox.as_ref().map(|sandbox| sandbox.watch().borrow().state);
            match state {
                Some(State::Creating | State::Running | State::Asleep) => continue,
                Some(State::Failed | State::Terminated) | None => {}
            }
            let service = self.hosted.name();
            tracing::warn!(%service, revision = number, sandbox = %id, "instance lost");
            self.hosted.with_group(number, |group| group.lost(&id, Instant::now()));
            sandbox.into_iter().for_each(|sandbox| self.stop(sandbox));
        }
    }

    fn resize(&self, number: u32, role: Role) {
        let (scale, now) = (self.hosted.row().scale, Instant::now());
        let (begun, surplus) = self.hosted.with_group(number, |group| {
            (group.begin_starts(role, &scale, now), group.take_surplus(role, &scale, DRAIN, now))
        });
        (0..begun).for_each(|_| self.start(number));
        for id in surplus {
            if let Ok(sandbox) = self.app.fleet.find(&SandboxRef::Id(id)) {
                self.stop(sandbox);
            }
        }
    }

    fn start(&self, number: u32) {
        let (app, hosted) = (Arc::clone(&self.app), Arc::clone(&self.hosted));
        self.app.tasks.spawn(async move {
            let work = async {
                match hosted.revision(number) {
                    Ok(revision) => start::instance(&app, &hosted, &revision).await,
                    Err(error) => Err(error),
                }
            };
            let made = tokio::select! {
                made = work => made,
                () = app.stopping.cancelled() => return,
            };
            match made {
                Ok(sandbox) if hosted.gone.is_cancelled() => sandbox.delete().await,
                Ok(sandbox) => {
                    let id = sandbox.id().clone();
                    hosted.with_group(number, |group| group.arrived(id, Instant::now()));
                }
                Err(error) => {
                    let (service, error) = (hosted.name(), chain(&error));
                    tracing::warn!(%service, revision = number, error, "instance did not start");
                    hosted.with_group(number, |group| group.failed_to_start(Instant::now()));
                }
            }
            hosted.changed.notify_one();
        });
    }

    fn stop(&self, sandbox: Sandbox) {
        self.app.tasks.spawn(async move { sandbox.delete().await });
    }

    /// The oldest `min` instances of a revision with traffic.
    fn stay_awake(&mut self, number: u32, role: Role, awake: &mut HashMap<SandboxId, Lease>) {
        let min = match role {
            Role::Serving => self.hosted.row().scale.min as usize,
            Role::Tagged | Role::Retired => 0,
        };
        let ids = self.hosted.with_group(number, |group| ids(group));
        for id in ids.into_iter().take(min) {
            let Ok(sandbox) = self.app.fleet.find(&SandboxRef::Id(id.clone())) else { continue };
            let lease =
                self.awake.remove(&id).filter(|_| sandbox.watch().borrow().state == State::Running);
            match lease.or_else(|| sandbox.if_awake()) {
                Some(lease) => drop(awake.insert(id, lease)),
                None => self.wake(sandbox),
            }
        }
    }

    /// It is held from the next look on.
    fn wake(&self, sandbox: Sandbox) {
        let (app, hosted) = (Arc::clone(&self.app), Arc::clone(&self.hosted));
        self.app.tasks.spawn(async move {
            let woken = tokio::select! {
                woken = app.fleet.awake(&sandbox, wake_deadline()) => woken,
                () = app.stopping.cancelled() => return,
            };
            match woken {
                Ok(_) => hosted.changed.notify_one(),
                Err(error) => {
                    tracing::debug!(sandbox = %sandbox.id(), %error, "instance did not wake");
                }
            }
        });
    }
}

fn ids(group: &Group) -> Vec<SandboxId> {
    group.slots().iter().map(|slot| slot.id.clone()).collect()
}

/// It did not answer, or did not wake: it gets no requests until it passed a check again; if it does not, another
/// one takes its place.
pub fn report_unhealthy(app: &Arc<Service>, hosted: &Arc<Hosted>, revision: u32, id: &SandboxId) {
    let was_ready = hosted.with_group(revision, |group| group.suspect(id, Instant::now()));
    let Ok(sandbox) = app.fleet.find(&SandboxRef::Id(id.clone())) else { return };
    if was_ready {
        recheck(app, hosted, revision, &sandbox);
    }
}

fn recheck(app: &Arc<Service>, hosted: &Arc<Hosted>, number: u32, sandbox: &Sandbox) {
    let (app, hosted, sandbox) = (Arc::clone(app), Arc::clone(hosted), sandbox.clone());
    let tasks = app.tasks.clone();
    tasks.spawn(async move {
        let Ok(revision) = hosted.revision(number) else { return };
        let limit = Duration::from_millis(revision.health.timeout_ms) + check::SLACK;
        let check = async {
            // Who began it may have been killed before its program ran.
            start::run(&app, &sandbox, &revision).await?;
            check::until_healthy(&app, &sandbox, &revision, Patience::Restarts).await
        };
        let checked = tokio::select! {
            checked = timeout(limit, check) => checked,
            () = app.stopping.cancelled() => return,
        };
        let well = match checked {
            Ok(Ok(())) => true,
            // The host has no room to wake it: that says nothing of it, and the next request asks again.
            Ok(Err(error)) => error.code() == ErrorCode::CapacityReached,
            Err(_) => false,
        };
        if well {
            return hosted.with_group(number, |group| group.is_well(sandbox.id()));
        }
        let service = hosted.name();
        tracing::warn!(%service, revision = number, sandbox = %sandbox.id(), "instance unhealthy");
        if hosted.with_group(number, |group| group.lost(sandbox.id(), Instant::now())) {
            sandbox.delete().await;
        }
        hosted.changed.notify_one();
    });
}

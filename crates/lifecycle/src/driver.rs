//! The task that owns one sandbox: one function per phase, its return value is the next phase.
//!
//! A phase owns what is alive in it, so code without a machine can't talk to one. Requests that come
//! while a transition is under way wait in the inbox, so a thousand callers cause one boot. Deletion
//! is a token that every phase watches, so that a stuck boot can be deleted.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use torpor_protocol::api::UpdateSandbox;
use torpor_protocol::guest::Identity;
use torpor_protocol::{State, Status};

use crate::clock::Clock;
use crate::engine::{BootPlan, Channel, Engine, EngineError, Machine};
use crate::error::chain;
use crate::guest::{Guest, GuestError};
use crate::lease::{Door, Lease};
use crate::sandbox::{Reply, Request};
use crate::steps::Steps;
use crate::store::{Images, Ledger, Record, Rest, RootImage};
use crate::{Error, Refusal};

/// How long a machine may take to boot before it counts as failed; boots queue for processors.
const BOOT_DEADLINE: Duration = Duration::from_secs(120);
/// How long a booted machine's agent may take to say hello.
const HELLO_DEADLINE: Duration = Duration::from_secs(30);
/// How often the ledger learns when a sandbox was last used: what a crash may forget of it.
const LAST_USE_EVERY: Duration = Duration::from_secs(60);

/// What drivers share.
pub(crate) struct World {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) images: Arc<dyn Images>,
    pub(crate) clock: Clock,
    /// The daemon stops: drivers let go of their machines and end.
    pub(crate) stopping: CancellationToken,
}

pub(crate) struct Driver {
    pub(crate) world: Arc<World>,
    pub(crate) record: Record,
    pub(crate) inbox: mpsc::Receiver<Request>,
    pub(crate) status: watch::Sender<Status>,
    pub(crate) door: Arc<Door>,
    pub(crate) delete: CancellationToken,
}

/// Where the sandbox stands, with what is alive there.
pub(crate) enum Phase {
    Creating,
    Adopting,
    Running(Box<dyn Machine>),
    Failed {
        reason: String,
    },
    Deleting {
        machine: Option<Box<dyn Machine>>,
        reason: Option<String>,
    },
    Deleted {
        reason: Option<String>,
    },
    /// The daemon stops; the machine, if any, goes on without it.
    Left,
}

/// Everything that can happen to a sandbox that has no transition under way.
enum Event {
    Asked(Request),
    Exited(String),
    AgentGone,
    Expired(&'static str),
    NoteLastUse,
    Delete,
    Stop,
}

impl Driver {
    /// Lives until the sandbox is gone or the daemon stops. Gives back the inbox: its closing tells
    /// whoever waits for the deletion that all is done, so it must come last.
    pub(crate) async fn run(mut self, mut phase: Phase) -> mpsc::Receiver<Request> {
        loop {
            phase = match phase {
                Phase::Creating => self.creating().await,
                Phase::Adopting => self.adopting().await,
                Phase::Running(machine) => self.running(machine).await,
                Phase::Failed { reason } => self.failed(reason).await,
                Phase::Deleting { machine, reason } => self.deleting(machine, reason).await,
                Phase::Deleted { reason } => {
                    self.publish(State::Terminated, reason);
                    return self.inbox;
                }
                Phase::Left => return self.inbox,
            };
        }
    }

    // === Phases ===

    async fn creating(&mut self) -> Phase {
        self.publish(State::Creating, None);
        let (delete, stopping) = (self.delete.clone(), self.world.stopping.clone());
        let booted = tokio::select! {
            biased;
            () = delete.cancelled() => return Phase::Deleting { machine: None, reason: None },
            // An unfinished boot leaves nothing; the ledger says `Created`, so it starts over.
            () = stopping.cancelled() => return Phase::Left,
            booted = self.boot() => booted,
        };
        match booted {
            Ok((machine, guest)) => self.opened(machine, guest),
            Err(error) => self.fail(chain(&error)).await,
        }
    }

    /// Takes over what an earlier daemon left running.
    async fn adopting(&mut self) -> Phase {
        let machine = match self.world.engine.adopt(&self.record.id).await {
            Ok(Some(machine)) => machine,
            Ok(None) if self.record.rest == Rest::Created => return Phase::Creating,
            Ok(None) => {
                let reason = "its machine was lost while the daemon was away; files and memory \
                              are gone";
                return self.fail(reason.to_owned()).await;
            }
            Err(error) => return self.fail(chain(&error)).await,
        };
        match Guest::connect(machine.channel(), HELLO_DEADLINE).await {
            Ok(guest) => self.opened(machine, guest),
            Err(error) => {
                self.discard(machine).await;
                self.fail(chain(&error)).await
            }
        }
    }

    async fn running(&mut self, mut machine: Box<dyn Machine>) -> Phase {
        loop {
            match self.next_event(Some(&mut machine)).await {
                Event::Asked(Request::Awake(reply)) => self.admit(reply),
                Event::Asked(Request::Update(update, reply)) => self.update(update, reply).await,
                Event::NoteLastUse => self.note_last_use().await,
                Event::Exited(reason) => {
                    self.door.close();
                    self.discard(machine).await;
                    return self.fail(reason).await;
                }
                Event::AgentGone => {
                    self.door.close();
                    let reason = self.reason_of_silence(&mut machine).await;
                    self.discard(machine).await;
                    return self.fail(reason).await;
                }
                Event::Expired(reason) => {
                    let reason = Some(reason.to_owned());
                    return Phase::Deleting { machine: Some(machine), reason };
                }
                Event::Delete => {
                    return Phase::Deleting { machine: Some(machine), reason: None };
                }
                Event::Stop => {
                    self.note_last_use().await;
                    self.door.close();
                    return Phase::Left;
                }
            }
        }
    }

    async fn failed(&mut self, reason: String) -> Phase {
        self.publish(State::Failed, Some(reason.clone()));
        let refusal = Refusal::Failed { id: self.record.id.to_string(), reason };
        loop {
            match self.next_event(None).await {
                Event::Asked(Request::Awake(reply)) => {
                    let _ = reply.send(Err(refusal.clone().into()));
                }
                Event::Asked(Request::Update(update, reply)) => self.update(update, reply).await,
                Event::Expired(reason) => {
                    return Phase::Deleting { machine: None, reason: Some(reason.to_owned()) };
                }
                Event::Delete => return Phase::Deleting { machine: None, reason: None },
                Event::Stop => return Phase::Left,
                Event::NoteLastUse | Event::Exited(_) | Event::AgentGone => {}
            }
        }
    }

    /// Forget, then kill: a crash in between leaves a machine that nobody knows, which the next
    /// start sweeps away.
    async fn deleting(&mut self, machine: Option<Box<dyn Machine>>, why: Option<String>) -> Phase {
        self.door.close();
        while let Err(error) = self.world.ledger.erase(&self.record.id).await {
            tracing::error!(sandbox = %self.record.id, error = chain(&error), "could not erase");
            tokio::time::sleep(Duration::from_secs(1)).await;
            if self.world.stopping.is_cancelled() {
                return Phase::Left;
            }
        }
        if let Some(machine) = machine {
            self.discard(machine).await;
        }
        Phase::Deleted { reason: why }
    }

    // === Transitions ===

    /// Boots a machine, waits for its agent and tells it who it is.
    async fn boot(&mut self) -> Result<(Box<dyn Machine>, Guest), Error> {
        let mut steps = Steps::start();
        let image = self.world.images.root(&self.record.spec.image_id).await?;
        steps.end("image");
        let plan = BootPlan {
            id: self.record.id.clone(),
            spec: self.record.spec.clone(),
            root: image.path.clone(),
        };
        let boot = tokio::time::timeout(BOOT_DEADLINE, self.world.engine.boot(plan));
        let machine = boot.await.map_err(|_| EngineError::Failed {
            action: "boot the machine".to_owned(),
            source: format!("it took more than {BOOT_DEADLINE:?}").into(),
        })??;
        steps.extend("boot", machine.start_steps());
        // From now on the machine may be written to, so the ledger must not call it unborn.
        let running = Record { rest: Rest::Running, ..self.record.clone() };
        let (greeted, recorded) =
            tokio::join!(self.greet(machine.channel(), &image), self.world.ledger.record(&running));
        self.record = running;
        steps.end("hello");
        self.status.send_modify(|status| status.start_steps = steps.done);
        match (greeted, recorded) {
            (Ok(guest), Ok(())) => Ok((machine, guest)),
            (Err(error), _) => {
                self.discard(machine).await;
                Err(error.into())
            }
            (Ok(_), Err(error)) => {
                self.discard(machine).await;
                Err(error.into())
            }
        }
    }

    async fn greet(
        &self,
        channel: Arc<dyn Channel>,
        image: &RootImage,
    ) -> Result<Guest, GuestError> {
        let guest = Guest::connect(channel, HELLO_DEADLINE).await?;
        guest.identify(self.identity(image)).await?;
        Ok(guest)
    }

    fn identity(&self, image: &RootImage) -> Identity {
        let spec = &self.record.spec;
        let mut env: std::collections::BTreeMap<_, _> = image.env.iter().cloned().collect();
        env.extend(spec.env.clone());
        let hostname = spec.name.as_ref().map_or(self.record.id.as_str(), |name| name.as_str());
        Identity {
            hostname: hostname.to_owned(),
            nameservers: self.world.engine.about().nameserver.iter().cloned().collect(),
            env,
            user: image.user.clone(),
            workdir: image.workdir.clone(),
            entropy: entropy(),
            boot_id: None,
        }
    }

    /// The machine answered: everybody may come in.
    fn opened(&mut self, machine: Box<dyn Machine>, guest: Guest) -> Phase {
        self.door.open(guest, machine.meter());
        self.publish(State::Running, None);
        Phase::Running(machine)
    }

    async fn fail(&mut self, reason: String) -> Phase {
        tracing::warn!(sandbox = %self.record.id, reason, "sandbox failed");
        self.record.rest = Rest::Failed { reason: reason.clone() };
        if let Err(error) = self.world.ledger.record(&self.record).await {
            tracing::error!(sandbox = %self.record.id, error = chain(&error), "could not record");
        }
        Phase::Failed { reason }
    }

    async fn discard(&mut self, machine: Box<dyn Machine>) {
        if let Err(error) = machine.kill().await {
            tracing::error!(sandbox = %self.record.id, error = chain(&error), "kill left traces");
        }
    }

    async fn update(&mut self, update: UpdateSandbox, reply: Reply<()>) {
        let UpdateSandbox { labels, lifetime, standby } = update;
        let mut changed = self.record.clone();
        changed.spec.labels = labels.unwrap_or(changed.spec.labels);
        changed.spec.lifetime = lifetime.unwrap_or(changed.spec.lifetime);
        changed.spec.standby = standby.unwrap_or_default().over(changed.spec.standby);
        let recorded = self.world.ledger.record(&changed).await;
        if recorded.is_ok() {
            self.record = changed;
            let (state, reason) = {
                let status = self.status.borrow();
                (status.state, status.reason.clone())
            };
            self.publish(state, reason);
        }
        let _ = reply.send(recorded.map_err(Error::from));
    }

    async fn note_last_use(&mut self) {
        let last_used_ms = self.door.last_used_ms();
        if last_used_ms == self.record.last_used_at_ms {
            return;
        }
        self.record.last_used_at_ms = last_used_ms;
        if let Err(error) = self.world.ledger.record(&self.record).await {
            tracing::warn!(sandbox = %self.record.id, error = chain(&error), "could not record");
        }
    }

    // === What happens next ===

    async fn next_event(&mut self, machine: Option<&mut Box<dyn Machine>>) -> Event {
        let exited = async {
            match machine {
                Some(machine) => machine.exited().await,
                None => std::future::pending().await,
            }
        };
        let agent_gone = async {
            match self.door.guest() {
                Some(guest) => guest.gone().await,
                None => std::future::pending().await,
            }
        };
        let expiry = expiry(&self.record, &self.world.clock, &self.door);
        tokio::select! {
            biased;
            () = self.delete.cancelled() => Event::Delete,
            () = self.world.stopping.cancelled() => Event::Stop,
            reason = exited => Event::Exited(reason),
            () = agent_gone => Event::AgentGone,
            Some(request) = self.inbox.recv() => Event::Asked(request),
            reason = expiry => Event::Expired(reason),
            () = tokio::time::sleep(LAST_USE_EVERY) => Event::NoteLastUse,
        }
    }

    /// The agent's channel broke: because the machine is dying, or because the agent misbehaves.
    async fn reason_of_silence(&self, machine: &mut Box<dyn Machine>) -> String {
        let exited = tokio::time::timeout(Duration::from_secs(2), machine.exited());
        exited.await.unwrap_or_else(|_| "its agent broke off the channel".to_owned())
    }

    fn admit(&self, reply: Reply<Lease>) {
        match self.door.enter() {
            Some(lease) => {
                let _ = reply.send(Ok(lease));
            }
            None => {
                let _ = reply.send(Err(Refusal::Terminated(self.record.id.to_string()).into()));
            }
        }
    }

    fn publish(&self, state: State, reason: Option<String>) {
        let id = &self.record.id;
        tracing::info!(sandbox = %id, state = state.as_str(), reason, "sandbox status");
        self.status.send_modify(|status| {
            status.spec = self.record.spec.clone();
            status.state = state;
            status.reason = reason;
            status.generation += 1;
        });
    }
}

/// Resolves with the reason when the sandbox's time is up.
async fn expiry(record: &Record, clock: &Clock, door: &Door) -> &'static str {
    let lifetime = record.spec.lifetime;
    let by_age = lifetime
        .max_age_secs
        .map(|secs| record.created_at_ms.saturating_add(secs.saturating_mul(1000)));
    let at = async |at_ms: Option<u64>| match at_ms {
        Some(at_ms) => tokio::time::sleep(clock.until(at_ms)).await,
        None => std::future::pending().await,
    };
    let idle = async {
        match lifetime.expire_idle_secs {
            Some(secs) => door.idle_for(Duration::from_secs(secs)).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = at(by_age) => "it reached its maximum age",
        () = at(lifetime.expire_at.map(|secs| secs.saturating_mul(1000))) => "it reached its date",
        () = idle => "nobody used it for its idle time",
    }
}

fn entropy() -> String {
    let mut bytes = [0u8; 32];
    getrandom::fill(&mut bytes).expect("the system has entropy");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The first status of a sandbox.
pub(crate) fn first_status(record: &Record, engine: &str) -> Status {
    Status {
        id: record.id.clone(),
        spec: record.spec.clone(),
        state: State::Creating,
        reason: None,
        generation: 0,
        created_at_ms: record.created_at_ms,
        last_used_at_ms: record.last_used_at_ms,
        engine: engine.to_owned(),
        tier: None,
        durable: false,
        wakes: record.facts.wakes,
        recovered_from_ms: record.facts.recovered_from_ms,
        parent: record.facts.parent.clone(),
        start_steps: Vec::new(),
    }
}

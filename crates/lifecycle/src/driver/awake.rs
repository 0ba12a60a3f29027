//! While it runs, and how it falls asleep.

use std::time::Duration;

use tokio::time::Instant;
use torpor_protocol::LossReason;

use super::request::{Body, Standing};
use super::{Driver, Event, Phase, Sleeper};
use crate::engine::Machine;
use crate::error::chain;
use crate::world::{ShutdownMode, discard, run_hook};
use crate::{Error, Refusal, fault};

/// How long the agent may take to say whether something keeps the sandbox awake.
const ASK_MAX: Duration = Duration::from_secs(2);
/// How long an order to sleep waits for those whom the wake before it was for: who waited is served. More
/// than a first answer takes on a busy host.
const SERVE_FIRST: Duration = Duration::from_millis(500);
/// How long a dying machine may take to say why.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What became of an attempt to fall asleep.
pub(super) enum Slept {
    Yes(Sleeper),
    /// It runs as before.
    No(Box<dyn Machine>, Option<Error>),
}

impl Driver {
    /// After every request it is entered anew, so it begins with nothing that others see.
    pub(super) async fn running(&mut self, mut machine: Box<dyn Machine>) -> Phase {
        loop {
            let idle_after = self.idle_after();
            match self.next_event(Some(&mut machine), idle_after).await {
                Event::Asked(request) => {
                    let served = self.serve(Standing::Running, Body::Running(machine), request);
                    return served.await.map_or_else(|phase| phase, Body::into_phase);
                }
                Event::NoteLastUse => {
                    self.note_last_use().await;
                    self.note_last_lines().await;
                }
                Event::Idle => return self.suspend_if_idle(machine).await,
                Event::Exited(reason) => {
                    self.gate.close();
                    discard(&self.record.id, machine).await;
                    return Phase::Lost(LossReason::Exited(reason));
                }
                Event::AgentGone => {
                    self.gate.close();
                    let loss = why_silent(&mut machine).await;
                    discard(&self.record.id, machine).await;
                    return Phase::Lost(loss);
                }
                Event::Expired(reason) => {
                    return Phase::Deleting { machine: Some(machine), reason: Some(reason) };
                }
                Event::Delete => return Phase::Deleting { machine: Some(machine), reason: None },
                Event::Stop => return self.stopping_awake(machine).await,
            }
        }
    }

    /// Nobody uses it: it falls asleep, unless something inside wants it awake.
    pub(super) async fn suspend_if_idle(&mut self, machine: Box<dyn Machine>) -> Phase {
        // Both ask the agent: together they take the time of one.
        let (kept_awake, ()) = tokio::join!(self.kept_awake(), self.note_last_lines());
        let slept = if kept_awake {
            Slept::No(machine, None)
        } else {
            self.fall_asleep(machine, false).await
        };
        match slept {
            Slept::Yes(sleeper) => Phase::Warm(sleeper),
            Slept::No(still, _) => {
                // Not again at once.
                self.gate.touch();
                Phase::Running(still)
            }
        }
    }

    /// How long nobody may have used it until it counts as idle; `None`: it never does.
    fn idle_after(&self) -> Option<Duration> {
        let idle_after = Duration::from_millis(self.record.spec.standby.idle_after_ms);
        let can = self.world.abilities(&self.record.spec).warm_standby;
        (can && !idle_after.is_zero()).then_some(idle_after)
    }

    /// A process inside wants it to stay awake, which counts as use. Who does not answer is left
    /// alone.
    async fn kept_awake(&self) -> bool {
        let Some(guest) = self.gate.guest() else { return false };
        match tokio::time::timeout(ASK_MAX, guest.health()).await {
            Ok(Ok(health)) => health.keeping_awake > 0,
            Ok(Err(_)) | Err(_) => true,
        }
    }

    /// Freezes it. Unless `forced`, whoever has a lease by then keeps it awake.
    pub(super) async fn fall_asleep(&mut self, machine: Box<dyn Machine>, forced: bool) -> Slept {
        let mut machine = machine;
        let Some(guest) = self.gate.guest() else {
            return Slept::No(machine, Some(Refusal::Stopping.into()));
        };
        let hooks = self.record.spec.standby.hooks.clone();
        let command = &hooks.before_sleep;
        run_hook(&self.record.id, &guest, "before_sleep", command, hooks.grace_ms).await;
        if forced {
            self.note_lines(&guest).await;
            self.gate.close();
        } else if !self.gate.close_if_vacant() {
            return Slept::No(machine, None);
        }
        let held = self.held(&guest).await;
        let quiesced = async {
            let processes = self.world.quiesce(&self.record.spec, &guest).await?;
            machine.pause().await?;
            Ok::<_, Error>(processes)
        };
        let processes = match quiesced.await {
            Ok(processes) => processes,
            Err(error) => {
                tracing::warn!(sandbox = %self.record.id, error = chain(&error), "could not pause");
                // Whether it got so far or not; if it can't be told, its agent is gone, which is seen.
                let _ = self.world.unquiesce(&self.record.spec, &guest).await;
                self.gate.open(guest, machine.meter());
                return Slept::No(machine, Some(error));
            }
        };
        guest.sever().await;
        fault::point("sleep.frozen");
        let since = Instant::now();
        let save_at = since + self.world.policy.persist_after;
        Slept::Yes(Sleeper { machine, durable: false, since, save_at, processes, held })
    }

    /// Asked to sleep, with all of it on disk: where it stands then, and what to answer. If that fails it
    /// runs as before.
    pub(super) async fn put_to_sleep(
        &mut self,
        machine: Box<dyn Machine>,
        cold: bool,
    ) -> (Phase, Result<(), Error>) {
        let served = self.gate.idle_for(Duration::ZERO);
        let _ = tokio::time::timeout_at(self.entered + SERVE_FIRST, served).await;
        let mut sleeper = match self.fall_asleep(machine, true).await {
            Slept::Yes(sleeper) => sleeper,
            Slept::No(machine, error) => {
                let error = error.unwrap_or_else(|| Refusal::Stopping.into());
                return (Phase::Running(machine), Err(error));
            }
        };
        match self.make_durable(&mut sleeper, false).await {
            Ok(_) if cold => (self.demote(sleeper).await, Ok(())),
            Ok(_) => (Phase::Warm(sleeper), Ok(())),
            // Who is told of it finds it running.
            Err(error) => (self.thaw(sleeper, Vec::new()).await, Err(error)),
        }
    }

    /// The daemon stops.
    async fn stopping_awake(&mut self, machine: Box<dyn Machine>) -> Phase {
        self.note_last_use().await;
        if *self.world.shutdown_mode.lock() == ShutdownMode::Running {
            self.gate.close();
            return Phase::Left;
        }
        match self.fall_asleep(machine, true).await {
            Slept::Yes(sleeper) => self.stopping_asleep(sleeper, true).await,
            // It goes on; the next daemon takes it over.
            Slept::No(..) => Phase::Left,
        }
    }
}

/// The agent's channel broke: because the machine is dying, or because the agent misbehaves.
async fn why_silent(machine: &mut Box<dyn Machine>) -> LossReason {
    let exited = tokio::time::timeout(LAST_WORDS, machine.exited());
    exited.await.map_or(LossReason::AgentGone, LossReason::Exited)
}

//! Numbers of invocations of services, and of what is delivered to webhooks and callbacks.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use torpor_protocol::invocation::InvocationState;
use torpor_store::{Next, OutboxLength};

use super::{OutcomeLabels, StateLabels};

#[derive(Default)]
pub(super) struct Outbox {
    queued: Gauge,
    running: Gauge,
    settled: Family<StateLabels, Counter>,
    waiting: Gauge,
    attempts: Family<OutcomeLabels, Counter>,
}

impl Outbox {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("invocations_queued", "Invocations that wait", self.queued.clone());
        registry.register("invocations_running", "Invocations that run", self.running.clone());
        let help = "Invocations that are over, by how they ended";
        registry.register("invocations_settled", help, self.settled.clone());
        let help = "Deliveries to webhooks and callbacks that wait";
        registry.register("deliveries_waiting", help, self.waiting.clone());
        let help = "Attempts to deliver, by what became of the delivery";
        registry.register("delivery_attempts", help, self.attempts.clone());
    }

    pub(super) fn set(&self, length: OutboxLength) {
        let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        self.queued.set(number(length.queued));
        self.running.set(number(length.running));
        self.waiting.set(number(length.deliveries));
    }

    pub(super) fn settled(&self, state: InvocationState) {
        self.settled.get_or_create(&StateLabels { state: state.as_str() }).inc();
    }

    pub(super) fn tried(&self, next: &Next) {
        let outcome = match next {
            Next::Delivered => "delivered",
            Next::Again { .. } => "again",
            Next::Failed | Next::Disabled(_) => "failed",
        };
        self.attempts.get_or_create(&OutcomeLabels { outcome }).inc();
    }
}

//! Counts what becomes of sandboxes, however it came about.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::broadcast::error::RecvError;
use torpor_protocol::{SandboxId, State, Status, Tier};

use crate::Service;
use crate::metrics::Metrics;

/// What was last seen of a sandbox.
#[derive(Clone, Copy)]
struct Seen {
    state: State,
    tier: Option<Tier>,
    durable: bool,
    wakes: u64,
}

impl From<&Status> for Seen {
    fn from(status: &Status) -> Self {
        let Status { state, tier, durable, wakes, .. } = *status;
        Self { state, tier, durable, wakes }
    }
}

/// Counts until the fleet is gone.
pub async fn count(app: Arc<Service>) {
    let mut changes = app.fleet.events();
    let see = |status: &Status| (status.id.clone(), Seen::from(status));
    let mut seen: HashMap<SandboxId, Seen> = app.fleet.survey(see).into_iter().collect();
    loop {
        match changes.recv().await {
            Ok(status) => note(&app.metrics, &mut seen, &status),
            Err(RecvError::Lagged(_)) => {
                for status in app.fleet.list() {
                    note(&app.metrics, &mut seen, &status);
                }
            }
            Err(RecvError::Closed) => return,
        }
    }
}

fn note(metrics: &Metrics, seen: &mut HashMap<SandboxId, Seen>, status: &Status) {
    let now = Seen::from(status);
    let before = match now.state {
        State::Terminated => seen.remove(&status.id),
        State::Creating | State::Running | State::Asleep | State::Failed => {
            seen.insert(status.id.clone(), now)
        }
    };
    if before.map(|before| before.state) != Some(now.state) {
        metrics.entered(now.state);
    }
    let Some(before) = before else { return };
    if now.durable && !before.durable {
        metrics.saved();
    }
    let wakes = now.wakes.saturating_sub(before.wakes);
    if wakes > 0 {
        // Who was not seen asleep slept shortly, in memory; or it was there before this daemon, and
        // its machine was started again.
        let unseen = if status.start_steps.is_empty() { Tier::Warm } else { Tier::Cold };
        let tier = before.tier.unwrap_or(unseen);
        metrics.woke(tier, wakes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(state: State, tier: Option<Tier>, wakes: u64) -> Status {
        let mut status: Status = serde_json::from_value(serde_json::json!({
            "id": "a".repeat(21), "name": null, "image": "x", "image_id": "0".repeat(64),
            "resources": {}, "state": "creating", "generation": 1, "created_at_ms": 0,
            "last_used_at_ms": 0, "engine": "fake",
        }))
        .unwrap();
        (status.state, status.tier, status.wakes) = (state, tier, wakes);
        status.durable = tier == Some(Tier::Cold);
        status
    }

    #[test]
    fn wakes_are_counted_by_where_the_sandbox_slept() {
        let (metrics, mut seen) = (Metrics::new([].iter()), HashMap::new());
        for (state, tier, wakes) in [
            (State::Running, None, 0),
            (State::Asleep, Some(Tier::Warm), 0),
            (State::Running, None, 1),
            (State::Asleep, Some(Tier::Cold), 1),
            (State::Running, None, 2),
            (State::Running, None, 4),
        ] {
            note(&metrics, &mut seen, &status(state, tier, wakes));
        }
        let text = metrics.text().unwrap();
        for line in [
            "torpor_wakes_total{tier=\"warm\"} 3",
            "torpor_wakes_total{tier=\"cold\"} 1",
            "torpor_sleeps_total 2",
            "torpor_saves_total 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}

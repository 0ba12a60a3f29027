//! Sandboxes as people see them.

use torpor_protocol::{State, Status, Tier};

/// What people call it: its name, else its id.
pub(super) fn title(status: &Status) -> &str {
    match &status.spec.name {
        Some(name) => name.as_str(),
        None => status.id.as_str(),
    }
}

/// `running`, `asleep (warm)`.
pub(super) fn show_state(state: State, tier: Option<Tier>) -> String {
    match tier {
        Some(tier) => format!("{} ({})", state.as_str(), tier.as_str()),
        None => state.as_str().to_owned(),
    }
}

/// As [`show_state`], and whether it waits for room.
pub(super) fn show_status(status: &Status) -> String {
    match status.queued_until_ms {
        Some(_) => format!("{} (queued)", status.state.as_str()),
        None => show_state(status.state, status.tier),
    }
}

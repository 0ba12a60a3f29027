//! Lists of sandboxes, as several verbs need them.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use torpor_protocol::page as protocol;
use torpor_protocol::{State, Status, Tier};

use crate::client::{Client, Route};
use crate::error::Result;

/// All sandboxes with these labels.
pub(super) async fn list(
    client: &Client,
    labels: &[(String, String)],
    state: Option<&str>,
) -> Result<Vec<Status>> {
    rows(client, labels, state).await
}

#[derive(Deserialize)]
struct Page<T> {
    sandboxes: Vec<T>,
    next_cursor: Option<String>,
}

impl<T> protocol::Page for Page<T> {
    type Entry = T;

    fn new(sandboxes: Vec<T>, next_cursor: Option<String>) -> Self {
        Self { sandboxes, next_cursor }
    }

    fn into_parts(self) -> (Vec<T>, Option<String>) {
        (self.sandboxes, self.next_cursor)
    }
}

/// As [`list`], with as much of each as `T` has.
pub(super) async fn rows<T: DeserializeOwned>(
    client: &Client,
    labels: &[(String, String)],
    state: Option<&str>,
) -> Result<Vec<T>> {
    let mut route = Route::new("/v1/sandboxes");
    for (key, value) in labels {
        route = route.query("label", &format!("{key}={value}"));
    }
    if let Some(state) = state {
        route = route.query("state", state);
    }
    Ok(client.list::<Page<T>>(&route).await?.sandboxes)
}

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

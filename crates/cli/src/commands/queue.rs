//! The wait of a sandbox for room on its host, as its creator sees it.

use std::time::Duration;

use torpor_client::{Client, Route};
use torpor_protocol::time::FOREVER_MS;
use torpor_protocol::{ErrorCode, State, Status};

use super::{ended, sandboxes};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::signals::Signals;
use crate::units;

/// How long one request waits for news of it, in milliseconds: the daemon's usual time.
const NEWS_MS: &str = "30000";
/// What to do about a host that stays full.
const MAKE_ROOM: &str =
    "make room (torpor sleep --cold, torpor rm), or wait longer: --queue forever";

/// How long to wait for room.
pub(super) fn parse(text: &str) -> std::result::Result<Duration, String> {
    if text == "forever" { Ok(Duration::MAX) } else { units::parse_duration(text) }
}

/// Returns when it runs. If it never does nothing is left of it; if we are told to leave, one without
/// a name goes with us, because nobody would ever ask for it.
pub(super) async fn until_it_runs(
    client: &Client,
    status: Status,
    progress: &Progress,
) -> Result<Status> {
    let mut signals = Signals::new()?;
    let (id, name) = (status.id.clone(), status.spec.name.clone());
    tokio::select! {
        ran = watch(client, status, progress) => ran,
        left = signals.next() => {
            match name {
                Some(name) => {
                    let text = format!("torpor: {name} goes on without us; torpor rm {name} ends it");
                    progress.note(&text);
                }
                None => drop(client.delete(&Route::sandbox(&id)).await),
            }
            Err(left)
        }
    }
}

async fn watch(client: &Client, mut status: Status, progress: &Progress) -> Result<Status> {
    loop {
        match status.state {
            State::Running | State::Asleep => return Ok(status),
            State::Failed => {
                let message = format!("{} did not start", sandboxes::title(&status));
                drop(client.delete(&Route::sandbox(&status.id)).await);
                return Err(because(message, status.message.as_deref(), None));
            }
            State::Terminated => return Err(gone(client, &status).await),
            State::Creating => progress.say(describe(&status, units::now_ms())),
        }
        let after = status.generation.to_string();
        let news = Route::sandbox(&status.id).then("/status").query("after", &after);
        status = match client.get(&news.query("wait_ms", NEWS_MS)).await {
            Ok(status) => status,
            Err(error) if error.code() == Some(ErrorCode::SandboxNotFound) => {
                return Err(gone(client, &status).await);
            }
            Err(error) => return Err(error.into()),
        };
    }
}

fn describe(status: &Status, now_ms: u64) -> String {
    let title = sandboxes::title(status);
    match status.queued_until_ms {
        None => format!("creating {title}"),
        Some(FOREVER_MS..) => format!("{title} waits for room on this host"),
        Some(until_ms) => {
            let left = Duration::from_millis(until_ms.saturating_sub(now_ms));
            format!("{title} waits for room on this host, at most {}", units::show_duration(left))
        }
    }
}

/// Why it is gone before it ran: the archive says it.
async fn gone(client: &Client, status: &Status) -> Error {
    let ended = ended::find(client, &status.id).await.ok().flatten();
    let reason = ended.and_then(|ended| ended.reason).map(|reason| reason.to_string());
    let message = format!("{} ended before it ran", sandboxes::title(status));
    let late = status.queued_until_ms.is_some_and(|until_ms| until_ms <= units::now_ms());
    because(message, reason.as_deref(), late.then_some(MAKE_ROOM))
}

fn because(message: String, reason: Option<&str>, hint: Option<&str>) -> Error {
    let message = match reason {
        Some(reason) => format!("{message}: {reason}"),
        None => message,
    };
    Error::Failed { message, hint: hint.map(str::to_owned) }
}

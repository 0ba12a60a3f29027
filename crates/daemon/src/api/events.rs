//! Changes of status: one sandbox by long poll, all of them as server-sent events.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::{Stream, StreamExt};
use serde::Deserialize;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use torpor_lifecycle::Fleet;
use torpor_protocol::Status;
use torpor_service::Service;
use torpor_web::extract::{Json, Named, Query};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Longest wait, and the wait of who does not say: shorter than what proxies in between endure.
const WAIT_MAX: Duration = Duration::from_secs(60);
const WAIT_DEFAULT: Duration = Duration::from_secs(30);
/// A comment this often tells both sides that the other is there.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(status)).routes(routes!(events))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct StatusQuery {
    /// The generation that the client knows.
    after: Option<u64>,
    /// Answer with what is after so many milliseconds. Default 30000, at most 60000.
    wait_ms: Option<u64>,
}

/// Wait for a change of a sandbox.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/status",
    params(("sandbox" = String, Path, description = "Id or name"), StatusQuery),
    responses((
        status = 200, body = Status,
        description = "The status, as soon as its generation is larger than `after`.",
    ))
)]
async fn status(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Query(query): Query<StatusQuery>,
) -> Json<Status> {
    let wait = query.wait_ms.map_or(WAIT_DEFAULT, Duration::from_millis).min(WAIT_MAX);
    let mut status = sandbox.watch();
    if let Some(after) = query.after {
        let newer = status.wait_for(|status| status.generation > after);
        tokio::select! {
            _ = newer => {}
            () = tokio::time::sleep(wait) => {}
            () = service.stopping.cancelled() => {}
        }
    }
    Json(sandbox.status())
}

/// Watch all sandboxes.
#[utoipa::path(
    get, path = "/v1/events",
    responses((
        status = 200, body = Status, content_type = "text/event-stream",
        description = "An event `status` per change, from now on. A client that is too slow gets \
                       the present status of every sandbox instead of what it missed.",
    ))
)]
async fn events(
    State(service): State<Arc<Service>>,
) -> Sse<impl Stream<Item = Result<Event, axum::Error>>> {
    let feed = Feed {
        changes: service.fleet.events(),
        fleet: service.fleet.clone(),
        due: VecDeque::new(),
    };
    let events = futures_util::stream::unfold(feed, async |mut feed| {
        let status = feed.next().await?;
        Some((Event::default().event("status").json_data(status), feed))
    });
    let stopping = service.stopping.clone();
    let events = events.take_until(async move { stopping.cancelled().await });
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
}

/// Changes, and after missed ones the present.
struct Feed {
    changes: Receiver<Status>,
    fleet: Fleet,
    due: VecDeque<Status>,
}

impl Feed {
    async fn next(&mut self) -> Option<Status> {
        loop {
            if let Some(status) = self.due.pop_front() {
                return Some(status);
            }
            match self.changes.recv().await {
                Ok(status) => return Some(status),
                Err(RecvError::Lagged(_)) => self.due = self.fleet.list().into(),
                Err(RecvError::Closed) => return None,
            }
        }
    }
}

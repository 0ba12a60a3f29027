//! What became of what sandboxes sent out. Nobody is woken for it.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use serde::Deserialize;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use torpor_protocol::egress::{EgressEvent, EgressEvents, EgressLine, Verdict};
use torpor_protocol::{SandboxId, SandboxRef, State as SandboxState};
use torpor_service::Service;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::Result;
use super::extract::{Json, Path, Query};
use super::output::ndjson;

/// Events in one answer, unless the client asks for another number up to the other.
const EVENTS: usize = 100;
const EVENTS_MAX: usize = 1000;

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(of_one)).routes(routes!(of_all))
}

#[derive(Debug, Deserialize)]
struct EgressPath {
    sandbox: SandboxRef,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct EgressQuery {
    /// The newest so many. Default 100, at most 1000.
    limit: Option<usize>,
    /// Only those with this verdict.
    #[param(inline)]
    verdict: Option<Verdict>,
    /// Go on with what happens from now on: one event a line (NDJSON).
    #[serde(default)]
    follow: bool,
}

/// Get what a sandbox sent out or tried to, also of one that is gone (by its id).
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/egress",
    params(("sandbox" = String, Path, description = "Id or name"), EgressQuery),
    responses((
        status = 200, body = EgressEvents,
        description = "Oldest first. With `follow`, lines of events (`application/x-ndjson`), until the \
                       sandbox ends or the daemon stops; `{\"missed\": 3}` stands for events that a \
                       client was too slow for.",
    ))
)]
async fn of_one(
    State(app): State<Arc<Service>>,
    Path(EgressPath { sandbox }): Path<EgressPath>,
    Query(query): Query<EgressQuery>,
) -> Result<Response> {
    let (id, living) = match (app.fleet.find(&sandbox), sandbox) {
        (Ok(found), _) => (found.id().clone(), Some(found)),
        (Err(_), SandboxRef::Id(id)) => (id, None),
        (Err(error), SandboxRef::Name(_)) => return Err(error.into()),
    };
    let feed = Feed::begin(&app, Some(id), &query).await?;
    if !query.follow {
        return Ok(feed.listed());
    }
    let mut status = living.map(|sandbox| sandbox.watch());
    let ended = async move {
        // Of one that is gone there is nothing to come.
        let Some(status) = &mut status else { return };
        // An error means that it is gone, too.
        let _ = status.wait_for(|status| status.state == SandboxState::Terminated).await;
    };
    Ok(feed.followed(&app, ended))
}

/// Get what all sandboxes sent out or tried to.
#[utoipa::path(
    get, path = "/v1/egress", params(EgressQuery),
    responses((
        status = 200, body = EgressEvents,
        description = "Oldest first. With `follow`, lines of events (`application/x-ndjson`), until the \
                       daemon stops.",
    ))
)]
async fn of_all(
    State(app): State<Arc<Service>>,
    Query(query): Query<EgressQuery>,
) -> Result<Response> {
    let feed = Feed::begin(&app, None, &query).await?;
    Ok(match query.follow {
        true => feed.followed(&app, std::future::pending()),
        false => feed.listed(),
    })
}

/// What is remembered, and then what happens.
struct Feed {
    of: Option<SandboxId>,
    verdict: Option<Verdict>,
    remembered: Vec<EgressEvent>,
    news: Receiver<Arc<EgressEvent>>,
}

impl Feed {
    async fn begin(app: &Service, of: Option<SandboxId>, query: &EgressQuery) -> Result<Self> {
        // Before what is remembered is read, so that nothing falls in between.
        let news = app.egress.audit().follow();
        let limit = query.limit.unwrap_or(EVENTS).min(EVENTS_MAX);
        let verdict = query.verdict;
        let remembered = match &of {
            Some(id) => remembered(app, id, verdict, limit).await?,
            None => app.audit.recent(None, verdict, limit).await?,
        };
        Ok(Self { of, verdict, remembered, news })
    }

    fn listed(self) -> Response {
        Json(EgressEvents { events: self.remembered }).into_response()
    }

    fn followed(self, app: &Service, ended: impl Future<Output = ()> + Send + 'static) -> Response {
        let before = self.remembered.clone();
        let before = before.into_iter().map(|event| EgressLine::Event(Box::new(event)));
        let news = futures_util::stream::unfold(self, async |mut feed| {
            let line = feed.next().await?;
            Some((line, feed))
        });
        let stopping = app.stopping.clone();
        let over = async move {
            tokio::select! {
                () = stopping.cancelled() => {}
                () = ended => {}
            }
        };
        ndjson(futures_util::stream::iter(before).chain(news.take_until(over)))
    }

    async fn next(&mut self) -> Option<EgressLine> {
        loop {
            match self.news.recv().await {
                Ok(event) if self.wants(&event) => {
                    return Some(EgressLine::Event(Box::new((*event).clone())));
                }
                Ok(_) => {}
                Err(RecvError::Lagged(missed)) => return Some(EgressLine::Missed { missed }),
                Err(RecvError::Closed) => return None,
            }
        }
    }

    /// Whether an event is one of those looked for, and was not told already.
    fn wants(&mut self, event: &EgressEvent) -> bool {
        if self.remembered.last().is_some_and(|last| event.at_ms > last.at_ms) {
            // Whatever is told from now on is new.
            self.remembered = Vec::new();
        }
        self.of.as_ref().is_none_or(|id| event.sandbox == *id)
            && self.verdict.is_none_or(|verdict| event.verdict == verdict)
            && !self.remembered.contains(event)
    }
}

/// The newest are in memory; what an earlier daemon saw, and what was pushed out, is in the log.
async fn remembered(
    app: &Service,
    id: &SandboxId,
    verdict: Option<Verdict>,
    limit: usize,
) -> Result<Vec<EgressEvent>> {
    let in_memory = || {
        let mut events = app.egress.audit().recent(id, usize::MAX);
        events.retain(|event| verdict.is_none_or(|verdict| event.verdict == verdict));
        events.drain(..events.len().saturating_sub(limit));
        events
    };
    let newest = in_memory();
    if newest.len() == limit {
        return Ok(newest.iter().map(|event| (**event).clone()).collect());
    }
    let logged = app.audit.recent(Some(id), verdict, limit).await?;
    // Looked at once more: what came to the log meanwhile is here, too.
    let newest = in_memory();
    let mut events: Vec<_> =
        logged.into_iter().filter(|old| !newest.iter().any(|event| **event == *old)).collect();
    events.extend(newest.iter().map(|event| (**event).clone()));
    events.drain(..events.len().saturating_sub(limit));
    Ok(events)
}

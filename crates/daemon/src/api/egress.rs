//! What became of what sandboxes sent out. Nobody is woken for it.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use serde::Deserialize;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use torpor_protocol::egress::{EgressEvent, EgressEvents, EgressLine, Verdict};
use torpor_protocol::page::PAGE_MAX;
use torpor_protocol::{SandboxId, SandboxRef, State as SandboxState};
use torpor_service::Service;
use torpor_web::error::Result;
use torpor_web::extract::{Json, Path, Query};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::ndjson::ndjson;
use super::page::Cut;

/// Events of one millisecond that a cursor can stand between.
const SHOWN_MAX: usize = 100_000;

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
    /// The newest so many, 1 to 1000; default 1000.
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// Only those with this verdict.
    #[param(inline)]
    verdict: Option<Verdict>,
    /// Go on with what happens from now on: one EgressLine a line (NDJSON), oldest first.
    #[serde(default)]
    follow: bool,
}

/// Get what a sandbox sent out or tried to, also of one that is gone (by its id).
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/egress",
    params(("sandbox" = String, Path, description = "Id or name"), EgressQuery),
    responses((
        status = 200,
        description = "Newest first. With `follow`, until the sandbox ends or the daemon stops; `missed` \
                       stands for events that a client was too slow for.",
        content((EgressEvents = "application/json"), (EgressLine = "application/x-ndjson")),
    ))
)]
async fn of_one(
    State(service): State<Arc<Service>>,
    Path(EgressPath { sandbox }): Path<EgressPath>,
    Query(query): Query<EgressQuery>,
) -> Result<Response> {
    let (id, living) = match (service.fleet.find(&sandbox), sandbox) {
        (Ok(found), _) => (found.id().clone(), Some(found)),
        (Err(_), SandboxRef::Id(id)) => (id, None),
        (Err(error), SandboxRef::Name(_)) => return Err(error.into()),
    };
    if !query.follow {
        return listed(&service, Some(id), query).await;
    }
    let feed = Feed::begin(&service, Some(id), &query).await?;
    let mut status = living.map(|sandbox| sandbox.watch());
    let ended = async move {
        // Of one that is gone there is nothing to come.
        let Some(status) = &mut status else { return };
        // An error means that it is gone, too.
        let _ = status.wait_for(|status| status.state == SandboxState::Terminated).await;
    };
    Ok(feed.followed(&service, ended))
}

/// Get what all sandboxes sent out or tried to.
#[utoipa::path(
    get, path = "/v1/egress", params(EgressQuery),
    responses((
        status = 200, description = "Newest first. With `follow`, until the daemon stops.",
        content((EgressEvents = "application/json"), (EgressLine = "application/x-ndjson")),
    ))
)]
async fn of_all(
    State(service): State<Arc<Service>>,
    Query(query): Query<EgressQuery>,
) -> Result<Response> {
    if !query.follow {
        return listed(&service, None, query).await;
    }
    Ok(Feed::begin(&service, None, &query).await?.followed(&service, std::future::pending()))
}

/// A page, back in time.
async fn listed(service: &Service, of: Option<SandboxId>, query: EgressQuery) -> Result<Response> {
    let cut = Cut::new(query.limit, query.cursor)?;
    let place = cut.parsed()?.unwrap_or(Place { at_ms: u64::MAX, shown: 0 });
    let wanted = place.shown + cut.limit + 1;
    let mut events = remembered(service, of.as_ref(), query.verdict, place.at_ms, wanted).await?;
    events.reverse();
    let (events, next) = place.page(events, cut.limit);
    let next_cursor = next.map(|place| place.to_string());
    Ok(Json(EgressEvents { events, next_cursor }).into_response())
}

/// Where a page ends: so many of the events of that millisecond were shown.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    at_ms: u64,
    shown: usize,
}

impl Place {
    /// What follows here of `events`, which are those until then, newest first.
    fn page(&self, events: Vec<EgressEvent>, limit: usize) -> (Vec<EgressEvent>, Option<Self>) {
        let mut rest: Vec<_> = events.into_iter().skip(self.shown).collect();
        let more = rest.len() > limit;
        rest.truncate(limit);
        let next = rest.last().filter(|_| more).map(|last| {
            let shown = rest.iter().rev().take_while(|event| event.at_ms == last.at_ms).count();
            let before = if last.at_ms == self.at_ms { self.shown } else { 0 };
            Self { at_ms: last.at_ms, shown: shown + before }
        });
        (rest, next)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.at_ms, self.shown)
    }
}

impl FromStr for Place {
    type Err = ();
    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        let (at_ms, shown) = text.split_once('-').ok_or(())?;
        let shown = shown.parse().map_err(drop)?;
        // As many as can be of one millisecond in a log of its size.
        if shown > SHOWN_MAX {
            return Err(());
        }
        Ok(Self { at_ms: at_ms.parse().map_err(drop)?, shown })
    }
}

/// What is remembered, and then what happens.
struct Feed {
    of: Option<SandboxId>,
    verdict: Option<Verdict>,
    remembered: Vec<EgressEvent>,
    news: Receiver<Arc<EgressEvent>>,
}

impl Feed {
    async fn begin(service: &Service, of: Option<SandboxId>, query: &EgressQuery) -> Result<Self> {
        // Before what is remembered is read, so that nothing falls in between.
        let news = service.egress.audit().follow();
        // Who follows may want nothing of what was.
        let limit = query.limit.unwrap_or(PAGE_MAX).min(PAGE_MAX);
        let verdict = query.verdict;
        let remembered = remembered(service, of.as_ref(), verdict, u64::MAX, limit).await?;
        Ok(Self { of, verdict, remembered, news })
    }

    fn followed(
        self,
        service: &Service,
        ended: impl Future<Output = ()> + Send + 'static,
    ) -> Response {
        let before = self.remembered.clone();
        let before = before.into_iter().map(|event| EgressLine::Egress(Box::new(event)));
        let news = futures_util::stream::unfold(self, async |mut feed| {
            let line = feed.next().await?;
            Some((line, feed))
        });
        let stopping = service.stopping.clone();
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
                    return Some(EgressLine::Egress(Box::new((*event).clone())));
                }
                Ok(_) => {}
                Err(RecvError::Lagged(missed)) => return Some(EgressLine::Missed { missed }),
                Err(RecvError::Closed) => return None,
            }
        }
    }

    /// Whether an event is one of those looked for, and was not shown already.
    fn wants(&mut self, event: &EgressEvent) -> bool {
        if self.remembered.last().is_some_and(|last| event.at_ms > last.at_ms) {
            // Whatever comes from now on is new.
            self.remembered = Vec::new();
        }
        self.of.as_ref().is_none_or(|id| event.sandbox == *id)
            && self.verdict.is_none_or(|verdict| event.verdict == verdict)
            && !self.remembered.contains(event)
    }
}

/// The newest until then, oldest first. The newest of all are in memory; what an earlier daemon saw, and what was pushed out, is in the log.
async fn remembered(
    service: &Service,
    of: Option<&SandboxId>,
    verdict: Option<Verdict>,
    until_ms: u64,
    limit: usize,
) -> Result<Vec<EgressEvent>> {
    let Some(id) = of else {
        return Ok(service.audit.recent(None, verdict, until_ms, limit).await?);
    };
    let in_memory = || {
        let mut events = service.egress.audit().recent(id, usize::MAX);
        events.retain(|event| {
            verdict.is_none_or(|verdict| event.verdict == verdict) && event.at_ms <= until_ms
        });
        events.drain(..events.len().saturating_sub(limit));
        events
    };
    let newest = in_memory();
    if newest.len() == limit {
        return Ok(newest.iter().map(|event| (**event).clone()).collect());
    }
    let logged = service.audit.recent(Some(id), verdict, until_ms, limit).await?;
    // Looked at once more: what came to the log meanwhile is here, too.
    let newest = in_memory();
    let mut events: Vec<_> =
        logged.into_iter().filter(|old| !newest.iter().any(|event| **event == *old)).collect();
    events.extend(newest.iter().map(|event| (**event).clone()));
    events.drain(..events.len().saturating_sub(limit));
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(at_ms: u64, port: u16) -> EgressEvent {
        let sandbox = "a".repeat(21);
        let event = serde_json::json!({
            "at_ms": at_ms, "sandbox": sandbox, "what": "tcp", "verdict": "allowed", "rule": "r",
            "port": port,
        });
        serde_json::from_value(event).unwrap()
    }

    #[test]
    fn pages_back_in_time_repeat_and_miss_nothing_of_one_millisecond() {
        let all: Vec<_> = (0..7).map(|n| event(9 - n / 5, n as u16)).collect();
        let mut place = Place { at_ms: u64::MAX, shown: 0 };
        let mut seen = Vec::new();
        loop {
            let until: Vec<_> =
                all.iter().filter(|event| event.at_ms <= place.at_ms).cloned().collect();
            let (page, next) = place.page(until, 2);
            seen.extend(page.into_iter().map(|event| event.port.unwrap()));
            match next {
                Some(next) => place = next.to_string().parse().unwrap(),
                None => break,
            }
        }
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6]);
    }
}

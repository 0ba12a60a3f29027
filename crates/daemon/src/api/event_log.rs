//! Events of the ledger: by pages, and as they come, from wherever a reader had got to.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event as Message, KeepAlive, Sse};
use futures_util::{Stream, StreamExt};
use http::HeaderMap;
use serde::Deserialize;
use torpor_protocol::event::{Event, EventKind, EventList};
use torpor_service::events::{self, EventFilter};
use torpor_service::{Error, Service};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Json, Query};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use super::page::Cut;

/// A comment this often tells both sides that the other is there.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// What browsers and other clients of server-sent events send when they come again.
const LAST_EVENT_ID: &str = "last-event-id";

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(log)).routes(routes!(stream))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct LogQuery {
    /// 1 to 1000; default 1000.
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// Only events of this type.
    #[serde(rename = "type")]
    #[param(inline)]
    kind: Option<EventKind>,
    /// Only events of what has this id.
    subject: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct StreamQuery {
    /// Begin with what follows the event of this number; without it, with what comes from now on. The header
    /// `Last-Event-ID` says the same and goes before.
    after: Option<u64>,
    /// Only events of this type.
    #[serde(rename = "type")]
    #[param(inline)]
    kind: Option<EventKind>,
    /// Only events of what has this id.
    subject: Option<String>,
}

/// List what happened.
#[utoipa::path(
    get, path = "/v1/events/log", params(LogQuery),
    responses((
        status = 200, body = EventList,
        description = "Oldest first. Events are remembered for seven days, the last hundred thousand of them; if \
                       what follows the cursor is not any more the answer is 410 `events_forgotten`.",
    ))
)]
async fn log(
    State(service): State<Arc<Service>>,
    Query(query): Query<LogQuery>,
) -> Answer<EventList> {
    let cut = Cut::new(query.limit, query.cursor)?;
    let filter = EventFilter { kind: query.kind, subject: query.subject };
    let found = events::log(&service, &filter, cut.parsed()?, cut.rows()).await?;
    Ok(Json(cut.page(found, |event| event.sequence.to_string())))
}

/// Watch what happens.
#[utoipa::path(
    get, path = "/v1/events/stream", params(StreamQuery),
    responses((
        status = 200, body = Event, content_type = "text/event-stream",
        description = "Server-sent events whose name is the type, whose `id` is the number and whose data is the \
                       event. Who comes again with the last number misses nothing; if what followed it is not \
                       remembered any more the answer is 410 `events_forgotten`, in a stream an event `error`.",
    ))
)]
async fn stream(
    State(service): State<Arc<Service>>,
    headers: HeaderMap,
    Query(query): Query<StreamQuery>,
) -> Result<Sse<impl Stream<Item = std::result::Result<Message, Infallible>>>> {
    let filter = EventFilter { kind: query.kind, subject: query.subject };
    let after = last_seen(&headers)?.or(query.after);
    let found = events::follow(service, filter, after).await?;
    let messages = found.map(|event| Ok(message(event)));
    Ok(Sse::new(messages).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

fn last_seen(headers: &HeaderMap) -> Result<Option<u64>> {
    let Some(text) = headers.get(LAST_EVENT_ID) else { return Ok(None) };
    let number = text.to_str().ok().and_then(|text| text.parse().ok());
    number.map(Some).ok_or_else(|| ApiError::invalid("Last-Event-ID is no number of an event"))
}

fn message(event: std::result::Result<Event, Error>) -> Message {
    let written = match event {
        Ok(event) => {
            let message = Message::default().id(event.sequence.to_string());
            message.event(event.kind.as_str()).json_data(event)
        }
        // The end of the stream: who comes again is told in the answer.
        Err(error) => Message::default().event("error").json_data(error.to_body("")),
    };
    written.unwrap_or_default()
}

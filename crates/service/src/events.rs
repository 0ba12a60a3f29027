//! Events of the ledger as they come: who waits for them is woken when there are more.
//!
//! - The ledger is where events are. What is in memory is the number of the last one, as of [`LOOK`] ago at most;
//!   a change of a sandbox is a hint to look at once.
//! - A reader says which event it has; it gets all that follow, or hears that they are not remembered any more.

use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Notify, watch};
use torpor_lifecycle::chain;
use torpor_lifecycle::ledger::REFRESH;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ErrorCode;
use torpor_protocol::event::Event;
pub use torpor_store::EventFilter;
use torpor_store::Ledger;

use crate::Service;
use crate::error::{Error, Result};

/// How often the ledger is looked at without a hint: events of other nodes have none.
const LOOK: Duration = REFRESH;
/// Hints of this long are one: a thousand sandboxes that start at once cost a hundred looks in a second.
const GATHER: Duration = Duration::from_millis(10);
/// Events that are read at once.
const PAGE: usize = 500;
/// How often what is too old is forgotten.
const SWEEP: Duration = Duration::from_secs(600);
/// How long an event is remembered, if not a hundred thousand others came after it.
const KEPT_FOR_MS: u64 = 7 * 24 * 60 * 60 * 1000;

/// Tells that there are more events. One per daemon.
#[derive(Debug)]
pub struct Events {
    last: watch::Sender<u64>,
    hints: Notify,
    /// For who delivers: something waits that is no event.
    pub(crate) outbox: Notify,
}

impl Events {
    pub async fn open(ledger: &Ledger) -> std::result::Result<Self, StoreError> {
        let last = ledger.event_range().await?.last;
        Ok(Self { last: watch::Sender::new(last), hints: Notify::new(), outbox: Notify::new() })
    }

    /// Somebody has just recorded an event, or something else that is to be delivered.
    pub fn hint(&self) {
        self.hints.notify_one();
        self.outbox.notify_one();
    }

    /// The number of the last event; it changes when there are more.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }
}

/// Looks for new events, and forgets old ones, until the daemon stops.
pub async fn look_after(service: Arc<Service>) {
    let mut changes = service.fleet.events();
    let mut swept = tokio::time::Instant::now();
    loop {
        let hinted = tokio::select! {
            () = service.events.hints.notified() => true,
            changed = changes.recv() => match changed {
                Ok(_) | Err(RecvError::Lagged(_)) => true,
                Err(RecvError::Closed) => return,
            },
            () = tokio::time::sleep(LOOK) => false,
        };
        if hinted {
            tokio::time::sleep(GATHER).await;
            while changes.try_recv().is_ok() {}
        }
        match service.ledger.event_range().await {
            Ok(range) => {
                let last = &service.events.last;
                last.send_if_modified(|last| std::mem::replace(last, range.last) != range.last);
            }
            Err(error) => tracing::warn!(error = chain(&error), "cannot look for events"),
        }
        if swept.elapsed() >= SWEEP {
            swept = tokio::time::Instant::now();
            let before_ms = service.fleet.clock().now_ms().saturating_sub(KEPT_FOR_MS);
            if let Err(error) = service.ledger.forget_events(before_ms).await {
                tracing::warn!(error = chain(&error), "cannot forget old events");
            }
        }
    }
}

/// At most `limit` after this one, oldest first; without one, from the first that is remembered.
pub async fn log(
    app: &Service,
    filter: &EventFilter,
    after: Option<u64>,
    limit: usize,
) -> Result<Vec<Event>> {
    let page = app.ledger.events(filter, after.unwrap_or(0), limit).await?;
    if let Some(after) = after {
        // After the look: what it missed is forgotten by now.
        remembered(after, app.ledger.event_range().await?.first)?;
    }
    Ok(page)
}

/// What follows an event, as it comes, until the daemon stops; without one, what comes from now on.
pub async fn follow(
    app: Arc<Service>,
    filter: EventFilter,
    after: Option<u64>,
) -> Result<impl Stream<Item = Result<Event>> + Send> {
    let told = app.events.subscribe();
    let range = app.ledger.event_range().await?;
    let after = after.unwrap_or(range.last);
    if after > range.last {
        return Err(Error::with_hint(
            ErrorCode::InvalidRequest,
            format!("there is no event {after} yet: the last one is {}", range.last),
            "begin without a number, or with one that this installation told",
        ));
    }
    remembered(after, range.first)?;
    let reader = Reader { app, filter, after, told, due: Vec::new().into_iter(), over: false };
    Ok(futures_util::stream::unfold(reader, async |mut reader| {
        let event = reader.next().await?;
        Some((event, reader))
    }))
}

/// Whether what follows this event is still there.
fn remembered(after: u64, first: u64) -> Result<()> {
    if after.saturating_add(1) >= first {
        return Ok(());
    }
    Err(Error::with_hint(
        ErrorCode::EventsForgotten,
        format!("events {} to {} are not remembered any more", after + 1, first - 1),
        format!("look at what is there now, and go on after {}", first - 1),
    ))
}

struct Reader {
    app: Arc<Service>,
    filter: EventFilter,
    /// The last one that was told, or that is none of those that were asked for.
    after: u64,
    told: watch::Receiver<u64>,
    due: std::vec::IntoIter<Event>,
    over: bool,
}

impl Reader {
    async fn next(&mut self) -> Option<Result<Event>> {
        loop {
            if let Some(event) = self.due.next() {
                self.after = event.sequence;
                return Some(Ok(event));
            }
            if self.over {
                return None;
            }
            // Before the look: what comes after it wakes this again.
            let last = *self.told.borrow_and_update();
            match self.read(last).await {
                Ok(true) => {}
                Ok(false) => {
                    let stopping = self.app.stopping.clone();
                    tokio::select! {
                        changed = self.told.changed() => changed.ok()?,
                        () = stopping.cancelled() => return None,
                    }
                }
                Err(error) => {
                    self.over = true;
                    return Some(Err(error));
                }
            }
        }
    }

    /// Whether there was something.
    async fn read(&mut self, last: u64) -> Result<bool> {
        let page = self.app.ledger.events(&self.filter, self.after, PAGE).await?;
        // After the look: what it missed is forgotten by now.
        remembered(self.after, self.app.ledger.event_range().await?.first)?;
        let found = !page.is_empty();
        if !found {
            self.after = self.after.max(last);
        }
        self.due = page.into_iter();
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_good_while_what_follows_it_is_there() {
        remembered(0, 0).unwrap();
        remembered(0, 1).unwrap();
        remembered(7, 8).unwrap();
        remembered(9, 8).unwrap();
        let error = remembered(6, 8).unwrap_err();
        assert_eq!(error.code(), ErrorCode::EventsForgotten);
        assert_eq!(error.to_string(), "events 7 to 7 are not remembered any more");
    }
}

//! Rows of events. They are written by triggers, which are in the migration.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::event::{Event, EventKind};

use super::super::{EventFilter, EventLedger, EventRange};
use super::{SqliteLedger, column, json, limit_of, parsed, time, to_column};

/// Events that are forgotten in one statement: a sweep holds the writer no longer than a few milliseconds.
const FORGOTTEN_AT_ONCE: u32 = 1_000;

#[async_trait]
impl EventLedger for SqliteLedger {
    async fn events(
        &self,
        filter: &EventFilter,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Event>, StoreError> {
        let sql = match (&filter.subject, filter.kind) {
            (None, None) => "SELECT * FROM events WHERE sequence > ?1 ORDER BY sequence LIMIT ?2",
            (Some(_), None) => {
                "SELECT * FROM events WHERE sequence > ?1 AND subject = ?3 ORDER BY sequence LIMIT ?2"
            }
            (None, Some(_)) => {
                "SELECT * FROM events WHERE sequence > ?1 AND kind = ?4 ORDER BY sequence LIMIT ?2"
            }
            (Some(_), Some(_)) => {
                "SELECT * FROM events WHERE sequence > ?1 AND subject = ?3 AND kind = ?4
                 ORDER BY sequence LIMIT ?2"
            }
        };
        let query = sqlx::query(sql)
            .bind(to_column(after))
            .bind(limit_of(limit))
            .bind(filter.subject.as_deref())
            .bind(filter.kind.map(EventKind::as_str));
        self.all("read the events of the ledger", query, read_event).await
    }

    async fn event_range(&self) -> Result<EventRange, StoreError> {
        let query = sqlx::query(
            "SELECT coalesce((SELECT min(sequence) FROM events), 0) AS first,
                 coalesce((SELECT max(sequence) FROM events), 0) AS last",
        );
        let read = |row: &SqliteRow| {
            Ok(EventRange { first: time(row, "first")?, last: time(row, "last")? })
        };
        let range = self.one("look for the last event", query, read).await?;
        Ok(range.unwrap_or_default())
    }

    async fn forget_events(&self, before_ms: u64) -> Result<(), StoreError> {
        let action = "forget the oldest events";
        loop {
            let query = sqlx::query(
                "DELETE FROM events WHERE at_ms < ?1 AND sequence IN
                     (SELECT sequence FROM events ORDER BY sequence LIMIT ?2)
                     AND sequence < (SELECT max(sequence) FROM events)",
            )
            .bind(to_column(before_ms))
            .bind(FORGOTTEN_AT_ONCE);
            let done = query.execute(&self.writer).await.map_err(self.failed(action))?;
            if done.rows_affected() < u64::from(FORGOTTEN_AT_ONCE) {
                return Ok(());
            }
        }
    }
}

fn read_event(row: &SqliteRow) -> Result<Event, StoreError> {
    Ok(Event {
        id: parsed(row, "id")?,
        sequence: time(row, "sequence")?,
        kind: read_kind(row)?,
        at_ms: time(row, "at_ms")?,
        subject: column(row, "subject")?,
        data: json(row, "data", "what is known of an event")?,
    })
}

pub(super) fn read_kind(row: &SqliteRow) -> Result<EventKind, StoreError> {
    parsed(row, "kind")
}

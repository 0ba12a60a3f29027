//! What the ledger knows of sandboxes.

use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::store::{Record, StoreError};

use super::{Ledger, column, json, optional, parsed, time, to_column};

impl Ledger {
    pub(super) async fn record_sandbox(&self, record: &Record) -> Result<(), StoreError> {
        let action = "record a sandbox in the ledger";
        let spec = serde_json::to_string(&record.spec).map_err(StoreError::failed(action))?;
        let state = serde_json::to_string(&record.state).map_err(StoreError::failed(action))?;
        let facts = serde_json::to_string(&record.facts).map_err(StoreError::failed(action))?;
        let name = record.spec.name.as_ref().map(|name| name.as_str());
        let query = sqlx::query(
            "INSERT INTO sandboxes (id, name, image_id, spec, rest, save_id, facts, created_at_ms,
                 last_used_at_ms)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
             ON CONFLICT (id) DO UPDATE SET name = excluded.name, image_id = excluded.image_id,
                 spec = excluded.spec, rest = excluded.rest, save_id = excluded.save_id,
                 facts = excluded.facts, created_at_ms = excluded.created_at_ms,
                 last_used_at_ms = excluded.last_used_at_ms",
        )
        .bind(record.id.as_str())
        .bind(name)
        .bind(record.spec.image_id.as_str())
        .bind(spec)
        .bind(state)
        .bind(record.save.as_ref().map(|save| save.as_str()))
        .bind(facts)
        .bind(to_column(record.created_at_ms))
        .bind(to_column(record.last_used_at_ms));
        match query.execute(&self.writer).await {
            Ok(_) => Ok(()),
            // It was removed between being looked up and being used.
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                Err(self.missing(&record.spec.image_id, record.save.as_ref()).await)
            }
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
                let name = name.unwrap_or_default();
                Err(StoreError::Invalid(format!("another sandbox is called {name:?}")))
            }
            Err(error) => Err(self.failed(action)(error)),
        }
    }

    pub(super) async fn sandboxes(&self) -> Result<Vec<Record>, StoreError> {
        let query = sqlx::query(
            "SELECT id, spec, rest, save_id, facts, created_at_ms, last_used_at_ms FROM sandboxes
             ORDER BY created_at_ms, id",
        );
        // Each row goes as soon as it is read: there may be thousands.
        let records = query.map(|row| read_record(&row)).fetch_all(&self.readers).await;
        records.map_err(self.failed("read the sandboxes from the ledger"))?.into_iter().collect()
    }
}

fn read_record(row: &SqliteRow) -> Result<Record, StoreError> {
    let what = format!("sandbox {}", column::<String>(row, "id")?);
    Ok(Record {
        id: parsed(row, "id")?,
        spec: json(row, "spec", &what)?,
        state: json(row, "rest", &what)?,
        save: optional(row, "save_id")?,
        facts: json(row, "facts", &what)?,
        created_at_ms: time(row, "created_at_ms")?,
        last_used_at_ms: time(row, "last_used_at_ms")?,
    })
}

//! What the ledger knows of snapshots.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::ledger::{Place, SnapshotFilter, SnapshotLedger};
use torpor_lifecycle::store::{SnapshotRecord, StoreError};
use torpor_protocol::{SnapshotId, SnapshotRef};

use super::{FIRST, SqliteLedger, column, json, limit_of, optional, parsed, to_column};

#[async_trait]
impl SnapshotLedger for SqliteLedger {
    async fn record_snapshot(&self, record: &SnapshotRecord) -> Result<(), StoreError> {
        let action = "record a snapshot in the ledger";
        let SnapshotRecord { snapshot, save } = record;
        let text = serde_json::to_string(snapshot).map_err(StoreError::failed(action))?;
        let query = sqlx::query(
            "INSERT INTO snapshots (id, name, save_id, snapshot, created_at_ms)
             VALUES (?, ?, ?, ?, ?)
             ON CONFLICT (id) DO UPDATE SET name = excluded.name, save_id = excluded.save_id,
                 snapshot = excluded.snapshot, created_at_ms = excluded.created_at_ms",
        )
        .bind(snapshot.id.as_str())
        .bind(snapshot.name.as_ref().map(|name| name.as_str()))
        .bind(save.as_ref().map(|save| save.as_str()))
        .bind(text)
        .bind(to_column(snapshot.created_at_ms));
        match (query.execute(&self.writer).await, &snapshot.name) {
            (Ok(_), _) => Ok(()),
            (Err(sqlx::Error::Database(error)), _) if error.is_foreign_key_violation() => {
                let save = save.as_ref().map(|save| save.to_string());
                Err(StoreError::NoSuchSave(save.unwrap_or_default()))
            }
            (Err(sqlx::Error::Database(error)), Some(name)) if error.is_unique_violation() => {
                Err(StoreError::NameTaken(name.clone()))
            }
            (Err(error), _) => Err(self.failed(action)(error)),
        }
    }

    async fn update_snapshot(&self, record: &SnapshotRecord) -> Result<bool, StoreError> {
        let action = "record a snapshot in the ledger";
        let SnapshotRecord { snapshot, save } = record;
        let text = serde_json::to_string(snapshot).map_err(StoreError::failed(action))?;
        let query = sqlx::query("UPDATE snapshots SET save_id = ?, snapshot = ? WHERE id = ?")
            .bind(save.as_ref().map(|save| save.as_str()))
            .bind(text)
            .bind(snapshot.id.as_str());
        match query.execute(&self.writer).await {
            Ok(done) => Ok(done.rows_affected() > 0),
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                let save = save.as_ref().map(|save| save.to_string());
                Err(StoreError::NoSuchSave(save.unwrap_or_default()))
            }
            Err(error) => Err(self.failed(action)(error)),
        }
    }

    async fn erase_snapshot(&self, id: &SnapshotId) -> Result<(), StoreError> {
        let query = sqlx::query("DELETE FROM snapshots WHERE id = ?").bind(id.as_str());
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("erase a snapshot from the ledger"))
    }

    async fn find_snapshot(&self, of: &SnapshotRef) -> Result<Option<SnapshotRecord>, StoreError> {
        let query = match of {
            SnapshotRef::Id(id) => {
                sqlx::query("SELECT * FROM snapshots WHERE id = ?").bind(id.as_str())
            }
            SnapshotRef::Name(name) => {
                sqlx::query("SELECT * FROM snapshots WHERE name = ?").bind(name.as_str())
            }
        };
        self.one("look up a snapshot", query, read_snapshot).await
    }

    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<&Place<SnapshotId>>,
        limit: usize,
    ) -> Result<Vec<SnapshotRecord>, StoreError> {
        let (action, after) = (
            "read the snapshots from the ledger",
            after.map_or(FIRST, |(at, id)| (to_column(*at), id.as_str())),
        );
        let SnapshotFilter { sandbox, sandbox_name } = filter;
        if sandbox.is_none() && sandbox_name.is_none() {
            let sql = "SELECT * FROM snapshots WHERE (created_at_ms, id) > (?, ?)
                 ORDER BY created_at_ms, id LIMIT ?";
            return self.page_by_time(action, sql, after, limit, read_snapshot).await;
        }
        let query = sqlx::query(
            "SELECT * FROM snapshots WHERE (created_at_ms, id) > (?, ?)
                 AND (json_extract(snapshot, '$.sandbox') = ?
                     OR json_extract(snapshot, '$.sandbox_name') = ?)
             ORDER BY created_at_ms, id LIMIT ?",
        )
        .bind(after.0)
        .bind(after.1)
        .bind(sandbox.as_ref().map(|id| id.as_str()))
        .bind(sandbox_name.as_ref().map(|name| name.as_str()))
        .bind(limit_of(limit));
        self.all(action, query, read_snapshot).await
    }

    async fn snapshot_ancestors(
        &self,
        of: &SnapshotId,
        limit: usize,
    ) -> Result<Vec<SnapshotId>, StoreError> {
        // A sandbox that was restored may be its own grandparent's child: UNION ends such a circle.
        let query = sqlx::query(
            "WITH RECURSIVE line (id) AS (
                 SELECT json_extract(snapshot, '$.parent') FROM snapshots WHERE id = ?1
                 UNION
                 SELECT json_extract(snapshot, '$.parent') FROM line
                     JOIN snapshots ON snapshots.id = line.id WHERE line.id <> ?1)
             SELECT id FROM line WHERE id IS NOT NULL AND id <> ?1 LIMIT ?2",
        )
        .bind(of.as_str())
        .bind(limit_of(limit));
        self.all("look up the ancestors of a snapshot", query, |row| parsed(row, "id")).await
    }
}

fn read_snapshot(row: &SqliteRow) -> Result<SnapshotRecord, StoreError> {
    let what = format!("snapshot {}", column::<String>(row, "id")?);
    Ok(SnapshotRecord { snapshot: json(row, "snapshot", &what)?, save: optional(row, "save_id")? })
}

//! What the ledger knows of snapshots.

use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::store::{SnapshotRecord, StoreError};
use torpor_protocol::SnapshotId;

use super::{Ledger, column, json, optional, to_column};

impl Ledger {
    pub(super) async fn put_snapshot(&self, record: &SnapshotRecord) -> Result<(), StoreError> {
        let action = "record a snapshot in the ledger";
        let SnapshotRecord { snapshot, save } = record;
        let text = serde_json::to_string(snapshot).map_err(StoreError::failed(action))?;
        let name = snapshot.name.as_ref().map(|name| name.as_str());
        let query = sqlx::query(
            "INSERT INTO snapshots (id, name, save_id, snapshot, created_at_ms)
             VALUES (?, ?, ?, ?, ?)
             ON CONFLICT (id) DO UPDATE SET name = excluded.name, save_id = excluded.save_id,
                 snapshot = excluded.snapshot, created_at_ms = excluded.created_at_ms",
        )
        .bind(snapshot.id.as_str())
        .bind(name)
        .bind(save.as_ref().map(|save| save.as_str()))
        .bind(text)
        .bind(to_column(snapshot.created_at_ms));
        match query.execute(&self.writer).await {
            Ok(_) => Ok(()),
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                let save = save.as_ref().map(|save| save.to_string());
                Err(StoreError::NoSuchSave(save.unwrap_or_default()))
            }
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
                let name = name.unwrap_or_default();
                Err(StoreError::Invalid(format!("another snapshot is called {name:?}")))
            }
            Err(error) => Err(self.failed(action)(error)),
        }
    }

    pub(super) async fn drop_snapshot(&self, id: &SnapshotId) -> Result<(), StoreError> {
        let query = sqlx::query("DELETE FROM snapshots WHERE id = ?").bind(id.as_str());
        let done = query.execute(&self.writer).await;
        done.map_err(self.failed("erase a snapshot from the ledger"))?;
        Ok(())
    }

    pub(super) async fn all_snapshots(&self) -> Result<Vec<SnapshotRecord>, StoreError> {
        let query =
            sqlx::query("SELECT id, save_id, snapshot FROM snapshots ORDER BY created_at_ms, id");
        let rows = query.fetch_all(&self.readers).await;
        let rows = rows.map_err(self.failed("read the snapshots from the ledger"))?;
        rows.iter().map(read_snapshot).collect()
    }
}

fn read_snapshot(row: &SqliteRow) -> Result<SnapshotRecord, StoreError> {
    let what = format!("snapshot {}", column::<String>(row, "id")?);
    Ok(SnapshotRecord { snapshot: json(row, "snapshot", &what)?, save: optional(row, "save_id")? })
}

//! What the ledger knows of pools.

use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::store::{PoolRecord, StoreError};
use torpor_protocol::Name;

use super::{Ledger, column, json, optional, parsed, time, to_column};

impl Ledger {
    pub(super) async fn put_pool(&self, record: &PoolRecord) -> Result<(), StoreError> {
        let action = "record a pool in the ledger";
        let spec = serde_json::to_string(&record.spec).map_err(StoreError::failed(action))?;
        let (snapshot, save) = record.from.as_ref().map(|(a, b)| (a.as_str(), b)).unzip();
        let query = sqlx::query(
            "INSERT INTO pools (name, save_id, snapshot_id, image_id, size, spec, max,
                 created_at_ms, updated_at_ms)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
             ON CONFLICT (name) DO UPDATE SET save_id = excluded.save_id,
                 snapshot_id = excluded.snapshot_id, image_id = excluded.image_id,
                 size = excluded.size, spec = excluded.spec, max = excluded.max,
                 created_at_ms = excluded.created_at_ms, updated_at_ms = excluded.updated_at_ms",
        )
        .bind(record.name.as_str())
        .bind(save.map(|save| save.as_str()))
        .bind(snapshot)
        .bind(record.spec.image_id.as_str())
        .bind(to_column(record.size as u64))
        .bind(spec)
        .bind(record.max.map(|max| to_column(max as u64)))
        .bind(to_column(record.created_at_ms))
        .bind(to_column(record.updated_at_ms));
        match query.execute(&self.writer).await {
            Ok(_) => Ok(()),
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                Err(self.missing(&record.spec.image_id, save).await)
            }
            Err(error) => Err(self.failed(action)(error)),
        }
    }

    pub(super) async fn drop_pool(&self, name: &Name) -> Result<(), StoreError> {
        let query = sqlx::query("DELETE FROM pools WHERE name = ?").bind(name.as_str());
        let done = query.execute(&self.writer).await;
        done.map_err(self.failed("erase a pool from the ledger"))?;
        Ok(())
    }

    pub(super) async fn all_pools(&self) -> Result<Vec<PoolRecord>, StoreError> {
        let query = sqlx::query("SELECT * FROM pools ORDER BY name");
        let rows = query.fetch_all(&self.readers).await;
        let rows = rows.map_err(self.failed("read the pools from the ledger"))?;
        rows.iter().map(read_pool).collect()
    }
}

fn read_pool(row: &SqliteRow) -> Result<PoolRecord, StoreError> {
    let what = format!("pool {}", column::<String>(row, "name")?);
    let max: Option<i64> = column(row, "max")?;
    Ok(PoolRecord {
        name: parsed(row, "name")?,
        size: usize::try_from(time(row, "size")?).unwrap_or(usize::MAX),
        spec: json(row, "spec", &what)?,
        from: optional(row, "snapshot_id")?.zip(optional(row, "save_id")?),
        max: max.map(|max| usize::try_from(max).unwrap_or(0)),
        created_at_ms: time(row, "created_at_ms")?,
        updated_at_ms: time(row, "updated_at_ms")?,
    })
}

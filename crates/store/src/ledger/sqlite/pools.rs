//! What the ledger knows of pools.

use async_trait::async_trait;
use sqlx::sqlite::{SqliteQueryResult, SqliteRow};
use torpor_lifecycle::ledger::{Aggregate, PoolLedger};
use torpor_lifecycle::store::{PoolRecord, StoreError};
use torpor_protocol::Name;

use super::{Query, SqliteLedger, column, json, optional, parsed, time, to_column};

#[async_trait]
impl PoolLedger for SqliteLedger {
    async fn create_pool(&self, record: &PoolRecord) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO pools (name, save_id, snapshot_id, image_id, size, spec, max,
                 created_at_ms, updated_at_ms)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
        );
        self.write_pool(query, record).await.map(drop)
    }

    async fn update_pool(&self, record: &PoolRecord) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "UPDATE pools SET save_id = ?2, snapshot_id = ?3, image_id = ?4, size = ?5, spec = ?6,
                 max = ?7, created_at_ms = ?8, updated_at_ms = ?9 WHERE name = ?1",
        );
        Ok(self.write_pool(query, record).await?.rows_affected() > 0)
    }

    async fn erase_pool(&self, name: &Name) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM pools WHERE name = ?").bind(name.as_str());
        let done = self.change(Aggregate::Pools, query).await;
        Ok(done.map_err(self.failed("erase a pool from the ledger"))?.rows_affected() > 0)
    }

    async fn pools(
        &self,
        after: Option<&Name>,
        limit: usize,
    ) -> Result<Vec<PoolRecord>, StoreError> {
        let sql = "SELECT * FROM pools WHERE name > ? ORDER BY name LIMIT ?";
        let after = after.map(|after| after.as_str());
        self.page("read the pools from the ledger", sql, after, limit, read_pool).await
    }
}

impl SqliteLedger {
    /// `query` takes the columns by these numbers.
    async fn write_pool(
        &self,
        query: Query<'_>,
        record: &PoolRecord,
    ) -> Result<SqliteQueryResult, StoreError> {
        let action = "record a pool in the ledger";
        let spec = serde_json::to_string(&record.spec).map_err(StoreError::failed(action))?;
        let (snapshot, save) = record.from.as_ref().map(|(a, b)| (a.to_string(), b)).unzip();
        let query = query
            .bind(record.name.to_string())
            .bind(save.map(ToString::to_string))
            .bind(snapshot)
            .bind(record.spec.image_id.to_string())
            .bind(to_column(record.size as u64))
            .bind(spec)
            .bind(record.max.map(|max| to_column(max as u64)))
            .bind(to_column(record.created_at_ms))
            .bind(to_column(record.updated_at_ms));
        match self.change(Aggregate::Pools, query).await {
            Ok(done) => Ok(done),
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                Err(self.missing(&record.spec.image_id, save).await)
            }
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
                Err(StoreError::NameTaken(record.name.clone()))
            }
            Err(error) => Err(self.failed(action)(error)),
        }
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

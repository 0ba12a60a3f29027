//! Rows of API keys.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use subtle::ConstantTimeEq;
use torpor_lifecycle::ledger::{Aggregate, Place};
use torpor_lifecycle::store::StoreError;

use super::super::{KeyHash, KeyLedger, KeyRow};
use super::{FIRST, SqliteLedger, column, time, to_column};

#[async_trait]
impl KeyLedger for SqliteLedger {
    async fn insert_key(&self, row: &KeyRow, hash: &KeyHash) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO api_keys (id, label, prefix, hash, created_at_ms) VALUES (?, ?, ?, ?, ?)",
        )
        .bind(&row.id)
        .bind(&row.label)
        .bind(&row.prefix)
        .bind(hash.to_vec())
        .bind(to_column(row.created_at_ms));
        let done = self.change(Aggregate::Keys, query).await;
        done.map(drop).map_err(self.failed("record an API key"))
    }

    async fn key_by_hash(&self, hash: &KeyHash) -> Result<Option<KeyRow>, StoreError> {
        let query = sqlx::query("SELECT * FROM api_keys WHERE hash = ?").bind(hash.to_vec());
        let row = query.fetch_optional(&self.readers).await;
        let Some(row) = row.map_err(self.failed("look up an API key"))? else { return Ok(None) };
        let stored: Vec<u8> = column(&row, "hash")?;
        if !bool::from(stored.ct_eq(hash)) {
            return Ok(None);
        }
        read_key(&row).map(Some)
    }

    async fn has_key(&self, id: &str) -> Result<bool, StoreError> {
        let query = sqlx::query("SELECT 1 FROM api_keys WHERE id = ?").bind(id);
        let row = query.fetch_optional(&self.readers).await;
        Ok(row.map_err(self.failed("look up an API key"))?.is_some())
    }

    async fn note_key_use(&self, id: &str, at_ms: u64) -> Result<(), StoreError> {
        let query = sqlx::query("UPDATE api_keys SET last_used_at_ms = ? WHERE id = ?")
            .bind(to_column(at_ms))
            .bind(id);
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("record the use of an API key"))
    }

    async fn keys(
        &self,
        after: Option<&Place<String>>,
        limit: usize,
    ) -> Result<Vec<KeyRow>, StoreError> {
        let sql = "SELECT * FROM api_keys WHERE (created_at_ms, id) > (?, ?)
             ORDER BY created_at_ms, id LIMIT ?";
        let after = after.map_or(FIRST, |(at, id)| (to_column(*at), id.as_str()));
        self.page_by_time("read the API keys", sql, after, limit, read_key).await
    }

    async fn count_keys(&self) -> Result<usize, StoreError> {
        let query = sqlx::query_scalar("SELECT count(*) FROM api_keys");
        let count: Result<i64, _> = query.fetch_one(&self.readers).await;
        let count = count.map_err(self.failed("count the API keys"))?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    async fn delete_key(&self, id: &str) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM api_keys WHERE id = ?").bind(id);
        let done = self.change(Aggregate::Keys, query).await;
        Ok(done.map_err(self.failed("delete an API key"))?.rows_affected() > 0)
    }

    async fn requires_keys(&self) -> Result<bool, StoreError> {
        let query = sqlx::query("SELECT 1 FROM keys_required");
        let row = query.fetch_optional(&self.readers).await;
        Ok(row.map_err(self.failed("read whether keys are needed"))?.is_some())
    }

    async fn require_keys(&self) -> Result<(), StoreError> {
        let query = sqlx::query("INSERT OR IGNORE INTO keys_required (id) VALUES (0)");
        let done = self.change(Aggregate::Keys, query).await;
        done.map(drop).map_err(self.failed("record that keys are needed"))
    }
}

fn read_key(row: &SqliteRow) -> Result<KeyRow, StoreError> {
    let last_used: Option<i64> = column(row, "last_used_at_ms")?;
    Ok(KeyRow {
        id: column(row, "id")?,
        label: column(row, "label")?,
        prefix: column(row, "prefix")?,
        created_at_ms: time(row, "created_at_ms")?,
        last_used_at_ms: last_used.and_then(|ms| u64::try_from(ms).ok()),
    })
}

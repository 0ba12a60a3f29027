//! Rows of requests that a client may repeat.

use async_trait::async_trait;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::SandboxId;

use super::super::{Begun, RequestLedger, Sealed};
use super::{SqliteLedger, column, parsed, to_column};

/// How long a request is remembered.
const REMEMBERED_MS: u64 = 24 * 60 * 60 * 1000;
/// Bytes of all that are remembered, each row counting [`ROW_BYTES`] besides its answer: the oldest go first.
const BYTES_MAX: i64 = 256 * 1024 * 1024;
const ROW_BYTES: i64 = 1024;
/// Looking for the oldest reads all rows, so that is done once in so many requests.
const PRUNE_EVERY: u64 = 256;

#[async_trait]
impl RequestLedger for SqliteLedger {
    async fn begin_request(
        &self,
        id: &str,
        fingerprint: &str,
        now_ms: u64,
    ) -> Result<Begun, StoreError> {
        let action = "record a request";
        let old = to_column(now_ms.saturating_sub(REMEMBERED_MS));
        let forget = sqlx::query("DELETE FROM requests WHERE created_at_ms < ?").bind(old);
        forget.execute(&self.writer).await.map_err(self.failed(action))?;
        let query = sqlx::query(
            "INSERT INTO requests (id, fingerprint, created_at_ms) VALUES (?, ?, ?)
             ON CONFLICT (id) DO NOTHING",
        );
        let query = query.bind(id).bind(fingerprint).bind(to_column(now_ms));
        let done = query.execute(&self.writer).await.map_err(self.failed(action))?;
        if done.rows_affected() > 0 {
            if done.last_insert_rowid().unsigned_abs() % PRUNE_EVERY == 0 {
                self.prune_requests().await?;
            }
            return Ok(Begun::New);
        }
        let query = sqlx::query("SELECT fingerprint, nonce, sealed FROM requests WHERE id = ?");
        let row = query.bind(id).fetch_optional(&self.writer).await;
        // It may have been forgotten in between.
        let Some(row) = row.map_err(self.failed(action))? else { return Ok(Begun::Unanswered) };
        if column::<String>(&row, "fingerprint")? != fingerprint {
            return Ok(Begun::Other);
        }
        let answer: (Option<Vec<u8>>, Option<Vec<u8>>) =
            (column(&row, "nonce")?, column(&row, "sealed")?);
        Ok(match answer {
            (Some(nonce), Some(bytes)) => Begun::Answered(Sealed { nonce, bytes }),
            (_, None) | (None, _) => Begun::Unanswered,
        })
    }

    async fn answer_request(&self, id: &str, answer: &Sealed) -> Result<(), StoreError> {
        let query = sqlx::query("UPDATE requests SET nonce = ?, sealed = ? WHERE id = ?");
        let query = query.bind(&answer.nonce).bind(&answer.bytes).bind(id);
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("record the answer to a request"))
    }

    async fn forget_request(&self, id: &str) -> Result<(), StoreError> {
        let query = sqlx::query("DELETE FROM requests WHERE id = ?").bind(id);
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("forget a request"))
    }

    async fn made_by(&self, request: &str) -> Result<Option<SandboxId>, StoreError> {
        let query =
            sqlx::query("SELECT id FROM sandboxes WHERE json_extract(facts, '$.request') = ?");
        self.one("look for what a request made", query.bind(request), |row| parsed(row, "id")).await
    }
}

impl SqliteLedger {
    async fn prune_requests(&self) -> Result<(), StoreError> {
        let query = sqlx::query(
            "DELETE FROM requests WHERE id IN (SELECT id FROM (
                 SELECT id, SUM(COALESCE(LENGTH(sealed), 0) + ?) OVER (
                     ORDER BY created_at_ms DESC, id) AS bytes FROM requests) WHERE bytes > ?)",
        );
        let done = query.bind(ROW_BYTES).bind(BYTES_MAX).execute(&self.writer).await;
        done.map(drop).map_err(self.failed("forget old requests"))
    }
}

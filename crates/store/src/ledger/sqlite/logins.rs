//! Rows of logins.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::store::StoreError;

use super::super::{LoginLedger, Sealed};
use super::{SqliteLedger, column, now_ms, to_column};

#[async_trait]
impl LoginLedger for SqliteLedger {
    async fn put_login(
        &self,
        registry: &str,
        username: &str,
        sealed: Sealed,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT OR REPLACE INTO registry_logins (registry, username, nonce, sealed, created_at_ms)
             VALUES (?, ?, ?, ?, ?)",
        )
        .bind(registry)
        .bind(username)
        .bind(sealed.nonce)
        .bind(sealed.bytes)
        .bind(to_column(now_ms()));
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("record a login in the ledger"))
    }

    async fn login(&self, registry: &str) -> Result<Option<(String, Sealed)>, StoreError> {
        let query = sqlx::query("SELECT * FROM registry_logins WHERE registry = ?").bind(registry);
        let read = |row: &SqliteRow| {
            let sealed = Sealed { nonce: column(row, "nonce")?, bytes: column(row, "sealed")? };
            Ok((column(row, "username")?, sealed))
        };
        self.one("look up a login", query, read).await
    }

    async fn logins(&self) -> Result<Vec<(String, String)>, StoreError> {
        let query = sqlx::query("SELECT registry, username FROM registry_logins ORDER BY registry");
        let read = |row: &SqliteRow| Ok((column(row, "registry")?, column(row, "username")?));
        self.all("list the logins", query, read).await
    }

    async fn drop_login(&self, registry: &str) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM registry_logins WHERE registry = ?").bind(registry);
        let done = query.execute(&self.writer).await;
        Ok(done.map_err(self.failed("remove a login from the ledger"))?.rows_affected() > 0)
    }
}

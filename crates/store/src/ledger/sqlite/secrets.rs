//! Rows of secrets.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::api::Secret;
use torpor_protocol::{HostBinding, SecretName};

use super::super::{Seal, Sealed, SecretLedger};
use super::{SqliteLedger, column, json, now_ms, parsed, time, to_column};

#[async_trait]
impl SecretLedger for SqliteLedger {
    async fn put_secret(
        &self,
        name: &SecretName,
        hosts: Option<Vec<HostBinding>>,
        seal: &Seal<'_>,
    ) -> Result<Secret, StoreError> {
        let action = "record a secret in the ledger";
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let found = sqlx::query("SELECT * FROM secrets WHERE name = ?").bind(name.as_str());
        let found = found.fetch_optional(&mut *transaction).await.map_err(self.failed(action))?;
        let now = now_ms();
        let mut secret = Secret {
            name: name.clone(),
            version: 1,
            hosts: Vec::new(),
            created_at_ms: now,
            updated_at_ms: now,
        };
        if let Some(row) = found {
            let before = read_secret(&row)?;
            secret.version = before.version.saturating_add(1);
            secret.created_at_ms = before.created_at_ms;
            secret.hosts = before.hosts;
        }
        secret.hosts = hosts.unwrap_or(secret.hosts);
        let sealed = seal(&secret)?;
        let hosts = serde_json::to_string(&secret.hosts).map_err(StoreError::failed(action))?;
        let query = sqlx::query(
            "INSERT OR REPLACE INTO secrets
                 (name, version, nonce, sealed, hosts, created_at_ms, updated_at_ms)
             VALUES (?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(name.as_str())
        .bind(secret.version)
        .bind(sealed.nonce)
        .bind(sealed.bytes)
        .bind(hosts)
        .bind(to_column(secret.created_at_ms))
        .bind(to_column(secret.updated_at_ms));
        query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        transaction.commit().await.map_err(self.failed(action))?;
        Ok(secret)
    }

    async fn secret(&self, name: &SecretName) -> Result<Option<(Secret, Sealed)>, StoreError> {
        let query = sqlx::query("SELECT * FROM secrets WHERE name = ?").bind(name.as_str());
        let read = |row: &SqliteRow| {
            let sealed = Sealed { nonce: column(row, "nonce")?, bytes: column(row, "sealed")? };
            Ok((read_secret(row)?, sealed))
        };
        self.one("look up a secret", query, read).await
    }

    async fn secrets(
        &self,
        after: Option<&SecretName>,
        limit: usize,
    ) -> Result<Vec<Secret>, StoreError> {
        let sql = "SELECT name, version, hosts, created_at_ms, updated_at_ms FROM secrets
             WHERE name > ? ORDER BY name LIMIT ?";
        let after = after.map(|after| after.as_str());
        self.page("list the secrets", sql, after, limit, read_secret).await
    }

    async fn drop_secret(&self, name: &SecretName) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM secrets WHERE name = ?").bind(name.as_str());
        let done = query.execute(&self.writer).await;
        Ok(done.map_err(self.failed("remove a secret from the ledger"))?.rows_affected() > 0)
    }
}

fn read_secret(row: &SqliteRow) -> Result<Secret, StoreError> {
    Ok(Secret {
        name: parsed(row, "name")?,
        version: column(row, "version")?,
        hosts: json(row, "hosts", "the hosts of a secret")?,
        created_at_ms: time(row, "created_at_ms")?,
        updated_at_ms: time(row, "updated_at_ms")?,
    })
}

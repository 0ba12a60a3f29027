//! Rows of previews and of the tokens that open them. A token is kept as a hash: who reads the ledger
//! can't use it.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::ledger::Aggregate;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::preview::Preview;
use torpor_protocol::{PreviewId, PreviewTarget, TokenId};

use super::super::{PreviewLedger, TokenRow};
use super::{SqliteLedger, column, json, parsed, time, to_column};

#[async_trait]
impl PreviewLedger for SqliteLedger {
    async fn record_preview(&self, preview: &Preview) -> Result<(), StoreError> {
        let action = "record a preview in the ledger";
        let kept = Preview { urls: Vec::new(), ..preview.clone() };
        let text = serde_json::to_string(&kept).map_err(StoreError::failed(action))?;
        let (sandbox, service) = match &preview.target {
            PreviewTarget::Sandbox(id) => (Some(id.as_str()), None),
            PreviewTarget::Service(id) => (None, Some(id.as_str())),
        };
        let query = sqlx::query(
            "INSERT INTO previews (id, sandbox_id, service_id, name, label, preview, created_at_ms)
             VALUES (?, ?, ?, ?, ?, ?, ?)
             ON CONFLICT (id) DO UPDATE SET name = excluded.name, label = excluded.label,
                 preview = excluded.preview",
        )
        .bind(preview.id.as_str())
        .bind(sandbox)
        .bind(service)
        .bind(preview.name.as_str())
        .bind(preview.label.as_str())
        .bind(text)
        .bind(to_column(preview.created_at_ms));
        match self.change(Aggregate::Previews, query).await {
            Ok(_) => Ok(()),
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                Err(StoreError::Invalid(match (sandbox, service) {
                    (Some(id), _) => format!("sandbox {id} is gone"),
                    (None, id) => format!("service {} is gone", id.unwrap_or_default()),
                }))
            }
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
                Err(StoreError::Invalid(format!(
                    "another preview is called {} or has the label {}",
                    preview.name, preview.label
                )))
            }
            Err(error) => Err(self.failed(action)(error)),
        }
    }

    async fn previews(
        &self,
        after: Option<&PreviewId>,
        limit: usize,
    ) -> Result<Vec<Preview>, StoreError> {
        let sql = "SELECT id, preview FROM previews WHERE id > ? ORDER BY id LIMIT ?";
        let after = after.map(|after| after.as_str());
        self.page("read the previews from the ledger", sql, after, limit, read_preview).await
    }

    async fn erase_preview(&self, id: &PreviewId) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM previews WHERE id = ?").bind(id.as_str());
        let done = self.change(Aggregate::Previews, query).await;
        Ok(done.map_err(self.failed("remove a preview from the ledger"))?.rows_affected() > 0)
    }

    async fn record_preview_token(&self, token: &TokenRow) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO preview_tokens (id, preview_id, hash, expires_at_ms, created_at_ms)
             VALUES (?, ?, ?, ?, ?)",
        )
        .bind(token.id.as_str())
        .bind(token.preview.as_str())
        .bind(token.hash.to_vec())
        .bind(token.expires_at_ms.map(to_column))
        .bind(to_column(token.created_at_ms));
        match self.change(Aggregate::Previews, query).await {
            Ok(_) => Ok(()),
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                Err(StoreError::Invalid(format!("preview {} is gone", token.preview)))
            }
            Err(error) => Err(self.failed("record a token of a preview in the ledger")(error)),
        }
    }

    async fn preview_tokens(
        &self,
        after: Option<&TokenId>,
        limit: usize,
    ) -> Result<Vec<TokenRow>, StoreError> {
        let action = "read the tokens of previews from the ledger";
        let sql = "SELECT * FROM preview_tokens WHERE id > ? ORDER BY id LIMIT ?";
        self.page(action, sql, after.map(|after| after.as_str()), limit, read_token).await
    }

    async fn erase_preview_token(&self, id: &TokenId) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM preview_tokens WHERE id = ?").bind(id.as_str());
        let done = self.change(Aggregate::Previews, query).await;
        let done = done.map_err(self.failed("remove a token of a preview from the ledger"))?;
        Ok(done.rows_affected() > 0)
    }
}

fn read_preview(row: &SqliteRow) -> Result<Preview, StoreError> {
    json(row, "preview", &format!("preview {}", column::<String>(row, "id")?))
}

fn read_token(row: &SqliteRow) -> Result<TokenRow, StoreError> {
    let (id, hash): (TokenId, Vec<u8>) = (parsed(row, "id")?, column(row, "hash")?);
    let hash = hash.try_into().map_err(|_| {
        StoreError::failed(format!("read {id} from the ledger"))("its hash is not one")
    })?;
    let expires: Option<i64> = column(row, "expires_at_ms")?;
    Ok(TokenRow {
        preview: parsed(row, "preview_id")?,
        expires_at_ms: expires.map(|ms| u64::try_from(ms).unwrap_or(0)),
        created_at_ms: time(row, "created_at_ms")?,
        id,
        hash,
    })
}

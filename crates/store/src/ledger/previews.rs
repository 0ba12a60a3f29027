//! What the ledger knows of previews and of the tokens that open them. A token is kept as a hash: who
//! reads the ledger can't use it. Both go with their sandbox, in the same instant.

use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::preview::Preview;
use torpor_protocol::{PreviewId, TokenId};

use super::{Ledger, column, json, parsed, time, to_column};

/// A token that opens a preview; not its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRow {
    pub id: TokenId,
    pub preview: PreviewId,
    /// SHA-256.
    pub hash: [u8; 32],
    pub expires_at_ms: Option<u64>,
    pub created_at_ms: u64,
}

impl Ledger {
    /// Inserts or replaces; its URLs are not kept. [`StoreError::Invalid`] if its sandbox is gone, or
    /// another one has its name or label.
    pub async fn record_preview(&self, preview: &Preview) -> Result<(), StoreError> {
        let action = "record a preview in the ledger";
        let kept = Preview { urls: Vec::new(), ..preview.clone() };
        let text = serde_json::to_string(&kept).map_err(StoreError::failed(action))?;
        let query = sqlx::query(
            "INSERT INTO previews (id, sandbox_id, name, label, preview, created_at_ms)
             VALUES (?, ?, ?, ?, ?, ?)
             ON CONFLICT (id) DO UPDATE SET name = excluded.name, label = excluded.label,
                 preview = excluded.preview",
        )
        .bind(preview.id.as_str())
        .bind(preview.sandbox.as_str())
        .bind(preview.name.as_str())
        .bind(preview.label.as_str())
        .bind(text)
        .bind(to_column(preview.created_at_ms));
        match query.execute(&self.writer).await {
            Ok(_) => Ok(()),
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                Err(StoreError::Invalid(format!("sandbox {} is gone", preview.sandbox)))
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

    /// All previews, oldest first.
    pub async fn previews(&self) -> Result<Vec<Preview>, StoreError> {
        let query = sqlx::query("SELECT id, preview FROM previews ORDER BY created_at_ms, id");
        let rows = query.fetch_all(&self.readers).await;
        let rows = rows.map_err(self.failed("read the previews from the ledger"))?;
        let read = |row| json(row, "preview", &format!("preview {}", column::<String>(row, "id")?));
        rows.iter().map(read).collect()
    }

    /// Whether there was one; its tokens go with it.
    pub async fn erase_preview(&self, id: &PreviewId) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM previews WHERE id = ?").bind(id.as_str());
        let done = query.execute(&self.writer).await;
        Ok(done.map_err(self.failed("remove a preview from the ledger"))?.rows_affected() > 0)
    }

    /// [`StoreError::Invalid`] if its preview is gone.
    pub async fn record_preview_token(&self, token: &TokenRow) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO preview_tokens (id, preview_id, hash, expires_at_ms, created_at_ms)
             VALUES (?, ?, ?, ?, ?)",
        )
        .bind(token.id.as_str())
        .bind(token.preview.as_str())
        .bind(token.hash.to_vec())
        .bind(token.expires_at_ms.map(to_column))
        .bind(to_column(token.created_at_ms));
        match query.execute(&self.writer).await {
            Ok(_) => Ok(()),
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                Err(StoreError::Invalid(format!("preview {} is gone", token.preview)))
            }
            Err(error) => Err(self.failed("record a token of a preview in the ledger")(error)),
        }
    }

    /// The tokens of all previews, oldest first.
    pub async fn preview_tokens(&self) -> Result<Vec<TokenRow>, StoreError> {
        let query = sqlx::query("SELECT * FROM preview_tokens ORDER BY created_at_ms, id");
        let rows = query.fetch_all(&self.readers).await;
        let rows = rows.map_err(self.failed("read the tokens of previews from the ledger"))?;
        rows.iter().map(read_token).collect()
    }

    /// Whether there was one.
    pub async fn erase_preview_token(&self, id: &TokenId) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM preview_tokens WHERE id = ?").bind(id.as_str());
        let done = query.execute(&self.writer).await;
        let done = done.map_err(self.failed("remove a token of a preview from the ledger"))?;
        Ok(done.rows_affected() > 0)
    }
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

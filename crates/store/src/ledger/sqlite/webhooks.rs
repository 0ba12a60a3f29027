//! Rows of webhooks.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::WebhookId;
use torpor_protocol::event::{LastAttempt, UpdateWebhook, WEBHOOKS_MAX, Webhook};

use super::super::{Sealed, WebhookLedger, WebhookSecrets};
use super::{SqliteLedger, column, json, limit_of, optional, parsed, time, to_column};

#[async_trait]
impl WebhookLedger for SqliteLedger {
    async fn create_webhook(&self, webhook: &Webhook, secret: &Sealed) -> Result<(), StoreError> {
        let action = "record a webhook in the ledger";
        let text = |error| StoreError::failed(action)(error);
        let query = sqlx::query(
            "INSERT INTO webhooks (id, url, kinds, labels, enabled, nonce, sealed, created_at_ms)
             SELECT ?, ?, ?, ?, ?, ?, ?, ? WHERE (SELECT count(*) FROM webhooks) < ?",
        )
        .bind(webhook.id.as_str())
        .bind(&webhook.url)
        .bind(serde_json::to_string(&webhook.types).map_err(text)?)
        .bind(serde_json::to_string(&webhook.labels).map_err(text)?)
        .bind(webhook.enabled)
        .bind(&secret.nonce)
        .bind(&secret.bytes)
        .bind(to_column(webhook.created_at_ms))
        .bind(limit_of(WEBHOOKS_MAX));
        let done = query.execute(&self.writer).await.map_err(self.failed(action))?;
        if done.rows_affected() == 0 {
            return Err(StoreError::Invalid(format!("there are {WEBHOOKS_MAX} webhooks already")));
        }
        Ok(())
    }

    async fn find_webhook(&self, id: &WebhookId) -> Result<Option<Webhook>, StoreError> {
        let query = sqlx::query("SELECT * FROM webhooks WHERE id = ?").bind(id.as_str());
        self.one("look up a webhook", query, read_webhook).await
    }

    async fn webhooks(
        &self,
        after: Option<&WebhookId>,
        limit: usize,
    ) -> Result<Vec<Webhook>, StoreError> {
        let sql = "SELECT * FROM webhooks WHERE id > ? ORDER BY id LIMIT ?";
        let after = after.map(|after| after.as_str());
        self.page("list the webhooks", sql, after, limit, read_webhook).await
    }

    async fn update_webhook(
        &self,
        id: &WebhookId,
        changes: &UpdateWebhook,
    ) -> Result<Option<Webhook>, StoreError> {
        let action = "change a webhook in the ledger";
        let failed = |error| StoreError::failed(action)(error);
        let kinds = changes.types.as_ref().map(serde_json::to_string).transpose();
        let labels = changes.labels.as_ref().map(serde_json::to_string).transpose();
        let query = sqlx::query(
            "UPDATE webhooks SET url = coalesce(?2, url), kinds = coalesce(?3, kinds),
                 labels = coalesce(?4, labels), enabled = coalesce(?5, enabled),
                 disabled_reason = CASE WHEN ?5 IS NULL THEN disabled_reason END
             WHERE id = ?1 RETURNING *",
        )
        .bind(id.as_str())
        .bind(changes.url.as_deref())
        .bind(kinds.map_err(failed)?)
        .bind(labels.map_err(failed)?)
        .bind(changes.enabled);
        let row = query.fetch_optional(&self.writer).await.map_err(self.failed(action))?;
        row.as_ref().map(read_webhook).transpose()
    }

    async fn rotate_webhook(
        &self,
        id: &WebhookId,
        secret: &Sealed,
        previous_until_ms: u64,
    ) -> Result<Option<Webhook>, StoreError> {
        let action = "record a new secret of a webhook";
        let query = sqlx::query(
            "UPDATE webhooks SET previous_nonce = nonce, previous_sealed = sealed,
                 previous_until_ms = ?2, nonce = ?3, sealed = ?4
             WHERE id = ?1 RETURNING *",
        )
        .bind(id.as_str())
        .bind(to_column(previous_until_ms))
        .bind(&secret.nonce)
        .bind(&secret.bytes);
        let row = query.fetch_optional(&self.writer).await.map_err(self.failed(action))?;
        row.as_ref().map(read_webhook).transpose()
    }

    async fn erase_webhook(&self, id: &WebhookId) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM webhooks WHERE id = ?").bind(id.as_str());
        let done = query.execute(&self.writer).await;
        Ok(done.map_err(self.failed("remove a webhook from the ledger"))?.rows_affected() > 0)
    }
}

fn read_webhook(row: &SqliteRow) -> Result<Webhook, StoreError> {
    let what = "a webhook";
    Ok(Webhook {
        id: parsed(row, "id")?,
        url: column(row, "url")?,
        types: json(row, "kinds", what)?,
        labels: json(row, "labels", what)?,
        enabled: column(row, "enabled")?,
        disabled_reason: optional(row, "disabled_reason")?,
        created_at_ms: time(row, "created_at_ms")?,
        last: read_last(row)?,
    })
}

/// What came of the last attempt, if there was one.
pub(super) fn read_last(row: &SqliteRow) -> Result<Option<LastAttempt>, StoreError> {
    let tried: Option<String> = column(row, "last")?;
    tried.map(|_| json(row, "last", "what came of a delivery")).transpose()
}

/// Of a row that has the columns of a webhook.
pub(super) fn read_secrets(row: &SqliteRow) -> Result<WebhookSecrets, StoreError> {
    let previous = match (column(row, "previous_nonce")?, column(row, "previous_sealed")?) {
        (Some(nonce), Some(bytes)) => {
            let until_ms: Option<i64> = column(row, "previous_until_ms")?;
            let until_ms = u64::try_from(until_ms.unwrap_or_default()).unwrap_or(0);
            Some((Sealed { nonce, bytes }, until_ms))
        }
        (None::<Vec<u8>>, _) | (_, None::<Vec<u8>>) => None,
    };
    let present = Sealed { nonce: column(row, "nonce")?, bytes: column(row, "sealed")? };
    Ok(WebhookSecrets { present, previous })
}

//! Rows of deliveries. Those of events are written by a trigger, which is in the migration.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use sqlx::{Sqlite, Transaction};
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::event::{Delivery, DeliveryState, DisabledReason, LastAttempt};
use torpor_protocol::{DeliveryId, WebhookId};

use super::super::{
    Addressee, Claiming, DeliveryClaim, DeliveryLedger, NewDelivery, Next, Sealed, Target,
};
use super::events::read_kind;
use super::webhooks::{read_last, read_secrets};
use super::{LAST, Query, SqliteLedger, column, limit_of, parsed, time, to_column};

#[async_trait]
impl DeliveryLedger for SqliteLedger {
    async fn record_delivery(&self, delivery: &NewDelivery) -> Result<(), StoreError> {
        match insert_delivery(delivery).execute(&self.writer).await {
            Ok(_) => Ok(()),
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                Err(StoreError::Invalid("the webhook is gone".to_owned()))
            }
            Err(error) => Err(self.failed("record a delivery")(error)),
        }
    }

    async fn deliveries(
        &self,
        webhook: &WebhookId,
        before: Option<&Place<DeliveryId>>,
        limit: usize,
    ) -> Result<Vec<Delivery>, StoreError> {
        let before = before.map_or(LAST, |(at, id)| (to_column(*at), id.as_str()));
        let query = sqlx::query(
            "SELECT * FROM deliveries WHERE webhook_id = ? AND (created_at_ms, id) < (?, ?)
             ORDER BY created_at_ms DESC, id DESC LIMIT ?",
        )
        .bind(webhook.as_str())
        .bind(before.0)
        .bind(before.1)
        .bind(limit_of(limit));
        self.all("list the deliveries of a webhook", query, read_delivery).await
    }

    async fn redeliver(
        &self,
        webhook: &WebhookId,
        id: &DeliveryId,
    ) -> Result<Option<Delivery>, StoreError> {
        // Attempts go on counting: whoever tries it at this moment must not be taken for the next one.
        let query = sqlx::query(
            "UPDATE deliveries SET state = 'pending', due_at_ms = 0, expires_at_ms = NULL,
                 lease_until_ms = CASE state WHEN 'pending' THEN lease_until_ms ELSE 0 END
             WHERE id = ? AND webhook_id = ? RETURNING *",
        )
        .bind(id.as_str())
        .bind(webhook.as_str());
        let row = query.fetch_optional(&self.writer).await;
        let row = row.map_err(self.failed("record that something is to be delivered again"))?;
        row.as_ref().map(read_delivery).transpose()
    }

    async fn next_delivery(&self) -> Result<Option<u64>, StoreError> {
        // Each webhook, and then nobody: so an index answers each.
        let query = sqlx::query(
            "SELECT min(due) AS due FROM (
                 SELECT (SELECT min(max(due_at_ms, lease_until_ms)) FROM deliveries
                     WHERE webhook_id = w.id AND state = 'pending') AS due
                 FROM webhooks AS w WHERE w.enabled = 1
                 UNION ALL
                 SELECT min(max(due_at_ms, lease_until_ms)) FROM deliveries
                 WHERE webhook_id IS NULL AND state = 'pending')",
        );
        let read = |row: &SqliteRow| column::<Option<i64>>(row, "due");
        let due = self.one("look for the next delivery", query, read).await?.flatten();
        Ok(due.map(|due| u64::try_from(due).unwrap_or(0)))
    }

    async fn claim_deliveries(
        &self,
        claiming: &Claiming,
    ) -> Result<Vec<DeliveryClaim>, StoreError> {
        let action = "claim deliveries";
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        // Who has fewest under way goes first: those whose receivers are slow do not take all the room for good.
        let whose = sqlx::query(
            "SELECT id FROM (SELECT id FROM webhooks WHERE enabled = 1 UNION ALL SELECT NULL) AS w
             ORDER BY (SELECT count(*) FROM deliveries WHERE webhook_id IS w.id AND state = 'pending'
                 AND lease_until_ms > ?), random()",
        )
        .bind(to_column(claiming.now_ms));
        let whose = whose.fetch_all(&mut *transaction).await.map_err(self.failed(action))?;
        let mut claims = Vec::new();
        for row in whose {
            let webhook: Option<String> = column(&row, "id")?;
            let room = claiming.limit.saturating_sub(claims.len());
            if room > 0 {
                let of = webhook.as_deref();
                claims.extend(self.claim_of(&mut transaction, of, claiming, room).await?);
            }
        }
        transaction.commit().await.map_err(self.failed(action))?;
        Ok(claims)
    }

    async fn finish_delivery(
        &self,
        claim: &DeliveryClaim,
        attempt: &LastAttempt,
        next: &Next,
    ) -> Result<bool, StoreError> {
        let action = "record what came of a delivery";
        let last = serde_json::to_string(attempt).map_err(StoreError::failed(action))?;
        let (state, due) = match next {
            Next::Delivered => (DeliveryState::Delivered, 0),
            Next::Again { at_ms } => (DeliveryState::Pending, *at_ms),
            Next::Failed | Next::Disabled(_) => (DeliveryState::Failed, 0),
        };
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let query = sqlx::query(
            "UPDATE deliveries SET state = ?4, due_at_ms = ?5, last = ?6, node = NULL,
                 lease_until_ms = 0
             WHERE id = ?1 AND attempts = ?2 AND node = ?3 AND state = 'pending'",
        )
        .bind(claim.id.as_str())
        .bind(claim.attempt)
        .bind(self.node.as_str())
        .bind(state.as_str())
        .bind(to_column(due))
        .bind(&last);
        let done = query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        if done.rows_affected() == 0 {
            return Ok(false);
        }
        if let Target::Webhook { id, .. } = &claim.target {
            let disabled = match next {
                Next::Disabled(DisabledReason::Gone) => Some("gone"),
                Next::Delivered | Next::Again { .. } | Next::Failed => None,
            };
            let query = sqlx::query(
                "UPDATE webhooks SET last = ?2, enabled = enabled AND ?3 IS NULL,
                     disabled_reason = coalesce(?3, disabled_reason) WHERE id = ?1",
            )
            .bind(id.as_str())
            .bind(&last)
            .bind(disabled);
            query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        }
        transaction.commit().await.map_err(self.failed(action))?;
        Ok(true)
    }

    async fn release_deliveries(&self) -> Result<(), StoreError> {
        let query = sqlx::query(
            "UPDATE deliveries SET lease_until_ms = 0
             WHERE state = 'pending' AND lease_until_ms > 0 AND node = ?",
        )
        .bind(self.node.as_str());
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("let go of the deliveries of this node"))
    }

    async fn sweep_deliveries(
        &self,
        now_ms: u64,
        waiting: usize,
        remembered: usize,
    ) -> Result<(), StoreError> {
        let action = "sweep the deliveries";
        let failed = |why: &str| {
            let (error, status) = (Some(why.to_owned()), None);
            serde_json::to_string(&LastAttempt { at_ms: now_ms, status, error, took_ms: 0 })
        };
        let text = |text: serde_json::Result<String>| text.map_err(StoreError::failed(action));
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let expire = sqlx::query(
            "UPDATE deliveries SET state = 'failed', last = coalesce(last, ?2)
             WHERE state = 'pending' AND expires_at_ms < ?1 AND lease_until_ms < ?1",
        )
        .bind(to_column(now_ms))
        .bind(text(failed("it was not delivered in time"))?);
        // All that wait are looked at, once a minute: there are not more than may wait.
        let refuse = sqlx::query(
            "UPDATE deliveries SET state = 'failed', last = coalesce(last, ?2) WHERE id IN (
                 SELECT id FROM (SELECT id, row_number() OVER (
                         PARTITION BY webhook_id ORDER BY created_at_ms DESC, id DESC) AS place
                     FROM deliveries WHERE state = 'pending' AND lease_until_ms = 0)
                 WHERE place > ?1)",
        )
        .bind(limit_of(waiting))
        .bind(text(failed("too many waited"))?);
        let forget = sqlx::query(
            "DELETE FROM deliveries WHERE id IN (
                 SELECT id FROM (SELECT id, row_number() OVER (
                         PARTITION BY webhook_id ORDER BY created_at_ms DESC, id DESC) AS place
                     FROM deliveries WHERE state <> 'pending')
                 WHERE place > ?1)",
        )
        .bind(limit_of(remembered));
        for query in [expire, refuse, forget] {
            query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        }
        transaction.commit().await.map_err(self.failed(action))
    }
}

/// Puts it into the outbox.
pub(super) fn insert_delivery(delivery: &NewDelivery) -> Query<'_> {
    let (webhook, url, secret) = match &delivery.to {
        Addressee::Webhook(id) => (Some(id.as_str()), None, None),
        Addressee::Once { url, secret } => (None, Some(url.as_str()), Some(secret)),
    };
    sqlx::query(
        "INSERT INTO deliveries
             (id, webhook_id, event_id, kind, subject, body, url, nonce, sealed, created_at_ms)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(delivery.id.as_str())
    .bind(webhook)
    .bind(delivery.event.as_str())
    .bind(delivery.kind.as_str())
    .bind(&delivery.subject)
    .bind(&delivery.body)
    .bind(url)
    .bind(secret.map(|secret| secret.nonce.as_slice()))
    .bind(secret.map(|secret| secret.bytes.as_slice()))
    .bind(to_column(delivery.created_at_ms))
}

impl SqliteLedger {
    /// What is due of one webhook, or of those to nobody who is known, as far as there is room.
    async fn claim_of(
        &self,
        transaction: &mut Transaction<'_, Sqlite>,
        webhook: Option<&str>,
        claiming: &Claiming,
        room: usize,
    ) -> Result<Vec<DeliveryClaim>, StoreError> {
        let action = "claim deliveries";
        let query = sqlx::query(
            "UPDATE deliveries SET node = ?3, attempts = attempts + 1, lease_until_ms = ?4,
                 expires_at_ms = coalesce(expires_at_ms, ?5)
             WHERE id IN (
                 SELECT id FROM deliveries WHERE webhook_id IS ?1 AND state = 'pending'
                     AND due_at_ms <= ?2 AND lease_until_ms <= ?2
                 ORDER BY due_at_ms, created_at_ms
                 LIMIT min(?7, max(0, ?6 - (SELECT count(*) FROM deliveries
                     WHERE webhook_id IS ?1 AND state = 'pending' AND lease_until_ms > ?2))))
             RETURNING *",
        )
        .bind(webhook)
        .bind(to_column(claiming.now_ms))
        .bind(self.node.as_str())
        .bind(to_column(claiming.lease_until_ms))
        .bind(to_column(claiming.expires_at_ms))
        .bind(limit_of(claiming.each))
        .bind(limit_of(room));
        let rows = query.fetch_all(&mut **transaction).await.map_err(self.failed(action))?;
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let found = sqlx::query("SELECT * FROM webhooks WHERE id = ?").bind(webhook);
        let found = found.fetch_optional(&mut **transaction).await.map_err(self.failed(action))?;
        rows.iter().map(|row| read_claim(row, found.as_ref())).collect()
    }
}

fn read_claim(row: &SqliteRow, webhook: Option<&SqliteRow>) -> Result<DeliveryClaim, StoreError> {
    let target = match webhook {
        Some(webhook) => Target::Webhook {
            id: parsed(webhook, "id")?,
            url: column(webhook, "url")?,
            secrets: read_secrets(webhook)?,
        },
        None => Target::Once {
            url: column(row, "url")?,
            secret: Sealed { nonce: column(row, "nonce")?, bytes: column(row, "sealed")? },
        },
    };
    Ok(DeliveryClaim {
        id: parsed(row, "id")?,
        event: parsed(row, "event_id")?,
        body: column(row, "body")?,
        target,
        attempt: column(row, "attempts")?,
        expires_at_ms: time(row, "expires_at_ms")?,
    })
}

fn read_delivery(row: &SqliteRow) -> Result<Delivery, StoreError> {
    let state: DeliveryState = parsed(row, "state")?;
    Ok(Delivery {
        id: parsed(row, "id")?,
        event: parsed(row, "event_id")?,
        kind: read_kind(row)?,
        subject: column(row, "subject")?,
        state,
        attempts: column(row, "attempts")?,
        created_at_ms: time(row, "created_at_ms")?,
        next_at_ms: match state {
            DeliveryState::Pending => Some(time(row, "due_at_ms")?).filter(|due| *due > 0),
            DeliveryState::Delivered | DeliveryState::Failed => None,
        },
        last: read_last(row)?,
    })
}

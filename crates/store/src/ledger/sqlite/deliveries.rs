//! Rows of deliveries. Those of events are written by a trigger, which is in the migration.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use sqlx::{Sqlite, Transaction};
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::event::{Delivery, DeliveryState, DisabledReason, LastAttempt};
use torpor_protocol::{DeliveryId, WebhookId};

use super::super::{
    Addressee, Claiming, DeliveryClaim, DeliveryLedger, NewDelivery, Next, OutboxBounds,
    OutboxLength, Sealed, Target,
};
use super::events::read_kind;
use super::webhooks::{read_last, read_secrets};
use super::{LAST, Query, SqliteLedger, column, limit_of, parsed, time, to_column};

/// Jumps from lane to lane of those that have something that waits: reads one entry of an index for each, however
/// much waits in it. Nothing is sent to a webhook that is disabled.
macro_rules! of_lanes {
    ($query:literal) => {
        concat!(
            "WITH RECURSIVE every (lane) AS (
                 SELECT min(lane) FROM deliveries WHERE state = 'pending'
                 UNION ALL
                 SELECT (SELECT min(lane) FROM deliveries
                     WHERE state = 'pending' AND lane > every.lane)
                 FROM every WHERE lane IS NOT NULL),
             open (lane, next_at_ms) AS (
                 SELECT lane, (SELECT min(next_at_ms) FROM deliveries
                     WHERE state = 'pending' AND lane = every.lane)
                 FROM every
                 WHERE lane IS NOT NULL AND lane NOT IN (SELECT id FROM webhooks WHERE enabled = 0)) ",
            $query
        )
    };
}

pub(super) const NEXT: &str = of_lanes!("SELECT min(next_at_ms) AS due FROM open");

/// Who has fewest under way goes first: those whose receivers are slow do not take all the room for good.
pub(super) const LANES_DUE: &str = of_lanes!(
    "SELECT lane FROM open WHERE next_at_ms <= ?1
     ORDER BY (SELECT count(*) FROM deliveries WHERE lane = open.lane AND state = 'pending'
         AND lease_until_ms > 0 AND lease_until_ms > ?1), random()"
);

pub(super) const CLAIM: &str = "
    UPDATE deliveries SET node = ?3, attempts = attempts + 1, lease_until_ms = ?4,
        expires_at_ms = coalesce(expires_at_ms, ?5)
    WHERE id IN (
        SELECT id FROM deliveries WHERE lane = ?1 AND state = 'pending' AND next_at_ms <= ?2
        ORDER BY next_at_ms, created_at_ms
        LIMIT min(?7, max(0, ?6 - (SELECT count(*) FROM deliveries
            WHERE lane = ?1 AND state = 'pending' AND lease_until_ms > 0 AND lease_until_ms > ?2))))
    RETURNING *";

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
        let query = sqlx::query(NEXT);
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
        let whose = sqlx::query(LANES_DUE).bind(to_column(claiming.now_ms));
        let whose = whose.fetch_all(&mut *transaction).await.map_err(self.failed(action))?;
        let mut claims = Vec::new();
        for row in whose {
            let lane: String = column(&row, "lane")?;
            let room = claiming.limit.saturating_sub(claims.len());
            if room > 0 {
                claims.extend(self.claim_of(&mut transaction, &lane, claiming, room).await?);
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

    async fn release_deliveries(&self, latest_ms: u64) -> Result<(), StoreError> {
        let action = "let go of the deliveries of this node";
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let release = sqlx::query(
            "UPDATE deliveries SET lease_until_ms = 0
             WHERE state = 'pending' AND lease_until_ms > 0 AND node = ?",
        )
        .bind(self.node.as_str());
        let clamp = sqlx::query(
            "UPDATE deliveries SET due_at_ms = ?1 WHERE state = 'pending' AND due_at_ms > ?1",
        )
        .bind(to_column(latest_ms));
        for query in [release, clamp] {
            query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        }
        transaction.commit().await.map_err(self.failed(action))
    }

    async fn outbox_length(&self) -> Result<OutboxLength, StoreError> {
        let query = sqlx::query(
            "SELECT (SELECT count(*) FROM invocations WHERE state = 'queued') AS queued,
                 (SELECT count(*) FROM invocations WHERE state = 'running') AS running,
                 (SELECT count(*) FROM deliveries WHERE state = 'pending') AS deliveries",
        );
        let read = |row: &SqliteRow| {
            let [queued, running, deliveries] =
                [time(row, "queued")?, time(row, "running")?, time(row, "deliveries")?];
            Ok(OutboxLength { queued, running, deliveries })
        };
        Ok(self.one("count what is to be delivered", query, read).await?.unwrap_or_default())
    }

    async fn sweep_deliveries(&self, bounds: &OutboxBounds) -> Result<(), StoreError> {
        let action = "sweep the deliveries";
        let OutboxBounds { now_ms, oldest_ms, waiting, remembered } = *bounds;
        let failed = |why: &str| {
            let (error, status) = (Some(why.to_owned()), None);
            serde_json::to_string(&LastAttempt { at_ms: now_ms, status, error, took_ms: 0 })
        };
        let text = |text: serde_json::Result<String>| text.map_err(StoreError::failed(action));
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let expire = sqlx::query(
            "UPDATE deliveries SET state = 'failed', last = coalesce(last, ?3)
             WHERE state = 'pending' AND lease_until_ms < ?1 AND (expires_at_ms < ?1
                 OR expires_at_ms IS NULL AND created_at_ms < ?2
                     AND webhook_id IN (SELECT id FROM webhooks WHERE enabled = 0))",
        )
        .bind(to_column(now_ms))
        .bind(to_column(oldest_ms))
        .bind(text(failed("it was not delivered in time"))?);
        // All that wait are looked at, once a minute: there are not more than may wait.
        let refuse = sqlx::query(
            "UPDATE deliveries SET state = 'failed', last = coalesce(last, ?2) WHERE id IN (
                 SELECT id FROM (SELECT id, row_number() OVER (
                         PARTITION BY lane ORDER BY created_at_ms DESC, id DESC) AS place
                     FROM deliveries WHERE state = 'pending' AND lease_until_ms = 0)
                 WHERE place > ?1)",
        )
        .bind(limit_of(waiting))
        .bind(text(failed("too many waited"))?);
        let forget = sqlx::query(
            "DELETE FROM deliveries WHERE id IN (
                 SELECT id FROM (SELECT id, webhook_id, row_number() OVER (
                         PARTITION BY webhook_id ORDER BY created_at_ms DESC, id DESC) AS place
                     FROM deliveries WHERE state <> 'pending')
                 WHERE place > ?1 OR webhook_id IS NULL)",
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
    let (webhook, service, url, secret) = match &delivery.to {
        Addressee::Webhook(id) => (Some(id.as_str()), None, None, None),
        Addressee::Once { service, url, secret } => {
            (None, Some(service.as_str()), Some(url.as_str()), Some(secret))
        }
    };
    sqlx::query(
        "INSERT INTO deliveries
             (id, webhook_id, service_id, event_id, kind, subject, body, url, nonce, sealed, created_at_ms)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(delivery.id.as_str())
    .bind(webhook)
    .bind(service)
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
    /// What is due of one webhook, or of the callbacks of one service, as far as there is room.
    async fn claim_of(
        &self,
        transaction: &mut Transaction<'_, Sqlite>,
        lane: &str,
        claiming: &Claiming,
        room: usize,
    ) -> Result<Vec<DeliveryClaim>, StoreError> {
        let action = "claim deliveries";
        let query = sqlx::query(CLAIM)
            .bind(lane)
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
        let found = sqlx::query("SELECT * FROM webhooks WHERE id = ?").bind(lane);
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

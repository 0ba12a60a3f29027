//! Rows of invocations.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::ledger::{Owner, Place};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::invocation::{Invocation, InvocationState, Invoke};
use torpor_protocol::{DeliveryId, InvocationId, ServiceId};

use super::super::{ClaimedInvocation, InvocationLedger, NewDelivery, Sealed, SealedCallback};
use super::deliveries::insert_delivery;
use super::{LAST, SqliteLedger, column, json, limit_of, optional, parsed, time, to_column};

#[async_trait]
impl InvocationLedger for SqliteLedger {
    async fn queue_invocation(
        &self,
        service: &ServiceId,
        invocation: &Invocation,
        request: &Invoke,
        callback: Option<&SealedCallback>,
        most: usize,
    ) -> Result<bool, StoreError> {
        let action = "record an invocation in the ledger";
        let text = serde_json::to_string(invocation).map_err(StoreError::failed(action))?;
        let request = Invoke { callback: None, ..request.clone() };
        let request = serde_json::to_string(&request).map_err(StoreError::failed(action))?;
        let query = sqlx::query(
            "INSERT INTO invocations
                 (id, service_id, state, attempt, not_before_ms, invocation, request, created_at_ms,
                  callback_id, callback_url, nonce, sealed)
             SELECT ?1, ?2, 'queued', 0, ?3, ?4, ?5, ?3, ?7, ?8, ?9, ?10
             WHERE (SELECT count(*) FROM invocations
                 WHERE service_id = ?2 AND state IN ('queued', 'running')) < ?6",
        )
        .bind(invocation.id.as_str())
        .bind(service.as_str())
        .bind(to_column(invocation.created_at_ms))
        .bind(text)
        .bind(request)
        .bind(limit_of(most))
        .bind(callback.map(|callback| callback.delivery.as_str()))
        .bind(callback.map(|callback| callback.url.as_str()))
        .bind(callback.map(|callback| callback.secret.nonce.as_slice()))
        .bind(callback.map(|callback| callback.secret.bytes.as_slice()));
        let done = query.execute(&self.writer).await.map_err(self.failed(action))?;
        Ok(done.rows_affected() > 0)
    }

    async fn claim_invocation(
        &self,
        owner: &Owner,
        now_ms: u64,
        each: usize,
    ) -> Result<Option<ClaimedInvocation>, StoreError> {
        // On PostgreSQL the inner query has FOR UPDATE SKIP LOCKED.
        let query = sqlx::query(
            "UPDATE invocations SET state = 'running', attempt = attempt + 1 WHERE id = (
                 SELECT due.id FROM invocations AS due JOIN services ON services.id = due.service_id
                 WHERE due.state = 'queued' AND due.not_before_ms <= ?3 AND services.node = ?1
                     AND EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2)
                     AND (SELECT count(*) FROM invocations AS run
                         WHERE run.service_id = due.service_id AND run.state = 'running') < ?4
                 ORDER BY due.not_before_ms LIMIT 1)
             RETURNING *",
        )
        .bind(owner.node.as_str())
        .bind(to_column(owner.epoch))
        .bind(to_column(now_ms))
        .bind(limit_of(each));
        let row = query.fetch_optional(&self.writer).await;
        row.map_err(self.failed("claim an invocation"))?.as_ref().map(read_claimed).transpose()
    }

    async fn settle_invocation(
        &self,
        claimed: &ClaimedInvocation,
        again_at_ms: Option<u64>,
        callback: Option<&NewDelivery>,
    ) -> Result<bool, StoreError> {
        let action = "record what came of an invocation";
        let text =
            serde_json::to_string(&claimed.invocation).map_err(StoreError::failed(action))?;
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let query = sqlx::query(
            "UPDATE invocations SET state = ?1, not_before_ms = coalesce(?2, not_before_ms), invocation = ?3,
                 request = CASE WHEN ?2 IS NULL THEN '{}' ELSE request END
             WHERE id = ?4 AND attempt = ?5 AND state = 'running'",
        )
        .bind(claimed.invocation.state.as_str())
        .bind(again_at_ms.map(to_column))
        .bind(text)
        .bind(claimed.invocation.id.as_str())
        .bind(to_column(claimed.attempt));
        let done = query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        if done.rows_affected() == 0 {
            return Ok(false);
        }
        if let Some(callback) = callback {
            let told = insert_delivery(callback).execute(&mut *transaction).await;
            told.map_err(self.failed(action))?;
        }
        transaction.commit().await.map_err(self.failed(action))?;
        Ok(true)
    }

    async fn release_invocations(&self, owner: &Owner) -> Result<(), StoreError> {
        let query = sqlx::query(
            "UPDATE invocations SET state = 'queued' WHERE state = 'running' AND service_id IN (
                 SELECT id FROM services WHERE node = ?1
                     AND EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2))",
        )
        .bind(owner.node.as_str())
        .bind(to_column(owner.epoch));
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("take up invocations of an earlier daemon"))
    }

    async fn find_invocation(
        &self,
        service: &ServiceId,
        id: &InvocationId,
    ) -> Result<Option<Invocation>, StoreError> {
        let query = sqlx::query("SELECT * FROM invocations WHERE id = ? AND service_id = ?");
        let query = query.bind(id.as_str()).bind(service.as_str());
        self.one("look up an invocation", query, read_invocation).await
    }

    async fn invocations(
        &self,
        service: &ServiceId,
        before: Option<&Place<InvocationId>>,
        limit: usize,
    ) -> Result<Vec<Invocation>, StoreError> {
        let (at, id) = before.map_or(LAST, |(at, id)| (to_column(*at), id.as_str()));
        let query = sqlx::query(
            "SELECT * FROM invocations WHERE service_id = ? AND (created_at_ms, id) < (?, ?)
             ORDER BY created_at_ms DESC, id DESC LIMIT ?",
        );
        let query = query.bind(service.as_str()).bind(at).bind(id).bind(limit_of(limit));
        self.all("list the invocations of a service", query, read_invocation).await
    }

    async fn prune_invocations(&self, before_ms: u64, remembered: usize) -> Result<(), StoreError> {
        let query = sqlx::query(
            "DELETE FROM invocations WHERE id IN (
                 SELECT id FROM (SELECT id, created_at_ms, row_number() OVER (
                         PARTITION BY service_id ORDER BY created_at_ms DESC, id DESC) AS place
                     FROM invocations WHERE state IN ('succeeded', 'failed'))
                 WHERE place > ? OR created_at_ms < ?)",
        );
        let query = query.bind(limit_of(remembered)).bind(to_column(before_ms));
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("forget old invocations"))
    }
}

/// The state is the column's: a claim changes it alone.
fn read_invocation(row: &SqliteRow) -> Result<Invocation, StoreError> {
    let invocation: Invocation = json(row, "invocation", &column::<String>(row, "id")?)?;
    let claimed = column::<String>(row, "state")? == InvocationState::Running.as_str();
    let state = if claimed { InvocationState::Running } else { invocation.state };
    Ok(Invocation { state, ..invocation })
}

fn read_claimed(row: &SqliteRow) -> Result<ClaimedInvocation, StoreError> {
    let request: Invoke = json(row, "request", &column::<String>(row, "id")?)?;
    Ok(ClaimedInvocation {
        service: parsed(row, "service_id")?,
        attempt: time(row, "attempt")?,
        invocation: read_invocation(row)?,
        request,
        callback: optional::<DeliveryId>(row, "callback_id")?
            .map(|delivery| {
                let secret = Sealed { nonce: column(row, "nonce")?, bytes: column(row, "sealed")? };
                Ok(SealedCallback { delivery, url: column(row, "callback_url")?, secret })
            })
            .transpose()?,
    })
}

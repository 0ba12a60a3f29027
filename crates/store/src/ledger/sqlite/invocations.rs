//! Rows of invocations.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::ledger::{Owner, Place};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::invocation::{Invocation, InvocationState, Invoke};
use torpor_protocol::{DeliveryId, InvocationId, ServiceId};

use super::super::{
    ClaimedInvocation, InvocationBounds, InvocationLedger, NewDelivery, Sealed, SealedCallback,
};
use super::deliveries::insert_delivery;
use super::{LAST, SqliteLedger, column, json, limit_of, optional, parsed, time, to_column};

/// Jumps from service to service of those that wait, and so looks at one row of each, however many there are.
/// On PostgreSQL the last query has FOR UPDATE SKIP LOCKED.
pub(super) const CLAIM: &str = "
    UPDATE invocations SET state = 'running', attempt = attempt + 1 WHERE id = (
        WITH RECURSIVE waiting (whose) AS (
            SELECT min(service_id) FROM invocations WHERE state = 'queued'
            UNION ALL
            SELECT (SELECT min(service_id) FROM invocations
                WHERE state = 'queued' AND service_id > waiting.whose)
            FROM waiting WHERE whose IS NOT NULL),
        standing (whose, running, due_ms) AS (
            SELECT whose,
                (SELECT count(*) FROM invocations WHERE service_id = whose AND state = 'running'),
                (SELECT min(not_before_ms) FROM invocations
                    WHERE service_id = whose AND state = 'queued')
            FROM waiting JOIN services ON services.id = whose
            WHERE services.node = ?1
                AND EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2))
        SELECT id FROM invocations WHERE state = 'queued' AND service_id = (
            SELECT whose FROM standing WHERE due_ms <= ?3 AND running < ?4
            ORDER BY running, due_ms LIMIT 1)
        ORDER BY not_before_ms LIMIT 1)
    RETURNING id, service_id, state, attempt, invocation, request, callback_id, callback_url, nonce, sealed";

const FORGET_LARGE: &str = "
    DELETE FROM invocations WHERE id IN (
        SELECT id FROM (SELECT id, sum(bytes) OVER (ORDER BY settled_at_ms DESC, id DESC) AS total
            FROM invocations WHERE service_id = ?1 AND settled_at_ms IS NOT NULL)
        WHERE total > ?2)";

#[async_trait]
impl InvocationLedger for SqliteLedger {
    async fn queue_invocation(
        &self,
        service: &ServiceId,
        invocation: &Invocation,
        request: &Invoke,
        callback: Option<&SealedCallback>,
        most: InvocationBounds,
    ) -> Result<bool, StoreError> {
        let action = "record an invocation in the ledger";
        let text = serde_json::to_string(invocation).map_err(StoreError::failed(action))?;
        let request = Invoke { callback: None, ..request.clone() };
        let request = serde_json::to_string(&request).map_err(StoreError::failed(action))?;
        let bytes = (text.len() + request.len()) as u64;
        let query = sqlx::query(
            "INSERT INTO invocations
                 (id, service_id, state, attempt, not_before_ms, invocation, request, created_at_ms,
                  callback_id, callback_url, nonce, sealed, bytes)
             SELECT ?1, ?2, 'queued', 0, ?3, ?4, ?5, ?3, ?6, ?7, ?8, ?9, ?10
             WHERE (SELECT count(*) < ?11 AND coalesce(sum(bytes), 0) + ?10 <= ?12 FROM (
                 SELECT bytes FROM invocations WHERE service_id = ?2 AND state = 'queued'
                 UNION ALL
                 SELECT bytes FROM invocations WHERE service_id = ?2 AND state = 'running'))",
        )
        .bind(invocation.id.as_str())
        .bind(service.as_str())
        .bind(to_column(invocation.created_at_ms))
        .bind(text)
        .bind(request)
        .bind(callback.map(|callback| callback.delivery.as_str()))
        .bind(callback.map(|callback| callback.url.as_str()))
        .bind(callback.map(|callback| callback.secret.nonce.as_slice()))
        .bind(callback.map(|callback| callback.secret.bytes.as_slice()))
        .bind(to_column(bytes))
        .bind(limit_of(most.rows))
        .bind(to_column(most.bytes));
        let done = query.execute(&self.writer).await.map_err(self.failed(action))?;
        Ok(done.rows_affected() > 0)
    }

    async fn claim_invocation(
        &self,
        owner: &Owner,
        now_ms: u64,
        each: usize,
    ) -> Result<Option<ClaimedInvocation>, StoreError> {
        let query = sqlx::query(CLAIM)
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
        remembered: InvocationBounds,
    ) -> Result<bool, StoreError> {
        let action = "record what came of an invocation";
        let failed = |error| StoreError::failed(action)(error);
        let bare = Invocation { answer: None, ..claimed.invocation.clone() };
        let text = serde_json::to_string(&bare).map_err(failed)?;
        let answer = claimed.invocation.answer.as_ref().map(serde_json::to_string).transpose();
        let answer = answer.map_err(failed)?;
        let bytes = (text.len() + answer.as_ref().map_or(0, String::len)) as u64;
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let query = sqlx::query(
            "UPDATE invocations SET state = ?1, not_before_ms = coalesce(?2, not_before_ms), invocation = ?3,
                 answer = ?4, settled_at_ms = ?5,
                 request = CASE WHEN ?2 IS NULL THEN '{}' ELSE request END,
                 bytes = ?6 + CASE WHEN ?2 IS NULL THEN 0 ELSE length(CAST(request AS BLOB)) END
             WHERE id = ?7 AND attempt = ?8 AND state = 'running'",
        )
        .bind(claimed.invocation.state.as_str())
        .bind(again_at_ms.map(to_column))
        .bind(text)
        .bind(answer)
        .bind(claimed.invocation.settled_at_ms.map(to_column))
        .bind(to_column(bytes))
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
        // So many that are smaller are no more bytes than may be.
        if again_at_ms.is_none() && bytes > remembered.bytes / remembered.rows.max(1) as u64 {
            let query = sqlx::query(FORGET_LARGE);
            let query = query.bind(claimed.service.as_str()).bind(to_column(remembered.bytes));
            query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        }
        transaction.commit().await.map_err(self.failed(action))?;
        Ok(true)
    }

    async fn release_invocations(&self, owner: &Owner, latest_ms: u64) -> Result<(), StoreError> {
        let action = "take up invocations of an earlier daemon";
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        for sql in [
            "UPDATE invocations SET state = 'queued' WHERE state = 'running' AND service_id IN (
                 SELECT id FROM services WHERE node = ?1
                     AND EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2))",
            "UPDATE invocations SET not_before_ms = ?3
             WHERE state = 'queued' AND not_before_ms > ?3 AND service_id IN (
                 SELECT id FROM services WHERE node = ?1
                     AND EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2))",
        ] {
            let query = sqlx::query(sql)
                .bind(owner.node.as_str())
                .bind(to_column(owner.epoch))
                .bind(to_column(latest_ms));
            query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        }
        transaction.commit().await.map_err(self.failed(action))
    }

    async fn find_invocation(
        &self,
        service: &ServiceId,
        id: &InvocationId,
    ) -> Result<Option<Invocation>, StoreError> {
        let query = sqlx::query(
            "SELECT id, state, invocation, answer FROM invocations WHERE id = ? AND service_id = ?",
        );
        let query = query.bind(id.as_str()).bind(service.as_str());
        self.one("look up an invocation", query, read_answered).await
    }

    async fn invocations(
        &self,
        service: &ServiceId,
        before: Option<&Place<InvocationId>>,
        limit: usize,
    ) -> Result<Vec<Invocation>, StoreError> {
        let (at, id) = before.map_or(LAST, |(at, id)| (to_column(*at), id.as_str()));
        let query = sqlx::query(
            "SELECT id, state, invocation FROM invocations
             WHERE service_id = ? AND (created_at_ms, id) < (?, ?)
             ORDER BY created_at_ms DESC, id DESC LIMIT ?",
        );
        let query = query.bind(service.as_str()).bind(at).bind(id).bind(limit_of(limit));
        self.all("list the invocations of a service", query, read_invocation).await
    }

    async fn prune_invocations(
        &self,
        before_ms: u64,
        remembered: InvocationBounds,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "DELETE FROM invocations WHERE id IN (
                 SELECT id FROM (SELECT id, settled_at_ms,
                         row_number() OVER newest AS place, sum(bytes) OVER newest AS total
                     FROM invocations WHERE settled_at_ms IS NOT NULL
                     WINDOW newest AS (PARTITION BY service_id ORDER BY settled_at_ms DESC, id DESC))
                 WHERE place > ? OR total > ? OR settled_at_ms < ?)",
        );
        let query = query.bind(limit_of(remembered.rows)).bind(to_column(remembered.bytes));
        let done = query.bind(to_column(before_ms)).execute(&self.writer).await;
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

fn read_answered(row: &SqliteRow) -> Result<Invocation, StoreError> {
    let answer: Option<String> = column(row, "answer")?;
    let answer = answer.map(|_| json(row, "answer", "the answer of an invocation")).transpose()?;
    Ok(Invocation { answer, ..read_invocation(row)? })
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

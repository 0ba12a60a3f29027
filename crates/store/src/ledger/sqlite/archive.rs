//! What the ledger knows of sandboxes that are gone. A row appears in the instant in which the
//! sandbox's own row goes, and never changes; the oldest are forgotten whenever one is added.

use std::collections::HashSet;

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use sqlx::{Sqlite, Transaction};
use torpor_lifecycle::ledger::{Aggregate, ArchiveLedger, Owner};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::api::ArchivedSandbox;
use torpor_protocol::{EndReason, Name, SandboxId};

use super::super::TASK_LABEL;
use super::{FIRST, LAST, SqliteLedger, column, json, optional, parsed, time, to_column};

/// How many are remembered, and again so many of tasks of jobs: a busy day of short-lived sandboxes, in some megabytes.
const KEPT: u32 = 10_000;
/// How long one is remembered: who asks what became of a sandbox asks within weeks.
const KEPT_FOR_MS: u64 = 30 * 24 * 60 * 60 * 1000;

/// What fails if a row can't be read.
const READ: &str = "read the archive of the ledger";

impl SqliteLedger {
    /// Forgets the sandbox of this owner, and remembers that it was.
    pub(super) async fn put_archived(
        &self,
        owner: &Owner,
        ended: &ArchivedSandbox,
    ) -> Result<(), StoreError> {
        let action = "move a sandbox to the archive of the ledger";
        let spec = serde_json::to_string(&ended.spec).map_err(StoreError::failed(action))?;
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        self.expect_owner(&mut transaction, owner, &ended.id).await?;
        // Its previews go with it.
        let tell = sqlx::query(
            "INSERT INTO changes (aggregate, node, version)
             SELECT ?, ?, 1 WHERE EXISTS (SELECT 1 FROM previews WHERE sandbox_id = ?)
             ON CONFLICT (aggregate, node) DO UPDATE SET version = version + 1",
        )
        .bind(Aggregate::Previews.as_str())
        .bind(self.node.as_str())
        .bind(ended.id.as_str());
        tell.execute(&mut *transaction).await.map_err(self.failed(action))?;
        let erase = sqlx::query("DELETE FROM sandboxes WHERE id = ?").bind(ended.id.as_str());
        erase.execute(&mut *transaction).await.map_err(self.failed(action))?;
        // A sandbox ends once: who says it again changes nothing, also not its place in a list that
        // somebody is reading page by page.
        let insert = sqlx::query(
            "INSERT INTO archive (id, spec, created_at_ms, ended_at_ms, reason)
             VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
        )
        .bind(ended.id.as_str())
        .bind(spec)
        .bind(to_column(ended.created_at_ms))
        .bind(to_column(ended.ended_at_ms))
        .bind(ended.reason.map(EndReason::as_str));
        insert.execute(&mut *transaction).await.map_err(self.failed(action))?;
        let of_task = ended.spec.labels.contains_key(TASK_LABEL);
        self.prune_archive(&mut transaction, ended.ended_at_ms, of_task).await?;
        transaction.commit().await.map_err(self.failed(action))
    }

    /// Refuses who does not own the sandbox; of one that is gone, whose node has started anew.
    async fn expect_owner(
        &self,
        transaction: &mut Transaction<'_, Sqlite>,
        owner: &Owner,
        id: &SandboxId,
    ) -> Result<(), StoreError> {
        let query = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2)
                 AND coalesce((SELECT node = ?1 FROM sandboxes WHERE id = ?3), TRUE)",
        )
        .bind(owner.node.as_str())
        .bind(to_column(owner.epoch))
        .bind(id.as_str());
        let owned: bool = query
            .fetch_one(&mut **transaction)
            .await
            .map_err(self.failed("look up the owner of a sandbox"))?;
        if owned { Ok(()) } else { Err(StoreError::NotOwner(owner.clone())) }
    }

    async fn prune_archive(
        &self,
        transaction: &mut Transaction<'_, Sqlite>,
        now_ms: u64,
        of_task: bool,
    ) -> Result<(), StoreError> {
        // Each with the words of its index.
        let sql = match of_task {
            true => {
                "DELETE FROM archive WHERE ended_at_ms < ?1 OR id IN (
                     SELECT id FROM archive
                     WHERE json_extract(spec, '$.labels.\"torpor.task\"') IS NOT NULL
                     ORDER BY ended_at_ms DESC, id DESC LIMIT -1 OFFSET ?2)"
            }
            false => {
                "DELETE FROM archive WHERE ended_at_ms < ?1 OR id IN (
                     SELECT id FROM archive
                     WHERE json_extract(spec, '$.labels.\"torpor.task\"') IS NULL
                     ORDER BY ended_at_ms DESC, id DESC LIMIT -1 OFFSET ?2)"
            }
        };
        let query = sqlx::query(sql).bind(to_column(now_ms.saturating_sub(KEPT_FOR_MS))).bind(KEPT);
        let done = query.execute(&mut **transaction).await;
        done.map_err(self.failed("forget the oldest in the archive of the ledger"))?;
        Ok(())
    }

    /// Where a sandbox is in the archive's order.
    async fn archive_place(&self, id: &SandboxId) -> Result<(i64, String), StoreError> {
        let query = sqlx::query("SELECT ended_at_ms, id FROM archive WHERE id = ?");
        let read = |row: &SqliteRow| Ok((column(row, "ended_at_ms")?, column(row, "id")?));
        self.one(READ, query.bind(id.as_str()), read).await?.ok_or_else(|| {
            StoreError::Invalid(format!(
                "the archive can't be read on from sandbox {id}, which is not or no longer in it: \
                 begin with its first page"
            ))
        })
    }
}

#[async_trait]
impl ArchiveLedger for SqliteLedger {
    async fn find_archived(&self, id: &SandboxId) -> Result<Option<ArchivedSandbox>, StoreError> {
        let query = sqlx::query("SELECT * FROM archive WHERE id = ?").bind(id.as_str());
        self.one(READ, query, read_archived).await
    }

    async fn find_archived_by_name(
        &self,
        name: &Name,
    ) -> Result<Option<ArchivedSandbox>, StoreError> {
        let query = sqlx::query(
            "SELECT * FROM archive WHERE json_extract(spec, '$.name') = ?
             ORDER BY ended_at_ms DESC, id DESC LIMIT 1",
        )
        .bind(name.as_str());
        self.one(READ, query, read_archived).await
    }

    async fn archived(
        &self,
        before: Option<&SandboxId>,
        limit: usize,
    ) -> Result<Vec<ArchivedSandbox>, StoreError> {
        let place = match before {
            Some(before) => Some(self.archive_place(before).await?),
            None => None,
        };
        let sql = "SELECT * FROM archive WHERE (ended_at_ms, id) < (?, ?)
             ORDER BY ended_at_ms DESC, id DESC LIMIT ?";
        self.page_by_time(READ, sql, place.as_ref().map_or(LAST, at), limit, read_archived).await
    }

    async fn archived_after(
        &self,
        after: Option<&SandboxId>,
        limit: usize,
    ) -> Result<Vec<ArchivedSandbox>, StoreError> {
        let place = match after {
            Some(after) => Some(self.archive_place(after).await?),
            None => None,
        };
        let sql = "SELECT * FROM archive WHERE (ended_at_ms, id) > (?, ?)
             ORDER BY ended_at_ms, id LIMIT ?";
        let place = place.as_ref().map_or(FIRST, at);
        let mut rows = self.page_by_time(READ, sql, place, limit, read_archived).await?;
        rows.reverse();
        Ok(rows)
    }

    async fn archived_ids(&self) -> Result<HashSet<SandboxId>, StoreError> {
        let query = sqlx::query("SELECT id FROM archive");
        Ok(self.all(READ, query, |row| parsed(row, "id")).await?.into_iter().collect())
    }
}

fn at(place: &(i64, String)) -> (i64, &str) {
    (place.0, &place.1)
}

fn read_archived(row: &SqliteRow) -> Result<ArchivedSandbox, StoreError> {
    let what = format!("sandbox {} of the archive", column::<String>(row, "id")?);
    Ok(ArchivedSandbox {
        id: parsed(row, "id")?,
        spec: json(row, "spec", &what)?,
        created_at_ms: time(row, "created_at_ms")?,
        ended_at_ms: time(row, "ended_at_ms")?,
        reason: optional(row, "reason")?,
    })
}

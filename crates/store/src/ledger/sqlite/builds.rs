//! Rows of builds.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::BuildId;
use torpor_protocol::api::Build;

use super::super::BuildLedger;
use super::{LAST, SqliteLedger, column, json, to_column};

/// How many builds are remembered: who waits for one asks while it is among the newest.
const KEPT: u32 = 1_000;

#[async_trait]
impl BuildLedger for SqliteLedger {
    async fn record_build(
        &self,
        build: &Build,
        idempotency: Option<&str>,
    ) -> Result<(), StoreError> {
        let action = "record a build in the ledger";
        let text = serde_json::to_string(build).map_err(StoreError::failed(action))?;
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let query = sqlx::query(
            "INSERT INTO builds (id, idempotency, build, created_at_ms, node) VALUES (?, ?, ?, ?, ?)
             ON CONFLICT (id) DO UPDATE SET build = excluded.build,
                 idempotency = coalesce(idempotency, excluded.idempotency),
                 created_at_ms = excluded.created_at_ms",
        )
        .bind(build.id.as_str())
        .bind(idempotency)
        .bind(text)
        .bind(to_column(build.created_at_ms))
        .bind(self.node.as_str());
        match query.execute(&mut *transaction).await {
            Ok(_) => {}
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
                return Err(StoreError::Invalid(
                    "another build was asked for with this idempotency key".to_owned(),
                ));
            }
            Err(error) => return Err(self.failed(action)(error)),
        }
        let prune = sqlx::query(
            "DELETE FROM builds WHERE id IN (
                 SELECT id FROM builds ORDER BY created_at_ms DESC, id DESC LIMIT -1 OFFSET ?)",
        )
        .bind(KEPT);
        prune.execute(&mut *transaction).await.map_err(self.failed(action))?;
        transaction.commit().await.map_err(self.failed(action))
    }

    async fn find_build(&self, id: &BuildId) -> Result<Option<Build>, StoreError> {
        let query = sqlx::query("SELECT id, build FROM builds WHERE id = ?").bind(id.as_str());
        self.one("look up a build", query, read_build).await
    }

    async fn find_build_by_key(&self, idempotency: &str) -> Result<Option<Build>, StoreError> {
        let query =
            sqlx::query("SELECT id, build FROM builds WHERE idempotency = ?").bind(idempotency);
        self.one("look up a build", query, read_build).await
    }

    async fn builds(
        &self,
        before: Option<&Place<BuildId>>,
        limit: usize,
    ) -> Result<Vec<Build>, StoreError> {
        let sql = "SELECT id, build FROM builds WHERE (created_at_ms, id) < (?, ?)
             ORDER BY created_at_ms DESC, id DESC LIMIT ?";
        let before = before.map_or(LAST, |(at, id)| (to_column(*at), id.as_str()));
        self.page_by_time("list the builds", sql, before, limit, read_build).await
    }

    async fn unfinished_builds(&self) -> Result<Vec<Build>, StoreError> {
        let query = sqlx::query(
            "SELECT id, build FROM builds WHERE node IN (?, '')
                 AND json_extract(build, '$.state') IN ('waiting', 'running')",
        )
        .bind(self.node.as_str());
        self.all("look for builds without an end", query, read_build).await
    }
}

fn read_build(row: &SqliteRow) -> Result<Build, StoreError> {
    json(row, "build", &column::<String>(row, "id")?)
}

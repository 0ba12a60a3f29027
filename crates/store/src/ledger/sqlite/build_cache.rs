//! Rows of steps that need not be done again.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::SaveId;

use super::super::build_cache::{BuildCacheLedger, CachedStep, Outcome};
use super::{SqliteLedger, column, parsed, time, to_column};

const COLUMNS: &str = "key, save_id, image_id, step, bytes, created_at_ms, used_at_ms";

#[async_trait]
impl BuildCacheLedger for SqliteLedger {
    async fn record_cached_step(&self, step: &CachedStep) -> Result<Option<SaveId>, StoreError> {
        let action = "record a step of a build";
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let before =
            sqlx::query("SELECT save_id FROM build_cache WHERE key = ? AND save_id NOT NULL");
        let before = before.bind(&step.key).fetch_optional(&mut *transaction).await;
        let before = before.map_err(self.failed(action))?;
        let before = before.map(|row| parsed(&row, "save_id")).transpose()?;
        let (save, image) = match &step.outcome {
            Outcome::Save(save) => (Some(save.as_str()), None),
            Outcome::Image(image) => (None, Some(image.as_str())),
        };
        let query = sqlx::query(
            "INSERT OR REPLACE INTO build_cache
                 (key, save_id, image_id, step, bytes, created_at_ms, used_at_ms)
             VALUES (?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(&step.key)
        .bind(save)
        .bind(image)
        .bind(&step.step)
        .bind(to_column(step.bytes))
        .bind(to_column(step.created_at_ms))
        .bind(to_column(step.used_at_ms));
        query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        transaction.commit().await.map_err(self.failed(action))?;
        Ok(before.filter(|before| step.outcome != Outcome::Save(SaveId::clone(before))))
    }

    async fn use_cached_step(
        &self,
        key: &str,
        now_ms: u64,
    ) -> Result<Option<CachedStep>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM build_cache WHERE key = ?");
        let query = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(key);
        let Some(found) = self.one("look up a step of a build", query, read_step).await? else {
            return Ok(None);
        };
        let query = sqlx::query("UPDATE build_cache SET used_at_ms = ? WHERE key = ?");
        let noted = query.bind(to_column(now_ms)).bind(key).execute(&self.writer).await;
        noted.map_err(self.failed("note the use of a step"))?;
        Ok(Some(found))
    }

    async fn cached_steps(&self) -> Result<Vec<CachedStep>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM build_cache ORDER BY used_at_ms DESC, key");
        let query = sqlx::query(sqlx::AssertSqlSafe(sql));
        self.all("list the steps of builds", query, read_step).await
    }

    async fn forget_cached_step(&self, key: &str) -> Result<(), StoreError> {
        let query = sqlx::query("DELETE FROM build_cache WHERE key = ?").bind(key);
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("forget a step of a build"))
    }
}

fn read_step(row: &SqliteRow) -> Result<CachedStep, StoreError> {
    let outcome = match column::<Option<String>>(row, "save_id")? {
        Some(_) => Outcome::Save(parsed(row, "save_id")?),
        None => Outcome::Image(parsed(row, "image_id")?),
    };
    Ok(CachedStep {
        key: column(row, "key")?,
        outcome,
        step: column(row, "step")?,
        bytes: time(row, "bytes")?,
        created_at_ms: time(row, "created_at_ms")?,
        used_at_ms: time(row, "used_at_ms")?,
    })
}

//! What the ledger knows of saves: a row is what makes a save exist, and it can't go while a sandbox,
//! a snapshot or a pool names it.

use std::collections::HashMap;

use torpor_lifecycle::store::{Manifest, SavedBy, StoreError};
use torpor_protocol::{SaveId, SnapshotKind};

use super::{SqliteLedger, column, parsed, to_column};

impl SqliteLedger {
    pub(crate) async fn commit_save(
        &self,
        id: &SaveId,
        manifest: &Manifest,
    ) -> Result<(), StoreError> {
        let action = "record a save in the ledger";
        let text = serde_json::to_string(manifest).map_err(StoreError::failed(action))?;
        let image = &manifest.about.spec.image_id;
        let query = sqlx::query(
            "INSERT INTO saves (id, kind, image_id, manifest, bytes, created_at_ms)
             VALUES (?, ?, ?, ?, ?, ?)",
        )
        .bind(id.as_str())
        .bind(manifest.about.kind.as_str())
        .bind(image.as_str())
        .bind(text)
        .bind(to_column(manifest.size_bytes()))
        .bind(to_column(manifest.about.created_at_ms));
        match query.execute(&self.writer).await {
            Ok(_) => Ok(()),
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                Err(StoreError::NoSuchImage(image.to_string()))
            }
            Err(error) => Err(self.failed(action)(error)),
        }
    }

    /// The manifest of a save, still as text: it may be of a format that is not known here.
    pub(crate) async fn save(&self, id: &SaveId) -> Result<Option<String>, StoreError> {
        let query = sqlx::query_scalar("SELECT manifest FROM saves WHERE id = ?").bind(id.as_str());
        query.fetch_optional(&self.readers).await.map_err(self.failed("look up a save"))
    }

    /// All saves, newest first: what was used last is most likely wanted next.
    pub(crate) async fn save_ids(&self) -> Result<Vec<SaveId>, StoreError> {
        let query = sqlx::query("SELECT id FROM saves ORDER BY created_at_ms DESC, id");
        let rows = query.fetch_all(&self.readers).await.map_err(self.failed("list the saves"))?;
        rows.iter().map(|row| parsed(row, "id")).collect()
    }

    /// Who can revive each memory save.
    pub(crate) async fn memory_saves(&self) -> Result<HashMap<SaveId, SavedBy>, StoreError> {
        let query = sqlx::query(
            "SELECT id, json_extract(manifest, '$.engine') AS engine,
                 json_extract(manifest, '$.engine_version') AS version FROM saves WHERE kind = ?",
        )
        .bind(SnapshotKind::Memory.as_str());
        let rows = query.fetch_all(&self.readers).await.map_err(self.failed("list the saves"))?;
        let by = |row| {
            let (engine, version) = (column(row, "engine")?, column(row, "version")?);
            Ok((parsed(row, "id")?, SavedBy { engine, version }))
        };
        rows.iter().map(by).collect()
    }

    /// Bytes of all saves.
    pub(crate) async fn save_bytes(&self) -> Result<u64, StoreError> {
        let query = sqlx::query_scalar("SELECT coalesce(sum(bytes), 0) FROM saves");
        let sum: Result<i64, _> = query.fetch_one(&self.readers).await;
        Ok(u64::try_from(sum.map_err(self.failed("add up the saves"))?).unwrap_or(0))
    }

    /// Whether the save is gone now; it is not if something names it.
    pub(crate) async fn drop_save(&self, id: &SaveId) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM saves WHERE id = ?").bind(id.as_str());
        match query.execute(&self.writer).await {
            Ok(_) => Ok(true),
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => Ok(false),
            Err(error) => Err(self.failed("remove a save from the ledger")(error)),
        }
    }

    /// Forgets every save that nothing names.
    pub(crate) async fn drop_unnamed_saves(&self) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "DELETE FROM saves WHERE
                 NOT EXISTS (SELECT 1 FROM sandboxes WHERE save_id = saves.id) AND
                 NOT EXISTS (SELECT 1 FROM snapshots WHERE save_id = saves.id) AND
                 NOT EXISTS (SELECT 1 FROM pools WHERE save_id = saves.id)",
        );
        let done = query.execute(&self.writer).await;
        Ok(done.map_err(self.failed("remove saves from the ledger"))?.rows_affected())
    }
}

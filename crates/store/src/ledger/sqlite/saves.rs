//! What the ledger knows of saves: its manifest is what makes a save exist, and it can't go while a
//! sandbox, a snapshot or a pool pins it.

use std::collections::HashSet;

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::store::{Manifest, MemorySave, PinOwner, SavedBy, StoreError};
use torpor_protocol::{SaveId, SnapshotKind};

use super::super::SaveLedger;
use super::{SqliteLedger, column, parsed, to_column};

#[async_trait]
impl SaveLedger for SqliteLedger {
    async fn commit_save(
        &self,
        id: &SaveId,
        manifest: &Manifest,
        stored: &[u64],
    ) -> Result<(), StoreError> {
        let action = "record a save in the ledger";
        let text = serde_json::to_string(manifest).map_err(StoreError::failed(action))?;
        let image = &manifest.about.spec.image_id;
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
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
        match query.execute(&mut *transaction).await {
            Ok(_) => {}
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                return Err(StoreError::NoSuchImage(image.to_string()));
            }
            Err(error) => return Err(self.failed(action)(error)),
        }
        for (file, bytes) in manifest.files.iter().zip(stored) {
            let query = "INSERT INTO save_files (save_id, name, hash, bytes) VALUES (?, ?, ?, ?)";
            let query = sqlx::query(query).bind(id.as_str()).bind(&file.name).bind(&file.hash);
            let added = query.bind(to_column(*bytes)).execute(&mut *transaction).await;
            added.map_err(self.failed(action))?;
        }
        transaction.commit().await.map_err(self.failed(action))
    }

    async fn save(&self, id: &SaveId) -> Result<Option<String>, StoreError> {
        let query = sqlx::query_scalar("SELECT manifest FROM saves WHERE id = ?").bind(id.as_str());
        query.fetch_optional(&self.readers).await.map_err(self.failed("look up a save"))
    }

    async fn save_ids(&self) -> Result<Vec<SaveId>, StoreError> {
        let query = sqlx::query("SELECT id FROM saves ORDER BY created_at_ms DESC, id");
        self.all("list the saves", query, |row| parsed(row, "id")).await
    }

    async fn memory_saves(&self) -> Result<Vec<MemorySave>, StoreError> {
        let query = sqlx::query(
            "SELECT id, json_extract(manifest, '$.engine') AS engine,
                 json_extract(manifest, '$.engine_version') AS version, save_pins.kind, owner
             FROM saves LEFT JOIN save_pins ON save_id = id
             WHERE saves.kind = ? AND json_valid(manifest)",
        )
        .bind(SnapshotKind::Memory.as_str());
        let read = |row: &SqliteRow| {
            let by = SavedBy { engine: column(row, "engine")?, version: column(row, "version")? };
            Ok(MemorySave { id: parsed(row, "id")?, by, owner: read_pin(row)? })
        };
        self.all("list the saves", query, read).await
    }

    async fn save_bytes(&self) -> Result<u64, StoreError> {
        let query = sqlx::query_scalar(
            "SELECT coalesce(sum(bytes), 0) FROM
                 (SELECT max(bytes) AS bytes FROM save_files GROUP BY hash)",
        );
        let sum: Result<i64, _> = query.fetch_one(&self.readers).await;
        Ok(u64::try_from(sum.map_err(self.failed("add up the saves"))?).unwrap_or(0))
    }

    async fn blobs(&self) -> Result<HashSet<String>, StoreError> {
        let query = sqlx::query_scalar("SELECT DISTINCT hash FROM save_files");
        let hashes = query.fetch_all(&self.readers).await;
        Ok(hashes.map_err(self.failed("list the blobs"))?.into_iter().collect())
    }

    async fn names_blob(&self, hash: &str) -> Result<bool, StoreError> {
        let query = sqlx::query("SELECT 1 FROM save_files WHERE hash = ? LIMIT 1").bind(hash);
        let found = query.fetch_optional(&self.readers).await;
        Ok(found.map_err(self.failed("look up a blob"))?.is_some())
    }

    async fn save_pins(&self, id: &SaveId) -> Result<Vec<PinOwner>, StoreError> {
        let query = sqlx::query("SELECT kind, owner FROM save_pins WHERE save_id = ?");
        let query = query.bind(id.as_str());
        let pins = self.all("look up who keeps a save", query, read_pin).await?;
        Ok(pins.into_iter().flatten().collect())
    }

    async fn drop_save(&self, id: &SaveId) -> Result<Option<Vec<String>>, StoreError> {
        let action = "remove a save from the ledger";
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let pinned = sqlx::query("SELECT 1 FROM save_pins WHERE save_id = ? LIMIT 1");
        let pinned = pinned.bind(id.as_str()).fetch_optional(&mut *transaction).await;
        if pinned.map_err(self.failed(action))?.is_some() {
            return Ok(None);
        }
        let hashes = sqlx::query_scalar("SELECT hash FROM save_files WHERE save_id = ?");
        let hashes = hashes.bind(id.as_str()).fetch_all(&mut *transaction).await;
        let hashes = hashes.map_err(self.failed(action))?;
        let query = sqlx::query("DELETE FROM saves WHERE id = ?").bind(id.as_str());
        query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        transaction.commit().await.map_err(self.failed(action))?;
        Ok(Some(hashes))
    }

    async fn drop_unpinned_saves(&self) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "DELETE FROM saves WHERE
                 NOT EXISTS (SELECT 1 FROM save_pins WHERE save_id = saves.id)",
        );
        let done = query.execute(&self.writer).await;
        Ok(done.map_err(self.failed("remove saves from the ledger"))?.rows_affected())
    }
}

fn read_pin(row: &SqliteRow) -> Result<Option<PinOwner>, StoreError> {
    let kind: Option<String> = column(row, "kind")?;
    Ok(match kind.as_deref() {
        None => None,
        Some("sandbox") => Some(PinOwner::Sandbox(parsed(row, "owner")?)),
        Some("snapshot") => Some(PinOwner::Snapshot(parsed(row, "owner")?)),
        Some("pool") => Some(PinOwner::Pool(parsed(row, "owner")?)),
        Some("build") => Some(PinOwner::Build(column(row, "owner")?)),
        Some(other) => return Err(StoreError::Invalid(format!("a {other} can't pin a save"))),
    })
}

//! Rows of images and of their names.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use sqlx::{Sqlite, Transaction};
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ImageId;

use super::super::{ImageLedger, ImageRow, LayerFacts, OriginRow, Removed};
use super::{FIRST, SqliteLedger, column, json, parsed, time, to_column};

/// Images with their names.
macro_rules! named_images {
    () => {
        "SELECT *, (SELECT json_group_array(name) FROM image_names WHERE image_id = images.id) AS names,
             (SELECT json_group_array(reference) FROM image_digests WHERE image_id = images.id) AS digests,
             (SELECT coalesce(sum(bytes), 0) FROM (SELECT DISTINCT digest, bytes FROM image_layers
                 WHERE image_id = images.id)) AS layer_bytes,
             (SELECT coalesce(sum(bytes), 0) FROM (SELECT DISTINCT digest, bytes FROM image_layers AS ours
                 WHERE image_id = images.id AND EXISTS (SELECT 1 FROM image_layers AS others
                     WHERE others.digest = ours.digest AND others.image_id <> ours.image_id))) AS shared_bytes
         FROM images "
    };
}

#[async_trait]
impl ImageLedger for SqliteLedger {
    async fn roots_in_use(&self, id: &ImageId) -> Result<Vec<String>, StoreError> {
        let query = sqlx::query(
            "SELECT json_extract(manifest, '$.root') AS file FROM saves
                 WHERE image_id = ?1 AND kind = 'memory' AND file IS NOT NULL
             UNION
             SELECT json_extract(facts, '$.root') AS file FROM sandboxes
                 WHERE image_id = ?1 AND file IS NOT NULL",
        )
        .bind(id.as_str());
        self.all("look up the roots of saved machines", query, |row| column(row, "file")).await
    }

    async fn commit_image(
        &self,
        row: &ImageRow,
        name: Option<&str>,
        origin: Option<(&OriginRow, &str)>,
    ) -> Result<(), StoreError> {
        let action = "record an image in the ledger";
        let config = serde_json::to_string(&row.config).map_err(StoreError::failed(action))?;
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let query = sqlx::query(
            "INSERT INTO images
                 (id, config, file, file_bytes, file_hash, agent_hash, created_at_ms)
             VALUES (?, ?, ?, ?, ?, ?, ?)
             ON CONFLICT (id) DO UPDATE SET file = excluded.file,
                 file_bytes = excluded.file_bytes, file_hash = excluded.file_hash,
                 agent_hash = excluded.agent_hash",
        )
        .bind(row.id.as_str())
        .bind(config)
        .bind(&row.file)
        .bind(to_column(row.file_bytes))
        .bind(&row.file_hash)
        .bind(&row.agent_hash)
        .bind(to_column(row.created_at_ms));
        query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        if let Some(name) = name {
            self.set_name(&mut transaction, name, &row.id).await?;
        }
        if let Some(origin) = origin {
            self.set_origin(&mut transaction, &row.id, origin).await?;
        }
        transaction.commit().await.map_err(self.failed(action))
    }

    async fn name_image(&self, name: &str, id: &ImageId) -> Result<(), StoreError> {
        let action = "name an image";
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        self.set_name(&mut transaction, name, id).await?;
        transaction.commit().await.map_err(self.failed(action))
    }

    async fn image(&self, id: &ImageId) -> Result<Option<ImageRow>, StoreError> {
        let query = sqlx::query(concat!(named_images!(), "WHERE id = ?")).bind(id.as_str());
        self.one("look up an image", query, read_image).await
    }

    async fn images(
        &self,
        after: Option<&Place<ImageId>>,
        limit: usize,
    ) -> Result<Vec<ImageRow>, StoreError> {
        let sql = concat!(
            named_images!(),
            "WHERE (created_at_ms, id) > (?, ?) ORDER BY created_at_ms, id LIMIT ?"
        );
        let after = after.map_or(FIRST, |(at, id)| (to_column(*at), id.as_str()));
        self.page_by_time("list the images", sql, after, limit, read_image).await
    }

    async fn image_by_name(&self, name: &str) -> Result<Option<ImageId>, StoreError> {
        let query = sqlx::query("SELECT image_id FROM image_names WHERE name = ?").bind(name);
        self.one("look up an image", query, |row| parsed(row, "image_id")).await
    }

    async fn images_by_prefix(&self, prefix: &str) -> Result<Vec<ImageId>, StoreError> {
        let query =
            sqlx::query("SELECT id FROM images WHERE id GLOB ? LIMIT 2").bind(format!("{prefix}*"));
        self.all("look up an image", query, |row| parsed(row, "id")).await
    }

    async fn remove_image(&self, id: &ImageId, name: Option<&str>) -> Result<Removed, StoreError> {
        let action = "remove an image from the ledger";
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let names: i64 = sqlx::query_scalar("SELECT count(*) FROM image_names WHERE image_id = ?")
            .bind(id.as_str())
            .fetch_one(&mut *transaction)
            .await
            .map_err(self.failed(action))?;
        if let Some(name) = name.filter(|_| names > 1) {
            let query = sqlx::query("DELETE FROM image_names WHERE name = ?").bind(name);
            query.execute(&mut *transaction).await.map_err(self.failed(action))?;
            transaction.commit().await.map_err(self.failed(action))?;
            return Ok(Removed::Name);
        }
        self.refuse_if_used(&mut transaction, id, name).await?;
        for sql in ["DELETE FROM image_names WHERE image_id = ?", "DELETE FROM images WHERE id = ?"]
        {
            let query = sqlx::query(sql).bind(id.as_str());
            query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        }
        transaction.commit().await.map_err(self.failed(action))?;
        Ok(Removed::Image)
    }
}

impl SqliteLedger {
    pub(super) async fn set_name(
        &self,
        transaction: &mut Transaction<'_, Sqlite>,
        name: &str,
        id: &ImageId,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO image_names (name, image_id) VALUES (?, ?)
             ON CONFLICT (name) DO UPDATE SET image_id = excluded.image_id",
        )
        .bind(name)
        .bind(id.as_str());
        match query.execute(&mut **transaction).await {
            Ok(_) => Ok(()),
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                Err(StoreError::NoSuchImage(id.to_string()))
            }
            Err(error) => Err(self.failed("name an image")(error)),
        }
    }

    async fn refuse_if_used(
        &self,
        transaction: &mut Transaction<'_, Sqlite>,
        id: &ImageId,
        name: Option<&str>,
    ) -> Result<(), StoreError> {
        let users: Vec<String> = sqlx::query_scalar(
            "SELECT 'sandbox ' || coalesce(name, id) FROM sandboxes WHERE image_id = ?1
             UNION ALL
             SELECT 'snapshot ' || coalesce(snapshots.name, snapshots.id) FROM snapshots
                 JOIN saves ON saves.id = snapshots.save_id WHERE saves.image_id = ?1
             UNION ALL
             SELECT 'pool ' || name FROM pools WHERE image_id = ?1
             UNION ALL
             SELECT 'service ' || name FROM services WHERE id IN (
                 SELECT service_id FROM revisions WHERE image_id = ?1)
             UNION ALL
             SELECT DISTINCT 'the build cache (torpor image cache prune)' FROM build_cache
                 JOIN saves ON saves.id = build_cache.save_id WHERE saves.image_id = ?1
             UNION ALL
             SELECT 'save ' || id FROM saves WHERE image_id = ?1
                 AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE save_id = saves.id)
                 AND NOT EXISTS (SELECT 1 FROM snapshots WHERE save_id = saves.id)
                 AND NOT EXISTS (SELECT 1 FROM pools WHERE save_id = saves.id)
                 AND NOT EXISTS (SELECT 1 FROM build_cache WHERE save_id = saves.id)
             ORDER BY 1 LIMIT 3",
        )
        .bind(id.as_str())
        .fetch_all(&mut **transaction)
        .await
        .map_err(self.failed("look for users of an image"))?;
        let by = match users.as_slice() {
            [] => return Ok(()),
            [only] => only.clone(),
            [first, second] => format!("{first} and {second}"),
            [first, second, ..] => format!("{first}, {second} and others"),
        };
        Err(StoreError::InUse { what: format!("image {}", name.unwrap_or(id.as_str())), by })
    }
}

fn read_image(row: &SqliteRow) -> Result<ImageRow, StoreError> {
    let what = format!("the configuration of image {}", column::<String>(row, "id")?);
    let mut names: Vec<String> = json(row, "names", "the names of an image")?;
    names.sort();
    let mut digests: Vec<String> = json(row, "digests", "the digests of an image")?;
    digests.sort();
    let shared_bytes = time(row, "shared_bytes")?;
    let own_bytes = time(row, "layer_bytes")?.saturating_sub(shared_bytes);
    Ok(ImageRow {
        id: parsed(row, "id")?,
        config: json(row, "config", &what)?,
        names,
        layers: LayerFacts { digests, own_bytes, shared_bytes },
        file: column(row, "file")?,
        file_bytes: time(row, "file_bytes")?,
        file_hash: column(row, "file_hash")?,
        agent_hash: column(row, "agent_hash")?,
        created_at_ms: time(row, "created_at_ms")?,
    })
}

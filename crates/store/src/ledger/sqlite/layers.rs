//! Rows of origins and layers.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use sqlx::{Sqlite, Transaction};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ImageId;

use super::super::{LayerLedger, OriginRow, Unused};
use super::{SqliteLedger, column, parsed, time, to_column};

/// Images that nothing needs; `?` says whether those with names are meant too.
macro_rules! unused {
    () => {
        "FROM images WHERE NOT EXISTS (SELECT 1 FROM sandboxes WHERE image_id = images.id)
             AND NOT EXISTS (SELECT 1 FROM saves WHERE image_id = images.id)
             AND NOT EXISTS (SELECT 1 FROM pools WHERE image_id = images.id)
             AND NOT EXISTS (SELECT 1 FROM revisions WHERE image_id = images.id)
             AND (?1 OR NOT EXISTS (SELECT 1 FROM image_names WHERE image_id = images.id))"
    };
}

impl Unused {
    fn named_too(self) -> bool {
        match self {
            Self::Nameless => false,
            Self::All => true,
        }
    }
}

#[async_trait]
impl LayerLedger for SqliteLedger {
    async fn record_origin(
        &self,
        id: &ImageId,
        name: Option<&str>,
        origin: (&OriginRow, &str),
    ) -> Result<(), StoreError> {
        let action = "record where an image is from";
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        self.set_origin(&mut transaction, id, origin).await?;
        if let Some(name) = name {
            self.set_name(&mut transaction, name, id).await?;
        }
        transaction.commit().await.map_err(self.failed(action))
    }

    async fn origin(&self, id: &ImageId) -> Result<Option<OriginRow>, StoreError> {
        let action = "look up where an image is from";
        let query = sqlx::query("SELECT * FROM image_origins WHERE image_id = ?").bind(id.as_str());
        let read = |row: &SqliteRow| Ok((column(row, "manifest")?, column(row, "config")?));
        let Some((manifest, config)) = self.one(action, query, read).await? else {
            return Ok(None);
        };
        let sql = "SELECT digest, bytes FROM image_layers WHERE image_id = ? ORDER BY position";
        let read = |row: &SqliteRow| Ok((column(row, "digest")?, time(row, "bytes")?));
        let layers = self.all(action, sqlx::query(sql).bind(id.as_str()), read).await?;
        Ok(Some(OriginRow { manifest, config, layers }))
    }

    async fn image_by_digest(&self, reference: &str) -> Result<Option<ImageId>, StoreError> {
        let sql = "SELECT image_id FROM image_digests WHERE reference = ?";
        let query = sqlx::query(sql).bind(reference);
        self.one("look up an image", query, |row| parsed(row, "image_id")).await
    }

    async fn layer_uses(&self) -> Result<Vec<(String, ImageId)>, StoreError> {
        let query = sqlx::query("SELECT digest, image_id FROM image_layers");
        let read = |row: &SqliteRow| Ok((column(row, "digest")?, parsed(row, "image_id")?));
        self.all("list the layers", query, read).await
    }

    async fn unused_images(&self, which: Unused) -> Result<Vec<ImageId>, StoreError> {
        let sql = concat!("SELECT id ", unused!(), " ORDER BY created_at_ms, id");
        let query = sqlx::query(sql).bind(which.named_too());
        self.all("look for unused images", query, |row| parsed(row, "id")).await
    }

    async fn remove_unused(&self, id: &ImageId, which: Unused) -> Result<bool, StoreError> {
        let action = "remove an image from the ledger";
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let sql = concat!("SELECT count(*) ", unused!(), " AND id = ?2");
        let query = sqlx::query_scalar(sql).bind(which.named_too()).bind(id.as_str());
        let unused: i64 = query.fetch_one(&mut *transaction).await.map_err(self.failed(action))?;
        if unused == 0 {
            return Ok(false);
        }
        for sql in ["DELETE FROM image_names WHERE image_id = ?", "DELETE FROM images WHERE id = ?"]
        {
            let query = sqlx::query(sql).bind(id.as_str());
            query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        }
        transaction.commit().await.map_err(self.failed(action))?;
        Ok(true)
    }
}

impl SqliteLedger {
    /// What an image was pulled as; what was known before is replaced.
    pub(super) async fn set_origin(
        &self,
        transaction: &mut Transaction<'_, Sqlite>,
        id: &ImageId,
        (origin, reference): (&OriginRow, &str),
    ) -> Result<(), StoreError> {
        let action = "record where an image is from";
        let mut queries = vec![
            sqlx::query("INSERT OR REPLACE INTO image_origins (image_id, manifest, config) VALUES (?, ?, ?)")
                .bind(id.as_str())
                .bind(&*origin.manifest)
                .bind(&*origin.config),
            sqlx::query("DELETE FROM image_layers WHERE image_id = ?").bind(id.as_str()),
            sqlx::query("INSERT OR REPLACE INTO image_digests (reference, image_id) VALUES (?, ?)")
                .bind(reference)
                .bind(id.as_str()),
        ];
        for ((digest, bytes), position) in origin.layers.iter().zip(0i64..) {
            let sql =
                "INSERT INTO image_layers (image_id, position, digest, bytes) VALUES (?, ?, ?, ?)";
            let query = sqlx::query(sql).bind(id.as_str()).bind(position).bind(digest);
            queries.push(query.bind(to_column(*bytes)));
        }
        for query in queries {
            match query.execute(&mut **transaction).await {
                Ok(_) => {}
                Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                    return Err(StoreError::NoSuchImage(id.to_string()));
                }
                Err(error) => return Err(self.failed(action)(error)),
            }
        }
        Ok(())
    }
}

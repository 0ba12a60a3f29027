//! What the ledger knows of sandboxes, and of who owns them.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::ledger::{Owner, SandboxLedger};
use torpor_lifecycle::store::{Record, StoreError};
use torpor_protocol::SandboxId;
use torpor_protocol::api::ArchivedSandbox;

use super::{Query, SqliteLedger, column, json, limit_of, optional, parsed, time, to_column};

#[async_trait]
impl SandboxLedger for SqliteLedger {
    async fn take_over(&self) -> Result<Owner, StoreError> {
        let action = "take over the sandboxes of this node";
        let node = self.node.as_str();
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let start = sqlx::query_scalar(
            "INSERT INTO nodes (id, epoch) VALUES (?, 1)
             ON CONFLICT (id) DO UPDATE SET epoch = epoch + 1 RETURNING epoch",
        )
        .bind(node);
        let epoch: i64 = start.fetch_one(&mut *transaction).await.map_err(self.failed(action))?;
        for adopt in [
            "UPDATE sandboxes SET node = ? WHERE node = ''",
            "UPDATE volumes SET home = ? WHERE home = ''",
        ] {
            let adopted = sqlx::query(adopt).bind(node).execute(&mut *transaction).await;
            adopted.map_err(self.failed(action))?;
        }
        transaction.commit().await.map_err(self.failed(action))?;
        Ok(Owner { node: self.node.clone(), epoch: u64::try_from(epoch).unwrap_or(0) })
    }

    async fn create_sandbox(&self, owner: &Owner, record: &Record) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO sandboxes (node, name, image_id, spec, rest, save_id, facts,
                 created_at_ms, last_used_at_ms, id)
             SELECT ?1, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11
             WHERE EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2)",
        );
        self.write_sandbox(query, owner, record).await
    }

    async fn update_sandbox(&self, owner: &Owner, record: &Record) -> Result<(), StoreError> {
        let query = sqlx::query(
            "UPDATE sandboxes SET name = ?3, image_id = ?4, spec = ?5, rest = ?6, save_id = ?7,
                 facts = ?8, created_at_ms = ?9, last_used_at_ms = ?10
             WHERE id = ?11 AND node = ?1
                 AND EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2)",
        );
        self.write_sandbox(query, owner, record).await
    }

    async fn archive_sandbox(
        &self,
        owner: &Owner,
        ended: &ArchivedSandbox,
    ) -> Result<(), StoreError> {
        self.put_archived(owner, ended).await
    }

    async fn find_sandbox(&self, id: &SandboxId) -> Result<Option<Record>, StoreError> {
        let query = sqlx::query("SELECT * FROM sandboxes WHERE id = ?").bind(id.as_str());
        self.one("look up a sandbox", query, read_record).await
    }

    async fn sandboxes(
        &self,
        owner: &Owner,
        after: Option<&SandboxId>,
        limit: usize,
    ) -> Result<Vec<Record>, StoreError> {
        let query = sqlx::query(
            "SELECT * FROM sandboxes WHERE node = ?1 AND id > ?3
                 AND EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2)
             ORDER BY id LIMIT ?4",
        )
        .bind(owner.node.as_str())
        .bind(to_column(owner.epoch))
        .bind(after.map_or("", |after| after.as_str()))
        .bind(limit_of(limit));
        self.all("read the sandboxes from the ledger", query, read_record).await
    }
}

impl SqliteLedger {
    /// `query` takes the columns by these numbers, and changes nothing for who is not the owner.
    async fn write_sandbox(
        &self,
        query: Query<'_>,
        owner: &Owner,
        record: &Record,
    ) -> Result<(), StoreError> {
        let action = "record a sandbox in the ledger";
        let spec = serde_json::to_string(&record.spec).map_err(StoreError::failed(action))?;
        let state = serde_json::to_string(&record.state).map_err(StoreError::failed(action))?;
        let facts = serde_json::to_string(&record.facts).map_err(StoreError::failed(action))?;
        let query = query
            .bind(owner.node.to_string())
            .bind(to_column(owner.epoch))
            .bind(record.spec.name.as_ref().map(ToString::to_string))
            .bind(record.spec.image_id.to_string())
            .bind(spec)
            .bind(state)
            .bind(record.save.as_ref().map(ToString::to_string))
            .bind(facts)
            .bind(to_column(record.created_at_ms))
            .bind(to_column(record.last_used_at_ms))
            .bind(record.id.to_string());
        match query.execute(&self.writer).await {
            Ok(done) if done.rows_affected() == 0 => Err(StoreError::NotOwner(owner.clone())),
            Ok(_) => Ok(()),
            // It was removed between being looked up and being used.
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                match self.missing_volume(record).await {
                    Some(error) => Err(error),
                    None => Err(self.missing(&record.spec.image_id, record.save.as_ref()).await),
                }
            }
            Err(sqlx::Error::Database(error))
                if error.is_unique_violation() && error.message().contains("attachments") =>
            {
                Err(self.written_by_another(record).await)
            }
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
                match &record.spec.name {
                    Some(name) => Err(StoreError::NameTaken(name.clone())),
                    None => Err(StoreError::failed(action)(error)),
                }
            }
            Err(error) => Err(self.failed(action)(error)),
        }
    }
}

fn read_record(row: &SqliteRow) -> Result<Record, StoreError> {
    let what = format!("sandbox {}", column::<String>(row, "id")?);
    Ok(Record {
        id: parsed(row, "id")?,
        spec: json(row, "spec", &what)?,
        state: json(row, "rest", &what)?,
        save: optional(row, "save_id")?,
        facts: json(row, "facts", &what)?,
        created_at_ms: time(row, "created_at_ms")?,
        last_used_at_ms: time(row, "last_used_at_ms")?,
    })
}

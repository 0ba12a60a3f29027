//! Rows of services and their revisions.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::ledger::{Aggregate, Owner};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::hosting::{Revision, RevisionState};
use torpor_protocol::{ImageId, SandboxId, ServiceId};

use super::super::{HostingLedger, ServiceRow};
use super::{SqliteLedger, column, json, limit_of, parsed, to_column};

#[async_trait]
impl HostingLedger for SqliteLedger {
    async fn create_service(&self, owner: &Owner, row: &ServiceRow) -> Result<(), StoreError> {
        let action = "record a service in the ledger";
        let text = serde_json::to_string(row).map_err(StoreError::failed(action))?;
        let query = sqlx::query(
            "INSERT INTO services (id, name, node, service, created_at_ms)
             SELECT ?3, ?4, ?1, ?5, ?6
             WHERE EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2)",
        )
        .bind(owner.node.as_str())
        .bind(to_column(owner.epoch))
        .bind(row.id.as_str())
        .bind(row.name.as_str())
        .bind(text)
        .bind(to_column(row.created_at_ms));
        match query.execute(&self.writer).await {
            Ok(done) if done.rows_affected() == 0 => Err(StoreError::NotOwner(owner.clone())),
            Ok(_) => Ok(()),
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
                Err(StoreError::NameTaken(row.name.clone()))
            }
            Err(error) => Err(self.failed(action)(error)),
        }
    }

    async fn record_service(
        &self,
        owner: &Owner,
        row: &ServiceRow,
        revision: Option<&Revision>,
    ) -> Result<(), StoreError> {
        let action = "record a service in the ledger";
        let text = serde_json::to_string(row).map_err(StoreError::failed(action))?;
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let query = sqlx::query(
            "UPDATE services SET service = ?4 WHERE id = ?3 AND node = ?1
                 AND EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2)",
        )
        .bind(owner.node.as_str())
        .bind(to_column(owner.epoch))
        .bind(row.id.as_str())
        .bind(text);
        let done = query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        if done.rows_affected() == 0 {
            return Err(StoreError::NotOwner(owner.clone()));
        }
        if let Some(revision) = revision {
            let text = serde_json::to_string(revision).map_err(StoreError::failed(action))?;
            let query = sqlx::query(
                "INSERT INTO revisions (service_id, number, image_id, revision) VALUES (?, ?, ?, ?)
                 ON CONFLICT (service_id, number) DO UPDATE
                     SET image_id = excluded.image_id, revision = excluded.revision",
            )
            .bind(row.id.as_str())
            .bind(i64::from(revision.number))
            .bind(needed_image(revision).map(ImageId::as_str))
            .bind(text);
            match query.execute(&mut *transaction).await {
                Ok(_) => {}
                Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                    return Err(StoreError::NoSuchImage(revision.image_id.to_string()));
                }
                Err(error) => return Err(self.failed(action)(error)),
            }
        }
        transaction.commit().await.map_err(self.failed(action))
    }

    async fn erase_revision(
        &self,
        owner: &Owner,
        service: &ServiceId,
        number: u32,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "DELETE FROM revisions WHERE service_id = ?3 AND number = ?4
                 AND EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2)",
        )
        .bind(owner.node.as_str())
        .bind(to_column(owner.epoch))
        .bind(service.as_str())
        .bind(i64::from(number));
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("remove a revision from the ledger"))
    }

    async fn erase_service(&self, owner: &Owner, id: &ServiceId) -> Result<(), StoreError> {
        let query = sqlx::query(
            "DELETE FROM services WHERE id = ?3 AND node = ?1
                 AND EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2)",
        )
        .bind(owner.node.as_str())
        .bind(to_column(owner.epoch))
        .bind(id.as_str());
        // Its previews go with it.
        let done = self.change(Aggregate::Previews, query).await;
        let done = done.map_err(self.failed("remove a service from the ledger"))?;
        if done.rows_affected() == 0 {
            return Err(StoreError::NotOwner(owner.clone()));
        }
        Ok(())
    }

    async fn services(
        &self,
        owner: &Owner,
        after: Option<&ServiceId>,
        limit: usize,
    ) -> Result<Vec<ServiceRow>, StoreError> {
        let query = sqlx::query(
            "SELECT id, service FROM services WHERE node = ? AND id > ? ORDER BY id LIMIT ?",
        )
        .bind(owner.node.as_str())
        .bind(after.map_or("", |after| after.as_str()))
        .bind(limit_of(limit));
        self.all("read the services from the ledger", query, read_service).await
    }

    async fn revisions(&self, of: &ServiceId) -> Result<Vec<Revision>, StoreError> {
        let query = sqlx::query(
            "SELECT service_id, number, revision FROM revisions WHERE service_id = ? ORDER BY number",
        )
        .bind(of.as_str());
        self.all("read the revisions of a service from the ledger", query, read_revision).await
    }

    async fn ended_instances(
        &self,
        of: &ServiceId,
        revision: Option<u32>,
        limit: usize,
    ) -> Result<Vec<(SandboxId, u32)>, StoreError> {
        let query = sqlx::query(
            "SELECT id, json_extract(spec, '$.labels.\"torpor.revision\"') AS revision FROM archive
             WHERE json_extract(spec, '$.labels.\"torpor.service\"') = ?1 AND (?2 IS NULL
                 OR json_extract(spec, '$.labels.\"torpor.revision\"') = ?2)
             ORDER BY ended_at_ms DESC LIMIT ?3",
        )
        .bind(of.as_str())
        .bind(revision.map(|revision| revision.to_string()))
        .bind(limit_of(limit));
        let read = |row: &SqliteRow| {
            let revision: Option<String> = column(row, "revision")?;
            let revision = revision.and_then(|text| text.parse().ok()).unwrap_or_default();
            Ok((parsed(row, "id")?, revision))
        };
        self.all("look for instances that are gone", query, read).await
    }
}

/// Nothing begins from one that failed.
fn needed_image(revision: &Revision) -> Option<&ImageId> {
    match revision.state {
        RevisionState::Starting
        | RevisionState::Checking
        | RevisionState::Saving
        | RevisionState::Ready => Some(&revision.image_id),
        RevisionState::Failed => None,
    }
}

fn read_service(row: &SqliteRow) -> Result<ServiceRow, StoreError> {
    json(row, "service", &column::<String>(row, "id")?)
}

fn read_revision(row: &SqliteRow) -> Result<Revision, StoreError> {
    let number: i64 = column(row, "number")?;
    json(row, "revision", &format!("revision {number} of {}", column::<String>(row, "service_id")?))
}

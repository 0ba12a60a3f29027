//! What the ledger knows of volumes and drives. Rows of who has which are written by triggers, with the sandbox.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::ledger::{Place, VolumeLedger};
use torpor_lifecycle::store::{Record, StoreError, VolumeRecord};
use torpor_protocol::volume::{Attachment, UpdateVolume};
use torpor_protocol::{SandboxId, VolumeId, VolumeKind, VolumeRef};

use super::{FIRST, SqliteLedger, column, json, limit_of, optional, parsed, time, to_column};

#[async_trait]
impl VolumeLedger for SqliteLedger {
    async fn create_volume(&self, record: &VolumeRecord) -> Result<(), StoreError> {
        let action = "record a volume in the ledger";
        let query = sqlx::query(
            "INSERT INTO volumes (id, name, kind, size_mib, labels, permissions, copy_of, made_for,
                 created_at_ms, home)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(record.id.as_str())
        .bind(record.name.as_str())
        .bind(record.kind.as_str())
        .bind(to_column(record.size_mib))
        .bind(serde_json::to_string(&record.labels).map_err(StoreError::failed(action))?)
        .bind(serde_json::to_string(&record.permissions).map_err(StoreError::failed(action))?)
        .bind(record.copy_of.as_ref().map(|id| id.as_str()))
        .bind(record.made_for.as_ref().map(|id| id.as_str()))
        .bind(to_column(record.created_at_ms))
        .bind(self.node.as_str());
        match query.execute(&self.writer).await {
            Ok(_) => Ok(()),
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
                Err(StoreError::NameTaken(record.name.clone()))
            }
            Err(error) => Err(self.failed(action)(error)),
        }
    }

    async fn update_volume(
        &self,
        id: &VolumeId,
        changes: &UpdateVolume,
    ) -> Result<VolumeRecord, StoreError> {
        let action = "change a volume in the ledger";
        let UpdateVolume { size_mib, labels, permissions } = changes;
        let labels = labels.as_ref().map(serde_json::to_string).transpose();
        let permissions = permissions.as_ref().map(serde_json::to_string).transpose();
        let query = sqlx::query(
            "UPDATE volumes SET size_mib = ifnull(?2, size_mib), labels = ifnull(?3, labels),
                 permissions = ifnull(?4, permissions)
             WHERE id = ?1 RETURNING *, nullif(home, ?5) AS elsewhere",
        )
        .bind(id.as_str())
        .bind(size_mib.map(to_column))
        .bind(labels.map_err(StoreError::failed(action))?)
        .bind(permissions.map_err(StoreError::failed(action))?)
        .bind(self.node.as_str());
        let changed = query.fetch_optional(&self.writer).await.map_err(self.failed(action))?;
        match changed {
            Some(row) => read_volume(&row),
            None => Err(StoreError::NoSuchVolume(id.to_string())),
        }
    }

    async fn erase_volume(&self, id: &VolumeId) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM volumes WHERE id = ?").bind(id.as_str());
        match query.execute(&self.writer).await {
            Ok(done) => Ok(done.rows_affected() > 0),
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                Err(self.in_use(id).await)
            }
            Err(error) => Err(self.failed("erase a volume from the ledger")(error)),
        }
    }

    async fn find_volume(&self, of: &VolumeRef) -> Result<Option<VolumeRecord>, StoreError> {
        let query = match of {
            VolumeRef::Id(id) => {
                sqlx::query("SELECT *, nullif(home, ?2) AS elsewhere FROM volumes WHERE id = ?1")
                    .bind(id.as_str())
            }
            VolumeRef::Name(name) => {
                sqlx::query("SELECT *, nullif(home, ?2) AS elsewhere FROM volumes WHERE name = ?1")
                    .bind(name.as_str())
            }
        };
        let query = query.bind(self.node.as_str());
        self.one("look up a volume", query, read_volume).await
    }

    async fn volumes(
        &self,
        kind: Option<VolumeKind>,
        after: Option<&Place<VolumeId>>,
        limit: usize,
    ) -> Result<Vec<VolumeRecord>, StoreError> {
        let after = after.map_or(FIRST, |(at, id)| (to_column(*at), id.as_str()));
        let query = sqlx::query(
            "SELECT *, nullif(home, ?5) AS elsewhere FROM volumes
             WHERE (created_at_ms, id) > (?1, ?2) AND (?3 IS NULL OR kind = ?3)
             ORDER BY created_at_ms, id LIMIT ?4",
        )
        .bind(after.0)
        .bind(after.1)
        .bind(kind.map(VolumeKind::as_str))
        .bind(limit_of(limit))
        .bind(self.node.as_str());
        self.all("read the volumes from the ledger", query, read_volume).await
    }

    async fn attachments(&self, id: &VolumeId) -> Result<Vec<Attachment>, StoreError> {
        let query = sqlx::query(
            "SELECT a.*, s.name FROM attachments AS a JOIN sandboxes AS s ON s.id = a.sandbox_id
             WHERE a.volume_id = ? ORDER BY a.sandbox_id, a.slot",
        )
        .bind(id.as_str());
        self.all("read who has a volume from the ledger", query, read_attachment).await
    }

    async fn volumes_made_for(&self, sandbox: &SandboxId) -> Result<Vec<VolumeId>, StoreError> {
        let query = sqlx::query("SELECT id FROM volumes WHERE made_for = ?").bind(sandbox.as_str());
        self.all("read whose copies volumes are from the ledger", query, |row| parsed(row, "id"))
            .await
    }

    async fn keep_volumes_of(&self, sandbox: &SandboxId) -> Result<(), StoreError> {
        let query = sqlx::query("UPDATE volumes SET made_for = NULL WHERE made_for = ?");
        let done = query.bind(sandbox.as_str()).execute(&self.writer).await;
        done.map(|_| ()).map_err(self.failed("keep volumes in the ledger"))
    }
}

impl SqliteLedger {
    /// Who has a volume, as what stands in the way of its removal or of another writer.
    async fn in_use(&self, id: &VolumeId) -> StoreError {
        match self.attachments(id).await {
            Ok(held) => {
                let by = held.first().map_or("a sandbox".to_owned(), attachment_words);
                StoreError::InUse { what: format!("volume {id}"), by }
            }
            Err(error) => error,
        }
    }

    /// A volume of this sandbox that is gone.
    pub(super) async fn missing_volume(&self, record: &Record) -> Option<StoreError> {
        for mount in record.spec.mounts() {
            let query =
                sqlx::query("SELECT 1 FROM volumes WHERE id = ?").bind(mount.volume.as_str());
            match query.fetch_optional(&self.writer).await {
                Ok(None) => return Some(StoreError::NoSuchVolume(mount.name.to_string())),
                Ok(Some(_)) => {}
                Err(error) => return Some(self.failed("look up a volume")(error)),
            }
        }
        None
    }

    /// Which volume of this sandbox another one writes to.
    pub(super) async fn written_by_another(&self, record: &Record) -> StoreError {
        let mut wanted = record.spec.mounts().iter().filter(|mount| mount.is_exclusive());
        let last = wanted.clone().next_back();
        loop {
            let Some(mount) = wanted.next() else {
                // The same volume twice in one sandbox.
                let what =
                    last.map_or("a volume".to_owned(), |mount| format!("volume {}", mount.name));
                return StoreError::InUse { what, by: format!("sandbox {}", record.id) };
            };
            let writer = match self.attachments(&mount.volume).await {
                Ok(held) => {
                    held.into_iter().find(|other| !other.read_only && other.sandbox != record.id)
                }
                Err(error) => return error,
            };
            if let Some(writer) = writer {
                let what = format!("volume {}", mount.name);
                return StoreError::InUse { what, by: attachment_words(&writer) };
            }
        }
    }
}

fn attachment_words(held: &Attachment) -> String {
    match &held.sandbox_name {
        Some(name) => format!("sandbox {name}"),
        None => format!("sandbox {}", held.sandbox),
    }
}

fn read_volume(row: &SqliteRow) -> Result<VolumeRecord, StoreError> {
    let what = format!("volume {}", column::<String>(row, "id")?);
    let kind = match column::<String>(row, "kind")?.as_str() {
        "volume" => VolumeKind::Volume,
        "drive" => VolumeKind::Drive,
        other => {
            let words = format!("its kind is {other}");
            return Err(StoreError::failed(format!("read {what} from the ledger"))(words));
        }
    };
    Ok(VolumeRecord {
        id: parsed(row, "id")?,
        name: parsed(row, "name")?,
        kind,
        size_mib: time(row, "size_mib")?,
        labels: json(row, "labels", &what)?,
        permissions: json(row, "permissions", &what)?,
        copy_of: optional(row, "copy_of")?,
        made_for: optional(row, "made_for")?,
        elsewhere: optional(row, "elsewhere")?,
        created_at_ms: time(row, "created_at_ms")?,
    })
}

fn read_attachment(row: &SqliteRow) -> Result<Attachment, StoreError> {
    Ok(Attachment {
        sandbox: parsed(row, "sandbox_id")?,
        sandbox_name: optional(row, "name")?,
        path: parsed(row, "path")?,
        subpath: parsed(row, "subpath")?,
        read_only: column::<i64>(row, "read_only")? != 0,
    })
}

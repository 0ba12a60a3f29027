//! The ledger in one SQLite file, of one node.
//!
//! - WAL with `synchronous=FULL`: a write that returned survives the loss of power.
//! - One connection writes, so writers queue here and never meet SQLite's busy errors; readers have
//!   connections of their own and never wait for a writer.
//! - A ledger with a migration that this program does not know is refused and left as it is.

mod archive;
mod build_cache;
mod builds;
mod deliveries;
mod domains;
mod events;
mod hosting;
mod images;
mod invocations;
mod jobs;
mod keys;
mod layers;
mod logins;
mod mcp_gateway;
mod mcp_tasks;
mod migrations;
mod pools;
mod previews;
mod queue;
mod requests;
mod sandboxes;
mod saves;
mod schedules;
mod secrets;
mod snapshots;
mod tasks;
mod volumes;
mod webhooks;

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::migrate::MigrateError;
use sqlx::sqlite::{
    SqliteArguments, SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteQueryResult,
    SqliteRow, SqliteSynchronous,
};
use sqlx::{Row, SqlitePool};
use torpor_lifecycle::ledger::{Aggregate, Changes};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::{ImageId, NodeId, SaveId};

use super::{Database, now_ms};
use migrations::MIGRATIONS;

type Query<'q> = sqlx::query::Query<'q, sqlx::Sqlite, SqliteArguments>;

/// Readers at the same time; more only queue for the same two cores.
const READERS: u32 = 4;
/// How long a caller may wait for its turn; a write is a few milliseconds, so this is a stuck disk.
const TURN: Duration = Duration::from_secs(30);
/// How long SQLite waits for another process, which can only be a person looking with a tool.
const BUSY: Duration = Duration::from_secs(10);
/// SQLite's primary result codes that can mean a full disk.
const SQLITE_FULL: u32 = 13;
const SQLITE_IOERR: u32 = 10;
const SQLITE_CANTOPEN: u32 = 14;
/// Less than this many bytes free, and an input/output error is put down to it: SQLite does not
/// pass on the reason when it could not grow its log.
const FULL_BELOW: u64 = 256 * 1024;

/// The ledger in a data directory. Cloning gives another handle to the same ledger.
#[derive(Debug, Clone)]
pub struct SqliteLedger {
    writer: SqlitePool,
    readers: SqlitePool,
    /// The node that opened it.
    node: NodeId,
    /// For telling a full disk from a broken one.
    path: PathBuf,
}

impl SqliteLedger {
    /// Opens or creates the ledger and brings it to the present schema.
    pub async fn open(layout: &crate::Layout) -> Result<Self, StoreError> {
        let path = layout.ledger();
        make_private(&path)?;
        let writing = SqliteConnectOptions::new()
            .filename(&path)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(BUSY);
        let reading = writing.clone().read_only(true);
        let writer = pool(1).connect_lazy_with(writing);
        let readers = pool(READERS).connect_lazy_with(reading);
        let ledger = Self { writer, readers, node: layout.node().clone(), path };
        ledger.migrate().await?;
        Ok(ledger)
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "sqlx may add variants")]
    async fn migrate(&self) -> Result<(), StoreError> {
        let error = match MIGRATIONS.run(&self.writer).await {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        let shown = self.path.display();
        Err(match error {
            MigrateError::VersionMissing(version) => StoreError::Invalid(format!(
                "the ledger {shown} was written by a newer torpor (it has migration {version}): \
                 use that one, or another data directory"
            )),
            MigrateError::VersionMismatch(version) => StoreError::Invalid(format!(
                "the ledger {shown} was written by another torpor: its migration {version} is not \
                 the one this program knows"
            )),
            MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => {
                self.failed("open the ledger")(error)
            }
            error => StoreError::failed("open the ledger")(error),
        })
    }

    /// Why a row that names an image and perhaps a save was refused: SQLite does not say which of
    /// them is gone.
    async fn missing(&self, image: &ImageId, save: Option<&SaveId>) -> StoreError {
        if let Some(save) = save {
            let query = sqlx::query("SELECT 1 FROM saves WHERE id = ?").bind(save.as_str());
            match query.fetch_optional(&self.writer).await {
                Ok(None) => return StoreError::NoSuchSave(save.to_string()),
                Ok(Some(_)) => {}
                Err(error) => return self.failed("look up a save")(error),
            }
        }
        StoreError::NoSuchImage(image.to_string())
    }

    /// For `map_err`: a full disk becomes what it is.
    fn failed(&self, action: &'static str) -> impl FnOnce(sqlx::Error) -> StoreError {
        let dir = self.path.parent().map(Path::to_owned).unwrap_or_default();
        move |error| {
            let code = result_code(&error);
            let full = code == Some(SQLITE_FULL)
                || matches!(code, Some(SQLITE_IOERR | SQLITE_CANTOPEN)) && nearly_full(&dir);
            if full {
                return StoreError::DiskFull(format!("could not {action}"));
            }
            StoreError::failed(action)(error)
        }
    }
}

#[async_trait]
impl Database for SqliteLedger {
    /// Merges the log into the database, too.
    async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }
}

#[async_trait]
impl Changes for SqliteLedger {
    async fn changed_elsewhere(&self, what: Aggregate) -> Result<u64, StoreError> {
        let query = sqlx::query_scalar(
            "SELECT coalesce(sum(version), 0) FROM changes WHERE aggregate = ? AND node <> ?",
        )
        .bind(what.as_str())
        .bind(self.node.as_str());
        let sum: Result<i64, _> = query.fetch_one(&self.readers).await;
        let sum = sum.map_err(self.failed("look for changes of other nodes"))?;
        Ok(u64::try_from(sum).unwrap_or(0))
    }
}

impl SqliteLedger {
    /// Writes what other nodes may have in memory, and tells them in the same instant.
    async fn change(
        &self,
        what: Aggregate,
        query: Query<'_>,
    ) -> Result<SqliteQueryResult, sqlx::Error> {
        let mut transaction = self.writer.begin().await?;
        let done = query.execute(&mut *transaction).await?;
        if done.rows_affected() > 0 {
            let tell = sqlx::query(
                "INSERT INTO changes (aggregate, node, version) VALUES (?, ?, 1)
                 ON CONFLICT (aggregate, node) DO UPDATE SET version = version + 1",
            )
            .bind(what.as_str())
            .bind(self.node.as_str());
            tell.execute(&mut *transaction).await?;
        }
        transaction.commit().await?;
        Ok(done)
    }
}

// === Reading ===

/// Before the first row by time, and after the last: no id sorts beyond these.
const FIRST: (i64, &str) = (i64::MIN, "");
const LAST: (i64, &str) = (i64::MAX, "~");

impl SqliteLedger {
    async fn one<T>(
        &self,
        action: &'static str,
        query: Query<'_>,
        read: fn(&SqliteRow) -> Result<T, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        let row = query.fetch_optional(&self.readers).await;
        row.map_err(self.failed(action))?.as_ref().map(read).transpose()
    }

    async fn all<T>(
        &self,
        action: &'static str,
        query: Query<'_>,
        read: fn(&SqliteRow) -> Result<T, StoreError>,
    ) -> Result<Vec<T>, StoreError> {
        let rows = query.fetch_all(&self.readers).await;
        rows.map_err(self.failed(action))?.iter().map(read).collect()
    }

    /// Rows by key: `sql` takes the key that they come after, and how many at most.
    async fn page<T>(
        &self,
        action: &'static str,
        sql: &'static str,
        after: Option<&str>,
        limit: usize,
        read: fn(&SqliteRow) -> Result<T, StoreError>,
    ) -> Result<Vec<T>, StoreError> {
        let query = sqlx::query(sql).bind(after.unwrap_or_default()).bind(limit_of(limit));
        self.all(action, query, read).await
    }

    /// Rows by time: `sql` takes the time and id that they come after, and how many at most.
    async fn page_by_time<T>(
        &self,
        action: &'static str,
        sql: &'static str,
        after: (i64, &str),
        limit: usize,
        read: fn(&SqliteRow) -> Result<T, StoreError>,
    ) -> Result<Vec<T>, StoreError> {
        let query = sqlx::query(sql).bind(after.0).bind(after.1).bind(limit_of(limit));
        self.all(action, query, read).await
    }
}

// === Columns ===

fn column<'r, T>(row: &'r SqliteRow, name: &str) -> Result<T, StoreError>
where
    T: sqlx::Decode<'r, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite>,
{
    row.try_get(name).map_err(StoreError::failed(format!("read {name} from the ledger")))
}

/// A text column as one of our types.
fn parsed<T: FromStr>(row: &SqliteRow, name: &str) -> Result<T, StoreError>
where
    T::Err: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let text: String = column(row, name)?;
    text.parse().map_err(StoreError::failed(format!("read {name} from the ledger")))
}

/// A text column as one of our types, if there is a text.
fn optional<T: FromStr>(row: &SqliteRow, name: &str) -> Result<Option<T>, StoreError>
where
    T::Err: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let text: Option<String> = column(row, name)?;
    let parsed = text.map(|text| text.parse()).transpose();
    parsed.map_err(StoreError::failed(format!("read {name} from the ledger")))
}

/// A JSON column of the row that `what` names, for people.
fn json<T: serde::de::DeserializeOwned>(
    row: &SqliteRow,
    name: &str,
    what: &str,
) -> Result<T, StoreError> {
    let text: String = column(row, name)?;
    serde_json::from_str(&text).map_err(StoreError::failed(format!("read {what} from the ledger")))
}

fn time(row: &SqliteRow, name: &str) -> Result<u64, StoreError> {
    Ok(u64::try_from(column::<i64>(row, name)?).unwrap_or(0))
}

/// SQLite's integers are signed; no time or size of ours gets near the difference.
fn to_column(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn limit_of(rows: usize) -> i64 {
    i64::try_from(rows).unwrap_or(i64::MAX)
}

// === Opening and failing ===

fn pool(connections: u32) -> SqlitePoolOptions {
    SqlitePoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(TURN)
        .idle_timeout(None)
        .max_lifetime(None)
}

/// SQLite gives its log the permissions of the database.
fn make_private(path: &Path) -> Result<(), StoreError> {
    let made = OpenOptions::new().append(true).create(true).mode(0o600).open(path);
    made.map(drop).map_err(crate::files::failed("create the ledger"))
}

/// SQLite's primary result code; extended ones carry it in their low byte.
fn result_code(error: &sqlx::Error) -> Option<u32> {
    let code = error.as_database_error()?.code()?;
    code.parse::<u32>().ok().map(|code| code & 0xff)
}

fn nearly_full(dir: &Path) -> bool {
    let free = rustix::fs::statvfs(dir).map(|stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    free.is_ok_and(|free| free < FULL_BELOW)
}

#[cfg(test)]
mod tests;

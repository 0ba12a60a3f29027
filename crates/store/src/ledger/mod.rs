//! The ledger: one SQLite file, the truth after a restart.
//!
//! - WAL with `synchronous=FULL`: a write that returned survives the loss of power.
//! - One connection writes, so writers queue here and never meet SQLite's busy errors; readers have
//!   connections of their own and never wait for a writer.
//! - A ledger with a migration that this program does not know is refused and left as it is.

mod images;
mod keys;

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use sqlx::migrate::{MigrateError, Migrator};
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteRow, SqliteSynchronous,
};
use sqlx::{Row, SqlitePool};
use torpor_lifecycle::store::{self, Record, StoreError};
use torpor_protocol::SandboxId;

pub(crate) use images::{ImageRow, Removed};
pub use keys::KeyRow;

static MIGRATIONS: Migrator = sqlx::migrate!();

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
pub struct Ledger {
    writer: SqlitePool,
    readers: SqlitePool,
    /// For telling a full disk from a broken one.
    path: PathBuf,
}

impl Ledger {
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
        let ledger = Self { writer, readers, path };
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

    /// Waits for running statements and closes the files, merging the log into the database.
    pub async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
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
impl store::Ledger for Ledger {
    async fn record(&self, record: &Record) -> Result<(), StoreError> {
        let action = "record a sandbox in the ledger";
        let spec = serde_json::to_string(&record.spec).map_err(StoreError::failed(action))?;
        let rest = serde_json::to_string(&record.rest).map_err(StoreError::failed(action))?;
        let name = record.spec.name.as_ref().map(|name| name.as_str());
        let query = sqlx::query(
            "INSERT INTO sandboxes (id, name, image_id, spec, rest, created_at_ms, last_used_at_ms)
             VALUES (?, ?, ?, ?, ?, ?, ?)
             ON CONFLICT (id) DO UPDATE SET name = excluded.name, image_id = excluded.image_id,
                 spec = excluded.spec, rest = excluded.rest,
                 created_at_ms = excluded.created_at_ms, last_used_at_ms = excluded.last_used_at_ms",
        )
        .bind(record.id.as_str())
        .bind(name)
        .bind(record.spec.image_id.as_str())
        .bind(spec)
        .bind(rest)
        .bind(to_column(record.created_at_ms))
        .bind(to_column(record.last_used_at_ms));
        match query.execute(&self.writer).await {
            Ok(_) => Ok(()),
            // The image was removed between being looked up and being used.
            Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                Err(StoreError::NoSuchImage(record.spec.image_id.to_string()))
            }
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
                let name = name.unwrap_or_default();
                Err(StoreError::Invalid(format!("another sandbox is called {name:?}")))
            }
            Err(error) => Err(self.failed(action)(error)),
        }
    }

    async fn erase(&self, id: &SandboxId) -> Result<(), StoreError> {
        let query = sqlx::query("DELETE FROM sandboxes WHERE id = ?").bind(id.as_str());
        let done = query.execute(&self.writer).await;
        done.map_err(self.failed("erase a sandbox from the ledger"))?;
        Ok(())
    }

    async fn all(&self) -> Result<Vec<Record>, StoreError> {
        let query = sqlx::query(
            "SELECT id, spec, rest, created_at_ms, last_used_at_ms FROM sandboxes
             ORDER BY created_at_ms, id",
        );
        let rows = query.fetch_all(&self.readers).await;
        let rows = rows.map_err(self.failed("read the sandboxes from the ledger"))?;
        rows.iter().map(read_record).collect()
    }
}

fn read_record(row: &SqliteRow) -> Result<Record, StoreError> {
    let id: String = column(row, "id")?;
    let action = format!("read sandbox {id} from the ledger");
    let spec: String = column(row, "spec")?;
    let rest: String = column(row, "rest")?;
    Ok(Record {
        id: parsed(row, "id")?,
        spec: serde_json::from_str(&spec).map_err(StoreError::failed(action.clone()))?,
        rest: serde_json::from_str(&rest).map_err(StoreError::failed(action))?,
        created_at_ms: time(row, "created_at_ms")?,
        last_used_at_ms: time(row, "last_used_at_ms")?,
    })
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

fn time(row: &SqliteRow, name: &str) -> Result<u64, StoreError> {
    Ok(u64::try_from(column::<i64>(row, name)?).unwrap_or(0))
}

/// SQLite's integers are signed; no time or size of ours gets near the difference.
fn to_column(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
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

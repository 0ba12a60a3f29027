//! API keys. A key is shown once and kept as a hash: who reads the ledger can't use it.

use sha2::{Digest, Sha256};
use sqlx::sqlite::SqliteRow;
use subtle::ConstantTimeEq;
use torpor_lifecycle::store::StoreError;

use super::{Ledger, column, now_ms, time, to_column};

/// What every key starts with, so that people and secret scanners recognise one.
const KEY_PREFIX: &str = "tpk_";
/// How much of a key is kept readable: enough to tell keys apart, useless for guessing.
const SHOWN: usize = KEY_PREFIX.len() + 6;
/// A longer text is no key, and not worth hashing.
const KEY_MAX: usize = 256;
/// Longest label, in bytes.
const LABEL_MAX: usize = 200;
/// The last use of a key is remembered this coarsely: each write costs a flush of the disk.
const USE_GRAIN_MS: u64 = 60_000;

/// What is known of an API key; not the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRow {
    pub id: String,
    pub label: String,
    /// How the key begins.
    pub prefix: String,
    pub created_at_ms: u64,
    /// To the minute.
    pub last_used_at_ms: Option<u64>,
}

impl Ledger {
    /// Makes a key. The text is given out here and never again.
    pub async fn create_key(&self, label: &str) -> Result<(KeyRow, String), StoreError> {
        if label.len() > LABEL_MAX || label.chars().any(char::is_control) {
            return Err(StoreError::Invalid(format!(
                "a label has at most {LABEL_MAX} bytes and no control characters"
            )));
        }
        let secret = format!("{KEY_PREFIX}{}", random_hex::<32>()?);
        let row = KeyRow {
            id: random_hex::<8>()?,
            label: label.to_owned(),
            prefix: secret[..SHOWN].to_owned(),
            created_at_ms: now_ms(),
            last_used_at_ms: None,
        };
        let query = sqlx::query(
            "INSERT INTO api_keys (id, label, prefix, hash, created_at_ms) VALUES (?, ?, ?, ?, ?)",
        )
        .bind(&row.id)
        .bind(&row.label)
        .bind(&row.prefix)
        .bind(hash(&secret).to_vec())
        .bind(to_column(row.created_at_ms));
        query.execute(&self.writer).await.map_err(self.failed("record an API key"))?;
        Ok((row, secret))
    }

    /// The key that this text is, if it is one; remembers that it was used.
    pub async fn find_key(&self, secret: &str) -> Result<Option<KeyRow>, StoreError> {
        if secret.len() > KEY_MAX {
            return Ok(None);
        }
        let hash = hash(secret);
        let query = sqlx::query("SELECT * FROM api_keys WHERE hash = ?").bind(hash.to_vec());
        let row = query.fetch_optional(&self.readers).await;
        let Some(row) = row.map_err(self.failed("look up an API key"))? else { return Ok(None) };
        let stored: Vec<u8> = column(&row, "hash")?;
        if !bool::from(stored.ct_eq(&hash)) {
            return Ok(None);
        }
        let key = read_key(&row)?;
        self.note_use(&key).await;
        Ok(Some(key))
    }

    /// All keys, oldest first.
    pub async fn keys(&self) -> Result<Vec<KeyRow>, StoreError> {
        let query = sqlx::query("SELECT * FROM api_keys ORDER BY created_at_ms, id");
        let rows = query.fetch_all(&self.readers).await;
        rows.map_err(self.failed("read the API keys"))?.iter().map(read_key).collect()
    }

    /// Whether there was such a key; it is not valid any more when this returns.
    pub async fn delete_key(&self, id: &str) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM api_keys WHERE id = ?").bind(id);
        let done = query.execute(&self.writer).await.map_err(self.failed("delete an API key"))?;
        Ok(done.rows_affected() > 0)
    }

    /// Whether requests need a key even if there is none: from the first key on.
    pub async fn requires_keys(&self) -> Result<bool, StoreError> {
        let query = sqlx::query("SELECT 1 FROM keys_required");
        let row = query.fetch_optional(&self.readers).await;
        Ok(row.map_err(self.failed("read whether keys are needed"))?.is_some())
    }

    /// From now on requests need a key.
    pub async fn require_keys(&self) -> Result<(), StoreError> {
        let query = sqlx::query("INSERT OR IGNORE INTO keys_required (id) VALUES (0)");
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("record that keys are needed"))
    }

    /// A full disk must not lock anybody out, so this only complains.
    async fn note_use(&self, key: &KeyRow) {
        let now = now_ms();
        if key.last_used_at_ms.is_some_and(|last| now < last.saturating_add(USE_GRAIN_MS)) {
            return;
        }
        let query = sqlx::query("UPDATE api_keys SET last_used_at_ms = ? WHERE id = ?")
            .bind(to_column(now))
            .bind(&key.id);
        if let Err(error) = query.execute(&self.writer).await {
            tracing::warn!(key = key.id, %error, "the use of an API key was not remembered");
        }
    }
}

fn read_key(row: &SqliteRow) -> Result<KeyRow, StoreError> {
    let last_used: Option<i64> = column(row, "last_used_at_ms")?;
    Ok(KeyRow {
        id: column(row, "id")?,
        label: column(row, "label")?,
        prefix: column(row, "prefix")?,
        created_at_ms: time(row, "created_at_ms")?,
        last_used_at_ms: last_used.and_then(|ms| u64::try_from(ms).ok()),
    })
}

fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}

fn random_hex<const N: usize>() -> Result<String, StoreError> {
    let mut bytes = [0u8; N];
    getrandom::fill(&mut bytes).map_err(StoreError::failed("get random bytes"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

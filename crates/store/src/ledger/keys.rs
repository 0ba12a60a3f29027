//! API keys. A key is shown once and kept as a hash: who reads the ledger can't use it.

use async_trait::async_trait;
use sha2::{Digest, Sha256};
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::StoreError;

use super::now_ms;

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

/// SHA-256 of a key, which is 256 random bits and so needs no salt.
pub type KeyHash = [u8; 32];

#[async_trait]
pub trait KeyLedger: Send + Sync + 'static {
    async fn insert_key(&self, row: &KeyRow, hash: &KeyHash) -> Result<(), StoreError>;
    async fn key_by_hash(&self, hash: &KeyHash) -> Result<Option<KeyRow>, StoreError>;
    async fn has_key(&self, id: &str) -> Result<bool, StoreError>;
    async fn note_key_use(&self, id: &str, at_ms: u64) -> Result<(), StoreError>;
    /// At most `limit` after this place, oldest first.
    async fn keys(
        &self,
        after: Option<&Place<String>>,
        limit: usize,
    ) -> Result<Vec<KeyRow>, StoreError>;
    async fn count_keys(&self) -> Result<usize, StoreError>;
    /// Whether there was such a key; it is not valid any more when this returns.
    async fn delete_key(&self, id: &str) -> Result<bool, StoreError>;
    /// Whether requests need a key even if there is none: from the first key on.
    async fn requires_keys(&self) -> Result<bool, StoreError>;
    /// From now on requests need a key.
    async fn require_keys(&self) -> Result<(), StoreError>;

    /// Makes a key. The text is given out here and never again.
    async fn create_key(&self, label: &str) -> Result<(KeyRow, String), StoreError> {
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
        self.insert_key(&row, &hash(&secret)).await?;
        Ok((row, secret))
    }

    /// The key that this text is, if it is one; remembers that it was used.
    async fn find_key(&self, secret: &str) -> Result<Option<KeyRow>, StoreError> {
        if secret.len() > KEY_MAX {
            return Ok(None);
        }
        let Some(key) = self.key_by_hash(&hash(secret)).await? else { return Ok(None) };
        let now = now_ms();
        if key.last_used_at_ms.is_none_or(|last| now >= last.saturating_add(USE_GRAIN_MS))
            && let Err(error) = self.note_key_use(&key.id, now).await
        {
            // A full disk must not lock anybody out.
            let error = torpor_lifecycle::chain(&error);
            tracing::warn!(key = key.id, error, "the use of an API key was not remembered");
        }
        Ok(Some(key))
    }
}

fn hash(secret: &str) -> KeyHash {
    Sha256::digest(secret.as_bytes()).into()
}

fn random_hex<const N: usize>() -> Result<String, StoreError> {
    let mut bytes = [0u8; N];
    getrandom::fill(&mut bytes).map_err(StoreError::failed("get random bytes"))?;
    Ok(hex::encode(bytes))
}

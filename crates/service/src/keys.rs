//! API keys: which are valid, who needs one, and how often each may ask.
//!
//! - A key is needed as soon as there is one, and always on an address that is not loopback. It stays
//!   needed when there is none any more, until the configuration says `require_key = false`.
//! - No key goes into a sandbox: see [`Keyring::is_in`].
//! - A key that has rules for tools opens the MCP gateway and nothing else: with the rest of the API it could
//!   lift its rules.
//! - Who may ask may not ask as often as it likes: see [`crate::throttle`].

mod finder;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq;
use tokio::time::Instant;
use torpor_lifecycle::ledger::{Aggregate, CacheVersion, Place};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ErrorCode;
use torpor_store::{KeyRow, Ledger};

use crate::error::{Error, Result};
use crate::throttle::Throttle;
use finder::Finder;

/// How long a key that was seen is believed without asking the ledger, which also notes its use.
const BELIEVED: Duration = Duration::from_secs(60);
/// Keys remembered at the same time; one more forgets all.
const REMEMBERED: usize = 1024;

/// SHA-256 of a key.
type Digest = [u8; 32];

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Caller {
    Key(Digest),
    /// No key is needed: all who ask are on this host, and are one.
    Anybody,
}

impl Caller {
    /// A name that tells callers apart, and no key.
    pub fn name(&self) -> String {
        match self {
            Self::Key(digest) => hex::encode(digest),
            Self::Anybody => String::new(),
        }
    }
}

/// What the operator says about keys.
#[derive(Clone, Copy, Default)]
pub struct KeySettings<'a> {
    /// A key of the configuration.
    pub fixed: Option<&'a str>,
    /// Whether a key is needed; absent: from the first key on.
    pub required: Option<bool>,
    /// Whether strangers can reach the daemon.
    pub exposed: bool,
    /// Of each key; 0: any number.
    pub requests_per_sec: u32,
}

/// All valid keys. What is in memory is versioned (see [`torpor_lifecycle::ledger`]).
pub struct Keyring {
    ledger: Ledger,
    /// From the configuration.
    fixed: Option<Digest>,
    finder: Finder,
    /// Whether a key is needed even if there is none.
    closed: AtomicBool,
    /// Whether the first key closes for good.
    closing: bool,
    count: AtomicUsize,
    version: CacheVersion,
    seen: Mutex<Seen>,
    /// Ids of those that open the MCP gateway only. It says which.
    clients: RwLock<HashSet<String>>,
    throttle: Throttle<Caller>,
}

/// Keys that the ledger knew a moment ago.
#[derive(Default)]
struct Seen {
    at: HashMap<Digest, (String, Instant)>,
    /// Grows with each key that is revoked: what was looked up before is not believed after.
    revocations: u64,
}

impl Seen {
    /// A key was revoked: whatever was seen is looked up again.
    fn forget(&mut self) {
        self.at.clear();
        self.revocations += 1;
    }
}

impl Keyring {
    pub async fn open(
        ledger: Ledger,
        settings: KeySettings<'_>,
    ) -> std::result::Result<Self, StoreError> {
        let version = CacheVersion::now(ledger.changes(), Aggregate::Keys).await?;
        let count = ledger.count_keys().await?;
        let secret = settings.fixed;
        if secret.is_some() {
            ledger.require_keys().await?;
        }
        let required = match settings.required {
            Some(required) => required,
            None => ledger.requires_keys().await?,
        };
        if required && count == 0 && secret.is_none() {
            tracing::warn!(
                "a key is needed and there is none, so nobody may ask: set api_key, or require_key = false"
            );
        }
        Ok(Self {
            ledger,
            fixed: secret.map(hash),
            finder: Finder::new(secret),
            closed: AtomicBool::new(settings.exposed || required),
            closing: settings.required != Some(false),
            count: AtomicUsize::new(count),
            version,
            seen: Mutex::default(),
            clients: RwLock::default(),
            throttle: Throttle::new(settings.requests_per_sec),
        })
    }

    /// Whether a key is needed.
    pub fn required(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
            || self.fixed.is_some()
            || self.count.load(Ordering::Relaxed) > 0
    }

    /// The id of the key of somebody who was let in; of the one of the configuration, and where none is needed,
    /// none.
    pub async fn id_of(&self, who: &Caller) -> Result<Option<String>> {
        let hash = match who {
            Caller::Key(hash) if self.fixed.as_ref() != Some(hash) => hash,
            Caller::Key(_) | Caller::Anybody => return Ok(None),
        };
        if let Some(id) = self.seen_lately(hash) {
            return Ok(Some(id));
        }
        match self.ledger.key_by_hash(hash).await? {
            Some(row) => Ok(Some(row.id)),
            None => Err(Error::new(ErrorCode::Unauthenticated, "this API key was revoked")),
        }
    }

    fn seen_lately(&self, hash: &Digest) -> Option<String> {
        let seen = self.seen.lock();
        let (id, at) = seen.at.get(hash)?;
        (at.elapsed() < BELIEVED).then(|| id.clone())
    }

    /// Whether there is a key of this id.
    pub async fn is_there(&self, id: &str) -> Result<bool> {
        Ok(self.ledger.has_key(id).await?)
    }

    pub async fn create(&self, label: &str) -> Result<(KeyRow, String)> {
        let _writing = self.version.writing().await;
        let made = self.ledger.create_key(label).await?;
        self.closed.fetch_or(self.closing, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
        Ok(made)
    }

    /// At most `limit` after this place, oldest first.
    pub async fn list(&self, after: Option<&Place<String>>, limit: usize) -> Result<Vec<KeyRow>> {
        Ok(self.ledger.keys(after, limit).await?)
    }

    /// Not valid any more when this returns.
    pub async fn revoke(&self, id: &str) -> Result<()> {
        let _writing = self.version.writing().await;
        if !self.ledger.delete_key(id).await? {
            return Err(Error::new(ErrorCode::NotFound, "there is no such key"));
        }
        self.seen.lock().forget();
        self.count.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    /// Learns what other nodes changed.
    pub(crate) async fn refresh(&self) -> std::result::Result<(), StoreError> {
        let read = async {
            let count = self.ledger.count_keys().await?;
            let required = self.ledger.requires_keys().await?;
            self.closed.fetch_or(required && self.closing, Ordering::Relaxed);
            self.count.store(count, Ordering::Relaxed);
            self.seen.lock().forget();
            Ok(())
        };
        self.version.refresh(read).await
    }

    /// From now on these, by id, open the MCP gateway and nothing else.
    pub fn confine(&self, clients: HashSet<String>) {
        *self.clients.write() = clients;
    }

    /// Whether it is a key that is valid, and opens more than the MCP gateway.
    pub async fn knows(&self, secret: &str) -> Result<bool> {
        Ok(self.find(secret).await?.is_some_and(|id| !self.is_client(&id)))
    }

    fn is_client(&self, id: &str) -> bool {
        self.clients.read().contains(id)
    }

    /// The id of a key that is valid; of the one of the configuration it is empty.
    async fn find(&self, secret: &str) -> Result<Option<String>> {
        let hash = hash(secret);
        if self.fixed.is_some_and(|fixed| fixed.ct_eq(&hash).into()) {
            return Ok(Some(String::new()));
        }
        if let Some(id) = self.seen_lately(&hash) {
            return Ok(Some(id));
        }
        let revocations = self.seen.lock().revocations;
        let Some(KeyRow { id, .. }) = self.ledger.find_key(secret).await? else {
            self.seen.lock().at.remove(&hash);
            return Ok(None);
        };
        let mut seen = self.seen.lock();
        if seen.at.len() >= REMEMBERED {
            seen.at.clear();
        }
        if seen.revocations == revocations {
            seen.at.insert(hash, (id.clone(), Instant::now()));
        }
        Ok(Some(id))
    }

    /// Who shows this key, or none. Where no key is needed, none is looked at.
    pub async fn identify(&self, secret: Option<&str>) -> Result<Caller> {
        let (who, id) = self.recognize(secret).await?;
        if self.is_client(&id) {
            return Err(Error::with_hint(
                ErrorCode::NotPermitted,
                "this API key has rules for tools, and opens the MCP gateway only",
                "use another key; `torpor gateway client ls` shows those that have rules",
            ));
        }
        Ok(who)
    }

    /// The same, also for a key that opens the MCP gateway only.
    pub async fn identify_client(&self, secret: Option<&str>) -> Result<Caller> {
        Ok(self.recognize(secret).await?.0)
    }

    async fn recognize(&self, secret: Option<&str>) -> Result<(Caller, String)> {
        if !self.required() {
            return Ok((Caller::Anybody, String::new()));
        }
        let Some(secret) = secret else {
            return Err(Error::with_hint(
                ErrorCode::Unauthenticated,
                "an API key is needed",
                "send the header `Authorization: Bearer tpk_…`, or set TORPOR_API_KEY",
            ));
        };
        match self.find(secret).await? {
            Some(id) => Ok((Caller::Key(hash(secret)), id)),
            None => Err(Error::new(ErrorCode::Unauthenticated, "this API key is not valid")),
        }
    }

    /// Counts a request of somebody who asks; refuses it if there were too many.
    pub fn count(&self, who: Caller) -> Result<()> {
        self.throttle.take(who).map_err(Error::RateLimited)
    }

    /// Whether a text has a key of ours in it, which must not go into a sandbox.
    pub fn is_in(&self, text: &[u8]) -> bool {
        self.finder.is_in(text)
    }
}

fn hash(secret: &str) -> Digest {
    hash_bytes(secret.as_bytes())
}

fn hash_bytes(secret: &[u8]) -> Digest {
    Sha256::digest(secret).into()
}

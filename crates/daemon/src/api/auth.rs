//! Who is asking.
//!
//! - A key is needed as soon as there is one, and always on an address that is not loopback. It stays
//!   needed when there is none any more, until the configuration says `require_key = false`.
//! - Without keys everybody on this host may ask, but no web page: see [`pages`].
//! - No key goes into a sandbox: see [`finder`].
//! - Who may ask may not ask as often as it likes: see [`crate::throttle`]. Metrics may always be asked for.

mod finder;
mod pages;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::{HeaderMap, Uri};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::time::Instant;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ErrorCode;
use torpor_store::{KeyRow, Ledger};

use super::error::{ApiError, Result};
use crate::config::Config;
use crate::throttle::Throttle;
use finder::Finder;

/// How long a key that was seen is believed without asking the ledger, which also notes its use.
const BELIEVED: Duration = Duration::from_secs(60);
/// Keys remembered at the same time; one more forgets all.
const REMEMBERED: usize = 1024;
/// Another way to send a key, for clients that can't set `Authorization`.
const KEY_HEADER: &str = "x-api-key";
/// Whoever watches a busy daemon must not be turned away.
const METRICS: &str = "/metrics";

type Hash = [u8; 32];

/// All valid keys. The only writer of keys in the ledger while the daemon runs.
pub struct Keyring {
    ledger: Ledger,
    /// From the configuration.
    fixed: Option<Hash>,
    finder: Finder,
    /// Whether a key is needed even if there is none.
    closed: AtomicBool,
    /// Whether the first key closes for good.
    closing: bool,
    count: AtomicUsize,
    seen: Mutex<Seen>,
    /// All who need no key are one: they are on this host.
    throttle: Throttle<Option<Hash>>,
}

/// Keys that the ledger knew a moment ago.
#[derive(Default)]
struct Seen {
    at: HashMap<Hash, Instant>,
    /// Grows with each key that is revoked: what was looked up before is not believed after.
    revocations: u64,
}

impl Keyring {
    /// `exposed`: whether the listener can be reached from elsewhere.
    pub async fn open(
        ledger: Ledger,
        config: &Config,
        exposed: bool,
    ) -> std::result::Result<Self, StoreError> {
        let count = ledger.keys().await?.len();
        let secret = config.api_key.as_ref().map(|key| key.0.as_str());
        if secret.is_some() {
            ledger.require_keys().await?;
        }
        let required = match config.require_key {
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
            closed: AtomicBool::new(exposed || required),
            closing: config.require_key != Some(false),
            count: AtomicUsize::new(count),
            seen: Mutex::default(),
            throttle: Throttle::new(config.limits.requests_per_sec),
        })
    }

    /// Whether a key is needed.
    pub fn required(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
            || self.fixed.is_some()
            || self.count.load(Ordering::Relaxed) > 0
    }

    pub async fn create(&self, label: &str) -> Result<(KeyRow, String)> {
        let made = self.ledger.create_key(label).await?;
        self.closed.fetch_or(self.closing, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
        Ok(made)
    }

    pub async fn list(&self) -> Result<Vec<KeyRow>> {
        Ok(self.ledger.keys().await?)
    }

    /// Not valid any more when this returns.
    pub async fn revoke(&self, id: &str) -> Result<()> {
        if !self.ledger.delete_key(id).await? {
            return Err(ApiError::new(ErrorCode::NotFound, "there is no such key"));
        }
        let mut seen = self.seen.lock();
        seen.at.clear();
        seen.revocations += 1;
        self.count.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    async fn knows(&self, secret: &str) -> Result<bool> {
        let hash = hash(secret);
        if self.fixed.is_some_and(|fixed| fixed.ct_eq(&hash).into()) {
            return Ok(true);
        }
        let (at, revocations) = {
            let seen = self.seen.lock();
            (seen.at.get(&hash).copied(), seen.revocations)
        };
        if at.is_some_and(|at| at.elapsed() < BELIEVED) {
            return Ok(true);
        }
        if self.ledger.find_key(secret).await?.is_none() {
            self.seen.lock().at.remove(&hash);
            return Ok(false);
        }
        let mut seen = self.seen.lock();
        if seen.at.len() >= REMEMBERED {
            seen.at.clear();
        }
        if seen.revocations == revocations {
            seen.at.insert(hash, Instant::now());
        }
        Ok(true)
    }

    /// Whether this request may ask.
    pub async fn admit(&self, uri: &Uri, headers: &HeaderMap) -> Result<()> {
        let who = if self.required() {
            Some(self.admit_key(headers).await?)
        } else {
            pages::refuse_foreign(uri, headers)?;
            None
        };
        if uri.path() == METRICS { Ok(()) } else { self.count_request(who) }
    }

    fn count_request(&self, who: Option<Hash>) -> Result<()> {
        self.throttle.take(who).map_err(ApiError::TooOften)
    }

    /// The same for requests whose `Host` is the name of a sandbox below `.local`, which somebody in the
    /// same network may point at us.
    pub async fn admit_local(&self, headers: &HeaderMap) -> Result<()> {
        let who = if self.required() {
            Some(self.admit_key(headers).await?)
        } else {
            pages::refuse_browsers(headers)?;
            None
        };
        self.count_request(who)
    }

    /// The same for a port that is not for everybody; where no key is needed, everybody may come but
    /// pages of other sites.
    pub async fn admit_visitor(&self, headers: &HeaderMap) -> Result<()> {
        if self.required() {
            return self.admit_key(headers).await.map(drop);
        }
        pages::refuse_cross_site(headers)
    }

    /// Whether there is a key in it that is valid.
    pub async fn opens(&self, headers: &HeaderMap) -> Result<bool> {
        match secret(headers) {
            Some(secret) => self.knows(secret).await,
            None => Ok(false),
        }
    }

    /// Takes our keys out of a request that goes into a sandbox. One in the URL is refused.
    pub fn hide(&self, uri: &Uri, headers: &mut HeaderMap) -> Result<()> {
        self.finder.hide(uri, headers)
    }

    /// Which key it is.
    async fn admit_key(&self, headers: &HeaderMap) -> Result<Hash> {
        let Some(secret) = secret(headers) else {
            return Err(ApiError::with_hint(
                ErrorCode::Unauthenticated,
                "an API key is needed",
                "send the header `Authorization: Bearer tpk_…`, or set TORPOR_API_KEY",
            ));
        };
        if self.knows(secret).await? {
            return Ok(hash(secret));
        }
        Err(ApiError::new(ErrorCode::Unauthenticated, "this API key is not valid"))
    }
}

fn hash(secret: &str) -> Hash {
    hash_bytes(secret.as_bytes())
}

fn hash_bytes(secret: &[u8]) -> Hash {
    Sha256::digest(secret).into()
}

fn secret(headers: &HeaderMap) -> Option<&str> {
    let other = || headers.get(KEY_HEADER).and_then(|value| value.to_str().ok());
    bearer(headers).or_else(other)
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let text = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let (scheme, secret) = text?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_in_either_header() {
        let headers = |name: &'static str, value: &str| {
            HeaderMap::from_iter([(http::HeaderName::from_static(name), value.parse().unwrap())])
        };
        assert_eq!(secret(&headers("authorization", "Bearer tpk_1")), Some("tpk_1"));
        assert_eq!(secret(&headers("authorization", "bearer  tpk_1 ")), Some("tpk_1"));
        assert_eq!(secret(&headers("x-api-key", "tpk_1")), Some("tpk_1"));
        assert_eq!(secret(&headers("authorization", "Basic dXNlcg==")), None);
    }
}

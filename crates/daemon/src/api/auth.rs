//! Who is asking.
//!
//! - A key is needed as soon as there is one, and always on an address that is not loopback.
//! - Without keys everybody on this host may ask, but no web page: a browser would send a stranger's
//!   requests from here, so what comes from another origin or for another host name is refused.
//! - Who may ask may not ask as often as it likes: see [`crate::throttle`]. Metrics may always be asked for.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::header::{AUTHORIZATION, HOST, ORIGIN};
use http::uri::Authority;
use http::{HeaderMap, HeaderName, Uri};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::time::Instant;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ErrorCode;
use torpor_store::{KeyRow, Ledger};

use super::error::{ApiError, Result};
use crate::app::App;
use crate::config::Secret;
use crate::throttle::Throttle;

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
    /// Whether the listener can be reached from elsewhere.
    exposed: bool,
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
    pub async fn open(
        ledger: Ledger,
        fixed: Option<&Secret>,
        exposed: bool,
    ) -> std::result::Result<Self, StoreError> {
        let count = AtomicUsize::new(ledger.keys().await?.len());
        let fixed = fixed.map(|secret| hash(&secret.0));
        let (seen, throttle) = (Mutex::default(), Throttle::new(0));
        Ok(Self { ledger, fixed, exposed, count, seen, throttle })
    }

    /// The same, but each key may ask so often only; 0: as often as it likes.
    pub fn limited(self, requests_per_sec: u32) -> Self {
        Self { throttle: Throttle::new(requests_per_sec), ..self }
    }

    /// Whether there is any key at all.
    pub fn any(&self) -> bool {
        self.fixed.is_some() || self.count.load(Ordering::Relaxed) > 0
    }

    fn required(&self) -> bool {
        self.exposed || self.any()
    }

    pub async fn create(&self, label: &str) -> Result<(KeyRow, String)> {
        let made = self.ledger.create_key(label).await?;
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
            refuse_web_pages(uri, headers)?;
            None
        };
        if uri.path() == METRICS { Ok(()) } else { self.count_request(who) }
    }

    fn count_request(&self, who: Option<Hash>) -> Result<()> {
        self.throttle.take(who).map_err(ApiError::TooOften)
    }

    /// The same for requests whose `Host` is the name of a sandbox below `.local`, which no public
    /// name server gives out: a page of another origin than this host is refused.
    pub async fn admit_local(&self, headers: &HeaderMap) -> Result<()> {
        let who = if self.required() {
            Some(self.admit_key(headers).await?)
        } else {
            refuse_foreign_pages(headers)?;
            None
        };
        self.count_request(who)
    }

    /// The same for a preview that is not for everybody; where no key is needed, everybody may look.
    /// The key is for us, and is taken out.
    pub async fn admit_preview(&self, headers: &mut HeaderMap) -> Result<()> {
        if !self.required() {
            return Ok(());
        }
        self.admit_key(headers).await?;
        let bearer = bearer(headers).is_some();
        headers.remove(if bearer { AUTHORIZATION } else { HeaderName::from_static(KEY_HEADER) });
        Ok(())
    }

    /// Whether there is a key in it that is valid; then it is taken out.
    pub async fn opens_preview(&self, headers: &mut HeaderMap) -> Result<bool> {
        let known = match secret(headers) {
            Some(secret) => self.knows(secret).await?,
            None => false,
        };
        if known {
            let bearer = bearer(headers).is_some();
            headers.remove(if bearer {
                AUTHORIZATION
            } else {
                HeaderName::from_static(KEY_HEADER)
            });
        }
        Ok(known)
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

/// Lets nobody through who may not ask.
pub async fn authenticate(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response> {
    app.keys.admit(request.uri(), request.headers()).await?;
    Ok(next.run(request).await)
}

fn hash(secret: &str) -> Hash {
    Sha256::digest(secret.as_bytes()).into()
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

fn refuse_web_pages(uri: &Uri, headers: &HeaderMap) -> Result<()> {
    let refuse = |message: &str| Err(foreign(message));
    let host = headers.get(HOST).and_then(|value| value.to_str().ok());
    let host = uri.authority().map(Authority::as_str).or(host);
    let Some(host) = host.and_then(|text| text.parse::<Authority>().ok()) else {
        return refuse("the request does not say which host it is for");
    };
    if may_be_rebound(host.host()) {
        return refuse("the request is for another host");
    }
    let Some(origin) = headers.get(ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().ok().and_then(|text| text.parse::<Uri>().ok());
    if origin.as_ref().and_then(Uri::authority) == Some(&host) {
        return Ok(());
    }
    refuse("the request was made by a web page of another origin")
}

/// Pages of this host itself may ask, those of others may not.
fn refuse_foreign_pages(headers: &HeaderMap) -> Result<()> {
    let Some(origin) = headers.get(ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().ok().and_then(|text| text.parse::<Uri>().ok());
    match origin.as_ref().and_then(Uri::host) {
        Some("localhost" | "127.0.0.1" | "[::1]") => Ok(()),
        Some(_) | None => Err(foreign("the request was made by a web page of another origin")),
    }
}

fn foreign(message: &str) -> ApiError {
    ApiError::with_hint(
        ErrorCode::Unauthenticated,
        message,
        "without API keys only programs on this host may ask; make one with `torpor key create`",
    )
}

/// Whether somebody may have pointed this name at us, who then is the origin of his pages. Names
/// without a dot (`localhost`) are not given out, and an address is nobody's name.
fn may_be_rebound(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host.contains('.') && address.parse::<std::net::IpAddr>().is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(host: &str, origin: Option<&str>) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, host.parse().unwrap());
        if let Some(origin) = origin {
            headers.insert(ORIGIN, origin.parse().unwrap());
        }
        refuse_web_pages(&Uri::from_static("/v1/sandboxes"), &headers).is_ok()
    }

    #[test]
    fn programs_on_this_host_need_no_key() {
        for host in ["127.0.0.1:8900", "localhost:8900", "[::1]:8900", "localhost", "torpor:80"] {
            assert!(asked(host, None), "{host}");
        }
        assert!(asked("localhost:8900", Some("http://localhost:8900")));
    }

    #[test]
    fn web_pages_of_others_can_not_ask() {
        assert!(!asked("localhost:8900", Some("https://evil.example")));
        assert!(!asked("localhost:8900", Some("http://3000-web.localhost:8900")));
        assert!(!asked("localhost:8900", Some("http://localhost:3000")));
        assert!(!asked("localhost:8900", Some("null")));
        assert!(!asked("rebound.example:8900", None));
        assert!(!asked("rebound.example:8900", Some("http://rebound.example:8900")));
        assert!(!asked("127.0.0.1.evil.example", None));
    }

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

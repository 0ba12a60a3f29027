//! Who is asking, by the headers of a request.
//!
//! - Without keys everybody on this host may ask, but no web page: see [`pages`].
//! - No key goes into a sandbox.
//! - Metrics may always be asked for.

mod pages;

use http::header::{AUTHORIZATION, HeaderName};
use http::{HeaderMap, HeaderValue, Uri};
use torpor_protocol::ErrorCode;
use torpor_service::keys::{Caller, Keyring};
use torpor_service::{Error, Result};

/// Another way to send a key, for clients that can't set `Authorization`.
const KEY_HEADER: &str = "x-api-key";
/// Whoever watches a busy daemon must not be turned away.
const METRICS: &str = "/metrics";

/// Whether this request may ask, and who does.
pub async fn admit(keys: &Keyring, uri: &Uri, headers: &HeaderMap) -> Result<Caller> {
    admitted(keys, keys.identify(secret(headers)).await?, uri, headers)
}

/// The same for the MCP gateway, which keys may open that open nothing else.
pub async fn admit_client(keys: &Keyring, uri: &Uri, headers: &HeaderMap) -> Result<Caller> {
    admitted(keys, keys.identify_client(secret(headers)).await?, uri, headers)
}

fn admitted(keys: &Keyring, who: Caller, uri: &Uri, headers: &HeaderMap) -> Result<Caller> {
    if who == Caller::Anybody {
        pages::refuse_foreign(uri, headers)?;
    }
    if uri.path() != METRICS {
        keys.count(who)?;
    }
    Ok(who)
}

/// The same for requests whose `Host` is the name of a sandbox below `.local`, which somebody in the
/// same network may point at us.
pub async fn admit_local(keys: &Keyring, headers: &HeaderMap) -> Result<()> {
    let who = keys.identify(secret(headers)).await?;
    if who == Caller::Anybody {
        pages::refuse_browsers(headers)?;
    }
    keys.count(who)
}

/// The same for a port that is not for everybody; where no key is needed, everybody may come but
/// pages of other sites.
pub async fn admit_visitor(keys: &Keyring, headers: &HeaderMap) -> Result<()> {
    match keys.identify(secret(headers)).await? {
        Caller::Key(_) => Ok(()),
        Caller::Anybody => pages::refuse_cross_site(headers),
    }
}

/// Whether there is a key in it that is valid.
pub async fn opens(keys: &Keyring, headers: &HeaderMap) -> Result<bool> {
    match secret(headers) {
        Some(secret) => keys.knows(secret).await,
        None => Ok(false),
    }
}

/// Takes our keys out of a request that goes into a sandbox. A URL is the application's own, so one with
/// a key in it is refused.
pub fn hide(keys: &Keyring, uri: &Uri, headers: &mut HeaderMap) -> Result<()> {
    let target = uri.path_and_query().map_or("", |target| target.as_str());
    if keys.is_in(target.as_bytes()) {
        return Err(Error::with_hint(
            ErrorCode::InvalidRequest,
            "the URL has an API key in it, which no program in a sandbox may see",
            "send the key in the header `Authorization: Bearer …`",
        ));
    }
    let has_key = |(name, value): (&HeaderName, &HeaderValue)| {
        keys.is_in(value.as_bytes()).then(|| name.clone())
    };
    let found: Vec<_> = headers.iter().filter_map(has_key).collect();
    for name in found {
        headers.remove(name);
    }
    Ok(())
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
    use torpor_service::keys::KeySettings;
    use torpor_store::{Layout, Ledger};

    #[test]
    fn a_key_is_found_in_either_header() {
        let headers = |name: &'static str, value: &str| {
            HeaderMap::from_iter([(HeaderName::from_static(name), value.parse().unwrap())])
        };
        assert_eq!(secret(&headers("authorization", "Bearer tpk_1")), Some("tpk_1"));
        assert_eq!(secret(&headers("authorization", "bearer  tpk_1 ")), Some("tpk_1"));
        assert_eq!(secret(&headers("x-api-key", "tpk_1")), Some("tpk_1"));
        assert_eq!(secret(&headers("authorization", "Basic dXNlcg==")), None);
    }

    #[tokio::test]
    async fn a_key_is_taken_out_wherever_it_stands() {
        const KEY: &str = "plain+secret of mine=";
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&Layout::open(dir.path()).unwrap()).await.unwrap();
        let settings = KeySettings { fixed: Some(KEY), ..KeySettings::default() };
        let keys = Keyring::open(ledger, settings).await.unwrap();
        let left = |name: &'static str, value: &str| {
            let name = HeaderName::from_static(name);
            let mut headers = HeaderMap::from_iter([(name, value.parse().unwrap())]);
            hide(&keys, &Uri::from_static("/"), &mut headers).unwrap();
            !headers.is_empty()
        };
        for name in ["authorization", "x-api-key", "cookie", "referer", "x-anything"] {
            assert!(!left(name, &format!("a {KEY} b")), "{name}");
            assert!(!left(name, "k=plain%2Bsecret%20of%20mine%3d"), "{name}");
            assert!(left(name, "plain+secret of others"), "{name}");
        }
        let refused =
            |uri: &str| hide(&keys, &uri.parse().unwrap(), &mut HeaderMap::new()).is_err();
        assert!(refused("/?key=plain%2Bsecret%20of%20mine="));
        assert!(!refused("/a%20b?c=%25"));
    }
}

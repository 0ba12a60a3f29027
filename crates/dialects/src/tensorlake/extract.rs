//! What handlers of the lifecycle API take.
//!
//! - Unknown fields and parameters are ignored: clients newer than this send them.
//! - An empty body is an empty object, whatever its type is said to be. Any other must say that it is
//!   JSON, which a web page of others can't unasked.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRequest, FromRequestParts, RawPathParams, Request};
use http::HeaderMap;
use http::header::HOST;
use http::request::Parts;
use http::uri::Authority;
use serde::de::DeserializeOwned;
use torpor_protocol::ErrorCode;
use torpor_service::Service;
use torpor_web::error::ApiError;
use torpor_web::extract::{is_json, not_json, whole_body};

/// Says whether whoever is in front of us was spoken to in TLS.
const FORWARDED_PROTO: &str = "x-forwarded-proto";
/// How long the client waits for its answer, and how much of it the way back may take.
const TIMEOUT_HEADER: &str = "x-tensorlake-request-timeout-ms";
const GRACE_HEADER: &str = "x-tensorlake-request-timeout-grace-ms";
/// What the client libraries send if nobody says otherwise.
const TIMEOUT_MS: u64 = 300_000;
const GRACE_MS: u64 = 5_000;
/// Longer than this no connection is held open for one answer.
const PATIENCE_MAX: Duration = Duration::from_secs(3600);

/// A JSON object.
pub(super) struct Body<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned + Default> FromRequest<S> for Body<T> {
    type Rejection = ApiError;
    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let typed = is_json(request.headers());
        let body = whole_body(request, state).await.map_err(|error| match error.0.to_body("") {
            // Not one of the statuses that are asked again: it would not arrive then either.
            body if body.code == ErrorCode::Timeout => ApiError::invalid(body.message),
            _ => error,
        })?;
        if !typed && !body.is_empty() {
            return Err(not_json());
        }
        parse(&body).map(Self)
    }
}

fn parse<T: DeserializeOwned + Default>(body: &[u8]) -> Result<T, ApiError> {
    if body.is_empty() {
        return Ok(T::default());
    }
    // A list would be taken for the fields in their order.
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err(ApiError::invalid("the body is no JSON object"));
    }
    serde_json::from_slice(body)
        .map_err(|error| ApiError::invalid(format!("the body can't be read: {error}")))
}

/// What the last variable segment of the path says.
pub(super) struct Place(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for Place {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let params = RawPathParams::from_request_parts(parts, &()).await;
        let params = params.map_err(|error| ApiError::invalid(error.body_text()))?;
        let last = params.iter().last();
        Ok(Self(last.map(|(_, text)| text.to_owned()).unwrap_or_default()))
    }
}

/// Where whoever asks finds this daemon: sandboxes are reached there, too. None if it did not say.
#[derive(Debug, Clone)]
pub(super) struct Address(pub(super) Option<String>);

impl FromRequestParts<Arc<Service>> for Address {
    type Rejection = std::convert::Infallible;
    async fn from_request_parts(
        parts: &mut Parts,
        _: &Arc<Service>,
    ) -> Result<Self, Self::Rejection> {
        let host = parts.headers.get(HOST).and_then(|value| value.to_str().ok());
        let host = parts.uri.authority().map(Authority::as_str).or(host);
        let host = host.and_then(|text| text.parse::<Authority>().ok());
        Ok(Self(host.map(|host| address(&parts.headers, &host))))
    }
}

fn address(headers: &HeaderMap, host: &Authority) -> String {
    let said = headers.get(FORWARDED_PROTO).and_then(|value| value.to_str().ok());
    let first = said.and_then(|text| text.split(',').next()).unwrap_or_default().trim();
    let scheme = if first.eq_ignore_ascii_case("https") { "https" } else { "http" };
    let host = host.as_str();
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    format!("{scheme}://{host}")
}

/// How long an answer may be held back.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience(pub(super) Duration);

impl<S: Send + Sync> FromRequestParts<S> for Patience {
    type Rejection = std::convert::Infallible;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        Ok(Self(patience(&parts.headers)))
    }
}

fn patience(headers: &HeaderMap) -> Duration {
    let said = |name: &str| headers.get(name)?.to_str().ok()?.parse::<u64>().ok();
    let timeout = said(TIMEOUT_HEADER).unwrap_or(TIMEOUT_MS);
    let grace = said(GRACE_HEADER).unwrap_or(GRACE_MS);
    Duration::from_millis(timeout.saturating_sub(grace)).min(PATIENCE_MAX)
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(default)]
    struct Sample {
        times: u32,
    }

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let parsed = |(name, value): &(&'static str, &str)| {
            (http::HeaderName::from_static(name), value.parse().unwrap())
        };
        pairs.iter().map(parsed).collect()
    }

    #[test]
    fn a_body_is_an_object_or_nothing() {
        assert_eq!(parse::<Sample>(b"").unwrap(), Sample { times: 0 });
        assert_eq!(parse::<Sample>(br#" {"times": 3, "newer": []}"#).unwrap(), Sample { times: 3 });
        for wrong in ["[]", "[3]", "null", "3", "{", r#"{"times": "three"}"#, " "] {
            assert!(parse::<Sample>(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_address_is_the_one_that_was_used() {
        let host = "localhost:8900".parse().unwrap();
        assert_eq!(address(&HeaderMap::new(), &host), "http://localhost:8900");
        for (said, scheme) in [("https", "https"), ("HTTPS, http", "https"), ("gopher", "http")] {
            let headers = headers(&[(FORWARDED_PROTO, said)]);
            assert_eq!(address(&headers, &host), format!("{scheme}://localhost:8900"));
        }
    }

    #[test]
    fn the_answer_comes_before_the_client_gives_up() {
        let of = |pairs| patience(&headers(pairs)).as_millis();
        assert_eq!(of(&[]), 295_000);
        assert_eq!(of(&[(TIMEOUT_HEADER, "8"), (GRACE_HEADER, "2")]), 6);
        assert_eq!(of(&[(TIMEOUT_HEADER, "8"), (GRACE_HEADER, "20")]), 0);
        assert_eq!(of(&[(TIMEOUT_HEADER, "soon")]), 295_000);
        assert_eq!(of(&[(TIMEOUT_HEADER, "18446744073709551615")]), 3_600_000);
    }
}

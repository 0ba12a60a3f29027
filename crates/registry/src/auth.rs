//! How a registry wants to know who asks: Basic, or a token from a server that it names.

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use serde::Deserialize;

use crate::client::{encoded, said};
use crate::endpoint::Endpoint;
use crate::wire::{Body, whole};
use crate::{Error, Result};

/// Largest answer of a token server.
const TOKEN_MAX: u64 = 256 * 1024;
/// Who a token server knows us as, when it is given a refresh token.
const CLIENT_ID: &str = "torpor";

/// Who we are for a registry.
#[derive(Clone, PartialEq, Eq)]
pub enum Login {
    Password {
        username: String,
        password: String,
    },
    /// What a token server gives out instead of a password.
    Refresh(String),
}

impl std::fmt::Debug for Login {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Password { username, .. } => write!(f, "Login({username}, secret)"),
            Self::Refresh(_) => write!(f, "Login(secret)"),
        }
    }
}

impl Login {
    fn basic(&self) -> Option<HeaderValue> {
        let Self::Password { username, password } = self else { return None };
        let text = format!("Basic {}", STANDARD.encode(format!("{username}:{password}")));
        let mut header = HeaderValue::from_str(&text).ok()?;
        header.set_sensitive(true);
        Some(header)
    }
}

/// Where logins are kept.
#[async_trait]
pub trait Credentials: Send + Sync {
    /// Of the registry, by its host.
    async fn find(&self, registry: &str) -> Result<Option<Login>>;
}

/// What is to be done, for the token server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Scope {
    pub(crate) repository: String,
    pub(crate) actions: &'static str,
    /// Read from this one too, to take its blobs over.
    pub(crate) from: Option<String>,
}

impl Scope {
    pub(crate) fn pull(repository: &str) -> Self {
        Self { repository: repository.to_owned(), actions: "pull", from: None }
    }

    pub(crate) fn push(repository: &str, from: Option<&str>) -> Self {
        let from = from.filter(|from| *from != repository).map(str::to_owned);
        Self { repository: repository.to_owned(), actions: "pull,push", from }
    }

    fn texts(&self) -> Vec<String> {
        if self.repository.is_empty() {
            return Vec::new();
        }
        let own = format!("repository:{}:{}", self.repository, self.actions);
        let from = self.from.as_ref().map(|from| format!("repository:{from}:pull"));
        [Some(own), from].into_iter().flatten().collect()
    }
}

/// What a 401 asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String> },
}

pub(crate) fn challenge(headers: &HeaderMap) -> Option<Challenge> {
    headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok()).find_map(parse)
}

fn parse(text: &str) -> Option<Challenge> {
    let (scheme, mut rest) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
    if scheme.eq_ignore_ascii_case("basic") {
        return Some(Challenge::Basic);
    }
    if !scheme.eq_ignore_ascii_case("bearer") {
        return None;
    }
    let (mut realm, mut service) = (None, None);
    while let Some((key, after)) = rest.split_once('=') {
        let (value, after) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => after.split_once(',').unwrap_or((after, "")),
        };
        match key.trim_matches([',', ' ']).to_ascii_lowercase().as_str() {
            "realm" => realm = Some(value.to_owned()),
            "service" => service = Some(value.to_owned()),
            _ => {}
        }
        rest = after;
    }
    Some(Challenge::Bearer { realm: realm?, service })
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

/// The header that answers a challenge; `None` if there is nothing to say.
pub(crate) async fn answer(
    endpoint: &Endpoint,
    challenge: Challenge,
    login: Option<&Login>,
    scope: &Scope,
) -> Result<Option<HeaderValue>> {
    let (realm, service) = match challenge {
        Challenge::Basic => return Ok(login.and_then(Login::basic)),
        Challenge::Bearer { realm, service } => (realm, service),
    };
    let garbled = |why: String| Error::Garbled { registry: endpoint.name.clone(), why };
    let request = token_request(endpoint, &realm, service.as_deref(), login, scope)?;
    let answer = endpoint.wire.send(request, None).await;
    let answer = answer.map_err(|why| Error::Unreachable {
        registry: endpoint.name.clone(),
        why: format!("its token server {realm:.100}: {why}"),
    })?;
    let (head, body) = answer.into_parts();
    if !head.status.is_success() {
        return Err(refused(endpoint, head.status, body, login.is_none()).await);
    }
    let bytes = whole(body, TOKEN_MAX, &endpoint.wire.patience).await.map_err(garbled)?;
    let what = "the answer of the token server".to_owned();
    let bytes = bytes.ok_or(Error::TooLarge { what, limit: TOKEN_MAX })?;
    let token: Token = serde_json::from_slice(&bytes)
        .map_err(|error| garbled(format!("its token server: {error}")))?;
    let none = || garbled("its token server gives no token".to_owned());
    let given = [token.token, token.access_token].into_iter().flatten();
    let token = given.into_iter().find(|token| !token.trim().is_empty()).ok_or_else(none)?;
    let mut header = HeaderValue::from_str(&format!("Bearer {token}")).map_err(|_| none())?;
    header.set_sensitive(true);
    Ok(Some(header))
}

async fn refused(
    endpoint: &Endpoint,
    status: StatusCode,
    body: hyper::body::Incoming,
    anonymous: bool,
) -> Error {
    let said = said(body, &endpoint.wire.patience).await;
    let registry = endpoint.name.clone();
    match status.as_u16() {
        429 => Error::RateLimited { registry, retry_after: None },
        500.. => Error::Unreachable { registry, why: format!("its token server: {status} {said}") },
        401 if !anonymous => Error::BadLogin { registry, said },
        _ => Error::Denied { registry, what: "a token".to_owned(), said, anonymous },
    }
}

fn token_request(
    endpoint: &Endpoint,
    realm: &str,
    service: Option<&str>,
    login: Option<&Login>,
    scope: &Scope,
) -> Result<Request<Body>> {
    let garbled =
        |why: &str| Error::Garbled { registry: endpoint.name.clone(), why: why.to_owned() };
    let fine = realm.starts_with("https://") || endpoint.plain && realm.starts_with("http://");
    if !fine {
        return Err(garbled("it wants a password sent to a token server without TLS"));
    }
    let mut pairs: Vec<(&str, String)> = scope.texts().into_iter().map(|t| ("scope", t)).collect();
    pairs.extend(service.map(|service| ("service", service.to_owned())));
    let request = Request::builder().header(ACCEPT, "application/json");
    let bad = |_| garbled("the address of its token server can't be read");
    if let Some(Login::Refresh(token)) = login {
        let scopes = scope.texts().join(" ");
        let form = [
            ("grant_type", "refresh_token"),
            ("client_id", CLIENT_ID),
            ("service", service.unwrap_or_default()),
            ("scope", &scopes),
            ("refresh_token", token),
        ];
        let form = form.map(|(key, value)| format!("{key}={}", encoded(value))).join("&");
        let request = request
            .method(Method::POST)
            .uri(realm)
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded");
        return request.body(full(Bytes::from(form))).map_err(bad);
    }
    let query: Vec<_> =
        pairs.iter().map(|(key, value)| format!("{key}={}", encoded(value))).collect();
    let joint = if realm.contains('?') { '&' } else { '?' };
    let mut request = request.uri(format!("{realm}{joint}{}", query.join("&")));
    if let Some(basic) = login.and_then(Login::basic) {
        request = request.header(AUTHORIZATION, basic);
    }
    request.body(full(Bytes::new())).map_err(bad)
}

pub(crate) fn full(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never| match never {}).boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_understood() {
        let bearer = parse(
            r#"Bearer realm="https://auth.x/token",service="registry.x",scope="repository:a:pull,push""#,
        );
        let realm = "https://auth.x/token".to_owned();
        let service = Some("registry.x".to_owned());
        assert_eq!(bearer, Some(Challenge::Bearer { realm, service }));
        assert_eq!(parse("Basic realm=\"x\""), Some(Challenge::Basic));
        assert_eq!(
            parse("bearer realm=https://a"),
            Some(Challenge::Bearer { realm: "https://a".to_owned(), service: None })
        );
        for text in ["", "Bearer", "Bearer realm", "Bearer realm=\"x", "Negotiate", "Bearer =,=,="]
        {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_login_is_not_printed() {
        let login = Login::Password { username: "u".to_owned(), password: "hunter2".to_owned() };
        assert!(!format!("{login:?}").contains("hunter2"));
        assert!(!format!("{:?}", login.basic()).contains("Basic"));
    }
}

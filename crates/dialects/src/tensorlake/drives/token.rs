//! The token that `FilesystemClient` uses after its first call: it says who asked and until when, under our seal, so that
//! nobody has to remember it. There is no key in it, because the client takes it to an address that it makes up itself.
//!
//! A token outlives a key that is revoked, by its own time at most.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use http::header::AUTHORIZATION;
use http::request::Parts;
use http::{HeaderMap, Uri};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use torpor_protocol::ErrorCode;
use torpor_service::Service;
use torpor_service::keys::Caller;
use torpor_web::auth;
use torpor_web::error::{ApiError, Result};

use crate::tensorlake::NAMESPACE;
use crate::tensorlake::extract::Address;
use crate::tensorlake::images::time;

const TOKEN_SEAL: &str = "tensorlake file system token";
/// Long enough to send what is written with it, short enough for a token that was lost.
const LIFE_SECS: u64 = 900;
/// What the user is called: the client says it back, and nobody looks at it.
const USER: &str = "torpor";

/// What is in a token. The client reads the project in it.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Claims {
    /// The project.
    iss: String,
    /// Who asked for it; nothing if no key was needed.
    sub: String,
    /// When it ends, in seconds.
    exp: u64,
}

pub(super) async fn give(
    State(service): State<Arc<Service>>,
    address: Address,
    headers: HeaderMap,
) -> Result<Json<Value>> {
    check_near(&address)?;
    let sub = service.keys.identify(after(&headers, "Bearer ")).await?.name();
    let exp = now_secs(&service) + LIFE_SECS;
    let claims = Claims { iss: NAMESPACE.to_owned(), sub, exp };
    Ok(Json(json!({
        "token": write(&claims, &seal(&service, &claims)),
        "tokenType": "bearer",
        "expiresAt": time(exp * 1000),
        "gitUsername": USER,
        "repoPattern": "*",
        "scopes": [],
    })))
}

/// The client asks us for a token and takes it elsewhere, unless it knows our address as one of these.
fn check_near(address: &Address) -> Result<()> {
    let uri = address.0.as_deref().and_then(|text| text.parse::<Uri>().ok());
    let host = uri.as_ref().and_then(Uri::host).unwrap_or_default();
    if matches!(host, "localhost" | "127.0.0.1") || host.starts_with("api.") {
        return Ok(());
    }
    Err(ApiError::with_hint(
        ErrorCode::Unsupported,
        "this client would look for file systems at git.tensorlake.ai: it knows others only at localhost, 127.0.0.1, and \
         at git.DOMAIN when TENSORLAKE_API_URL is api.DOMAIN",
        "forward a port (`ssh -L 8900:localhost:8900 HOST`) and use http://localhost:8900, or use `torpor drive`",
    ))
}

/// Lets in who shows a token, or what opens everything else.
pub(in crate::tensorlake) async fn admit(
    service: &Service,
    head: &Parts,
) -> torpor_service::Result<()> {
    match shown(service, &head.headers) {
        Some(who) if service.keys.required() => service.keys.count(who),
        Some(_) | None => auth::admit(&service.keys, &head.uri, &head.headers).await.map(drop),
    }
}

/// Whose token it is, if it is one of ours and its time is not over.
fn shown(service: &Service, headers: &HeaderMap) -> Option<Caller> {
    let pair = String::from_utf8(STANDARD.decode(after(headers, "Basic ")?).ok()?).ok()?;
    let (claims, sealed) = read(pair.split_once(':')?.1)?;
    let Claims { sub, exp, .. } = &claims;
    let ours = service.vault.sealed(TOKEN_SEAL, &[sub, &exp.to_string()], &sealed);
    let fresh = *exp > now_secs(service);
    let who = Caller::Key(hex::decode(sub).ok()?.try_into().ok()?);
    (ours && fresh).then_some(who)
}

fn now_secs(service: &Service) -> u64 {
    service.fleet.clock().now_ms() / 1000
}

fn seal(service: &Service, Claims { sub, exp, .. }: &Claims) -> String {
    service.vault.seal(TOKEN_SEAL, &[sub, &exp.to_string()])
}

/// In the shape of a JSON Web Token.
fn write(claims: &Claims, seal: &str) -> String {
    let parts = [json!({"alg": "torpor"}), json!(claims)];
    let [head, body] = parts.map(|part| URL_SAFE_NO_PAD.encode(part.to_string()));
    format!("{head}.{body}.{seal}")
}

fn read(token: &str) -> Option<(Claims, String)> {
    let mut parts = token.split('.').skip(1);
    let claims = URL_SAFE_NO_PAD.decode(parts.next()?).ok()?;
    Some((serde_json::from_slice(&claims).ok()?, parts.next()?.to_owned()))
}

fn after<'a>(headers: &'a HeaderMap, scheme: &str) -> Option<&'a str> {
    headers.get(AUTHORIZATION)?.to_str().ok()?.strip_prefix(scheme)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_as_it_was_written() {
        let claims = Claims { iss: NAMESPACE.to_owned(), sub: "ab".to_owned(), exp: 7 };
        let (back, seal) = read(&write(&claims, "5ea1")).unwrap();
        assert_eq!((back, seal.as_str()), (claims, "5ea1"));
        for wrong in ["", "password", "a.b", "a.b.c", "a.e30.c"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_token_is_for_addresses_that_the_client_comes_back_to() {
        let near = |text: &str| check_near(&Address(Some(text.to_owned()))).is_ok();
        for good in ["http://localhost:8900", "http://127.0.0.1:8900", "https://api.torpor.example"]
        {
            assert!(near(good), "{good}");
        }
        for far in
            ["http://torpor.example:8900", "http://10.0.0.7:8900", "http://localhost.example"]
        {
            assert!(!near(far), "{far}");
        }
        assert!(check_near(&Address(None)).is_err());
    }
}

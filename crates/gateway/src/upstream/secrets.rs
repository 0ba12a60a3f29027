//! Secrets in what is sent to servers: `{{SECRET:name}}`, where the secret is bound to the host.

use hyper::http::Uri;
use torpor_lifecycle::store::Vault as _;
use torpor_protocol::SecretName;
use torpor_service::Service;

use super::UpstreamError;

const OPENING: &str = "{{SECRET:";
const CLOSING: &str = "}}";

/// Why a text with placeholders can't be right, if it can't.
pub(super) fn check(text: &str) -> Result<(), String> {
    parts(text).map(drop)
}

/// Pieces of a text: as they are, or names of secrets.
enum Piece<'a> {
    Text(&'a str),
    Secret(SecretName),
}

fn parts(text: &str) -> Result<Vec<Piece<'_>>, String> {
    let (mut pieces, mut rest) = (Vec::new(), text);
    while let Some((before, after)) = rest.split_once(OPENING) {
        let Some((name, behind)) = after.split_once(CLOSING) else {
            return Err(format!("a placeholder does not end with {CLOSING}"));
        };
        let name = name.parse().map_err(|error| format!("{error}"))?;
        pieces.extend([Piece::Text(before), Piece::Secret(name)]);
        rest = behind;
    }
    pieces.push(Piece::Text(rest));
    Ok(pieces)
}

/// The text with the values of secrets in it.
pub(super) async fn revealed(
    service: &Service,
    text: &str,
    to: &Uri,
) -> Result<String, UpstreamError> {
    let mut whole = String::new();
    for piece in parts(text).map_err(UpstreamError::Unreachable)? {
        match piece {
            Piece::Text(text) => whole.push_str(text),
            Piece::Secret(name) => whole.push_str(&value_of(service, &name, to).await?),
        }
    }
    Ok(whole)
}

async fn value_of(service: &Service, name: &SecretName, to: &Uri) -> Result<String, UpstreamError> {
    let bound = service.vault.bound(name).await;
    let bound = bound.map_err(|error| UpstreamError::ours(&error.into()))?;
    let missing = || format!("there is no secret {name}: torpor secret set {name}");
    let bound = bound.ok_or_else(|| UpstreamError::Unreachable(missing()))?;
    let tls = to.scheme_str() == Some("https");
    let host = to.host().unwrap_or_default().to_ascii_lowercase();
    let port = to.port_u16().unwrap_or(if tls { 443 } else { 80 });
    // One that is bound to nothing goes where this server's own specification says, encrypted.
    let permitted = match bound.hosts.is_empty() {
        true => tls && port == 443,
        false => bound.hosts.iter().any(|binding| binding.permits(&host, port, tls)),
    };
    match permitted {
        true => Ok(bound.value),
        false => Err(UpstreamError::Unreachable(format!(
            "the secret {name} is not bound to {host}:{port}; `torpor secret set` binds it (--host)"
        ))),
    }
}

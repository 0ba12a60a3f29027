//! HTTP headers between two connections: what a proxy refuses, removes and keeps, whichever way it faces.
//!
//! Invariants
//! - What two parsers could read in two ways is refused, never repaired.
//! - Hop-by-hop headers concern one connection and stay there; `Connection` can't make an end-to-end
//!   header one of them.
//! - No upgrade leads to HTTP or TLS: inside would be requests that nobody checked.
//!
//! What only one of the users needs (`Forwarded`, cookies, compression) is with that user.

#[cfg(any(test, feature = "cases"))]
pub mod cases;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Uri, Version};

pub const FORWARDED: HeaderName = HeaderName::from_static("forwarded");
pub const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
pub const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
pub const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// They concern one connection. `Trailer` is not among them: it announces what the body ends with.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HTTP2_SETTINGS,
    KEEP_ALIVE,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    PROXY_CONNECTION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// What applications and proxies rely on: `Connection` can't nominate it.
const END_TO_END: [HeaderName; 13] = [
    header::AUTHORIZATION,
    header::CACHE_CONTROL,
    header::CONTENT_ENCODING,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::COOKIE,
    header::HOST,
    header::ORIGIN,
    header::SET_COOKIE,
    FORWARDED,
    FORWARDED_FOR,
    FORWARDED_HOST,
    FORWARDED_PROTO,
];

/// Why a request is not passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("tunnels (CONNECT) are not passed on")]
    Connect,
    /// It could be read in more than one way, and how.
    #[error("the request can be read in more than one way: {0}")]
    Ambiguous(&'static str),
}

/// The head of a request, whoever holds it.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    pub method: &'a Method,
    pub uri: &'a Uri,
    pub version: Version,
    pub headers: &'a HeaderMap,
}

impl<'a> From<&'a Parts> for Head<'a> {
    fn from(parts: &'a Parts) -> Self {
        let Parts { method, uri, version, headers, .. } = parts;
        Self { method, uri, version: *version, headers }
    }
}

impl<'a, B> From<&'a Request<B>> for Head<'a> {
    fn from(request: &'a Request<B>) -> Self {
        let (method, uri, headers) = (request.method(), request.uri(), request.headers());
        Self { method, uri, version: request.version(), headers }
    }
}

/// Refuses what two parsers could read in two ways.
pub fn check<'a>(head: impl Into<Head<'a>>) -> Result<(), Refused> {
    let head = head.into();
    if *head.method == Method::CONNECT {
        return Err(Refused::Connect);
    }
    check_host(&head).and_then(|()| check_length(&head)).map_err(Refused::Ambiguous)
}

/// It says once whom it is for.
fn check_host(head: &Head<'_>) -> Result<(), &'static str> {
    let mut hosts = head.headers.get_all(header::HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err("it has more than one Host header");
    }
    let Some(target) = head.uri.authority().map(|target| target.as_str().as_bytes()) else {
        return Ok(());
    };
    if target.contains(&b'@') {
        return Err("its target has a user in it");
    }
    if host.is_some_and(|host| !host.as_bytes().eq_ignore_ascii_case(target)) {
        return Err("its target and its Host header name different hosts");
    }
    Ok(())
}

/// It says once where it ends.
fn check_length(head: &Head<'_>) -> Result<(), &'static str> {
    let lengths = head.headers.get_all(header::CONTENT_LENGTH).iter().count();
    if lengths > 1 {
        return Err("it has more than one Content-Length header");
    }
    let mut codings = head.headers.get_all(header::TRANSFER_ENCODING).iter();
    let Some(coding) = codings.next() else { return Ok(()) };
    if lengths > 0 {
        return Err("it has both Content-Length and Transfer-Encoding");
    }
    if head.version < Version::HTTP_11 {
        return Err("HTTP/1.0 has no Transfer-Encoding");
    }
    if codings.next().is_some() || !coding.as_bytes().eq_ignore_ascii_case(b"chunked") {
        return Err("its Transfer-Encoding is not \"chunked\"");
    }
    Ok(())
}

/// The protocol that the client wants to go on with on this connection. An upgrade to HTTP or TLS is
/// ignored, as any server may.
pub fn upgrade<'a>(head: impl Into<Head<'a>>) -> Option<HeaderValue> {
    let head = head.into();
    let protocol = head.headers.get(header::UPGRADE)?;
    let web = protocol.to_str().ok()?.split(',').any(|token| {
        let token = token.trim().to_ascii_lowercase();
        ["h2", "http", "tls"].iter().any(|name| token.starts_with(name))
    });
    let wanted = head.version == Version::HTTP_11
        && nominated(head.headers).any(|name| name == header::UPGRADE);
    (wanted && !web).then(|| protocol.clone())
}

/// Removes from a request what concerned the connection it came on. It must have passed [`check`].
pub fn prepare_request(headers: &mut HeaderMap) {
    let trailers = headers.get_all(header::TE).iter().any(|value| {
        let mut tokens = value.as_bytes().split(|byte| *byte == b',');
        tokens.any(|token| token.trim_ascii().eq_ignore_ascii_case(b"trailers"))
    });
    strip(headers);
    if trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// Removes from an answer what concerned the connection it came on.
pub fn prepare_answer(headers: &mut HeaderMap) {
    if headers.contains_key(header::TRANSFER_ENCODING) {
        // A length beside an encoding is a lie that nobody must see.
        headers.remove(header::CONTENT_LENGTH);
    }
    strip(headers);
}

/// Whether it says where a request goes and where it ends, so that nobody but us may set it.
pub fn is_framing(name: &HeaderName) -> bool {
    let framing = [header::HOST, header::CONTENT_LENGTH, header::TRAILER, header::EXPECT];
    HOP_BY_HOP.contains(name) || framing.contains(name)
}

fn strip(headers: &mut HeaderMap) {
    let mut names: Vec<_> = nominated(headers).collect();
    names.retain(|name| !END_TO_END.contains(name));
    for name in names.into_iter().chain(HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// The header names that `Connection` nominates.
fn nominated(headers: &HeaderMap) -> impl Iterator<Item = HeaderName> {
    let values = headers.get_all(header::CONNECTION).iter();
    let tokens = values.filter_map(|value| value.to_str().ok()).flat_map(|text| text.split(','));
    tokens.filter_map(|token| token.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ambiguous_requests_are_refused() {
        cases::hold_to_refusals(|parts| check(parts).is_err());
    }

    #[test]
    fn an_upgrade_is_one_only_if_the_connection_says_so_and_never_to_http_or_tls() {
        cases::hold_to_upgrades(|parts| upgrade(parts).is_some());
    }

    #[test]
    fn what_concerns_one_connection_stays_behind_and_nothing_else() {
        cases::hold_to_headers(prepare_request);
        cases::hold_to_headers(prepare_answer);
    }

    #[test]
    fn trailers_are_announced_on_the_next_connection_too() {
        let mut headers = cases::request("GET", "/", &[("te", "gzip, Trailers")]).headers;
        prepare_request(&mut headers);
        assert_eq!(headers[header::TE], "trailers");
    }

    #[test]
    fn a_length_beside_an_encoding_is_removed_from_an_answer() {
        let given = [("transfer-encoding", "chunked"), ("content-length", "3")];
        let mut headers = cases::request("GET", "/", &given).headers;
        prepare_answer(&mut headers);
        assert!(headers.is_empty(), "{headers:?}");
    }
}

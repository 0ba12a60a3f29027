//! What a header means between two neighbours stays between them; what is ambiguous is refused.

use std::net::SocketAddr;

use http::header::{self, Entry, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Version};
use hyper::body::Body;
use torpor_protocol::api::{PREVIEW_HEADER, REQUEST_ID_HEADER};

use crate::error::Error;

const FORWARDED: HeaderName = HeaderName::from_static("forwarded");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Longest request id that is taken over from a client.
const REQUEST_ID_MAX: usize = 128;

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

/// What applications and proxies rely on: `Connection` can't name it as its own.
const END_TO_END: [HeaderName; 11] = [
    header::AUTHORIZATION,
    header::CACHE_CONTROL,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::COOKIE,
    header::HOST,
    header::ORIGIN,
    FORWARDED,
    FORWARDED_FOR,
    FORWARDED_HOST,
    FORWARDED_PROTO,
];

/// The id of a request: its own if it can stand in a log, else a fresh one that is put in.
pub(crate) fn request_id(headers: &mut HeaderMap) -> HeaderValue {
    let sane = |id: &&HeaderValue| {
        (1..=REQUEST_ID_MAX).contains(&id.len())
            && id.as_bytes().iter().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b))
    };
    if let Some(id) = headers.get(REQUEST_ID_HEADER).filter(sane) {
        return id.clone();
    }
    let mut bytes = [0u8; 8];
    getrandom::fill(&mut bytes).expect("the system has entropy");
    let id = HeaderValue::try_from(format!("{:016x}", u64::from_le_bytes(bytes)));
    let id = id.expect("digits are fit for a header");
    headers.insert(REQUEST_ID_HEADER, id.clone());
    id
}

/// Refuses what two parsers could read in two ways.
pub(crate) fn check<B>(request: &Request<B>) -> Result<(), Error> {
    let headers = request.headers();
    if request.method() == Method::CONNECT {
        return Err(Error::Connect);
    }
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(Error::Malformed("it has more than one Host header"));
    }
    if let Some(authority) = request.uri().authority() {
        if authority.as_str().contains('@') {
            return Err(Error::Malformed("its target has a user in it"));
        }
        let same = |host: &HeaderValue| {
            host.as_bytes().eq_ignore_ascii_case(authority.as_str().as_bytes())
        };
        if host.is_some_and(|host| !same(host)) {
            return Err(Error::Malformed("its target and its Host header name different hosts"));
        }
    }
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    if let Some(coding) = codings.next() {
        if headers.contains_key(header::CONTENT_LENGTH) {
            return Err(Error::Malformed("it has both Content-Length and Transfer-Encoding"));
        }
        if codings.next().is_some() || !coding.as_bytes().eq_ignore_ascii_case(b"chunked") {
            return Err(Error::Malformed("its Transfer-Encoding is not \"chunked\""));
        }
    }
    if headers.get_all(header::CONTENT_LENGTH).iter().count() > 1 {
        return Err(Error::Malformed("it has more than one Content-Length header"));
    }
    Ok(())
}

/// The protocol that the client wants to go on with on this connection. An upgrade to HTTP/2 is
/// ignored, as any server may: inside it would carry requests that nobody checked.
pub(crate) fn upgrade<B>(request: &Request<B>) -> Option<HeaderValue> {
    let headers = request.headers();
    let protocol = headers.get(header::UPGRADE)?;
    let text = protocol.to_str().ok()?;
    let http2 = text.split(',').any(|token| token.trim().to_ascii_lowercase().starts_with("h2"));
    let wanted = request.version() == Version::HTTP_11
        && connection_tokens(headers).contains(&header::UPGRADE);
    (wanted && !http2).then(|| protocol.clone())
}

/// gRPC needs HTTP/2 all the way. `TE: trailers` alone does not tell: browsers send it always.
pub(crate) fn is_grpc<B>(request: &Request<B>) -> bool {
    let content_type = request.headers().get(header::CONTENT_TYPE);
    request.version() == Version::HTTP_2
        && content_type.is_some_and(|value| {
            let value = value.as_bytes();
            value.starts_with(b"application/grpc") && !value.starts_with(b"application/grpc-web")
        })
}

/// Removes what concerned the connection it came on.
pub(crate) fn strip(headers: &mut HeaderMap) {
    for name in connection_tokens(headers).iter().filter(|name| !END_TO_END.contains(name)) {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

/// The header names that `Connection` nominates.
fn connection_tokens(headers: &HeaderMap) -> Vec<HeaderName> {
    let values = headers.get_all(header::CONNECTION).iter();
    let tokens = values.filter_map(|value| value.to_str().ok()).flat_map(|text| text.split(','));
    tokens.filter_map(|token| token.trim().parse().ok()).collect()
}

/// Makes the headers of a request fit for the way in. The request must have passed [`check`].
pub(crate) fn prepare<B: Body>(request: &mut Request<B>, port: u16, peer: Option<SocketAddr>) {
    let wants_trailers = request.headers().get_all(header::TE).iter().any(|value| {
        let mut tokens = value.as_bytes().split(|byte| *byte == b',');
        tokens.any(|token| token.trim_ascii().eq_ignore_ascii_case(b"trailers"))
    });
    let authority = request.uri().authority().map(|authority| authority.as_str().to_owned());
    let host = authority.and_then(|host| HeaderValue::try_from(host).ok());
    let host = host.or_else(|| request.headers().get(header::HOST).cloned());
    let host = host.unwrap_or_else(|| {
        HeaderValue::try_from(format!("localhost:{port}")).expect("digits are fit for a header")
    });
    let headers = request.headers_mut();
    strip(headers);
    headers.remove(PREVIEW_HEADER);
    join_cookies(headers);
    forwarded(headers, &host, peer);
    headers.insert(header::HOST, host);
    if wants_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// HTTP/2 may carry cookies one by one, HTTP/1 may not.
fn join_cookies(headers: &mut HeaderMap) {
    join(headers, header::COOKIE, b"; ", None);
}

/// Who the client is and what it asked for. What a proxy before us said stays: it knows better.
fn forwarded(headers: &mut HeaderMap, host: &HeaderValue, peer: Option<SocketAddr>) {
    let ip = peer.map(|peer| peer.ip().to_canonical());
    let hop = match ip {
        Some(ip) if ip.is_ipv6() => format!("for=\"[{ip}]\";proto=http"),
        Some(ip) => format!("for={ip};proto=http"),
        None => "for=unknown;proto=http".to_owned(),
    };
    join(headers, FORWARDED, b", ", Some(hop));
    join(headers, FORWARDED_FOR, b", ", ip.map(|ip| ip.to_string()));
    if let Entry::Vacant(entry) = headers.entry(FORWARDED_HOST) {
        entry.insert(host.clone());
    }
    if let Entry::Vacant(entry) = headers.entry(FORWARDED_PROTO) {
        entry.insert(HeaderValue::from_static("http"));
    }
}

/// All values of a header and `more` as one.
fn join(headers: &mut HeaderMap, name: HeaderName, between: &[u8], more: Option<String>) {
    let values = headers.get_all(&name).iter().map(|value| value.as_bytes().to_vec());
    let values: Vec<_> = values.chain(more.map(String::into_bytes)).collect();
    if values.is_empty() {
        return;
    }
    let joined = HeaderValue::from_bytes(&values.join(between));
    headers.insert(name, joined.expect("values and what is between them are fit for a header"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use http_body_util::Empty;

    fn request(headers: &[(&str, &str)]) -> Request<Empty<Bytes>> {
        let builder = Request::builder().uri("/");
        let add = |builder: http::request::Builder, (name, value): &(&str, &str)| {
            builder.header(*name, *value)
        };
        headers.iter().fold(builder, add).body(Empty::new()).unwrap()
    }

    fn prepared(headers: &[(&str, &str)], peer: &str) -> HeaderMap {
        let mut request = request(headers);
        prepare(&mut request, 80, Some(peer.parse().unwrap()));
        request.headers().clone()
    }

    #[test]
    fn ambiguous_requests_are_refused() {
        for headers in [
            &[("host", "a"), ("host", "a")][..],
            &[("content-length", "1"), ("transfer-encoding", "chunked")],
            &[("content-length", "1"), ("content-length", "2")],
            &[("transfer-encoding", "gzip, chunked")],
            &[("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")],
        ] {
            assert!(check(&request(headers)).is_err(), "{headers:?}");
        }
        assert!(check(&request(&[("host", "a"), ("transfer-encoding", "Chunked")])).is_ok());
    }

    #[test]
    fn a_target_must_agree_with_its_host() {
        let check_uri = |uri: &str| {
            let mut request = request(&[("host", "web.example:80")]);
            *request.uri_mut() = uri.parse().unwrap();
            check(&request)
        };
        assert!(check_uri("http://WEB.example:80/x").is_ok());
        assert!(check_uri("http://other.example/x").is_err());
        assert!(check_uri("http://user@web.example:80/x").is_err());
    }

    #[test]
    fn what_concerns_one_connection_stays_behind() {
        let headers = prepared(
            &[
                ("connection", "keep-alive, X-Secret"),
                ("x-secret", "1"),
                ("keep-alive", "5"),
                ("te", "gzip, trailers"),
                ("trailer", "x-sum"),
                ("upgrade", "h2c"),
                ("x-kept", "1"),
                ("x-torpor-preview", "80-web"),
            ],
            "10.0.0.1:5",
        );
        for name in ["connection", "x-secret", "keep-alive", "upgrade", "x-torpor-preview"] {
            assert!(!headers.contains_key(name), "{name}");
        }
        assert_eq!(headers["te"], "trailers");
        assert_eq!(headers["trailer"], "x-sum");
        assert_eq!(headers["x-kept"], "1");
    }

    #[test]
    fn a_client_can_not_have_a_header_removed_that_others_rely_on() {
        let nominated =
            "cookie, Forwarded, x-forwarded-for, x-forwarded-proto, authorization, x-own";
        let headers = prepared(
            &[
                ("connection", nominated),
                ("cookie", "a=1"),
                ("forwarded", "for=1.1.1.1"),
                ("x-forwarded-for", "1.1.1.1"),
                ("x-forwarded-proto", "https"),
                ("authorization", "Bearer mine"),
                ("x-own", "1"),
            ],
            "10.0.0.1:5",
        );
        assert_eq!(headers["cookie"], "a=1");
        assert_eq!(headers["forwarded"], "for=1.1.1.1, for=10.0.0.1;proto=http");
        assert_eq!(headers["x-forwarded-for"], "1.1.1.1, 10.0.0.1");
        assert_eq!(headers["x-forwarded-proto"], "https");
        assert_eq!(headers["authorization"], "Bearer mine");
        assert!(!headers.contains_key("x-own"));
    }

    #[test]
    fn the_client_is_named_after_those_before_it() {
        let given =
            [("host", "h:1"), ("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", "2.2.2.2")];
        let headers = prepared(&given, "[::ffff:10.0.0.1]:5");
        assert_eq!(headers["x-forwarded-for"], "1.1.1.1, 2.2.2.2, 10.0.0.1");
        assert_eq!(headers["x-forwarded-host"], "h:1");
        assert_eq!(headers["x-forwarded-proto"], "http");
        assert_eq!(headers["forwarded"], "for=10.0.0.1;proto=http");
        let headers = prepared(&[("x-forwarded-proto", "https")], "[2001:db8::1]:5");
        assert_eq!(headers["x-forwarded-proto"], "https");
        assert_eq!(headers["forwarded"], "for=\"[2001:db8::1]\";proto=http");
        assert_eq!(headers["host"], "localhost:80");
    }

    #[test]
    fn cookies_become_one() {
        let headers = prepared(&[("cookie", "a=1"), ("cookie", "b=2")], "10.0.0.1:5");
        assert_eq!(headers.get_all("cookie").iter().collect::<Vec<_>>(), ["a=1; b=2"]);
    }

    #[test]
    fn an_upgrade_is_one_only_if_the_connection_says_so_and_never_to_http2() {
        let wants = |headers: &[(&str, &str)]| upgrade(&request(headers)).is_some();
        assert!(wants(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]));
        assert!(!wants(&[("connection", "keep-alive"), ("upgrade", "websocket")]));
        assert!(!wants(&[("connection", "upgrade, http2-settings"), ("upgrade", "h2c")]));
    }
}

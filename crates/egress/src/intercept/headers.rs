//! What a header means between two neighbours stays between them; what is ambiguous is refused.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Version};

use super::refusal::Refusal;
use crate::policy::host_of;

/// How single messages of an answer are compressed.
pub(super) const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const REQUEST_RANGE: HeaderName = HeaderName::from_static("request-range");
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

/// Whether a route can't set it, because it says where a request goes and where it ends.
pub(super) fn belongs_to_the_connection(name: &HeaderName) -> bool {
    HOP_BY_HOP.contains(name)
        || [header::HOST, header::CONTENT_LENGTH, header::TRAILER, header::EXPECT].contains(name)
}

/// Refuses what two parsers could read in two ways.
pub(super) fn check(parts: &Parts) -> Result<(), Refusal> {
    let headers = &parts.headers;
    if parts.method == Method::CONNECT {
        return Err(Refusal::Connect);
    }
    if headers.get_all(header::HOST).iter().count() > 1 {
        return Err(Refusal::Malformed("it has more than one Host header"));
    }
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    if let Some(coding) = codings.next() {
        if headers.contains_key(header::CONTENT_LENGTH) {
            return Err(Refusal::Malformed("it has both Content-Length and Transfer-Encoding"));
        }
        if parts.version < Version::HTTP_11 {
            return Err(Refusal::Malformed("HTTP/1.0 has no Transfer-Encoding"));
        }
        if codings.next().is_some() || !coding.as_bytes().eq_ignore_ascii_case(b"chunked") {
            return Err(Refusal::Malformed("its Transfer-Encoding is not \"chunked\""));
        }
    }
    if headers.get_all(header::CONTENT_LENGTH).iter().count() > 1 {
        return Err(Refusal::Malformed("it has more than one Content-Length header"));
    }
    Ok(())
}

/// The host, with the port if it was sent, that a request names. It must be `host`, which the
/// connection was decided about: other hosts are other decisions, and other secrets.
pub(super) fn authority(parts: &Parts, host: &str) -> Result<HeaderValue, Refusal> {
    let target = parts.uri.authority().map(|authority| authority.as_str().as_bytes());
    let header = parts.headers.get(header::HOST).map(HeaderValue::as_bytes);
    if let (Some(target), Some(header)) = (target, header)
        && !target.eq_ignore_ascii_case(header)
    {
        return Err(Refusal::Malformed("its target and its Host header name different hosts"));
    }
    let named = match target.or(header) {
        Some(named) => named,
        None if parts.version < Version::HTTP_11 => host.as_bytes(),
        None => return Err(Refusal::Malformed("it names no host")),
    };
    let text = std::str::from_utf8(named).ok();
    if text.and_then(host_of).as_deref() != Some(host) {
        return Err(Refusal::Misdirected { host: host.to_owned() });
    }
    HeaderValue::from_bytes(named).map_err(|_| Refusal::Malformed("it names no host"))
}

/// The protocol that the guest wants to go on with on this connection. An upgrade to HTTP/2 is
/// ignored, as any server may: inside it would carry requests that nobody decided about.
pub(super) fn upgrade(parts: &Parts) -> Option<HeaderValue> {
    let protocol = parts.headers.get(header::UPGRADE)?;
    let text = protocol.to_str().ok()?;
    let http = text.split(',').any(|token| {
        let token = token.trim().to_ascii_lowercase();
        token.starts_with("h2") || token.starts_with("http") || token.starts_with("tls")
    });
    let wanted = parts.version == Version::HTTP_11
        && connection_tokens(&parts.headers).contains(&header::UPGRADE);
    (wanted && !http).then(|| protocol.clone())
}

/// Makes the headers of a request fit for the way out. It must have passed [`check`].
pub(super) fn prepare(headers: &mut HeaderMap) {
    let wants_trailers = headers.get_all(header::TE).iter().any(|value| {
        let mut tokens = value.as_bytes().split(|byte| *byte == b',');
        tokens.any(|token| token.trim_ascii().eq_ignore_ascii_case(b"trailers"))
    });
    strip(headers);
    headers.remove(header::HOST);
    // We say it to the guest ourselves, as soon as the body is wanted.
    headers.remove(header::EXPECT);
    if wants_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// Asks for an answer that can be looked through: not compressed, and not in parts, which could be too
/// short to recognise a secret in. A server may ignore a range, and its whole answer is a proper one.
pub(super) fn ask_for_all_of_it(headers: &mut HeaderMap) {
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    for name in [
        GRPC_ACCEPT_ENCODING,
        header::SEC_WEBSOCKET_EXTENSIONS,
        header::RANGE,
        REQUEST_RANGE,
        header::IF_RANGE,
    ] {
        headers.remove(name);
    }
}

/// Makes the headers of an answer fit for the way in.
pub(super) fn prepare_answer(headers: &mut HeaderMap) {
    if headers.contains_key(header::TRANSFER_ENCODING) {
        // A length beside an encoding is a lie that the guest must not see.
        headers.remove(header::CONTENT_LENGTH);
    }
    strip(headers);
    // It names ways, such as QUIC, that are closed.
    headers.remove(header::ALT_SVC);
}

fn strip(headers: &mut HeaderMap) {
    for name in connection_tokens(headers) {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

/// The header names that `Connection` nominates. What says where a message goes and ends can't be
/// nominated away.
fn connection_tokens(headers: &HeaderMap) -> Vec<HeaderName> {
    let values = headers.get_all(header::CONNECTION).iter();
    let tokens = values.filter_map(|value| value.to_str().ok()).flat_map(|text| text.split(','));
    let names = tokens.filter_map(|token| token.trim().parse::<HeaderName>().ok());
    let kept = [header::CONTENT_LENGTH, header::HOST, header::AUTHORIZATION, header::CONTENT_TYPE];
    names.filter(|name| !kept.contains(name)).collect()
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn parts(uri: &str, headers: &[(&str, &str)]) -> Parts {
        let builder = Request::builder().uri(uri);
        let add = |builder: http::request::Builder, (name, value): &(&str, &str)| {
            builder.header(*name, *value)
        };
        headers.iter().fold(builder, add).body(()).unwrap().into_parts().0
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
            assert!(check(&parts("/", headers)).is_err(), "{headers:?}");
        }
        assert!(check(&parts("/", &[("host", "a"), ("transfer-encoding", "Chunked")])).is_ok());
        let mut old = parts("/", &[("transfer-encoding", "chunked")]);
        old.version = Version::HTTP_10;
        assert!(check(&old).is_err());
    }

    #[test]
    fn a_request_must_be_for_the_host_of_its_connection() {
        let named =
            |uri: &str, headers: &[(&str, &str)]| authority(&parts(uri, headers), "a.example");
        for (uri, headers) in [
            ("/", &[("host", "A.example")][..]),
            ("/", &[("host", "a.example.:8443")]),
            ("https://a.example/x", &[]),
            ("https://a.example/x", &[("host", "a.example")]),
        ] {
            assert!(named(uri, headers).is_ok(), "{uri} {headers:?}");
        }
        for (uri, headers) in [
            ("/", &[("host", "b.example")][..]),
            ("/", &[("host", "a.example.b.example")]),
            ("/", &[("host", "user@a.example")]),
            ("/", &[("host", "192.0.2.1")]),
            ("https://b.example/x", &[]),
        ] {
            let refused = named(uri, headers).unwrap_err();
            assert!(matches!(refused, Refusal::Misdirected { .. }), "{uri} {headers:?}");
        }
        for (uri, headers) in [("/", &[][..]), ("https://a.example/", &[("host", "b.example")])] {
            let refused = named(uri, headers).unwrap_err();
            assert!(matches!(refused, Refusal::Malformed(_)), "{uri} {headers:?}");
        }
    }

    #[test]
    fn what_concerns_one_connection_stays_behind() {
        let mut headers = parts(
            "/",
            &[
                ("connection", "keep-alive, X-Hop, content-length"),
                ("x-hop", "1"),
                ("keep-alive", "5"),
                ("te", "gzip, trailers"),
                ("trailer", "x-sum"),
                ("upgrade", "h2c"),
                ("expect", "100-continue"),
                ("content-length", "3"),
                ("x-kept", "1"),
            ],
        )
        .headers;
        prepare(&mut headers);
        for name in ["connection", "x-hop", "keep-alive", "upgrade", "expect", "host"] {
            assert!(!headers.contains_key(name), "{name}");
        }
        for (name, value) in
            [("te", "trailers"), ("trailer", "x-sum"), ("content-length", "3"), ("x-kept", "1")]
        {
            assert_eq!(headers[name], value);
        }
    }

    #[test]
    fn an_upgrade_is_one_only_if_the_connection_says_so_and_never_to_http() {
        let wants = |headers: &[(&str, &str)]| upgrade(&parts("/", headers)).is_some();
        assert!(wants(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]));
        assert!(!wants(&[("connection", "keep-alive"), ("upgrade", "websocket")]));
        for protocol in ["h2c", "websocket, H2C", "HTTP/2.0", "TLS/1.0"] {
            assert!(!wants(&[("connection", "upgrade"), ("upgrade", protocol)]), "{protocol}");
        }
    }
}

//! Headers of intercepted requests and answers, beyond what `torpor_headers` says of all of them.

use http::Version;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use torpor_headers::Refused;

use super::refusal::Refusal;
use crate::policy::host_of;

/// How single messages of an answer are compressed.
pub(super) const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const REQUEST_RANGE: HeaderName = HeaderName::from_static("request-range");

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Connect => Self::Connect,
            Refused::Ambiguous(why) => Self::Malformed(why),
        }
    }
}

/// The host, with the port if it was sent, that a request names. It must be `host`, which the
/// connection was decided about: other hosts are other decisions, and other secrets. The request must
/// have passed [`torpor_headers::check`].
pub(super) fn authority(parts: &Parts, host: &str) -> Result<HeaderValue, Refusal> {
    let target = parts.uri.authority().map(|authority| authority.as_str().as_bytes());
    let header = parts.headers.get(header::HOST).map(HeaderValue::as_bytes);
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

/// Makes the headers of a request fit for the way out.
pub(super) fn prepare(headers: &mut HeaderMap) {
    torpor_headers::prepare_request(headers);
    headers.remove(header::HOST);
    // We say it to the guest ourselves, as soon as the body is wanted.
    headers.remove(header::EXPECT);
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
    torpor_headers::prepare_answer(headers);
    // It names alternatives, such as QUIC, that are closed.
    headers.remove(header::ALT_SVC);
}

#[cfg(test)]
mod tests {
    use torpor_headers::cases::{self, request};

    use super::*;

    #[test]
    fn what_every_proxy_is_held_to_holds_for_intercepted_requests() {
        cases::hold_to_headers(prepare);
        cases::hold_to_headers(prepare_answer);
    }

    #[test]
    fn a_request_must_be_for_the_host_of_its_connection() {
        let named = |uri: &str, headers: &[(&str, &str)]| {
            authority(&request("GET", uri, headers), "a.example")
        };
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
        assert!(matches!(named("/", &[]).unwrap_err(), Refusal::Malformed(_)));
    }

    #[test]
    fn we_ask_for_bodies_ourselves_and_name_the_host_ourselves() {
        let given = [("expect", "100-continue"), ("host", "a.example"), ("x-kept", "1")];
        let mut headers = request("POST", "/", &given).headers;
        prepare(&mut headers);
        assert_eq!(headers.keys().collect::<Vec<_>>(), ["x-kept"]);
    }
}

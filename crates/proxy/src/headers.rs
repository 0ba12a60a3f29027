//! Headers of requests for sandboxes, beyond what `torpor_headers` says of all requests.

use std::net::SocketAddr;

use http::header::{self, Entry, HeaderMap, HeaderName, HeaderValue};
use http::{Request, Version};
use torpor_headers::{FORWARDED, FORWARDED_FOR, FORWARDED_HOST, FORWARDED_PROTO, Refused};
use torpor_protocol::api::{PREVIEW_HEADER, REQUEST_ID_HEADER};

use crate::error::Error;

/// Longest request id that is taken over from a client.
const REQUEST_ID_MAX: usize = 128;

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Connect => Self::Connect,
            Refused::Ambiguous(why) => Self::Malformed(why),
        }
    }
}

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

/// gRPC needs HTTP/2 all the way. `TE: trailers` alone does not tell: browsers send it always.
pub(crate) fn is_grpc<B>(request: &Request<B>) -> bool {
    let content_type = request.headers().get(header::CONTENT_TYPE);
    request.version() == Version::HTTP_2
        && content_type.is_some_and(|value| {
            let value = value.as_bytes();
            value.starts_with(b"application/grpc") && !value.starts_with(b"application/grpc-web")
        })
}

/// Makes the headers of a request fit for the way in. It must have passed [`torpor_headers::check`].
pub(crate) fn prepare<B>(request: &mut Request<B>, port: u16, peer: Option<SocketAddr>) {
    let authority = request.uri().authority().map(|authority| authority.as_str().to_owned());
    let host = authority.and_then(|host| HeaderValue::try_from(host).ok());
    let host = host.or_else(|| request.headers().get(header::HOST).cloned());
    let host = host.unwrap_or_else(|| {
        HeaderValue::try_from(format!("localhost:{port}")).expect("digits are fit for a header")
    });
    let headers = request.headers_mut();
    torpor_headers::prepare_request(headers);
    headers.remove(PREVIEW_HEADER);
    join_cookies(headers);
    forwarded(headers, &host, peer);
    headers.insert(header::HOST, host);
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
    use torpor_headers::cases;

    use super::*;

    fn prepared(headers: &[(&str, &str)], peer: &str) -> HeaderMap {
        let mut request = Request::from_parts(cases::request("GET", "/", headers), ());
        prepare(&mut request, 80, Some(peer.parse().unwrap()));
        request.headers().clone()
    }

    #[test]
    fn what_every_proxy_is_held_to_holds_for_requests_to_sandboxes() {
        cases::hold_to_headers(|headers| {
            let mut request = Request::new(());
            std::mem::swap(request.headers_mut(), headers);
            prepare(&mut request, 80, Some("10.0.0.1:5".parse().unwrap()));
            std::mem::swap(request.headers_mut(), headers);
        });
    }

    #[test]
    fn what_names_the_sandbox_stays_behind() {
        let headers = prepared(&[("x-torpor-preview", "80-web"), ("x-kept", "1")], "10.0.0.1:5");
        assert!(!headers.contains_key("x-torpor-preview") && headers.contains_key("x-kept"));
    }

    #[test]
    fn what_a_proxy_before_us_said_is_added_to() {
        let given = [("connection", "forwarded, x-forwarded-for"), ("forwarded", "for=1.1.1.1")];
        let headers = prepared(&given, "10.0.0.1:5");
        assert_eq!(headers["forwarded"], "for=1.1.1.1, for=10.0.0.1;proto=http");
        assert_eq!(headers["x-forwarded-for"], "10.0.0.1");
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
}

//! The table that this crate and all who use it are held to. Tests only.

use http::request::Parts;
use http::{HeaderMap, Request, Version};

type Headers = &'static [(&'static str, &'static str)];

/// Method, version, target and headers of requests that nobody passes on.
const REFUSED: [(&str, Version, &str, Headers); 12] = [
    ("CONNECT", Version::HTTP_11, "a.example:443", &[]),
    ("GET", Version::HTTP_11, "/", &[("host", "a.example"), ("host", "a.example")]),
    ("GET", Version::HTTP_11, "http://b.example/", &[("host", "a.example")]),
    ("GET", Version::HTTP_11, "http://user@a.example/", &[]),
    ("GET", Version::HTTP_11, "http://user@a.example/", &[("host", "user@a.example")]),
    ("POST", Version::HTTP_11, "/", &[("content-length", "1"), ("transfer-encoding", "chunked")]),
    ("POST", Version::HTTP_11, "/", &[("content-length", "1"), ("content-length", "2")]),
    ("POST", Version::HTTP_11, "/", &[("content-length", "1"), ("content-length", "1")]),
    ("POST", Version::HTTP_11, "/", &[("transfer-encoding", "gzip, chunked")]),
    ("POST", Version::HTTP_11, "/", &[("transfer-encoding", "identity")]),
    (
        "POST",
        Version::HTTP_11,
        "/",
        &[("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")],
    ),
    ("POST", Version::HTTP_10, "/", &[("transfer-encoding", "chunked")]),
];

/// Requests that are passed on.
const PASSED: [(&str, Version, &str, Headers); 4] = [
    ("GET", Version::HTTP_11, "http://A.example/x", &[("host", "a.example")]),
    ("POST", Version::HTTP_11, "/", &[("host", "a.example"), ("transfer-encoding", "Chunked")]),
    ("POST", Version::HTTP_11, "/", &[("host", "a.example"), ("content-length", "1")]),
    ("GET", Version::HTTP_10, "/", &[("host", "a.example")]),
];

/// `Connection`, `Upgrade`, and whether the connection is upgraded.
const UPGRADES: [(&str, &str, bool); 8] = [
    ("keep-alive, Upgrade", "websocket", true),
    ("upgrade", "x-own/1", true),
    ("keep-alive", "websocket", false),
    ("upgrade, http2-settings", "h2c", false),
    ("upgrade", "websocket, H2C", false),
    ("upgrade", "HTTP/2.0", false),
    ("upgrade", "TLS/1.0", false),
    ("upgrade", "websocket, tls/1.2", false),
];

/// What does not go on, and was nominated by `Connection` where it has no name of its own there.
const REMOVED: [&str; 9] = [
    "connection",
    "http2-settings",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "transfer-encoding",
    "upgrade",
    "x-hop",
];

/// What goes on although `Connection` nominates it, with its value.
const KEPT: [(&str, &str); 11] = [
    ("authorization", "Bearer mine"),
    ("cache-control", "no-store"),
    ("content-encoding", "gzip"),
    ("content-type", "text/plain"),
    ("cookie", "a=1"),
    ("origin", "https://a.example"),
    ("set-cookie", "a=1"),
    ("forwarded", "for=192.0.2.1"),
    ("x-forwarded-for", "192.0.2.1"),
    ("x-forwarded-host", "a.example"),
    ("x-forwarded-proto", "https"),
];

/// A request with these headers.
#[expect(clippy::missing_panics_doc, reason = "for tests")]
pub fn request(method: &str, target: &str, headers: &[(&str, &str)]) -> Parts {
    let mut builder = Request::builder().method(method).uri(target);
    for (name, value) in headers {
        builder = builder.header(*name, *value);
    }
    builder.body(()).expect("a request").into_parts().0
}

/// `refuses` says so of each request in the table that is to be refused, and of no other.
pub fn hold_to_refusals(refuses: impl Fn(&Parts) -> bool) {
    let refused = REFUSED.iter().map(|case| (case, true));
    for ((method, version, target, headers), refused) in
        refused.chain(PASSED.iter().map(|case| (case, false)))
    {
        let mut parts = request(method, target, headers);
        parts.version = *version;
        assert_eq!(refuses(&parts), refused, "{method} {target} {version:?} {headers:?}");
    }
}

/// `upgrades` says of each request in the table whether its connection is upgraded.
pub fn hold_to_upgrades(upgrades: impl Fn(&Parts) -> bool) {
    for (connection, upgrade, upgraded) in UPGRADES {
        let given = [("connection", connection), ("upgrade", upgrade)];
        assert_eq!(upgrades(&request("GET", "/", &given)), upgraded, "{given:?}");
        let mut old = request("GET", "/", &given);
        old.version = Version::HTTP_10;
        assert!(!upgrades(&old), "HTTP/1.0 has no upgrades: {given:?}");
    }
}

/// `prepare` removes what concerns one connection, and nothing else that is nominated. A value may
/// become longer: proxies add to some.
#[expect(clippy::missing_panics_doc, reason = "for tests")]
pub fn hold_to_headers(prepare: impl Fn(&mut HeaderMap)) {
    let kept: Vec<_> = KEPT.iter().map(|(name, _)| *name).collect();
    let nominated = format!("x-hop, {}", kept.join(", "));
    let mut given: Vec<_> = REMOVED.iter().map(|name| (*name, "1")).collect();
    given[0].1 = &nominated;
    given.extend(KEPT);
    given.push(("trailer", "x-sum"));
    let mut headers = request("GET", "/", &given).headers;
    prepare(&mut headers);
    for name in REMOVED {
        assert!(!headers.contains_key(name), "{name} is removed");
    }
    for (name, value) in KEPT.iter().chain(&[("trailer", "x-sum")]) {
        let left = headers.get(*name).and_then(|left| left.to_str().ok());
        assert!(left.is_some_and(|left| left.starts_with(value)), "{name} is kept: {left:?}");
    }
}

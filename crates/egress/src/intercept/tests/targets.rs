//! A secret goes by TLS on port 443, or where its binding says, and nowhere else.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;
use torpor_protocol::egress::Verdict;

use super::*;

const SECRETS: Secrets = &[
    ("FREE", "free-12345", &[]),
    ("USUAL", "usual-12345", &["*.example.com"]),
    ("PORT", "port-12345", &["api.example.com:8443"]),
    ("PLAIN", "plain-12345", &["http://api.example.com:8080"]),
    ("BOTH", "both-12345", &["api.example.com", "http://api.example.com"]),
];
/// Port, and whether with TLS.
type Target = (u16, bool);
const TARGETS: [Target; 5] = [(443, true), (8443, true), (80, false), (8080, false), (443, false)];

/// Sends a request to this target, and tells what the server got, what was answered and what was told.
async fn sent(
    target: Target,
    network: Value,
    request: Request<Body>,
) -> (Option<Seen>, u16, String, Outcome) {
    let (handler, seen) = remember();
    let (port, tls) = target;
    let mut world = match tls {
        true => World::new(network, SECRETS, handler).await,
        false => World::plain(network, SECRETS, handler).await,
    };
    world.context.port = port;
    let answer = match tls {
        true => world.http1().await.send_request(request).await.unwrap(),
        false => world.plain_http1().await.send_request(request).await.unwrap(),
    };
    let (status, body) = (answer.status().as_u16(), text(answer).await);
    let told = world.told_of(1).await.remove(0);
    let seen = seen.lock().pop();
    (seen, status, body, told)
}

#[tokio::test]
async fn a_route_puts_a_secret_in_only_where_it_is_bound_to() {
    for (name, value, targets, bound) in [
        ("FREE", "free-12345", &[(443, true)][..], "api.example.com"),
        ("USUAL", "usual-12345", &[(443, true)], "*.example.com"),
        ("PORT", "port-12345", &[(8443, true)], "api.example.com:8443"),
        ("PLAIN", "plain-12345", &[(8080, false)], "http://api.example.com:8080"),
        ("BOTH", "both-12345", &[(443, true), (80, false)], "http://api.example.com"),
    ] {
        let headers = json!({"x-key": format!("{{{{SECRET:{name}}}}}")});
        let network = json!({"routes": [{"hosts": [HOST], "headers": headers}]});
        for target in TARGETS {
            let (seen, status, body, told) = sent(target, network.clone(), get("/")).await;
            if targets.contains(&target) {
                assert_eq!(seen.unwrap().headers["x-key"], value, "{name} {target:?}");
                assert_eq!((status, told.secrets.len()), (200, 1), "{name} {target:?}");
                continue;
            }
            assert!(seen.is_none(), "{name} {target:?}");
            assert_eq!((status, told.verdict), (403, Verdict::Denied), "{name} {target:?}");
            for word in ["secret-barred", name, bound, "HOST:PORT"] {
                assert!(body.contains(word), "{word}: {body}");
            }
            assert!(!body.contains(value), "{body}");
            assert!(told.secrets.is_empty());
            let scheme = if target.1 { "https" } else { "http" };
            let rule = format!("secret {name} not to {scheme}://{HOST}");
            assert!(told.rule.starts_with(&rule), "{}", told.rule);
        }
    }
}

#[tokio::test]
async fn a_placeholder_is_replaced_only_where_its_secret_is_bound_to() {
    let requests: [fn() -> Request<Body>; 5] = [
        || get("/?key={{SECRET:USUAL}}"),
        || get("/{{SECRET:USUAL}}"),
        || post("/", "application/json", r#"{"key":"{{SECRET:USUAL}}"}"#),
        || {
            let mut request = get("/");
            request.headers_mut().insert("x-key", "{{SECRET:USUAL}}".parse().unwrap());
            request
        },
        || {
            let mut request = get("/");
            let basic = format!("Basic {}", STANDARD.encode("me:{{SECRET:USUAL}}"));
            request.headers_mut().insert("authorization", basic.parse().unwrap());
            request
        },
    ];
    let network = || json!({"secrets": ["USUAL"]});
    for request in requests {
        let (seen, ..) = sent((443, true), network(), request()).await;
        assert!(seen.is_some());
        for target in [(8443, true), (80, false)] {
            let (seen, status, body, told) = sent(target, network(), request()).await;
            assert!(seen.is_none(), "{target:?}");
            assert_eq!((status, told.verdict), (403, Verdict::Denied), "{target:?}");
            assert!(body.contains("secret-barred") && body.contains("USUAL"), "{body}");
        }
    }
    // What has no placeholder goes where it goes.
    let (seen, status, ..) = sent((80, false), network(), get("/{{SECRET:OTHER}}")).await;
    assert_eq!((seen.unwrap().target.as_str(), status), ("/{{SECRET:OTHER}}", 200));
}

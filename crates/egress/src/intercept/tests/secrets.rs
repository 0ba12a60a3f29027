//! Secrets go in where they should, nowhere else, and don't come back.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http_body_util::BodyExt;
use hyper::body::Frame;
use serde_json::json;
use torpor_protocol::egress::Verdict;

use super::versions::pieces;
use super::*;

const SECRETS: Secrets = &[
    ("TOKEN", "tok-12345-67890", &[]),
    ("BOUND", "b0und&=\"value-67890", &["*.example.com"]),
    ("OTHER", "other-value", &["elsewhere.example.org"]),
    ("LINES", "two\r\nx-evil: 1", &["api.example.com"]),
    ("NESTED", "{{SECRET:BOUND}}", &["api.example.com"]),
    ("LONG", LONG, &["api.example.com"]),
    ("PLAIN", "pla-12345-67890", &["http://api.example.com"]),
];
const LONG: &str = {
    const BYTES: [u8; 4096] = [b'l'; 4096];
    match std::str::from_utf8(&BYTES) {
        Ok(text) => text,
        Err(_) => panic!("letters are a text"),
    }
};

/// Sends a request through, and tells what the server got and what was answered.
async fn through(
    network: Value,
    request: Request<Body>,
) -> (Option<Seen>, u16, String, Vec<Outcome>) {
    let (handler, seen) = remember();
    let mut world = World::new(network, SECRETS, handler).await;
    let answer = world.http1().await.send_request(request).await.unwrap();
    let status = answer.status().as_u16();
    let body = text(answer).await;
    let told = world.told_of(1).await;
    let seen = seen.lock().pop();
    (seen, status, body, told)
}

fn route(what: &str, fields: Value) -> Value {
    json!({"routes": [{"hosts": [HOST], what: fields}]})
}

#[tokio::test]
async fn a_route_sets_headers_in_place_of_those_of_the_guest() {
    let network = json!({"routes": [
        {"hosts": ["*.example.com"], "headers": {"Authorization": "Bearer {{SECRET:TOKEN}}", "x-two": "{{SECRET:TOKEN}}/{{SECRET:BOUND}}"}},
        {"hosts": ["other.example.com"], "headers": {"x-no": "1"}},
        {"hosts": [HOST], "methods": ["POST"], "headers": {"x-no": "1"}},
        {"hosts": [HOST], "paths": ["/v2/"], "headers": {"x-no": "1"}},
        {"hosts": [HOST], "methods": ["get"], "paths": ["/v1"], "headers": {"x-yes": "1"}},
    ]});
    let mut request = get("/v1/x");
    request.headers_mut().append("authorization", "guest".parse().unwrap());
    request.headers_mut().append("accept-encoding", "gzip".parse().unwrap());
    let (seen, status, _, told) = through(network, request).await;
    let seen = seen.unwrap();
    assert_eq!(status, 200);
    let authorization: Vec<_> = seen.headers.get_all("authorization").iter().collect();
    assert_eq!(authorization, ["Bearer tok-12345-67890"]);
    assert_eq!(seen.headers["x-two"], "tok-12345-67890/b0und&=\"value-67890");
    assert_eq!(seen.headers["x-yes"], "1");
    assert!(!seen.headers.contains_key("x-no"));
    assert_eq!(seen.headers["accept-encoding"], "identity");
    let names: Vec<_> = told[0].secrets.iter().map(SecretName::as_str).collect();
    assert_eq!(names, ["BOUND", "TOKEN"]);
    assert!(!format!("{told:?}").contains("12345"));
}

#[tokio::test]
async fn a_route_sets_parameters_and_members_and_fields() {
    let network = route("query", json!({"key": "{{SECRET:BOUND}}"}));
    for (target, expected) in [
        ("/x", "/x?key=b0und%26%3D%22value-67890"),
        ("/x?a=1&k%65y=guest&key&b", "/x?a=1&b&key=b0und%26%3D%22value-67890"),
    ] {
        let (seen, ..) = through(network.clone(), get(target)).await;
        assert_eq!(seen.unwrap().target, expected);
    }
    let network = route("body", json!({"key": "{{SECRET:BOUND}}"}));
    let json = post("/", "application/json", r#"{"n":1.10, "key":["guest"], "a":{"key":2}}"#);
    let (seen, ..) = through(network.clone(), json).await;
    let seen = seen.unwrap();
    assert_eq!(seen.body, r#"{"a":{"key":2},"key":"b0und&=\"value-67890","n":1.10}"#);
    assert_eq!(seen.headers["content-length"], seen.body.len().to_string());
    let form = post("/", "application/x-www-form-urlencoded", "a=b+c&key=guest");
    let (seen, ..) = through(network.clone(), form).await;
    assert_eq!(seen.unwrap().body, "a=b+c&key=b0und%26%3D%22value-67890");
    let (seen, status, ..) = through(network, get("/")).await;
    assert_eq!((seen.unwrap().body.as_str(), status), ("", 200));
}

#[tokio::test]
async fn a_body_that_a_route_can_not_change_is_refused() {
    let network = route("body", json!({"key": "{{SECRET:TOKEN}}"}));
    for (request, status) in [
        (post("/", "application/json", "[1]"), 415),
        (post("/", "application/json", "{"), 415),
        (post("/", "application/octet-stream", "x"), 415),
        (post("/", "application/json", format!("{{\"a\":\"{}\"}}", "x".repeat(2 << 20))), 413),
    ] {
        let (seen, answered, body, told) = through(network.clone(), request).await;
        assert_eq!(answered, status, "{body}");
        assert!(seen.is_none());
        assert_eq!(told[0].verdict, Verdict::Failed);
        assert!(told[0].secrets.is_empty());
    }
    // Of a length that nobody said.
    let (sender, body) = pieces();
    let request =
        Request::post("/").header("host", HOST).header("content-type", "application/json");
    let sending = tokio::spawn(async move {
        while sender.send(Frame::data(Bytes::from(vec![b' '; 64 << 10]))).await.is_ok() {}
    });
    let (seen, status, ..) = through(network, request.body(body).unwrap()).await;
    assert_eq!((status, seen.is_none()), (413, true));
    sending.await.unwrap();
}

#[tokio::test]
async fn a_route_whose_secret_can_not_be_used_is_refused_by_name() {
    for (name, status, code, verdict) in [
        ("MISSING", 502, "no-such-secret", Verdict::Failed),
        ("OTHER", 502, "secret-not-bound", Verdict::Denied),
        ("LINES", 502, "secret-unfit", Verdict::Failed),
        ("BROKEN", 502, "secret-unavailable", Verdict::Failed),
    ] {
        let network = route("headers", json!({"x-key": format!("{{{{SECRET:{name}}}}}")}));
        let (seen, answered, body, told) = through(network, get("/")).await;
        assert_eq!(answered, status);
        assert!(seen.is_none());
        assert!(body.contains(code) && body.contains(name), "{body}");
        assert!(!body.contains("other-value") && !body.contains("evil"), "{body}");
        assert_eq!((told[0].verdict, told[0].rule.clone()), (verdict, format!("secret {name}")));
    }
}

#[tokio::test]
async fn placeholders_of_the_code_are_replaced_where_they_stand() {
    let network = || json!({"secrets": ["BOUND"]});
    let mut request = get("/p/{{SECRET:BOUND}}/q?a=%7B%7BSECRET%3ABOUND%7D%7D&b=1");
    request.headers_mut().insert("x-key", "k={{SECRET:BOUND}};".parse().unwrap());
    let basic = format!("Basic {}", STANDARD.encode("me:{{SECRET:BOUND}}"));
    request.headers_mut().insert("authorization", basic.parse().unwrap());
    let (seen, _, _, told) = through(network(), request).await;
    let seen = seen.unwrap();
    assert_eq!(seen.target, "/p/b0und&=%22value-67890/q?a=b0und%26%3D%22value-67890&b=1");
    assert_eq!(seen.headers["x-key"], "k=b0und&=\"value-67890;");
    let basic = format!("Basic {}", STANDARD.encode("me:b0und&=\"value-67890"));
    assert_eq!(seen.headers["authorization"], basic);
    assert_eq!(told[0].secrets.len(), 1);
    assert_eq!(told[0].path.as_deref(), Some("/p/{{SECRET:BOUND}}/q"));
    for (kind, body, expected) in [
        ("application/json", r#"{"a":"x{{SECRET:BOUND}}y"}"#, r#"{"a":"xb0und&=\"value-67890y"}"#),
        ("text/plain", "<{{SECRET:BOUND}}>", "<b0und&=\"value-67890>"),
        (
            "application/x-www-form-urlencoded",
            "a=%7B%7BSECRET%3ABOUND%7D%7D&b=+",
            "a=b0und%26%3D%22value-67890&b=+",
        ),
        ("application/octet-stream", "{{SECRET:BOUND}}", "{{SECRET:BOUND}}"),
    ] {
        let (seen, ..) = through(network(), post("/", kind, body)).await;
        let seen = seen.unwrap();
        assert_eq!(seen.body, expected, "{kind}");
        assert_eq!(seen.headers["content-length"], expected.len().to_string());
    }
}

#[tokio::test]
async fn placeholders_stay_for_secrets_that_are_not_granted_or_not_bound_here() {
    // Not granted; granted but bound elsewhere; granted but bound to nothing; granted but not there.
    for (granted, name) in [
        (json!([]), "BOUND"),
        (json!(["OTHER"]), "OTHER"),
        (json!(["TOKEN"]), "TOKEN"),
        (json!(["MISSING"]), "MISSING"),
    ] {
        let placeholder = format!("{{{{SECRET:{name}}}}}");
        let mut request = post(&format!("/?a={placeholder}"), "text/plain", placeholder.clone());
        request.headers_mut().insert("x-key", placeholder.parse().unwrap());
        let (seen, status, _, told) = through(json!({"secrets": granted}), request).await;
        let seen = seen.unwrap();
        assert_eq!(status, 200);
        assert_eq!(seen.headers["x-key"], placeholder.as_str());
        assert_eq!(seen.target, format!("/?a={placeholder}"));
        assert_eq!(seen.body, placeholder);
        assert!(told[0].secrets.is_empty());
    }
}

#[tokio::test]
async fn a_value_is_not_looked_through_again() {
    let request = post("/", "text/plain", "{{SECRET:NESTED}}");
    let (seen, ..) = through(json!({"secrets": ["NESTED", "BOUND"]}), request).await;
    assert_eq!(seen.unwrap().body, "{{SECRET:BOUND}}");
}

#[tokio::test]
async fn a_value_can_not_begin_another_header() {
    let mut request = get("/");
    request.headers_mut().insert("x-key", "{{SECRET:LINES}}".parse().unwrap());
    let (seen, status, body, _) = through(json!({"secrets": ["LINES"]}), request).await;
    assert_eq!((seen.is_none(), status), (true, 502));
    assert!(body.contains("LINES") && !body.contains("evil"), "{body}");
}

#[tokio::test]
async fn a_body_full_of_placeholders_does_not_grow_without_end() {
    let many = "{{SECRET:LONG}}".repeat(300);
    let (seen, status, ..) =
        through(json!({"secrets": ["LONG"]}), post("/", "text/plain", many)).await;
    assert_eq!((seen.is_none(), status), (true, 413));
}

#[tokio::test]
async fn a_large_body_passes_with_its_placeholders() {
    let large = format!("{}{{{{SECRET:BOUND}}}}", "x".repeat(1 << 20));
    let (seen, status, ..) =
        through(json!({"secrets": ["BOUND"]}), post("/", "text/plain", large.clone())).await;
    assert_eq!(status, 200);
    assert!(seen.unwrap().body == large);
    // Of a length that nobody said.
    let (sender, body) = pieces();
    let request = Request::post("/").header("host", HOST).header("content-type", "text/plain");
    let sent = large.clone();
    let sending = tokio::spawn(async move {
        for piece in sent.as_bytes().chunks(50_000) {
            sender.send(Frame::data(Bytes::copy_from_slice(piece))).await.unwrap();
        }
    });
    let (seen, ..) = through(json!({"secrets": ["BOUND"]}), request.body(body).unwrap()).await;
    sending.await.unwrap();
    assert!(seen.unwrap().body == large);
}

#[tokio::test]
async fn what_the_server_repeats_does_not_come_back() {
    // Repeats a header in a header, and then, in pieces of two bytes, everything it got.
    let echo = handler(|request| async move {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let authorization = parts.headers["authorization"].clone();
        let all = format!("{} {authorization:?} ", parts.uri);
        let text = authorization.to_str().unwrap().to_owned();
        let all = [all.as_bytes(), text.as_bytes(), b" ", &body].concat();
        let (sender, body) = pieces();
        tokio::spawn(async move {
            for piece in all.chunks(2) {
                drop(sender.send(Frame::data(Bytes::copy_from_slice(piece))).await);
            }
            let mut trailers = HeaderMap::new();
            trailers.insert("x-end", authorization.clone());
            drop(sender.send(Frame::trailers(trailers)).await);
        });
        let answer = Response::builder().header("x-echo", parts.headers["authorization"].clone());
        answer.header("trailer", "x-end").body(body).unwrap()
    });
    let network = json!({
        "secrets": ["BOUND"],
        "routes": [{"hosts": [HOST], "query": {"key": "{{SECRET:TOKEN}}"}}]
    });
    let mut world = World::new(network, SECRETS, echo).await;
    let mut guest = world.http2().await;
    for (authorization, shown) in [
        ("Bearer {{SECRET:BOUND}}".to_owned(), "Bearer [secret BOUND]"),
        (format!("Basic {}", STANDARD.encode("me:{{SECRET:BOUND}}")), "Basic bWU6[secret BOUND]"),
    ] {
        let body = r#"{"a":"{{SECRET:BOUND}}"}"#;
        let mut request = post(&format!("https://{HOST}/x"), "application/json", body);
        request.headers_mut().insert("authorization", authorization.parse().unwrap());
        let answer = guest.send_request(request).await.unwrap();
        assert!(answer.headers()["x-echo"].to_str().unwrap().starts_with(shown));
        let answer = answer.into_body().collect().await.unwrap();
        let end = answer.trailers().unwrap()["x-end"].to_str().unwrap().to_owned();
        assert!(end.starts_with(shown), "{end}");
        let body = String::from_utf8(answer.to_bytes().to_vec()).unwrap();
        assert!(body.contains("key=[secret TOKEN]"), "{body}");
        assert!(body.contains(r#"{"a":"[secret BOUND]"#), "{body}");
        assert!(!body.contains("tok-12345") && !body.contains("b0und"), "{body}");
        assert!(!body.contains(&STANDARD.encode("me:b0und&=\"value-67890")), "{body}");
    }
}

#[tokio::test]
async fn an_answer_without_its_secrets_is_as_long_as_it_says() {
    let echo = handler(|request| async move {
        let value = request.headers()["x-key"].as_bytes().to_vec();
        let body = Bytes::from([&value[..], b"-", &value].concat());
        Response::builder().header("content-length", body.len()).body(full(body)).unwrap()
    });
    let network = route("headers", json!({"x-key": "{{SECRET:TOKEN}}"}));
    let mut world = World::new(network, SECRETS, echo).await;
    let mut guest = world.http1().await;
    for _ in 0..2 {
        guest.ready().await.unwrap();
        let answer = guest.send_request(get("/")).await.unwrap();
        assert_eq!(answer.headers()["content-length"], "31");
        assert_eq!(text(answer).await, "[secret TOKEN]*-[secret TOKEN]*");
    }
    guest.ready().await.unwrap();
    let head = Request::head("/").header("host", HOST).body(empty()).unwrap();
    let answer = guest.send_request(head).await.unwrap();
    assert_eq!(answer.headers()["content-length"], "31");
}

#[tokio::test]
async fn an_upgraded_connection_does_not_give_a_secret_back_either() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let echo = handler(|mut request| async move {
        assert!(!request.headers().contains_key("sec-websocket-extensions"));
        let value = request.headers()["x-key"].as_bytes().to_vec();
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = TokioIo::new(upgrade.await.unwrap());
            stream.write_all(&[b"<", &value[..], b">"].concat()).await.unwrap();
            stream.shutdown().await.unwrap();
        });
        let answer = Response::builder().status(101).header("connection", "upgrade");
        answer.header("upgrade", "websocket").body(empty()).unwrap()
    });
    let network = route("headers", json!({"x-key": "{{SECRET:PLAIN}}"}));
    let mut world = World::plain(network, SECRETS, echo).await;
    let mut guest = world.connect();
    let sent = format!(
        "GET / HTTP/1.1\r\nhost: {HOST}\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-extensions: permessage-deflate\r\n\r\n"
    );
    guest.write_all(sent.as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(Duration::from_secs(10), guest.read_to_string(&mut answer)).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    assert!(answer.ends_with("\r\n\r\n<[secret PLAIN]*>"), "{answer}");
}

//! What is decided about requests, and what the guest and the audit are told.

use std::sync::atomic::Ordering;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use torpor_protocol::egress::{EgressKind, Verdict};

use super::*;

async fn refusal(answer: Response<Incoming>) -> (u16, String, Value) {
    let status = answer.status().as_u16();
    let code = answer.headers()["proxy-error"].to_str().unwrap().to_owned();
    let body: Value = serde_json::from_str(&text(answer).await).unwrap();
    assert_eq!(body["code"], code);
    assert!(body["hint"].is_string());
    (status, code, body)
}

#[tokio::test]
async fn a_request_for_another_host_than_the_connection_is_misdirected() {
    let (handler, seen) = remember();
    let mut world = World::new(json!({}), &[], handler).await;
    let mut guest = world.http1().await;
    let request = Request::get("/").header("host", "other.example.com").body(empty()).unwrap();
    let (status, code, _) = refusal(guest.send_request(request).await.unwrap()).await;
    assert_eq!((status, code.as_str()), (421, "misdirected-request"));
    // The connection goes on.
    guest.ready().await.unwrap();
    assert_eq!(text(guest.send_request(get("/")).await.unwrap()).await, "seen");
    let request = Request::get("https://other.example.com/").body(empty()).unwrap();
    let answer = world.http2().await.send_request(request).await.unwrap();
    assert_eq!(answer.status(), 421);
    assert_eq!(seen.lock().len(), 1);
    let told = world.told_of(3).await;
    let verdicts: Vec<_> = told.iter().map(|told| told.verdict).collect();
    assert_eq!(verdicts, [Verdict::Denied, Verdict::Allowed, Verdict::Denied]);
}

#[tokio::test]
async fn methods_and_paths_are_decided_about_and_the_connection_goes_on() {
    let (handler, seen) = remember();
    let network =
        json!({"allow": ["GET api.example.com/v1/"], "deny": ["api.example.com/v1/admin"]});
    let mut world = World::new(network, &[], handler).await;
    let mut guest = world.http1().await;
    for (request, status) in [
        (get("/v1/models?key=hidden"), 200),
        (get("/v2/models"), 403),
        (get("/v1/admin/x"), 403),
        (get("/v1/%61dmin"), 403),
        (get("/v1/../v2/"), 403),
        (post("/v1/models", "text/plain", "x".repeat(100_000)), 403),
        (get("/v1/again"), 200),
    ] {
        guest.ready().await.unwrap();
        let answer = guest.send_request(request).await.unwrap();
        assert_eq!(answer.status(), status);
        if status == 403 {
            let (_, code, body) = refusal(answer).await;
            assert_eq!(code, "denied-by-policy");
            assert!(body["message"].as_str().unwrap().contains("api.example.com"), "{body}");
        } else {
            text(answer).await;
        }
    }
    let targets: Vec<_> = seen.lock().iter().map(|seen| seen.target.clone()).collect();
    assert_eq!(targets, ["/v1/models?key=hidden", "/v1/again"]);
    let told = world.told_of(7).await;
    assert_eq!(told[0].what, EgressKind::Http);
    assert_eq!(told[0].rule, "GET api.example.com/v1/");
    assert_eq!(told[0].host.as_deref(), Some(HOST));
    assert_eq!(told[0].method.as_deref(), Some("GET"));
    assert_eq!(told[0].path.as_deref(), Some("/v1/models"));
    assert_eq!((told[1].verdict, told[1].rule.as_str()), (Verdict::Denied, "allow"));
    assert_eq!(told[2].rule, "api.example.com/v1/admin");
}

#[tokio::test]
async fn a_server_that_is_not_the_host_is_not_believed() {
    for network in [json!({}), json!({"deny": ["api.example.com/secret"]})] {
        let (handler, seen) = remember();
        let alpn = &["h2", "http/1.1"];
        let mut world = World::with(network, &[], handler, "evil.example.com", alpn).await;
        let mut guest = world.http1().await;
        let (status, code, body) = refusal(guest.send_request(get("/x")).await.unwrap()).await;
        assert_eq!((status, code.as_str()), (502, "upstream-failed"));
        assert!(body["message"].as_str().unwrap().contains("certificate"), "{body}");
        let request = Request::get(format!("https://{HOST}/")).body(empty()).unwrap();
        let answer = world.http2().await.send_request(request).await.unwrap();
        assert_eq!(answer.status(), 502);
        assert!(seen.lock().is_empty());
        let told = world.told_of(2).await;
        assert_eq!((told[0].verdict, told[0].path.as_deref()), (Verdict::Failed, Some("/x")));
    }
}

#[tokio::test]
async fn an_address_that_the_policy_refuses_is_told_as_denied() {
    let (handler, _) = remember();
    let mut world = World::new(json!({}), &[], handler).await;
    let _ = world.wall_off();
    let mut guest = world.http1().await;
    let (status, code, _) = refusal(guest.send_request(get("/")).await.unwrap()).await;
    assert_eq!((status, code.as_str()), (403, "denied-by-policy"));
    let told = world.told_of(1).await;
    assert_eq!((told[0].verdict, told[0].rule.as_str()), (Verdict::Denied, "private"));
}

#[tokio::test]
async fn what_is_not_http_or_names_another_host_gets_no_handshake() {
    let (handler, _) = remember();
    let mut world = World::new(json!({}), &[], handler).await;
    assert!(world.connect_tls(HOST, &["postgresql"]).await.is_err());
    assert!(world.connect_tls("other.example.com", &["h2"]).await.is_err());
    let told = world.told_of(2).await;
    let rules: Vec<_> = told.iter().map(|told| (told.what, told.rule.as_str())).collect();
    assert_eq!(rules, [(EgressKind::Tls, "protocol"), (EgressKind::Tls, "bad host")]);
}

#[tokio::test]
async fn a_guest_that_does_not_trust_us_is_told_of() {
    let (handler, _) = remember();
    let mut world = World::new(json!({}), &[], handler).await;
    world.certificate = server_tls(HOST, &[]).1;
    assert!(world.connect_tls(HOST, &["http/1.1"]).await.is_err());
    let told = world.told_of(1).await;
    assert_eq!((told[0].what, told[0].verdict), (EgressKind::Tls, Verdict::Failed));
    assert_eq!(told[0].rule, "handshake");
}

#[tokio::test]
async fn a_second_request_can_not_hide_in_the_body_of_the_first() {
    for head in [
        "content-length: 5\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 5",
        "content-length: 5\r\ncontent-length: 40",
        "transfer-encoding: chunked, gzip",
    ] {
        let (handler, seen) = remember();
        let mut world = World::plain(json!({"deny": ["api.example.com/no"]}), &[], handler).await;
        let mut guest = world.connect();
        let hidden = format!("GET /no HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n\r\n");
        let sent = format!("POST / HTTP/1.1\r\nhost: {HOST}\r\n{head}\r\n\r\n0\r\n\r\n{hidden}");
        guest.write_all(sent.as_bytes()).await.unwrap();
        let mut answer = String::new();
        guest.read_to_string(&mut answer).await.unwrap();
        let targets: Vec<_> = seen.lock().iter().map(|seen| seen.target.clone()).collect();
        assert!(targets.iter().all(|target| target == "/"), "{head}: {targets:?}");
        for seen in seen.lock().iter() {
            assert_eq!(seen.body, "", "{head}");
            assert!(!seen.headers.contains_key("content-length"), "{head}");
        }
        assert!(answer.matches(" 200 ").count() <= 1, "{head}: {answer}");
    }
}

#[tokio::test]
async fn two_hosts_in_one_request_are_refused() {
    let (handler, seen) = remember();
    let mut world = World::plain(json!({}), &[], handler).await;
    let mut guest = world.connect();
    let sent = format!(
        "GET / HTTP/1.1\r\nhost: {HOST}\r\nhost: other.example.com\r\nconnection: close\r\n\r\n"
    );
    guest.write_all(sent.as_bytes()).await.unwrap();
    let mut answer = String::new();
    guest.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(seen.lock().is_empty());
}

#[tokio::test]
async fn a_connection_that_is_cut_ends_and_its_requests_are_told() {
    let (arrived, mut arrivals) = tokio::sync::mpsc::channel(1);
    let wait = handler(move |_| {
        let arrived = arrived.clone();
        async move {
            arrived.send(()).await.unwrap();
            std::future::pending().await
        }
    });
    let mut world = World::new(json!({}), &[], wait).await;
    let mut guest = world.http1().await;
    let asked = tokio::spawn(async move { guest.send_request(get("/slow")).await.map(drop) });
    timeout(Duration::from_secs(10), arrivals.recv()).await.unwrap().unwrap();
    assert!(world.told().is_empty());
    world.cut();
    let ended = timeout(Duration::from_secs(10), asked).await.unwrap().unwrap();
    assert!(ended.is_err());
    let told = world.told_of(1).await;
    assert_eq!((told[0].verdict, told[0].path.as_deref()), (Verdict::Allowed, Some("/slow")));
}

#[tokio::test]
async fn a_server_that_can_be_reached_again_is_reached_on_the_same_connection() {
    let (handler, _) = remember();
    let mut world = World::new(json!({}), &[], handler).await;
    let reached = world.wall_off();
    let mut guest = world.http1().await;
    assert_eq!(guest.send_request(get("/")).await.unwrap().status(), 403);
    reached.store(true, Ordering::Relaxed);
    guest.ready().await.unwrap();
    assert_eq!(guest.send_request(get("/")).await.unwrap().status(), 200);
}

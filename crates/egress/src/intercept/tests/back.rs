//! What a server kept of a secret does not come back: not later, not elsewhere, not packed, not in parts.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use http_body_util::BodyExt;
use hyper::body::Frame;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use torpor_protocol::egress::Verdict;

use super::versions::pieces;
use super::*;

const VALUE: &str = "k3pt/b0und-67890";
const SECRETS: Secrets = &[
    ("KEPT", VALUE, &["*.example.com", "http://*.example.com"]),
    ("FREE", VALUE, &[]),
    ("ELSEWHERE", VALUE, &["elsewhere.example.org"]),
];

/// A route that gives the secret to other requests than those of the tests.
fn routed(host: &str, secret: &str) -> Value {
    let headers = json!({"x-key": format!("{{{{SECRET:{secret}}}}}")});
    json!({"routes": [{"hosts": [host], "methods": ["PUT"], "headers": headers}]})
}

/// Gives the value away wherever it can, in pieces of three bytes.
fn keeper() -> Handler {
    handler(|_| async {
        let (sender, body) = pieces();
        let all = format!("<{VALUE}|k3pt%2fb0und-67890|{}>", r"k3pt\/b0und-67890");
        tokio::spawn(async move {
            for piece in all.as_bytes().chunks(3) {
                drop(sender.send(Frame::data(Bytes::copy_from_slice(piece))).await);
            }
            let trailers = HeaderMap::from_iter([("x-end".parse().unwrap(), header_of(VALUE))]);
            drop(sender.send(Frame::trailers(trailers)).await);
        });
        let answer = Response::builder().status(500).header("trailer", "x-end");
        let answer = answer.header("location", format!("/?key={VALUE}"));
        answer.header("set-cookie", format!("a={VALUE}; b={VALUE}")).body(body).unwrap()
    })
}

fn header_of(value: &str) -> http::HeaderValue {
    value.parse().unwrap()
}

async fn nothing_comes_back(answer: Response<Incoming>) {
    assert_eq!(answer.headers()["location"], "/?key=[secret KEPT]");
    assert_eq!(answer.headers()["set-cookie"], "a=[secret KEPT]; b=[secret KEPT]");
    let answer = answer.into_body().collect().await.unwrap();
    assert_eq!(answer.trailers().unwrap()["x-end"], "[secret KEPT]");
    let body = String::from_utf8(answer.to_bytes().to_vec()).unwrap();
    assert_eq!(body, "<[secret KEPT]***|[secret KEPT]*****|[secret KEPT]****>");
}

#[tokio::test]
async fn what_a_server_kept_does_not_come_back_with_a_later_answer() {
    // Routed for other requests to this host; for another host; and granted, but not used.
    for network in
        [routed(HOST, "KEPT"), routed("other.example.com", "KEPT"), json!({"secrets": ["KEPT"]})]
    {
        let mut world = World::new(network, SECRETS, keeper()).await;
        let mut guest = world.http2().await;
        let request = Request::get(format!("https://{HOST}/kept")).body(empty()).unwrap();
        nothing_comes_back(guest.send_request(request).await.unwrap()).await;
        let mut request = get("/kept");
        request.headers_mut().insert("te", header_of("trailers"));
        let mut another = world.http1().await;
        nothing_comes_back(another.send_request(request).await.unwrap()).await;
        assert!(world.told_of(2).await.iter().all(|told| told.secrets.is_empty()));
    }
}

#[tokio::test]
async fn a_secret_that_is_not_for_this_host_is_not_looked_for() {
    // Else whoever owns a server could try values.
    for network in [routed("other.example.com", "FREE"), json!({"secrets": ["ELSEWHERE"]})] {
        let mut world = World::new(network, SECRETS, keeper()).await;
        let answer = world.http1().await.send_request(get("/")).await.unwrap();
        assert!(text(answer).await.contains(VALUE));
    }
}

fn packed(coding: &str, plain: &[u8]) -> Vec<u8> {
    match coding {
        "gzip" => {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
            encoder.write_all(plain).unwrap();
            encoder.finish().unwrap()
        }
        "deflate" => {
            let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
            encoder.write_all(plain).unwrap();
            encoder.finish().unwrap()
        }
        other => panic!("{other}"),
    }
}

/// Packs the value, whatever it is asked for, and says so by the path.
fn packer() -> Handler {
    handler(|request| async move {
        let coding = request.uri().path().trim_start_matches('/').to_owned();
        let body = match coding.as_str() {
            "gzip" | "deflate" => packed(&coding, VALUE.repeat(20_000).as_bytes()),
            _ => VALUE.as_bytes().to_vec(),
        };
        let answer = Response::builder().header("content-length", body.len());
        answer.header("content-encoding", coding).body(full(body.into())).unwrap()
    })
}

#[tokio::test]
async fn a_packed_answer_is_unpacked_and_looked_through() {
    let mut world = World::new(routed(HOST, "KEPT"), SECRETS, packer()).await;
    let mut guest = world.http1().await;
    for coding in ["gzip", "deflate"] {
        guest.ready().await.unwrap();
        let answer = guest.send_request(get(&format!("/{coding}"))).await.unwrap();
        assert_eq!(answer.status(), 200);
        assert!(!answer.headers().contains_key("content-encoding"));
        assert_eq!(text(answer).await, "[secret KEPT]***".repeat(20_000), "{coding}");
    }
}

#[tokio::test]
async fn an_answer_in_another_coding_is_refused_where_a_secret_could_be_in_it() {
    for coding in ["br", "zstd", "gzip,gzip"] {
        let mut world = World::new(routed(HOST, "KEPT"), SECRETS, packer()).await;
        let answer = world.http1().await.send_request(get(&format!("/{coding}"))).await.unwrap();
        assert_eq!((answer.status().as_u16(), coding), (502, coding));
        let body = text(answer).await;
        assert!(body.contains("answer-compressed") && body.contains("gzip"), "{body}");
        let told = world.told_of(1).await;
        assert_eq!((told[0].verdict, &*told[0].rule), (Verdict::Failed, "answer-compressed"));
        // Elsewhere it is nobody's business.
        let mut world = World::new(json!({}), SECRETS, packer()).await;
        let answer = world.http1().await.send_request(get(&format!("/{coding}"))).await.unwrap();
        assert_eq!((answer.status().as_u16(), text(answer).await.as_str()), (200, VALUE));
    }
}

#[tokio::test]
async fn a_refusal_does_not_repeat_a_secret() {
    let coded = handler(|_| async {
        let body = full(Bytes::from_static(b"x"));
        Response::builder().header("content-encoding", VALUE).body(body).unwrap()
    });
    let mut world = World::new(routed(HOST, "KEPT"), SECRETS, coded).await;
    let answer = world.http1().await.send_request(get("/")).await.unwrap();
    assert_eq!(answer.status(), 502);
    let body = text(answer).await;
    assert!(body.contains("[secret kept]") && !body.contains(VALUE), "{body}");
}

#[tokio::test]
async fn a_packed_answer_that_breaks_off_breaks_off() {
    let broken = handler(|_| async {
        let mut body = packed("gzip", VALUE.as_bytes());
        body.truncate(body.len() - 6);
        Response::builder().header("content-encoding", "gzip").body(full(body.into())).unwrap()
    });
    let mut world = World::new(routed(HOST, "KEPT"), SECRETS, broken).await;
    let whole = match world.http1().await.send_request(get("/")).await {
        Ok(answer) => answer.into_body().collect().await.is_ok(),
        Err(_) => false,
    };
    assert!(!whole);
}

#[tokio::test]
async fn an_answer_comes_whole_or_not_at_all_where_a_secret_could_be_in_it() {
    let ranged = |request: &Request<Incoming>| request.headers().contains_key("range");
    let server = handler(move |request| {
        let asked = ranged(&request) || request.uri().path() == "/always";
        async move {
            let body = Bytes::from_static(if asked { &VALUE.as_bytes()[..2] } else { b"whole" });
            let status = if asked { 206 } else { 200 };
            Response::builder().status(status).body(full(body)).unwrap()
        }
    });
    let ask = |path: &str| {
        let mut request = get(path);
        for name in ["range", "if-range"] {
            request.headers_mut().insert(name, header_of("bytes=0-1"));
        }
        request
    };
    for (network, path, expected) in [
        (routed(HOST, "KEPT"), "/", (200, "whole")),
        (routed(HOST, "KEPT"), "/always", (502, "answer-partial")),
        (json!({}), "/", (206, "k3")),
    ] {
        let mut world = World::new(network, SECRETS, server.clone()).await;
        let answer = world.http1().await.send_request(ask(path)).await.unwrap();
        let (status, body) = (answer.status().as_u16(), text(answer).await);
        assert!(status == expected.0 && body.contains(expected.1), "{path}: {status} {body}");
    }
}

/// What a WebSocket to a server that kept the value answers.
async fn upgraded(extension: Option<&'static str>) -> String {
    let keeper = handler(move |mut request| async move {
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let Ok(stream) = upgrade.await else { return };
            let mut stream = TokioIo::new(stream);
            drop(stream.write_all(VALUE.as_bytes()).await);
            drop(stream.shutdown().await);
        });
        let mut answer = Response::builder().status(101).header("connection", "upgrade");
        if let Some(extension) = extension {
            answer = answer.header("sec-websocket-extensions", extension);
        }
        answer.header("upgrade", "websocket").body(empty()).unwrap()
    });
    let mut world = World::plain(routed(HOST, "KEPT"), SECRETS, keeper).await;
    let mut guest = world.connect();
    let sent = format!(
        "GET / HTTP/1.1\r\nhost: {HOST}\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    );
    guest.write_all(sent.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let reading = async {
        // Its tunnel ends; an answer of ours is JSON.
        while !answer.ends_with(b"}") && guest.read_buf(&mut answer).await.unwrap() > 0 {}
    };
    timeout(Duration::from_secs(10), reading).await.unwrap();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn an_upgraded_connection_does_not_give_back_what_was_kept() {
    let answer = upgraded(None).await;
    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    assert!(answer.ends_with("\r\n\r\n[secret KEPT]***"), "{answer}");
    let answer = upgraded(Some("permessage-deflate")).await;
    assert!(answer.starts_with("HTTP/1.1 502 ") && answer.contains("permessage"), "{answer}");
}

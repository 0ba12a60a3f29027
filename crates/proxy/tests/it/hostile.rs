//! Requests that two parsers could read in two ways never reach an application as two requests, or
//! under another name.

use std::sync::Arc;

use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use parking_lot::Mutex;

use crate::world::{Application, World, application, text};

type Seen = Arc<Mutex<Vec<String>>>;

/// Notes what it was asked, and by which host, with the body.
async fn witness() -> (Application, Seen) {
    let seen = Seen::default();
    let notes = Arc::clone(&seen);
    let app = application(move |request: Request<Incoming>| {
        let notes = Arc::clone(&notes);
        async move {
            let host = request.headers()["host"].to_str().unwrap().to_owned();
            let target = format!("{} {} {host}", request.method(), request.uri());
            let body = request.into_body().collect().await;
            let body = body.map(|body| body.to_bytes()).unwrap_or_default();
            notes.lock().push(format!("{target} {}", String::from_utf8_lossy(&body)));
            Response::new(text("ok"))
        }
    })
    .await;
    (app, seen)
}

/// What the application saw of these bytes, and what the client was told.
async fn probe(request: &str) -> (Vec<String>, String) {
    let world = World::new().await;
    let (app, seen) = witness().await;
    let request = request.replace("HOST", &format!("{}-web.localhost", app.port));
    let answer = world.raw(request.as_bytes()).await;
    let seen = seen.lock().iter().map(|line| line.replace(&app.port.to_string(), "80")).collect();
    (seen, answer)
}

const NEXT: &str = "GET /next HTTP/1.1\r\nhost: HOST\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn ambiguous_requests_are_refused() {
    for request in [
        // Two lengths.
        "POST / HTTP/1.1\r\nhost: HOST\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nfourX",
        // An encoding that is not the last.
        "POST / HTTP/1.1\r\nhost: HOST\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: HOST\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: HOST\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        // Two hosts.
        "GET / HTTP/1.1\r\nhost: HOST\r\nhost: other\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: other\r\nhost: HOST\r\n\r\n",
        // A target that says something else than the host.
        "GET http://HOST/ HTTP/1.1\r\nhost: other\r\n\r\n",
        // A folded line, a space before the colon, a length that is no number.
        "GET / HTTP/1.1\r\nhost: HOST\r\nx-a: 1\r\n folded\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: HOST\r\ncontent-length : 4\r\n\r\nfour",
        "POST / HTTP/1.1\r\nhost: HOST\r\ncontent-length: +4\r\n\r\nfour",
        "POST / HTTP/1.1\r\nhost: HOST\r\ncontent-length: 4, 5\r\n\r\nfour",
        // An old client can't know chunks.
        "POST / HTTP/1.0\r\nhost: HOST\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ] {
        let (seen, answer) = probe(&format!("{request}{NEXT}")).await;
        assert!(
            answer.starts_with("HTTP/1.1 400") || answer.starts_with("HTTP/1.0 400"),
            "{request:?}: {answer}"
        );
        assert!(seen.iter().all(|line| line.starts_with("GET /next")), "{request:?}: {seen:?}");
    }
}

#[tokio::test]
async fn an_encoding_beside_a_length_wins_and_nothing_more_is_read() {
    for headers in [
        "content-length: 60\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 60",
    ] {
        let request =
            format!("POST / HTTP/1.1\r\nhost: HOST\r\n{headers}\r\n\r\n4\r\nfour\r\n0\r\n\r\n");
        let (seen, answer) = probe(&format!("{request}{NEXT}")).await;
        assert_eq!(seen, ["POST / 80-web.localhost four"]);
        assert!(answer.contains("connection: close"), "{answer}");
    }
}

#[tokio::test]
async fn a_body_that_looks_like_a_request_stays_a_body() {
    let inner = "GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n";
    let request = format!(
        "POST / HTTP/1.1\r\nhost: HOST\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{inner}",
        inner.len()
    );
    let (seen, _) = probe(&request).await;
    assert_eq!(seen, [format!("POST / 80-web.localhost {inner}")]);
}

#[tokio::test]
async fn bare_line_feeds_do_not_reach_an_application() {
    let (seen, _) = probe("GET /a HTTP/1.1\nhost: HOST\nconnection: close\n\n").await;
    // Refused or understood, but written anew: the application parses lines that end as they should.
    assert!(seen.is_empty() || seen == ["GET /a 80-web.localhost "], "{seen:?}");
}

#[tokio::test]
async fn an_absolute_target_is_passed_on_as_its_path() {
    let (seen, _) =
        probe("GET http://HOST/a?b HTTP/1.1\r\nhost: HOST\r\nconnection: close\r\n\r\n").await;
    assert_eq!(seen, ["GET /a?b 80-web.localhost "]);
}

#[tokio::test]
async fn an_answer_with_a_lying_length_is_framed_by_its_encoding() {
    let world = World::new().await;
    let app = crate::world::raw_application(|mut stream| async move {
        let _ = tokio::io::AsyncReadExt::read(&mut stream, &mut [0; 1024]).await;
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n\
            5\r\nwhole\r\n0\r\n\r\n";
        let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, answer).await;
    })
    .await;
    let answer = world.get(app.port, "/").await;
    assert_eq!(answer.header("content-length"), None);
    assert_eq!(answer.text().await, "whole");
}

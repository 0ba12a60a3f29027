//! Both sides understand each other, whatever they speak.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Body as _, Frame};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::*;

/// A body that is sent piece by piece.
pub(super) fn pieces() -> (mpsc::Sender<Frame<Bytes>>, Body) {
    let (sender, receiver) = mpsc::channel(8);
    let stream = futures_util::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|frame| (Ok(frame), receiver))
    });
    (sender, StreamBody::new(stream).boxed_unsync())
}

fn data(text: &'static str) -> Frame<Bytes> {
    Frame::data(Bytes::from_static(text.as_bytes()))
}

async fn next(body: &mut Incoming) -> Option<Frame<Bytes>> {
    timeout(Duration::from_secs(10), body.frame()).await.unwrap().map(Result::unwrap)
}

#[tokio::test]
async fn a_guest_that_trusts_the_ca_reaches_the_server_by_http1() {
    let (handler, seen) = remember();
    let mut world = World::new(json!({}), &[], handler).await;
    let mut guest = world.http1().await;
    for _ in 0..2 {
        guest.ready().await.unwrap();
        let answer = guest.send_request(get("/a/b?c=d")).await.unwrap();
        assert_eq!(text(answer).await, "seen");
    }
    let seen = seen.lock();
    assert_eq!(seen.len(), 2);
    assert_eq!(seen[0].target, "/a/b?c=d");
    assert_eq!(seen[0].headers["host"], HOST);
}

#[tokio::test]
async fn the_guest_is_offered_what_the_server_chose() {
    for (server, guest, spoken) in [
        (&["h2", "http/1.1"][..], &["h2", "http/1.1"][..], Some("h2")),
        (&["http/1.1"], &["h2", "http/1.1"], Some("http/1.1")),
        (&["h2", "http/1.1"], &["http/1.1"], Some("http/1.1")),
        (&[], &["h2", "http/1.1"], Some("http/1.1")),
        (&["h2", "http/1.1"], &[], None),
    ] {
        let (handler, _) = remember();
        let mut world = World::with(json!({}), &[], handler, HOST, server).await;
        let stream = world.connect_tls(HOST, guest).await.unwrap();
        let chosen = stream.get_ref().1.alpn_protocol();
        assert_eq!(chosen, spoken.map(str::as_bytes), "{server:?} {guest:?}");
    }
}

#[tokio::test]
async fn many_requests_go_at_the_same_time_by_http2() {
    let (handler, seen) = remember();
    let mut world = World::new(json!({}), &[], handler).await;
    let guest = world.http2().await;
    let mut asking = JoinSet::new();
    for n in 0..20 {
        let mut guest = guest.clone();
        asking.spawn(async move {
            let target = format!("https://{HOST}/{n}");
            let request = Request::get(target).body(empty()).unwrap();
            text(guest.send_request(request).await.unwrap()).await
        });
    }
    assert!(asking.join_all().await.iter().all(|answer| answer == "seen"));
    assert_eq!(seen.lock().len(), 20);
    assert_eq!(world.told_of(20).await.len(), 20);
}

#[tokio::test]
async fn a_call_of_grpc_streams_both_ways_and_ends_with_trailers() {
    let echo = handler(|request| async move {
        assert_eq!(request.headers()["te"], "trailers");
        let mut incoming = request.into_body();
        let (sender, body) = pieces();
        tokio::spawn(async move {
            while let Some(Ok(frame)) = incoming.frame().await {
                if frame.is_data() && sender.send(frame).await.is_err() {
                    return;
                }
            }
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", "0".parse().unwrap());
            drop(sender.send(Frame::trailers(trailers)).await);
        });
        Response::builder().header("content-type", "application/grpc").body(body).unwrap()
    });
    let mut world = World::new(json!({}), &[], echo).await;
    let mut guest = world.http2().await;
    let (sender, body) = pieces();
    let request = Request::post(format!("https://{HOST}/service/Method"));
    let request = request.header("content-type", "application/grpc").header("te", "trailers");
    sender.send(data("first")).await.unwrap();
    let answer = guest.send_request(request.body(body).unwrap()).await.unwrap();
    let mut back = answer.into_body();
    assert_eq!(next(&mut back).await.unwrap().into_data().unwrap(), "first");
    sender.send(data("second")).await.unwrap();
    assert_eq!(next(&mut back).await.unwrap().into_data().unwrap(), "second");
    drop(sender);
    let trailers = next(&mut back).await.unwrap().into_trailers().unwrap();
    assert_eq!(trailers["grpc-status"], "0");
    assert!(next(&mut back).await.is_none());
}

#[tokio::test]
async fn by_http1_the_first_piece_arrives_before_the_last_is_sent() {
    let echo = handler(|request| async move {
        Response::new(request.into_body().map_err(Into::into).boxed_unsync())
    });
    let mut world = World::new(json!({}), &[], echo).await;
    let mut guest = world.http1().await;
    let (sender, body) = pieces();
    sender.send(data("first")).await.unwrap();
    let request = Request::post("/").header("host", HOST).body(body).unwrap();
    let mut back = guest.send_request(request).await.unwrap().into_body();
    assert_eq!(next(&mut back).await.unwrap().into_data().unwrap(), "first");
    sender.send(data("last")).await.unwrap();
    drop(sender);
    assert_eq!(next(&mut back).await.unwrap().into_data().unwrap(), "last");
    assert!(next(&mut back).await.is_none());
}

#[tokio::test]
async fn much_goes_up_and_comes_down() {
    const MUCH: usize = 8 << 20;
    let echo = handler(|request| async move {
        Response::new(request.into_body().map_err(Into::into).boxed_unsync())
    });
    let mut world = World::new(json!({}), &[], echo).await;
    let much: Bytes = (0..MUCH).map(|n| u8::try_from(n % 251).unwrap()).collect::<Vec<_>>().into();
    let request = post("/", "application/octet-stream", much.clone());
    let answer = world.http1().await.send_request(request).await.unwrap();
    assert_eq!(answer.body().size_hint().exact(), Some(much.len() as u64));
    assert!(answer.into_body().collect().await.unwrap().to_bytes() == much);
    let mut request = post("/", "application/octet-stream", much.clone());
    *request.uri_mut() = format!("https://{HOST}/").parse().unwrap();
    let answer = world.http2().await.send_request(request).await.unwrap();
    assert!(answer.into_body().collect().await.unwrap().to_bytes() == much);
}

#[tokio::test]
async fn a_websocket_goes_through_and_ends_with_its_connection() {
    let echo = handler(|mut request| async move {
        let key = request.headers()["sec-websocket-key"].as_bytes().to_vec();
        let accept = tokio_tungstenite::tungstenite::handshake::derive_accept_key(&key);
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let stream = TokioIo::new(upgrade.await.unwrap());
            let mut socket = WebSocketStream::from_raw_socket(stream, Role::Server, None).await;
            while let Some(Ok(message)) = socket.next().await {
                if message.is_text() && socket.send(message).await.is_err() {
                    return;
                }
            }
        });
        let answer = Response::builder().status(101).header("connection", "upgrade");
        let answer = answer.header("upgrade", "websocket").header("sec-websocket-accept", accept);
        answer.body(empty()).unwrap()
    });
    let mut world = World::new(json!({}), &[], echo).await;
    let stream = world.connect_tls(HOST, &["http/1.1"]).await.unwrap();
    let (mut socket, _) =
        tokio_tungstenite::client_async(format!("wss://{HOST}/chat"), stream).await.unwrap();
    for text in ["hello", "again"] {
        socket.send(Message::text(text)).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap().into_text().unwrap(), text);
    }
    assert_eq!(world.told_of(1).await[0].path.as_deref(), Some("/chat"));
    world.cut();
    let end = timeout(Duration::from_secs(10), socket.next()).await.unwrap();
    assert!(end.is_none_or(|message| message.is_err()));
}

#[tokio::test]
async fn who_waits_to_be_asked_for_its_body_is_asked_only_if_it_may_send_it() {
    let (handler, seen) = remember();
    let mut world = World::plain(json!({"deny": ["POST api.example.com/no"]}), &[], handler).await;
    let mut guest = world.connect();
    let head = |path: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nhost: {HOST}\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n"
        )
    };
    guest.write_all(head("/yes").as_bytes()).await.unwrap();
    let mut buffer = vec![0; 4096];
    let count = guest.read(&mut buffer).await.unwrap();
    assert!(buffer[..count].starts_with(b"HTTP/1.1 100 "));
    guest.write_all(b"body").await.unwrap();
    let count = guest.read(&mut buffer).await.unwrap();
    assert!(buffer[..count].starts_with(b"HTTP/1.1 200 "));
    guest.write_all(head("/no").as_bytes()).await.unwrap();
    let count = guest.read(&mut buffer).await.unwrap();
    assert!(buffer[..count].starts_with(b"HTTP/1.1 403 "));
    let seen = seen.lock();
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].body, "body");
    assert!(!seen[0].headers.contains_key("expect"));
}

#[tokio::test]
async fn a_server_that_hangs_up_between_requests_is_connected_anew() {
    static CONNECTIONS: AtomicUsize = AtomicUsize::new(0);
    let close = handler(|_| async {
        CONNECTIONS.fetch_add(1, Ordering::Relaxed);
        Response::builder().header("connection", "close").body(empty()).unwrap()
    });
    let mut world = World::with(json!({}), &[], close, HOST, &["http/1.1"]).await;
    let mut guest = world.http1().await;
    for _ in 0..3 {
        guest.ready().await.unwrap();
        let answer = guest.send_request(post("/", "text/plain", "x")).await.unwrap();
        assert_eq!(answer.status(), 200);
        assert!(!answer.headers().contains_key("connection"));
        text(answer).await;
    }
    assert_eq!(CONNECTIONS.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn plain_http_is_intercepted_too() {
    let (handler, seen) = remember();
    let mut world = World::plain(json!({}), &[], handler).await;
    let (mut guest, connection) = http1::handshake(TokioIo::new(world.connect())).await.unwrap();
    tokio::spawn(connection);
    let answer = guest.send_request(get("/x")).await.unwrap();
    assert_eq!(text(answer).await, "seen");
    assert_eq!(seen.lock()[0].target, "/x");
}

#[tokio::test]
async fn a_request_of_http_1_0_needs_no_host() {
    let (handler, seen) = remember();
    let mut world = World::plain(json!({}), &[], handler).await;
    let mut guest = world.connect();
    guest.write_all(b"GET /old HTTP/1.0\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    guest.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.0 200 ") && answer.ends_with("seen"), "{answer}");
    assert_eq!(seen.lock()[0].headers["host"], HOST);
}

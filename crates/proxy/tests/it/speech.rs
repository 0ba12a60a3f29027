//! Other ways to speak: upgrades, HTTP/2, gRPC, trailers, interim answers.

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{WebSocketStream, accept_async, client_async};

use crate::world::{
    Body, BoxError, World, application, ask, ask_http2, raw_application, soon, text,
};

async fn websocket_echo(stream: TcpStream) {
    let Ok(mut socket) = accept_async(stream).await else { return };
    while let Some(Ok(message)) = socket.next().await {
        // A close is answered by the next read.
        if !message.is_close() && socket.send(message).await.is_err() {
            return;
        }
    }
}

async fn websocket(world: &World, port: u16) -> WebSocketStream<TcpStream> {
    let url = format!("ws://{port}-web.localhost/socket");
    soon(client_async(url, world.dial().await)).await.unwrap().0
}

#[tokio::test]
async fn a_websocket_speaks_both_ways_and_closes() {
    let world = World::new().await;
    let app = raw_application(websocket_echo).await;
    let mut socket = websocket(&world, app.port).await;
    for message in [Message::text("hello"), Message::binary(vec![7; 300_000])] {
        socket.send(message.clone()).await.unwrap();
        assert_eq!(soon(socket.next()).await.unwrap().unwrap(), message);
    }
    socket.close(None).await.unwrap();
    while let Some(message) = soon(socket.next()).await {
        assert!(message.is_ok_and(|message| message.is_close()));
    }
}

#[tokio::test]
async fn a_websocket_keeps_the_sandbox_leased_until_the_client_leaves() {
    let world = World::new().await;
    let app = raw_application(websocket_echo).await;
    let socket = websocket(&world, app.port).await;
    let sandbox = world.fleet.find(&"web".parse().unwrap()).unwrap();
    // While somebody is inside, the last use is now, whenever one asks.
    let used = |at: u64| sandbox.status().last_used_at_ms > at;
    let at = sandbox.status().last_used_at_ms;
    soon(async {
        while !used(at) {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await
        }
    })
    .await;
    drop(socket);
    soon(async {
        loop {
            let at = sandbox.status().last_used_at_ms;
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            if !used(at) {
                return;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn an_upgrade_that_the_application_declines_is_an_ordinary_answer() {
    let world = World::new().await;
    let app = application(|_| async { Response::new(text("no sockets here")) }).await;
    let request = ask(app.port, "/").header("connection", "upgrade").header("upgrade", "websocket");
    let answer = world.http1(request.body(text("")).unwrap()).await;
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.text().await, "no sockets here");
}

#[tokio::test]
async fn an_application_can_not_switch_protocols_unasked() {
    let world = World::new().await;
    let app = raw_application(|mut stream| async move {
        let _ = stream.read(&mut [0; 1024]).await;
        let switch =
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n";
        let _ = stream.write_all(switch).await;
        let _ = stream.read(&mut [0; 1024]).await;
    })
    .await;
    assert_eq!(world.get(app.port, "/").await.status(), 502);
}

#[tokio::test]
async fn an_http2_client_reaches_an_http1_application() {
    let world = World::new().await;
    let app = application(|request: Request<Incoming>| async move {
        let host = request.headers()["host"].to_str().unwrap().to_owned();
        let cookies = request.headers().get_all("cookie").iter().count();
        Response::new(text(format!("{:?} {host} {cookies}", request.version())))
    })
    .await;
    let request = ask_http2(app.port, "/").header("cookie", "a=1").header("cookie", "b=2");
    let answer = world.http2(request.body(text("")).unwrap()).await;
    let expected = format!("HTTP/1.1 {}-web.localhost 1", app.port);
    assert_eq!(answer.text().await, expected);
}

fn with_trailers(data: &'static str, name: &'static str) -> Body {
    let mut trailers = HeaderMap::new();
    trailers.insert(name, "0".parse().unwrap());
    let frames = [Frame::data(Bytes::from_static(data.as_bytes())), Frame::trailers(trailers)];
    let frames = futures_util::stream::iter(frames.map(Ok::<_, BoxError>));
    StreamBody::new(frames).boxed_unsync()
}

#[tokio::test]
async fn grpc_is_http2_all_the_way_and_keeps_its_trailers() {
    let world = World::new().await;
    let app = application(|request: Request<Incoming>| async move {
        let seen = format!("{:?} {:?}", request.version(), request.headers().get("te"));
        let collected = request.into_body().collect().await.unwrap();
        assert_eq!(collected.trailers().unwrap()["x-asked"], "0");
        Response::builder()
            .header("content-type", "application/grpc")
            .header("x-seen", seen)
            .body(with_trailers("reply", "grpc-status"))
            .unwrap()
    })
    .await;
    let request = ask_http2(app.port, "/pkg.Service/Call")
        .method(Method::POST)
        .header("content-type", "application/grpc+proto")
        .header("te", "trailers");
    let answer = world.http2(request.body(with_trailers("ask", "x-asked")).unwrap()).await;
    assert_eq!(answer.header("x-seen"), Some("HTTP/2.0 Some(\"trailers\")"));
    let collected = soon(answer.response.into_body().collect()).await.unwrap();
    assert_eq!(collected.trailers().unwrap()["grpc-status"], "0");
    assert_eq!(collected.to_bytes(), "reply");
}

#[tokio::test]
async fn a_grpc_call_that_is_given_up_ends_inside() {
    let world = World::new().await;
    let (begun, mut calls) = tokio::sync::mpsc::unbounded_channel();
    let app = application(move |_| {
        let begun = begun.clone();
        async move {
            let (ended, end) = tokio::sync::oneshot::channel::<()>();
            begun.send(end).unwrap();
            std::future::pending::<()>().await;
            drop(ended);
            Response::new(text(""))
        }
    })
    .await;
    let request =
        ask_http2(app.port, "/pkg.Service/Call").header("content-type", "application/grpc");
    let request = request.method(Method::POST).body(text("ask")).unwrap();
    let call = tokio::spawn(async move { world.http2(request).await.status() });
    let end = soon(calls.recv()).await.unwrap();
    call.abort();
    assert!(soon(end).await.is_err(), "the call was dropped, not answered");
}

#[tokio::test]
async fn trailers_of_http1_pass_for_a_client_that_takes_them() {
    let world = World::new().await;
    let app = application(|_| async {
        Response::builder().header("trailer", "x-sum").body(with_trailers("x", "x-sum")).unwrap()
    })
    .await;
    let request = ask(app.port, "/").header("te", "trailers").body(text("")).unwrap();
    let answer = world.http1(request).await;
    let collected = soon(answer.response.into_body().collect()).await.unwrap();
    assert_eq!(collected.trailers().unwrap()["x-sum"], "0");
}

#[tokio::test]
async fn an_interim_answer_does_not_count_as_the_answer() {
    let world = World::new().await;
    let app = raw_application(|mut stream| async move {
        let _ = stream.read(&mut [0; 1024]).await;
        let both = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n\
            HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nfinal";
        stream.write_all(both).await.unwrap();
    })
    .await;
    assert_eq!(world.get(app.port, "/").await.text().await, "final");
}

#[tokio::test]
async fn a_client_that_waits_to_continue_is_told_to() {
    let world = World::new().await;
    let app = application(|request: Request<Incoming>| async move {
        Response::new(request.into_body().map_err(Into::into).boxed_unsync())
    })
    .await;
    let mut client = world.dial().await;
    let head = format!(
        "POST / HTTP/1.1\r\nhost: {}-web.localhost\r\nexpect: 100-continue\r\n\
         content-length: 4\r\nconnection: close\r\n\r\n",
        app.port
    );
    client.write_all(head.as_bytes()).await.unwrap();
    let mut interim = [0; 12];
    soon(client.read_exact(&mut interim)).await.unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100");
    client.write_all(b"body").await.unwrap();
    let mut rest = String::new();
    soon(client.read_to_string(&mut rest)).await.unwrap();
    assert!(rest.contains("HTTP/1.1 200") && rest.ends_with("body"), "{rest}");
}

//! Bodies of any size and pace go through as they come, both ways.

use std::sync::Arc;

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Notify, mpsc};

use crate::world::{
    Body, BoxError, World, application, ask, ask_http2, fed, raw_application, soon, text,
};

/// Sends back what it gets, as it gets it.
async fn echo(request: Request<Incoming>) -> Response<Body> {
    Response::new(request.into_body().map_err(Into::into).boxed_unsync())
}

#[tokio::test]
async fn a_request_and_its_answer_are_passed_on() {
    let world = World::new().await;
    let app = application(|request: Request<Incoming>| async move {
        let seen = format!("{} {}", request.method(), request.uri());
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let builder = Response::builder().status(418).header("x-seen", seen);
        builder.body(text(body)).unwrap()
    })
    .await;
    let request = ask(app.port, "/a%2Fb?c=d&e").method(Method::POST).body(text("hello")).unwrap();
    let answer = world.http1(request).await;
    assert_eq!((answer.status(), answer.header("x-seen")), (418, Some("POST /a%2Fb?c=d&e")));
    assert_eq!(answer.text().await, "hello");
}

#[tokio::test]
async fn what_is_for_no_sandbox_is_for_the_api() {
    let world = World::new().await;
    let request = Request::builder().uri("/v1/info").header("host", "localhost").body(text(""));
    assert_eq!(world.http1(request.unwrap()).await.text().await, "the api");
}

#[tokio::test]
async fn a_header_finds_the_port_too_and_stays_outside() {
    let world = World::new().await;
    let app = application(|request: Request<Incoming>| async move {
        Response::new(text(format!("{:?}", request.headers().get("x-torpor-preview"))))
    })
    .await;
    let request = Request::builder()
        .header("host", "localhost")
        .header("x-torpor-preview", format!("{}-web", app.port));
    let answer = world.http1(request.body(text("")).unwrap()).await;
    assert_eq!(answer.text().await, "None");
}

/// 64 MiB that are not all the same.
fn large() -> (Body, usize, u64) {
    const CHUNK: usize = 64 * 1024;
    const COUNT: usize = 1024;
    let chunk = |n: usize| Bytes::from(vec![(n % 251) as u8; CHUNK]);
    let sum = (0..COUNT).map(|n| (n % 251) as u64 * CHUNK as u64).sum();
    let frames = (0..COUNT).map(move |n| Ok::<_, BoxError>(Frame::data(chunk(n))));
    let body = StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync();
    (body, CHUNK * COUNT, sum)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_body_arrives_whole_in_both_directions() {
    let world = World::new().await;
    let app = application(echo).await;
    let (body, size, sum) = large();
    let request = ask(app.port, "/").method(Method::PUT).body(body).unwrap();
    let mut answer = world.http1(request).await;
    let (mut got, mut got_sum) = (0, 0u64);
    loop {
        let chunk = answer.chunk().await;
        if chunk.is_empty() {
            break;
        }
        got += chunk.len();
        got_sum += chunk.iter().map(|byte| u64::from(*byte)).sum::<u64>();
    }
    assert_eq!((got, got_sum), (size, sum));
}

#[tokio::test]
async fn a_slow_answer_arrives_piece_by_piece() {
    let world = World::new().await;
    let go_on = Arc::new(Notify::new());
    let waits = Arc::clone(&go_on);
    let app = application(move |_| {
        let waits = Arc::clone(&waits);
        async move {
            let (sender, body) = fed();
            tokio::spawn(async move {
                sender.send("data: 1\n\n").await.unwrap();
                waits.notified().await;
                sender.send("data: 2\n\n").await.unwrap();
            });
            Response::builder().header("content-type", "text/event-stream").body(body).unwrap()
        }
    })
    .await;
    let mut answer = world.get(app.port, "/events").await;
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    assert_eq!(answer.chunk().await, "data: 1\n\n");
    go_on.notify_one();
    assert_eq!(answer.chunk().await, "data: 2\n\n");
    assert_eq!(answer.chunk().await, "");
}

#[tokio::test]
async fn a_slow_upload_arrives_piece_by_piece() {
    let world = World::new().await;
    let (arrived, mut arrivals) = mpsc::unbounded_channel();
    let app = application(move |mut request: Request<Incoming>| {
        let arrived = arrived.clone();
        async move {
            while let Some(frame) = request.body_mut().frame().await {
                arrived.send(frame.unwrap().into_data().unwrap()).unwrap();
            }
            Response::new(text("done"))
        }
    })
    .await;
    let (sender, body) = fed();
    let request = ask(app.port, "/").method(Method::POST).body(body).unwrap();
    let uploading = tokio::spawn(async move { world.http1(request).await.text().await });
    for piece in ["one", "two"] {
        sender.send(piece).await.unwrap();
        assert_eq!(soon(arrivals.recv()).await.unwrap(), piece);
    }
    drop(sender);
    assert_eq!(soon(uploading).await.unwrap(), "done");
}

#[tokio::test]
async fn a_get_may_have_a_body_of_unknown_size() {
    let world = World::new().await;
    let app = application(echo).await;
    let (sender, body) = fed();
    tokio::spawn(async move { sender.send("query").await });
    let request = ask_http2(app.port, "/").method(Method::GET).body(body).unwrap();
    assert_eq!(world.http2(request).await.text().await, "query");
}

#[tokio::test]
async fn an_answer_to_head_has_its_length_and_no_body() {
    let world = World::new().await;
    let app = application(|_| async { Response::new(text("twelve bytes")) }).await;
    let request = ask(app.port, "/").method(Method::HEAD).body(text("")).unwrap();
    let answer = world.http1(request).await;
    assert_eq!((answer.status(), answer.header("content-length")), (200, Some("12")));
    assert_eq!(answer.text().await, "");
}

#[tokio::test]
async fn an_answer_that_nothing_changed_has_no_body() {
    let world = World::new().await;
    let app = raw_application(|mut stream| async move {
        let _ = stream.read(&mut [0; 1024]).await;
        let answer = b"HTTP/1.1 304 Not Modified\r\netag: x\r\ncontent-length: 12\r\n\r\n";
        stream.write_all(answer).await.unwrap();
    })
    .await;
    let answer = world.get(app.port, "/").await;
    assert_eq!((answer.status(), answer.header("etag")), (304, Some("x")));
    assert_eq!(answer.text().await, "");
}

#[tokio::test]
async fn an_answer_that_ends_with_its_connection_is_whole() {
    let world = World::new().await;
    let app = raw_application(|mut stream| async move {
        let _ = stream.read(&mut [0; 1024]).await;
        stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nold school").await.unwrap();
    })
    .await;
    assert_eq!(world.get(app.port, "/").await.text().await, "old school");
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_not_taken_for_a_whole_one() {
    let world = World::new().await;
    let app = raw_application(|mut stream| async move {
        let _ = stream.read(&mut [0; 1024]).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nfour").await.unwrap();
    })
    .await;
    let mut answer = world.get(app.port, "/").await;
    assert!(soon(answer.response.body_mut().collect()).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_requests_at_once_all_get_their_own_answer() {
    let world = Arc::new(World::new().await);
    let app = application(echo).await;
    let mut asking = tokio::task::JoinSet::new();
    for n in 0..200 {
        let (world, port) = (Arc::clone(&world), app.port);
        asking.spawn(async move {
            let body = format!("number {n} ").repeat(500);
            let request = ask(port, "/").method(Method::POST).body(text(body.clone())).unwrap();
            assert_eq!(world.http1(request).await.text().await, body);
        });
    }
    let mut answered = 0;
    while let Some(answer) = soon(asking.join_next()).await {
        answer.unwrap();
        answered += 1;
    }
    assert_eq!(answered, 200);
}

/// Says when its connection ended.
async fn until_closed(
    mut stream: tokio::net::TcpStream,
    first: &'static [u8],
    ended: mpsc::Sender<()>,
) {
    let mut buffer = [0; 4096];
    let _ = stream.read(&mut buffer).await;
    ended.send(()).await.unwrap();
    stream.write_all(first).await.unwrap();
    while stream.read(&mut buffer).await.is_ok_and(|size| size > 0) {}
    ended.send(()).await.unwrap();
}

#[tokio::test]
async fn a_client_that_leaves_before_the_answer_ends_the_request_inside() {
    let world = World::new().await;
    let (ended, mut ends) = mpsc::channel(2);
    let app = raw_application(move |stream| until_closed(stream, b"", ended.clone())).await;
    let mut client = world.dial().await;
    let request = format!("GET / HTTP/1.1\r\nhost: {}-web.localhost\r\n\r\n", app.port);
    client.write_all(request.as_bytes()).await.unwrap();
    soon(ends.recv()).await.unwrap();
    drop(client);
    soon(ends.recv()).await.unwrap();
}

#[tokio::test]
async fn a_client_that_leaves_in_the_middle_of_the_answer_ends_it_inside() {
    let world = World::new().await;
    let (ended, mut ends) = mpsc::channel(2);
    const FIRST: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nfour";
    let app = raw_application(move |stream| until_closed(stream, FIRST, ended.clone())).await;
    let mut answer = world.get(app.port, "/").await;
    assert_eq!(answer.chunk().await, "four");
    soon(ends.recv()).await.unwrap();
    drop(answer);
    soon(ends.recv()).await.unwrap();
}
